// The worker's beginning: loads the program (src/web/) and keeps what the page says meanwhile.
const early = [];
self.onmessage = (event) => early.push(event);

load().catch(fail).then(() => early.forEach((event) => self.onmessage(event)));

async function load() {
  importScripts('halftone.js');
  // From here on the program has its own `onmessage`.
  await wasm_bindgen({ module_or_path: 'halftone_bg.wasm' });
}

function fail(error) {
  const message = `the program could not be loaded (${error.message ?? error}). Reload the page; if that does not `
    + 'help, use a browser of 2023 or later';
  self.onmessage = ({ data }) => {
    self.postMessage({ id: data.id, event: { type: 'failed', message, code: 5, resumable: false } });
  };
}
