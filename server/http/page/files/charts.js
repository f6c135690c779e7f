// The charts of the history. All show the same time, and the cursor of one is the cursor of all.

import {$, make, percent, short, time, timeOfDay, watts} from "./dom.js";

const SPANS = [[300, "5 min"], [900, "15 min"], [3600, "1 h"]];
const clock = new Intl.DateTimeFormat(undefined, {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
const STEPS = [1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600];  // of the axis of time, in seconds
const perSecond = value => `${short(value)}/s`;
const WIDTHS = new Map([[short, 3], [percent, 4], [time, 6], [perSecond, 4.5], [watts, 5.5]]);  // usual ones in legends, in digits
const percentiles = name => [[`${name}_p50`, "p50"], [`${name}_p95`, "p95"], [`${name}_p99`, "p99"]];

// Title; format of values; the least top of the scale, or 1 for shares, whose scale is fixed; lines: a column, its label
// and, if it has an axis of its own at the right, that one's format and least top.
const CHARTS = [
  {title: "Tokens per second", format: short, floor: 10, lines: [["output_tokens", "output"], ["prompt_tokens", "prompt"]]},
  {title: "Requests", format: short, floor: 4, lines: [["running", "running"], ["waiting", "waiting"], ["prefilling", "prefilling"]]},
  {title: "Time to first token", format: time, floor: 0.1, lines: percentiles("ttft")},
  {title: "Time between tokens", format: time, floor: 0.02, lines: percentiles("itl")},
  {title: "Duration of requests", format: time, floor: 1, lines: percentiles("e2e")},
  {title: "KV cache and prefix hits", format: percent, share: true,
    lines: [["kv_cache", "KV cache used"], ["prefix_hits", "prefix hits"], ["drafts_accepted", "drafts accepted"]]},
  {title: "Refused and failed requests", format: perSecond, floor: 1, failures: true, none: "none in the last hour"},
  {title: "GPUs", format: percent, share: true, gpus: true,
    lines: [["gpu_utilization", "in use"], ["gpu_memory", "memory"], ["gpu_power", "power", watts, 100]]},
  {title: "CPU cores in use", format: short, floor: 1, gpus: false, lines: [["cpu", "cores"]]},
];

const resolved = new Map();  // colours of CSS variables, which canvases do not know
function colour(name) {
  if (!resolved.has(name)) {
    const probe = make("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    resolved.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return resolved.get(name);
}
const faint = (name, alpha) => colour(name).replace("rgb(", "rgba(").replace(")", `, ${alpha})`);
const line = at => `c${at % 8 + 1}`;
const DASHES = [[], [6, 3], [2, 3]];  // of further lines with the same colour
const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

// The lines of a chart that this history has. Each has a style of its own, which does not depend on what else there is.
function linesOf(spec, history) {
  const failures = Object.keys(history.columns).filter(name => name.startsWith("failed_"));
  const all = spec.failures ? failures.map(name => [name, name.slice(7).replaceAll("_", " ")]) : spec.lines;
  return all.map(([name, label, format = spec.format, least], style) => ({name, label, format, least, style}))
    .filter(({name, style}) => spec.failures ? history.columns[name].some(value => value > 0) : style === 0 || history.known([name]).length);
}

class Chart {
  #spec; #history; #range; #plot = null; #lines = []; #onCursor;
  #legend = make("div", {class: "legend"});
  #host = make("div", {class: "plot", role: "img", tabindex: 0});
  #empty = make("span", {class: "empty soft"});

  constructor(spec, onCursor) {
    this.#spec = spec;
    this.#onCursor = onCursor;
    this.#host.append(this.#empty);
    this.element = make("section", {class: "card chart"}, make("h3", {}, spec.title), this.#legend, this.#host);
    this.#host.addEventListener("keydown", event => this.#onKey(event));
    this.#host.addEventListener("blur", () => this.#plot?.setCursor({left: -10, top: -10}, true, true));
    new ResizeObserver(() => this.#resize()).observe(this.#host);
  }

  draw(history, range) {
    this.#history = history;
    this.#range = range;
    const lines = linesOf(this.#spec, history), data = [history.columns.time, ...lines.map(({name}) => history.columns[name] ?? [])];
    if (lines.map(each => each.name).join() !== this.#lines.map(each => each.name).join() || !this.#plot && lines.length) {
      this.#lines = lines;
      this.#make(data);
    }
    const [min, max] = range;
    this.#plot?.batch(() => {
      this.#plot.setData(data, false);
      this.#plot.setScale("x", {min, max});
    });
    this.label();
  }

  // Draw again in the colours that CSS has now.
  recolour() {
    this.#plot?.redraw(false);
  }

  // Write the values at the cursor, or the newest ones, into the legend.
  label() {
    const at = this.#plot?.cursor.idx ?? null, isAt = at !== null && this.#plot.cursor.left >= 0;
    const texts = this.#lines.map(({name, format}, line) => {
      const text = format(isAt ? this.#history.columns[name]?.[at] ?? null : this.#history.last(name));
      this.#legend.children[line].lastChild.textContent = text;
      return text;
    });
    if (isAt) return this.spoken = `${timeOfDay(this.#history.columns.time[at])}: ${this.#join(texts)}`;
    const all = this.#lines.flatMap(({name}) => this.#inRange(name));
    this.#empty.textContent = !this.#lines.length ? this.#spec.none : all.length ? "" : "nothing to show yet";
    const tops = this.#lines.map(({name, format}) => format(this.#inRange(name).reduce((a, b) => Math.max(a, b), 0)));
    this.#host.setAttribute("aria-label", `${this.#spec.title}. ${!all.length ? this.#empty.textContent
      : `Now ${this.#join(texts)}. Highest ${this.#join(tops)}.`} Left and right arrow keys move the cursor.`);
  }

  #join = texts => this.#lines.map(({label}, at) => `${label} ${texts[at]}`).join(", ");

  #inRange(name) {
    const {time: times, [name]: column = []} = this.#history.columns, [min, max] = this.#range;
    return column.filter((value, at) => value !== null && times[at] >= min && times[at] <= max);
  }

  #make(data) {
    this.#plot?.destroy();
    this.#plot = null;
    this.#legend.replaceChildren(...this.#lines.map(({label, format, style}, at) => {
      const mark = make("i"), value = make("b"), button = make("button", {type: "button", "aria-pressed": "true", title: "Show or hide this line"},
        mark, label, " ", value);
      mark.style.background = `var(--${line(style)})`;
      value.style.minWidth = `${WIDTHS.get(format)}ch`;
      button.addEventListener("click", () => {
        const isShown = !this.#plot.series[at + 1].show;
        button.setAttribute("aria-pressed", isShown);
        this.#plot.setSeries(at + 1, {show: isShown});
      });
      return button;
    }));
    if (this.#lines.length) this.#plot = new uPlot(this.#options(), data, this.#host);
  }

  #options() {
    const {format, floor, share} = this.#spec, size = rem(), own = this.#lines.find(each => each.least);
    const top = least => (_, __, max) => [0, Math.max(least, 1.08 * (max ?? 0))];
    const axis = (side, format, more) => ({
      side, font: `${0.7 * size}px system-ui, sans-serif`, stroke: () => colour("soft"), size: side === 2 ? 1.5 * size : 3.1 * size,
      gap: 4, space: 1.8 * size, grid: {stroke: () => colour("line"), width: 1}, ticks: {show: false},
      values: (_, splits, __, ___, step) => splits.map(value => side === 2 ? step < 60 ? timeOfDay(value) : clock.format(1000 * value)
        : value === 0 ? "0" : format(value).replace(/\.0+(?=[ /kM]|$)/, "")), ...more,
    });
    return {
      ...this.#size(),
      padding: [0.5 * size, own ? 0 : 1.5 * size, 0, 0],
      legend: {show: false},
      cursor: {y: false, sync: {key: "history"}, points: {size: 7}, drag: {x: true, y: false, setScale: false, dist: 5},
        bind: {dblclick: () => () => this.#onCursor.zoom(null)}},
      scales: {x: {time: true, auto: false}, y: {range: share ? [0, 1] : top(floor)}, ...(own ? {own: {range: top(own.least)}} : {})},
      axes: [axis(2, null, {  // seconds need more space
        space: (_, __, min, max) => (max - min < 300 ? 4.6 : 2.8) * size,
        incrs: (_, __, min, max) => max - min < 300 ? STEPS : STEPS.filter(step => step >= 60),
      }), axis(3, format, share ? {splits: [0, 0.25, 0.5, 0.75, 1]} : {}),
        ...(own ? [axis(1, own.format, {scale: "own", grid: {show: false}})] : [])],
      series: [{}, ...this.#lines.map(({label, least, style}, at) => ({
        label, scale: least ? "own" : "y", width: 1.5, stroke: () => colour(line(style)), points: {show: false},
        fill: () => at || share ? null : faint(line(style), 0.09), dash: DASHES[Math.floor(style / 8) % DASHES.length],
      }))],
      hooks: {
        drawClear: [plot => this.#shade(plot)],
        setCursor: [() => {
          this.label();
          this.#onCursor.move(this.#plot);
        }],
        setSelect: [plot => {
          const {left, width} = plot.select;
          if (width < 5) return;
          this.#onCursor.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
          plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
        }],
      },
    };
  }

  // The times at which fewer replicas were up than there are.
  #shade(plot) {
    const {time: times} = this.#history.columns, down = this.#history.down(), {left, top, width, height} = plot.bbox;
    plot.ctx.save();
    plot.ctx.fillStyle = faint("bad", 0.13);
    const place = at => Math.min(left + width, Math.max(left, plot.valToPos(at, "x", true)));
    for (let at = 0, end; at < times.length; at = end + 1) {
      for (end = at; down[end];) end++;
      if (end === at) continue;
      const from = place(times[at] - this.#history.interval), to = place(times[Math.min(end, times.length - 1)]);
      if (to > from) plot.ctx.fillRect(from, top, to - from, height);
    }
    plot.ctx.restore();
  }

  #onKey(event) {
    const plot = this.#plot, step = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
    if (!plot || (step === undefined && event.key !== "Escape")) return;
    event.preventDefault();
    if (event.key === "Escape") {
      this.#onCursor.zoom(null);
      return plot.setCursor({left: -10, top: -10}, true, true);
    }
    const [first, last] = plot.series[0].idxs, now = plot.cursor.left >= 0 ? plot.cursor.idx : last + (step < 0);
    const to = Math.min(last, Math.max(first, now + step));
    plot.setCursor({left: plot.valToPos(plot.data[0][to], "x"), top: 10}, true, true);
    this.#onCursor.speak(this.spoken);
  }

  #size() {
    return {width: this.#host.clientWidth, height: this.#host.clientHeight};
  }

  #resize() {
    const {width, height} = this.#size();
    if (this.#plot && width && (width !== this.#plot.width || height !== this.#plot.height)) this.#plot.setSize({width, height});
  }
}

export class Charts {
  #history; #all = []; #span = SPANS[0][0]; #zoom = null; #gpus = null; #frame = 0;

  constructor(history) {
    this.#history = history;
    $("spans").replaceChildren(...SPANS.map(([seconds, label]) => make("button", {type: "button", "data-seconds": seconds,
      onclick: () => { this.#span = seconds; this.#zoom = null; this.draw(); }}, label)));
    $("live").addEventListener("click", () => { this.#zoom = null; this.draw(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      resolved.clear();
      this.#all.forEach(chart => chart.recolour());
    });
  }

  // Draw the history, if it can be seen.
  draw() {
    if (this.#history.now === null || $("charts").clientWidth === 0) return;
    const gpus = this.#history.known(["gpu_utilization", "gpu_memory", "gpu_power"]).length > 0;
    if (gpus !== this.#gpus) {
      this.#gpus = gpus;
      const events = {zoom: range => this.#setZoom(range), move: plot => this.#move(plot), speak: text => { $("spoken").textContent = text; }};
      this.#all = CHARTS.filter(spec => [undefined, gpus].includes(spec.gpus)).map(spec => new Chart(spec, events));
      $("charts").replaceChildren(...this.#all.map(chart => chart.element));
    }
    const range = this.#zoom ?? [this.#history.now - this.#span, this.#history.now];
    for (const chart of this.#all) chart.draw(this.#history, range);
    for (const button of $("spans").children) {
      button.setAttribute("aria-pressed", !this.#zoom && Number(button.dataset.seconds) === this.#span);
    }
    $("live").hidden = !this.#zoom;
    const times = this.#history.columns.time;
    $("down").hidden = !this.#history.down().some((is, row) => is && times[row] >= range[0] && times[row] <= range[1]);
  }

  #setZoom(range) {
    this.#zoom = range;
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.draw());
  }

  #move(plot) {
    const at = plot?.cursor.left >= 0 ? plot.cursor.idx : null;
    $("at").textContent = at === null || at === undefined ? "" : timeOfDay(this.#history.columns.time[at]);
  }
}
