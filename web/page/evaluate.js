// How good a result is: its perplexity, and beside the model that it was made from, where and how much it differs.

import { byId, element, show } from './dom.js';
import { BlockErrors } from './charts.js';
import { count, duration, percent } from './format.js';
import { guarded } from './message.js';
import { keepAwake } from './awake.js';

const form = byId('evaluation');

export class Evaluation {
  #core;
  #busy;
  #device;
  #stored = null;
  #before = false;
  #outcome = null;
  #chart = new BlockErrors(byId('errors-chart'));

  /** `device()` is what to compute on; `busy(on)` hears when the worker begins and ends to measure. */
  constructor(core, { device, busy }) {
    this.#core = core;
    this.#device = device;
    this.#busy = busy;
    form.elements.text.onchange = () => { byId('evaluation-own').hidden = form.elements.text.value !== 'own'; };
    form.onsubmit = (event) => {
      event.preventDefault();
      guarded(() => this.#measure());
    };
    byId('stop-measure').onclick = () => core.tell({ type: 'cancel' });
  }

  /** The last answer, `compared` or `score`, or `null`. */
  get outcome() {
    return this.#outcome;
  }

  /** A PNG of the chart as a data URL, or `null`. */
  image() {
    return this.#outcome?.blocks?.length ? this.#chart.image() : null;
  }

  /** Of what: a stored result by its name, or the last one (`null`); `before`: the model it was made from is open. */
  about({ stored, before }) {
    this.#stored = stored;
    this.#before = before;
    byId('evaluation-parting').hidden = !before;
    show(byId('evaluate-what'), before ? null : 'To compare it with the model that it was made from, open that model first.');
    byId('measure').textContent = before ? 'Compare before and after' : 'Measure';
    this.#show(null);
  }

  #show(outcome) {
    this.#outcome = outcome;
    byId('evaluate-result').replaceChildren(...(outcome ? sentences(outcome) : []));
    const blocks = outcome?.blocks ?? [];
    byId('errors').hidden = blocks.length === 0;
    if (blocks.length) this.#chart.set(blocks);
  }

  async #measure() {
    const builtin = form.elements.text.value === 'builtin';
    const files = builtin ? undefined : [...form.elements.files.files];
    if (files && !files.length) throw new Error('no text is chosen. Choose a .txt or .jsonl file');
    const request = {
      type: this.#before ? 'compare' : 'evaluate', which: 'after', stored: this.#stored, builtin,
      max_tokens: Number(form.elements.max_tokens.value), continuations: form.elements.continuations.checked, device: this.#device(),
    };
    const passages = [...form.elements.passages.files];
    const hear = (event) => { if (event.type === 'scoring') byId('evaluate-progress').value = event.fraction; };
    this.#show(null);
    this.#working(true);
    try {
      const outcome = await this.#core.ask(request, { files, hear });
      this.#show(outcome);
      if (!passages.length) return;
      byId('evaluate-progress').value = 0;
      const words = { type: 'last_words', before: this.#before, stored: this.#stored, device: this.#device() };
      this.#show({ ...outcome, words: await this.#core.ask(words, { files: passages, hear }) });
    } catch (error) {
      // The person pressed Stop.
      if (error.code !== 130) throw error;
    } finally {
      this.#working(false);
    }
  }

  #working(on) {
    this.#busy(on);
    byId('stop-measure').hidden = !on;
    byId('evaluate-progress').hidden = !on;
    byId('evaluate-progress').value = 0;
    keepAwake(on);
    show(byId('say'), on ? 'Measuring.' : 'Measured.');
  }
}

const signed = (share, digits) => `${share < 0 ? '−' : '+'}${percent(Math.abs(share), digits)}`;

const parting = ({ parting: { value }, same, prompts, tokens }) =>
  ['Texts part after', `${value.toFixed(1)} tokens`, `${same} of ${prompts} never in ${tokens}`];

/** The share of passages whose last word each model foretells. */
function foretold({ models }) {
  const names = models.length > 1 ? ['Last word right before', 'Last word right after'] : ['Last word right'];
  return models.map(({ accuracy: { value, interval } }, at) =>
    [names[at], percent(value), interval && `${percent(interval[0])} to ${percent(interval[1])}`]);
}

const passagesRead = ({ passages, skipped, seconds }) => `Last words of ${count(passages)} ${passages === 1 ? 'passage' : 'passages'}, in `
  + `${duration(seconds)}${skipped ? `; ${count(skipped)} ${skipped === 1 ? 'row has' : 'rows have'} fewer than two words` : ''}.`;

/** The figures, large, and what they mean; for the page and the report. @param outcome the event `compared` or `score` */
export function sentences(outcome) {
  const quiet = (text) => element('p', { className: 'quiet' }, text);
  const list = (rows) => element('dl', { className: 'facts big' }, ...rows.map(([name, value, under]) => element('div', {},
    element('dt', {}, name), element('dd', {}, value), ...(under ? [element('dd', { className: 'under' }, under)] : []))));
  const over = `Over ${count(outcome.tokens)} predicted tokens, in ${duration(outcome.seconds)}.`;
  const words = outcome.words ? foretold(outcome.words) : [];
  const under = outcome.words ? ` ${passagesRead(outcome.words)}` : '';
  if (outcome.type === 'score') {
    return [list([['Perplexity', outcome.perplexity.toFixed(3)], ...words]), quiet(`${over} Lower is better.${under}`)];
  }
  /** A value and its interval, if there is one. */
  const row = (name, { value, interval }, text) => [name, text(value), interval && `${text(interval[0])} to ${text(interval[1])}`];
  const [before, after] = outcome.perplexity;
  return [
    list([
      row('Perplexity before', before, (value) => value.toFixed(3)),
      row('Perplexity after', after, (value) => value.toFixed(3)),
      row('Change', outcome.ratio, (value) => signed(value - 1, 2)),
      row('Same likeliest token', outcome.agreement, (value) => percent(value)),
      row('KL divergence', outcome.kl, (value) => value.toPrecision(3)),
      ['99 % of it below', outcome.kl_99.toPrecision(3)],
      ...(outcome.continuations ? [parting(outcome.continuations)] : []),
      ...words,
    ]),
    quiet(`${over} Perplexity: lower is better. KL divergence: how far the predicted probabilities moved, in nats; 0 for `
      + `equal models.${outcome.ratio.interval ? ' Below the figures their 95 % intervals.' : ''}${under}`),
  ];
}
