// What the page says when something fails that no input of a person's can make fail: memory of the GPU, memory of
// wasm, and a fault in the program. The browser is made to fail at its boundary; the program is the one that is shipped.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { shot, start } from './browser.mjs';

const LONG = { timeout: 300_000 };

/** Quantizes the demo model in a browser with these changes until the page shows a message, and has `look` judge it. */
async function failing(changes, { device, samples = 2, length = 64 }, look) {
  const browser = await start({ changes });
  try {
    const page = await browser.page();
    await page.click('#choose-demo');
    await page.check(`[name=device][value=${device}]`);
    await page.locator('#more').evaluate((more) => { more.open = true; });
    await page.selectOption('[name=group_size]', '64');
    await page.fill('[name=samples]', String(samples));
    await page.fill('[name=seq_len]', String(length));
    await page.getByText(`${(samples * length).toLocaleString('en')} tokens`, { exact: true }).waitFor(LONG);
    await page.locator('#quantize:enabled').waitFor(LONG);
    await page.evaluate(() => new BroadcastChannel('fault').postMessage('now'));
    await page.click('#quantize');
    await page.locator('#message:not([hidden])').waitFor(LONG);
    await look(await page.locator('#message-text').textContent(), page);
  } finally {
    await browser.close();
  }
}

/** Puts `fault` before the program in the worker; it gets `wanted()`, which says whether the run has begun. */
const before = (fault) => ({
  'worker.js': (text) => `const wanted = (() => {
  let begun = false;
  new BroadcastChannel('fault').onmessage = () => { begun = true; };
  return () => begun;
})();\n(${fault})(wanted);\n${text}`,
});

test('memory of the GPU that runs out', LONG, async () => {
  const fault = (wanted) => {
    const { createBuffer } = GPUDevice.prototype;
    let buffers = 0;
    GPUDevice.prototype.createBuffer = function (descriptor) {
      if (wanted() && (buffers += 1) === 40) {
        const error = new GPUOutOfMemoryError('no memory for a buffer');
        this.dispatchEvent(new GPUUncapturedErrorEvent('uncapturederror', { error, cancelable: true }));
      }
      return createBuffer.call(this, descriptor);
    };
  };
  await failing(before(fault), { device: 'gpu' }, async (message, page) => {
    await shot(page, 'gpu-memory');
    assert.match(message, /^running on .* in block \d of 6, stage \w+: .*[Oo]ut of [Mm]emory/);
    assert.match(message, /Lower “Memory limit”, close other programs that use the GPU, or use the CPU device/);
    assert.equal(await page.locator('#run-title').textContent(), 'Stopped');
  });
});

test('a large buffer that cannot be had', LONG, async () => {
  // What an allocation of the run's own is answered with, as a driver without memory does.
  const fault = (wanted) => {
    const { pushErrorScope, popErrorScope } = GPUDevice.prototype;
    const scopes = [];
    GPUDevice.prototype.pushErrorScope = function (filter) {
      scopes.push(filter);
      return pushErrorScope.call(this, filter);
    };
    GPUDevice.prototype.popErrorScope = async function () {
      const filter = scopes.pop();
      const error = await popErrorScope.call(this);
      return wanted() && filter === 'out-of-memory' ? new GPUOutOfMemoryError('no memory for a buffer') : error;
    };
  };
  await failing(before(fault), { device: 'gpu', samples: 16, length: 128 }, async (message) => {
    assert.match(message, /^running on .*: Out of Memory for a buffer of \d+\.\d MB\. Lower “Memory limit”/);
  });
});

