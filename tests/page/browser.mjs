// The page as a person has it: a browser, the built page on a server, and a watch over what the page asks for
// and complains of.

import { mkdirSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { chromium } from 'playwright-core';
import { ROOT, serve } from './harness.mjs';

const CHROMIUM = process.env.HALFTONE_CHROMIUM ?? '/usr/bin/chromium';
/** For a person to look at; git ignores it. */
const SHOTS = join(ROOT, 'target', 'page');

const FLAGS = [
  '--no-sandbox', '--disable-background-networking', '--disable-component-update', '--disable-sync', '--no-first-run',
  '--disable-quic',
];
const SOFTWARE_GPU = ['--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader'];

/** Chromium, with a GPU in software or with what there is. */
export const launch = ({ gpu }) => chromium.launch({ executablePath: CHROMIUM, args: gpu ? [...FLAGS, ...SOFTWARE_GPU] : FLAGS });

/**
 * Browser (with a GPU in software, or without any) and server, which may serve changed files (see `serve`); `page()`
 * gives a page in a profile of its own, `close()` ends all.
 */
export async function start({ gpu = true, changes = {} } = {}) {
  const server = await serve(changes);
  const { origin } = new URL(server.url);
  const browser = await launch({ gpu });
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
      await page.goto(`${server.url}index.html`);
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
