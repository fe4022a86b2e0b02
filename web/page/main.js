// The flow: device → model → calibration and scheme → plan → run → result. The parts know how to show
// things; what follows what is here.

import * as device from './device.js';
import * as downloads from './downloads.js';
import * as files from './files.js';
import * as output from './output.js';
import * as plan from './plan.js';
import * as result from './result.js';
import * as rules from './rules.js';
import * as opened from './opened.js';
import * as settings from './settings.js';
import * as stored from './stored.js';
import { keepAwake } from './awake.js';
import { Charts } from './charts.js';
import { Core } from './core.js';
import { Evaluation } from './evaluate.js';
import { byId, facts, show } from './dom.js';
import { bytes, count, parameters } from './format.js';
import { Log } from './log.js';
import { clear, guarded } from './message.js';
import { Picture } from './picture.js';
import { saveReport } from './report.js';
import { Run } from './run.js';
import { Try } from './try.js';

/** What is known so far: events of the worker, and choices of the person. */
const state = { ready: null, model: null, text: null, plan: null, settings: null, done: null, where: null, resume: null };

/** The demo model is so small that it is done in a minute with these. */
const FOR_DEMO = { group_size: 64, samples: 64, seq_len: 256 };
const USUAL = { group_size: 128, samples: 128, seq_len: 512 };

const core = new Core(new URL('../worker.js', import.meta.url), hear);
const run = new Run();
const charts = new Charts({ loss: byId('loss-chart'), share: byId('share-chart'), speed: byId('speed-chart') });
const picture = new Picture();
const log = new Log(() => resultName());
/** The worker does one thing after another, so the buttons of both wait. */
const shared = {
  device: () => settings.read().device,
  busy: (on) => { byId('measure').disabled = byId('generate').disabled = on; },
};
const evaluation = new Evaluation(core, shared);
const trial = new Try(core, shared);

function hear(event) {
  if (byId('run').hidden) return;
  if (event.type === 'progress') charts.measure(event);
  if (event.type === 'weights') picture.set(event);
  if (event.type === 'module') {
    charts.add(event);
    log.add(event);
  }
  run.hear(event);
}

/** Which of the views is there: `setup`, `run`, `done` (a run and its result), `opened` (a stored result). */
function view(name) {
  const shown = {
    setup: ['setup', 'device'], run: ['run', 'log'], done: ['run', 'log', 'result', 'try', 'evaluate'],
    opened: ['opened', 'try', 'evaluate'],
  }[name];
  for (const id of ['setup', 'device', 'run', 'log', 'result', 'try', 'evaluate', 'opened']) byId(id).hidden = !shown.includes(id);
  if (name !== 'setup') byId('stored').hidden = true;
}

/** What the result is called, and a folder made for it. */
const resultName = () => `${state.model.name.replace(/[^\w.-]/g, '-')}-${state.settings.bits}bit`;

// Model

async function open(demo, chosen) {
  show(byId('model-status'), 'Reading …');
  byId('settings').hidden = byId('plan').hidden = true;
  facts(byId('model-facts'), []);
  state.model = null;
  try {
    state.model = await core.ask({ type: 'open', demo, name: chosen?.name || null }, { files: chosen?.files });
  } finally {
    show(byId('model-status'), null);
  }
  describeModel(state.model);
  settings.limit(state.model);
  if (!state.resume) settings.suggest(demo ? FOR_DEMO : USUAL);
  byId('settings').hidden = byId('plan').hidden = false;
  if (!state.text) await calibrate();
  await makePlan();
}

function describeModel(model) {
  facts(byId('model-facts'), [
    ['Name', model.name],
    ['Architecture', model.architecture],
    ['Parameters', parameters(model.parameters)],
    ['Blocks', `${model.layers} of width ${count(model.hidden)}`],
    ['Vocabulary', count(model.vocab)],
    ['Size', `${bytes(model.bytes)} in ${model.dtype}${model.shards > 1 ? `, ${model.shards} files` : ''}`],
    ['Quantized already', model.quantized_bits && `to ${model.quantized_bits} bits`],
  ]);
}

