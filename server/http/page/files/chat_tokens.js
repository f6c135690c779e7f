// An answer as tokens, each the paler the more likely it was, with the alternatives of the one that is pointed at or has
// the focus.

import {make} from "./dom.js";

const share = logprob => {
  const percent = 100 * Math.exp(logprob);
  return percent >= 99.95 ? "100 %" : percent >= 10 ? `${percent.toFixed(1)} %`
    : percent >= 0.01 ? `${percent.toFixed(2)} %` : "<0.01 %";
};
// A token with its blanks made visible.
const visible = text => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(empty)";

function alternatives({name, logprob, top}) {
  const rows = top.some(([text]) => text === name) ? top : [[name, logprob], ...top];
  const sorted = [...rows].sort(([, one], [, other]) => other - one);
  return make("table", {}, make("caption", {}, `“${visible(name)}” ${share(logprob)}`), make("tbody", {},
    ...sorted.map(([text, each]) => {
      const bar = make("i");
      bar.style.width = `${100 * Math.exp(each)}%`;
      return make("tr", {class: text === name ? "chosen" : ""},
        make("td", {class: "mono"}, visible(text)), make("td", {class: "number"}, share(each)),
        make("td", {class: "share"}, bar));
    })));
}

// The box with the alternatives, one for the page, and the element of the token that it belongs to, or null.
const box = make("div", {id: "token-box", role: "tooltip", hidden: true});
let anchor = null;

// Put the box at the token's first line that is in view, if one is. Scrolling changes that, also the scrolling that the
// browser does itself when a token gets the focus.
function place() {
  const seen = anchor?.closest("[role=log]")?.getBoundingClientRect();
  const at = seen && [...anchor.getClientRects()].find(line => line.bottom > seen.top && line.top < seen.bottom);
  box.hidden = !at;
  if (!at) return;
  const own = box.getBoundingClientRect(), below = at.bottom + 6 + own.height < innerHeight;
  box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - own.width - 8))}px`;
  box.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - own.height - 6)}px`;
}
addEventListener("scroll", place, {capture: true, passive: true});

function show(span, token) {
  anchor = span;
  box.replaceChildren(alternatives(token));
  document.body.append(box);
  place();
}
const hide = () => {
  anchor = null;
  place();
};

// Shows tokens that grow, as the children of an element. The arrow keys move from token to token.
export class GrowingTokens {
  #element;
  #tokens = [];

  constructor(element) {
    this.#element = element;
    element.classList.add("tokens");
    element.setAttribute("role", "list");
    element.setAttribute("aria-label", "Tokens of the answer; arrow keys move");
    const found = node => {
      const span = node?.closest?.(".token");
      return span && [span, this.#tokens[[...element.children].indexOf(span)]];
    };
    // Where scrolling has moved the tokens below a pointer that rests, the token that has the focus stays shown.
    const open = event => {
      const [span, token] = found(event.target) ?? found(element.querySelector(":focus-visible")) ?? [];
      if (token) show(span, token);
      else hide();
    };
    element.addEventListener("pointerover", open);
    element.addEventListener("focusin", open);
    element.addEventListener("pointerleave", open);
    element.addEventListener("focusout", hide);
    element.addEventListener("keydown", event => {
      const step = {ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling"}[event.key];
      const next = step && event.target[step];
      if (!next) return;
      event.preventDefault();
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }

  // Show these tokens, which begin with the ones before.
  show(tokens) {
    const first = this.#tokens.length;
    this.#element.append(...tokens.slice(first).map((token, at) => {
      const likely = Math.exp(token.logprob), text = token.text || "·";
      const label = `${visible(token.name)}, ${share(token.logprob)}`;
      const span = make("span", {class: "token", tabindex: first + at ? -1 : 0, role: "listitem", "aria-label": label}, text);
      span.style.setProperty("--unlikely", `${(60 * (1 - likely)).toFixed(0)}%`);
      return span;
    }));
    this.#tokens = [...tokens];
  }
}
