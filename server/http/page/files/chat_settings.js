// The settings of a conversation: kept as the texts that the user typed, and sent as fields of a request. An empty one
// is not sent, so that the server's default applies.

import {make} from "./dom.js";

// A setting that cannot be sent. `field` is its name.
export class WrongSetting extends Error {
  constructor(field, reason) {
    super(`${field.label}: ${reason}`);
    this.field = field.name;
  }
}

function json(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`not valid JSON: ${error.message}`);
  }
}
const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);
const pretty = value => JSON.stringify(value, null, 2);

function number(text) {
  if (!Number.isFinite(Number(text))) throw new Error(`${JSON.stringify(text)} is not a number`);
  return Number(text);
}
function integer(text) {
  const value = /^[-+]?\d+$/.test(text) ? Number(text) : NaN;
  if (!Number.isSafeInteger(value)) throw new Error(`${JSON.stringify(text)} is not a whole number`);
  return value;
}
function tools(text) {
  const value = json(text);
  if (!Array.isArray(value)) throw new Error('must be a JSON array, such as [{"type": "function", "function": {…}}]');
  for (const [at, tool] of value.entries())
    if (!isObject(tool) || tool.type !== "function" || typeof tool.function?.name !== "string")
      throw new Error(`entry ${at + 1} must be {"type": "function", "function": {"name": …}}`);
  return value;
}
// A schema, OpenAI's {"name", "schema"}, or the whole of `response_format`.
function format(text) {
  const value = json(text);
  if (!isObject(value)) throw new Error('must be a JSON object, such as {"type": "object", "properties": {…}}');
  if (value.type === "json_schema" && isObject(value.json_schema)) return value;
  const isNamed = typeof value.name === "string" && isObject(value.schema);
  return {type: "json_schema", json_schema: isNamed ? value : {name: "answer", schema: value}};
}
// Stop strings, one a line; \n and \t in them stand for a line break and a tab.
const ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"};
const stops = text => text.split("\n").filter(Boolean).map(line => line.replace(/\\[nt\\]/g, each => ESCAPES[each]));
const stopsText = value => [value].flat().map(each =>
  each.replace(/[\\\n\t]/g, found => Object.keys(ESCAPES).find(key => ESCAPES[key] === found))).join("\n");

// `read` and `write` convert between text and the field of the same name; `to` and `from` where the request differs.
const plain = (name, read, rest = {}) => ({
  name, label: name, to: text => ({[name]: read(text)}),
  from: body => body[name] === undefined ? undefined : String(body[name]), ...rest,
});
const THINKING = {on: true, off: false};

// The settings in their groups. `chat`: not for completions; `rows`: several lines; `choices`: a list, "" the default.
const GROUPS = [
  ["", [
    {name: "system", label: "System prompt", rows: 4, chat: true},
  ]],
  ["Sampling", [
    plain("temperature", number), plain("top_p", number), plain("top_k", integer), plain("min_p", number),
    plain("max_tokens", integer), plain("seed", integer), plain("presence_penalty", number),
    plain("frequency_penalty", number),
    plain("stop", stops, {label: "stop", rows: 1, hint: "One a line; \\n is a line break",
      from: body => body.stop === undefined || body.stop === null ? undefined : stopsText(body.stop)}),
  ]],
  ["Reasoning", [
    {name: "thinking", label: "Thinking", chat: true, choices: ["on", "off"],
      // Model families differ in the variable's name, and ignore the other one.
      to: text => ({chat_template_kwargs: {enable_thinking: THINKING[text], thinking: THINKING[text]}}),
      from: ({chat_template_kwargs: given}) =>
        Object.keys(THINKING).find(key => THINKING[key] === (given?.enable_thinking ?? given?.thinking))},
    plain("reasoning_effort", text => text, {label: "Effort", chat: true,
      choices: ["none", "minimal", "low", "medium", "high", "xhigh", "max"]}),
  ]],
  ["Tools and format", [
    plain("tools", tools, {label: "Tools", rows: 3, code: true, chat: true, hint: "JSON array of functions",
      from: body => body.tools?.length ? pretty(body.tools) : undefined}),
    plain("tool_choice", text => text, {label: "Tool choice", chat: true, choices: ["auto", "none", "required"],
      from: body => typeof body.tool_choice === "string" ? body.tool_choice : undefined}),
    {name: "schema", label: "JSON schema", rows: 3, code: true, hint: "The answer follows it",
      to: text => ({response_format: format(text)}),
      from: ({response_format: given}) => given?.type === "json_schema" ? pretty(given.json_schema) : undefined},
  ]],
  ["Display", [
    {name: "logprobs", label: "Show log-probabilities", isSwitch: true,
      to: (_, mode) => mode === "chat" ? {logprobs: true, top_logprobs: 5} : {logprobs: 5},
      from: body => body.logprobs ? "on" : undefined},
  ]],
];
const FIELDS = GROUPS.flatMap(([, fields]) => fields);

