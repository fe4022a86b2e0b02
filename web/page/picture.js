// A corner of the layer just quantized: its weights in continuous tone, its codes as printed dots, and what
// is left between the two.

import { byId } from './dom.js';
import { throttled } from './throttle.js';

/** Pixels that a code's dot has for itself. */
const CELL = 4;

export class Picture {
  #latest = null;
  /** A frame draws one of the three. */
  #draws = Object.keys(SQUARES).map((name) => throttled(() => this.#render(name), 300));

  constructor() {
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.#draw());
  }

  /** @param weights the event `weights`, or `null` for an empty picture */
  set(weights) {
    this.#latest = weights;
    byId('picture').hidden = !weights;
    if (weights) this.#draw();
  }

  #draw() {
    for (const draw of this.#draws) draw();
  }

  /** The three squares as data URLs with their texts, for the report. */
  images() {
    if (!this.#latest) return [];
    return Object.keys(SQUARES).map((name) => {
      this.#render(name);
      return [byId(`picture-${name}-text`).textContent, byId(`picture-${name}`).toDataURL('image/png')];
    });
  }

  get module() {
    return this.#latest?.module ?? '';
  }

  #render(name) {
    if (!this.#latest) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (of) => style.getPropertyValue(of).trim();
    const tones = { paper: colour('--paper'), above: colour('--ink'), below: colour('--accent') };
    byId('picture-module').textContent = `${this.#latest.module}, first ${this.#latest.rows} × ${this.#latest.cols}`;
    byId(`picture-${name}-text`).textContent = SQUARES[name](byId(`picture-${name}`), this.#latest, tones);
  }
}

/** How each square is drawn; what stands under it comes back. */
const SQUARES = {
  weights: (canvas, { rows, cols, weights }, tones) => `weights, ±${tone(canvas, rows, cols, weights, tones).toPrecision(2)}`,
  codes: (canvas, { rows, cols, codes, bits }, tones) => {
    print(canvas, rows, cols, codes, 2 ** bits - 1, tones);
    return `codes, 0 to ${2 ** bits - 1}`;
  },
  errors: (canvas, { rows, cols, errors }, tones) => `error, ±${tone(canvas, rows, cols, errors, tones).toPrecision(2)}`,
};

/** `#rrggbb` as three numbers. */
const rgb = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

/** A pixel a value: zero is paper, the largest magnitude full colour, one for each sign. Returns that magnitude. */
function tone(canvas, rows, cols, values, tones) {
  canvas.width = cols;
  canvas.height = rows;
  const context = canvas.getContext('2d');
  const image = context.createImageData(cols, rows);
  const { data } = image;
  const [paper, above, below] = [tones.paper, tones.above, tones.below].map(rgb);
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  for (let at = 0; at < values.length; at += 1) {
    const share = largest > 0 ? Math.abs(values[at]) / largest : 0;
    const full = values[at] < 0 ? below : above;
    for (let channel = 0; channel < 3; channel += 1) {
      data[at * 4 + channel] = paper[channel] + share * (full[channel] - paper[channel]);
    }
    data[at * 4 + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return largest;
}

/** The higher the code, the larger the dot, its area in proportion. */
function print(canvas, rows, cols, codes, highest, tones) {
  canvas.width = cols * CELL;
  canvas.height = rows * CELL;
  const context = canvas.getContext('2d');
  const image = context.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  const stamps = dots(highest, tones);
  codes.forEach((code, at) => {
    const corner = (Math.floor(at / cols) * canvas.width + at % cols) * CELL;
    for (let y = 0; y < CELL; y += 1) {
      for (let x = 0; x < CELL; x += 1) pixels[corner + y * canvas.width + x] = stamps[(code * CELL + y) * CELL + x];
    }
  });
  context.putImageData(image, 0, 0);
}

const stamped = new Map();

/** Each code's dot, CELL × CELL pixels one after another. Thousands of circles a picture would take too long. */
function dots(highest, { paper, above }) {
  const key = [highest, paper, above].join();
  if (!stamped.has(key)) stamped.set(key, strike(highest, paper, above));
  return stamped.get(key);
}

function strike(highest, paper, ink) {
  const strip = new OffscreenCanvas(CELL, CELL * (highest + 1));
  const context = strip.getContext('2d', { willReadFrequently: true });
  context.fillStyle = paper;
  context.fillRect(0, 0, strip.width, strip.height);
  context.fillStyle = ink;
  for (let code = 0; code <= highest; code += 1) {
    context.save();
    context.beginPath();
    context.rect(0, code * CELL, CELL, CELL);
    context.clip();
    context.beginPath();
    context.arc(CELL / 2, (code + 0.5) * CELL, CELL * 0.56 * Math.sqrt(code / highest), 0, 2 * Math.PI);
    context.fill();
    context.restore();
  }
  return new Uint32Array(context.getImageData(0, 0, strip.width, strip.height).data.buffer);
}
