// What came out of a run.

import { byId, facts, show } from './dom.js';
import { allocation, bytes, duration, percent } from './format.js';

/**
 * The figures of a finished run as `[name, value, hint]`, for the page and the report.
 * @param done the event `done`  @param model the event `model`  @param rows events `module`
 */
export function figures(done, model, rows) {
  const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
  const weights = rows.reduce((total, row) => total + row.input * row.output, 0);
  return [
    ['Model', `${bytes(model.bytes)} → ${bytes(done.output_bytes)}`, 'tensors of the whole model'],
    ['Of its size', percent(done.output_bytes / model.bytes, 0)],
    ['Bits per weight', done.bits_per_weight.toFixed(2), `of the ${rows.length} quantized layers, scales included`],
    ['Bits', done.allocation && allocation(done.allocation), 'of codes alone, as they were settled by measurement'],
    ['Error left', done.loss_ratio === null ? null : percent(done.loss_ratio),
      'of what rounding to nearest would lose on the calibration text'],
    ['Weights quantized', weights ? `${(weights / 1e6).toFixed(1)} M` : null],
    ['Time', duration(done.seconds), `${sum('seconds').toFixed(1)} s of it in the layers`],
  ];
}

/** "forward 3.1 s, hessian 2.0 s, …", the longest first */
export const steps = (done) => Object.entries(done.seconds_by_step)
  .sort(([, a], [, b]) => b - a)
  .map(([name, seconds]) => `${name} ${duration(seconds)}`).join(', ');

/** `where`: the folder that was written to, `null` for the private storage. */
export function render(done, model, rows, where) {
  facts(byId('result-facts'), figures(done, model, rows));
  byId('result-steps').textContent = steps(done);
  show(byId('result-place'), where
    ? `All files are in ${where}.`
    : `In this browser’s storage as ${done.stored}. Download what you want to keep: a browser may clear its storage.`);
  byId('result-files').replaceChildren();
}
