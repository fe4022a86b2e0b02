// 4: two weights as a point in the plane, their codes as a lattice.

import { element } from '../page/dom.js';
import { asker, formula, number, radios, signed, svg, table, text } from './parts.js';

const REACH = 3.2;
const NAMES = { rtn: 'Round to nearest', gptq: 'GPTQ = Babai’s nearest plane', closest: 'Closest point' };
const COLOURS = { rtn: 'var(--quiet)', gptq: 'var(--accent)', closest: 'var(--magenta)' };

export class Plane {
  #asked = { basis: [[1.15, 0.1], [0.8, 0.75]], target: [-1.74, 1.77], clip: null, first: 0, reach: REACH };
  #cells = 'gptq';
  #ends = [-1, 1];
  #ask;
  #picture = svg('svg', { class: 'lattice', viewBox: `${-REACH} ${-REACH} ${2 * REACH} ${2 * REACH}`, role: 'group', 'aria-label': 'The lattice, with three points to move by pointer or arrow keys' });
  #ground = svg('g');
  #handles = [];
  #table = element('div');
  #said = text();
  #answer = null;

  constructor(shared, host) {
    const explain = element('div', { className: 'explain' },
      text('With two weights the loss can be seen. A step of the first code moves the output by b₁, a step of the second by b₂: all outputs '
        + 'that codes can give are a lattice, and the exact weights are a point t between. The best codes are the lattice point closest to t.'),
      formula('‖B(z − w)‖² = (z − w)', element('sup', {}, 'T'), ' H (z − w),  H = B', element('sup', {}, 'T'), 'B'),
      text('Rounding each weight for itself takes the parallelogram that t lies in. GPTQ rounds one code, that is, takes the nearest of the lines '
        + 'of points, then slides along it: a box with right angles, never larger on average. It is Babai’s nearest plane algorithm. The closest point’s '
        + 'cell is the smallest of all, but to find it takes a search that grows exponentially with the number of weights.'),
      radios('Cells of', Object.entries({ rtn: 'rounding', gptq: 'GPTQ', closest: 'closest point' }), this.#cells, (cells) => { this.#cells = cells; this.#draw(); }),
      radios('GPTQ rounds first', [[0, 'code 1'], [1, 'code 2']], 0, (first) => this.#change({ first })),
      radios('Codes', [['no', 'without ends'], ['yes', 'clipped']], 'no', (clip) => {
        ends.hidden = clip === 'no';
        this.#change({ clip: clip === 'no' ? null : [...this.#ends] });
      }));
    const end = (label, at) => number(label, this.#ends[at], { min: -9, max: 9, step: 1 }, (value) => {
      this.#ends[at] = value;
      this.#change({ clip: [...this.#ends] });
    });
    const ends = element('div', { className: 'fields', hidden: true }, end('Least code', 0), end('Greatest code', 1));
    explain.append(ends);
    this.#picture.append(this.#ground);
    for (const [name, what, fill] of [['b₁', 'tip of b1', 'var(--ink)'], ['b₂', 'tip of b2', 'var(--ink)'], ['t', 'the weights t', 'var(--yellow)']]) this.#handle(name, what, fill);
    this.#said.setAttribute('aria-live', 'polite');
    const right = element('div', {}, this.#picture,
      element('p', { className: 'quiet' }, 'Drag b₁, b₂ or t; with the keyboard, Tab to one and use the arrow keys (with Shift, larger steps).'), this.#said, this.#table);
    host.append(element('div', { className: 'two' }, explain, right));
    this.#ask = asker(shared, right);
    this.#change({});
  }

  #change(change) {
    Object.assign(this.#asked, change);
    this.#place();
    this.#ask({ lesson: 'plane', ...this.#asked }, (answer) => {
      this.#answer = answer;
      this.#draw();
    });
  }

