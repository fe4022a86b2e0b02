// Products by 4-bit weights: ours, through our wasm as a model's layers are multiplied, beside onnxruntime-web's
// MatMulNBits on its WebGPU provider. One Chromium page, one adapter, the same weights and inputs.
//
//   make bench-web                                      (installs onnxruntime-web here, and builds our side)
//   npm run bench --prefix tests/onnxruntime -- --shapes 576x576,2048x2048 --groups 32,128 --rows 1,4,64 --rounds 3
//
// Each figure is the time of one product within a chain of them: two chains of different length run in turn, each
// as one session.run there and one wait here, and the difference of their best times is divided by the difference
// of their lengths. So what a run costs by itself (upload, readback, JavaScript) counts for neither. Both sum in
// float32; outputs of a whole chain are compared. A pair of shapes such as 576x1536 is a chain of that product
// and the one back, and its figure the mean of both. Times are the software adapter's unless --hardware is given.

import { createServer } from 'node:http';
import { createReadStream } from 'node:fs';
import { extname, join, normalize } from 'node:path';
import { parseArgs } from 'node:util';
import { launch } from '../page/browser.mjs';
import { ROOT } from '../page/harness.mjs';
import { chain } from './onnx.mjs';

const { values: options } = parseArgs({
  options: {
    shapes: { type: 'string', default: '576x576,576x1536,2048x2048,4096x4096' },
    groups: { type: 'string', default: '32,128' },
    rows: { type: 'string', default: '1,4,64' },
    rounds: { type: 'string', default: '3' },
    hardware: { type: 'boolean', default: false },
  },
});
const numbers = (text) => text.split(',').map(Number);
/** Products of the shorter chain, and of the longer one at most: as many as take the slower side a few seconds. */
const SHORT = 2;
const MOST = 32;
const SECONDS = 3;
const TOLERANCE = 1e-3;

const FOLDERS = { ort: join(ROOT, 'tests/onnxruntime/node_modules/onnxruntime-web/dist'), ours: join(ROOT, 'target/onnxruntime') };
const TYPES = { '.js': 'text/javascript', '.mjs': 'text/javascript', '.wasm': 'application/wasm' };

/** Models by name, as long as they are needed. */
const models = new Map();

const server = createServer((request, response) => {
  const [, folder, ...rest] = normalize(new URL(request.url, 'http://localhost').pathname).split('/');
  if (folder === 'models') return response.end(models.get(rest.join('/')));
  if (!FOLDERS[folder]) {
    response.writeHead(200, { 'content-type': 'text/html' });
    return response.end('<!doctype html><title>bench</title><link rel="icon" href="data:,">');
  }
  response.writeHead(200, { 'content-type': TYPES[extname(rest.at(-1))] ?? 'application/octet-stream' });
  return createReadStream(join(FOLDERS[folder], ...rest)).on('error', () => response.destroy()).pipe(response);
});
await new Promise((done) => { server.listen(0, '127.0.0.1', done); });

