// The worker in Chromium, through the messages that the page sends it: the demo model on both devices, results in
// the private storage and in folders, stopping and going on, and what is said about bad input.

import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { mkdtemp, open, readFile, rm, symlink } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { ROOT, Worker, browse, quantizedNatively, serve, tensors } from './harness.mjs';

const SMALL = {
  device: 'cpu', preset: 'fast', bits: 4, group_size: 64, sym: true, desc_act: null, damp_percent: 0.01, alpha: null, refit: null,
  samples: 4, seq_len: 128, seed: 0, max_memory: null, format: 'gptq', rules: [], lm_head: false, all_experts: false, shard_bytes: null,
};
const NAMES = ['config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'];
const WEIGHTS = 'model.safetensors';

let server, browser, worker;
/** The result of the first run, which others must equal. */
let whole;

before(async () => {
  assert.ok(existsSync(join(ROOT, 'dist/halftone_bg.wasm')), 'dist/ is not built: make page');
  server = await serve();
  browser = await browse();
  worker = await Worker.start(browser.context, server.url);
}, { timeout: 60_000 });

after(async () => {
  await browser?.close();
  server?.close();
});

const isOutput = (name) => !['quant_log.csv'].includes(name);

/** Equal but for the log, which has seconds in it. */
function assertSame(files, others) {
  assert.deepEqual([...files.keys()].sort(), [...others.keys()].sort());
  for (const [name, bytes] of files) if (isOutput(name)) assert.ok(bytes.equals(others.get(name)), `${name} differs`);
}

const percent = (share) => `${(100 * share).toFixed(2)} %`;

/** The share of 4-bit codes that are equal, over all quantized layers or some. */
function equalCodes(a, b, wanted = () => true) {
  let equal = 0;
  let count = 0;
  for (const [name, { bytes }] of tensors(a)) {
    if (!name.endsWith('.qweight') || !wanted(name)) continue;
    const others = tensors(b).get(name).bytes;
    for (let i = 0; i < bytes.length; i++) {
      equal += ((bytes[i] ^ others[i]) & 15 ? 0 : 1) + ((bytes[i] ^ others[i]) >> 4 ? 0 : 1);
      count += 2;
    }
  }
  return equal / count;
}

async function openDemo(on = worker) {
  await on.get({ type: 'open', demo: true });
  await on.get({ type: 'calibration', builtin: true });
}

test('it finds the adapter and says that it is software', async () => {
  const { adapter, reason, simd, version } = await worker.get({ type: 'start' });
  assert.equal(reason, null);
  assert.equal(adapter.software, true);
  assert.ok(adapter.max_binding_bytes >= 128 << 20);
  assert.equal(simd, true);
  assert.match(version, /^\d+\.\d+/);
});

test('without a model or text it says what is missing', async () => {
  const noModel = await worker.ask({ type: 'quantize', settings: SMALL, resume: false });
  assert.deepEqual([noModel.code, noModel.resumable], [2, false]);
  assert.match(noModel.message, /no model is open/);
  await worker.get({ type: 'open', demo: true });
  const noText = await worker.ask({ type: 'quantize', settings: SMALL, resume: false });
  assert.match(noText.message, /no calibration text/);
  for (const type of ['pause', 'resume', 'cancel']) {
    assert.match((await worker.ask({ type })).message, /nothing is under way/);
  }
});

test('the demo model is planned', async () => {
  const model = await worker.get({ type: 'open', demo: true });
  assert.deepEqual(
    [model.architecture, model.layers, model.hidden, model.vocab, model.dtype, model.shards, model.quantized_bits],
    ['llama', 6, 256, 2048, 'BF16', 1, null],
  );
  const text = await worker.get({ type: 'calibration', builtin: true });
  assert.deepEqual([text.name, text.documents], ['calibration.txt', 1]);
  const plan = await worker.get({ type: 'plan', settings: SMALL });
  assert.equal(plan.modules.length, 42);
  assert.equal(plan.tokens, 512);
  assert.ok(plan.seconds > 0 && plan.free_bytes > 0 && plan.output_bytes > 1e6);
  assert.equal(Object.values(plan.memory).reduce((a, b) => a + b), plan.memory_bytes);
});

