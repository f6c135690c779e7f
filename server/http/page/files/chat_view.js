// The turns of a conversation as elements. What one can do with a turn is in `actions`: see chat.js.

import {leavesOut, pendingCalls} from "./chat_conversation.js";
import {pictures} from "./chat_pictures.js";
import {GrowingTokens} from "./chat_tokens.js";
import {make, short, time} from "./dom.js";
import {GrowingMarkdown, codeBlock, copy} from "./markdown.js";

const button = (label, onclick, rest = {}) => make("button", {type: "button", class: "plain", onclick, ...rest}, label);
const seconds = value => value < 10 ? `${value.toFixed(1)} s` : `${value.toFixed(0)} s`;
const tokens = count => `${count.toLocaleString("en")} ${count === 1 ? "token" : "tokens"}`;
const ENDS = {length: "cut: the token limit is reached", stopped: "stopped", tool_calls: "tool calls", stop: ""};

// A message of the user.
function message(turn, actions) {
  const text = turn.content ? [make("div", {class: "text"}, turn.content)] : [];
  const seen = turn.pictures?.length ? [pictures(turn.pictures)] : [];
  const head = make("h3", {class: turn.role === "user" ? "unseen" : ""}, turn.role);
  const article = make("article", {class: "turn user"}, head, ...seen, ...text, make("footer", {},
    button("Edit", () => edit(article, turn, actions)), button("Copy", event => copy(turn.content, event.target)),
    button("Delete", () => actions.remove(turn))));
  return article;
}

function edit(article, turn, actions) {
  const area = make("textarea", {"aria-label": "Message", rows: Math.min(12, turn.content.split("\n").length + 1)});
  area.value = turn.content;
  const back = () => {
    article.replaceChildren(...message(turn, actions).childNodes);
    article.classList.remove("editing");
    article.querySelector("button").focus();
  };
  const send = () => (area.value.trim() || turn.pictures?.some(Boolean)) && actions.resend(turn, area.value);
  area.addEventListener("keydown", event => {
    if (event.key === "Escape") {
      event.stopPropagation();
      back();
    } else if (isEnter(event)) {
      event.preventDefault();
      send();
    }
  });
  article.classList.add("editing");
  article.replaceChildren(area, make("footer", {}, make("span", {class: "soft"}, "Later turns will be dropped. "),
    button("Cancel", back), button("Send", send, {class: "primary"})));
  area.focus();
}

// Enter that sends: not with Shift, and not the one that ends the composition of a character.
export const isEnter = event => event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

// JSON with line breaks, and its numbers as they were written, where browsers can keep them; other text as it is.
function pretty(text) {
  const keep = (_, value, context) =>
    typeof value === "number" && context && JSON.rawJSON ? JSON.rawJSON(context.source) : value;
  try {
    return JSON.stringify(JSON.parse(text, keep), null, 2);
  } catch {
    return text;
  }
}

// A tool call, with a box for its result.
function callCard(call, at, actions, turn) {
  const card = make("section", {class: "call", "aria-label": `Call of ${call.name}`},
    codeBlock(pretty(call.arguments), `${call.name} (arguments)`));
  const id = `result-${turn.created}-${at}`;
  if (call.result !== null) {
    card.append(codeBlock(pretty(call.result), "result"));
  } else {
    const area = make("textarea", {id, rows: 2, class: "mono", placeholder: "What the function returns, as text or JSON"});
    area.value = call.typed ?? "";
    area.addEventListener("input", () => { call.typed = area.value; });
    area.addEventListener("keydown", event => {
      if (!isEnter(event)) return;
      event.preventDefault();
      const next = [...card.parentNode.querySelectorAll("textarea")].find(each => !each.value.trim());
      if (next) next.focus();
      else actions.sendResults(turn);
    });
    card.append(make("div", {class: "result"}, make("label", {for: id}, `Result of ${call.name}`), area));
  }
  return card;
}

function failure(turn, actions, limit) {
  const {message: text, status, code} = turn.error;
  const advice = code === "context_length_exceeded"
    ? `${limit ? `There is room for ${tokens(limit)}, answer included. ` : ""}`
      + "Delete or shorten turns, lower max_tokens, or start a new conversation."
    : status === 401 ? "Enter an API key above, then try again."
    : status === 403 ? "Forget the key (above) and enter an API key."
    : status === 429 || status === 503 ? "Try again in a few seconds." : "";
  return make("div", {class: "failure", role: "alert"},
    make("p", {}, make("b", {}, status ? `Error ${status}: ` : "Error: "), text),
    ...(advice ? [make("p", {}, advice)] : []),
    button("Try again", () => actions.again(turn), {class: "primary"}));
}

