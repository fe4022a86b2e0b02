// The table of quantized layers: grows during a run, can be filtered, and is saved as CSV.

import { byId, element, save } from './dom.js';
import { count, group, judged, loss, percent, removed } from './format.js';
import { throttled } from './throttle.js';

/** By column, where a cell has one. */
const CLASSES = { 1: 'text', 10: 'held', 11: 'held' };

export class Log {
  #rows = [];
  #lines = new Map();
  /** Lines that are not in the table yet. */
  #fresh = [];
  #filter = byId('log-filter');
  #box = byId('log-rows').closest('.scroll');
  /** Who looks at the table's end keeps seeing it. */
  #atEnd = true;
  #draw = throttled(() => this.#render(), 250);

  /** `name()` is the file name that "Save as CSV" proposes. */
  constructor(name) {
    this.#filter.addEventListener('input', () => this.#apply());
    // Asked for while rows are put in, the same would have them laid out at once.
    this.#box.addEventListener('scroll', () => {
      this.#atEnd = this.#box.scrollTop + this.#box.clientHeight > this.#box.scrollHeight - 40;
    }, { passive: true });
    byId('save-csv').onclick = () => save(new Blob([this.csv()], { type: 'text/csv' }), `${name()}.csv`);
  }

  get rows() {
    return this.#rows;
  }

  reset() {
    this.#rows = [];
    this.#lines.clear();
    this.#fresh = [];
    this.#atEnd = true;
    this.#filter.value = '';
    byId('log-rows').replaceChildren();
    this.#box.classList.remove('judged');
    this.#tell();
  }

  /** @param row the event `module`; one that is there already (a resumed run) takes its place */
  add(row) {
    const line = element('tr', { role: 'row' },
      ...[String(row.layer), row.module, String(row.input), String(row.output), String(row.bits), group(row.group),
        row.damp === null ? '–' : String(row.damp), loss(row.rtn_loss), loss(row.gptq_loss),
        removed(row) === null ? '–' : percent(removed(row)), ...judged(row), row.seconds.toFixed(2)]
        .map((text, at) => element('td', { role: 'cell', className: CLASSES[at] ?? '' }, text)));
    // What no layer has takes no room.
    if (row.held) this.#box.classList.add('judged');
    const old = this.#lines.get(row.module);
    this.#lines.set(row.module, line);
    if (old) {
      this.#rows[this.#rows.findIndex(({ module }) => module === row.module)] = row;
      if (old.isConnected) old.replaceWith(line);
      else this.#fresh[this.#fresh.indexOf(old)] = line;
    } else {
      this.#rows.push(row);
      this.#fresh.push(line);
    }
    line.hidden = !this.#matches(row);
    this.#draw();
  }

  #render() {
    byId('log-rows').append(...this.#fresh.splice(0));
    if (this.#atEnd) this.#box.scrollTop = this.#box.scrollHeight;
    this.#tell();
  }

  /** As the program's own quant_log.csv. */
  csv() {
    const head = 'layer,module,in,out,bits,group,tokens,routed,damp,rtn_loss,gptq_loss,alpha,held_rtn,held_plain,held_kept,kept,scaling,seconds';
    const held = (row) => ['alpha', 'rtn', 'plain', 'kept', 'choice'].map((name) => row.held?.[name] ?? null);
    const cell = (value) => (value === null ? '' : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
    return [head, ...this.#rows.map((row) => [row.layer, row.module, row.input, row.output, row.bits, row.group,
      row.tokens, row.routed, row.damp, row.rtn_loss, row.gptq_loss, ...held(row), row.scaling,
      row.seconds.toFixed(3)].map(cell).join(','))].join('\n') + '\n';
  }

  #matches(row) {
    const wanted = this.#filter.value.trim().toLowerCase();
    return row.module.toLowerCase().includes(wanted);
  }

  #apply() {
    for (const row of this.#rows) this.#lines.get(row.module).hidden = !this.#matches(row);
    this.#tell();
  }

  #tell() {
    const shown = this.#rows.filter((row) => this.#matches(row)).length;
    const all = this.#rows.length;
    byId('log-count').textContent = shown === all ? `${count(all)} layers` : `${count(shown)} of ${count(all)} layers`;
  }
}
