// The list of conversations, with export, import and removal.

import {asMarkdown, exported, imported, titleOf} from "./chat_conversation.js";
import {make} from "./dom.js";

const MAX_BYTES = 50e6;

function download(name, type, text) {
  const link = make("a", {href: URL.createObjectURL(new Blob([text], {type})), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
const fileName = title => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "conversation";

export const saveJson = conversation =>
  download(`${fileName(conversation.title)}.json`, "application/json", JSON.stringify(exported(conversation), null, 2));
export const saveMarkdown = conversation =>
  download(`${fileName(conversation.title)}.md`, "text/markdown", asMarkdown(conversation));
export const saveAll = conversations =>
  download("conversations.json", "application/json", JSON.stringify(conversations.map(exported), null, 2));

// Asks for a file, and returns its conversations. Raises what is wrong with it.
export const importFile = () => new Promise((resolve, reject) => {
  const input = make("input", {type: "file", accept: ".json,application/json"});
  input.addEventListener("cancel", () => resolve([]));
  input.addEventListener("change", async () => {
    const [file] = input.files;
    try {
      if (file.size > MAX_BYTES) throw new Error(`the file has more than ${MAX_BYTES / 1e6} MB`);
      resolve(imported(await file.text()));
    } catch (error) {
      reject(new Error(`${file.name} cannot be imported: ${error.message}`));
    }
  });
  input.click();
});

const dayOf = time => {
  const then = new Date(time), isToday = then.toDateString() === new Date().toDateString();
  return isToday ? then.toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", hourCycle: "h23"})
    : then.toLocaleDateString([], {day: "numeric", month: "short"});
};

// The entries of the list. `running` has the ids of those that are being answered.
export const entries = (conversations, current, running, actions) => conversations.map(each => {
  const title = each.title || titleOf(each.draft ?? "") || "New conversation";
  const isCurrent = each === current ? "true" : null;
  return make("li", {},
    make("button", {type: "button", class: "entry", "aria-current": isCurrent, onclick: () => actions.open(each)},
      make("span", {class: "entry-title"}, title),
      make("span", {class: "soft"}, running.has(each.id) ? "answering…" : dayOf(each.changed))),
    make("button", {type: "button", class: "plain", "aria-label": `Delete ${title}`, onclick: () => actions.drop(each)},
      "×"));
});
