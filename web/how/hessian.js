// 3: the Hessian, its factor, and damping.

import { Chart, axis, line, powers } from '../page/charts.js';
import { element } from '../page/dom.js';
import { LayerChoice, asker, button, figure, formula, mix, onColours, paint, radios, rgb, select, settings, short, slider, sub, sup, table, text, ticks, usual } from './parts.js';

/** Shades go from this much to 1. */
const LEAST = 1e-2;
const DAMPINGS = [1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1];

export class Hessian {
  #shared;
  #setting = usual();
  #view = { matrix: 'correlation', taken: 'natural', damp_percent: 0.01, row: 0, column: 0, size: 1e6 };
  #askView;
  #askDamping;
  #choice;
  #canvas = element('canvas', { className: 'heat', tabIndex: 0 });
  #scale = element('canvas');
  #said = element('p', { className: 'quiet' });
  #cells = null;
  #damped = null;
  #pivots;
  #losses;
  #damping;
  #table = element('div');

  constructor(shared, host) {
    this.#shared = shared;
    const explain = element('div', { className: 'explain' },
      text('H sums up which inputs of the layer go together. Where two columns’ inputs rise and fall alike, one can make up for the other’s rounding error: those are the strongest '
        + 'cells off the diagonal.'),
      formula('H = (2/tokens) · X', sup('T'), 'X,  shown: |H', sub('ij'), '| / √(H', sub('ii'), ' H', sub('jj'), ')'),
      text('Its factor R tells what GPTQ needs. The square of a pivot, R', sub('jj'), '², is what is left of column j’s inputs once the columns taken after it have told what they can. Its row '
        + 'holds with which of those it goes together.'),
      formula('H + λI = R · R', sup('T'), ',  λ = damping · mean diag(H)'),
      text('With few tokens, inputs seem to tell each other exactly: pivots come close to 0 and errors are spread by what was only chance. Damping lifts the pivots. Too little loses on text that '
        + 'H has not seen, too much makes GPTQ round to nearest.'));
    const right = element('div');
    host.append(element('div', { className: 'two' }, explain, right));
    this.#askView = asker(shared, right);
    this.#askDamping = asker(shared, right);
    this.#choice = new LayerChoice(shared, right, this.#askView, () => this.#solve());
    this.#canvas.setAttribute('role', 'img');
    this.#canvas.onclick = (event) => {
      const box = this.#canvas.getBoundingClientRect();
      this.#zoom(0.5, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    };
    this.#canvas.onkeydown = (event) => this.#key(event);
    this.#damping = slider('Damping 0.01', { min: 0, max: DAMPINGS.length - 1, value: 6 }, (at) => {
      this.#view.damp_percent = DAMPINGS[at];
      this.#damping.firstChild.textContent = `Damping ${DAMPINGS[at]}`;
      this.#damping.input.setAttribute('aria-valuetext', String(DAMPINGS[at]));
      if (this.#view.matrix === 'factor') this.#look();
      this.#drawDamping();
    });
    this.#damping.input.setAttribute('aria-valuetext', '0.01');
    const look = (change) => {
      Object.assign(this.#view, change);
      this.#look();
    };
    const [pivots, losses] = [element('div', { className: 'chart' }), element('div', { className: 'chart' })];
    right.append(
      element('div', { className: 'fields' },
        select('Columns', [['natural', 'in natural order'], ['descending', 'largest diag(H) first'], ['ascending', 'smallest first']], 'natural', (taken) => look({ taken })), this.#damping),
      radios('Matrix', [['correlation', 'H'], ['factor', 'factor R']], 'correlation', (matrix) => look({ matrix })),
      figure('Log colours', this.#canvas, element('div', { className: 'scale' }, String(LEAST), this.#scale, '1')),
      element('div', { className: 'buttons' }, button('Closer', () => this.#zoom(0.5)), button('Farther', () => this.#zoom(2)), button('All', () => this.#zoom(1e6))), this.#said,
      element('h4', {}, 'What damping does'), settings(this.#setting, ['bits', 'group_size', 'search'], () => this.#damp()),
      element('div', { className: 'pair' }, figure('The smallest pivots', pivots), figure('Loss, of rounding to nearest', losses)), this.#table);
    const columns = (colours, label) => axis(colours, { label, labelSize: 18, labelFont: '12px system-ui, sans-serif', size: 28 });
    const logarithmic = (colours) => axis(colours, { size: 58, splits: (plot, _, low, high) => powers(low, high), values: ticks });
    this.#pivots = new Chart(pivots, (colours) => ({
      scales: { x: { time: false }, y: { distr: 3 } },
      series: [{ label: 'rank' }, line('chosen', colours.accent, short, 'y'), { ...line('1e-6', colours.other, short, 'y'), dash: [4, 3] }, { ...line('1', colours.ink, short, 'y'), dash: [4, 3] }],
      axes: [columns(colours, 'pivots, smallest first'), logarithmic(colours)],
    }));
    this.#losses = new Chart(losses, (colours) => ({
      scales: { x: { time: false, distr: 3 } },
      series: [{ label: 'damping', value: (_, x) => (x ? String(x) : '–') }, line('calibration', colours.accent, short, 'y'), line('held-out', colours.other, short, 'y'),
        { label: 'chosen', stroke: colours.ink, paths: () => null, points: { show: true, size: 9, fill: colours.ink }, value: (_, y) => (y ? short(y) : '–') }],
      axes: [axis(colours, { splits: (plot, _, low, high) => powers(low, high), values: ticks, label: 'damping', labelSize: 18, labelFont: '12px system-ui, sans-serif', size: 28 }),
        axis(colours, { size: 58, values: (_, ticks) => ticks.map(short) })],
    }));
    onColours(() => this.#draw());
  }

  shown() {
    return this.#choice.shown();
  }

  #solve() {
    this.#view.size = 1e6;
    this.#look();
    this.#damp();
  }