test('the demo model is quantized on the CPU', { timeout: 300_000 }, async () => {
  const done = await worker.get({ type: 'quantize', settings: SMALL, resume: false });
  const of = (type) => done.events.filter((event) => event.type === type);
  assert.equal(done.stored, 'demo-4bit-g64-fast');
  assert.equal(of('module').length, 42);
  assert.equal(of('block_done').length, 6);
  assert.ok(done.loss_ratio > 0 && done.loss_ratio < 0.9);
  const fractions = of('progress').map(({ fraction }) => fraction);
  assert.ok(fractions.length > 5 && fractions.every((f, i) => f <= 1 && f >= (fractions[i - 1] ?? 0)));
  assert.ok(of('progress').every(({ block_fraction: f }) => f >= 0 && f <= 1));
  assert.ok(of('progress').at(-1).wasm_bytes < 512e6);
  assert.equal(of('weights').length, 42);
  for (const { rows, cols, lengths, weight, error, largest } of of('weights')) {
    assert.deepEqual(lengths, [rows * cols, rows * cols, rows * cols]);
    assert.ok(error > 0 && error < 0.3 * weight && largest < 16);
  }
  whole = await worker.files(done.stored);
  console.log(`# CPU: ${done.seconds.toFixed(1)} s, ${of('progress').at(-1).wasm_bytes / 1e6} MB of wasm memory`);
});

test('the result is listed, and perplexity tells it from the model', { timeout: 300_000 }, async () => {
  const { items, quota_bytes: quota } = await worker.get({ type: 'list' });
  assert.deepEqual(items.map(({ name, unfinished }) => [name, unfinished]), [['demo-4bit-g64-fast', null]]);
  assert.deepEqual(items[0].settings, SMALL);
  assert.ok(quota > 0);
  const request = { type: 'evaluate', builtin: true, max_tokens: 2048 };
  const before = await worker.get({ ...request, which: 'before' });
  const after = await worker.get({ ...request, which: 'after' });
  assert.ok(before.perplexity > 20 && before.perplexity < 60);
  assert.ok(after.perplexity > before.perplexity && after.perplexity < 1.2 * before.perplexity);
  const stored = await worker.get({ ...request, which: 'after', stored: 'demo-4bit-g64-fast' });
  assert.equal(stored.perplexity, after.perplexity);
  console.log(`# perplexity ${before.perplexity.toFixed(3)} before, ${after.perplexity.toFixed(3)} after (${after.seconds.toFixed(1)} s)`);
});

test('the result is compared with the model, and both generate', { timeout: 300_000 }, async () => {
  const text = { builtin: true, max_tokens: 2048 };
  const compared = await worker.get({ type: 'compare', ...text, continuations: true });
  const { prompts, tokens, parting, same } = compared.continuations;
  assert.deepEqual([prompts, tokens], [4, 48]);
  assert.ok(parting.value > 0 && parting.value <= 48 && same <= 4);
  const [before, after] = compared.perplexity;
  for (const [which, { value }] of [['before', before], ['after', after]]) {
    const { perplexity } = await worker.get({ type: 'evaluate', which, ...text });
    assert.ok(Math.abs(value / perplexity - 1) < 1e-4, `${which}: ${value} and ${perplexity}`);
  }
  assert.ok(Math.abs(compared.ratio.value - after.value / before.value) < 1e-9);
  assert.ok(compared.kl.value > 0 && compared.kl_99 > compared.kl.value && compared.agreement.value > 0.8);
  assert.equal(compared.blocks.length, 6);
  assert.ok(compared.blocks.every((error) => error > 0 && error < 0.5));
  assert.ok(compared.events.some(({ type }) => type === 'scoring'));

  const generate = {
    type: 'generate', prompt: 'The boy', chat: false, max_tokens: 16, temperature: 0, top_k: 50, top_p: 1, seed: 0, device: 'cpu',
  };
  const said = (answer) => answer.events.filter(({ type }) => type === 'token').map(({ text }) => text).join('');
  const answers = {};
  for (const which of ['before', 'after']) {
    const answer = await worker.get({ ...generate, which });
    assert.deepEqual([answer.tokens, answer.finish], [16, 'max_tokens']);
    assert.ok(answer.tokens_per_second > 0 && answer.prompt_tokens > 0);
    answers[which] = said(answer);
    assert.ok(answers[which].length > 16, answers[which]);
    console.log(`# ${which}: ${answer.tokens_per_second.toFixed(1)} tokens/s, ${JSON.stringify(answers[which])}`);
  }
  const again = await worker.get({ ...generate, which: 'after', stored: 'demo-4bit-g64-fast' });
  assert.equal(said(again), answers.after);
  const few = await worker.get({ ...generate, which: 'after', max_tokens: 4, device: 'gpu' });
  assert.ok(answers.after.startsWith(said(few)) && said(few).length > 0, said(few));
  const id = await worker.begin({ ...generate, which: 'after', max_tokens: 2000 });
  await worker.until(id, 'token');
  await worker.begin({ type: 'cancel' });
  assert.equal((await worker.outcome(id)).at(-1).finish, 'stopped');
  for (const [change, expected] of [
    [{ prompt: '' }, /the prompt/], [{ max_tokens: 0 }, /0 tokens are none/], [{ temperature: 1, top_p: 2 }, /top-p 2 is not/],
    [{ chat: true }, /no chat template/], [{ stored: 'absent' }, /no stored result "absent"/],
  ]) {
    const failed = await worker.ask({ ...generate, which: 'after', ...change });
    assert.match(failed.message, expected);
  }
});

