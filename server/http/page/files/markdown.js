// Markdown from a model as elements. Nothing in it runs, and nothing is loaded from anywhere: HTML is shown as text,
// except a few tags without attributes, and DOMPurify removes what these rules may have missed.

import {make} from "./dom.js";

const SAFE_HTML = /^<\/?(?:b|br|del|em|i|kbd|mark|s|small|strong|sub|sup|u)\s*\/?>$/i;
const SAFE_IMAGE = /^data:image\/(?:avif|gif|jpeg|png|webp);base64,[\w+/=]+$/i;
const SAFE_LINK = /^(?:https?:\/\/|mailto:)/i;
const CLEAN = {
  RETURN_DOM_FRAGMENT: true, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, ALLOWED_URI_REGEXP: SAFE_LINK,
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "i", "img", "kbd", "li",
    "mark", "ol", "p", "pre", "s", "small", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr",
    "u", "ul"],
  ALLOWED_ATTR: ["align", "alt", "class", "href", "src", "start", "title"],
};

// Text as HTML. Markdown's own entities (`&amp;`) stay what they are, unless `all`.
const escaped = (text, all = true) =>
  text.replace(all ? /[&<>"']/g : /[<>"']|&(?!#\d{1,7};|#x[\da-f]{1,6};|\w+;)/gi, each => `&#${each.charCodeAt(0)};`);

const link = (href, title, html) => SAFE_LINK.test(href)
  ? `<a href="${escaped(href)}" title="${escaped(title ? `${title} (${href})` : href)}">${html}</a>`
  : `${html} <code>${escaped(href)}</code>`;

// TeX is shown as it is written: Markdown would take its backslashes and underscores away.
const TEX = /^(?:\\\([^]{1,2000}?\\\)|\\\[[^]{1,2000}?\\\]|\$\$[^]{1,2000}?\$\$)/;
const tex = {
  name: "tex",
  level: "inline",
  start: source => { const at = source.search(/\\[([]|\$\$/); return at < 0 ? undefined : at; },
  tokenizer: source => { const found = TEX.exec(source); return found ? {type: "tex", raw: found[0]} : undefined; },
  renderer: ({raw}) => `<code class="tex">${escaped(raw)}</code>`,
};

const library = new marked.Marked({
  gfm: true,
  extensions: [tex],
  renderer: {
    html: ({text, block}) => SAFE_HTML.test(text.trim()) ? text
      : block ? `<p class="html">${escaped(text.trim())}</p>` : escaped(text),
    text(token) { return token.tokens ? this.parser.parseInline(token.tokens) : escaped(token.text, false); },
    heading({tokens, depth}) {
      const name = `h${Math.min(6, depth + 2)}`;  // below the page's own
      return `<${name}>${this.parser.parseInline(tokens)}</${name}>`;
    },
    code: ({text, lang}) => `<pre><code title="${escaped((lang ?? "").split(/\s/)[0])}">${escaped(text)}</code></pre>`,
    codespan: ({text}) => `<code>${escaped(text)}</code>`,
    checkbox: ({checked}) => checked ? "☑ " : "☐ ",
    link({href, title, tokens}) { return link(href, title, this.parser.parseInline(tokens)); },
    image: ({href, title, text}) => SAFE_IMAGE.test(href) ? `<img src="${href}" alt="${escaped(text)}">`
      : `<span class="image">Image (not loaded): ${link(href, title, escaped(text || href))}</span>`,
  },
});

// Copy text to the clipboard, also where browsers have no clipboard API: on http:// except this computer's.
export async function copy(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", {class: "unseen", "aria-hidden": "true"});
    area.value = text;
    button.after(area);
    area.select();
    copied = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.dataset.label ??= button.textContent;  // of the first click: it may say "Copied" now
  button.textContent = copied ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}

// Code with its language and a button that copies it, or its original.
export function codeBlock(code, language, original = code) {
  const copies = {type: "button", class: "plain", "aria-label": "Copy code", onclick: () => copy(original, button)};
  const button = make("button", copies, "Copy");
  return make("div", {class: "code"}, make("div", {class: "code-head"}, make("span", {}, language || "text"), button),
    make("pre", {tabindex: 0}, make("code", {}, code)));
}

function elements(tokens) {
  const made = DOMPurify.sanitize(library.parser(tokens), CLEAN);
  for (const anchor of made.querySelectorAll("a")) {
    anchor.target = "_blank";
    anchor.rel = "noopener noreferrer";
  }
  for (const code of made.querySelectorAll("pre > code"))
    code.parentNode.replaceWith(codeBlock(code.textContent.replace(/\n$/, ""), code.title));
  for (const table of made.querySelectorAll("table")) {
    const around = make("div", {class: "wide", tabindex: 0});
    table.replaceWith(around);
    around.append(table);
  }
  return made;
}

// A text that grows, as the children of an element. Blocks that cannot change any more are kept, so that only the last
// two are parsed and made again. Two, as an incomplete line, such as "2" in a list, looks like a block of its own.
export class GrowingMarkdown {
  #element;
  #kept = 0;  // characters
  #links = {};  // definitions, such as [name]: https://…
  #open = [];  // the nodes of blocks that may still change

  constructor(element) {
    this.#element = element;
  }

  // Show this text, which begins with the one before.
  show(text) {
    const lexer = new marked.Lexer(library.defaults);
    Object.assign(lexer.tokens.links, this.#links);
    const tokens = lexer.lex(text.slice(this.#kept));
    const last = tokens.map((each, at) => each.type === "space" ? -1 : at).filter(at => at >= 0).at(-2) ?? 0;
    for (const node of this.#open) node.remove();
    if (last > 0) {
      const final = tokens.slice(0, last);
      this.#element.append(elements(final));
      this.#kept += final.reduce((total, each) => total + each.raw.length, 0);
      Object.assign(this.#links, lexer.tokens.links);
    }
    const rest = elements(tokens.slice(last));
    this.#open = [...rest.childNodes];
    this.#element.append(rest);
  }

  // Show the whole text. A definition also applies to the blocks above it, so these are made again.
  end(text) {
    this.show(text);
    if (Object.keys(this.#links).length) this.#element.replaceChildren(markdown(text));
  }
}

// A whole text as elements.
export const markdown = text => elements(library.lexer(text));
