// Where the result goes: a folder of the person's, or the browser's private storage.

import { byId } from './dom.js';
import { guarded } from './message.js';

/** What a stopped run leaves in its folder (src/pipeline/journal.rs). */
const JOURNAL = 'halftone-journal.json';

let chosen = null;

/** The picked folder, `null` for the private storage. */
export const folder = () => (wantsFolder() ? chosen : null);

/** Whether a place is settled. */
export const ready = () => !wantsFolder() || chosen !== null;

const wantsFolder = () => byId('output').elements.output.value === 'folder';

/** `onChange()` when another place is chosen. */
export function watch(onChange) {
  // Where the browser has no picker, the choice would be none.
  byId('output-folder').hidden = !('showDirectoryPicker' in window);
  const pick = () => guarded(async () => {
    chosen = await showDirectoryPicker({ id: 'halftone-output', mode: 'readwrite' });
    byId('folder-name').textContent = chosen.name;
    onChange();
  });
  for (const radio of byId('output').elements.output) {
    radio.addEventListener('change', () => {
      byId('folder-line').hidden = !wantsFolder();
      if (wantsFolder() && !chosen) pick();
      onChange();
    });
  }
  byId('choose-output').onclick = pick;
}

/**
 * Where in the picked folder the result goes: the folder itself when it is empty or holds a stopped run, else
 * a new folder in it. `resume` tells whether there is a stopped run to go on with.
 */
export async function place(name) {
  const parent = folder();
  if (!parent) return { directory: null, where: null, resume: false };
  if (await has(parent, JOURNAL)) return { directory: parent, where: parent.name, resume: true };
  if (await empty(parent)) return { directory: parent, where: parent.name, resume: false };
  const directory = await parent.getDirectoryHandle(name, { create: true });
  return { directory, where: `${parent.name}/${name}`, resume: await has(directory, JOURNAL) };
}

async function has(directory, name) {
  try {
    await directory.getFileHandle(name);
    return true;
  } catch (error) {
    if (error.name === 'NotFoundError') return false;
    throw error;
  }
}

async function empty(directory) {
  for await (const name of directory.keys()) {
    if (name) return false;
  }
  return true;
}
