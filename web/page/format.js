// Numbers as people read them.

/** Between a figure and its unit, so that no line ends there. */
const SPACE = '\u00a0';

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });

/** 16384 → "16,384" */
export const count = (value) => whole.format(value);

/** Decimal units, as the command line has them: 10498464 → "10.5 MB" */
export function bytes(value) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let step = 0;
  while (value >= 999.95 && step < units.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${step === 0 ? value : value.toFixed(1)}${SPACE}${units[step]}`;
}

/** 134515008 → "135 M" */
export function parameters(value) {
  if (value >= 1e9) return `${(value / 1e9).toPrecision(3)}${SPACE}B`;
  return value >= 1e6 ? `${(value / 1e6).toPrecision(3)}${SPACE}M` : count(value);
}

/** 75 → "1 min 15 s" */
export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)}${SPACE}s`;
  const total = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  if (hours > 0) return `${hours} h ${minutes} min`;
  return minutes > 0 ? `${minutes} min ${rest} s` : `${rest} s`;
}

/** A guess should not look exact: 75 → "about a minute" */
export function about(seconds) {
  if (seconds < 5) return 'a few seconds';
  if (seconds < 55) return `about ${Math.round(seconds / 5) * 5} s`;
  if (seconds < 90) return 'about a minute';
  if (seconds < 5400) return `about ${Math.round(seconds / 60)} min`;
  return `about ${(seconds / 3600).toFixed(1)} h`;
}

/** 0.342 → "34.2 %" */
export const percent = (share, digits = 1) => `${(share * 100).toFixed(digits)}${SPACE}%`;

/** A loss: three figures, as a power of ten where it is small. */
export function loss(value) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0';
  return value >= 0.01 && value < 1e5 ? value.toPrecision(3) : value.toExponential(2);
}

/** 1 − gptq/rtn, or `null` where there is nothing to compare. */
export function removed(row) {
  return row.rtn_loss > 0 && row.gptq_loss !== null ? 1 - row.gptq_loss / row.rtn_loss : null;
}

/** What was kept of a layer's candidates, as held-out text judged. */
const KEPT = { full: 'all of it', swept: 'without refit', plain: 'plain sweep', rtn: 'rounding' };

/** Share of the correction and what was kept, of a layer that was judged by held-out text. */
export const judged = ({ held }) => (held ? [String(+held.alpha.toFixed(3)), KEPT[held.choice] ?? held.choice] : ['–', '–']);

/** "group 64" or "whole row" */
export const group = (size) => (size < 0 ? 'whole row' : String(size));

/** What layers have, where their bits are an average. @param event the event `allocated` */
export const allocation = ({ reached, kinds }) => `${reached.toFixed(2)} bits on average: ${kinds.map(({ kind, counts }) =>
  `${kind} ${Object.entries(counts).map(([bits, times]) => `${bits} bits ×${times}`).join(', ')}`).join('; ')}`;
