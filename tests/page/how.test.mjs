// "How it works": the figures of the worked example, and that each lesson shows something, listens to the
// keyboard, fits a narrow screen and is accessible. Its pictures are written for a person to look at.

import assert from 'node:assert/strict';
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { createRequire } from 'node:module';
import { shot, start } from './browser.mjs';
import { ROOT } from './harness.mjs';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const LONG = { timeout: 300_000 };

let browser;
before(async () => { browser = await start({ gpu: false }); });
after(() => browser?.close());

/** The lesson of this name, once it has worked everything out. */
async function open(page, name) {
  await page.evaluate((name) => { location.hash = `#how/${name}`; }, name);
  const lesson = page.locator(`#lesson-${name}`);
  await lesson.waitFor(LONG);
  return lesson;
}

/** Waits until nothing is asked any more. */
const settled = (page, name) => page.waitForFunction((name) => {
  const lesson = document.querySelector(`#lesson-${name}`);
  return !lesson.querySelector('.busy');
}, name, LONG);

/** A table's rows as arrays of text. */
const figures = (page, id) => page.locator(`#${id} tbody tr`).evaluateAll((rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent)));

/** Waits until the text of an element is another one. */
const changed = (page, selector, before) =>
  page.waitForFunction(([selector, before]) => document.querySelector(selector).textContent !== before, [selector, before], LONG);

async function accessible(page, state) {
  const { violations } = await page.evaluate(`${AXE}; axe.run()`);
  assert.deepEqual(violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)]), [], state);
}

/** Numbers of a picture, to see that it is one and that it changes. */
const ink = (page, selector) => page.locator(selector).evaluate((canvas) => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return data.reduce((sum, value, at) => (sum * 31 + value * (at % 251)) % 1_000_003, 0);
});

test('the worked example has the figures of the literature', LONG, async () => {
  const page = await browser.page();
  await page.click('#to-how');
  await page.locator('#example-figures tbody tr').first().waitFor(LONG);
  assert.equal(await page.locator('#device:visible').count(), 0, 'the other view is away');
  assert.deepEqual((await figures(page, 'example-figures')).map(([name, error]) => [name, error]), [
    ['Round to nearest, one scale for all', '1.644'],
    ['AWQ (α = 0.5), one scale for all', '1.551'],
    ['Round to nearest, a scale per column', '1.298'],
    ['GPTQ, Cholesky factor of H⁻¹', '1.225'],
    ['Rows of H⁻¹, not conditioned', '1.227'],
    ['The same, H⁻¹ to two decimals', '1.229'],
  ]);

  // Step by step, by keyboard and by buttons.
  const lesson = page.locator('#lesson-example');
  const walk = lesson.getByRole('group', { name: 'The weight;' });
  assert.equal(await lesson.locator('.walk .now').count(), 0);
  await walk.focus();
  await page.keyboard.press('ArrowRight');
  assert.deepEqual(await lesson.locator('.walk .now').allTextContents(), ['0.114code 2, e −0.014', '−0.229code −4, e 0.029', '0.400code 7, e 0.000', '−0.171code −3, e 0.021']);
  assert.equal(await lesson.locator('.arcs path').count(), 3);
  await page.keyboard.press('End');
  assert.equal(await lesson.locator('.walk .done').count(), 12);
  await page.keyboard.press('ArrowLeft');
  assert.match(await lesson.locator('p[aria-live]').textContent(), /Turn 3 of 4/);
  await lesson.getByRole('button', { name: 'Start' }).click();
  assert.equal(await lesson.locator('.walk .now').count(), 0);

  // The switch shows the trace without conditioning from the second column on.
  const rounded = () => lesson.locator('.walk').textContent();
  await page.keyboard.press('Tab');
  await walk.focus();
  await page.keyboard.press('End');
  const gptq = await rounded();
  await lesson.getByLabel('rows of H⁻¹', { exact: true }).check();
  await page.locator('.marked', { hasText: 'not conditioned' }).waitFor(LONG);
  assert.notEqual(await rounded(), gptq);

  // Numbers of one's own; what cannot be is said.
  await lesson.locator('summary').click();
  await lesson.getByLabel('Order of columns').fill('2 1 3 4');
  await lesson.getByLabel('Order of columns').blur();
  await page.locator('#example-figures:not(:has-text("1.225"))').waitFor(LONG);
  await lesson.getByLabel('H, row 1, column 2').fill('9');
  await page.locator('#message-text', { hasText: 'not positive definite' }).waitFor(LONG);
  await lesson.getByRole('button', { name: 'Back to the example' }).click();
  await page.locator('#example-figures:has-text("1.225")').waitFor(LONG);
  assert.equal(await page.locator('#message:not([hidden])').count(), 0);
  assert.deepEqual(page.complaints, []);

  await page.click('#to-work');
  await page.locator('#device').waitFor();
  assert.equal(await page.locator('#how:visible').count(), 0);
  await page.context().close();
});

