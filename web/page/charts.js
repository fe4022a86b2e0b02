// The charts of a run, drawn by uPlot (web/vendor/uplot).

import { bytes, count, duration, loss, percent, removed } from './format.js';
import { throttled } from './throttle.js';

const { uPlot } = globalThis;
const HEIGHT = 220;
const dark = matchMedia('(prefers-color-scheme: dark)');

/** A plot that follows its host's width and the colour scheme. `options(colours)` are uPlot's. */
class Chart {
  #host;
  #options;
  #plot = null;
  /** Puts a plot that was just made in its place. */
  #begin = null;
  #data = null;
  #draw = throttled(() => this.#update(), 250);

  constructor(host, options) {
    this.#host = host;
    this.#options = options;
    new ResizeObserver(() => this.#draw()).observe(host);
    dark.addEventListener('change', () => this.rebuild());
  }

  /** Columns as uPlot takes them: x first. */
  set(data) {
    this.#data = data;
    this.#draw();
  }

  /** After a change of what the options depend on. */
  rebuild() {
    this.#plot?.destroy();
    this.#plot = this.#begin = null;
    this.#draw();
  }

  /** A PNG as a data URL; `null` before anything was drawn. */
  image() {
    this.#update(true);
    return this.#plot?.ctx.canvas.toDataURL('image/png') ?? null;
  }

  /** `whole`: at once, and not one step in each frame. */
  #update(whole = false) {
    const width = this.#host.clientWidth;
    if (!width || !this.#data) return;
    if (!this.#plot) {
      const options = { width, height: HEIGHT, hooks: { ready: [reflectCursor], setLegend: [reflectCursor] }, ...this.#options(colours()) };
      // To make one and to draw it first take about as long: each has a frame of its own.
      this.#plot = new uPlot(options, this.#data, (plot, begin) => {
        this.#begin = () => {
          this.#host.append(plot.root);
          begin();
        };
      });
      if (!whole) return this.#draw();
    }
    this.#begin?.();
    this.#begin = null;
    if (this.#plot.width !== width) this.#plot.setSize({ width, height: HEIGHT });
    this.#plot.setData(this.#data);
  }
}

/** Without a cursor the legend has names only. */
function reflectCursor(plot) {
  plot.root.classList.toggle('idle', plot.cursor.idx === null || plot.cursor.idx === undefined);
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { text: of('--quiet'), grid: of('--line'), ink: of('--ink'), accent: of('--accent'), other: of('--magenta') };
}

const axis = ({ text, grid }, more) => ({
  stroke: text,
  font: '12px system-ui, sans-serif',
  grid: { stroke: grid, width: 1 },
  ticks: { stroke: grid, width: 1, size: 4 },
  ...more,
});

/** Points without a line between them: layers are of several kinds, and a line would only jump. */
const dots = (label, colour, value, filled) => ({
  label,
  stroke: colour,
  paths: () => null,
  points: { show: true, size: 6, width: 1.5, stroke: colour, fill: filled ? colour : 'transparent' },
  value: (_, y) => (y === null || y === undefined ? '–' : value(y)),
});

/** Losses and shares by layer, in the order of the plan; memory and speed by time. */
export class Charts {
  #modules = [];
  #index = new Map();
  #rtn = [];
  #gptq = [];
  #share = [];
  #total = [];
  #speed = [[], [], [], []];
  #loss;
  #shares;
  #speeds;
  /** Where charts of losses are. */
  #byLoss;