  #look() {
    this.#askView({ lesson: 'hessian', place: this.#shared.place, ...this.#view }, (answer) => {
      this.#cells = answer;
      Object.assign(this.#view, { row: answer.row, column: answer.column, size: answer.size });
      this.#draw();
    });
  }

  #damp() {
    this.#askDamping({ lesson: 'damping', place: this.#shared.place, setting: this.#setting }, (answer) => {
      this.#damped = answer;
      this.#drawDamping();
    });
  }

  #zoom(by, x = 0.5, y = 0.5) {
    if (!this.#cells) return;
    const { n, row, column, size } = this.#cells;
    const next = Math.round(Math.min(Math.max(size * by, 8), n));
    const at = (from, share) => Math.round(Math.min(Math.max(from + size * share - next / 2, 0), n - next));
    Object.assign(this.#view, { row: at(row, y), column: at(column, x), size: next });
    this.#look();
  }

  #key(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === '+' || event.key === '=') this.#zoom(0.5);
    else if (event.key === '-') this.#zoom(2);
    else if (step) {
      const by = Math.max(1, Math.round(this.#view.size / 8));
      Object.assign(this.#view, { row: Math.max(0, this.#view.row + step[0] * by), column: Math.max(0, this.#view.column + step[1] * by) });
      this.#look();
    } else return;
    event.preventDefault();
  }

  #draw() {
    if (!this.#cells) return;
    const { n, row, column, size, side, values } = this.#cells;
    const tones = [rgb('--paper'), rgb('--yellow'), rgb('--magenta'), rgb('--ink')];
    const colour = (share) => {
      const at = Math.min(Math.max(share, 0), 1) * 3;
      const from = Math.min(Math.floor(at), 2);
      return mix(tones[from], tones[from + 1], at - from);
    };
    const share = (value) => 1 + Math.log10(Math.max(value, 1e-30)) / -Math.log10(LEAST);
    paint(this.#canvas, side, side, (at) => colour(share(values[at])));
    paint(this.#scale, 128, 1, (at) => colour(at / 127));
    const what = this.#view.matrix === 'factor' ? 'The factor R' : 'H';
    const last = (from) => from + size;
    this.#said.textContent = `${what}: rows ${row + 1} to ${last(row)}, columns ${column + 1} to ${last(column)} of ${n}`
      + `${size > side ? '; a cell shows the largest of those in it' : ''}. Click or tap to look closer; with the keyboard, + and − and the arrow keys.`;
    this.#canvas.setAttribute('aria-label', `Heat map. ${this.#said.textContent}`);
  }

  #drawDamping() {
    if (!this.#damped) return;
    const { points, rtn_loss, rtn_held_loss, rows, tokens, n } = this.#damped;
    const chosen = points.find(({ damp_percent }) => damp_percent === this.#view.damp_percent);
    const count = Math.min(n, 64);
    const first = ({ pivots }) => pivots.slice(0, count).map((pivot) => (pivot > 0 ? pivot : null));
    this.#pivots.set([Array.from({ length: count }, (_, at) => at + 1), first(chosen), first(points[0]), first(points.at(-1))]);
    const [own, held] = [points.map(({ loss }) => loss / rtn_loss), points.map(({ held_loss }) => held_loss / rtn_held_loss)];
    this.#losses.set([points.map(({ damp_percent }) => damp_percent), own, held, held.map((value, at) => (points[at] === chosen ? value : null))]);
    const made = table(`GPTQ in natural order, ${rows} rows, ${n} columns, ${tokens} tokens`, ['damping', 'smallest pivot', 'loss', 'held-out'],
      points.map((point, at) => ({
        cells: [point.used === point.damp_percent ? String(point.damp_percent) : `${point.damp_percent}, raised to ${point.used}`, short(point.pivots[0]), own[at].toFixed(3), held[at].toFixed(3)],
        mark: point === chosen,
      })));
    made.id = 'damping-figures';
    this.#table.replaceChildren(made);
  }
}
