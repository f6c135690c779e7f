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

// A bar of parts, each with this share of its width.
export function bar(shares, kind = "") {
  const made = make("div", {class: `bar ${kind}`, "aria-hidden": "true"}, ...shares.map(() => make("i")));
  shares.forEach((share, at) => { made.children[at].style.width = `${(100 * Math.min(1, share)).toFixed(1)}%`; });
  return made;
}

const OWN = new Set(["style", "open"]);  // attributes that are compared as styles, or that the user changes

// Make `node` like `wanted`. What is the same is left alone, so that its text stays selected and its focus stays.
// Children with `data-key` are found by it, so that a row keeps its element when rows before it come or go.
function update(node, wanted) {
  if (node.nodeName !== wanted.nodeName) return node.replaceWith(wanted);
  if (node.nodeType === Node.TEXT_NODE) {
    if (node.data !== wanted.data) node.data = wanted.data;
    return;
  }
  for (const {name, value} of wanted.attributes)
    if (!OWN.has(name) && node.getAttribute(name) !== value) node.setAttribute(name, value);
  for (const {name} of [...node.attributes])
    if (!OWN.has(name) && !wanted.hasAttribute(name)) node.removeAttribute(name);
  if (node.style.cssText !== wanted.style.cssText) node.style.cssText = wanted.style.cssText;
  const others = [...wanted.childNodes];
  if (others[0]?.dataset?.key !== undefined || node.firstChild?.dataset?.key !== undefined) return updateKeyed(node, others);
  const children = [...node.childNodes];
  if (children.length !== others.length) return node.replaceChildren(...others);
  children.forEach((child, at) => update(child, others[at]));
}

function updateKeyed(node, wanted) {
  const known = new Map(), keys = new Set(wanted.map(each => each.dataset?.key));
  for (const child of [...node.childNodes]) {
    const key = child.dataset?.key;
    if (known.has(key) || !keys.has(key)) child.remove();
    else known.set(key, child);
  }
  let next = node.firstChild;
  for (const each of wanted) {
    const key = each.dataset?.key, found = known.get(key);
    known.delete(key);  // for one element only
    if (!found) node.insertBefore(each, next);
    else {
      if (found === next) next = next.nextSibling;
      else node.insertBefore(found, next);
      update(found, each);
    }
  }
}

// Give the element of this id these children.
export function fill(id, ...content) {
  const wanted = $(id).cloneNode(false);
  wanted.append(...content);
  update($(id), wanted);
}

const isNone = value => value === null || value === undefined;
export const short = value => isNone(value) ? "–"
  : value >= 999500 ? `${(value / 1e6).toFixed(1)}M`
  : value >= 10000 ? `${(value / 1000).toFixed(value >= 100000 ? 0 : 1)}k`
  : value >= 100 || Number.isInteger(value) ? value.toFixed(0)
  : value < 1 ? `${Number(value.toPrecision(2))}` : value.toFixed(1);
export const percent = share => isNone(share) ? "–" : `${(100 * share).toFixed(0)} %`;
export const time = seconds => isNone(seconds) ? "–"
  : seconds < 0.9995 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`
  : seconds < 100 ? `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s` : duration(seconds);
// A long time in its two largest units, and the time of day of a point in seconds since 1970.
export const duration = seconds => isNone(seconds) ? "–"
  : seconds < 60 ? `${seconds.toFixed(0)} s`
  : seconds < 3600 ? `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`
  : seconds < 86400 ? `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`
  : `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
export const watts = value => isNone(value) ? "–" : value < 1000 ? `${value.toFixed(0)} W` : `${(value / 1000).toFixed(1)} kW`;
const clock = new Intl.DateTimeFormat(undefined, {hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23"});
export const timeOfDay = seconds => clock.format(1000 * seconds);
export const gigabytes = bytes => isNone(bytes) ? "–" : (bytes / 2 ** 30).toFixed(bytes < 10 * 2 ** 30 ? 1 : 0);
