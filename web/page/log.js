// The table of quantized layers: grows during a run, can be filtered, and is saved as CSV.

import { byId, element, save } from './dom.js';
import { count, group, loss, percent, removed } from './format.js';
import { throttled } from './throttle.js';

export class Log {
  #rows = [];
  #lines = new Map();
  /** Lines that are not in the table yet. */
  #fresh = [];
  #filter = byId('log-filter');
  #draw = throttled(() => this.#render(), 250);

  /** `name()` is the file name that "Save as CSV" proposes. */
  constructor(name) {
    this.#filter.addEventListener('input', () => this.#apply());
    byId('save-csv').onclick = () => save(new Blob([this.csv()], { type: 'text/csv' }), `${name()}.csv`);
  }

  get rows() {
    return this.#rows;
  }

  reset() {
    this.#rows = [];
    this.#lines.clear();
    this.#fresh = [];
    this.#filter.value = '';
    byId('log-rows').replaceChildren();
    this.#tell();
  }

  /** @param row the event `module`; one that is there already (a resumed run) takes its place */
  add(row) {
    const line = element('tr', {},
      ...[String(row.layer), row.module, String(row.input), String(row.output), String(row.bits), group(row.group),
        row.damp === null ? '–' : String(row.damp), loss(row.rtn_loss), loss(row.gptq_loss),
        removed(row) === null ? '–' : percent(removed(row)), row.seconds.toFixed(2)]
        .map((text, at) => element('td', { className: at === 1 ? 'text' : '' }, text)));
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

  /** Puts the new lines into the table; who looks at its end keeps seeing it. */
  #render() {
    const box = byId('log-rows').closest('.scroll');
    const atEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
    byId('log-rows').append(...this.#fresh.splice(0));
    if (atEnd) box.scrollTop = box.scrollHeight;
    this.#tell();
  }

  /** As the program's own quant_log.csv. */
  csv() {
    const head = 'layer,module,in,out,bits,group,tokens,routed,damp,rtn_loss,gptq_loss,seconds';
    const cell = (value) => (value === null ? '' : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
    return [head, ...this.#rows.map((row) => [row.layer, row.module, row.input, row.output, row.bits, row.group,
      row.tokens, row.routed, row.damp, row.rtn_loss, row.gptq_loss, row.seconds.toFixed(3)].map(cell).join(','))].join('\n') + '\n';
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