test('a shader that the browser refuses', LONG, async () => {
  const fault = (wanted) => {
    const { createShaderModule } = GPUDevice.prototype;
    GPUDevice.prototype.createShaderModule = function (descriptor) {
      const code = wanted() ? descriptor.code.replace(/fn main\([^]*?\{/, '$& no_such_name = 1;') : descriptor.code;
      return createShaderModule.call(this, { ...descriptor, label: descriptor.label, code });
    };
  };
  await failing(before(fault), { device: 'gpu' }, async (message, page) => {
    await shot(page, 'shader');
    assert.match(message, /^compiling the shader [a-z_]+ for .* (before the first block|in block \d of 6, stage \w+): .*no_such_name/);
    assert.match(message, /Choose the CPU as device, and report it with what was chosen and pressed before it/);
    assert.doesNotMatch(message, /Memory limit/);
  });
});

test('a driver that fails', LONG, async () => {
  const fault = (wanted) => {
    const { createBuffer } = GPUDevice.prototype;
    let told = false;
    GPUDevice.prototype.createBuffer = function (descriptor) {
      if (wanted() && !told) {
        told = true;
        const error = new GPUInternalError('the compiler failed');
        this.dispatchEvent(new GPUUncapturedErrorEvent('uncapturederror', { error, cancelable: true }));
      }
      return createBuffer.call(this, descriptor);
    };
  };
  await failing(before(fault), { device: 'gpu' }, async (message) => {
    assert.match(message, /^the graphics driver failed, .*Reload the page\. Choose the CPU as device, or update the driver/);
  });
});

test('memory of wasm that runs out', LONG, async () => {
  const MOST = 48e6;
  const changes = { 'halftone_bg.wasm': (module) => limited(module, MOST) };
  await failing(changes, { device: 'cpu', samples: 128, length: 512 }, async (message, page) => {
    await shot(page, 'wasm-memory');
    assert.match(message, /the program stopped .*most likely because memory ran out. Reload the page and use fewer or shorter samples/);
    // The worker is gone, and says so when it is asked again.
    await page.click('#message-close');
    await page.click('#again');
    await page.locator('#message:not([hidden])').waitFor(LONG);
    assert.match(await page.locator('#message-text').textContent(), /the program has stopped; reload the page/);
    await page.reload();
    await page.locator('#setup:not([hidden])').waitFor(LONG);
    await page.click('#choose-demo');
    await page.locator('#model-facts dd').first().waitFor(LONG);
  });
});

test('a fault in the program', LONG, async () => {
  const fault = (wanted) => {
    const { createBuffer } = GPUDevice.prototype;
    GPUDevice.prototype.createBuffer = function (descriptor) {
      // A browser never throws this for such a buffer, so the library below takes it for impossible.
      if (wanted()) throw new RangeError('no such buffer');
      return createBuffer.call(this, descriptor);
    };
  };
  await failing(before(fault), { device: 'gpu' }, async (message) => {
    assert.match(message, /^internal error: panicked at .*no such buffer/);
    assert.match(message, /please report it with what was chosen and pressed before it/);
  });
});

/** A wasm module whose memory may grow to `bytes` and no further. */
function limited(module, bytes) {
  const MEMORY = 5;
  let at = 8;
  while (at < module.length) {
    const id = module[at];
    const [size, begin] = number(module, at + 1);
    if (id === MEMORY) {
      // One memory: flags, the least number of pages, and the most if the flags say so.
      const [least] = number(module, begin + 2);
      const content = Buffer.from([1, 1, ...encoded(least), ...encoded(Math.floor(bytes / 65536))]);
      return Buffer.concat([
        module.subarray(0, at), Buffer.from([MEMORY, ...encoded(content.length)]), content, module.subarray(begin + size),
      ]);
    }
    at = begin + size;
  }
  throw new Error('the module has no memory of its own');
}

/** An unsigned LEB128 number and where the next thing begins. */
function number(bytes, at) {
  let value = 0;
  for (let shift = 0; ; shift += 7) {
    const byte = bytes[at];
    at += 1;
    value += (byte & 127) * 2 ** shift;
    if (byte < 128) return [value, at];
  }
}

function encoded(value) {
  const bytes = [];
  do {
    bytes.push(value > 127 ? value % 128 + 128 : value);
    value = Math.floor(value / 128);
  } while (value > 0);
  return bytes;
}
