// Results and stopped runs in the browser's private storage.

import { byId, element } from './dom.js';
import { bytes } from './format.js';
import { describe } from './settings.js';

/**
 * @param event the event `stored`
 * @param actions `resume(item)`, `open(item)`, `remove(item)`
 */
export function render({ items, quota_bytes: quota, used_bytes: used }, actions) {
  byId('stored').hidden = items.length === 0;
  byId('stored-items').replaceChildren(...items.map((item) => line(item, actions)));
  byId('stored-space').textContent = quota
    ? `${bytes(used ?? 0)} of the ${bytes(quota)} that this browser allows are in use.` : '';
}

function line(item, { resume, open, remove }) {
  const button = (text, action) => {
    const node = element('button', { type: 'button', className: 'plain small', onclick: action }, text);
    node.setAttribute('aria-label', `${text} ${item.name}`);
    return node;
  };
  const state = item.unfinished ? `stopped, ${item.unfinished[0]} of ${item.unfinished[1]} blocks done` : 'finished';
  return element('li', {},
    element('div', { className: 'item' },
      element('div', {},
        element('strong', {}, item.name),
        element('p', { className: 'quiet' }, [state, bytes(item.bytes), item.settings && describe(item.settings)]
          .filter(Boolean).join(' · '))),
      element('div', { className: 'buttons' },
        item.unfinished ? button('Resume', () => resume(item)) : button('Open', () => open(item)),
        button('Remove', () => remove(item)))));
}
