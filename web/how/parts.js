// What several lessons use: questions to the worker, fields, the choice of a layer, colours.

import { power } from '../page/charts.js';
import { element, show } from '../page/dom.js';
import { count } from '../page/format.js';
import { guarded } from '../page/message.js';

/**
 * A function that asks the worker and passes the answer on. While an answer is awaited only the newest
 * question is kept: a slider asks faster than a layer is quantized.
 */
export function asker({ core, running }, host) {
  const status = element('p', { className: 'quiet working', hidden: true });
  status.setAttribute('role', 'status');
  host.append(status);
  let next = null;
  let busy = false;
  const hear = ({ type, fraction }) => {
    if (type === 'scoring') show(status, `Working … ${Math.round(fraction * 100)}\u00a0%`);
  };
  return async (request, answered) => {
    next = { request, answered };
    if (busy) return;
    busy = true;
    host.classList.add('busy');
    while (next) {
      const { request, answered } = next;
      next = null;
      // A short answer should not flicker.
      const late = setTimeout(() => show(status, running() ? 'This waits for the run that is under way …' : 'Working …'), 150);
      const done = await guarded(async () => {
        const answer = await core.ask({ type: 'lesson', ...request }, { hear });
        if (!next) answered(answer);
        return true;
      });
      clearTimeout(late);
      show(status, done || next ? null : 'With these numbers it cannot be done; the message says why.');
    }
    busy = false;
    host.classList.remove('busy');
  };
}

export const text = (...parts) => element('p', {}, ...parts);
export const formula = (...parts) => element('p', { className: 'formula' }, ...parts);
export const sub = (inner) => element('sub', {}, inner);
export const sup = (inner) => element('sup', {}, inner);

/** A labelled field. */
export const labelled = (label, input) => element('label', {}, label, input);

/** A labelled `<select>` of `[value, text]`; values are told as strings. */
export function select(label, options, value, changed) {
  const input = element('select', {}, ...options.map(([value, text]) => element('option', { value: String(value) }, text)));
  input.value = String(value);
  input.onchange = () => changed(input.value);
  return Object.assign(labelled(label, input), { input });
}

export function number(label, value, { min, max, step = 'any' }, changed) {
  const input = element('input', { type: 'number', value: String(value), step: String(step) });
  if (min !== undefined) input.min = String(min);
  if (max !== undefined) input.max = String(max);
  input.oninput = () => { if (input.value !== '' && input.checkValidity()) changed(input.valueAsNumber); };
  return Object.assign(labelled(label, input), { input });
}

/** Radio buttons of `[value, text]` in one row. */
let groups = 0;
export function radios(legend, options, value, changed) {
  const name = `how-choice-${groups++}`;
  const labels = options.map(([of, text]) => {
    const input = element('input', { type: 'radio', name, value: String(of), checked: of === value });
    input.onchange = () => changed(of);
    return element('label', {}, input, ` ${text}`);
  });
  return element('fieldset', { className: 'choice' }, element('legend', {}, legend), ...labels);
}

export function slider(label, { min, max, step = 1, value }, changed) {
  const input = element('input', { type: 'range', min: String(min), max: String(max), step: String(step), value: String(value) });
  input.oninput = () => changed(input.valueAsNumber);
  return Object.assign(labelled(label, input), { input });
}

export const button = (label, onclick, className = 'plain') => element('button', { type: 'button', className, onclick }, label);

const SHORT = (module) => module.replace(/^model\.layers\.(\d+)\.(\w+\.)?/, 'block $1 · ');

/** The choice of model, layer and text; shared by the lessons on layers. `changed()` after a choice. */
export class LayerChoice {
  #shared;
  #ask;
  #changed;
  #model;
  #layer;
  #tokens;
  #note = element('p', { className: 'quiet' });
  /** What the list of layers was made for. */
  #listed = null;
  #known = null;