test('two weights: handles by keyboard and pointer', LONG, async () => {
  const page = await browser.page();
  await open(page, 'plane');
  await page.locator('#plane-figures tbody tr').first().waitFor(LONG);
  const rows = await figures(page, 'plane-figures');
  const distances = rows.map(([, , distance]) => Number(distance));
  assert.ok(distances[0] > distances[1] && distances[1] > distances[2], `the three differ at first: ${distances}`);
  const handle = page.getByRole('slider', { name: 'the weights t' });
  await handle.focus();
  const old = await handle.getAttribute('aria-valuetext');
  const before = await page.locator('#plane-figures').textContent();
  await page.keyboard.press('ArrowRight');
  await changed(page, '#plane-figures', before);
  assert.notEqual(await handle.getAttribute('aria-valuetext'), old);

  const now = await page.locator('#plane-figures').textContent();
  await page.locator('.lattice').scrollIntoViewIfNeeded();
  const box = await page.getByRole('slider', { name: 'tip of b1' }).locator('circle').nth(1).boundingBox();
  await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
  await page.mouse.down();
  await page.mouse.move(box.x + 40, box.y + 30, { steps: 5 });
  await page.mouse.up();
  await changed(page, '#plane-figures', now);

  await page.getByLabel('clipped').check();
  await page.locator('.spot.out').first().waitFor({ state: 'attached', ...LONG });
  await settled(page, 'plane');
  const codes = (await figures(page, 'plane-figures')).flatMap(([, codes]) => codes.split(', ').map((code) => Number(code.replace('−', '-'))));
  assert.ok(codes.every((code) => Math.abs(code) <= 1), codes.join());
  assert.deepEqual(page.complaints, []);
  await page.context().close();
});

