// The chat: which conversation is shown, what the user does to it, and the answers that are under way.

import {newConversation, nextRequest, titleOf} from "./chat_conversation.js";
import {entries, importFile, saveAll, saveJson, saveMarkdown} from "./chat_list.js";
import {panel} from "./chat_panels.js";
import {choosePictures, pictures, readPicture} from "./chat_pictures.js";
import {SettingsForm, WrongSetting} from "./chat_settings.js";
import {Store, idOf} from "./chat_store.js";
import {ask, newAnswer} from "./chat_stream.js";
import {Answer, isEnter, turnElement} from "./chat_view.js";
import {$, make} from "./dom.js";

const DRAW_MILLISECONDS = 100;
const store = new Store();
const conversations = store.all();
const runs = new Map();  // id of a conversation → {controller, view, timer}
let current = newConversation(conversations[0]);
let adapters = [];  // names
let server = {max_model_len: null, status: "ready", capabilities: {}};

// --- What the page consists of ---

const button = (label, onclick, rest = {}) => make("button", {type: "button", onclick, ...rest}, label);
const log = make("div", {id: "chat-log", role: "log", "aria-label": "Conversation", tabindex: 0});
const note = make("div", {id: "chat-note", role: "status"});
const toEnd = button("↓ Newest", () => scrollToEnd(), {id: "chat-end", hidden: true});
const box = make("textarea",
  {id: "chat-box", rows: 1, "aria-label": "Message", title: "Enter sends, Shift+Enter starts a new line"});
const drafted = make("div", {id: "chat-pictures", hidden: true});
const addButton = button("+", async () => addPictures(await choosePictures()),
  {id: "chat-add", hidden: true, title: "Add pictures; they can also be dropped here, or pasted", "aria-label": "Add pictures"});
const sendButton = make("button", {class: "primary"}, "Send");
const stopButton = button("Stop", () => stop(), {hidden: true, class: "primary"});
const title = make("input",
  {id: "chat-title", "aria-label": "Title of the conversation", placeholder: "New conversation", autocomplete: "off"});
const mode = make("select", {id: "chat-mode"},
  make("option", {value: "chat"}, "chat"), make("option", {value: "text"}, "completion"));
const model = make("select", {id: "chat-model"});
const modelRow = make("div", {class: "setting", hidden: true}, make("label", {for: "chat-model"}, "Model"), model);
const context = make("span", {id: "chat-context", class: "soft"});
const list = make("ul", {id: "chat-entries"});
const settings = new SettingsForm(() => current, () => keep());
const composer = make("form", {id: "composer", onsubmit: event => { event.preventDefault(); send(); }},
  addButton, box, make("div", {class: "send"}, stopButton, sendButton));
const listPanel = panel("chat-list", "Conversations",
  button("New conversation", () => open(newConversation(current)), {class: "primary"}), list,
  make("div", {class: "panel-foot"}, button("Import", () => importAll()),
    button("Export all", () => saveAll(conversations)), button("Delete all", () => clear()),
    make("small", {class: "soft"}, store.works ? "Kept in this browser only."
      : "The browser's storage is blocked: conversations are lost when the page is closed.")));
const settingsPanel = panel("chat-settings", "Settings",
  modelRow, make("div", {class: "setting"}, make("label", {for: "chat-mode"}, "API"), mode), settings.element,
  make("div", {class: "panel-foot"}, button("Reset", () => { current.settings = {}; settings.show(); keep(); }),
    button("Export as JSON", () => saveJson(current)), button("Export as Markdown", () => saveMarkdown(current))));
$("chat").append(listPanel.dialog, make("section", {id: "chat-room"},
  make("div", {id: "chat-bar"}, listPanel.toggle, title, context, settingsPanel.toggle),
  make("div", {id: "chat-scroll"}, log, toEnd), note, drafted, composer), settingsPanel.dialog);

// --- Showing ---

// On a touch screen a focused box would open the keyboard each time.
const hasPointer = matchMedia("(pointer: fine)");
const focusBox = () => hasPointer.matches && box.focus({preventScroll: true});

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 40;
const scrollToEnd = () => { log.scrollTop = log.scrollHeight; };
log.addEventListener("scroll", () => { toEnd.hidden = isAtEnd(); }, {passive: true});