function watchModel() {
  const folder = byId('folder-input');
  const single = byId('files-input');
  byId('choose-demo').onclick = () => guarded(() => open(true));
  byId('choose-folder').onclick = () => guarded(async () => {
    if ('showDirectoryPicker' in window) {
      await open(false, await files.fromDirectory(await showDirectoryPicker({ id: 'halftone-model' })));
    } else {
      folder.click();
    }
  });
  byId('choose-files').onclick = () => single.click();
  for (const input of [folder, single]) {
    input.onchange = () => guarded(async () => {
      if (input.files.length) await open(false, files.fromInput(input.files));
      input.value = '';
    });
  }
  const over = (on) => byId('drop').classList.toggle('over', on);
  // A file dropped beside the mark should not make the browser leave the page.
  addEventListener('dragover', (event) => {
    event.preventDefault();
    over(!byId('setup').hidden);
  });
  addEventListener('dragleave', (event) => { if (!event.relatedTarget) over(false); });
  addEventListener('drop', (event) => {
    event.preventDefault();
    over(false);
    if (byId('setup').hidden) return;
    const dropped = files.fromDrop(event.dataTransfer);
    guarded(async () => open(false, await dropped));
  });
}

// Calibration, scheme, plan

async function calibrate() {
  const own = byId('settings').elements.calibration.value === 'own';
  const chosen = [...byId('calibration-input').files];
  byId('own-text').hidden = !own;
  byId('calibration-facts').textContent = '';
  state.text = state.plan = null;
  byId('quantize').disabled = true;
  if (own && !chosen.length) return;
  state.text = await core.ask({ type: 'calibration', builtin: !own }, { files: own ? chosen : undefined });
  const { name, bytes: size, documents } = state.text;
  byId('calibration-facts').textContent = `${name}, ${bytes(size)}${documents > 1 ? `, ${count(documents)} documents` : ''}`;
}

let latest = 0;

async function makePlan() {
  const mine = ++latest;
  state.plan = null;
  byId('quantize').disabled = true;
  if (!state.model) return;
  const chosen = settings.read();
  if (!state.text && chosen.preset !== 'rtn') {
    byId('plan-body').replaceChildren();
    show(byId('plan-status'), 'Choose a calibration text.');
    return;
  }
  show(byId('plan-status'), 'Checking …');
  try {
    const answer = await core.ask({ type: 'plan', settings: chosen }, { directory: output.folder() ?? undefined });
    if (mine !== latest) return;
    clear();
    rules.mark(null);
    show(byId('plan-status'), null);
    state.plan = answer;
    state.settings = chosen;
    plan.render(answer, state.model);
    byId('quantize').disabled = !output.ready();
    offerResume();
  } catch (error) {
    // An answer to settings that were changed meanwhile is of no interest.
    if (mine !== latest) return;
    byId('plan-body').replaceChildren();
    rules.mark(error.rule, error.message);
    if ((error.rule ?? null) !== null) {
      clear();
      byId('more').open = true;
      show(byId('plan-status'), 'With these settings it cannot be done; “Layers that differ” says why.');
      return;
    }
    show(byId('plan-status'), 'With these settings it cannot be done; the message says why.');
    throw error;
  }
}

function watchSettings() {
  settings.watch(() => guarded(makePlan));
  for (const radio of byId('settings').elements.calibration) {
    radio.addEventListener('change', (event) => {
      event.stopPropagation();
      guarded(async () => {
        await calibrate();
        await makePlan();
      });
    });
  }
  byId('calibration-input').onchange = () => guarded(async () => {
    await calibrate();
    await makePlan();
  });
  output.watch(() => guarded(makePlan));
  byId('output').onsubmit = (event) => {
    event.preventDefault();
    guarded(() => quantize(false));
  };
}

// Run

let target = null;
let running = false;

async function quantize(again) {
  if (!again) {
    target = await output.place(resultName());
    state.where = target.where;
    log.reset();
    charts.reset(state.plan.modules, state.settings.preset !== 'rtn');
    picture.set(null);
  }
  const resume = again || target.resume || state.resume !== null;
  view('run');
  run.begin(`${state.model.name} · ${settings.describe(state.settings)}`);
  byId('run-title').focus();
  keepAwake(running = true);
  try {
    state.done = await core.ask({ type: 'quantize', settings: state.settings, resume },
      { directory: target.directory ?? undefined });
    run.finish(state.done);
    state.resume = null;
    result.render(state.done, state.model, log.rows, state.where);
    judge(null, state.settings.bits, true);
    view('done');
    byId('result-title').focus();
    if (state.done.stored) await offerFiles(state.done.stored, byId('result-files'));
  } catch (error) {
    // 130 is what Cancel asked for; after 70 nothing answers any more.
    if (error.code === 130) run.stop('Stopped as you wished.', error.resumable);
    else if (error.code === 70) {
      run.stop('The program has ended; the message says why. Reload the page: finished blocks are kept.', false);
      throw error;
    } else {
      run.stop('The run ended; the message says why.', error.resumable ?? false);
      throw error;
    }
  } finally {
    keepAwake(running = false);
  }
}

