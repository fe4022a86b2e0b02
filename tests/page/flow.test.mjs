// The way of a person through the page, in a real browser with the real worker: model, plan, run, files.

import assert from 'node:assert/strict';
import { cpSync, mkdtempSync, readFileSync, rmSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { createRequire } from 'node:module';
import { downloaded, drop, shot, start } from './browser.mjs';
import { ROOT, quantizedNatively, tensors } from './harness.mjs';

const MODEL = join(ROOT, 'web/demo/model');
const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const LONG = { timeout: 300_000 };

let browser;
let folder;

before(async () => {
  browser = await start();
  folder = mkdtempSync(join(tmpdir(), 'halftone-page-'));
});

after(async () => {
  await browser?.close();
  rmSync(folder, { recursive: true, force: true });
});

/** A copy of the demo model, changed by `change(directory)`. */
function copy(name, change = () => {}) {
  const directory = join(folder, name);
  cpSync(MODEL, directory, { recursive: true });
  change(directory);
  return directory;
}

/** Few and short samples. */
async function small(page, { samples = 4, device = 'cpu' } = {}) {
  await page.check(`[name=device][value=${device}]`);
  await page.locator('#more').evaluate((more) => { more.open = true; });
  await page.selectOption('[name=group_size]', '64');
  await page.fill('[name=samples]', String(samples));
  await page.fill('[name=seq_len]', '64');
  await page.getByText(`${samples * 64} tokens`, { exact: true }).waitFor(LONG);
  await page.locator('#quantize:enabled').waitFor(LONG);
}

async function finished(page) {
  await page.locator('#result:not([hidden]), #message:not([hidden])').first().waitFor(LONG);
  assert.equal(await page.locator('#message:not([hidden])').count(), 0, await page.locator('#message-text').textContent());
  await page.locator('#result-files a').first().waitFor(LONG);
}

/** The figures of the panel "Evaluate". */
async function measured(page) {
  await page.fill('[name=max_tokens]', '1024');
  await page.click('#measure');
  await page.locator('#evaluate-result dd').first().waitFor(LONG);
  return page.locator('#evaluate-result .big dd:not(.under)').allTextContents();
}

/** What the panel "Try it" has, once `count` models have answered. */
async function texts(page, count) {
  await page.locator('#stop-generating').waitFor({ state: 'hidden', ...LONG });
  const said = await page.locator('.said:not(:empty)').allTextContents();
  assert.ok(said.length >= count, await page.locator('#message-text').textContent());
  return said;
}

const link = (page, name) => page.locator('#result-files a', { hasText: name });

async function accessible(page, state) {
  const { violations } = await page.evaluate(`${AXE}; axe.run()`);
  assert.deepEqual(violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)]), [], state);
}

/** Nothing was complained of, and nothing was asked for anywhere else. */
function clean(page) {
  assert.deepEqual(page.complaints, []);
  const elsewhere = page.asked.filter((url) => !url.startsWith(browser.origin) && !url.startsWith(`blob:${browser.origin}`));
  assert.deepEqual(elsewhere, []);
}

/** Passages in the manner of the demo model's text, and a row that is none. */
const PASSAGES = ['The cat sat on the mat', 'Once upon a time there was a king', 'and he said to the', 'alone']
  .map((text) => JSON.stringify({ text })).join('\n');

/** What the demo model gives with `small`, for the others to compare with. */
let expected;

