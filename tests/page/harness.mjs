// A browser with the built page's files at hand: a server for dist/, Chromium with WebGPU on SwiftShader,
// and a worker that is spoken to as the page does.

import { execFileSync } from 'node:child_process';
import { createServer } from 'node:http';
import { createReadStream, existsSync } from 'node:fs';
import { mkdtemp, readFile, rm, stat } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { extname, join, normalize } from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';

export const ROOT = fileURLToPath(new URL('../../', import.meta.url));
const TYPES = {
  '.html': 'text/html', '.js': 'text/javascript', '.css': 'text/css', '.wasm': 'application/wasm',
  '.json': 'application/json', '.svg': 'image/svg+xml', '.txt': 'text/plain',
};
const FLAGS = [
  '--no-sandbox', '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader', '--no-first-run',
  '--disable-background-networking', '--disable-component-update', '--disable-sync', '--disable-quic',
];

/**
 * Serves dist/ under a sub-path, as a static host may, and an empty page to start from. `changes` has functions
 * by path, from a file's bytes to what is served instead: how a test gives the program a faulty browser.
 */
export async function serve(changes = {}) {
  const base = '/some/path/';
  const server = createServer(async (request, response) => {
    const path = decodeURIComponent(new URL(request.url, 'http://localhost').pathname);
    if (path === `${base}blank.html`) {
      response.writeHead(200, { 'content-type': 'text/html' });
      response.end('<!doctype html><title>blank</title><link rel="icon" href="data:,"><input type="file" multiple>');
      return;
    }
    const name = normalize(path.startsWith(base) ? path.slice(base.length) : 'absent');
    const file = join(ROOT, 'dist', name);
    try {
      if (name in changes) {
        const changed = changes[name](await readFile(file));
        response.writeHead(200, { 'content-type': TYPES[extname(file)], 'content-length': Buffer.byteLength(changed) });
        response.end(changed);
        return;
      }
      const { size } = await stat(file);
      response.writeHead(200, { 'content-type': TYPES[extname(file)] ?? 'application/octet-stream', 'content-length': size });
      createReadStream(file).pipe(response);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((done) => server.listen(0, '127.0.0.1', done));
  return { url: `http://127.0.0.1:${server.address().port}${base}`, close: () => server.close() };
}

/** Chromium with a profile of its own, which `close` removes. */
export async function browse() {
  const profile = await mkdtemp(join(tmpdir(), 'halftone-page-'));
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.HALFTONE_CHROMIUM ?? '/usr/bin/chromium',
    headless: false,
    args: ['--headless=new', ...FLAGS],
  });
  return {
    context,
    close: async () => {
      await context.close();
      await rm(profile, { recursive: true, force: true });
    },
  };
}

/** A worker in an empty page. */
export class Worker {
  /** What the console said, and what went wrong in the page. */
  complaints = [];

  static async start(context, url) {
    const worker = new Worker();
    worker.page = await context.newPage();
    worker.page.on('console', (message) => {
      if (['error', 'warning'].includes(message.type())) worker.complaints.push(message.text());
    });
    worker.page.on('pageerror', (error) => worker.complaints.push(String(error)));
    await worker.page.goto(`${url}blank.html`);
    await worker.page.evaluate(installDriver);
    return worker;
  }

  /**
   * Starts a request; `outcome` waits for its end. `files` are `[name, content]`, or from the file input if
   * `chosen`. Content is text, or undefined for the demo model's file of that name, or that file's first
   * bytes if a number.
   */
  begin(request, { files, chosen = false, directory } = {}) {
    return this.page.evaluate((...args) => window.driver.begin(...args), { request, files, chosen, directory });
  }

  /** All events of a request up to its answer, which is the last; `failed` is one too. */
  outcome(id) {
    return this.page.evaluate((id) => window.driver.outcome(id), id);
  }

  async ask(request, more) {
    const events = await this.outcome(await this.begin(request, more));
    return Object.assign(events.at(-1), { events });
  }

  /** The answer, which must not be a failure. */
  async get(request, more) {
    const answer = await this.ask(request, more);
    if (answer.type === 'failed') throw new Error(`${request.type}: ${answer.message}`);
    return answer;
  }

  /** Waits until a request has had an event of this type. */
  until(id, type) {
    return this.page.waitForFunction(([id, type]) => window.driver.has(id, type), [id, type], { polling: 20, timeout: 300_000 });
  }

  /** The files that came with the answer to `id`, by name. */
  async files(name) {
    const encoded = await this.page.evaluate((name) => window.driver.fetch(name), name);
    return decoded(encoded);
  }

  /** The files in a directory of the private storage that was given to a run. */
  async directory(name) {
    return decoded(await this.page.evaluate((name) => window.driver.directory(name), name));
  }

  /** Ends the browser's GPU process, as a driver's watchdog would; the browser starts another. */
  async crashGpu() {
    const session = await this.page.context().newCDPSession(this.page);
    await session.send('Browser.crashGpuProcess');
    await session.detach();
  }

  close() {
    return this.page.close();
  }
}

const decoded = (files) => new Map(files.map(([name, text]) => [name, Buffer.from(text, 'base64')]));

/** Runs in the page. */
function installDriver() {
  const ENDS = new Set([
    'ready', 'model', 'text', 'plan', 'done', 'paused', 'resumed', 'score', 'compared', 'last_words', 'generated', 'stored', 'files', 'failed',
  ]);
  const worker = new Worker('worker.js');
  const requests = new Map();
  let next = 1;
  worker.onmessage = ({ data: { id, event, files } }) => {
    const request = requests.get(id);
    if (!request) return;
    // Pictures are looked at here: there are too many numbers in them to pass on.
    request.events.push(event.type === 'weights' ? summary(event) : event);
    if (files) request.files = files;
    if (ENDS.has(event.type)) request.end(request.events);
  };
  worker.onerror = (error) => console.error(`worker: ${error.message}`);
  const summary = ({ weights, codes, errors, ...rest }) => {
    const mean = (values) => values.reduce((sum, x) => sum + Math.abs(x), 0) / values.length;
    return {
      ...rest, lengths: [weights, codes, errors].map(({ length }) => length),
      weight: mean(weights), error: mean(errors), largest: Math.max(...codes),
    };
  };
  const base64 = async (blob) => {
    const bytes = new Uint8Array(await blob.arrayBuffer());
    let text = '';
    for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
    return btoa(text);
  };
  const file = async ([name, content]) => {
    if (typeof content === 'string') return new File([content], name);
    const blob = await (await fetch(`demo/model/${name}`)).blob();
    return new File([blob.slice(0, content ?? blob.size)], name);
  };
  const folder = async (name) => {
    const root = await navigator.storage.getDirectory();
    return root.getDirectoryHandle(name, { create: true });
  };
  window.driver = {
    async begin({ request, files, chosen, directory }) {
      const id = next++;
      const made = {};
      made.promise = new Promise((resolve) => Object.assign(made, { events: [], end: resolve }));
      requests.set(id, made);
      worker.postMessage({
        id,
        request,
        files: chosen ? [...document.querySelector('input').files] : files && await Promise.all(files.map(file)),
        directory: directory && await folder(directory),
      });
      return id;
    },
    outcome: (id) => requests.get(id).promise,
    last: (id, type) => requests.get(id).events.findLast((event) => event.type === type),
    count: (id) => requests.get(id).events.length,
    has: (id, type) => requests.get(id).events.some((event) => event.type === type),
    async fetch(name) {
      const id = await this.begin({ request: { type: 'fetch', name } });
      const events = await this.outcome(id);
      if (events.at(-1).type === 'failed') throw new Error(events.at(-1).message);
      return Promise.all(requests.get(id).files.map(async (file) => [file.name, await base64(file)]));
    },
    async directory(name) {
      const found = [];
      for await (const handle of (await folder(name)).values()) {
        found.push([handle.name, await base64(await handle.getFile())]);
      }
      return found;
    },
  };
}

/** The weights that the command line makes of a model with these options; `undefined` if it is not built. */
export async function quantizedNatively(model, options) {
  const target = process.env.CARGO_TARGET_DIR ?? join(ROOT, 'target');
  const program = ['release', 'debug'].map((profile) => join(target, profile, 'halftone')).find(existsSync);
  if (!program) return undefined;
  const out = await mkdtemp(join(tmpdir(), 'halftone-native-'));
  try {
    execFileSync(program, ['quantize', model, '--out', join(out, 'q'), '--device', 'cpu', '--json', ...options],
      { stdio: ['ignore', 'pipe', 'ignore'] });
    return await readFile(join(out, 'q', 'model.safetensors'));
  } finally {
    await rm(out, { recursive: true });
  }
}

/** Tensors of a safetensors file by name: dtype, shape, bytes. */
export function tensors(bytes) {
  const length = Number(bytes.readBigUInt64LE(0));
  const header = JSON.parse(bytes.subarray(8, 8 + length).toString());
  delete header.__metadata__;
  return new Map(Object.entries(header).map(([name, { dtype, shape, data_offsets: [begin, end] }]) => [
    name, { dtype, shape, bytes: bytes.subarray(8 + length + begin, 8 + length + end) },
  ]));
}
