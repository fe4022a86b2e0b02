// What was found to compute on, and the choice between GPU and CPU.

import { byId, element, show } from './dom.js';
import { bytes } from './format.js';

const radio = (value) => document.querySelector(`input[name="device"][value="${value}"]`);

/** Shows the answer to `start` and chooses: a hardware GPU, else the CPU. */
export function render({ adapter, reason, simd, version }) {
  byId('version').textContent = version;
  const status = byId('device-status');
  if (adapter) {
    status.replaceChildren(element('strong', {}, title(adapter)), ` ${detail(adapter)}`);
  } else {
    status.replaceChildren(element('strong', {}, 'No GPU here.'), ' The CPU device will do the work.');
  }
  show(byId('device-note'), note(adapter, reason, simd));
  radio('gpu').disabled = !adapter;
  radio(adapter && !adapter.software ? 'gpu' : 'cpu').checked = true;
  byId('device-choice').hidden = false;
}

/** Browsers tell little, and not all the same. */
const maker = ({ vendor, architecture }) => [vendor, architecture].filter(Boolean).join(' ');
const title = (adapter) => adapter.name || maker(adapter) || 'GPU';

function detail(adapter) {
  return [
    maker(adapter) && title(adapter) !== maker(adapter) && `(${maker(adapter)})`,
    `with buffers up to ${bytes(adapter.max_buffer_bytes)}, bindings up to ${bytes(adapter.max_binding_bytes)},`,
    `${adapter.shader_f16 ? 'with' : 'without'} 16-bit floats (not needed)`,
  ].filter(Boolean).join(' ');
}

/** A reason is written to stand after a colon. */
const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1).replace(/\.$/, '')}.`;

function note(adapter, reason, simd) {
  const notes = [];
  if (adapter?.software) {
    notes.push('This adapter is a program on the processor and slow: the CPU device does the same work many times faster.');
  }
  if (reason) notes.push(sentence(reason));
  if (!simd) notes.push('This browser has no 128-bit vectors for WebAssembly, so the CPU device is slow.');
  return notes.join(' ');
}
