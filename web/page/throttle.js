// Drawing as often as is worth looking at.

/**
 * A function that has `draw` run before the next frame, at most every `pause` milliseconds, however often
 * it is called. A hidden tab draws nothing until it is looked at.
 */
export function throttled(draw, pause = 100) {
  let wanted = false;
  let last = -Infinity;
  const frame = (now) => {
    if (now - last < pause) {
      requestAnimationFrame(frame);
      return;
    }
    last = now;
    wanted = false;
    draw();
  };
  return () => {
    if (wanted) return;
    wanted = true;
    requestAnimationFrame(frame);
  };
}
