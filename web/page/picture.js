// A corner of the layer just quantized: its weights in continuous tone, its codes as printed dots, and what
// is left between the two.

import { byId } from './dom.js';
import { throttled } from './throttle.js';

const CELL = 4;

export class Picture {
  #latest = null;
  #draw = throttled(() => this.#render());

  constructor() {
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.#draw());
  }

  /** @param weights the event `weights`, or `null` for an empty picture */
  set(weights) {
    this.#latest = weights;
    byId('picture').hidden = !weights;
    if (weights) this.#draw();
  }

  /** The three squares as data URLs with their texts, for the report. */
  images() {
    if (!this.#latest) return [];
    this.#render();
    return ['weights', 'codes', 'errors'].map((name) =>
      [byId(`picture-${name}-text`).textContent, byId(`picture-${name}`).toDataURL('image/png')]);
  }

  get module() {
    return this.#latest?.module ?? '';
  }

  #render() {
    const { module, rows, cols, bits, weights, codes, errors } = this.#latest;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const tones = { paper: colour('--paper'), above: colour('--ink'), below: colour('--accent') };
    byId('picture-module').textContent = `${module}, first ${rows} × ${cols}`;
    const largest = tone(byId('picture-weights'), rows, cols, weights, tones);
    print(byId('picture-codes'), rows, cols, codes, 2 ** bits - 1, tones);
    const left = tone(byId('picture-errors'), rows, cols, errors, tones);
    byId('picture-weights-text').textContent = `weights, ±${largest.toPrecision(2)}`;
    byId('picture-codes-text').textContent = `codes, 0 to ${2 ** bits - 1}`;
    byId('picture-errors-text').textContent = `error, ±${left.toPrecision(2)}`;
  }
}

function paper(canvas, rows, cols, { paper }) {
  canvas.width = cols * CELL;
  canvas.height = rows * CELL;
  const context = canvas.getContext('2d');
  context.fillStyle = paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  return context;
}

/** Zero is paper; the largest magnitude is full colour, one for each sign. Returns that magnitude. */
function tone(canvas, rows, cols, values, tones) {
  const context = paper(canvas, rows, cols, tones);
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  for (let at = 0; at < rows * cols && largest > 0; at += 1) {
    context.globalAlpha = Math.abs(values[at]) / largest;
    context.fillStyle = values[at] < 0 ? tones.below : tones.above;
    context.fillRect((at % cols) * CELL, Math.floor(at / cols) * CELL, CELL, CELL);
  }
  return largest;
}

/** The higher the code, the larger the dot, its area in proportion. */
function print(canvas, rows, cols, codes, highest, tones) {
  const context = paper(canvas, rows, cols, tones);
  context.fillStyle = tones.above;
  for (let at = 0; at < rows * cols; at += 1) {
    const radius = CELL * 0.56 * Math.sqrt(codes[at] / highest);
    context.beginPath();
    context.arc((at % cols + 0.5) * CELL, (Math.floor(at / cols) + 0.5) * CELL, radius, 0, 2 * Math.PI);
    context.fill();
  }
}
