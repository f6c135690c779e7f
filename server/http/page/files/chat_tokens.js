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

// The box with the alternatives: one for the page.
const box = make("div", {id: "token-box", role: "tooltip", hidden: true});

function show(span, token) {
  box.replaceChildren(alternatives(token));
  document.body.append(box);
  box.hidden = false;
  const at = span.getClientRects()[0], own = box.getBoundingClientRect();
  const below = at.bottom + 6 + own.height < innerHeight;
  box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - own.width - 8))}px`;
  box.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - own.height - 6)}px`;
}
const hide = () => { box.hidden = true; };
addEventListener("scroll", hide, {capture: true, passive: true});

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
      const span = node.closest?.(".token");
      return span && [span, this.#tokens[[...element.children].indexOf(span)]];
    };
    const open = event => {
      const [span, token] = found(event.target) ?? [];
      if (token) show(span, token);
      else hide();
    };
    element.addEventListener("pointerover", open);
    element.addEventListener("focusin", open);
    element.addEventListener("pointerleave", hide);
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
