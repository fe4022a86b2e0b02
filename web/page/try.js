// Text from the result and from the model that it was made from, side by side, one after the other.

import { byId, element, show } from './dom.js';
import { bytes, count } from './format.js';
import { guarded } from './message.js';
import { keepAwake } from './awake.js';
import { throttled } from './throttle.js';

const form = byId('prompt');

const ENDS = {
  end: '', max_tokens: '; cut there as asked', context: '; cut at the end of the context', stopped: '; stopped',
};

/** Tokens of a prompt from which on the speed of reading means something. */
const WORTH_A_RATE = 8;

export class Try {
  #core;
  #busy;
  #device;
  #stored = null;
  #sides = [];
  /** The next message begins a conversation. */
  #anew = true;
  #stopped = false;

  /** `device()` is what to compute on; `busy(on)` hears when the worker begins and ends to generate. */
  constructor(core, { device, busy }) {
    this.#core = core;
    this.#device = device;
    this.#busy = busy;
    form.onsubmit = (event) => {
      event.preventDefault();
      guarded(() => this.#generate());
    };
    for (const radio of form.elements.kind) radio.onchange = () => this.#begin();
    byId('stop-generating').onclick = () => {
      this.#stopped = true;
      core.tell({ type: 'cancel' });
    };
    byId('new-conversation').onclick = () => this.#begin();
    // As in other chats; a new line is Shift and Enter.
    form.elements.prompt.onkeydown = (event) => {
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing || !this.#chatting) return;
      event.preventDefault();
      if (!byId('generate').disabled) form.requestSubmit();
    };
  }

  /** Of what: a stored result or the last one (`null`); `before` and `after` are titles, `before` `null` if it is not open. */
  about({ stored, before, after }) {
    this.#stored = stored;
    this.#sides = [before && new Side('before', before), new Side('after', after)].filter(Boolean);
    byId('try-which').hidden = !before;
    byId('sides').replaceChildren(...this.#sides.map(({ node }) => node));
    this.#begin();
  }

  get #chatting() {
    return form.elements.kind.value === 'chat';
  }

  #begin() {
    this.#anew = true;
    byId('new-conversation').hidden = true;
    byId('prompt-label').textContent = this.#chatting ? 'Message' : 'Beginning of the text';
    for (const side of this.#sides) side.clear();
  }

  async #generate() {
    const field = (name) => form.elements[name].value;
    const chat = this.#chatting;
    const wanted = field('which');
    const sides = this.#sides.filter(({ which }) => this.#sides.length === 1 || wanted === 'both' || wanted === which);
    const request = {
      type: 'generate', stored: this.#stored, prompt: field('prompt'), chat, anew: this.#anew,
      max_tokens: Number(field('max_new_tokens')), temperature: Number(field('temperature')), top_k: Number(field('top_k')),
      top_p: Number(field('top_p')), seed: Number(field('text_seed')), device: this.#device(),
    };
    if (!request.prompt.trim()) throw new Error('there is no text to begin with. Write some');
    this.#stopped = false;
    this.#working(true);
    try {
      for (const side of sides) side.begin(request.prompt, chat);
      for (const side of sides) {
        if (this.#stopped) side.end('not asked');
        else await side.answer(this.#core, request);
      }
      if (chat) {
        this.#anew = false;
        byId('new-conversation').hidden = false;
        form.elements.prompt.value = '';
      }
    } catch (error) {
      for (const side of sides) side.end('no answer');
      // The person pressed Stop while a model was loaded.
      if (error.code !== 130) throw error;
    } finally {
      this.#working(false);
    }
  }

  #working(on) {
    this.#busy(on);
    byId('stop-generating').hidden = !on;
    for (const node of form.querySelectorAll('input[name="kind"], select, #new-conversation')) node.disabled = on;
    keepAwake(on);
    show(byId('say'), on ? 'Generating.' : 'The text is there.');
  }
}

/** One model's texts. */
class Side {
  #said = element('div', { className: 'said', tabIndex: 0 });
  #speed = element('p', { className: 'quiet speed' });
  #text = '';
  #target = null;
  #tokens = 0;
  #first = 0;
  #open = false;
  #draw = throttled(() => this.#render(), 60);

  constructor(which, title) {
    this.which = which;
    this.#said.setAttribute('role', 'region');
    this.#said.setAttribute('aria-label', `Text of ${title}`);
    this.node = element('article', {}, element('h3', {}, title), this.#speed, this.#said);
  }

  clear() {
    this.#said.replaceChildren();
    this.#target = null;
    this.#speed.textContent = 'Nothing generated yet.';
  }

  /** A prompt waits for its answer. */
  begin(prompt, chat) {
    if (!chat) this.#said.replaceChildren();
    this.#target = document.createTextNode('');
    this.#text = '';
    this.#open = true;
    if (chat) {
      this.#said.append(element('p', { className: 'you' }, prompt), element('p', { className: 'answer' }, this.#target));
    } else {
      this.#said.append(element('p', { className: 'answer' }, element('span', { className: 'given' }, prompt), this.#target));
    }
    this.#speed.textContent = 'Waiting …';
  }

  async answer(core, request) {
    this.#tokens = 0;
    const hear = (event) => {
      if (event.type === 'scoring') this.#speed.textContent = 'Loading the model …';
      if (event.type === 'reading') this.#speed.textContent = `Reading, ${count(event.done)} of ${count(event.of)} tokens …`;
      if (event.type !== 'token') return;
      this.#text += event.text;
      this.#tokens += 1;
      if (this.#tokens === 1) this.#first = performance.now();
      this.#draw();
    };
    const done = await core.ask({ ...request, which: this.which }, { hear });
    this.#render();
    const rate = done.tokens_per_second === null ? '' : ` at ${done.tokens_per_second.toFixed(1)} tokens/s`;
    const read = done.prompt_tokens - done.reused_tokens;
    const prefill = read < WORTH_A_RATE ? '' : ` at ${done.prefill_tokens_per_second.toFixed(1)} tokens/s`;
    this.end(`${count(read)} ${read === 1 ? 'token' : 'tokens'} read${prefill}, ${count(done.tokens)} generated${rate}${ENDS[done.finish]}. `
      + `${bytes(done.wasm_bytes)} of wasm memory${done.device_bytes ? `, ${bytes(done.device_bytes)} on the GPU` : ''}.`);
  }

  end(text) {
    if (this.#open) this.#speed.textContent = text;
    this.#open = false;
  }

  #render() {
    if (!this.#target) return;
    this.#target.data = this.#text;
    this.#said.scrollTop = this.#said.scrollHeight;
    const seconds = (performance.now() - this.#first) / 1000;
    if (this.#open && this.#tokens > 1) this.#speed.textContent = `${((this.#tokens - 1) / seconds).toFixed(1)} tokens/s`;
  }
}
