// Conversations as data: what the server is asked, and what is exported and imported.
//
// {id, title, created, changed, mode: "chat" | "text", model, settings: {name: text}, draft, pictures, turns}; `model` is
// an adapter, or "" for the server's model; `pictures` are those of the draft. A turn is {role, content, pictures} of the user (or another role of an imported one), or an answer:
// see newAnswer() in chat_stream.js. Pictures are data URLs, or null where the browser's storage has not kept them.

import {newAnswer} from "./chat_stream.js";
import {parameters, settingsOf} from "./chat_settings.js";

const TITLE_CHARACTERS = 60;

export function newConversation({settings = {}, mode = "chat", model = ""} = {}) {
  const now = Date.now(), id = `${now.toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
  return {id, title: "", created: now, changed: now, mode, model, settings: {...settings}, draft: "", pictures: [], turns: []};
}

export const titleOf = text => {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_CHARACTERS ? `${line.slice(0, TITLE_CHARACTERS - 1)}…` : line;
};

export const pendingCalls = turn => turn?.calls?.filter(call => call.result === null) ?? [];

const isEmpty = turn => turn.role === "assistant" && !turn.content && !turn.calls.length;

// Turns in groups: each message with its answers.
function exchanges(turns) {
  const found = [];
  for (const turn of turns) {
    if (turn.role === "assistant" && found.length) found.at(-1).push(turn);
    else found.push([turn]);
  }
  return found;
}
const isUnanswered = ([message, ...answers]) => message.role === "user" && answers.length > 0 && answers.every(isEmpty);

// Whether this turn is an answer without which later requests leave its message out, too.
export const leavesOut = (turns, turn) => isUnanswered(exchanges(turns).find(each => each.includes(turn)));

// The content of a message; pictures that are lost are left out.
function contentOf({content, pictures = []}) {
  const images = pictures.filter(Boolean).map(url => ({type: "image_url", image_url: {url}}));
  if (!images.length) return content;
  return content ? [...images, {type: "text", text: content}] : images;
}

// The messages of a chat. Answers without text or calls are left out, and so are messages with only such answers,
// except the last one: many chat templates refuse two messages of the user in a row.
function messages({settings, turns}) {
  const found = settings.system?.trim() ? [{role: "system", content: settings.system}] : [];
  const sent = exchanges(turns).filter((each, at, all) => at === all.length - 1 || !isUnanswered(each)).flat();
  for (const turn of sent) {
    if (turn.role !== "assistant") {
      found.push({role: turn.role, content: contentOf(turn)});
      continue;
    }
    if (isEmpty(turn)) continue;
    const calls = turn.calls.map(({id, name, arguments: text}) =>
      ({id, type: "function", function: {name, arguments: text}}));
    found.push({
      role: "assistant", content: turn.content || null, ...(turn.reasoning ? {reasoning_content: turn.reasoning} : {}),
      ...(calls.length ? {tool_calls: calls} : {}),
    });
    for (const {id, name, result} of turn.calls)
      if (result !== null) found.push({role: "tool", tool_call_id: id, name, content: result});
  }
  return found;
}

// The path and the body of the request for the next answer. Raises WrongSetting.
export function nextRequest(conversation) {
  const {mode, model, settings, turns} = conversation;
  const common = {...(model ? {model} : {}), stream: true, stream_options: {include_usage: true}, ...parameters(settings, mode)};
  return mode === "chat" ? ["/v1/chat/completions", {messages: messages(conversation), ...common}]
    : ["/v1/completions", {prompt: turns.findLast(turn => turn.role === "user")?.content ?? "", ...common}];
}

// The body of a request for chat completions, as a client would send it. `metadata` is for clients: servers ignore it.
export function exported(conversation) {
  const {title, mode, created} = conversation;
  let body;
  try {
    body = parameters(conversation.settings, mode);
  } catch {
    body = {};  // of settings that cannot be sent
  }
  if (mode === "text" && body.logprobs) body.logprobs = true;
  const model = conversation.turns.findLast(turn => turn.model)?.model;
  return {
    ...(model ? {model} : {}), messages: messages(conversation), ...body,
    metadata: {title, mode, created: new Date(created).toISOString()},
  };
}

function textOf(content, where) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content) && content.every(part => part?.type === "text" && typeof part.text === "string"))
    return content.map(part => part.text).join("\n");
  throw new Error(`${where}.content: only text can be imported, and in messages of the user pictures as data URLs`);
}

const urlOf = part => part?.type === "image_url" ? part.image_url?.url ?? part.image_url : undefined;
const isPicture = part => /^data:image\//.test(urlOf(part));

function addMessage(turns, message, where, isJson) {
  if (typeof message?.role !== "string") throw new Error(`${where}.role is missing`);
  const parts = message.role === "user" && Array.isArray(message.content) ? message.content : [];
  const pictures = parts.filter(isPicture).map(urlOf);
  const content = textOf(pictures.length ? parts.filter(part => !isPicture(part)) : message.content, where);
  if (message.role === "assistant") {
    const reasoning = textOf(message.reasoning_content ?? message.reasoning, where);
    const calls = (message.tool_calls ?? []).map(call => {
      if (typeof call?.function?.name !== "string") throw new Error(`${where}.tool_calls: a call has no function`);
      const given = call.function.arguments ?? "", text = typeof given === "string" ? given : JSON.stringify(given);
      return {id: String(call.id ?? ""), name: call.function.name, arguments: text, result: null};
    });
    turns.push({...newAnswer(isJson), content, reasoning, calls, finish: calls.length ? "tool_calls" : "stop"});
  } else if (message.role === "tool") {
    const call = turns.flatMap(pendingCalls).findLast(each => each.id === message.tool_call_id);
    if (!call) throw new Error(`${where}: there is no call ${JSON.stringify(message.tool_call_id)} before its result`);
    call.result = content;
  } else {
    turns.push({role: message.role, content, ...(pictures.length ? {pictures} : {})});
  }
}

// The conversations of an exported text: one body with `messages`, an array of them, or an array of messages.
export function imported(text) {
  let given = JSON.parse(text);
  if (Array.isArray(given) && given.every(each => typeof each?.role === "string")) given = {messages: given};
  return [given].flat().map(body => {
    if (!Array.isArray(body?.messages)) throw new Error("there is no array of messages");
    const metadata = typeof body.metadata === "object" && body.metadata !== null ? body.metadata : {};
    const made = newConversation({settings: settingsOf(body), mode: metadata.mode === "text" ? "text" : "chat"});
    const [first] = body.messages, hasSystem = first?.role === "system";
    if (hasSystem) made.settings.system = textOf(first.content, "messages[0]");
    body.messages.forEach((message, at) => {
      if (at || !hasSystem) addMessage(made.turns, message, `messages[${at}]`, "schema" in made.settings);
    });
    const created = Date.parse(metadata.created);
    if (created) made.created = created;
    made.title = titleOf(String(metadata.title || made.turns.find(turn => turn.content)?.content || "Imported"));
    return made;
  });
}

const fenced = (text, language) => {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([found]) => found.length + 1)));
  return `${fence}${language}\n${text}\n${fence}`;
};

// A conversation as Markdown.
export function asMarkdown({title, settings, turns}) {
  const parts = [`# ${title || "Conversation"}`];
  if (settings.system?.trim()) parts.push("## System", settings.system);
  for (const turn of turns) {
    parts.push(`## ${turn.role[0].toUpperCase()}${turn.role.slice(1)}`);
    if (turn.reasoning) parts.push(`<details><summary>Reasoning</summary>\n\n${turn.reasoning}\n\n</details>`);
    if (turn.pictures?.length) parts.push(`*${turn.pictures.length === 1 ? "1 picture" : `${turn.pictures.length} pictures`}*`);
    if (turn.content) parts.push(turn.isJson ? fenced(turn.content, "json") : turn.content);
    for (const call of turn.calls ?? []) {
      parts.push(`Call of \`${call.name}\`:`, fenced(call.arguments, "json"));
      if (call.result !== null) parts.push("Result:", fenced(call.result, ""));
    }
    if (turn.error) parts.push(`> Error: ${turn.error.message}`);
  }
  return `${parts.join("\n\n")}\n`;
}
