// Perplexity of the model before and after, on the same text.

import { byId, element, show } from './dom.js';
import { count, duration, percent } from './format.js';
import { guarded } from './message.js';
import { keepAwake } from './awake.js';

const form = byId('perplexity');

export class Perplexity {
  #core;
  #scores = null;
  #stored = null;
  #parts = [];
  #share = [0, 1];

  constructor(core) {
    this.#core = core;
    form.elements.text.onchange = () => { byId('perplexity-own').hidden = form.elements.text.value !== 'own'; };
    form.onsubmit = (event) => {
      event.preventDefault();
      guarded(() => this.#measure());
    };
    byId('stop-measure').onclick = () => core.tell({ type: 'cancel' });
  }

  /** `{before?, after}` as events `score`, or `null`. */
  get scores() {
    return this.#scores;
  }

  /** Of what: a stored result by its name, or the last one (`null`); `before`: the model it was made from is open. */
  about({ stored, before }) {
    this.#stored = stored;
    this.#parts = before ? ['before', 'after'] : ['after'];
    byId('evaluate-what').textContent = before ? '' : 'To compare it with the model that it was made from, open that model first.';
    byId('measure').textContent = before ? 'Measure before and after' : 'Measure';
    this.#reset();
  }

  #reset() {
    this.#scores = null;
    byId('perplexity-result').replaceChildren();
  }

  /** Event `scoring`. */
  hear({ fraction }) {
    const [start, share] = this.#share;
    byId('perplexity-progress').value = start + fraction * share;
  }

  async #measure() {
    const builtin = form.elements.text.value === 'builtin';
    const files = builtin ? undefined : [...form.elements.files.files];
    if (files && !files.length) throw new Error('no text is chosen. Choose a .txt or .jsonl file');
    const ask = (which) => this.#core.ask(
      { type: 'evaluate', which, builtin, max_tokens: Number(form.elements.max_tokens.value), stored: this.#stored }, { files });
    this.#reset();
    this.#busy(true);
    try {
      const scores = {};
      for (const [at, which] of this.#parts.entries()) {
        this.#share = [at / this.#parts.length, 1 / this.#parts.length];
        scores[which] = await ask(which);
      }
      this.#scores = scores;
      byId('perplexity-result').replaceChildren(...sentences(this.#scores));
    } catch (error) {
      // The person pressed Stop.
      if (error.code !== 130) throw error;
    } finally {
      this.#busy(false);
    }
  }

  #busy(on) {
    byId('measure').disabled = on;
    byId('stop-measure').hidden = !on;
    byId('perplexity-progress').hidden = !on;
    byId('perplexity-progress').value = 0;
    keepAwake(on);
    if (on) show(byId('say'), 'Measuring.');
  }
}

/** The two figures, large, and what they mean. */
export function sentences({ before, after }) {
  const figure = (name, value) => element('div', {}, element('dt', {}, name), element('dd', {}, value));
  const figures = [];
  if (before) {
    const change = after.perplexity / before.perplexity - 1;
    figures.push(
      figure('Before', before.perplexity.toFixed(3)),
      figure('After', after.perplexity.toFixed(3)),
      figure('Change', `${change < 0 ? '−' : '+'}${percent(Math.abs(change), 2)}`));
  } else figures.push(figure('Perplexity', after.perplexity.toFixed(3)));
  return [
    element('dl', { className: 'facts big' }, ...figures),
    element('p', { className: 'quiet' },
      `Over ${count(after.tokens)} predicted tokens, in ${duration((before?.seconds ?? 0) + after.seconds)}. Lower is better.`),
  ];
}