/** The same numbers in every run. */
function random(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** A layer [n, k] with codes for both sides, and scales with which outputs are as large as inputs. */
function layer(n, k, group) {
  const next = random(n * 31 + k);
  const codes = Uint8Array.from({ length: n * k }, () => Math.floor(next() * 16));
  const groups = Math.ceil(k / group);
  const scales = new Float32Array(n * groups);
  for (let at = 0; at < scales.length; at += 1) scales[at] = Math.fround((0.75 + next() * 0.5) / Math.sqrt(21.25 * k));
  // f16 has them exactly, as our format wants them.
  const bits = new Uint32Array(scales.buffer);
  for (let at = 0; at < bits.length; at += 1) bits[at] &= 0xffffe000;
  // Two to a byte; the last block is filled up.
  const packed = new Uint8Array((n * groups * group) / 2);
  codes.forEach((code, at) => {
    const place = Math.floor(at / k) * groups * group + (at % k);
    packed[place >> 1] += place % 2 ? code * 16 : code;
  });
  return { n, k, group, codes, packed, scales };
}

const browser = await launch({ gpu: !options.hardware });
const page = await browser.newPage();
page.on('pageerror', (error) => console.error(error.message));
await page.goto(`http://127.0.0.1:${server.address().port}/`);
const adapter = await page.evaluate(async () => {
  const ort = await import('/ort/ort.webgpu.min.mjs');
  const ours = await import('/ours/ours.js');
  await ours.default();
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = '/ort/';
  const chain = await ours.Chain.open();
  let sessions = [];
  let dispatches = 0;
  const { dispatchWorkgroups } = GPUComputePassEncoder.prototype;
  GPUComputePassEncoder.prototype.dispatchWorkgroups = function (...groups) {
    dispatches += 1;
    return dispatchWorkgroups.apply(this, groups);
  };
  window.bench = {
    async prepare(layers, lengths) {
      chain.clear();
      const bytes = async (name) => (await fetch(`/models/${name}`)).arrayBuffer();
      for (const [at, { n, k, group }] of layers.entries()) {
        const scales = new Float32Array(await bytes(`scales${at}`));
        chain.add(n, k, group, new Uint8Array(await bytes(`codes${at}`)), scales);
      }
      for (const session of sessions) await session.release();
      sessions = [];
      for (const length of lengths) {
        sessions.push(await ort.InferenceSession.create(new Uint8Array(await bytes(`chain${length}`)), {
          executionProviders: ['webgpu'], enableMemPattern: true,
        }));
      }
    },
    /** Milliseconds of each chain on each side, the best of `rounds` in turn, and the largest difference of their outputs. */
    async measure(rows, k, lengths, rounds) {
      const x = Float32Array.from({ length: rows * k }, (_, at) => Math.sin(at * 12.9898));
      const sides = {
        ours: (at) => chain.run(x, rows, lengths[at]),
        theirs: async (at) => {
          const { y } = await sessions[at].run({ x: new ort.Tensor('float32', x, [rows, k]) });
          return y.getData();
        },
      };
      const best = { ours: lengths.map(() => Infinity), theirs: lengths.map(() => Infinity) };
      const outputs = {};
      const dispatched = {};
      for (let round = 0; round <= rounds; round += 1) {
        for (const at of lengths.keys()) {
          for (const [name, side] of Object.entries(sides)) {
            dispatches = 0;
            const begun = performance.now();
            outputs[name] = await side(at);
            dispatched[name] = dispatches / lengths[at];
            // The first round makes pipelines.
            if (round > 0) best[name][at] = Math.min(best[name][at], performance.now() - begun);
          }
        }
      }
      const largest = outputs.ours.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
      const difference = outputs.ours.reduce((most, value, at) => Math.max(most, Math.abs(value - outputs.theirs[at])), 0);
      return { best, difference: difference / largest, dispatched };
    },
  };
  const { vendor, architecture, description } = (await navigator.gpu.requestAdapter()).info;
  return { name: [vendor, architecture, description].filter(Boolean).join(' '), ort: ort.env.versions.web };
});
console.log(`${adapter.name}; onnxruntime-web ${adapter.ort}; 4 bits, milliseconds of one product`);
console.log('shape'.padEnd(11), 'block'.padStart(5), 'rows'.padStart(5), 'ours'.padStart(9), 'theirs'.padStart(9), 'theirs/ours'.padStart(12), 'GFLOP/s'.padStart(9), 'difference'.padStart(11));

let slower = 0;
for (const shape of options.shapes.split(',')) {
  const [n, k] = shape.split('x').map(Number);
  for (const group of numbers(options.groups)) {
    const layers = n === k ? [layer(n, k, group)] : [layer(n, k, group), layer(k, n, group)];
    for (const rows of numbers(options.rows)) {
      const flops = 2 * rows * n * k;
      for (const [at, { codes, scales, n: outputs }] of layers.entries()) {
        const groups = scales.length / outputs;
        // Ours has scales [groups, n].
        const turned = Float32Array.from(scales, (_, place) => scales[(place % outputs) * groups + Math.floor(place / outputs)]);
        models.set(`codes${at}`, Buffer.from(codes.buffer)).set(`scales${at}`, Buffer.from(turned.buffer));
      }
      const shapes = layers.map(({ n: outputs, k: inputs }) => ({ n: outputs, k: inputs, group }));
      const measure = async (lengths, rounds) => {
        for (const length of lengths) models.set(`chain${length}`, chain(layers, rows, length));
        await page.evaluate(([shapes, lengths]) => window.bench.prepare(shapes, lengths), [shapes, lengths]);
        return page.evaluate((args) => window.bench.measure(...args), [rows, k, lengths, rounds]);
      };
      const once = (await measure([SHORT], 1)).best;
      const slowest = Math.max(...once.ours, ...once.theirs) / SHORT / 1e3;
      const long = Math.min(MOST, Math.max(2 * SHORT, 2 * Math.round(SECONDS / slowest / 2)));
      const { best, difference, dispatched } = await measure([SHORT, long], Number(options.rounds));
      const each = ([short, longer]) => (longer - short) / (long - SHORT);
      const [ours, theirs] = [each(best.ours), each(best.theirs)];
      if (!(difference < TOLERANCE)) throw new Error(`${shape}, blocks of ${group}, ${rows} rows: outputs differ by ${difference} of the largest`);
      if (!(dispatched.ours >= 1 && dispatched.theirs >= 1)) throw new Error(`not on the GPU: ${JSON.stringify(dispatched)} dispatches a product`);
      if (theirs < ours) slower += 1;
      console.log(shape.padEnd(11), String(group).padStart(5), String(rows).padStart(5), ours.toFixed(3).padStart(9), theirs.toFixed(3).padStart(9),
        (theirs / ours).toFixed(2).padStart(12), (flops / ours / 1e6).toFixed(2).padStart(9), difference.toExponential(1).padStart(11));
    }
  }
}
console.log(slower ? `ours is slower on ${slower} of them` : 'ours is at least as fast on all of them');
await browser.close();
server.close();
