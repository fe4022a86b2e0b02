// A model of one's own through the page from folder to checkpoint, with what it took; run by hand:
//
//   node tests/page/real.mjs MODEL_DIR [--samples 8] [--seq-len 128] [--bits 4] [--group-size 64] [--device cpu]
//                                      [--tokens 2048] [--out DIR]
//
// It prints time, peak memory, the longest task of the page's own thread, both perplexities and what both models
// generate, saves the checkpoint in DIR (target/page/real), and has the command line score it over the same text;
// $HALFTONE names that program, else it is the release build.

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync, rmSync } from 'node:fs';
import { loadavg } from 'node:os';
import { basename, join, resolve } from 'node:path';
import { parseArgs } from 'node:util';
import { start } from './browser.mjs';
import { ROOT } from './harness.mjs';
import { taskTimes } from './tasks.mjs';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    samples: { type: 'string', default: '8' },
    'seq-len': { type: 'string', default: '128' },
    bits: { type: 'string', default: '4' },
    'group-size': { type: 'string', default: '64' },
    device: { type: 'string', default: 'cpu' },
    tokens: { type: 'string', default: '2048' },
    out: { type: 'string', default: join(ROOT, 'target/page/real') },
  },
});
assert.ok(positionals.length === 1, 'usage: node tests/page/real.mjs MODEL_DIR [options]');
const model = resolve(positionals[0]);
const program = process.env.HALFTONE ?? join(process.env.CARGO_TARGET_DIR ?? join(ROOT, 'target'), 'release/halftone');
/** The page's window of evaluation text. */
const WINDOW = 512;
const HOURS = { timeout: 6 * 3600_000 };

const browser = await start();
const page = await browser.page();
const chosen = performance.now();
await page.setInputFiles('#folder-input', model);
await page.locator('#model-facts div').first().waitFor(HOURS);
await page.check(`[name=device][value=${values.device}]`);
await page.check(`[name=bits][value="${values.bits}"]`);
await page.locator('#more').evaluate((more) => { more.open = true; });
await page.selectOption('[name=group_size]', values['group-size']);
await page.fill('[name=samples]', values.samples);
await page.fill('[name=seq_len]', values['seq-len']);
await page.getByText(`${(values.samples * values['seq-len']).toLocaleString('en')} tokens`, { exact: true }).waitFor(HOURS);
await page.locator('#quantize:enabled').waitFor(HOURS);
console.log(`${basename(model)}: ${(await page.locator('#model-facts').innerText()).replaceAll('\n', ' ')}`);
console.log(`plan after ${((performance.now() - chosen) / 1000).toFixed(1)} s: ${(await page.locator('#plan-body dl').innerText()).replaceAll('\n', ' ')}`);

const tasks = await taskTimes(page);
const begun = performance.now();
await page.click('#quantize');
await page.locator('#result:not([hidden]), #message:not([hidden])').first().waitFor(HOURS);
const failed = await page.locator('#message:not([hidden])').count();
assert.equal(failed, 0, await page.locator('#message-text').textContent());
const seconds = (performance.now() - begun) / 1000;
const { wall, cpu, over, parts } = await tasks.end();
const fact = async (name) => page.locator('#run-facts div', { hasText: name }).locator('dd').textContent();
console.log(`quantized in ${seconds.toFixed(1)} s; wasm memory ${await fact('Wasm memory')}`);
console.log(`longest task of the page's thread: ${wall.toFixed(0)} ms by the clock, ${cpu.toFixed(0)} ms of processor time; `
  + `${over} beyond 50 ms by the clock (load of this machine: ${loadavg()[0].toFixed(1)})`);
console.log(`in the one with most processor time: ${parts.join(', ')}`);

await page.locator('#result-files a').first().waitFor(HOURS);
rmSync(values.out, { recursive: true, force: true });
mkdirSync(values.out, { recursive: true });
for (const link of await page.locator('#result-files a').all()) {
  const [download] = await Promise.all([page.waitForEvent('download'), link.click()]);
  await download.saveAs(join(values.out, download.suggestedFilename()));
}

await page.fill('[name=max_tokens]', values.tokens);
await page.click('#measure');
await page.locator('#evaluate-result dd').first().waitFor(HOURS);
const [before, after] = (await page.locator('#evaluate-result .big dd:not(.under)').allTextContents()).map(Number);
console.log(`perplexity in the page: ${before} before, ${after} after. ${await page.locator('#evaluate-result p').textContent()}`);
await page.fill('[name=max_new_tokens]', '48');
await page.click('#generate');
await page.locator('#stop-generating:not([hidden])').waitFor(HOURS);
await page.locator('#stop-generating').waitFor({ state: 'hidden', ...HOURS });
for (const side of await page.locator('.sides article').all()) console.log((await side.innerText()).replaceAll('\n', ' '));
assert.deepEqual(page.complaints, []);
await page.screenshot({ path: join(ROOT, 'target/page/real.png'), fullPage: true });
await browser.close();

if (!existsSync(program)) {
  console.log(`saved in ${values.out}; not scored natively: there is no ${program} (make build)`);
  process.exit(0);
}
const window = Math.min(WINDOW, Number(values.tokens));
const score = (directory) => {
  const options = ['--text', join(ROOT, 'web/demo/evaluation.txt'), '--seq-len', String(window),
    '--samples', String(Math.max(1, Math.floor(values.tokens / window))), '--device', 'cpu', '--json'];
  return JSON.parse(execFileSync(program, ['eval', directory, ...options]).toString()).perplexity;
};
const [natively, after_natively] = [score(model), score(values.out)];
console.log(`perplexity by the command line: ${natively.toFixed(3)} before, ${after_natively.toFixed(3)} after`);
for (const [a, b] of [[before, natively], [after, after_natively]]) {
  assert.ok(Math.abs(a / b - 1) < 1e-3, `${a} in the page, ${b} natively`);
}