const optionsOf = isRunning => ({mode: current.mode, limit: server.max_model_len, turns: current.turns, isRunning});

function draw() {
  const run = runs.get(current.id);
  log.replaceChildren(...current.turns.map(turn => {
    if (!run || turn !== run.turn) return turnElement(turn, actions, optionsOf(false));
    run.view = new Answer(turn, actions, optionsOf(true));
    return run.view.element;
  }));
  if (!current.turns.length) log.append(make("div", {class: "welcome soft"}, make("b", {}, current.model || (server.model ?? "")),
    make("p", {class: "chat-only"}, "Ask something. Settings that are left empty are the server's."),
    make("p", {class: "text-only"},
      "The model continues your text. Each prompt is sent by itself, without a chat template.")));
  scrollToEnd();
  drawControls();
}

function drawControls() {
  const run = runs.get(current.id);
  sendButton.hidden = run !== undefined;
  stopButton.hidden = run === undefined;
  $("chat").dataset.mode = mode.value = current.mode;
  // An adapter that is no longer there stays chosen, and the server says so.
  const own = current.model && !adapters.includes(current.model) ? [current.model] : [], chosen = current.model ?? "";
  modelRow.hidden = !adapters.length && !own.length;
  if (document.activeElement !== model) {
    model.replaceChildren(make("option", {value: ""}, server.model ?? ""),
      ...[...adapters, ...own].map(name => make("option", {value: name}, name)));
    model.value = chosen;
  }
  addButton.hidden = !takesPictures();
  box.placeholder = current.mode === "chat" ? "Message" : "Text to continue";
  if (document.activeElement !== title) title.value = current.title;
  const usage = current.turns.findLast(turn => turn.usage)?.usage, most = server.max_model_len?.toLocaleString("en");
  context.textContent = usage && current.mode === "chat"
    ? `${(usage.prompt + usage.output).toLocaleString("en")}${most ? ` of ${most}` : ""} tokens` : "";
  list.replaceChildren(...entries(conversations, current, runs, {open, drop}));
}

// Say something below the conversation, with a way to undo it.
function say(text, undo = null) {
  const close = button("×", () => note.replaceChildren(), {class: "plain", "aria-label": "Close"});
  const back = button("Undo", () => { note.replaceChildren(); undo(); }, {class: "plain"});
  note.replaceChildren(make("span", {}, text), ...(undo ? [back] : []), close);
}

// --- Conversations ---

// Store the current or another conversation; one without turns is not worth it.
function keep(conversation = current) {
  if (!conversation.turns.length) return;
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  const {dropped, kept} = store.save(conversation);
  for (const each of dropped) {
    const at = conversations.findIndex(one => one.id === each.id);
    if (at >= 0) conversations.splice(at, 1);
  }
  const names = dropped.map(each => `“${each.title}”`).join(", ");
  if (names) say(`The browser's storage is full: ${names} had to go.`);
  if (!kept && store.works) say("This conversation is too long for the browser's storage. Export it to keep it.");
}

function touch(conversation) {
  conversation.changed = Date.now();
  keep(conversation);
  conversations.sort((one, other) => other.changed - one.changed);
}

function open(conversation) {
  current = conversation;
  box.value = current.draft ?? "";
  fit();
  drawDrafted();
  settings.show();
  draw();
  listPanel.closeSheet();
  focusBox();
}

function drop(conversation) {
  runs.get(conversation.id)?.controller.abort();
  conversations.splice(conversations.indexOf(conversation), 1);
  store.remove(conversation.id);
  if (conversation === current) open(newConversation(current));
  else drawControls();
  say(`“${conversation.title}” is deleted.`, () => {
    conversations.push(conversation);
    touch(conversation);
    open(conversation);
  });
}

function clear() {
  if (!confirm("Delete all conversations in this browser? This cannot be undone.")) return;
  for (const {controller} of runs.values()) controller.abort();
  conversations.length = 0;
  store.clear();
  open(newConversation());
  say("All conversations are deleted.");
}