  constructor(shared, host, ask, changed) {
    this.#shared = shared;
    this.#ask = ask;
    this.#changed = changed;
    this.#model = select('Model', [['false', 'demo model']], 'false', (own) => this.#take({ own: own === 'true', module: null }));
    this.#layer = select('Layer', [], '', (module) => this.#take({ module }));
    this.#tokens = select('Calibrated with', [256, 1024, 4096].map((tokens) => [tokens, `${count(tokens)} tokens`]), 1024,
      (tokens) => this.#take({ tokens: Number(tokens) }));
    host.append(element('div', { className: 'fields' }, this.#model, this.#layer, this.#tokens), this.#note);
  }

  /** Lists what is missing and has the lesson drawn if anything is other than before. */
  async shown() {
    const { model, place } = this.#shared;
    const open = model();
    if (!open && place.own) Object.assign(place, { own: false, module: null });
    this.#model.input.replaceChildren(element('option', { value: 'false' }, 'demo model'));
    if (open && open.quantized_bits === null) {
      this.#model.input.append(element('option', { value: 'true' }, open.name === 'demo' ? 'the open model (demo)' : open.name));
    }
    this.#model.input.value = String(place.own);
    this.#tokens.input.value = String(place.tokens);
    const key = place.own ? `own ${open.name}` : 'demo';
    if (this.#listed === key) return this.#draw();
    return this.#ask({ lesson: 'layers', own: place.own }, ({ layers }) => {
      this.#listed = key;
      this.#layers = layers;
      this.#layer.input.replaceChildren(...layers.map(({ module, rows, columns }) =>
        element('option', { value: module }, `${SHORT(module)}, ${rows} × ${columns}`)));
      this.#draw();
    });
  }

  #layers = [];

  #take(change) {
    Object.assign(this.#shared.place, change);
    this.shown();
  }

  #draw() {
    const { place } = this.#shared;
    const layer = this.#layers.find(({ module }) => module === place.module) ?? this.#layers[0];
    place.module = layer.module;
    this.#layer.input.value = place.module;
    const rows = layer.rows > 256 ? `the first 256 of its ${layer.rows} rows` : `all of its ${layer.rows} rows`;
    this.#note.textContent = `H comes from ${count(place.tokens)} tokens of the built-in calibration sample, run through the original `
      + `blocks before it; a real run takes more. ${layer.routed ? 'Of these only the tokens count that the router sends to this expert. ' : ''}Looked at: ${rows}. “Held-out” is 1,024 tokens of other text.`;
    const key = JSON.stringify(place);
    if (this.#known !== key) {
      this.#known = key;
      this.#changed();
    }
  }
}

/** Bits, group and scales, as several lessons have them. `with` names those wanted. */
export function settings(setting, wanted, changed) {
  const set = (name, value) => {
    setting[name] = value;
    changed();
  };
  const all = {
    bits: () => select('Bits', [2, 3, 4, 8].map((bits) => [bits, bits]), setting.bits, (bits) => set('bits', Number(bits))),
    group_size: () => select('Group', [32, 64, 128, -1].map((size) => [size, size < 0 ? 'whole row' : size]), setting.group_size,
      (size) => set('group_size', Number(size))),
    search: () => select('Scales', [['true', 'searched'], ['false', 'min–max']], setting.search, (on) => set('search', on === 'true')),
  };
  return element('div', { className: 'fields' }, ...wanted.map((name) => all[name]()));
}

export const usual = (more) => ({ bits: 3, group_size: 64, sym: true, search: true, damp_percent: 0.01, ...more });

/** A table; the first column names the row. `rows` are arrays of strings, or `{ cells, mark }`. */
export function table(caption, head, rows) {
  const line = (row) => {
    const { cells, mark } = Array.isArray(row) ? { cells: row } : row;
    const [name, ...values] = cells;
    return element('tr', { className: mark ? 'marked' : '' }, element('th', { scope: 'row', className: 'text' }, name),
      ...values.map((value) => element('td', {}, value)));
  };
  const heads = head.map((name, at) => element('th', { scope: 'col', className: at ? '' : 'text' }, name));
  const made = element('table', {}, element('caption', {}, caption), element('thead', {}, element('tr', {}, ...heads)),
    element('tbody', {}, ...rows.map(line)));
  const scroll = element('div', { className: 'wide-table', tabIndex: 0 }, made);
  scroll.setAttribute('role', 'region');
  scroll.setAttribute('aria-label', caption);
  return scroll;
}

/** A figure with a caption; `inner` is drawn into. */
export const figure = (caption, ...inner) => element('figure', {}, element('figcaption', {}, caption), ...inner);

/** An SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) {
    // The page's policy allows styles by script only.
    if (name === 'style') node.style.cssText = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const dark = matchMedia('(prefers-color-scheme: dark)');

/** Runs `draw` again when the colours change. */
export const onColours = (draw) => dark.addEventListener('change', () => draw());

/** `[r, g, b]` of a CSS variable such as `--ink`. */
export function rgb(name) {
  const colour = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

/** Fills a canvas of `columns` × `rows` pixels; `colour(at)` gives `[r, g, b]`. */
export function paint(canvas, columns, rows, colour) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext('2d');
  const image = context.createImageData(columns, rows);
  for (let at = 0; at < columns * rows; at += 1) {
    image.data.set(colour(at), at * 4);
    image.data[at * 4 + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

export const mix = (from, to, share) => from.map((value, at) => value + (to[at] - value) * share);

/** A loss: four figures. */
export const short = (value) => (value === 0 ? '0' : value >= 0.001 && value < 1e5 ? String(+value.toPrecision(4)) : value.toExponential(2));
/** −0.05 with a true minus. */
export const signed = (value, digits) => (Object.is(+value.toFixed(digits), -0) ? 0 : value).toFixed(digits).replace('-', '−');

/** Labels of a logarithmic axis; uPlot asks for some that it leaves out, too. */
export const ticks = (_, values) => values.map((value) => (value === null ? '' : power(value)));
