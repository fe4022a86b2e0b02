// 2: in which order columns are taken.

import { Chart, axis, fromZero, line, powers } from '../page/charts.js';
import { element } from '../page/dom.js';
import { percent } from '../page/format.js';
import { LayerChoice, asker, figure, formula, settings, short, sub, table, text, ticks, usual } from './parts.js';

const NAMES = { natural: 'natural', descending: 'largest first (act-order)', ascending: 'smallest first' };

export class Order {
  #shared;
  #setting = usual();
  #ask;
  #choice;
  #diagonal;
  #losses;
  #table = element('div');
  #marks = element('p', { className: 'quiet' });
  #answer = null;

  constructor(shared, host) {
    this.#shared = shared;
    const explain = element('div', { className: 'explain' },
      text('The first column rounded has all others to make up for its error; the last has none. So columns whose error would cost most are best taken '
        + 'while there is help: GPTQ’s act-order takes them by falling diag(H), the mean square of their inputs.'),
      formula('H', sub('jj'), ' = 2 · mean x', sub('j'), '²;  the loss after column j is what is lost already, when the columns to come have taken over what they can'),
      text('A channel that is never active (dead, H', sub('jj'), ' = 0) costs nothing, whatever its weights. Outlier channels carry many times the usual input: '
        + 'taken first they are rounded almost as exactly as the grid allows.'));
    const right = element('div');
    const [diagonal, losses] = [element('div', { className: 'chart' }), element('div', { className: 'chart' })];
    const charts = element('div', { className: 'pair' },
      figure('diag(H), sorted', diagonal), figure('Loss after each column', losses));
    host.append(element('div', { className: 'two' }, explain, right));
    this.#ask = asker(shared, right);
    this.#choice = new LayerChoice(shared, right, this.#ask, () => this.#solve());
    right.append(settings(this.#setting, ['bits', 'group_size', 'search'], () => this.#solve()), charts, this.#marks, this.#table);
    this.#diagonal = new Chart(diagonal, (colours) => ({
      scales: { x: { time: false }, y: { distr: 3 } },
      series: [{ label: 'rank' }, line('diag(H)', colours.accent, short, 'y'),
        { ...line('outliers', colours.other, short, 'y'), paths: () => null, points: { show: true, size: 6, fill: colours.other } },
        { ...line('dead', colours.ink, () => '0', 'y'), paths: () => null, points: { show: true, size: 6, fill: 'transparent' } }],
      axes: [axis(colours, { label: 'columns, largest first', labelSize: 18, labelFont: '12px system-ui, sans-serif', size: 28 }),
        axis(colours, { size: 58, splits: (plot, _, low, high) => powers(low, high), values: ticks })],
    }));
    this.#losses = new Chart(losses, (colours) => ({
      scales: { x: { time: false }, y: { range: fromZero } },
      series: [{ label: 'columns done' }, line('natural', colours.ink, short, 'y'), line('largest first', colours.accent, short, 'y'),
        { ...line('smallest first', colours.other, short, 'y'), dash: [6, 3] }, { ...line('rounding', colours.text, short, 'y'), dash: [2, 3] }],
      axes: [axis(colours, { label: 'columns done', labelSize: 18, labelFont: '12px system-ui, sans-serif', size: 28 }),
        axis(colours, { size: 58, values: (_, ticks) => ticks.map(short) })],
    }));
  }

  shown() {
    return this.#choice.shown();
  }

  #solve() {
    this.#ask({ lesson: 'order', place: this.#shared.place, setting: this.#setting }, (answer) => {
      this.#answer = answer;
      this.#draw();
    });
  }

  #draw() {
    const { diagonal, median, dead, outliers, outlier, orders, rtn, rows } = this.#answer;
    const sorted = [...diagonal].sort((a, b) => b - a);
    // A logarithm has no place for zero: rings at the lowest place stand for it.
    const positive = (value) => (value > 0 ? value : null);
    const least = Math.min(...sorted.filter((value) => value > 0));
    this.#diagonal.set([sorted.map((_, at) => at + 1), sorted.map(positive), sorted.map((value) => (value > outlier * median ? value : null)),
      sorted.map((value) => (value > 0 ? null : least))]);
    this.#losses.set([rtn.curve.map((_, at) => at + 1), ...orders.map(({ curve }) => curve), rtn.curve]);
    const list = (columns) => `column${columns.length > 1 ? 's' : ''} ${columns.slice(0, 8).join(', ')}${columns.length > 8 ? ', …' : ''}`;
    this.#marks.textContent = `Median of diag(H): ${short(median)}. `
      + (dead.length ? `${dead.length} dead: ${list(dead)}. ` : 'No dead channel. ')
      + (outliers.length ? `${outliers.length} above ${outlier} times the median: ${list(outliers)}.` : `None is above ${outlier} times the median.`);
    const row = (name, { loss, held_loss }, mark) => ({ cells: [name, short(loss), percent(loss / rtn.loss), short(held_loss), percent(held_loss / rtn.held_loss)], mark });
    const best = Math.min(...orders.map(({ loss }) => loss));
    const made = table(`Loss tr(E·H·Eᵀ) of ${rows} rows`, ['order', 'cali\u00adbration', 'of round\u00ading', 'held-out', 'of round\u00ading'],
      [...orders.map((order) => row(NAMES[order.taken], order, order.loss === best)), row('round to nearest', rtn, false)]);
    made.id = 'order-figures';
    this.#table.replaceChildren(made);
  }
}
