// The page: its tabs, the key, and a poll of the server's state once a second while the page is visible.

import {drawAdapters} from "./adapters.js";
import {Refused, hasKey, request, setKey} from "./api.js";
import * as chat from "./chat.js";
import * as dashboard from "./dashboard.js";
import {$, duration, fill} from "./dom.js";

const POLL_MILLISECONDS = 1000, PATIENCE_MILLISECONDS = 10_000;
const VIEWS = {dashboard, chat};
const scrolled = {};  // where each view was left
let busy = false, refused = false, offered = false, shown = null;
let adapters = null;  // the state's number that changes with them; null: the server has none

const tabs = () => Object.keys(VIEWS).filter(name => !$(`tab-${name}`).hidden);

// Show the view that the address names.
function select() {
  const chosen = tabs().find(name => location.hash === `#${name}`) ?? "dashboard";
  if (chosen === shown) return;
  if (shown) scrolled[shown] = scrollY;
  shown = chosen;
  for (const name of Object.keys(VIEWS)) {
    const tab = $(`tab-${name}`), is = name === chosen;
    tab.setAttribute("aria-selected", is);
    tab.tabIndex = is ? 0 : -1;
    $(name).hidden = !is;
  }
  scrollTo(0, scrolled[chosen] ?? 0);
  VIEWS[chosen].show();
}

// The browser would scroll to the element that a link to #chat names, so the address changes without one.
function go(name) {
  if (name !== shown) history.pushState(null, "", `#${name}`);
  select();
}

function say(status, kind, reason) {
  fill("status", status);
  $("status").className = `status ${kind}`;
  fill("reason", reason ?? "");
}

function take(state) {
  fill("model", state.model);
  const kind = {ready: "good", draining: "warn"}[state.status] ?? "bad";
  say(state.status, kind, state.status === "ready" ? state.media?.problem : state.reason);
  document.title = `${state.status === "ready" ? "" : `${state.status}: `}${state.model} · Quire`;
  const role = state.role ? ` · ${state.role} key` : "";
  fill("about", `version ${state.version} · up ${duration(Math.max(0, state.time - state.created))}${role}`);
  $("tab-chat").hidden = !state.generates;
  $("change-key").hidden = !hasKey() && (state.can_abort || !state.has_admin_key);
  fill("change-key", hasKey() ? "Forget the key" : "Use a key");
  document.body.classList.remove("late");
  select();
  dashboard.take(state);
  chat.take(state);
  if ((state.adapters ?? null) !== adapters) takeAdapters(state.adapters ?? null);
}

// There are other adapters than before: ask for their names.
async function takeAdapters(version) {
  adapters = version;
  try {
    const {data} = version === null ? {data: []}
      : await (await request("/v1/models", {signal: AbortSignal.timeout(PATIENCE_MILLISECONDS)})).json();
    const found = data.filter(each => each.parent);
    drawAdapters(found);
    chat.takeAdapters(found);
  } catch (error) {
    // A key for metrics only may not list them. Otherwise it is tried again.
    if (adapters === version && !(error instanceof Refused && [401, 403].includes(error.status))) adapters = null;
  }
}

async function poll() {
  if (document.hidden || busy || refused) return;
  busy = true;
  try {
    const answer = await request("/ui/state", {signal: AbortSignal.timeout(PATIENCE_MILLISECONDS)});
    take(await answer.json());
    $("key").hidden = !offered;
  } catch (error) {
    refused = error instanceof Refused && [401, 403].includes(error.status);  // until the form is sent
    if (refused) {
      fill("key-why", hasKey() ? "The server has refused this key." : "This server requires an API key.");
      setKey(null);
      $("key").hidden = false;
      if ([null, document.body].includes(document.activeElement)) $("key-text").focus();
    }
    const isLate = error.name === "TimeoutError";
    say(refused ? "needs a key" : "no answer", refused ? "warn" : "bad", refused ? null
      : isLate ? `nothing for ${PATIENCE_MILLISECONDS / 1000} s` : error.message);
    document.body.classList.add("late");  // what is shown are old values
  } finally {
    busy = false;
  }
}

for (const name of Object.keys(VIEWS)) $(`tab-${name}`).addEventListener("click", () => go(name));
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  const all = tabs(), at = all.indexOf(shown);
  const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1}[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const name = all.at(to % all.length);
  go(name);
  $(`tab-${name}`).focus();
});
addEventListener("popstate", select);
$("key").addEventListener("submit", event => {
  event.preventDefault();
  setKey($("key-text").value);
  $("key-text").value = "";
  refused = offered = false;
  poll();
});
$("change-key").addEventListener("click", () => {
  if (hasKey()) {
    setKey(null);
    location.reload();  // nothing that needed the key stays
  } else {
    offered = !offered;
    $("key").hidden = !offered;
    fill("key-why", "With an admin key, this page can abort requests.");
    if (offered) $("key-text").focus();
  }
});
document.addEventListener("visibilitychange", poll);
setInterval(poll, POLL_MILLISECONDS);
select();
poll();
