// The form with everything that a person may choose, to and from the protocol's `Settings`.

import * as rules from './rules.js';
import { byId, show } from './dom.js';

const form = byId('settings');

const REFIT = 'After the rounding fits the scales to the codes and moves codes, group by group. Held-out text says where that is kept.';
const NO_REFIT = 'This preset’s scales follow the order of columns and are not fitted again; with whole rows they can be.';

const HINTS = {
  default: 'The least error: aims at the original’s outputs, and refines what the sweep leaves. The file is one that fast kernels load.',
  fast: 'One sweep with searched scales, the largest inputs first, in less than half of the time.',
  reference: 'What the original GPTQ program does, for comparison.',
  awq: 'Inputs scaled by their size, as AWQ does, then rounding to nearest: for comparison.',
  rtn: 'Rounding to nearest, without calibration: the baseline.',
};

const FORMATS = {
  gptq: 'The most widely read.',
  gptq_v2: 'The same with zero points as they are, for GPTQModel; other readers take it for gptq.',
  'compressed-tensors': 'That of llm-compressor; vLLM and Transformers read also what differs from layer to layer.',
};

/** Megabytes are decimal. */
const MB = 1e6;
const IN_MB = ['max_memory', 'shard_bytes'];

let touched = false;

/** The open model's head is its embedding table. */
let tied = false;

/** The open model has experts. */
let experts = false;

/** Returns the settings, or throws with the field that is wrong. */
export function read() {
  const wrong = Array.from(form.elements).find((field) => field.willValidate && !field.checkValidity());
  if (wrong) {
    const label = wrong.labels?.[0]?.firstChild.textContent.trim() ?? wrong.name;
    throw new Error(`${label}: ${wrong.validationMessage}`);
  }
  const field = (name) => form.elements[name].value;
  // What a preset has no use for stays in its field, but is not meant.
  const meant = (name) => (form.elements[name].disabled ? '' : field(name));
  const [order, refit] = [meant('desc_act'), meant('refit')];
  const damping = meant('damp_percent');
  const megabytes = (name) => (field(name) === '' ? null : Number(field(name)) * MB);
  return {
    device: field('device'),
    preset: field('preset'),
    bits: Number(field(field('bits') === 'average' ? 'average' : 'bits')),
    group_size: field('group_size') === 'auto' ? 'auto' : Number(field('group_size')),
    sym: field('sym') === 'true',
    desc_act: order === '' ? null : order === 'true',
    damp_percent: damping === '' ? null : Number(damping),
    alpha: alpha(meant('alpha'), Number(field('alpha_share'))),
    refit: refit === '' ? null : refit === 'true',
    samples: Number(field('samples')),
    seq_len: Number(field('seq_len')),
    seed: Number(field('seed')),
    max_memory: megabytes('max_memory'),
    format: field('format'),
    rules: rules.read(),
    lm_head: form.elements.lm_head.checked && !tied,
    all_experts: form.elements.all_experts.checked && experts && field('preset') !== 'rtn',
    shard_bytes: megabytes('shard_bytes'),
  };
}

/** The protocol's `Alpha`, `null` for the preset's. */
function alpha(choice, share) {
  if (choice === '') return null;
  return choice === 'measured' ? choice : { fixed: choice === 'fixed' ? share : Number(choice) };
}

/** The share of a fixed correction. Strings have a method of that name. */
const shareOf = (value) => (typeof value === 'string' ? null : value?.fixed ?? null);

function writeAlpha(value) {
  const share = shareOf(value);
  form.elements.alpha.value = share === null ? value ?? '' : share === 0 ? '0' : 'fixed';
  if (share) form.elements.alpha_share.value = String(share);
}

function writeBits(value) {
  const widths = Array.from(form.elements.bits, (choice) => choice.value);
  const width = widths.includes(String(value));
  form.elements.bits.value = width ? String(value) : 'average';
  if (!width) form.elements.average.value = String(value);
}

