// The one place where errors are shown, with the message as it is.

import { byId, show } from './dom.js';

byId('message-close').onclick = () => clear();

export function clear() {
  byId('message').hidden = true;
}

export function report(error) {
  show(byId('message-text'), error.message ?? String(error));
  byId('message').hidden = false;
}

/** Runs `work` and shows what goes wrong; `undefined` then. */
export async function guarded(work) {
  clear();
  try {
    return await work();
  } catch (error) {
    // The person closed a dialog: that is an answer, not a fault.
    if (error.name !== 'AbortError') report(error);
    return undefined;
  }
}
