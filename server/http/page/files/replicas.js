// The replicas and their ranks.

import {bar, duration, fill, gigabytes, make, percent, short, time, watts} from "./dom.js";

const KINDS = {up: "good", loading: "warn", draining: "warn", restarting: "warn"};
const GONE = new Set(["loading", "restarting", "dead"]);  // their ranks, if known, are those of an earlier start
const OPEN = 4;  // replicas whose ranks are shown from the start
const COLUMNS = [["Replica"], ["State"], ["Host"], ["Running", true], ["Waiting", true], ["KV cache", true],
  ["Tokens/s", true], ["Step", true], ["Last death"]];

export function drawReplicas(state) {
  const head = make("thead", {role: "rowgroup"}, make("tr", {role: "row"}, ...COLUMNS.map(([name, isNumber]) =>
    make("th", {role: "columnheader", scope: "col", class: isNumber && "number"}, name))));
  const rows = state.replicas.map(each => {
    const used = each.kv_blocks ? each.kv_blocks_used / each.kv_blocks : null, death = each.last_death;
    const why = each.reason && each.reason !== death?.reason ? [make("small", {}, each.reason)] : [];
    const cells = [
      [`${each.index}`, ...(each.role === "any" ? [] : [make("small", {}, each.role)])], [make("span", {class: `state ${KINDS[each.state] ?? "bad"}`}, each.state), ...why], [each.host],
      [short(each.num_requests_running)], [short(each.num_requests_waiting)],
      [percent(used), bar([used ?? 0], used > 0.95 ? "full" : "")],
      [short(each.tokens_per_second)], [time(each.step_seconds)],
      death ? [`${duration(Math.max(0, state.time - death.time))} ago`, make("small", {}, death.reason ?? "")] : [],
    ];
    return make("tr", {role: "row", "data-key": each.index}, ...cells.map((content, at) => {
      const [name, isNumber] = COLUMNS[at];
      return make("td", {role: "cell", "data-label": name, class: isNumber ? "number" : name === "Last death" && "all"}, ...content);
    }));
  });
  fill("replicas", head, make("tbody", {role: "rowgroup"}, ...rows));
}

export function drawRanks(state) {
  const measured = state.replicas.flatMap(each => each.ranks);
  const parts = [];
  if (measured.some(each => each.gpu)) parts.push(["c1", "GPU in use"], ["c5", "GPU memory"]);
  if (measured.some(each => !each.gpu && each.computing !== null)) parts.push(["c1", "computing"], ["c2", "waiting for others"], ["raised", "idle"]);
  fill("ranks-legend", ...parts.map(([colour, label]) => {
    const mark = make("i");
    mark.style.background = `var(--${colour})`;
    return make("span", {}, mark, label, "\u2003");
  }));
  const isOne = state.replicas.length === 1;
  fill("ranks", ...state.replicas.map(replica => {
    const stages = replica.ranks.length && !GONE.has(replica.state) ? replica.stages.map((layers, stage) => drawStage(replica, layers, stage))
      : [make("p", {class: "soft"}, `no ranks: ${replica.state}`)];
    if (isOne) return make("div", {"data-key": replica.index}, ...stages);
    const slow = replica.ranks.filter(each => each.is_straggler).length;
    return make("details", {"data-key": replica.index, open: replica.index < OPEN},
      make("summary", {}, `Replica ${replica.index}`, make("span", {class: "soft"}, replica.role === "any" ? ` · ${replica.host}` : ` · ${replica.role} · ${replica.host}`),
        ...(slow ? [make("span", {class: "warn"}, ` · ${slow} slow`)] : [])), ...stages);
  }));
}

function drawStage(replica, [first, last], stage) {
  const size = replica.tensor_parallel_size * (replica.prefill_context_parallel_size ?? 1), from = stage * size;
  return make("div", {class: "stage"},
    make("span", {class: "soft"}, `stage ${stage}`, make("br"), `layers ${first}–${last}`),
    make("div", {role: "list"}, ...replica.ranks.slice(from, from + size).map((each, at) => drawRank(each, from + at))));
}

function drawRank(rank, number) {
  const {gpu, computing, waiting} = rank, bars = [], texts = [], isTimed = computing !== null && computing !== undefined;
  if (gpu) {
    bars.push(bar([gpu.utilization ?? 0]), bar([gpu.memory_total ? gpu.memory_used / gpu.memory_total : 0], "memory"));
    texts.push(`GPU ${percent(gpu.utilization)}`, `${gigabytes(gpu.memory_used)} of ${gigabytes(gpu.memory_total)} GiB`,
      ...(gpu.power === null ? [] : [watts(gpu.power)]));
  } else if (isTimed) {
    bars.push(bar([computing, waiting]));
    const share = value => percent(value).padStart(4, "\u2007");  // as wide for an idle rank as for others
    texts.push(`computing ${share(computing)}`, `waiting ${share(waiting)}`);
  }
  if (!gpu && rank.resident_bytes) texts.push(`${gigabytes(rank.resident_bytes)} GiB`);
  const isIdle = isTimed && computing + waiting === 0, isStepTimed = rank.step_seconds !== null && rank.step_seconds !== undefined;
  const step = isStepTimed || isIdle ? [make("span", {}, isStepTimed ? `${time(rank.step_seconds)} a step` : "idle")] : [];
  return make("div", {role: "listitem", class: rank.is_straggler ? "rank slow" : "rank"},
    make("p", {}, make("span", {}, `rank ${number}`, ...(rank.is_straggler ? [make("b", {class: "warn"}, " slow")] : [])), ...step),
    ...bars, make("small", {}, ...texts.map(text => make("span", {}, text))));
}
