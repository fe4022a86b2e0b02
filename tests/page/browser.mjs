// A Chromium with WebGPU in software, the built page served under a sub-path as on a static host, and a
// watch over what the page asks for and complains of.

import { createServer } from 'node:http';
import { mkdirSync, existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { extname, join, normalize } from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';

export const ROOT = fileURLToPath(new URL('../../', import.meta.url));
const DIST = process.env.HALFTONE_DIST ?? join(ROOT, 'dist');
const CHROMIUM = process.env.HALFTONE_CHROMIUM ?? '/usr/bin/chromium';
/** For a person to look at; git ignores it. */
const SHOTS = join(ROOT, 'target', 'page');
const PLACE = '/halftone/';

const FLAGS = [
  '--no-sandbox', '--disable-background-networking', '--disable-component-update', '--disable-sync', '--no-first-run',
  '--disable-quic',
];
const SOFTWARE_GPU = ['--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader'];

const TYPES = {
  '.html': 'text/html; charset=utf-8', '.js': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml',
  '.wasm': 'application/wasm', '.json': 'application/json', '.txt': 'text/plain; charset=utf-8',
};

/** Serves the built page; no headers but the type, as any static host has them. */
async function serve() {
  if (!existsSync(join(DIST, 'index.html'))) throw new Error(`there is no page in ${DIST}. Build it with trunk first`);
  const server = createServer(async (request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, 'http://localhost').pathname));
    const file = path === PLACE ? 'index.html' : path.startsWith(PLACE) ? path.slice(PLACE.length) : null;
    try {
      const content = await readFile(join(DIST, file));
      response.writeHead(200, { 'content-type': TYPES[extname(file)] ?? 'application/octet-stream' }).end(content);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((ready) => { server.listen(0, '127.0.0.1', ready); });
  return { server, origin: `http://127.0.0.1:${server.address().port}` };
}

/** Browser (with a GPU in software, or without any) and server; `page()` gives a page in a profile of its own, `close()` ends all. */
export async function start({ gpu = true } = {}) {
  const { server, origin } = await serve();
  const browser = await chromium.launch({ executablePath: CHROMIUM, args: gpu ? [...FLAGS, ...SOFTWARE_GPU] : FLAGS });
  mkdirSync(SHOTS, { recursive: true });
  return {
    origin,
    async page({ prepare, ...options } = {}) {
      const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
      if (prepare) await context.addInitScript(prepare);
      const page = await context.newPage();
      page.complaints = [];
      page.asked = [];
      page.on('console', (line) => { if (line.type() === 'error') page.complaints.push(line.text()); });
      page.on('pageerror', (error) => page.complaints.push(error.stack));
      context.on('request', (request) => page.asked.push(request.url()));
      await page.goto(origin + PLACE);
      await page.locator('#setup:not([hidden])').waitFor();
      return page;
    },
    async close() {
      await browser.close();
      server.close();
    },
  };
}

export const shot = (page, name) => page.screenshot({ path: join(SHOTS, `${name}.png`), fullPage: true });

/** Drops files or folders of the disk, as a hand would. */
export async function drop(page, selector, paths) {
  const box = await page.locator(selector).boundingBox();
  const session = await page.context().newCDPSession(page);
  const data = { items: [], files: paths, dragOperationsMask: 1 };
  for (const type of ['dragEnter', 'dragOver', 'drop']) {
    await session.send('Input.dispatchDragEvent', { type, x: box.x + box.width / 2, y: box.y + box.height / 2, data });
  }
}

/** The bytes that a click on `locator` downloads. */
export async function downloaded(page, locator) {
  const [download] = await Promise.all([page.waitForEvent('download'), locator.click()]);
  return { name: download.suggestedFilename(), bytes: await readFile(await download.path()) };
}