// The fields of a request. Raises WrongSetting.
export function parameters(settings, mode) {
  const body = {};
  for (const field of FIELDS) {
    const text = settings[field.name]?.trim();
    if (!text || !field.to || (field.chat && mode !== "chat")) continue;
    try {
      Object.assign(body, field.to(text, mode));
    } catch (error) {
      throw new WrongSetting(field, error.message);
    }
  }
  if (!body.tools) delete body.tool_choice;
  return body;
}

// The settings of a request, such as an exported one.
export function settingsOf(body) {
  const found = {};
  for (const {name, from} of FIELDS) {
    const text = from?.(body);
    if (text !== undefined && text !== "null") found[name] = text;
  }
  return found;
}

// The form of the settings, which changes `current().settings` and then calls `changed`.
export class SettingsForm {
  #inputs = new Map();
  #current;

  constructor(current, changed) {
    this.#current = current;
    this.element = make("form", {id: "settings-form", novalidate: true, onsubmit: event => event.preventDefault()});
    for (const [title, fields] of GROUPS) {
      const chatOnly = fields.every(field => field.chat) ? "chat-only" : "";
      const group = make("fieldset", {class: chatOnly}, ...(title ? [make("legend", {}, title)] : []));
      group.append(...fields.map(field => this.#row(field, changed)));
      this.element.append(group);
    }
  }

  #row(field, changed) {
    const id = `setting-${field.name}`, kind = field.isSwitch ? "switch" : field.rows ? "area" : "line";
    const common = {id, "aria-describedby": `${id}-note`, spellcheck: "false", autocomplete: "off"};
    const choices = (field.choices ?? []).map(each => make("option", {value: each}, each));
    const input = field.choices ? make("select", common, make("option", {value: ""}, "default"), ...choices)
      : field.isSwitch ? make("input", {...common, type: "checkbox"})
      : field.rows ? make("textarea", {...common, rows: field.rows, class: field.code ? "mono" : ""})
      : make("input", {...common, inputmode: "decimal", placeholder: "default"});
    const note = make("small", {id: `${id}-note`, class: "soft"}, field.hint ?? "");
    this.#inputs.set(field.name, {field, input, note});
    input.addEventListener("input", () => {
      this.#current().settings[field.name] = field.isSwitch ? (input.checked ? "on" : "") : input.value;
      this.check();
      changed();
    });
    return make("div", {class: `setting ${kind} ${field.chat ? "chat-only" : ""}`},
      make("label", {for: id}, field.label), input, note);
  }

  // Show the settings of the current conversation.
  show() {
    for (const {field, input} of this.#inputs.values()) {
      const text = this.#current().settings[field.name] ?? "";
      if (field.isSwitch) input.checked = text === "on";
      else input.value = text;
    }
    this.check();
  }

  // Say at each setting what is wrong with it.
  check() {
    for (const {field, input, note} of this.#inputs.values()) {
      const text = this.#current().settings[field.name]?.trim();
      let wrong = null;
      try {
        if (text) field.to?.(text, this.#current().mode);
      } catch (error) {
        wrong = error.message;
      }
      input.setAttribute("aria-invalid", wrong !== null);
      note.textContent = wrong ?? field.hint ?? "";
      note.classList.toggle("wrong", wrong !== null);
    }
  }

  focus(name) {
    this.#inputs.get(name)?.input.focus();
  }

  // An advice below a setting that this server cannot follow, or null.
  advise(name, text) {
    const entry = this.#inputs.get(name);
    entry.field = {...entry.field, hint: text ?? FIELDS.find(each => each.name === name).hint};
    if (entry.input.getAttribute("aria-invalid") !== "true") entry.note.textContent = entry.field.hint ?? "";
  }
}
