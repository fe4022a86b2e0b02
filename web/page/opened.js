// A result in the browser's storage, opened to be downloaded and judged.

import { byId } from './dom.js';
import { bytes } from './format.js';
import { describe } from './settings.js';

/** @param item one of the event `stored` */
export function render(item) {
  byId('opened-title').textContent = item.name;
  byId('opened-what').textContent = [
    item.model && `from ${item.model}`, item.settings && describe(item.settings), bytes(item.bytes),
  ].filter(Boolean).join(' · ');
  byId('opened-files').replaceChildren();
}
