// 7: AWQ beside GPTQ, on equal terms.

import { Chart, axis, line } from '../page/charts.js';
import { element } from '../page/dom.js';
import { LayerChoice, asker, figure, formula, radios, settings, short, sub, table, text, usual } from './parts.js';

const NAMES = { rtn: 'round to nearest', awq: 'AWQ', gptq: 'GPTQ', gptq_order: 'GPTQ, largest inputs first', awq_gptq: 'AWQ’s scaling, then GPTQ' };

export class Scaling {
  #shared;
  #setting = usual({ search: false });
  #bits = 3;
  #ask;
  #choice;
  #chart;
  #table = element('div');
  #said = element('p');
  #answer = null;

  constructor(shared, host) {
    this.#shared = shared;
    const explain = element('div', { className: 'explain' },
      text('AWQ moves no weight for another’s sake. It makes the grid finer for columns whose inputs are large: their weights are multiplied before rounding and the inputs divided, which changes nothing '
        + 'but what rounding does. How much is searched, one number α for the layer.'),
      formula('ŵ = round(w · s) / s,  s', sub('j'), ' = (mean |x', sub('j'), '|)', element('sup', {}, 'α')),
      text('The comparison is fair where both have the same bits, groups, kind of scales and text. GPTQ usually loses less on the text that it was calibrated with; AWQ fits one number only, so it '
        + 'cannot overfit: with few tokens, or for other text, it comes closer. Both can be put together.'),
      text('AWQ’s search for clipping is left out here; with “searched” scales all methods clip.'));
    const right = element('div');
    host.append(element('div', { className: 'two' }, explain, right));
    this.#ask = asker(shared, right);
    this.#choice = new LayerChoice(shared, right, this.#ask, () => this.#solve());
    const chart = element('div', { className: 'chart' });
    right.append(settings(this.#setting, ['group_size', 'search'], () => this.#solve()),
      radios('Bits', [2, 3, 4, 8].map((bits) => [bits, String(bits)]), this.#bits, (bits) => {
        this.#bits = bits;
        this.#draw();
      }), this.#table, this.#said, figure('AWQ’s loss by α, of rounding to nearest; GPTQ’s beside it', chart));
    this.#chart = new Chart(chart, (colours) => ({
      scales: { x: { time: false } },
      series: [{ label: 'α' }, line('AWQ', colours.accent, short, 'y'), { ...line('AWQ, held-out', colours.accent, short, 'y'), dash: [6, 3] },
        line('GPTQ', colours.other, short, 'y'), { ...line('GPTQ, held-out', colours.other, short, 'y'), dash: [6, 3] }],
      axes: [axis(colours, { label: 'α', labelSize: 18, labelFont: '12px system-ui, sans-serif', size: 28 }), axis(colours, { size: 58, values: (_, ticks) => ticks.map(short) })],
    }));
  }

  shown() {
    return this.#choice.shown();
  }

  #solve() {
    this.#ask({ lesson: 'beside', place: this.#shared.place, setting: this.#setting }, (answer) => {
      this.#answer = answer;
      this.#draw();
    });
  }

  #draw() {
    if (!this.#answer) return;
    const { alphas, rounds, rows, tokens, held_tokens } = this.#answer;
    const { by_alpha, held_by_alpha, alpha, methods, awq_wins, held_awq_wins } = rounds.find(({ bits }) => bits === this.#bits);
    const [rtn, , gptq] = methods;
    const [least, heldLeast] = ['loss', 'held_loss'].map((name) => Math.min(...methods.map((method) => method[name])));
    const star = (value, best) => `${value === best ? '★ ' : ''}${short(value)}`;
    const made = table(`${this.#bits} bits, ${rows} rows: loss tr(E·H·Eᵀ) on ${tokens} tokens of calibration, on ${held_tokens} held out`, ['method', 'cali\u00adbrated', 'of round\u00ading', 'held-out', 'of round\u00ading'],
      methods.map(({ name, loss, held_loss }) => ({
        cells: [name === 'awq' ? `AWQ, α = ${alpha}` : NAMES[name], star(loss, least), (loss / rtn.loss).toFixed(3), star(held_loss, heldLeast), (held_loss / rtn.held_loss).toFixed(3)], mark: loss === least,
      })));
    made.id = 'scaling-figures';
    this.#table.replaceChildren(made);
    this.#said.textContent = `Row by row AWQ loses less than GPTQ (natural order) in ${awq_wins} of ${rows} rows on the calibration text, in ${held_awq_wins} on the other. ★ least.`;
    const flat = (value) => alphas.map(() => value);
    this.#chart.set([alphas, by_alpha.map((loss) => loss / rtn.loss), held_by_alpha.map((loss) => loss / rtn.held_loss), flat(gptq.loss / rtn.loss), flat(gptq.held_loss / rtn.held_loss)]);
  }
}