test('lessons on a layer of the demo model', LONG, async () => {
  const page = await browser.page();
  const number = (text) => Number(text.replace(/[^\d.e-]/g, ''));

  await open(page, 'order');
  await page.locator('#order-figures tbody tr').first().waitFor(LONG);
  const orders = await figures(page, 'order-figures');
  assert.deepEqual(orders.map(([name]) => name), ['natural', 'largest first (act-order)', 'smallest first', 'round to nearest']);
  assert.ok(number(orders[1][1]) < number(orders[2][1]) && orders.slice(0, 3).every((row) => number(row[1]) < number(orders[3][1])), orders.join(' | '));
  // A chart is made a frame after its numbers are there.
  await page.locator('#lesson-order .uplot').nth(1).waitFor(LONG);
  assert.equal(await page.locator('#lesson-order .uplot').count(), 2);
  const before = await page.locator('#order-figures').textContent();
  await page.locator('#lesson-order').getByLabel('Bits').focus();
  await page.keyboard.press('ArrowDown');
  await changed(page, '#order-figures', before);

  await open(page, 'hessian');
  await page.locator('#damping-figures tbody tr').first().waitFor(LONG);
  const pivots = (await figures(page, 'damping-figures')).map(([, pivot]) => number(pivot));
  assert.ok(pivots.length === 11 && pivots.every((pivot, at) => at === 0 || pivot >= pivots[at - 1]), `damping lifts pivots: ${pivots}`);
  const whole = await ink(page, '.heat');
  await page.locator('.heat').focus();
  await page.keyboard.press('+');
  await page.getByText('rows 65 to 192').waitFor(LONG);
  await settled(page, 'hessian');
  assert.notEqual(await ink(page, '.heat'), whole);
  await page.getByLabel('factor R').check();
  await page.getByText('The factor R: rows').waitFor(LONG);
  await page.getByLabel('Damping 0.01').focus();
  await page.keyboard.press('End');
  await page.locator('#damping-figures .marked th', { hasText: /^1$/ }).waitFor(LONG);

  await open(page, 'grids');
  await page.locator('#grids-figures tbody tr').first().waitFor(LONG);
  const grids = await figures(page, 'grids-figures');
  assert.equal(grids.length, 5);
  assert.ok(number(grids[2][2]) < number(grids[0][2]), 'the search is better than min-max');
  await page.locator('#lesson-grids .tick').nth(60).waitFor({ state: 'attached', ...LONG });
  const group = await page.locator('#grids-figures').textContent();
  await page.locator('#lesson-grids').getByLabel('Row', { exact: true }).focus();
  await page.keyboard.press('ArrowUp');
  await changed(page, '#grids-figures', group);

  await open(page, 'diffusion');
  await page.locator('#prints canvas').nth(3).waitFor(LONG);
  await page.locator('#lesson-diffusion').getByText('After 32 of 256 columns').waitFor(LONG);
  const picture = await ink(page, '.nudges >> nth=0');
  await page.getByRole('slider', { name: 'Columns done' }).focus();
  await page.keyboard.press('ArrowRight');
  await page.getByText('After 33 of 256 columns').waitFor(LONG);
  assert.notEqual(await ink(page, '.nudges >> nth=0'), picture);
  await page.getByRole('button', { name: 'Play' }).press('Enter');
  await page.getByText('After 96 of 256 columns').waitFor(LONG);
  await page.getByRole('button', { name: 'Play' }).waitFor(LONG);
  const seen = (await page.locator('#prints p').allTextContents()).slice(1).map((text) => Number(text.match(/([\d.]+) to the eye/)[1]));
  assert.ok(seen[2] < seen[1] && seen[1] < seen[0] / 5, `GPTQ is a good printer: ${seen}`);

  await open(page, 'scaling');
  await page.locator('#scaling-figures tbody tr').first().waitFor(LONG);
  const ways = await figures(page, 'scaling-figures');
  assert.equal(ways.length, 5);
  assert.ok(number(ways[2][2]) < number(ways[1][2]) && number(ways[1][2]) <= 1, 'GPTQ, AWQ, rounding on the calibration text');
  await page.locator('#lesson-scaling').getByLabel('3', { exact: true }).focus();
  await page.keyboard.press('ArrowRight');
  await page.locator('#scaling-figures caption', { hasText: '4 bits' }).waitFor(LONG);
  assert.deepEqual(page.complaints, []);
  await page.context().close();
});

/** A changed copy of a bf16 vector in a safetensors file. */
function changed16(file, name, change) {
  const bytes = readFileSync(file);
  const begin = 8 + Number(bytes.readBigUInt64LE(0));
  const [from, to] = JSON.parse(bytes.subarray(8, begin))[name].data_offsets;
  const values = Array.from({ length: (to - from) / 2 }, (_, at) => {
    const word = Buffer.alloc(4);
    bytes.copy(word, 2, begin + from + 2 * at, begin + from + 2 * at + 2);
    return word.readFloatLE();
  });
  change(values);
  values.forEach((value, at) => {
    const word = Buffer.alloc(4);
    word.writeFloatLE(value);
    word.copy(bytes, begin + from + 2 * at, 2);
  });
  writeFileSync(file, bytes);
}