/** What the command line makes of the demo model with the same settings. */
const native = (options) => quantizedNatively(join(ROOT, 'web/demo/model'), [
  '--calibration', join(ROOT, 'web/demo/calibration.txt'), '--group-size', '64', '--samples', '4', '--seq-len', '128', ...options,
]);

test('rounding to nearest gives the bytes of the command line', { timeout: 60_000 }, async (t) => {
  const theirs = await native(['--preset', 'rtn']);
  if (!theirs) return t.skip('the command line is not built');
  const done = await worker.get({ type: 'quantize', settings: { ...SMALL, preset: 'rtn', damp_percent: null }, resume: false });
  assert.ok((await worker.files(done.stored)).get(WEIGHTS).equals(theirs));
  await worker.get({ type: 'remove', name: done.stored });
});

// A processor with fused multiply-add rounds once where wasm rounds twice. So over a whole model codes drift
// apart (ARCHITECTURE.md, "Two devices, one model"), and what shows that both compute the same is where the
// inputs are still the same: the first block.
test('GPTQ gives the codes of the command line where its inputs are the same', { timeout: 60_000 }, async (t) => {
  const theirs = await native(['--preset', 'fast']);
  if (!theirs) return t.skip('the command line is not built');
  const ours = whole.get(WEIGHTS);
  const specs = (bytes) => [...tensors(bytes)].map(([name, { dtype, shape }]) => [name, dtype, shape]);
  assert.deepEqual(specs(ours), specs(theirs));
  const first = equalCodes(ours, theirs, (name) => /layers\.0\..*[qkv]_proj/.test(name));
  const all = equalCodes(ours, theirs);
  console.log(`# codes equal to the command line's: ${percent(first)} of the first q, k, v; ${percent(all)} of all`);
  assert.ok(first > 0.999 && all > 0.7, `${first}, ${all}`);
});

