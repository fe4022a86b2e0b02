// 1: a weight of four by four, one column at a time.

import { element } from '../page/dom.js';
import { asker, button, formula, number, radios, select, signed, sub, sup, svg, table, text } from './parts.js';

const START = {
  w: [[0.10, 2.50, -0.30, 0.05], [-0.20, 3.20, 0.15, -0.08], [0.40, -2.80, 0.25, 0.12], [-0.15, 2.10, -0.40, 0.06]],
  h: [[2, 0.5, 0.1, 0.2], [0.5, 8, 0.3, 0.4], [0.1, 0.3, 1.5, 0.2], [0.2, 0.4, 0.2, 1]],
  inputs: [0.5, 4, 0.3, 0.2],
};
const NAMES = {
  rtn_tensor: 'Round to nearest, one scale for all',
  awq_tensor: 'AWQ (α = 0.5), one scale for all',
  rtn_column: 'Round to nearest, a scale per column',
  cholesky: 'GPTQ, Cholesky factor of H⁻¹',
  inverse_rows: 'Rows of H⁻¹, not conditioned',
  inverse_rows_rounded: 'The same, H⁻¹ to two decimals',
};
const SPREADS = [['cholesky', 'Cholesky factor U (GPTQ)'], ['inverse_rows', 'rows of H⁻¹'], ['inverse_rows_rounded', 'rows of H⁻¹, two decimals']];

export class Example {
  #asked = { ...structuredClone(START), bits: 4, order: [0, 1, 2, 3], damp_percent: 0, alpha: 0.5, spread: 'cholesky' };
  #at = 0;
  #answer = null;
  #ask;
  #walk = element('div', { className: 'wide-table' });
  #said = text();
  #table = element('div');
  #why = element('p', { className: 'quiet' });
  #buttons;
  #inputs = element('div');