// Counts and speed of an answer.
function figures({usage, first, total, speed, finish, chunks, error}) {
  const parts = [];
  if (usage) {
    const cached = usage.cached ? ` (${short(usage.cached)} cached)` : "";
    parts.push([`${short(usage.prompt)}${cached} → ${tokens(usage.output)}`,
      `${tokens(usage.prompt)} in the prompt, ${usage.cached} of them from the prefix cache; ${usage.output} answered`]);
  } else if (chunks && !error) {
    parts.push([`about ${tokens(chunks)}`, "events with text, as the server has not sent its count"]);
  }
  if (first !== null) parts.push([`TTFT ${time(first)}`, "time to first token, as this browser saw it"]);
  if (total !== null) parts.push([seconds(total), "time of the whole answer"]);
  if (speed !== null) parts.push([`${speed.toFixed(1)} tokens/s`, "after the first token"]);
  const end = ENDS[finish] ?? finish;
  if (end) parts.push([end, "why the answer ended"]);
  return parts.map(([text, title]) => make("span", {title}, text));
}

// An answer. While it grows, `draw` shows what is new; `end` shows the whole.
export class Answer {
  #turn;
  #actions;
  #options;
  #body = null;
  #grows = false;
  #thoughts = make("div", {class: "text"}, "");
  #parts = {
    reasoning: make("details", {class: "reasoning", hidden: true}, make("summary", {}, "")),
    answer: make("div", {class: "answer"}), calls: make("div", {class: "calls"}), footer: make("footer", {}),
  };

  // `options`: mode, limit (tokens, or null), turns (of the conversation), isRunning.
  constructor(turn, actions, options) {
    [this.#turn, this.#actions, this.#options] = [turn, actions, options];
    this.#parts.reasoning.append(this.#thoughts);
    this.element = make("article", {class: "turn assistant", "aria-live": options.isRunning ? "off" : null,
      "aria-busy": options.isRunning ? "true" : null},
      make("h3", {class: "unseen"}, "assistant"), ...Object.values(this.#parts));
    this.#fill();
    if (options.isRunning) this.draw();
    else this.end();
  }

  get #isPlain() {
    return this.#turn.isJson || this.#options.mode === "text";
  }

  // Choose between the text and its tokens.
  #fill() {
    const turn = this.#turn, fresh = make("div", {class: "answer"});
    this.#parts.answer.replaceWith(fresh);
    this.#parts.answer = fresh;
    this.#grows = turn.scored.length > 0 && turn.shown !== "text";
    if (this.#grows) this.#body = new GrowingTokens(fresh);
    else if (this.#isPlain) fresh.classList.add("text");
    else {
      fresh.classList.add("markdown");
      this.#body = new GrowingMarkdown(fresh);
    }
  }

  draw() {
    const turn = this.#turn, {reasoning, answer} = this.#parts;
    if (turn.scored.length && !this.#grows && turn.shown !== "text") this.#fill();
    if (this.#grows) this.#body.show(turn.scored);
    else if (turn.isJson && turn.content && !this.#options.isRunning)
      answer.replaceChildren(codeBlock(pretty(turn.content), "JSON", turn.content));
    else if (this.#isPlain) answer.textContent = turn.content;
    else if (turn.content) this.#body[this.#options.isRunning ? "show" : "end"](turn.content);
    if (turn.reasoning) {
      reasoning.hidden = false;
      reasoning.firstChild.textContent = turn.thought !== null ? `Reasoned for ${seconds(turn.thought)}`
        : this.#options.isRunning ? "Reasoning…" : "Reasoning";
      const shown = this.#thoughts.firstChild ?? this.#thoughts.appendChild(new Text());
      if (turn.reasoning.length > shown.length) shown.appendData(turn.reasoning.slice(shown.length));
    }
    if (this.#options.isRunning) {
      const calls = turn.calls.filter(Boolean).map(call => `calls ${call.name}(${call.arguments}`);
      this.#parts.calls.textContent = calls.join("\n");
    }
  }

  end() {
    const turn = this.#turn, actions = this.#actions, {calls, footer} = this.#parts;
    this.#options.isRunning = false;
    this.draw();
    this.element.classList.toggle("empty", !turn.content && !turn.calls.length && !turn.error);
    this.element.removeAttribute("aria-busy");
    this.element.removeAttribute("aria-live");
    calls.replaceChildren(...turn.calls.map((call, at) => callCard(call, at, actions, turn)));
    if (pendingCalls(turn).length)
      calls.append(button("Send results", () => actions.sendResults(turn), {class: "primary"}));
    if (turn.error) calls.append(failure(turn, actions, this.#options.limit));
    if (this.#options.mode === "chat" && leavesOut(this.#options.turns, turn))
      calls.append(make("p", {class: "soft"}, "Later requests leave this message out, unless its answer is regenerated."));
    const buttons = [];
    if (turn.content) buttons.push(button("Copy", event => copy(turn.content, event.target)));
    if (!turn.error) buttons.push(button("Regenerate", () => actions.again(turn), {class: "plain regenerate"}));
    if (turn.scored.length) buttons.push(button(this.#grows ? "As text" : "As tokens", () => {
      turn.shown = this.#grows ? "text" : "tokens";
      this.#fill();
      this.end();
    }));
    buttons.push(button("Delete", () => actions.remove(turn)));
    footer.replaceChildren(make("span", {class: "figures soft"}, ...figures(turn)), ...buttons);
  }
}

export const turnElement = (turn, actions, options) =>
  turn.role === "assistant" ? new Answer(turn, actions, options).element : message(turn, actions);
