// 6: errors on their way across a layer, and across a picture.

import { Chart, axis, fromZero, line } from '../page/charts.js';
import { element } from '../page/dom.js';
import { percent } from '../page/format.js';
import { LayerChoice, asker, button, figure, formula, mix, number, onColours, paint, rgb, select, settings, short, slider, sub, sup, text, usual } from './parts.js';

const PICTURE = { width: 144, height: 96 };
const PRINTS = { rounded: 'Each dot rounded', diffused: 'Error diffusion (Floyd–Steinberg)', gptq: 'GPTQ, with the eye’s blur as H' };

export class Diffusion {
  #shared;
  #setting = usual();
  #screen = { bits: 1, sigma: 1 };
  #ask;
  #askScreen;
  #choice;
  #canvas = element('canvas', { className: 'nudges' });
  #plain = element('canvas', { className: 'nudges' });
  #said = element('p');
  #column;
  #play;
  #playing = null;
  #chart;
  #answer = null;
  #prints = element('div', { className: 'prints' });
  #printed = null;
  #grey = null;

  constructor(shared, host) {
    this.#shared = shared;
    const explain = element('div', { className: 'explain' },
      text('A newspaper prints grey with black dots only: whatever a dot is too dark, its neighbours are made lighter. From afar the tone is right. GPTQ does that to a layer: whatever a column’s rounding '
        + 'adds to the output, the columns still to come take away again.'),
      formula('w', sub('k'), ' ← w', sub('k'), ' − (w', sub('j'), ' − ŵ', sub('j'), ') · U', sub('jk'), ' / U', sub('jj'), ' for all k still to come'),
      text('In the picture a column’s weights stand above each other. Left of the line they are rounded, and what shows is their error; right of it, how far earlier errors have nudged them already. '
        + 'The curves have the error of the layer’s output: rounding to nearest adds up every column’s, GPTQ has passed on what it could.'));
    const right = element('div');
    host.append(element('div', { className: 'two' }, explain, right));
    this.#ask = asker(shared, right);
    this.#choice = new LayerChoice(shared, right, this.#ask, () => this.#solve());
    this.#column = slider('Columns done', { min: 0, max: 96, value: 0 }, (at) => {
      this.#stop();
      this.#draw(at);
    });
    this.#play = button('Play', () => (this.#playing ? this.#stop() : this.#start()), '');
    for (const [canvas, what] of [[this.#canvas, 'GPTQ: errors of the columns done, and nudges to those to come'], [this.#plain, 'Round to nearest: errors of the columns done']]) {
      canvas.setAttribute('role', 'img');
      canvas.setAttribute('aria-label', what);
    }
    const chart = element('div', { className: 'chart' });
    right.append(settings(this.#setting, ['bits', 'group_size', 'search'], () => this.#solve()),
      figure('GPTQ', this.#canvas), figure('Round to nearest', this.#plain),
      element('div', { className: 'buttons' }, this.#play), this.#column, this.#said, figure('Error of the layer’s output after each column', chart));
    this.#chart = new Chart(chart, (colours) => ({
      scales: { x: { time: false }, y: { range: fromZero } },
      series: [{ label: 'columns done' }, line('GPTQ', colours.accent, short, 'y'), { ...line('rounding', colours.other, short, 'y'), dash: [6, 3] },
        { label: 'now', stroke: colours.ink, paths: () => null, points: { show: true, size: 9, fill: colours.ink }, value: (_, y) => (y ? short(y) : '–') }],
      axes: [axis(colours, { label: 'columns done', labelSize: 18, labelFont: '12px system-ui, sans-serif', size: 28 }), axis(colours, { size: 58, values: (_, ticks) => ticks.map(short) })],
    }));
    this.#pictures(host);
    onColours(() => {
      this.#draw(this.#column.input.valueAsNumber);
    });
  }

  shown() {
    return this.#choice.shown();
  }

  #solve() {
    this.#stop();
    this.#ask({ lesson: 'diffusion', place: this.#shared.place, setting: this.#setting }, (answer) => {
      this.#answer = answer;
      this.#column.input.max = String(answer.columns);
      this.#column.input.value = String(Math.round(answer.columns / 3));
      this.#draw(Math.round(answer.columns / 3));
    });
  }

  #start() {
    if (!this.#answer) return;
    let at = this.#column.input.valueAsNumber;
    if (at >= this.#answer.columns) at = 0;
    this.#play.textContent = 'Stop';
    this.#playing = setInterval(() => {
      at += 1;
      this.#column.input.value = String(at);
      this.#draw(at);
      if (at >= this.#answer.columns) this.#stop();
    }, 80);
  }

  #stop() {
    clearInterval(this.#playing);
    this.#playing = null;
    this.#play.textContent = 'Play';
  }

  #draw(done) {
    if (!this.#answer) return;
    const { rows, columns, frames, rounded, largest, gptq, rtn, gptq_loss, rtn_loss, all_rows } = this.#answer;
    const [paper, above, below, mark] = ['--paper', '--magenta', '--accent', '--ink'].map(rgb);
    // A line of its own between the columns done and those to come.
    const draw = (canvas, value) => paint(canvas, columns + 1, rows, (at) => {
      const column = at % (columns + 1);
      if (column === done) return mark;
      const index = Math.floor(at / (columns + 1)) * columns + (column < done ? column : column - 1);
      const share = value(index, column < done) / 127;
      // Small ones should be seen, too.
      return mix(paper, share < 0 ? below : above, Math.sqrt(Math.abs(share)));
    });
    draw(this.#canvas, (index) => (done ? frames[done - 1][index] : 0));
    draw(this.#plain, (index, over) => (over ? rounded[index] : 0));
    const at = Math.max(done - 1, 0);
    const [ours, theirs] = done ? [gptq[at], rtn[at]] : [0, 0];
    this.#said.textContent = done
      ? `After ${done} of ${gptq.length} columns the output is off by ${short(ours)} with GPTQ, ${short(theirs)} with rounding (${percent(ours / theirs)}). At the end: ${short(gptq_loss)} and ${short(rtn_loss)} over ${all_rows} rows. Full colour: ±${short(largest)}, first ${rows} rows.`
      : 'Nothing is rounded yet.';
    const x = gptq.map((_, column) => column + 1);
    this.#chart.set([x, gptq, rtn, x.map((_, column) => (done && column === at ? ours : null))]);
    this.#column.input.setAttribute('aria-valuetext', `${done} of ${columns}`);
  }

  #pictures(host) {
    const note = element('p', {}, 'For the last print the picture goes through the very loop that quantizes layers: strips of eight lines are the rows of W, their pixels the columns, and H is how much two dots overlap in the eye’s blur. The first number is the difference dot by dot, the second what is left of it through that blur, both of 255.');
    const below = element('div');
    host.append(element('h4', {}, 'The same on a picture'), element('div', { className: 'explain' }, note,
      formula('H', sub('ij'), ' = exp(−distance', sup('2'), ' / 4σ', sup('2'), '):  ‖blur(e)‖² = e · H · e', sup('T'))), below);
    this.#askScreen = asker(this.#shared, below);
    below.append(element('div', { className: 'fields' },
      select('Tones', [[1, '2'], [2, '4'], [3, '8']], 1, (bits) => this.#print({ bits: Number(bits) })),
      number('Blur σ in dots', 1, { min: 0.3, max: 3, step: 0.1 }, (sigma) => this.#print({ sigma })),
      this.#upload()), this.#prints);
    this.#grey = drawn();
    this.#print({});
  }

  /** A picture of the person's own, in place of the drawn one. It stays in this page. */
  #upload() {
    const input = element('input', { type: 'file', accept: 'image/*' });
    input.onchange = async () => {
      if (!input.files.length) return;
      const bitmap = await createImageBitmap(input.files[0]).catch(() => null);
      if (!bitmap) return;
      const { width, height } = PICTURE;
      const context = new OffscreenCanvas(width, height).getContext('2d');
      const scale = Math.max(width / bitmap.width, height / bitmap.height);
      context.drawImage(bitmap, (width - bitmap.width * scale) / 2, (height - bitmap.height * scale) / 2, bitmap.width * scale, bitmap.height * scale);
      this.#grey = grey(context);
      this.#print({});
    };
    return element('label', {}, 'A picture of your own', input);
  }

  #print(change) {
    Object.assign(this.#screen, change);
    this.#askScreen({ lesson: 'screen', ...PICTURE, pixels: this.#grey, ...this.#screen }, ({ prints }) => {
      this.#printed = prints;
      const { width, height } = PICTURE;
      const one = (title, pixels, said) => {
        const canvas = element('canvas');
        canvas.setAttribute('role', 'img');
        canvas.setAttribute('aria-label', title);
        paint(canvas, width, height, (at) => [pixels[at], pixels[at], pixels[at]]);
        return element('div', {}, canvas, element('p', {}, `${title}${said}`));
      };
      this.#prints.replaceChildren(one('The picture', this.#grey, ''), ...prints.map(({ name, pixels, difference, seen }) =>
        one(PRINTS[name], pixels, `: ${difference.toFixed(1)} by dots, ${seen.toFixed(1)} to the eye`)));
      this.#prints.id = 'prints';
    });
  }
}

