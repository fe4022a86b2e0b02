// Every shader in the browser's own compiler: no message of any kind, neither alone nor in a run.

import assert from 'node:assert/strict';
import { readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { ROOT, Worker, browse, serve } from './harness.mjs';

const LONG = { timeout: 300_000 };
const SHADERS = join(ROOT, 'shaders');

/** Kernels, with what `#import` names put in (src/device/shader.rs); a test of the program has all of them registered. */
const shaders = readdirSync(SHADERS).filter((name) => name.endsWith('.wgsl')).map((name) => ({
  name,
  code: readFileSync(join(SHADERS, name), 'utf8').replace(/^#import +(\S+)$/gm, (_, shared) =>
    readFileSync(join(SHADERS, 'shared', `${shared}.wgsl`), 'utf8')),
}));

/** Runs in the worker before the program: tells what the compiler says of each module, and which forms are made of it. */
function listen() {
  const told = new BroadcastChannel('shaders');
  const { createShaderModule, createComputePipeline } = GPUDevice.prototype;
  GPUDevice.prototype.createShaderModule = function (descriptor) {
    const made = createShaderModule.call(this, descriptor);
    made.getCompilationInfo().then(({ messages }) => told.postMessage({
      name: descriptor.label, messages: messages.map(({ type, lineNum, message }) => `${type} in line ${lineNum}: ${message}`),
    }));
    return made;
  };
  GPUDevice.prototype.createComputePipeline = function (descriptor) {
    told.postMessage({ name: descriptor.label, form: JSON.stringify(descriptor.compute.constants ?? {}) });
    return createComputePipeline.call(this, descriptor);
  };
}

let server, browser;

before(async () => {
  server = await serve({ 'worker.js': (text) => `(${listen})();\n${text}` });
  browser = await browse();
}, { timeout: 60_000 });

after(async () => {
  await browser?.close();
  server?.close();
});

test('each shader compiles without a message, in every form that its switches give', LONG, async () => {
  assert.ok(shaders.length >= 18);
  const page = await browser.context.newPage();
  await page.goto(`${server.url}blank.html`);
  const said = await page.evaluate(async (shaders) => {
    const adapter = await navigator.gpu.requestAdapter();
    const device = await adapter.requestDevice();
    const said = [];
    for (const { name, code } of shaders) {
      const module = device.createShaderModule({ code });
      for (const { type, lineNum, message } of (await module.getCompilationInfo()).messages) {
        said.push(`${name}: ${type} in line ${lineNum}: ${message}`);
      }
      // Switches are the booleans, both ways; numbers stay as the file has them.
      const switches = [...code.matchAll(/^override (\w+): bool/gm)].map(([, key]) => key);
      for (let bits = 0; bits < 2 ** switches.length; bits += 1) {
        const constants = Object.fromEntries(switches.map((key, at) => [key, bits >> at & 1]));
        await device.createComputePipelineAsync({ layout: 'auto', compute: { module, entryPoint: 'main', constants } })
          .catch((error) => said.push(`${name} with ${JSON.stringify(constants)}: ${error.message}`));
      }
    }
    return said;
  }, shaders);
  assert.deepEqual(said, []);
  await page.close();
});

test('neither does a run hear any', LONG, async () => {
  const worker = await Worker.start(browser.context, server.url);
  await worker.page.evaluate(() => {
    window.told = [];
    window.channel = new BroadcastChannel('shaders');
    window.channel.onmessage = ({ data }) => window.told.push(data);
  });
  await worker.get({ type: 'open', demo: true });
  await worker.get({ type: 'calibration', builtin: true });
  const settings = {
    device: 'gpu', preset: 'default', bits: 4, group_size: 64, sym: true, desc_act: null, damp_percent: 0.01,
    samples: 1, seq_len: 64, seed: 0, max_memory: null,
  };
  await worker.get({ type: 'quantize', settings, resume: false });
  await worker.get({ type: 'evaluate', which: 'after', builtin: true, max_tokens: 64 });
  const told = await worker.page.evaluate(() => window.told);
  const modules = told.filter(({ messages }) => messages);
  const forms = new Set(told.filter(({ form }) => form).map(({ name, form }) => `${name} ${form}`));
  console.log(`# ${new Set(modules.map(({ name }) => name)).size} of ${shaders.length} shaders compiled for a run, in ${forms.size} forms`);
  assert.ok(modules.length > 10 && forms.size >= modules.length / 2);
  for (const { name, messages } of modules) assert.deepEqual(messages, [], name);
  assert.deepEqual(worker.complaints, []);
});