function watchRun() {
  let paused = false;
  byId('pause').onclick = () => guarded(async () => {
    run.stopping('Pausing at the next safe point …');
    try {
      await core.ask({ type: 'pause' });
      paused = true;
    } catch (error) {
      // The run came to its end before it came to a safe point.
      if (running) throw error;
    }
  });
  byId('resume').onclick = () => guarded(async () => {
    if (!paused) return quantize(true);
    paused = false;
    return core.ask({ type: 'resume' });
  });
  byId('cancel').onclick = () => {
    paused = false;
    run.stopping('Stopping at the next safe point …');
    core.tell({ type: 'cancel' });
  };
  byId('again').onclick = byId('anew').onclick = byId('close-opened').onclick = () => guarded(async () => {
    run.leave();
    view('setup');
    await list();
    await makePlan();
  });
  byId('save-report').onclick = () => saveReport({
    ...state, name: resultName(), rows: log.rows, charts, picture, evaluation,
  });
}

// What lies in the browser's storage

async function list() {
  showStored(await core.ask({ type: 'list' }));
}

function showStored(event) {
  stored.render(event, {
    resume: prepareResume,
    open: (item) => guarded(() => openStored(item)),
    remove: (item) => guarded(async () => {
      if (!confirm(`Remove ${item.name} from this browser?`)) return;
      if (state.resume?.name === item.name) forgetResume();
      showStored(await core.ask({ type: 'remove', name: item.name }));
    }),
  });
}

/** What the panels below are about: a stored result by its name, or the last one (`null`). */
function judge(name, bits, before) {
  evaluation.about({ stored: name, before });
  trial.about({
    stored: name, before: before ? `The original, ${state.model.dtype}` : null, after: bits ? `Quantized, ${bits} bits` : 'Quantized',
  });
}

/** A stored result on its own; compared with the model that it was made from if that is open. */
async function openStored(item) {
  opened.render(item);
  judge(item.name, item.settings?.bits, state.model !== null && state.model.name === item.model);
  view('opened');
  byId('opened-title').focus();
  await offerFiles(item.name, byId('opened-files'));
}

async function offerFiles(name, place) {
  const { files: found } = await core.ask({ type: 'fetch', name });
  downloads.render(place, found);
}

/** A stopped run goes on with its own settings, on the model that it was begun with. */
function prepareResume(item) {
  state.resume = item;
  if (item.settings) settings.write(item.settings);
  offerResume();
  if (state.model) guarded(makePlan);
  else show(byId('model-status'), `To go on with ${item.name}, choose the model that it was begun with.`);
  byId(state.model ? 'plan' : 'model').scrollIntoView();
  byId(state.model ? 'quantize' : 'choose-folder').focus();
}

function offerResume() {
  const item = state.resume;
  byId('quantize').textContent = item ? 'Go on' : 'Quantize';
  byId('resume-line').hidden = !item;
  if (item) byId('resume-text').textContent = `Goes on with ${item.name}, ${item.unfinished[0]} of ${item.unfinished[1]} blocks done.`;
}

function forgetResume() {
  state.resume = null;
  offerResume();
}

byId('forget-resume').onclick = forgetResume;

// "How it works" is another view, by the address's hash; what it takes is loaded when it is first asked for.

let lessons = null;

async function showLessons() {
  const on = location.hash.startsWith('#how');
  document.body.classList.toggle('learning', on);
  byId('how').hidden = byId('to-work').hidden = !on;
  byId('to-how').hidden = on;
  if (!on) return;
  lessons ??= import('../how/how.js').then(({ Lessons }) => new Lessons(core, byId('how'), { model: () => state.model, running: () => running }));
  (await lessons).show(location.hash);
}

addEventListener('hashchange', () => guarded(showLessons));

watchModel();
watchSettings();
watchRun();
guarded(async () => {
  try {
    state.ready = await core.ask({ type: 'start' });
  } catch (error) {
    show(byId('device-status'), 'The program could not be started; the message says why.');
    throw error;
  }
  device.render(state.ready);
  byId('setup').hidden = false;
  await list();
  await showLessons();
});