test('the demo model: plan, run, files, perplexity, report', LONG, async () => {
  const page = await browser.page();
  await page.getByText('SwiftShader').waitFor(LONG);
  assert.ok(await page.isChecked('[name=device][value=cpu]'), 'software is not taken unasked');
  await shot(page, 'start');
  await accessible(page, 'start');
  await page.click('#choose-demo');
  await small(page);
  assert.equal(await page.locator('#plan tbody tr').count(), 7);
  await shot(page, 'plan');
  await accessible(page, 'plan');

  await page.click('#quantize');
  await page.locator('#log-rows tr').nth(8).waitFor(LONG);
  await shot(page, 'running');
  await accessible(page, 'running');
  await finished(page);
  assert.equal(await page.locator('#log-rows tr').count(), 42);
  await page.fill('#log-filter', 'down_proj');
  assert.equal(await page.locator('#log-rows tr:visible').count(), 6);
  const csv = await downloaded(page, page.locator('#save-csv'));
  assert.equal(csv.bytes.toString().trim().split('\n').length, 43);
  await page.fill('#log-filter', '');

  const names = await page.locator('#result-files a').allTextContents();
  for (const name of ['config.json', 'model.safetensors', 'quant_log.csv', 'quantize_config.json', 'tokenizer.json']) {
    assert.ok(names.includes(name), `${name} is among ${names}`);
  }
  const config = JSON.parse((await downloaded(page, link(page, /^config\.json$/))).bytes);
  assert.equal(config.quantization_config.bits, 4);
  expected = (await downloaded(page, link(page, 'model.safetensors'))).bytes;
  const header = JSON.parse(expected.subarray(8, 8 + Number(expected.readBigUInt64LE(0))));
  assert.ok(header['model.layers.5.mlp.down_proj.qweight']);
  const log = (await downloaded(page, link(page, 'quant_log.csv'))).bytes.toString();
  const columns = (text) => text.trim().split('\n').map((line) => line.split(',').slice(0, 7).join());
  assert.deepEqual(columns(csv.bytes.toString()), columns(log), 'the table is the program’s own');

  await page.setInputFiles('[name=passages]', { name: 'passages.jsonl', mimeType: '', buffer: Buffer.from(PASSAGES) });
  await page.check('[name=continuations]');
  const [before, after] = (await measured(page)).map(Number);
  assert.match(await page.locator('#evaluate-result').textContent(), /Texts part after[\d.]+ tokens[0-2] of 2 never in 48/);
  assert.ok(before > 1 && after > before && after < before * 1.5, `${before} → ${after}`);
  assert.match(await page.locator('#evaluate-result').textContent(), /Same likeliest token[1-9]\d\.\d.%KL divergence0\.\d+99 % of it below0\.\d+/);
  await page.locator('#evaluate-result', { hasText: 'Last words of 3 passages' }).waitFor(LONG);
  assert.match(await page.locator('#evaluate-result').textContent(), /Last word right before[\d.]+.%.*Last word right after[\d.]+.%.*; 1 row has fewer/);
  await page.setInputFiles('[name=passages]', []);
  assert.equal(await page.locator('#errors-chart canvas').count(), 1);

  await page.fill('[name=prompt]', 'The boy');
  await page.fill('[name=max_new_tokens]', '24');
  await page.click('#generate');
  const answers = await texts(page, 2);
  for (const text of answers) assert.match(text, /^The boy.{20}/s);
  for (const line of await page.locator('.speed').allTextContents()) assert.match(line, /^\d+ tokens? read, 24 generated at [\d.]+ tokens\/s/);
  // Chance with the same seed is the same.
  await page.fill('[name=temperature]', '1');
  await page.selectOption('[name=which]', 'after');
  const drawn = [];
  for (let turn = 0; turn < 2; turn += 1) {
    await page.click('#generate');
    drawn.push((await texts(page, 1)).at(-1));
  }
  assert.equal(drawn[0], drawn[1]);
  assert.notEqual(drawn[0], answers[1]);
  await page.fill('[name=temperature]', '0');
  await page.selectOption('[name=which]', 'both');
  await page.click('#generate');
  await texts(page, 2);
  await shot(page, 'done');
  await accessible(page, 'done');
  const report = await downloaded(page, page.locator('#save-report'));
  assert.match(report.bytes.toString(), /model\.layers\.5\.mlp\.down_proj/);
  assert.doesNotMatch(report.bytes.toString(), /(src|href)="(?!data:)/, 'the report needs no other file');

  // A stored result can be judged later, with the model that it was made from and, after a reload, on its own.
  await page.click('#anew');
  await page.locator('#stored-items').getByText('Open').click();
  await page.locator('#opened-files a', { hasText: 'model.safetensors' }).waitFor(LONG);
  assert.deepEqual((await measured(page)).slice(0, 2).map(Number), [before, after]);
  await page.reload();
  await page.locator('#stored-items').getByText('Open').click();
  await page.locator('#opened-title', { hasText: 'demo-4bit-g64' }).waitFor(LONG);
  const [alone, ...others] = await measured(page);
  assert.ok(Math.abs(alone / after - 1) < 1e-3 && others.length === 0, `${alone} ${others}`);
  await page.fill('[name=prompt]', 'The boy');
  await page.fill('[name=max_new_tokens]', '24');
  await page.click('#generate');
  assert.deepEqual(await texts(page, 1), answers.slice(1));
  await page.check('[name=kind][value=chat]');
  await page.click('#generate');
  await page.locator('#message-text', { hasText: 'no chat template' }).waitFor(LONG);
  await page.click('#message-close');
  await page.check('[name=kind][value=text]');
  await page.fill('[name=max_new_tokens]', '2000');
  await page.click('#generate');
  await page.locator('.speed', { hasText: 'tokens/s' }).waitFor(LONG);
  await page.click('#stop-generating');
  await page.locator('.speed', { hasText: '; stopped' }).waitFor(LONG);
  await shot(page, 'opened');
  await accessible(page, 'opened');
  await page.click('#close-opened');
  await page.locator('#setup:not([hidden])').waitFor(LONG);
  clean(page);
  await page.context().close();
});

/** What a model without a template of its own is taught to say. */
const TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
  + '{% if add_generation_prompt %}assistant:{% endif %}';

test('a conversation with both models, of which one is in small files', LONG, async () => {
  const page = await browser.page();
  await page.setInputFiles('#folder-input', copy('talking', (directory) => {
    const file = join(directory, 'tokenizer_config.json');
    writeFileSync(file, JSON.stringify({ ...JSON.parse(readFileSync(file)), chat_template: TEMPLATE }));
  }));
  await page.locator('#settings:not([hidden])').waitFor(LONG);
  await page.locator('#more').evaluate((more) => { more.open = true; });
  await page.selectOption('[name=preset]', 'rtn');
  await page.selectOption('[name=group_size]', '64');
  await page.check('[name=device][value=cpu]');
  await page.fill('[name=shard_bytes]', '1.5');
  await page.locator('#message-text', { hasText: 'Most in one file, in MB' }).waitFor(LONG);
  await page.fill('[name=shard_bytes]', '2');
  await page.locator('#plan-body', { hasText: 'Files of weights2' }).waitFor(LONG);
  await page.locator('#quantize:enabled').waitFor(LONG);
  await page.click('#quantize');
  await finished(page);
  // Nothing measures what rounding alone loses.
  assert.ok(await page.isHidden('#loss-chart') && await page.isHidden('#share-chart') && await page.isVisible('#speed-chart'));
  const names = await page.locator('#result-files a').allTextContents();
  for (const name of ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']) {
    assert.ok(names.includes(name), `${name} is among ${names}`);
  }
  await page.check('[name=kind][value=chat]');
  await page.fill('[name=max_new_tokens]', '12');
  const read = [];
  for (const message of ['Who are you?', 'And then?']) {
    await page.fill('[name=prompt]', message);
    await page.press('[name=prompt]', 'Enter');
    const said = await texts(page, 2);
    for (const text of said) assert.ok(text.includes(message), text);
    read.push(...(await page.locator('.speed').allTextContents()).map((line) => Number(line.match(/^(\d+) tokens? read/)[1])));
  }
  assert.equal(await page.locator('.answer').count(), 4);
  assert.equal(await page.inputValue('[name=prompt]'), '');
  // What was read before is not read again, so the second message is about as cheap as the first.
  assert.ok(read[2] < 2 * read[0] && read[3] < 2 * read[1], read.join());
  await shot(page, 'chat');
  await accessible(page, 'chat');
  await page.click('#new-conversation');
  assert.equal(await page.locator('.answer').count(), 0);
  await page.fill('[name=prompt]', 'Who are you?');
  await page.click('#generate');
  await texts(page, 2);
  assert.equal(await page.locator('.answer').count(), 2);
  clean(page);
  await page.context().close();
});

test('a folder by the file input gives the same bytes', LONG, async () => {
  const page = await browser.page();
  await page.setInputFiles('#folder-input', copy('chosen'));
  await small(page);
  assert.match(await page.locator('#model-facts').textContent(), /chosen/);
  await page.click('#quantize');
  await finished(page);
  // Those of the block that was finished before the reload are there too.
  assert.equal(await page.locator('#log-rows tr').count(), 42);
  assert.ok((await downloaded(page, link(page, 'model.safetensors'))).bytes.equals(expected));
  clean(page);
  await page.context().close();
});

test('a folder by drag and drop, calibrated with a text of one’s own', LONG, async () => {
  const page = await browser.page();
  await drop(page, '#drop', [copy('dropped')]);
  await page.check('[name=calibration][value=own]');
  await page.setInputFiles('#calibration-input', join(ROOT, 'web/demo/calibration.txt'));
  await small(page);
  assert.match(await page.locator('#model-facts').textContent(), /dropped/);
  await page.click('#quantize');
  await finished(page);
  assert.ok((await downloaded(page, link(page, 'model.safetensors'))).bytes.equals(expected));
  clean(page);
  await page.context().close();
});

/** Adds a line to “Layers that differ”. */
async function rule(page, choices) {
  await page.click('#add-rule');
  const line = page.locator('#rule-list li').last();
  for (const [name, value] of Object.entries(choices)) {
    const field = line.locator(`[data-name=${name}]`);
    await (name === 'pattern' ? field.fill(value) : field.selectOption(value));
  }
}

test('another format, and layers that differ: the bytes of the command line', LONG, async (t) => {
  const page = await browser.page();
  await page.click('#choose-demo');
  await page.locator('#settings:not([hidden])').waitFor(LONG);
  await page.locator('#more').evaluate((more) => { more.open = true; });
  assert.ok(await page.isDisabled('[name=lm_head]'));
  assert.match(await page.locator('#head-hint').textContent(), /head is its embedding table/);
  await page.selectOption('[name=preset]', 'rtn');
  await page.selectOption('[name=group_size]', '64');
  await page.selectOption('[name=format]', 'compressed-tensors');
  await rule(page, { pattern: 'down_proj', bits: '8', group_size: '32', sym: 'false' });
  await rule(page, { pattern: 'layers.5.self_attn', bits: '16' });
  await page.getByText('4 layers stay in 16 bits').waitFor(LONG);
  await page.locator('#quantize:enabled').waitFor(LONG);
  const rows = await page.locator('#plan-body table').first().locator('tbody tr').allTextContents();
  assert.ok(rows.some((row) => /^mlp\.down_proj ×6.*832asym/.test(row)), rows.join('; '));
  assert.ok(rows.some((row) => /^self_attn\.q_proj ×5.*464sym/.test(row)), rows.join('; '));

  // What is wrong with a line is said there, before any work.
  const wrong = page.locator('#rule-list li').nth(2).locator('.wrong');
  await rule(page, { pattern: 'layers.0.mlp.(down' });
  await wrong.filter({ hasText: '“Layers that differ” "layers.0.mlp.(down" is not a regex' }).waitFor(LONG);
  await shot(page, 'rule-refused');
  await accessible(page, 'a rule that is refused');
  assert.ok(await page.isDisabled('#quantize'));
  assert.equal(await page.locator('#message:not([hidden])').count(), 0);
  await page.locator('#rule-list li').nth(2).locator('[data-name=pattern]').fill('down_prj');
  await wrong.filter({ hasText: 'matches no linear layer of this model. Near it are model.layers.0.mlp.down_proj' }).waitFor(LONG);
  await page.locator('#rule-list li').nth(2).locator('[data-name=pattern]').fill('v_proj');
  await wrong.filter({ hasText: 'share an input' }).waitFor(LONG);
  assert.match(await wrong.textContent(), /Let “Layers that differ” and “left in 16 bits” match all of q_proj, k_proj, v_proj/);
  await page.locator('#rule-list li').nth(2).getByText('Remove').click();
  await page.locator('#quantize:enabled').waitFor(LONG);
  assert.equal(await page.locator('.wrong:not([hidden])').count(), 0);
  const table = page.locator('#plan-body .scroll').first();
  assert.ok(await table.evaluate((box) => box.scrollWidth <= box.clientWidth), 'the plan is seen whole');
  await shot(page, 'rules');

  await page.click('#quantize');
  await finished(page);
  assert.match(await page.locator('#result-place').textContent(), /demo-4bit-g64-rtn-compressed-tensors/);
  const config = JSON.parse((await downloaded(page, link(page, /^config\.json$/))).bytes);
  assert.equal(config.quantization_config.quant_method, 'compressed-tensors');
  const ours = (await downloaded(page, link(page, 'model.safetensors'))).bytes;
  const of = tensors(ours);
  assert.ok(of.has('model.layers.5.self_attn.q_proj.weight') && of.has('model.layers.4.self_attn.q_proj.weight_packed'));
  assert.deepEqual(of.get('model.layers.0.mlp.down_proj.weight_scale').shape, [256, 768 / 32]);
  clean(page);
  await page.context().close();
  const theirs = await quantizedNatively(MODEL, [
    '--preset', 'rtn', '--group-size', '64', '--format', 'compressed-tensors',
    '--override', 'down_proj=bits:8,group_size:32,asym', '--skip', 'layers.5.self_attn',
  ]);
  if (!theirs) return t.skip('the command line is not built');
  assert.ok(ours.equals(theirs));
});

test('a head of its own is quantized too', LONG, async (t) => {
  const model = join(ROOT, 'tests/goldens/models/llama');
  const page = await browser.page();
  await page.setInputFiles('#folder-input', model);
  await page.locator('#settings:not([hidden])').waitFor(LONG);
  await page.locator('#more').evaluate((more) => { more.open = true; });
  await page.selectOption('[name=preset]', 'rtn');
  await page.selectOption('[name=group_size]', '32');
  await page.check('[name=lm_head]');
  await page.locator('#plan-body table').first().getByText('lm_head').waitFor(LONG);
  await page.locator('#quantize:enabled').waitFor(LONG);
  await page.click('#quantize');
  await finished(page);
  const ours = (await downloaded(page, link(page, 'model.safetensors'))).bytes;
  assert.ok(tensors(ours).has('lm_head.qweight'));
  clean(page);
  await page.context().close();
  const theirs = await quantizedNatively(model, ['--preset', 'rtn', '--group-size', '32', '--quantize-lm-head']);
  if (!theirs) return t.skip('the command line is not built');
  assert.ok(ours.equals(theirs));
});

test('correction and refit are planned, shown, and kept by a stopped run', LONG, async () => {
  const page = await browser.page();
  await page.click('#choose-demo');
  await small(page);
  assert.ok(await page.isHidden('#experts-line'), 'the demo model has no experts');
  const memory = () => page.locator('#plan-body .legend').textContent();
  await page.selectOption('[name=refit]', 'false');
  await page.selectOption('[name=alpha]', '0');
  await page.locator('#plan-body .legend:not(:has-text("original model"))').waitFor(LONG);
  await page.locator('#quantize:enabled').waitFor(LONG);
  const plain = await memory();
  await page.selectOption('[name=alpha]', 'fixed');
  await page.fill('[name=alpha_share]', '2');
  await page.locator('#message-text', { hasText: 'Share of the correction' }).waitFor(LONG);
  await page.selectOption('[name=alpha]', 'measured');
  await page.selectOption('[name=refit]', 'true');
  await page.locator('#plan-body .legend', { hasText: 'original model beside it' }).waitFor(LONG);
  await page.locator('#quantize:enabled').waitFor(LONG);
  assert.ok(await page.isHidden('#alpha-share'));
  assert.notEqual(await memory(), plain);
  await shot(page, 'correction');
  await accessible(page, 'correction');

  await page.click('#quantize');
  await page.locator('#log-rows tr').nth(8).waitFor(LONG);
  await page.click('#cancel');
  await page.locator('#again:not([hidden])').waitFor(LONG);
  await page.reload();
  await page.locator('#stored-items').getByText('correction as measured · scales fitted again').waitFor(LONG);
  await page.locator('#stored-items').getByText('Resume').click();
  await page.click('#choose-demo');
  await page.locator('#quantize:enabled', { hasText: 'Go on' }).waitFor(LONG);
  assert.deepEqual([await page.inputValue('[name=alpha]'), await page.inputValue('[name=refit]')], ['measured', 'true']);
  await page.click('#quantize');
  await finished(page);
  assert.ok(await page.locator('#log th', { hasText: 'alpha' }).isVisible());
  const csv = (await downloaded(page, page.locator('#save-csv'))).bytes.toString().trim().split('\n').map((line) => line.split(','));
  const [alpha, kept] = ['alpha', 'kept'].map((name) => csv[0].indexOf(name));
  assert.equal(csv.length, 43);
  for (const row of csv.slice(1)) {
    assert.ok(row[alpha] >= 0 && row[alpha] <= 1 && ['full', 'swept', 'plain', 'rtn'].includes(row[kept]), row.join());
  }
  assert.ok(csv.slice(1).some((row) => row[alpha] > 0), 'some weights were moved');
  const shown = await page.locator('#log-rows tr').first().locator('td').allTextContents();
  assert.equal(shown[10], String(+Number(csv[1][alpha]).toFixed(3)));
  await shot(page, 'corrected');
  await accessible(page, 'corrected');
  clean(page);
  await page.context().close();
});

test('experts are calibrated with their own tokens or with all', LONG, async () => {
  const page = await browser.page();
  await page.setInputFiles('#folder-input', join(ROOT, 'tests/goldens/models/mixtral'));
  await page.locator('#settings:not([hidden])').waitFor(LONG);
  await page.locator('#more').evaluate((more) => { more.open = true; });
  await page.selectOption('[name=group_size]', '32');
  await page.check('[name=calibration][value=own]');
  const rows = Array.from({ length: 16 }, (_, row) => Array.from({ length: 64 }, (_, at) => (row * 131 + at * at * 7 + 3) % 320));
  const text = rows.map((ids) => JSON.stringify({ input_ids: ids })).join('\n');
  await page.setInputFiles('#calibration-input', { name: 'rows.jsonl', mimeType: '', buffer: Buffer.from(text) });
  await page.getByText('1,024 tokens', { exact: true }).waitFor(LONG);
  const tokens = async () => {
    await page.locator('#quantize:enabled').waitFor(LONG);
    await page.click('#quantize');
    await finished(page);
    const csv = (await downloaded(page, page.locator('#save-csv'))).bytes.toString().trim().split('\n').map((line) => line.split(','));
    const [all, own] = ['tokens', 'routed'].map((name) => csv[0].indexOf(name));
    return csv.slice(1).filter((row) => row[1].includes('.experts.')).map((row) => [Number(row[all]), Number(row[own])]);
  };
  const own = await tokens();
  assert.ok(own.length === 36 && own.some(([all, routed]) => all === routed), own.join('; '));
  await page.click('#anew');
  await page.check('[name=all_experts]');
  const all = await tokens();
  assert.ok(all.every(([tokens, routed]) => tokens === all[0][0] && routed < tokens), all.join('; '));
  assert.match(await page.locator('#run-what').textContent(), /every token for every expert/);
  clean(page);
  await page.context().close();
});

test('what cannot be used is refused with the reason', LONG, async () => {
  const page = await browser.page();
  const refused = async (directory, pattern, name) => {
    await page.setInputFiles('#folder-input', directory);
    await page.locator('#message:not([hidden])').waitFor(LONG);
    assert.match(await page.locator('#message-text').textContent(), pattern);
    if (name) await shot(page, name);
    await page.click('#message-close');
  };
  const cut = (directory) => {
    const file = join(directory, 'model.safetensors');
    truncateSync(file, statSync(file).size - 1000);
  };
  await refused(copy('truncated', cut), /model\.safetensors/, 'refused');
  await refused(copy('bare', (directory) => rmSync(join(directory, 'config.json'))), /config\.json/);
  const other = (directory) => {
    const file = join(directory, 'config.json');
    writeFileSync(file, JSON.stringify({ ...JSON.parse(readFileSync(file)), model_type: '<b>mamba</b>' }));
  };
  await refused(copy('other', other), /<b>mamba<\/b>/);
  await page.click('#choose-demo');
  await page.locator('#more').evaluate((more) => { more.open = true; });
  await page.selectOption('[name=group_size]', '64');
  await page.locator('#quantize:enabled').waitFor(LONG);
  // Messages have the page's words for what can be chosen.
  await page.fill('[name=max_memory]', '16');
  await page.locator('#message-text', { hasText: 'fewer or shorter samples (“Samples”, “Tokens in a sample”), or raise “Memory limit”' }).waitFor(LONG);
  clean(page);
  await page.context().close();
});

test('a run is paused, cancelled, found after a reload, and goes on to the same bytes', LONG, async () => {
  const page = await browser.page();
  await page.click('#choose-demo');
  await small(page);
  await page.click('#quantize');
  await page.click('#pause');
  await page.getByText('Paused.').first().waitFor(LONG);
  await page.click('#resume');
  await page.locator('#log-rows tr').nth(8).waitFor(LONG);
  await page.click('#cancel');
  await page.locator('#again:not([hidden])').waitFor(LONG);
  assert.match(await page.locator('#run-status').textContent(), /[1-5] of 6 blocks are finished and kept/);
  await shot(page, 'stopped');
  await accessible(page, 'stopped');

  await page.reload();
  await page.locator('#stored-items').getByText('stopped,').waitFor(LONG);
  await shot(page, 'resume');
  await page.locator('#stored-items').getByText('Resume').click();
  await page.click('#choose-demo');
  await page.locator('#quantize:enabled', { hasText: 'Go on' }).waitFor(LONG);
  await page.click('#quantize');
  await finished(page);
  assert.ok((await downloaded(page, link(page, 'model.safetensors'))).bytes.equals(expected));
  clean(page);
  await page.context().close();
});

/** A person's folder, which no test can choose in the browser's dialog: one of the private storage is given. */
const folderPicker = () => {
  window.showDirectoryPicker = async ({ id }) => {
    const root = await navigator.storage.getDirectory();
    return root.getDirectoryHandle(id, { create: true });
  };
};

const contents = (page, ...path) => page.evaluate(async (path) => {
  let directory = await navigator.storage.getDirectory();
  for (const name of path) directory = await directory.getDirectoryHandle(name);
  const names = [];
  for await (const name of directory.keys()) names.push(name);
  return names.sort();
}, path);

test('into a folder of one’s own: empty, and then one with something in it', LONG, async () => {
  const page = await browser.page({ prepare: folderPicker });
  await page.click('#choose-demo');
  await small(page);
  await page.check('[name=output][value=folder]');
  await page.getByText('halftone-output').waitFor();
  for (const where of [['halftone-output'], ['halftone-output', 'demo-4bit']]) {
    await page.locator('#quantize:enabled').waitFor(LONG);
    await page.click('#quantize');
    await page.locator('#result:not([hidden]), #message:not([hidden])').first().waitFor(LONG);
    assert.equal(await page.locator('#result-place').textContent(), `All files are in ${where.join('/')}.`);
    const names = await contents(page, ...where);
    assert.ok(names.includes('model.safetensors') && names.includes('config.json'), names.join());
    assert.ok(!names.some((name) => name.includes('journal')), names.join());
    await page.click('#anew');
  }
  clean(page);
  await page.context().close();
});

test('without WebGPU the page says so and offers the CPU', LONG, async () => {
  const bare = await start({ gpu: false });
  const page = await bare.page();
  await page.getByText('No GPU here.').waitFor(LONG);
  assert.match(await page.locator('#device-note').textContent(), /^[A-Z].*adapter.*\.$/);
  assert.ok(await page.isChecked('[name=device][value=cpu]'));
  assert.ok(await page.isDisabled('[name=device][value=gpu]'));
  await shot(page, 'no-gpu');
  assert.deepEqual(page.complaints, []);
  await bare.close();
});

test('the GPU device, in software here', LONG, async () => {
  const page = await browser.page();
  await page.click('#choose-demo');
  await small(page, { samples: 2, device: 'gpu' });
  await page.click('#quantize');
  await finished(page);
  assert.match(await page.locator('#run-what').textContent(), /GPU/);
  assert.match(await page.locator('#run-facts').textContent(), /Device memory/);
  await shot(page, 'gpu');
  clean(page);
  await page.context().close();
});

test('narrow and dark', LONG, async () => {
  const page = await browser.page({ viewport: { width: 360, height: 740 }, colorScheme: 'dark' });
  await page.click('#choose-demo');
  await small(page);
  await rule(page, { pattern: 'down_proj', bits: '8' });
  await page.locator('#plan-body', { hasText: 'mlp.down_proj ×6768 → 2568' }).waitFor(LONG);
  await page.locator('#quantize:enabled').waitFor(LONG);
  const wider = () => page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(await wider() <= 0);
  await shot(page, 'narrow-plan');
  await accessible(page, 'dark');
  await page.click('#quantize');
  await finished(page);
  assert.ok(await wider() <= 0);
  await shot(page, 'narrow-done');
  await accessible(page, 'dark and done');
  clean(page);
  await page.context().close();
});
