// During a run the screen stays on where the browser allows it, and closing the tab asks first.

let running = false;
let lock = null;

export function keepAwake(on) {
  running = on;
  if (on) {
    addEventListener('beforeunload', ask);
    take();
  } else {
    removeEventListener('beforeunload', ask);
    lock?.release();
    lock = null;
  }
}

function ask(event) {
  event.preventDefault();
}

async function take() {
  try {
    lock = (await navigator.wakeLock?.request('screen')) ?? null;
  } catch {
    // Refused, on a low battery for one: the run goes on all the same.
    lock = null;
  }
  if (!running) lock?.release();
}

// The browser takes the lock back when the tab is hidden.
document.addEventListener('visibilitychange', () => {
  if (running && document.visibilityState === 'visible') take();
});
