// Making and finding elements. Text is always set as text, so a name from a file is never read as HTML.

export const byId = (id) => document.getElementById(id);

/** Makes elements for `owner`, with properties (`className`, `href`, …) and children: elements or strings. */
export const maker = (owner) => (tag, properties = {}, ...children) => {
  const node = Object.assign(owner.createElement(tag), properties);
  node.append(...children);
  return node;
};

export const element = maker(document);

/** Fills a `<dl>` of figures from `[name, value, hint?]`; rows without a value are left out. */
export function facts(list, rows) {
  const shown = rows.filter(([, value]) => value !== null && value !== undefined && value !== '');
  list.replaceChildren(...shown.map(([name, value, hint]) =>
    element('div', { title: hint ?? '' }, element('dt', {}, name), element('dd', {}, value))));
}

/** Shows `text` in `node`, or hides it when there is none. */
export function show(node, text) {
  node.textContent = text ?? '';
  node.hidden = !text;
}

/** Gives the browser's "save" for `blob` under `name`. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  element('a', { href: url, download: name }).click();
  // The download has its own hold on the blob once it has begun.
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