const grey = (context) => {
  const { width, height } = PICTURE;
  const { data } = context.getImageData(0, 0, width, height);
  return Array.from({ length: width * height }, (_, at) => Math.round(0.299 * data[at * 4] + 0.587 * data[at * 4 + 1] + 0.114 * data[at * 4 + 2]));
};

/** A ball on a table before a window: soft tones, an edge, a shadow, and fine lines. */
function drawn() {
  const { width, height } = PICTURE;
  const context = new OffscreenCanvas(width, height).getContext('2d');
  const fade = (gradient, stops) => {
    stops.forEach(([at, tone]) => gradient.addColorStop(at, `rgb(${tone} ${tone} ${tone})`));
    return gradient;
  };
  context.fillStyle = fade(context.createLinearGradient(0, 0, width, height * 0.7), [[0, 235], [0.6, 150], [1, 90]]);
  context.fillRect(0, 0, width, height);
  context.fillStyle = fade(context.createLinearGradient(0, height * 0.66, 0, height), [[0, 60], [1, 125]]);
  context.fillRect(0, height * 0.66, width, height);
  context.fillStyle = fade(context.createRadialGradient(92, 80, 2, 92, 80, 38), [[0, 10], [1, 90]]);
  context.beginPath();
  context.ellipse(92, 80, 38, 8, 0, 0, 2 * Math.PI);
  context.fill();
  context.fillStyle = fade(context.createRadialGradient(62, 36, 2, 74, 50, 34), [[0, 255], [0.35, 200], [0.8, 80], [1, 45]]);
  context.beginPath();
  context.arc(74, 50, 32, 0, 2 * Math.PI);
  context.fill();
  context.strokeStyle = 'rgb(40 40 40)';
  for (let at = 0; at < 7; at += 1) {
    context.lineWidth = 0.4 + at * 0.25;
    context.beginPath();
    context.moveTo(8 + at * 4, 8);
    context.lineTo(8 + at * 4, 40);
    context.stroke();
  }
  return grey(context);
}