test('dead and outlier channels are marked', LONG, async () => {
  const folder = mkdtempSync(join(tmpdir(), 'halftone-page-'));
  const model = join(folder, 'loud');
  cpSync(join(ROOT, 'web/demo/model'), model, { recursive: true });
  changed16(join(model, 'model.safetensors'), 'model.layers.0.input_layernorm.weight', (weights) => {
    weights[7] = 0;
    weights[40] *= 30;
  });
  const page = await browser.page();
  await page.setInputFiles('#folder-input', model);
  await page.locator('#settings:not([hidden])').waitFor(LONG);
  const lesson = await open(page, 'order');
  await lesson.getByLabel('Model').selectOption('true');
  await lesson.getByText('1 dead: column 7.').waitFor(LONG);
  assert.match(await lesson.textContent(), /above 20 times the median: columns? (\d+, )*40[.,]/);
  await lesson.locator('.uplot').first().waitFor(LONG);
  // Without a cursor the legend has names and no empty values.
  assert.equal((await lesson.locator('.u-legend').first().innerText()).replace(/\s/g, ''), 'rankdiag(H)outliersdead');
  await page.waitForTimeout(500);
  await shot(page, 'how-channels');
  assert.deepEqual(page.complaints, []);
  await page.context().close();
  rmSync(folder, { recursive: true });
});

test('a layer of the model that is open, by its address', LONG, async () => {
  const page = await browser.page();
  await page.click('#choose-demo');
  await page.locator('#settings:not([hidden])').waitFor(LONG);
  const lesson = await open(page, 'order');
  await page.locator('#order-figures tbody tr').first().waitFor(LONG);
  const before = await page.locator('#order-figures').textContent();
  await lesson.getByLabel('Model').selectOption('true');
  await lesson.getByLabel('Layer').selectOption('model.layers.1.mlp.down_proj');
  await lesson.getByLabel('Calibrated with').selectOption('256');
  await changed(page, '#order-figures', before);
  await lesson.getByText('256 tokens of the built-in').waitFor(LONG);
  await settled(page, 'order');
  assert.equal(await page.locator('#message:not([hidden])').count(), 0, await page.locator('#message-text').textContent());

  // The address leads to the same lesson when the page is loaded anew, by then without that model.
  await page.reload();
  await page.locator('#order-figures tbody tr').first().waitFor(LONG);
  assert.equal(await page.locator('#lesson-order').getByLabel('Model').inputValue(), 'false');
  assert.deepEqual(page.complaints, []);
  await page.context().close();
});

const LESSONS = ['example', 'order', 'hessian', 'plane', 'grids', 'diffusion', 'scaling'];
const LAYOUTS = [
  ['light', {}], ['narrow', { viewport: { width: 360, height: 800 }, hasTouch: true }], ['dark', { colorScheme: 'dark' }],
];
for (const [layout, options] of LAYOUTS) {
  test(`all lessons are accessible and fit: ${layout}`, LONG, async () => {
    const page = await browser.page(options);
    for (const name of LESSONS) {
      const lesson = await open(page, name);
      await lesson.locator(name === 'diffusion' ? '#prints canvas' : '[id$="-figures"] tbody tr').first().waitFor(LONG);
      await settled(page, name);
      if (name === 'example') {
        for (let step = 0; step < 2; step += 1) await lesson.getByRole('button', { name: 'Next' }).click();
      }
      // Charts are drawn a little later.
      await page.waitForTimeout(700);
      await shot(page, `how-${name}-${layout}`);
      await accessible(page, `${name}, ${layout}`);
      const width = await page.evaluate(() => document.documentElement.scrollWidth);
      assert.ok(width <= page.viewportSize().width, `${name} is ${width} wide`);
      // A person sees tables whole.
      if (['order', 'scaling'].includes(name)) {
        assert.ok(await lesson.locator('.wide-table').evaluateAll((boxes) => boxes.every((box) => box.scrollWidth <= box.clientWidth)), `${name}, ${layout}`);
      }
    }
    assert.deepEqual(page.complaints, []);
    await page.context().close();
  });
}
