// A run as one watches it: progress, time left, memory, speed, warnings, and the buttons that stop it.

import { byId, element, facts, show } from './dom.js';
import { about, allocation, bytes, count, duration, percent } from './format.js';
import { throttled } from './throttle.js';

const TITLE = document.title;

export class Run {
  #progress = null;
  #blocks = 0;
  #done = 0;
  #stopped = false;
  #draw = throttled(() => this.#render());

  /** Begins: `what` is a line that says of what and how. */
  begin(what) {
    this.#progress = null;
    this.#blocks = 0;
    this.#done = 0;
    this.#stopped = false;
    byId('run').querySelector('.progress').hidden = false;
    byId('run-what').textContent = what;
    byId('run-title').textContent = 'Quantizing';
    byId('run-warnings').replaceChildren();
    byId('run-warnings').hidden = true;
    byId('block-dots').replaceChildren();
    facts(byId('run-facts'), []);
    for (const id of ['run-progress', 'block-progress']) byId(id).value = 0;
    byId('run-percent').textContent = '0 %';
    byId('block-name').textContent = 'This block';
    byId('block-stage').textContent = '';
    show(byId('run-status'), 'Reading the model and the calibration text …');
    this.#buttons({ pause: true, cancel: true });
    document.title = `0 % – ${TITLE}`;
  }

  /** Any event of the run. */
  hear(event) {
    switch (event.type) {
      case 'measuring':
        show(byId('run-status'), `Measuring what bits are worth: block ${Math.min(event.block + 1, event.blocks)} of ${event.blocks}`
          + `, ${percent(event.fraction, 0)}${event.seconds_left === null ? '' : `, ${about(event.seconds_left)} left`}`);
        break;
      case 'allocated':
        byId('run-what').textContent += ` · ${allocation(event)}`;
        break;
      case 'verifying':
        show(byId('run-status'), `Reading the finished blocks again, ${percent(event.fraction, 0)}.`);
        break;
      case 'started':
        this.#blocks = event.blocks;
        this.#done = event.done;
        show(byId('run-status'), null);
        byId('block-dots').replaceChildren(...Array.from({ length: event.blocks }, () => element('i')));
        break;
      case 'replaying':
        show(byId('run-status'), `Block ${event.block + 1} was finished before: it is applied to the text again.`);
        break;
      case 'progress':
        this.#progress = event;
        this.#blocks = event.blocks;
        break;
      case 'warning':
        byId('run-warnings').append(element('li', {}, event.text));
        byId('run-warnings').hidden = false;
        break;
      case 'block_done':
        this.#done = event.block + 1;
        show(byId('run-status'), null);
        say(`Block ${this.#done} of ${event.blocks} done${this.#left(', ')}.`);
        break;
      case 'paused':
        show(byId('run-status'), 'Paused. Nothing is lost.');
        this.#buttons({ resume: true, cancel: true });
        say('Paused.');
        break;
      case 'resumed':
        show(byId('run-status'), null);
        this.#buttons({ pause: true, cancel: true });
        say('Going on.');
        break;
    }
    this.#draw();
  }

  /** Between a press on Pause and the safe point where it takes effect. */
  stopping(text) {
    show(byId('run-status'), text);
    this.#buttons({});
  }

  finish({ seconds }) {
    this.#stopped = true;
    this.#done = this.#blocks;
    byId('run-title').textContent = `Quantized in ${duration(seconds)}`;
    show(byId('run-status'), null);
    byId('run').querySelector('.progress').hidden = true;
    this.#buttons({});
    this.#render();
    document.title = `Done – ${TITLE}`;
    say('The model is quantized.');
  }

  /** Stopped on request, or by a fault that the message tells. `resumable`: Resume will go on. */
  stop(text, resumable) {
    this.#stopped = true;
    byId('run-title').textContent = 'Stopped';
    const kept = resumable && this.#done > 0 && `${this.#done} of ${this.#blocks} blocks are finished and kept; Resume goes on after them.`;
    show(byId('run-status'), [text, kept].filter(Boolean).join(' '));
    byId('run-percent').textContent = this.#progress ? percent(this.#progress.fraction, 0) : '';
    this.#buttons({ resume: resumable, again: true });
    document.title = `Stopped – ${TITLE}`;
    say('Stopped.');
  }

  leave() {
    document.title = TITLE;
  }

  #left(before) {
    const left = this.#progress?.seconds_left;
    return left === null || left === undefined ? '' : `${before}${about(left)} left`;
  }

  #buttons({ pause = false, resume = false, cancel = false, again = false }) {
    const focused = document.activeElement;
    for (const [id, on] of Object.entries({ pause, resume, cancel, again })) byId(id).hidden = !on;
    // A button that goes away must not take the keyboard's place with it.
    if (focused?.hidden) (byId('run').querySelector('.buttons button:not([hidden])') ?? byId('run-title')).focus();
  }

  #render() {
    Array.from(byId('block-dots').children).forEach((dot, at) => {
      dot.className = at < this.#done ? 'done' : at === this.#progress?.block && !this.#stopped ? 'now' : '';
    });
    const progress = this.#progress;
    if (!progress) return;
    if (!this.#stopped) {
      byId('run-progress').value = progress.fraction;
      byId('block-progress').value = progress.block_fraction;
      byId('run-percent').textContent = `${percent(progress.fraction, 0)}${this.#left(', ')}`;
      byId('block-name').textContent = `Block ${progress.block + 1} of ${progress.blocks}`;
      byId('block-stage').textContent = progress.stage;
      document.title = `${percent(progress.fraction, 0)} – ${TITLE}`;
    }
    facts(byId('run-facts'), [
      ['Time', duration(progress.seconds)],
      ['Speed', `${count(progress.tokens_per_second)} tokens/s`, 'calibration tokens times blocks a second'],
      ['Wasm memory', bytes(progress.wasm_bytes), 'never shrinks, so this is the peak'],
      ['Device memory', progress.device_bytes ? bytes(progress.device_bytes) : null],
    ]);
  }
}

/** For screen readers. */
function say(text) {
  byId('say').textContent = text;
}
