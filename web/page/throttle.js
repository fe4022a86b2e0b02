// Drawing as often as is worth looking at, and never all at once.

const waiting = new Set();
let asked = false;

/**
 * A function that has `draw` run in a coming frame, at most every `pause` milliseconds, however often it is
 * called. A frame runs one such draw, so that none takes long. A hidden tab draws nothing until it is
 * looked at.
 */
export function throttled(draw, pause = 100) {
  const job = { draw, pause, last: -Infinity };
  return () => {
    waiting.add(job);
    ask();
  };
}

function ask() {
  if (!asked) requestAnimationFrame(frame);
  asked = true;
}

function frame(now) {
  asked = false;
  for (const job of waiting) {
    if (now - job.last < job.pause) continue;
    // Whoever waits again stands behind the others.
    waiting.delete(job);
    job.last = now;
    job.draw();
    break;
  }
  if (waiting.size) ask();
}