/** Puts settings, or some of them, into the form. */
export function write(settings) {
  for (const [name, value] of Object.entries(settings)) {
    const field = form.elements[name];
    if (name === 'rules') rules.write(value);
    else if (name === 'alpha') writeAlpha(value);
    else if (name === 'bits') writeBits(value);
    else if (!field) continue;
    else if (field.type === 'checkbox') field.checked = value;
    else if (IN_MB.includes(name)) field.value = value === null ? '' : value / MB;
    else field.value = value === null ? '' : String(value);
  }
  reflect();
}

/** As `write`, unless the person has chosen something: their choice stays. */
export function suggest(values) {
  if (!touched) write(values);
}

/** What a model leaves to choose. @param model the event `model` */
export function limit(model) {
  tied = model.tied;
  experts = model.experts !== null;
  reflect();
}

/** `onChange()` after each choice; text fields wait until typing pauses. */
export function watch(onChange) {
  let timer;
  const changed = (wait) => {
    touched = true;
    reflect();
    clearTimeout(timer);
    timer = setTimeout(onChange, wait);
  };
  form.addEventListener('input', (event) => changed(['number', 'text'].includes(event.target.type) ? 400 : 0));
  rules.watch(() => changed(0));
  form.addEventListener('submit', (event) => event.preventDefault());
  reflect();
}

/** What a choice means for the other fields. */
function reflect() {
  const preset = form.elements.preset.value;
  byId('preset-hint').textContent = HINTS[preset];
  byId('format-hint').textContent = FORMATS[form.elements.format.value];
  form.elements.lm_head.disabled = tied;
  byId('average-line').hidden = form.elements.average.disabled = form.elements.bits.value !== 'average';
  show(byId('head-hint'), tied ? 'This model’s head is its embedding table, which stays in 16 bits.' : null);
  const rounds = preset === 'rtn' || preset === 'awq';
  for (const name of ['desc_act', 'damp_percent', 'alpha', 'refit']) form.elements[name].disabled = rounds;
  for (const name of ['samples', 'seq_len', 'seed']) form.elements[name].disabled = preset === 'rtn';
  const share = form.elements.alpha.value === 'fixed' && !rounds;
  byId('alpha-share').hidden = form.elements.alpha_share.disabled = !share;
  const following = preset === 'reference' && form.elements.group_size.value !== '-1';
  if (following) form.elements.refit.disabled = true;
  byId('refit-hint').textContent = following ? NO_REFIT : REFIT;
  byId('experts-line').hidden = !experts;
  form.elements.all_experts.disabled = preset === 'rtn';
  byId('calibration').disabled = preset === 'rtn';
}

/** One line for the run's head and the report. */
export function describe(settings) {
  return [
    Number.isInteger(settings.bits) ? `${settings.bits} bits` : `${settings.bits} bits on average`,
    settings.group_size === 'auto' ? 'groups as large as divide'
      : settings.group_size < 0 ? 'one group per row' : `groups of ${settings.group_size}`,
    settings.sym ? 'symmetric' : 'asymmetric',
    `preset ${settings.preset}`,
    ...corrected(settings),
    ...(settings.format === 'gptq' ? [] : [settings.format]),
    ...(settings.lm_head ? ['head too'] : []),
    ...(settings.rules.length ? [`some layers by ${settings.rules.map(({ pattern }) => pattern).join(', ')}`] : []),
    ...(settings.preset === 'rtn' ? [] : [`${settings.samples} × ${settings.seq_len} tokens`]),
    settings.device === 'gpu' ? 'GPU' : 'CPU',
  ].join(' · ');
}

/** What goes beyond one sweep, as far as it was chosen; stored settings of before may lack it. */
function corrected({ alpha = null, refit = null, all_experts: all = false }) {
  const share = shareOf(alpha);
  return [
    ...(alpha === null ? [] : [share === null ? 'correction as measured' : share ? `correction by ${share}` : 'no correction']),
    ...(refit === null ? [] : [refit ? 'scales fitted again' : 'no refit']),
    ...(all ? ['every token for every expert'] : []),
  ];
}