test('a run that is paused and cancelled goes on to the same bytes', { timeout: 300_000 }, async () => {
  const id = await worker.begin({ type: 'quantize', settings: SMALL, resume: false });
  await worker.until(id, 'block_done');
  assert.equal((await worker.get({ type: 'pause' })).type, 'paused');
  const events = () => worker.page.evaluate((id) => window.driver.count(id), id);
  const paused = await events();
  await new Promise((done) => setTimeout(done, 300));
  assert.equal(await events(), paused, 'nothing happens while it is paused');
  assert.equal((await worker.get({ type: 'resume' })).type, 'resumed');
  await worker.until(id, 'module');
  await worker.begin({ type: 'cancel' });
  const cancelled = (await worker.outcome(id)).at(-1);
  assert.deepEqual([cancelled.code, cancelled.resumable], [130, true]);
  assert.match(cancelled.message, /stopped on request in block \d of 6; \d finished blocks? (is|are) kept/);
  const { items } = await worker.get({ type: 'list' });
  const item = items.find(({ unfinished }) => unfinished);
  assert.ok(item.unfinished[0] >= 1 && item.unfinished[1] === 6);
  assert.match((await worker.ask({ type: 'fetch', name: item.name })).message, /is not finished/);

  // As after a reload: another worker, which knows only what is stored.
  const later = await Worker.start(browser.context, server.url);
  await openDemo(later);
  const other = await later.ask({ type: 'quantize', settings: { ...item.settings, seed: 1 }, resume: true });
  assert.equal(other.code, 7);
  const done = await later.get({ type: 'quantize', settings: item.settings, resume: true });
  for (const what of ['verifying', 'replaying']) assert.ok(done.events.some(({ type }) => type === what), what);
  assertSame(await later.files(item.name), whole);
  const left = await later.get({ type: 'remove', name: item.name });
  assert.ok(!left.items.some(({ name }) => name === item.name));
  assert.deepEqual(later.complaints, []);
  await later.close();
});

test('a folder gets the same bytes, resumed too, and is never written over', { timeout: 300_000 }, async () => {
  const quantize = (resume) => ({ type: 'quantize', settings: SMALL, resume });
  const id = await worker.begin(quantize(false), { directory: 'chosen' });
  await worker.until(id, 'block_done');
  await worker.begin({ type: 'cancel' });
  assert.equal((await worker.outcome(id)).at(-1).resumable, true);
  assert.match((await worker.ask(quantize(false), { directory: 'chosen' })).message, /chosen holds a stopped run/);
  const done = await worker.get(quantize(true), { directory: 'chosen' });
  assert.equal(done.stored, null);
  assertSame(await worker.directory('chosen'), whole);
  assert.match((await worker.ask(quantize(false), { directory: 'chosen' })).message, /chosen is not empty/);
  assert.match((await worker.ask(quantize(true), { directory: 'chosen' })).message, /holds a finished result/);
});

test('a file beyond 4 GiB is read where its tensors lie', { timeout: 300_000 }, async () => {
  // The demo model behind 4.5 GB that no one wrote: a sparse file.
  const directory = await mkdtemp(join(tmpdir(), 'halftone-large-'));
  const model = join(ROOT, 'web/demo/model');
  const bytes = await readFile(join(model, WEIGHTS));
  const length = Number(bytes.readBigUInt64LE(0));
  const header = JSON.parse(bytes.subarray(8, 8 + length).toString());
  const hole = 4_500_000_000;
  for (const tensor of Object.values(header)) tensor.data_offsets &&= tensor.data_offsets.map((at) => at + hole);
  header['unused.weight'] = { dtype: 'U8', shape: [hole], data_offsets: [0, hole] };
  const text = Buffer.from(JSON.stringify(header).padEnd(8 * Math.ceil(JSON.stringify(header).length / 8)));
  const size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(text.length));
  const file = await open(join(directory, WEIGHTS), 'w');
  await file.write(size, 0, 8, 0);
  await file.write(text, 0, text.length, 8);
  await file.write(bytes, 8 + length, bytes.length - 8 - length, 8 + text.length + hole);
  await file.close();
  for (const name of NAMES) if (name !== WEIGHTS) await symlink(join(model, name), join(directory, name));
  await worker.page.setInputFiles('input', NAMES.map((name) => join(directory, name)));
  const opened = await worker.get({ type: 'open', demo: false, name: 'large' }, { chosen: true });
  assert.equal(opened.bytes, hole + bytes.length - 8 - length);
  const request = { type: 'evaluate', which: 'before', builtin: true, max_tokens: 512 };
  const large = await worker.get(request);
  await worker.get({ type: 'open', demo: true });
  assert.equal(large.perplexity, (await worker.get(request)).perplexity);
  await rm(directory, { recursive: true });
});

