// 5: which values codes stand for.

import { Chart, axis, line, powers } from '../page/charts.js';
import { element } from '../page/dom.js';
import { percent } from '../page/format.js';
import { LayerChoice, asker, figure, formula, number, radios, select, svg, table, text, ticks } from './parts.js';

const NAMES = {
  symmetric: 'symmetric, min–max', asymmetric: 'asymmetric, min–max', searched: 'symmetric, searched, either sign', quantile: 'quantiles (NF4 with 4 bits)', kmeans: 'k-means',
};
const COLOURS = { symmetric: '--ink', asymmetric: '--quiet', searched: '--accent', quantile: '--ochre', kmeans: '--magenta' };
const BINS = 40;

export class Grids {
  #shared;
  #asked = { row: 0, group: 0, bits: 4, group_size: 64, weighted: false };
  #ask;
  #choice;
  #row;
  #group;
  #picture = element('div');
  #table = element('div');
  #byBits;
  #bySize;
  #answer = null;

  constructor(shared, host) {
    this.#shared = shared;
    const explain = element('div', { className: 'explain' },
      text('A code is a number from 0 to 2ᵇ − 1; the grid says which weight it stands for. The weights of a group share one.'),
      formula('ŵ = scale · (code − zero)'),
      text('Symmetric grids have their zero in the middle, so one end is never reached. A scale below zero gives the longer tail the end with one code more; searched scales cut off the outermost '
        + 'weights where that helps the others: Halftone’s default. Asymmetric grids fit both ends and store a zero point. Quantile grids are dense where a normal distribution is, k-means puts '
        + 'each value where this group’s weights are: the least error there is, but the table of values costs more than the weights.'),
      text('Error is Σ(w − ŵ)² / Σw², over one group or over the layer’s first rows, each weight rounded for itself.'));
    const right = element('div');
    host.append(element('div', { className: 'two' }, explain, right));
    this.#ask = asker(shared, right);
    this.#choice = new LayerChoice(shared, right, this.#ask, () => this.#change({ row: 0, group: 0 }));
    this.#row = number('Row', 1, { min: 1, max: 256, step: 1 }, (row) => this.#change({ row: row - 1 }));
    this.#group = number('Group', 1, { min: 1, max: 4, step: 1 }, (group) => this.#change({ group: group - 1 }));
    const [bits, sizes] = [element('div', { className: 'chart' }), element('div', { className: 'chart' })];
    right.append(element('div', { className: 'fields' },
      select('Bits', [2, 3, 4, 5, 6, 7, 8].map((bits) => [bits, bits]), 4, (bits) => this.#change({ bits: Number(bits) })),
      select('Group size', [16, 32, 64, 128, 256, -1].map((size) => [size, size < 0 ? 'whole row' : size]), 64, (size) => this.#change({ group_size: Number(size), group: 0 })),
      this.#row, this.#group),
    radios('Errors count', [[false, 'alike'], [true, 'by diag(H)']], false, (weighted) => this.#change({ weighted })),
    figure('One group’s weights, and the values of each grid', this.#picture), this.#table,
    element('div', { className: 'pair' }, figure('Error by bits', bits), figure('Error by bits per weight, for groups of 16 to a whole row', sizes)));
    const series = (more) => (colours) => ({
      scales: { x: { time: false }, y: { distr: 3 } },
      series: [{ label: more }, ...Object.keys(NAMES).map((name) => ({
        ...line(name, getComputedStyle(document.documentElement).getPropertyValue(COLOURS[name]).trim(), (y) => percent(y, 2), 'y'), points: { show: true, size: 5 }, spanGaps: true,
      }))],
      axes: [axis(colours, { label: more, labelSize: 18, labelFont: '12px system-ui, sans-serif', size: 28 }),
        axis(colours, { size: 58, splits: (plot, _, low, high) => powers(low, high), values: ticks })],
    });
    this.#byBits = new Chart(bits, series('bits'));
    this.#bySize = new Chart(sizes, series('bits per weight'));
  }

  shown() {
    return this.#choice.shown();
  }

  #change(change) {
    Object.assign(this.#asked, change);
    this.#row.input.value = String(this.#asked.row + 1);
    this.#group.input.value = String(this.#asked.group + 1);
    this.#ask({ lesson: 'grids', place: this.#shared.place, ...this.#asked }, (answer) => {
      this.#answer = answer;
      this.#row.input.max = String(answer.rows);
      this.#group.input.max = String(answer.groups);
      this.#draw();
    });
  }

  #draw() {
    const { weights, kinds, bits, measured } = this.#answer;
    const all = [...weights, ...kinds.flatMap(({ levels }) => levels)];
    const [low, high] = [Math.min(...all), Math.max(...all)];
    // A unit is a pixel, so that words are as large as elsewhere.
    const width = Math.min(this.#picture.clientWidth || 400, 576);
    const x = (value) => 8 + (value - low) / (high - low || 1) * (width - 16);
    const counts = new Array(BINS).fill(0);
    const bin = (value) => Math.min(Math.floor((value - low) / (high - low || 1) * BINS), BINS - 1);
    for (const weight of weights) counts[bin(weight)] += 1;
    const most = Math.max(...counts);
    const step = (width - 16) / BINS;
    const bars = counts.map((count, at) => svg('rect', { class: 'bar', x: 8 + at * step, y: 90 - 80 * count / most, width: step - 1, height: 80 * count / most }));
    const rows = kinds.flatMap(({ name, levels }, at) => {
      const y = 112 + at * 30;
      return [svg('text', { x: 8, y: y - 4 }, NAMES[name]),
        ...levels.map((level) => svg('line', { class: 'tick', x1: x(level), x2: x(level), y1: y, y2: y + 9, style: `stroke:var(${COLOURS[name]})` }))];
    });
    this.#picture.replaceChildren(svg('svg', {
      class: 'levels', viewBox: `0 0 ${width} ${112 + kinds.length * 30}`, role: 'img',
      'aria-label': `Histogram of ${weights.length} weights from ${low.toFixed(3)} to ${high.toFixed(3)} above the values of five grids`,
    }, ...bars, ...rows));
    const least = Math.min(...kinds.map(({ layer_error }) => layer_error));
    const made = table(`Error with ${this.#asked.bits} bits`, ['grid', 'this group', `${measured} rows`, 'bits per weight'], kinds.map(({ name, error, layer_error, bits_per_weight }) => ({
      cells: [NAMES[name], percent(error, 3), percent(layer_error, 3), bits_per_weight.toFixed(2)], mark: layer_error === least,
    })));
    made.id = 'grids-figures';
    this.#table.replaceChildren(made);
    const positive = (value) => (value > 0 ? value : null);
    this.#byBits.set([bits, ...kinds.map(({ by_bits }) => by_bits.map(positive))]);
    // Kinds need different bits per weight: each point stands in a column of its own, and lines go over the gaps.
    const points = kinds.flatMap(({ bits_by_group, by_group }, kind) => bits_by_group.map((bits, at) => [bits, kind, by_group[at]]))
      .filter(([bits]) => bits <= this.#asked.bits + 2).sort((a, b) => a[0] - b[0]);
    this.#bySize.set([points.map(([bits]) => bits), ...kinds.map((_, kind) => points.map(([, of, error]) => (of === kind ? positive(error) : undefined)))]);
  }
}
