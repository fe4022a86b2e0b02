// The plan: what the run will take, checked before any work.

import { byId, element, facts } from './dom.js';
import { about, bytes, count, group, percent } from './format.js';

const PARTS = {
  stream: 'text',
  between_stages: 'between stages',
  weights: 'weights',
  hessian: 'Hessian and factor',
  original: 'original model beside it',
  working: 'working',
};

/** @param plan the event `plan`  @param model the event `model` */
export function render(plan, model) {
  const list = element('dl', { className: 'facts' });
  facts(list, [
    ['Time', plan.seconds === null ? 'not known yet' : about(plan.seconds), 'from a short measurement of this device'],
    ['Result', `${bytes(plan.output_bytes)}, ${percent(plan.output_bytes / model.bytes, 0)} of ${bytes(model.bytes)}`],
    ['Files of weights', plan.weight_files > 1 ? count(plan.weight_files) : null],
    ['Bits', plan.average_bits && `${plan.average_bits} on average`, 'which layer gets how many is measured when the run begins; the table shows what may be assumed'],
    ['Calibration', plan.tokens ? `${count(plan.tokens)} tokens` : 'none'],
    ['Memory', bytes(plan.memory_bytes), 'at the most demanding moment'],
    ['Free in the browser', plan.free_bytes === null ? null : bytes(plan.free_bytes)],
  ]);
  byId('plan-body').replaceChildren(list, memory(plan), warnings(plan.warnings), modules(plan.modules), kept(plan.skipped));
}

/** The parts of the memory's peak as one bar with a legend. */
function memory({ memory, memory_bytes: total }) {
  const parts = Object.entries(memory).filter(([, value]) => value > 0);
  const bar = element('div', { className: 'stack' });
  bar.setAttribute('aria-hidden', 'true');
  const legend = element('ul', { className: 'legend' });
  parts.forEach(([name, value], index) => {
    const piece = element('span', { className: `part part-${index % 6}` });
    piece.style.flexGrow = String(value / total);
    bar.append(piece);
    legend.append(element('li', {}, element('i', { className: `part-${index % 6}` }),
      `${PARTS[name] ?? name.replaceAll('_', ' ')} ${bytes(value)}`));
  });
  return element('div', { className: 'memory' }, bar, legend);
}

export function warnings(texts) {
  const list = element('ul', { className: 'warnings', hidden: texts.length === 0 });
  list.append(...texts.map((text) => element('li', {}, text)));
  return list;
}

/** Layers of one kind share a row; all of them one by one are a click away. */
function modules(rows) {
  const kinds = new Map();
  for (const row of rows) {
    const name = row.module.replace(/\.\d+\./, '.*.');
    const key = [name, row.input, row.output, row.bits, row.group, row.sym].join(' ');
    const kind = kinds.get(key)
      ?? { ...row, module: name.split('.*.').pop(), times: 0, blocks: [], dense_bytes: 0, quantized_bytes: 0 };
    kind.times += 1;
    kind.blocks.push(row.layer);
    kind.dense_bytes += row.dense_bytes;
    kind.quantized_bytes += row.quantized_bytes;
    kinds.set(key, kind);
  }
  // Where layers of one name differ, it says which are meant.
  const alike = ({ module }) => [...kinds.values()].filter((other) => other.module === module);
  for (const kind of kinds.values()) if (alike(kind).length > 1) kind.where = ranges(kind.blocks);
  const all = element('details', {}, element('summary', {}, `All ${count(rows.length)} layers one by one`));
  all.addEventListener('toggle', () => {
    if (all.open && all.childElementCount === 1) all.append(scrolling('Every layer of the plan', table(rows)));
  });
  return element('div', {}, scrolling('Layers by kind', table([...kinds.values()])), all);
}

/** [0, 1, 2, 5] → "block 0–2, 5" */
function ranges(numbers) {
  const parts = [];
  for (const number of numbers) {
    const last = parts.at(-1);
    if (last?.[1] === number - 1) last[1] = number;
    else parts.push([number, number]);
  }
  return `block ${parts.map(([from, to]) => (from === to ? from : `${from}–${to}`)).join(', ')}`;
}

/** What stays in 16 bits as asked. */
function kept(modules) {
  const text = `${count(modules.length)} ${modules.length === 1 ? 'layer stays' : 'layers stay'} in 16 bits`;
  return element('details', { hidden: modules.length === 0 }, element('summary', {}, text),
    element('p', { className: 'quiet names' }, modules.join(', ')));
}

function scrolling(label, content) {
  const box = element('div', { className: 'scroll', tabIndex: 0 }, content);
  box.setAttribute('role', 'region');
  box.setAttribute('aria-label', label);
  return box;
}

function table(rows) {
  const head = (text, className = '') => element('th', { scope: 'col', className }, text);
  const body = rows.map((row) => element('tr', {},
    element('td', { className: 'text' }, [row.times > 1 ? `${row.module} ×${row.times}` : row.module, row.where].filter(Boolean).join(', ')),
    element('td', {}, `${row.input} → ${row.output}`),
    element('td', {}, String(row.bits)),
    element('td', {}, group(row.group)),
    element('td', {}, row.sym ? 'sym' : 'asym'),
    element('td', {}, `${bytes(row.dense_bytes)} → ${bytes(row.quantized_bytes)}`)));
  return element('table', {},
    element('thead', {}, element('tr', {},
      head('layer', 'text'), head('in → out'), head('bits'), head('group'), head('grid'), head('size'))),
    element('tbody', {}, ...body));
}
