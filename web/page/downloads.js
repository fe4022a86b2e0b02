// Links to files of a result. A `File` of the private storage is a reference, so nothing is copied into
// memory, however large it is.

import { element } from './dom.js';
import { bytes } from './format.js';

const urls = new Map();

/** Lists `files` in `place`, each as a link, and one button for all. */
export function render(place, files) {
  for (const url of urls.get(place) ?? []) URL.revokeObjectURL(url);
  const links = files.map((file) => element('a', { href: URL.createObjectURL(file), download: file.name }, file.name));
  urls.set(place, links.map((link) => link.href));
  const list = element('ul', { className: 'files' },
    ...links.map((link, at) => element('li', {}, link, element('span', { className: 'quiet' }, bytes(files[at].size)))));
  const all = element('button', { type: 'button', className: 'plain' }, `Download all ${files.length} files`);
  all.onclick = async () => {
    for (const link of links) {
      link.click();
      // Browsers drop downloads that come too close together.
      await new Promise((resolve) => { setTimeout(resolve, 300); });
    }
  };
  place.replaceChildren(list, element('div', { className: 'buttons' }, all));
}