  constructor({ loss: lossHost, share: shareHost, speed: speedHost }) {
    this.#byLoss = [lossHost, shareHost];
    this.#loss = new Chart(lossHost, (colours) => ({
      scales: { x: this.#x(), y: { distr: 3 } },
      series: [
        this.#name(),
        dots('rounding', colours.other, loss, false),
        dots('GPTQ', colours.accent, loss, true),
      ],
      axes: [this.#blocks(colours), axis(colours, {
        size: 58,
        splits: (_, __, low, high) => powers(low, high),
        // All of them get a label; uPlot would leave out some.
        filter: (_, ticks) => ticks,
        values: (_, ticks) => ticks.map(power),
      })],
    }));
    this.#shares = new Chart(shareHost, (colours) => ({
      scales: { x: this.#x(), y: { range: (_, low) => [Math.min(0, low ?? 0), 1] } },
      series: [
        this.#name(),
        dots('layer', colours.accent, percent, true),
        {
          label: 'all so far',
          stroke: colours.ink,
          width: 1.5,
          points: { show: false },
          value: (_, y) => (y === null || y === undefined ? '–' : percent(y)),
        },
      ],
      axes: [this.#blocks(colours), axis(colours, { size: 58, values: (_, ticks) => ticks.map((y) => percent(y, 0)) })],
    }));
    this.#speeds = new Chart(speedHost, (colours) => ({
      scales: { x: { time: false }, y: { range: fromZero }, speed: { range: fromZero } },
      series: [
        { label: 'time', value: (_, x) => (x === null || x === undefined ? '–' : duration(x)) },
        line('wasm', colours.accent, bytes, 'y'),
        line('device', colours.other, bytes, 'y'),
        line('tokens/s', colours.ink, count, 'speed'),
      ],
      axes: [
        axis(colours, { values: (_, ticks) => ticks.map((x) => (x >= 60 ? `${+(x / 60).toFixed(1)} min` : `${x} s`)) }),
        axis(colours, { size: 58, values: (_, ticks) => ticks.map((y) => bytes(y).replace('.0\u00a0', '\u00a0')) }),
        axis(colours, { side: 1, scale: 'speed', size: 58, grid: { show: false }, values: (_, ticks) => ticks.map(short) }),
      ],
    }));
  }

  /** Begins anew, for the modules of a plan. `measured`: their losses will be known. */
  reset(modules, measured) {
    for (const host of this.#byLoss) host.closest('figure').hidden = !measured;
    this.#modules = modules;
    this.#index = new Map(modules.map(({ module }, index) => [module, index]));
    this.#rtn = modules.map(() => null);
    this.#gptq = modules.map(() => null);
    this.#share = modules.map(() => null);
    this.#total = modules.map(() => null);
    this.#speed = [[], [], [], []];
    for (const chart of [this.#loss, this.#shares, this.#speeds]) chart.rebuild();
    this.#show();
    this.#speeds.set(this.#speed);
  }

  /** One layer is done. */
  add(row) {
    const index = this.#index.get(row.module);
    if (index === undefined) return;
    // A logarithm has no place for zero.
    const positive = (value) => (value > 0 ? value : null);
    this.#rtn[index] = positive(row.rtn_loss);
    this.#gptq[index] = positive(row.gptq_loss);
    this.#share[index] = removed(row);
    let rtn = 0;
    let gptq = 0;
    this.#total = this.#rtn.map((value, at) => {
      if (value === null) return null;
      rtn += value;
      gptq += this.#gptq[at] ?? 0;
      return 1 - gptq / rtn;
    });
    this.#show();
  }

  /** One event `progress`. */
  measure({ seconds, wasm_bytes, device_bytes, tokens_per_second }) {
    // A run that goes on begins its clock anew.
    if (seconds < this.#speed[0].at(-1)) this.#speed = [[], [], [], []];
    const [times] = this.#speed;
    if (times.length && seconds - times.at(-1) < Math.max(0.5, times.at(-1) / 500)) return;
    // The CPU device has no memory of its own.
    [seconds, wasm_bytes, device_bytes || null, tokens_per_second].forEach((value, at) => this.#speed[at].push(value));
    this.#speeds.set(this.#speed);
  }

  /** `[title, data URL]` of each chart, for the report. */
  images() {
    return [
      ['Loss of each layer (logarithmic): rounding to nearest (rings) and GPTQ (dots)', this.#loss.image()],
      ['Share of that error removed: each layer (dots) and all so far (line)', this.#shares.image()],
    ].filter(([, image]) => image);
  }

  #show() {
    const x = this.#modules.map((_, index) => index);
    this.#loss.set([x, this.#rtn, this.#gptq]);
    this.#shares.set([x, this.#share, this.#total]);
  }

  #x() {
    return { time: false, range: () => [-0.5, Math.max(this.#modules.length - 0.5, 0.5)] };
  }

  #name() {
    return { label: 'layer', value: (_, x) => this.#modules[x]?.module.replace(/^model\.layers\./, '') ?? '–' };
  }

  /** An axis with the number of each block where its layers begin. */
  #blocks(colours) {
    return axis(colours, {
      splits: (plot) => {
        const starts = this.#modules.flatMap(({ layer }, at) => (this.#modules[at - 1]?.layer === layer ? [] : [at]));
        const step = Math.ceil(starts.length / Math.max(1, Math.floor(plot.width / 40)));
        return starts.filter((_, at) => at % step === 0);
      },
      values: (_, ticks) => ticks.map((at) => String(this.#modules[at]?.layer ?? '')),
      label: 'block',
      labelSize: 18,
      labelFont: '12px system-ui, sans-serif',
      size: 28,
    });
  }
}

/** The relative error of the hidden state after each block. */
export class BlockErrors {
  #chart;

  constructor(host) {
    this.#chart = new Chart(host, (colours) => ({
      scales: { x: { time: false }, y: { range: fromZero } },
      series: [
        { label: 'after block', value: (_, x) => (x === null || x === undefined ? '–' : String(x)) },
        { ...line('relative error', colours.accent, (y) => percent(y, 2), 'y'), points: { show: true, size: 5, fill: colours.accent } },
      ],
      axes: [
        axis(colours, {
          incrs: [1, 2, 5, 10, 20, 50],
          label: 'block', labelSize: 18, labelFont: '12px system-ui, sans-serif', size: 28,
        }),
        axis(colours, { size: 58, values: (_, ticks) => ticks.map((y) => `${+(y * 100).toPrecision(2)}\u00a0%`) }),
      ],
    }));
  }

  /** @param errors one for each block */
  set(errors) {
    this.#chart.set([errors.map((_, block) => block), errors]);
  }

  image() {
    return this.#chart.image();
  }
}

const fromZero = (_, __, high) => [0, high > 0 ? high * 1.1 : 1];
const power = (value) => (value >= 0.01 && value < 1e4 ? String(+value.toPrecision(3)) : value.toExponential(0));

/** Ticks of a logarithmic axis: powers of ten, with 2 and 5 between them where there would be few. */
function powers(low, high) {
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const steps = to - from > 2 ? [1] : [1, 2, 5];
  const all = Array.from({ length: to - from + 1 }, (_, at) => steps.map((step) => step * 10 ** (from + at))).flat();
  return all.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

const short = (value) => (value >= 1000 ? `${+(value / 1000).toFixed(1)}k` : String(value));
const line = (label, stroke, value, scale) => ({
  label,
  stroke,
  scale,
  width: 1.5,
  points: { show: false },
  value: (_, y) => (y === null || y === undefined ? '–' : value(y)),
});

// For the charts of web/how too.
export { Chart, axis, dots, fromZero, line, power, powers };