  #point(index) {
    return index < 2 ? this.#asked.basis[index] : this.#asked.target;
  }

  #handle(name, what, fill) {
    const index = this.#handles.length;
    const handle = svg('g', { class: 'handle', tabindex: '0', role: 'slider', 'aria-label': what, 'aria-valuemin': -REACH, 'aria-valuemax': REACH },
      svg('circle', { r: 0.3, style: 'fill:transparent;stroke:none' }), svg('circle', { r: 0.12, style: `fill:${fill}` }), svg('text', { x: 0.17, y: -0.14 }, name));
    handle.onpointerdown = (event) => {
      handle.setPointerCapture(event.pointerId);
      handle.onpointermove = (moved) => {
        const box = this.#picture.getBoundingClientRect();
        const at = (value, from, size) => ((value - from) / size * 2 - 1) * REACH;
        this.#move(index, [at(moved.clientX, box.left, box.width), -at(moved.clientY, box.top, box.height)]);
      };
      handle.onpointerup = handle.onpointercancel = () => { handle.onpointermove = null; };
    };
    handle.onkeydown = (event) => {
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!by) return;
      event.preventDefault();
      const size = event.shiftKey ? 0.25 : 0.05;
      this.#move(index, this.#point(index).map((value, axis) => value + by[axis] * size));
    };
    this.#handles.push(handle);
    this.#picture.append(handle);
  }

  #move(index, to) {
    const point = to.map((value) => Math.round(Math.min(Math.max(value, -REACH + 0.1), REACH - 0.1) * 1000) / 1000);
    if (index === 2) return this.#change({ target: point });
    const basis = [...this.#asked.basis];
    basis[index] = point;
    // Nearly along one line there is no lattice to show.
    const [[a, b], [c, d]] = basis;
    if (Math.abs(a * d - b * c) < 0.12 * Math.max(Math.hypot(a, b), Math.hypot(c, d), 0.6)) return undefined;
    return this.#change({ basis });
  }

  #place() {
    this.#handles.forEach((handle, index) => {
      const [x, y] = this.#point(index);
      handle.setAttribute('transform', `translate(${x} ${-y})`);
      handle.setAttribute('aria-valuenow', x);
      handle.setAttribute('aria-valuetext', `${signed(x, 2)} across, ${signed(y, 2)} up`);
    });
  }

  #draw() {
    if (!this.#answer) return;
    const { methods, points, weights, h, moved } = this.#answer;
    const cells = methods.find(({ name }) => name === this.#cells);
    const path = ([x, y], corners) => corners.map(([dx, dy]) => `${x + dx},${-(y + dy)}`).join(' ');
    const drawn = points.filter(({ allowed }) => allowed).map(({ codes, point }) => svg('polygon', {
      points: path(point, cells.cell), class: codes.every((code, at) => code === cells.codes[at]) ? 'cell chosen' : 'cell',
    }));
    // The chosen one above its neighbours.
    drawn.sort((a, b) => a.getAttribute('class').length - b.getAttribute('class').length);
    const [[a, b], [c, d]] = this.#asked.basis;
    const spots = points.map(({ point: [x, y], allowed }) => svg('circle', { cx: x, cy: -y, r: 0.05, class: allowed ? 'spot' : 'spot out' }));
    const [tx, ty] = this.#asked.target;
    const ways = methods.map(({ name, point: [x, y] }, at) => svg('g', {},
      svg('path', { class: 'way', d: `M${tx},${-ty} L${x},${-y}`, style: `stroke:${COLOURS[name]}` }),
      svg('circle', { cx: x, cy: -y, r: 0.2 - 0.045 * at, style: `fill:none;stroke:${COLOURS[name]};stroke-width:0.045` })));
    this.#ground.replaceChildren(...drawn, svg('line', { class: 'basis', x1: 0, y1: 0, x2: a, y2: -b }), svg('line', { class: 'basis', x1: 0, y1: 0, x2: c, y2: -d }), ...spots, ...ways);
    const first = this.#asked.first;
    this.#said.textContent = `w = (${weights.map((w) => signed(w, 2)).join(', ')}), H = [${h.map((row) => row.map((x) => signed(x, 2)).join(', ')).join('; ')}]. `
      + `GPTQ rounds w${first + 1} to ${signed(methods[1].codes[first], 0)}; its error moves w${2 - first} to ${signed(moved, 2)}, which becomes ${signed(methods[1].codes[1 - first], 0)}.`
      + (this.#asked.clip && weights.some((w) => w < this.#ends[0] - 0.5 || w > this.#ends[1] + 0.5) ? ' A weight lies beyond the ends: what clipping cuts off is an error too, and GPTQ passes it on.' : '');
    const rows = methods.map(({ name, codes, distance, mean_square }) => ({
      cells: [NAMES[name], codes.map((code) => signed(code, 0)).join(', '), distance.toFixed(3), mean_square.toFixed(3)], mark: name === this.#cells,
    }));
    const made = table('What each takes', ['method', 'codes', 'distance', 'mean squared, all t'], rows);
    made.id = 'plane-figures';
    this.#table.replaceChildren(made);
  }
}
