// How long the tasks of a page's own thread take, by the clock and in processor time: on a machine that does
// other work besides, only the latter is the page's doing.

import { readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

/** Begins to watch; `end()` gives the longest in milliseconds, what it did, and how many took `LONG` or more by the clock. */
export async function taskTimes(page) {
  const LONG = 50;
  const browser = page.context().browser();
  const path = join(tmpdir(), `halftone-trace-${process.pid}.json`);
  await page.evaluate(() => {
    window.longTasks = 0;
    new PerformanceObserver((list) => { window.longTasks += list.getEntries().length; }).observe({ type: 'longtask' });
  });
  await browser.startTracing(page, { path, categories: ['toplevel', 'devtools.timeline'] });
  return {
    async end() {
      const observed = await page.evaluate(() => window.longTasks);
      await browser.stopTracing();
      const { traceEvents: events } = JSON.parse(readFileSync(path, 'utf8'));
      rmSync(path);
      const thread = ({ pid, tid }) => `${pid} ${tid}`;
      const main = new Set(events.filter(({ name, args }) => name === 'thread_name' && args.name === 'CrRendererMain').map(thread));
      // A renderer of the browser's own may be there too; this page's is the one that draws frames.
      const drawn = new Map();
      for (const event of events) {
        if (event.name === 'FireAnimationFrame') drawn.set(thread(event), (drawn.get(thread(event)) ?? 0) + 1);
      }
      const [own] = [...drawn].filter(([key]) => main.has(key)).sort(([, a], [, b]) => b - a)[0] ?? [];
      const tasks = events.filter((event) => event.name === 'ThreadControllerImpl::RunTask' && thread(event) === own);
      const most = (name) => tasks.reduce((longest, task) => Math.max(longest, (task[name] ?? 0) / 1000), 0);
      const longest = tasks.reduce((most, task) => ((task.tdur ?? 0) > (most.tdur ?? 0) ? task : most));
      const within = ({ ts, dur }) => ts >= longest.ts && ts + dur <= longest.ts + longest.dur;
      const parts = events.filter((event) => event !== longest && event.tdur && thread(event) === own && within(event));
      return {
        wall: most('dur'),
        // What took that one's time; one thing is often within another.
        parts: parts.sort((a, b) => b.tdur - a.tdur).slice(0, 8).map(({ name, tdur }) => `${name} ${(tdur / 1000).toFixed(1)}`),
        cpu: most('tdur'),
        over: tasks.filter(({ dur }) => dur >= LONG * 1000).length,
        observed,
        count: tasks.length,
      };
    },
  };
}
