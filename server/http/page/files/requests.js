// The requests in progress, with a button that aborts one.

import {Refused, request} from "./api.js";
import {$, bar, duration, fill, make, short} from "./dom.js";

const INTERVAL_MILLISECONDS = 2000, PATIENCE_MILLISECONDS = 60_000, NOTICE_MILLISECONDS = 60_000;
const PHASES = {decode: "good", prefill: "", waiting: "warn", queued: "warn", preempted: "warn"};
// Name, how it is sorted, and whether it is a number.
const COLUMNS = [
  ["Request", each => each.id], ["Key", each => each.key ?? ""], ["Age", each => each.age, true],
  ["Prompt", each => each.prompt_tokens, true], ["Cached", each => each.cached_tokens, true],
  ["Output", each => each.output_tokens, true], ["Replica", each => each.replica ?? -1, true], ["Phase", each => each.phase],
];
let sorted = 2, descending = true;  // the oldest first
let found = null, asked = -Infinity, busy = false, inView = false, canAbort = false, chosen = null, notice = "", noticed = 0;
let generation = 0;  // of the list: an abort makes older answers wrong

new IntersectionObserver(([entry]) => { inView = entry.isIntersecting; }).observe($("requests"));
$("requests-filter").addEventListener("input", draw);
$("requests-table").addEventListener("click", event => {
  const {column, abort} = event.target.closest("button")?.dataset ?? {};
  if (column !== undefined) {
    descending = Number(column) === sorted ? !descending : COLUMNS[column][2] === true;
    sorted = Number(column);
    draw();
  } else if (abort !== undefined) ask(abort);
});
$("abort-no").addEventListener("click", () => $("abort").close());
$("abort-yes").addEventListener("click", abort);

// Ask for the requests every 2 s while they can be seen.
export async function poll(state) {
  if (canAbort !== state.can_abort) {
    canAbort = state.can_abort;
    draw();
  }
  if (!inView || busy || performance.now() < asked + INTERVAL_MILLISECONDS - 100) return;
  busy = true;
  asked = performance.now();
  try {
    const before = generation;
    const answer = await (await request("/ui/requests", {signal: AbortSignal.timeout(PATIENCE_MILLISECONDS)})).json();
    if (generation !== before) return;
    found = answer;
    draw();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    fill("requests-note", error.message);
  } finally {
    busy = false;
  }
}

function draw() {
  if (!found) return;
  const head = make("thead", {role: "rowgroup"}, make("tr", {role: "row"}, ...COLUMNS.map(([name, , isNumber], at) => make("th",
    {role: "columnheader", scope: "col", class: isNumber && "number", "aria-sort": at === sorted && (descending ? "descending" : "ascending")},
    make("button", {type: "button", "data-column": at}, name))),
  ...(canAbort ? [make("th", {role: "columnheader", scope: "col", class: "plain"}, make("span", {class: "unseen"}, "Abort"))] : [])));
  const words = $("requests-filter").value.toLowerCase().split(/\s+/);
  const text = each => `${each.id} ${each.key ?? ""} ${each.phase} replica ${each.replica ?? "none"}`.toLowerCase();
  const value = COLUMNS[sorted][1], sign = descending ? -1 : 1;
  const rows = found.requests.filter(each => words.every(word => text(each).includes(word)))
    .sort((one, other) => value(one) === value(other) ? 0 : value(one) < value(other) ? -sign : sign);
  fill("requests-table", head, make("tbody", {role: "rowgroup"}, ...rows.map(drawRow)));
  $("requests-table").hidden = !found.requests.length;
  const {total} = found, shown = rows.length;
  fill("requests-count", shown < total ? `${shown} of ${total}` : `${total}`);
  const silent = found.silent?.length ? `No answer from ${found.silent.map(each => `replica ${each}`).join(", ")}.` : "";
  const none = !total ? "No requests are in progress."
    : !found.requests.length ? `${total === 1 ? "1 request is" : `${total} requests are`} in progress. This client may not see them.`
    : !shown ? "No request matches the filter." : "";
  if (performance.now() > noticed + NOTICE_MILLISECONDS) notice = "";
  fill("requests-note", [notice, silent, none].filter(Boolean).join(" "));
}

function drawRow(each) {
  const most = each.max_tokens, part = most ? each.output_tokens / most : 0;
  const cells = [
    [each.id], [each.key ?? "–"], [duration(each.age)], [short(each.prompt_tokens)], [short(each.cached_tokens)],
    [`${each.output_tokens}`, make("span", {class: "soft"}, most ? ` of ${most}` : ""), bar([part])],
    [`${each.replica ?? "–"}`], [make("span", {class: PHASES[each.phase] ?? ""}, each.phase)],
  ];
  return make("tr", {role: "row", "data-key": `${each.handle} ${each.id}`}, ...cells.map((content, at) => {
    const [name, , isNumber] = COLUMNS[at];
    return make("td", {role: "cell", "data-label": name, class: isNumber ? "number" : at === 0 && "id all"}, ...content);
  }), ...(canAbort ? [make("td", {role: "cell", class: "number"},
    make("button", {type: "button", class: "danger", "data-abort": each.handle, "aria-label": `Abort ${each.id}`}, "Abort"))] : []));
}

function ask(handle) {
  const each = found.requests.find(each => each.handle === handle);
  if (!each) return;
  [chosen, notice] = [each, ""];
  fill("abort-what", `${each.id}${each.key ? `, key ${each.key}` : ""}: ${each.output_tokens} tokens so far, ${duration(each.age)} old.`);
  $("abort").showModal();
}

async function abort() {
  const {id, handle} = chosen;
  $("abort").close();
  try {
    await request(`/ui/requests/${handle}`, {method: "DELETE"});
    notice = `${id} was aborted.`;
    generation++;
    const left = found.requests.filter(each => each.handle !== handle);
    found = {...found, requests: left, total: found.total - found.requests.length + left.length};
    $("requests-title").focus();  // the button that had it goes
  } catch (error) {
    notice = error.status === 404 ? `${id} had already ended.` : `${id} was not aborted: ${error.message}`;
  }
  noticed = performance.now();
  draw();
}