async function importAll() {
  try {
    const found = await importFile();
    for (const each of found) keep(each);
    if (found.length) open(found[0]);
    if (found.length > 1) say(`${found.length} conversations are imported.`);
  } catch (error) {
    listPanel.closeSheet();
    say(error.message);
  }
}

// --- Pictures ---

const takesPictures = () => current.mode === "chat" && (server.media?.kinds ?? []).includes("image");

function drawDrafted() {
  const shown = (current.pictures ?? []).filter(Boolean);
  drafted.hidden = !shown.length;
  drafted.replaceChildren(pictures(shown, at => {
    current.pictures = shown.toSpliced(at, 1);
    drawDrafted();
    focusBox();
  }));
}

async function addPictures(files) {
  if (!files.length) return;
  if (!takesPictures()) return say(current.mode === "chat" ? "This model takes no pictures." : "Completions take no pictures.");
  const conversation = current, problems = [];
  for (const file of files) {
    try {
      conversation.pictures = [...(conversation.pictures ?? []).filter(Boolean), await readPicture(file)];
    } catch (error) {
      problems.push(error.message);
    }
  }
  if (problems.length) say(problems.join(" "));
  if (conversation !== current) return;
  drawDrafted();
  focusBox();
}

// --- Turns ---

async function answer() {
  const conversation = current;
  if (runs.has(conversation.id)) return;
  const [path, body] = nextRequest(conversation);
  const turn = newAnswer("response_format" in body), run = {controller: new AbortController(), view: null, timer: null, turn};
  conversation.turns.push(turn);
  runs.set(conversation.id, run);
  touch(conversation);
  draw();
  let spent = 0;
  const redraw = () => {
    run.timer = null;
    if (conversation !== current) return;
    const begun = performance.now(), follows = isAtEnd();
    run.view.draw();
    if (follows) scrollToEnd();
    spent = performance.now() - begun;
  };
  // A long answer takes longer to draw, but no more than a fifth of the time.
  await ask(path, body, run.controller.signal, turn, () => {
    run.timer ??= setTimeout(redraw, Math.max(DRAW_MILLISECONDS, 4 * spent));
  });
  clearTimeout(run.timer);
  runs.delete(conversation.id);
  if (conversations.includes(conversation)) touch(conversation);
  if (conversation !== current) return drawControls();
  const follows = isAtEnd(), {element} = run.view, hadFocus = element.contains(document.activeElement);
  run.view.end();
  element.remove();
  log.append(element);  // one addition for screen readers
  drawControls();
  if (follows) scrollToEnd();
  const result = element.querySelector(".call textarea"), isFree = hadFocus || document.activeElement === document.body;
  if (result && (isFree || (document.activeElement === box && !box.value))) result.focus({preventScroll: true});
  else if (isFree) focusBox();
}

// Ask with what `change` makes of the turns. A setting that cannot be sent leaves everything as it was.
function tryAnswer(change) {
  if (runs.has(current.id)) return say("Stop the answer first.");
  const before = current.turns, copy = before.map(turn => ({...turn, calls: turn.calls?.map(call => ({...call}))}));
  try {
    change();
    nextRequest(current);
  } catch (error) {
    current.turns = copy;
    if (!(error instanceof WrongSetting)) throw error;
    say(error.message);
    settingsPanel.open();
    settings.focus(error.field);
    return draw();
  }
  note.replaceChildren();
  answer();
}

const actions = {
  again: turn => tryAnswer(() => { current.turns = current.turns.slice(0, current.turns.indexOf(turn)); }),
  resend: (turn, text) => tryAnswer(() => {
    current.turns = current.turns.slice(0, current.turns.indexOf(turn) + 1);
    turn.content = text;
  }),
  sendResults: turn => tryAnswer(() => {
    for (const call of turn.calls) call.result ??= call.typed ?? "";
  }),
  // A message goes with its answers, an answer with those that follow it up to the next message.
  remove: turn => {
    if (runs.has(current.id)) return say("Stop the answer first.");
    const conversation = current, before = conversation.turns, at = before.indexOf(turn);
    const next = before.findIndex((each, index) => index > at && each.role !== "assistant");
    conversation.turns = [...before.slice(0, at), ...(next < 0 ? [] : before.slice(next))];
    if (conversation.turns.length) touch(conversation);
    else store.save(conversation);
    draw();
    say("Deleted.", () => {
      conversation.turns = before;
      touch(conversation);
      open(conversation);
    });
    focusBox();
  },
};

