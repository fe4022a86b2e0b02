// Folders and files that a person chooses or drops, as the `File` objects of one model folder. Nothing is
// read here: a `File` is only a reference, and the worker reads the ranges that it needs.

const DEPTH = 4;
const MOST = 20_000;

/** From `<input type="file">`, with or without `webkitdirectory`. */
export function fromInput(list) {
  return modelFolder(Array.from(list, (file) => ({ path: file.webkitRelativePath || file.name, file })));
}

/** From `showDirectoryPicker()`. */
export async function fromDirectory(handle) {
  const entries = [];
  await walkHandle(handle, handle.name, entries, 1);
  return modelFolder(entries);
}

/** From a drop: a folder, or some files. Must be called within the event, whose items end with it. */
export function fromDrop(transfer) {
  const items = Array.from(transfer.items).filter((item) => item.kind === 'file');
  const roots = items.map((item) => item.webkitGetAsEntry?.());
  if (!roots.length || roots.some((root) => !root)) {
    return Promise.resolve(fromInput(transfer.files));
  }
  return (async () => {
    const entries = [];
    for (const root of roots) await walkEntry(root, root.name, entries, 1);
    return modelFolder(entries);
  })();
}

async function walkHandle(handle, path, entries, depth) {
  for await (const child of handle.values()) {
    const place = `${path}/${child.name}`;
    if (child.kind === 'file') add(entries, place, await child.getFile());
    else if (depth < DEPTH && !child.name.startsWith('.')) await walkHandle(child, place, entries, depth + 1);
  }
}

async function walkEntry(entry, path, entries, depth) {
  if (entry.isFile) {
    add(entries, path, await new Promise((resolve, reject) => entry.file(resolve, reject)));
    return;
  }
  if (depth > DEPTH || entry.name.startsWith('.')) return;
  const reader = entry.createReader();
  for (;;) {
    // A reader gives some at a time, and nothing when it is through.
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return;
    for (const child of some) await walkEntry(child, `${path}/${child.name}`, entries, depth + 1);
  }
}

function add(entries, path, file) {
  if (entries.length >= MOST) {
    throw new Error(`the folder holds more than ${MOST} files. Choose the folder of the model itself`);
  }
  entries.push({ path, file });
}

/**
 * The folder nearest to the top that has a config.json; without one, what lies at the top, so that the
 * worker says what is missing.
 */
function modelFolder(entries) {
  const folder = (path) => path.slice(0, Math.max(path.lastIndexOf('/'), 0));
  const depth = (path) => path.split('/').length;
  const among = (list) => {
    const least = Math.min(...list.map(({ path }) => depth(path)));
    return [...new Set(list.filter(({ path }) => depth(path) === least).map(({ path }) => folder(path)))];
  };
  if (!entries.length) throw new Error('the folder is empty. Choose one with config.json and .safetensors files');
  const configs = entries.filter(({ file }) => file.name === 'config.json');
  const folders = among(configs.length ? configs : entries);
  if (configs.length && folders.length > 1) {
    throw new Error(`several models are in there: ${folders.slice(0, 5).join(', ')}. Choose the folder of one of them`);
  }
  const [chosen] = folders;
  return {
    name: chosen.split('/').pop(),
    files: entries.filter(({ path }) => folder(path) === chosen).map(({ file }) => file),
  };
}
