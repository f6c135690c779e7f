// Elements, numbers as text, and updates that leave alone what has not changed.

export const $ = id => document.getElementById(id);

// An element with properties (`class`, `data-…`, `aria-…` and others as attributes, `on…` as listeners) and children.
export function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Make `node` like `wanted`. What is the same is left alone, so that its text stays selected and its focus stays.
export function update(node, wanted) {
  const children = [...node.childNodes], others = [...wanted.childNodes];
  if (node.nodeName !== wanted.nodeName || children.length !== others.length) return node.replaceWith(wanted);
  if (node.nodeType === Node.TEXT_NODE) {
    if (node.data !== wanted.data) node.data = wanted.data;
    return;
  }
  for (const {name, value} of wanted.attributes)
    if (name !== "style" && node.getAttribute(name) !== value) node.setAttribute(name, value);
  for (const {name} of [...node.attributes])
    if (name !== "style" && !wanted.hasAttribute(name)) node.removeAttribute(name);
  if (node.style.cssText !== wanted.style.cssText) node.style.cssText = wanted.style.cssText;
  children.forEach((child, at) => update(child, others[at]));
}

// Give the element of this id these children.
export function fill(id, ...content) {
  const wanted = $(id).cloneNode(false);
  wanted.append(...content);
  update($(id), wanted);
}

export const short = value => value === null || value === undefined ? "–"
  : value >= 10000 ? `${(value / 1000).toFixed(value >= 100000 ? 0 : 1)}k`
  : value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
export const percent = share => share === null || share === undefined ? "–" : `${(100 * share).toFixed(0)} %`;
export const time = seconds => seconds === null || seconds === undefined ? "–"
  : seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`;
