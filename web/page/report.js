// A finished run as one HTML file that needs nothing else.

import { maker, save } from './dom.js';
import { count, group, judged, loss, parameters, percent, removed } from './format.js';
import { sentences } from './evaluate.js';
import { figures, steps } from './result.js';
import { describe } from './settings.js';

/** The charts are pictures in the colours of the moment, so the report keeps to these. */
const style = (colour) => `
body { font: 15px/1.5 system-ui, sans-serif; color: ${colour('--ink')}; background: ${colour('--card')}; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } .quiet, figcaption, dt { color: ${colour('--quiet')}; } dl { display: flex; flex-wrap: wrap; gap: .5rem 2rem; }
dt { font-size: .85em; } dd { margin: 0; font-weight: 600; } img { max-width: 100%; } figure { margin: 1rem 0; }
.squares { display: flex; flex-wrap: wrap; gap: 1rem; } .squares img { width: 16rem; image-rendering: pixelated; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85em; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid ${colour('--line')}; } .text { text-align: left; }`;

// In a document of its own nothing is loaded: the page's policy has no place for images as data URLs.
const element = maker(document.implementation.createHTMLDocument(''));

/** @param run `{ready, model, settings, text, done, rows, charts, picture, evaluation}` */
export function saveReport(run) {
  // Whatever comes from a file passes through an element and is escaped by it.
  const root = getComputedStyle(document.documentElement);
  const body = element('body', {}, ...content(run));
  const title = element('title', {}, `Halftone: ${run.model.name}`);
  const html = `<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n${title.outerHTML}\n`
    + `<style>${style((name) => root.getPropertyValue(name))}\n</style>\n</head>\n${body.outerHTML}\n</html>\n`;
  save(new Blob([html], { type: 'text/html' }), `${run.name}-report.html`);
}

function content({ ready, model, settings, text, done, rows, charts, picture, evaluation }) {
  const list = (pairs) => element('dl', {}, ...pairs.filter(([, value]) => value).map(([name, value]) =>
    element('div', {}, element('dt', {}, name), element('dd', {}, value))));
  const heading = (title) => element('h2', {}, title);
  const device = settings.device === 'gpu' ? ready.adapter?.name ?? 'GPU' : 'CPU';
  return [
    element('h1', {}, model.name),
    element('p', { className: 'quiet' }, `Quantized by Halftone ${ready.version} in a browser, ${new Date().toISOString().slice(0, 10)}`),
    list([
      ['Architecture', model.architecture], ['Parameters', parameters(model.parameters)], ['Blocks', String(model.layers)],
      ['Scheme', describe(settings)], ['Device', device],
      ['Calibration', settings.preset === 'rtn' ? 'none' : `${text.name}, seed ${settings.seed}`],
    ]),
    heading('Result'),
    list(figures(done, model, rows)),
    element('p', { className: 'quiet' }, steps(done)),
    ...(done.warnings.length ? [heading('Warnings'), element('ul', {}, ...done.warnings.map((line) => element('li', {}, line)))] : []),
    ...(evaluation.outcome ? [heading('Evaluation'), ...sentences(evaluation.outcome)] : []),
    ...(evaluation.image() ? [figure('Relative error of the hidden state after each block', evaluation.image())] : []),
    heading('Layers'),
    ...charts.images().map(([caption, image]) => figure(caption, image)),
    ...(picture.module ? [element('p', { className: 'quiet' }, `The first corner of ${picture.module}`),
      element('div', { className: 'squares' }, ...picture.images().map(([caption, image]) =>
        element('figure', {}, element('img', { src: image, alt: caption }), element('figcaption', {}, caption))))] : []),
    table(rows),
  ];
}

const figure = (caption, image) =>
  element('figure', {}, element('figcaption', {}, caption), element('img', { src: image, alt: caption }));

function table(rows) {
  const held = rows.some((row) => row.held);
  const head = ['block', 'module', 'in', 'out', 'bits', 'group', 'tokens', 'damp', 'rtn loss', 'gptq loss', 'removed',
    ...(held ? ['alpha', 'kept'] : []), 'seconds'];
  const cell = (tag) => (text, at) => element(tag, { className: at === 1 ? 'text' : '' }, text);
  return element('table', {},
    element('thead', {}, element('tr', {}, ...head.map(cell('th')))),
    element('tbody', {}, ...rows.map((row) => element('tr', {}, ...[
      String(row.layer), row.module, String(row.input), String(row.output), String(row.bits), group(row.group), count(row.tokens),
      row.damp === null ? '–' : String(row.damp), loss(row.rtn_loss), loss(row.gptq_loss),
      removed(row) === null ? '–' : percent(removed(row)), ...(held ? judged(row) : []), row.seconds.toFixed(2)].map(cell('td'))))));
}
