// "How it works": seven lessons, one at a time, by the address's hash. The worker computes all that they show
// (src/lesson); here it is only drawn.

import { element } from '../page/dom.js';

const LESSONS = [
  ['example', 'Four by four', 'Example'],
  ['order', 'Order of columns', 'Order'],
  ['hessian', 'The Hessian', 'Hessian'],
  ['plane', 'Nearest plane', 'Plane'],
  ['grids', 'Grids', 'Grids'],
  ['diffusion', 'Error diffusion', 'Diffusion'],
  ['scaling', 'AWQ beside GPTQ', 'Scaling'],
];

export class Lessons {
  #shared;
  #body;
  #made = new Map();

  /** @param page `model()` is the model that is open in the page, or `null`; `running()`: a run is under way */
  constructor(core, host, page) {
    document.head.append(element('link', { rel: 'stylesheet', href: new URL('how.css', import.meta.url) }));
    this.#shared = { core, ...page, place: { own: false, tokens: 1024, module: 'model.layers.0.self_attn.q_proj' } };
    this.#body = element('div', { className: 'lesson-body' });
    const links = LESSONS.map(([id, title], at) => element('li', {}, element('a', { href: `#how/${id}`, id: `how-to-${id}` }, `${at + 1} ${title}`)));
    const nav = element('nav', {}, element('ol', {}, ...links));
    nav.setAttribute('aria-label', 'Lessons');
    host.append(element('h2', { className: 'hidden' }, 'How it works'), nav, this.#body);
  }

  async show(hash) {
    const wanted = hash.split('/')[1];
    const [id, title, name] = LESSONS.find(([id]) => id === wanted) ?? LESSONS[0];
    for (const [other] of LESSONS) {
      const link = document.getElementById(`how-to-${other}`);
      if (other === id) link.setAttribute('aria-current', 'page');
      else link.removeAttribute('aria-current');
    }
    if (!this.#made.has(id)) {
      const host = element('section', { id: `lesson-${id}`, className: 'card lesson' }, element('h3', { className: 'title' }, title));
      this.#body.append(host);
      const made = import(`./${id}.js`).then((module) => new module[name](this.#shared, host));
      this.#made.set(id, { host, made });
    }
    for (const [other, { host }] of this.#made) host.hidden = other !== id;
    // Another lesson may have chosen another layer, and another model may be open.
    (await this.#made.get(id).made).shown?.();
  }
}
