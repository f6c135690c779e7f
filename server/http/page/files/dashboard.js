// The dashboard: the newest values, the charts, replicas, requests and warnings.

import {Refused} from "./api.js";
import {Charts} from "./charts.js";
import {$, duration, fill, gigabytes, make, percent, short, time, timeOfDay, watts} from "./dom.js";
import {History} from "./history.js";
import {drawRanks, drawReplicas} from "./replicas.js";
import * as requests from "./requests.js";

const BY_CHOICE = ["failed_client_closed", "failed_aborted"];  // of the client, or of an administrator: no errors
const history = new History(), charts = new Charts(history);
let newest = null, created = null;
$("plan").closest("details").open = innerWidth >= 1800;  // where the columns stand side by side

export function show() {
  if (newest) take(newest);
  charts.draw();
}

// Take the server's newest state. Nothing is asked for or drawn while the dashboard is hidden.
export function take(state) {
  newest = state;
  if (created !== state.created) {  // another start of the server
    created = state.created;
    history.clear();
  }
  $("dashboard").classList.remove("blank");
  if ($("dashboard").hidden) return;
  draw(state);
  Promise.all([pollHistory(), requests.poll(state)]).catch(error => console.warn(error));
}

async function pollHistory() {
  try {
    if (await history.poll()) charts.draw();
  } catch (error) {
    if (!(error instanceof Refused) && error.name !== "TimeoutError") throw error;
    if (history.now === null) fill("charts", make("p", {class: "soft"}, error.message));
  }
}

function draw(state) {
  drawTiles(state);
  drawReplicas(state);
  drawRanks(state);
  drawWarnings(state);
  fill("plan", state.plan);
}

function drawTiles(state) {
  const sum = name => state.replicas.reduce((total, each) => total + (each[name] ?? 0), 0);
  const group = (title, values) => make("section", {class: "card"}, make("h2", {}, title),
    make("dl", {}, ...values.map(([name, value, kind]) => make("div", {}, make("dt", {}, name), make("dd", {class: kind ?? ""}, value)))));
  const blocks = sum("kv_blocks"), used = blocks ? sum("kv_blocks_used") / blocks : null;
  const up = state.replicas.filter(each => each.state === "up").length, all = state.replicas.length;
  const failures = history.count(Object.keys(history.columns)
    .filter(name => name.startsWith("failed_") && !BY_CHOICE.includes(name)), 60);
  const gpu = history.last("gpu_memory"), drafts = history.last("drafts_accepted");
  const devices = gpu === null ? [["CPU cores", short(history.last("cpu"))]]
    : [["GPU in use", percent(history.last("gpu_utilization"))], ["GPU memory", percent(gpu)],
      ["GPU power", watts(history.last("gpu_power"))]];
  const parts = ["p50", "p95", "p99"], waiting = sum("num_requests_waiting");
  const row = (name, column) => make("tr", {}, make("th", {scope: "row"}, name),
    ...parts.map(part => make("td", {}, time(history.last(`${column}_${part}`)))));
  const stores = state.kv_stores, of = name => stores.reduce((total, each) => total + each[name], 0);
  const tier = name => `${gigabytes(of(`${name}_bytes`))} of ${gigabytes(of(`${name}_capacity`))} GiB`;
  const down = stores.filter(each => !each.is_up).length, broken = stores.filter(each => each.disk_error).length;
  const kv = stores.length ? [group("KV store", [["stores up", `${stores.length - down} of ${stores.length}`, down ? "bad" : ""],
    ["memory", tier("memory")], ...(of("disk_capacity") ? [["disk", broken ? "not in use" : tier("disk"), broken ? "bad" : ""]] : [])])] : [];
  fill("tiles",
    group("Requests", [["running", short(sum("num_requests_running"))], ["waiting", short(waiting), waiting ? "warn" : ""],
      ["prefilling", short(sum("prefilling"))], ["finished/s", short(history.last("requests"))]]),
    group("Tokens", [["output/s", short(sum("tokens_per_second"))], ["prompt/s", short(sum("prompt_tokens_per_second"))],
      ["prefix hits", percent(history.last("prefix_hits"))], ...(drafts === null ? [] : [["drafts accepted", percent(drafts)]])]),
    make("section", {class: "card"}, make("h2", {}, "Latency, last minute"), make("table", {},
      make("thead", {}, make("tr", {}, make("td"), ...parts.map(part => make("th", {scope: "col"}, part)))),
      make("tbody", {}, row("first token", "ttft"), row("between tokens", "itl"), row("whole request", "e2e")))),
    group("Memory and devices", [["KV cache", percent(used), used > 0.95 ? "warn" : ""], ...devices]), ...kv,
    group("Health", [["replicas up", `${up} of ${all}`, up < all ? "bad" : ""],
      ["errors/min", short(failures), failures ? "bad" : ""], ["preemptions/s", short(history.last("preemptions"))]]));
}

function drawWarnings(state) {
  const isSeveral = state.replicas.length > 1;
  const items = state.warnings.toSorted((one, other) => other.time - one.time).map(each => {
    const from = isSeveral && each.replica !== null ? `replica ${each.replica}, ${each.source}` : each.source;
    const kind = each.level === "warning" ? "warn" : "bad";
    return make("li", {"data-key": `${each.time} ${from} ${each.text}`}, make("b", {class: kind}, each.level), " ",
      make("span", {class: "soft"}, timeOfDay(each.time),
        ` · ${duration(Math.max(0, state.time - each.time))} ago · ${from}`), make("p", {}, each.text));
  });
  fill("warnings", items.length ? make("ol", {}, ...items) : make("p", {class: "soft"}, "none"));
}
