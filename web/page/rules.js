// The list of layers that differ: a line for each of the protocol's `Rule`s.

import { byId, show } from './dom.js';

const list = byId('rule-list');
const CHOICES = ['group_size', 'sym', 'desc_act'];

/** The lines that the last `read` returned rules of. */
let asked = [];

const field = (line, name) => line.querySelector(`[data-name="${name}"]`);

/** The rules; a line without a regex is one that is still being written. */
export function read() {
  asked = [...list.children].filter((line) => field(line, 'pattern').value.trim());
  return asked.map((line) => {
    const value = (name) => field(line, name).value;
    const pattern = value('pattern').trim();
    if (value('bits') === '16') return { pattern, values: null };
    const chosen = (name, of) => (value(name) === '' ? null : of(value(name)));
    const flag = (text) => text === 'true';
    return {
      pattern,
      values: {
        bits: chosen('bits', Number), group_size: chosen('group_size', Number), sym: chosen('sym', flag),
        desc_act: chosen('desc_act', flag), static_groups: null, mse: null,
      },
    };
  });
}

export function write(rules) {
  list.replaceChildren();
  for (const { pattern, values } of rules) {
    const line = add();
    field(line, 'pattern').value = pattern;
    field(line, 'bits').value = values ? values.bits ?? '' : '16';
    for (const name of CHOICES) field(line, name).value = String(values?.[name] ?? '');
    reflect(line);
  }
}

/** Shows what is wrong at the line of the rule with this number; `null` for nothing. */
export function mark(rule, text) {
  for (const line of list.children) {
    const wrong = line === asked[rule];
    show(line.querySelector('.wrong'), wrong ? text : null);
    field(line, 'pattern').setAttribute('aria-invalid', String(wrong));
  }
}

/** `onChange()` when a line goes away; the fields' own events bubble to the form. */
export function watch(onChange) {
  list.addEventListener('input', (event) => reflect(event.target.closest('li')));
  byId('add-rule').onclick = () => field(add(), 'pattern').focus();
  list.addEventListener('click', (event) => {
    if (event.target.tagName !== 'BUTTON') return;
    event.target.closest('li').remove();
    byId('add-rule').focus();
    onChange();
  });
}

function add() {
  list.append(byId('rule').content.cloneNode(true));
  return list.lastElementChild;
}

/** Layers that stay as they are have no grid. */
function reflect(line) {
  for (const name of CHOICES) field(line, name).disabled = field(line, 'bits').value === '16';
}