test('bad input gets one clear line', async () => {
  const bytes = await readFile(join(ROOT, 'web/demo/model', WEIGHTS));
  const config = JSON.parse(await readFile(join(ROOT, 'web/demo/model/config.json'), 'utf8'));
  const without = (name) => NAMES.filter((other) => other !== name).map((other) => [other]);
  const changed = (name, content) => [...without(name), [name, content]];
  const cases = [
    [without('config.json'), /config\.json/],
    [without(WEIGHTS), /safetensors/],
    [changed(WEIGHTS, bytes.length - 1000), /model\.safetensors.*(shorter|truncated|incomplete|end)/],
    [changed(WEIGHTS, 'no safetensors'), /model\.safetensors/],
    [changed('config.json', JSON.stringify({ ...config, model_type: 'mamba' })), /"mamba" is not supported.*Supported are llama/],
    [[], /no files were chosen/],
  ];
  for (const [files, expected] of cases) {
    const failed = await worker.ask({ type: 'open', demo: false, name: 'broken' }, { files });
    assert.equal(failed.type, 'failed');
    assert.match(failed.message, expected);
    assert.ok(!failed.message.includes('\n') && failed.code !== 70, failed.message);
  }
  const text = [['notes.pdf', '']];
  assert.match((await worker.ask({ type: 'calibration', builtin: false }, { files: text })).message, /notes\.pdf is not a kind of file/);
  await openDemo();
  const planned = (change) => worker.ask({ type: 'plan', settings: { ...SMALL, ...change } });
  assert.match((await planned({ bits: 5 })).message, /“Bits per weight” 5 is not supported/);
  assert.match((await planned({ group_size: 100 })).message, /“Group size” 100 does not divide .*the group size “whole row”/);
  assert.match((await planned({ max_memory: 1e6 })).message, /needs about .* of memory.*raise “Memory limit”/);
  assert.match((await planned({ preset: 'best' })).message, /no preset "best"/);
  assert.match((await worker.ask({ type: 'nonsense' })).message, /message of the page is not understood.*nonsense/);
});

test('the GPU device makes a result as good as the CPU device does, even if it is lost meanwhile', { timeout: 480_000 }, async () => {
  const few = { ...SMALL, samples: 2, seq_len: 64 };
  const gpu = await worker.get({ type: 'quantize', settings: { ...few, device: 'gpu' }, resume: false });
  const cpu = await worker.get({ type: 'quantize', settings: few, resume: false });
  const sum = ({ events }) => events.reduce((sum, event) => sum + (event.gptq_loss ?? 0), 0);
  console.log(`# GPU on SwiftShader: ${gpu.seconds.toFixed(1)} s, CPU ${cpu.seconds.toFixed(1)} s, losses ${sum(gpu)} and ${sum(cpu)}`);
  assert.ok(Math.abs(sum(gpu) / sum(cpu) - 1) < 0.05);
  const [a, b] = [await worker.files(gpu.stored), await worker.files(cpu.stored)];
  const share = equalCodes(a.get(WEIGHTS), b.get(WEIGHTS));
  console.log(`# ${percent(share)} of codes equal`);
  assert.ok(share > 0.7);
  assert.ok(gpu.events.some(({ device_bytes: bytes }) => bytes > 0));

  // The GPU process crashes: the device is opened again, and the run goes on after the last finished block.
  const id = await worker.begin({ type: 'quantize', settings: { ...few, device: 'gpu' }, resume: false });
  await worker.until(id, 'block_done');
  await worker.crashGpu();
  const events = await worker.outcome(id);
  assert.equal(events.at(-1).type, 'done', events.at(-1).message);
  const lost = events.find(({ type, text }) => type === 'warning' && text.includes('the device was lost'));
  assert.match(lost.text, /in block \d of 6, stage \w+: .*; the device is opened again/);
  assert.ok(events.some(({ type }) => type === 'replaying'));
  assertSame(await worker.files(events.at(-1).stored), a);
});

test('a run that is cancelled before its first block leaves nothing behind', { timeout: 60_000 }, async () => {
  const names = async () => (await worker.get({ type: 'list' })).items.map(({ name }) => name);
  const before = await names();
  const id = await worker.begin({ type: 'quantize', settings: SMALL, resume: false });
  await worker.until(id, 'started');
  await worker.begin({ type: 'cancel' });
  const cancelled = (await worker.outcome(id)).at(-1);
  assert.deepEqual([cancelled.code, cancelled.resumable], [130, false]);
  assert.deepEqual(await names(), before);
});

test('nothing complained', () => assert.deepEqual(worker.complaints, []));