function send() {
  const text = box.value, sent = takesPictures() ? (current.pictures ?? []).filter(Boolean) : [];
  if (!text.trim() && !sent.length) return box.focus();
  tryAnswer(() => {
    current.turns = [...current.turns, {role: "user", content: text, ...(sent.length ? {pictures: sent} : {})}];
    nextRequest(current);
    current.title ||= titleOf(text) || "Picture";
    current.draft = box.value = "";
    if (sent.length) current.pictures = [];
    fit();
    drawDrafted();
  });
}

function stop() {
  runs.get(current.id)?.controller.abort();
  focusBox();
}

// --- Controls ---

// As high as its text.
function fit() {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}
box.addEventListener("input", () => {
  current.draft = box.value;
  fit();
});
box.addEventListener("keydown", event => {
  if (!isEnter(event)) return;
  event.preventDefault();
  send();
});
box.addEventListener("paste", event => {
  const {files} = event.clipboardData;
  if (!files.length) return;
  event.preventDefault();
  addPictures([...files]);
});
const room = $("chat-room"), hasFiles = event => event.dataTransfer?.types.includes("Files");
room.addEventListener("dragover", event => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  room.classList.toggle("dropping", takesPictures());
});
room.addEventListener("dragleave", event => room.contains(event.relatedTarget) || room.classList.remove("dropping"));
room.addEventListener("drop", event => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  room.classList.remove("dropping");
  addPictures([...event.dataTransfer.files]);
});
$("chat").addEventListener("keydown", event => {
  if (event.key === "Escape" && !event.target.closest("dialog:modal")) stop();
});
title.addEventListener("change", () => {
  current.title = title.value.trim();
  keep();
  drawControls();
});
model.addEventListener("change", () => {
  current.model = model.value;
  keep();
  draw();
});
mode.addEventListener("change", () => {
  current.mode = mode.value;
  keep();
  settings.show();
  draw();
});
addEventListener("pagehide", () => {
  for (const each of [...conversations]) if (each === current || runs.has(each.id)) keep(each);
});
// Another tab has changed a conversation, or deleted it, or all of them.
addEventListener("storage", ({key}) => {
  const id = idOf(key);
  if (id === undefined || runs.has(id)) return;
  for (const each of id === null ? [...conversations] : conversations.filter(one => one.id === id))
    conversations.splice(conversations.indexOf(each), 1);
  const fresh = id && store.get(id);
  if (fresh) {
    conversations.push(fresh);
    conversations.sort((one, other) => other.changed - one.changed);
    if (current.id === id) [current, fresh.draft] = [fresh, box.value];
  }
  if (fresh && current === fresh) draw();
  else drawControls();
});

// The tab is shown.
export function show() {
  fit();
  if (toEnd.hidden) scrollToEnd();
  focusBox();
}

// The server's state, once a second.
export function take(state) {
  const kinds = each => each.media?.kinds.join() ?? "";
  const isNew = ["max_model_len", "model"].some(name => server[name] !== state[name]) || kinds(server) !== kinds(state);
  server = state;
  if (!isNew) return;
  const {tools = true, reasoning = true} = state.capabilities ?? {};
  settings.advise("tools", tools ? null : "The server does not know the model's format of calls (--tool-call-parser).");
  settings.advise("thinking", reasoning ? null
    : "The server does not know the model's format of reasoning (--reasoning-parser).");
  drawControls();
  if (!current.turns.length) draw();
}

// The adapters have changed.
export function takeAdapters(models) {
  adapters = models.map(each => each.id);
  drawControls();
}

settings.show();
draw();
