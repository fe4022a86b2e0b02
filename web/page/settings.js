// The form with everything that a person may choose, to and from the protocol's `Settings`.

import { byId } from './dom.js';

const form = byId('settings');

const HINTS = {
  default: 'Searched scales, columns with the largest inputs first: the least loss, and a file that fast kernels load.',
  reference: 'What the original GPTQ program does, for comparison.',
  rtn: 'Rounding to nearest, without calibration: the baseline.',
};

/** Megabytes of the memory field are decimal. */
const MB = 1e6;

let touched = false;

/** Returns the settings, or throws with the field that is wrong. */
export function read() {
  const wrong = Array.from(form.elements).find((field) => field.willValidate && !field.checkValidity());
  if (wrong) {
    const label = wrong.labels?.[0]?.firstChild.textContent.trim() ?? wrong.name;
    throw new Error(`${label}: ${wrong.validationMessage}`);
  }
  const field = (name) => form.elements[name].value;
  // What a preset has no use for stays in its field, but is not meant.
  const order = form.elements.desc_act.disabled ? '' : field('desc_act');
  return {
    device: field('device'),
    preset: field('preset'),
    bits: Number(field('bits')),
    group_size: Number(field('group_size')),
    sym: field('sym') === 'true',
    desc_act: order === '' ? null : order === 'true',
    damp_percent: Number(field('damp_percent')),
    samples: Number(field('samples')),
    seq_len: Number(field('seq_len')),
    seed: Number(field('seed')),
    max_memory: field('max_memory') === '' ? null : Number(field('max_memory')) * MB,
  };
}

/** Puts settings, or some of them, into the form. */
export function write(settings) {
  for (const [name, value] of Object.entries(settings)) {
    const field = form.elements[name];
    if (!field) continue;
    if (name === 'max_memory') field.value = value === null ? '' : Math.round(value / MB);
    else field.value = value === null ? '' : String(value);
  }
  reflect();
}

/** As `write`, unless the person has chosen something: their choice stays. */
export function suggest(values) {
  if (!touched) write(values);
}

/** `onChange()` after each choice; text fields wait until typing pauses. */
export function watch(onChange) {
  let timer;
  form.addEventListener('input', (event) => {
    touched = true;
    reflect();
    clearTimeout(timer);
    timer = setTimeout(onChange, event.target.type === 'number' ? 400 : 0);
  });
  form.addEventListener('submit', (event) => event.preventDefault());
  reflect();
}

/** What a choice means for the other fields. */
function reflect() {
  const preset = form.elements.preset.value;
  byId('preset-hint').textContent = HINTS[preset];
  for (const name of ['desc_act', 'damp_percent', 'samples', 'seq_len', 'seed']) {
    form.elements[name].disabled = preset === 'rtn';
  }
  byId('calibration').disabled = preset === 'rtn';
}

/** One line for the run's head and the report. */
export function describe(settings) {
  return [
    `${settings.bits} bits`,
    settings.group_size < 0 ? 'one group per row' : `groups of ${settings.group_size}`,
    settings.sym ? 'symmetric' : 'asymmetric',
    `preset ${settings.preset}`,
    ...(settings.preset === 'rtn' ? [] : [`${settings.samples} × ${settings.seq_len} tokens`]),
    settings.device === 'gpu' ? 'GPU' : 'CPU',
  ].join(' · ');
}
