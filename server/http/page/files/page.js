// The page: its tabs, the key, and a poll of the server's state once a second while the page is visible.

import {Refused, hasKey, request, setKey} from "./api.js";
import * as chat from "./chat.js";
import * as dashboard from "./dashboard.js";
import {$, fill} from "./dom.js";

const POLL_MILLISECONDS = 1000;
const TABS = ["dashboard", "chat"];
let busy = false, refused = false;

function select(chosen) {
  for (const name of TABS) {
    const tab = $(`tab-${name}`), is = name === chosen;
    tab.setAttribute("aria-selected", is);
    tab.tabIndex = is ? 0 : -1;
    $(name).hidden = !is;
  }
  if (chosen === "dashboard") dashboard.show();
  else chat.show();
}

function take(state) {
  fill("model", state.model);
  fill("status", state.status);
  $("status").classList.toggle("bad", state.status !== "ready");
  document.title = `${state.model} · Quire`;
  const hours = (state.time - state.created) / 3600;
  fill("about", `version ${state.version} · up ${hours < 1 ? `${(60 * hours).toFixed(0)} min` : `${hours.toFixed(1)} h`}`);
  $("tab-chat").hidden = !state.generates;
  dashboard.take(state);
  chat.take(state);
}

async function poll() {
  if (document.hidden || busy || refused) return;
  busy = true;
  try {
    take(await (await request("/ui/state")).json());
    $("key").hidden = true;
  } catch (error) {
    refused = error instanceof Refused && [401, 403].includes(error.status);  // until the form is sent
    if (refused) {
      fill("key-why", hasKey() ? "The server has refused this key." : "This server requires an API key.");
      setKey(null);
    }
    $("key").hidden = !refused;
    fill("status", refused ? "needs a key" : `no answer: ${error.message}`);
    $("status").classList.add("bad");
  } finally {
    busy = false;
  }
}

for (const name of TABS) {
  $(`tab-${name}`).addEventListener("click", () => { location.hash = name; });
}
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const other = TABS.find(name => $(name).hidden);
  location.hash = other;
  $(`tab-${other}`).focus();
});
const selected = () => TABS.find(name => location.hash === `#${name}`) ?? TABS[0];
addEventListener("hashchange", () => select(selected()));
$("key").addEventListener("submit", event => {
  event.preventDefault();
  setKey($("key-text").value);
  refused = false;
  poll();
});
document.addEventListener("visibilitychange", poll);
setInterval(poll, POLL_MILLISECONDS);
select(selected());
poll();