  constructor(shared, host) {
    const explain = element('div', { className: 'explain' },
      text('GPTQ rounds one column of the weight at a time. What rounding changes in the layer’s output, the columns still to come '
        + 'take back, as far as their inputs go together with this one’s. H says how far: it sums up the inputs.'),
      formula('e = w', sub('j'), ' − ŵ', sub('j'), ',  w', sub('k'), ' ← w', sub('k'), ' − e · U', sub('jk'), ' / U', sub('jj'),
        ' for k > j,  where H', sup('−1'), ' = U', sup('T'), 'U'),
      text('Each column’s scale is its largest |w| / 7 when its turn comes; halves are rounded away from zero.'),
      radios('Errors spread by', SPREADS, 'cholesky', (spread) => this.#change({ spread })), this.#why);
    this.#buttons = ['Start', 'Back', 'Next'].map((label, index) => button(label, () => this.#go([-9, -1, 1][index])));
    this.#buttons[2].className = '';
    const stepper = element('div', { className: 'buttons' }, ...this.#buttons);
    this.#said.setAttribute('aria-live', 'polite');
    const walk = element('div', { tabIndex: 0, onkeydown: (event) => this.#key(event) }, this.#walk);
    walk.setAttribute('role', 'group');
    walk.setAttribute('aria-label', 'The weight; arrow keys step through its columns');
    const own = element('details', {}, element('summary', {}, 'Numbers of your own'), this.#inputs);
    const right = element('div', {}, walk, stepper, this.#said, this.#table);
    host.append(element('div', { className: 'two' }, explain, right), own);
    this.#ask = asker(shared, right);
    this.#fields();
    this.#change({});
  }

  #change(change) {
    Object.assign(this.#asked, change);
    this.#ask({ lesson: 'example', ...this.#asked }, (answer) => {
      this.#answer = answer;
      this.#go(0);
      this.#compare();
    });
  }

  #go(by) {
    if (!this.#answer) return;
    const { steps } = this.#answer;
    this.#at = Math.min(Math.max(this.#at + by, 0), steps.length);
    this.#buttons[0].disabled = this.#buttons[1].disabled = this.#at === 0;
    this.#buttons[2].disabled = this.#at === steps.length;
    this.#draw();
  }

  #key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -9, End: 9 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.#go(by);
  }

  #draw() {
    const { steps } = this.#answer;
    const { w, order } = this.#asked;
    const n = order.length;
    const step = steps[this.#at - 1];
    const done = new Map(steps.slice(0, this.#at).map((step) => [step.column, step]));
    const now = (row, column) => (step ? step.after[row * n + column] : w[row][column]);
    const kind = (column) => (column === step?.column ? 'now' : done.has(column) ? 'done' : step ? 'pushed' : '');
    const head = (column) => {
      const taken = order.indexOf(column) + 1;
      const share = step && !done.has(column) ? `takes ${signed(-step.factors[column], 4)} e` : column === step?.column ? 'rounded' : '';
      return element('th', { scope: 'col' }, `column ${column + 1}`, element('small', {}, share || `turn ${taken}`));
    };
    const cell = (row, column) => {
      const value = signed(now(row, column), 3);
      const own = done.get(column);
      const small = own
        ? `code ${signed(own.codes[row], 0)}, e ${signed(own.errors[row], 3)}`
        : step ? `was ${signed(this.#at > 1 ? steps[this.#at - 2].after[row * n + column] : w[row][column], 3)}` : '';
      return element('td', { className: kind(column) }, value, element('small', {}, small));
    };
    const columns = w[0].map((_, column) => column);
    const rows = w.map((_, row) => element('tr', {}, ...columns.map((column) => cell(row, column))));
    const made = element('table', { className: 'walk' }, element('thead', {}, element('tr', {}, ...columns.map(head))), element('tbody', {}, ...rows));
    made.setAttribute('aria-label', step ? `The weight after ${this.#at} of ${n} columns` : 'The weight before the first column');
    this.#walk.replaceChildren(this.#arcs(step, columns, done), made);
    this.#said.textContent = step
      ? `Turn ${this.#at} of ${n}, column ${step.column + 1}: scale ${step.scales[0].toFixed(4)}, codes ${step.codes.map((code) => signed(code, 0)).join(', ')}. `
        + (this.#at < n ? 'Its errors e go to the columns still to come, times the factors above them.' : 'No column is left to take this error.')
      : 'The weight as it is. Next rounds the first column.';
  }

  /** Where the error goes: from the column just rounded to each that is still to come; thicker is more. */
  #arcs(step, columns, done) {
    const n = columns.length;
    const picture = svg('svg', { class: 'arcs', viewBox: `0 0 ${n * 100} 48`, preserveAspectRatio: 'none', 'aria-hidden': 'true' });
    if (!step) return picture;
    const from = step.column * 100 + 50;
    const most = Math.max(...step.factors.map(Math.abs), 1e-9);
    for (const column of columns) {
      if (done.has(column)) continue;
      const to = column * 100 + 50;
      const weight = 1 + 4 * Math.abs(step.factors[column]) / most;
      picture.append(svg('path', { d: `M${from},46 C${from},2 ${to},2 ${to},38`, style: `stroke-width:${weight.toFixed(1)}` }),
        svg('polygon', { points: `${to - 7},36 ${to + 7},36 ${to},47` }));
    }
    return picture;
  }

  #compare() {
    const { methods } = this.#answer;
    const shown = this.#asked.spread;
    const rows = methods.map(({ name, output_error, hessian_error }) => ({
      cells: [NAMES[name].replace('0.5', String(this.#asked.alpha)), output_error.toFixed(3), hessian_error.toFixed(3)], mark: name === shown,
    }));
    const made = table('Squared output error of the whole weight', ['method', 'for the inputs a', 'tr(E·H·Eᵀ)'], rows);
    made.id = 'example-figures';
    this.#table.replaceChildren(made);
    const [, , , gptq, rows_, rounded] = methods.map(({ output_error }) => output_error.toFixed(3));
    this.#why.textContent = 'The first row of H⁻¹ is right for the first column only. Once a column is rounded it cannot move any more, so the '
      + 'others need the inverse of what is left of H: row j of U is row j of that inverse, over √ of its first element. Rows of the whole H⁻¹ '
      + 'still count on columns that are fixed already '
      + `(${rows_} instead of ${gptq}), and two decimals lose the rest (${rounded}). The first error is for one input a, the second, over all inputs, is what GPTQ makes small; with a scale that `
      + 'moves with the errors neither is promised to fall.';
  }

  #fields() {
    const asked = this.#asked;
    const grid = (name, matrix, changed) => {
      const rows = matrix.map((row, i) => element('tr', {}, ...row.map((value, j) => {
        const input = element('input', { type: 'number', step: 'any', value: String(value), required: true });
        input.setAttribute('aria-label', matrix.length > 1 ? `${name}, row ${i + 1}, column ${j + 1}` : `${name}, column ${j + 1}`);
        input.oninput = () => { if (input.value !== '') changed(i, j, input.valueAsNumber, input); };
        return element('td', {}, input);
      })));
      return element('div', { className: 'wide-table' }, element('h4', {}, name), element('table', { className: 'numbers' }, element('tbody', {}, ...rows)));
    };
    const h = grid('H', asked.h, (i, j, value) => {
      asked.h[i][j] = asked.h[j][i] = value;
      h.querySelectorAll('input')[j * asked.h.length + i].value = String(value);
      this.#change({});
    });
    const order = element('input', { type: 'text', value: asked.order.map((column) => column + 1).join(' '), inputMode: 'numeric' });
    order.onchange = () => this.#change({ order: order.value.split(/[\s,]+/).filter(Boolean).map((number) => Number(number) - 1) });
    this.#inputs.replaceChildren(
      element('div', { className: 'pair' },
        grid('W', asked.w, (i, j, value) => { asked.w[i][j] = value; this.#change({}); }), h),
      grid('Inputs a', [asked.inputs], (_, j, value) => { asked.inputs[j] = value; this.#change({}); }),
      element('div', { className: 'fields' },
        select('Bits', [2, 3, 4, 5, 6, 8].map((bits) => [bits, bits]), asked.bits, (bits) => this.#change({ bits: Number(bits) })),
        element('label', {}, 'Order of columns', order),
        number('Damping (× mean diagonal)', asked.damp_percent, { min: 0, max: 10 }, (damp_percent) => this.#change({ damp_percent })),
        number('α of AWQ', asked.alpha, { min: 0, max: 2 }, (alpha) => this.#change({ alpha }))),
      element('div', { className: 'buttons' }, button('Back to the example', () => {
        Object.assign(asked, structuredClone(START), { bits: 4, order: [0, 1, 2, 3], damp_percent: 0, alpha: 0.5 });
        this.#fields();
        this.#change({});
      })));
  }
}
