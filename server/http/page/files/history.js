// The server's history of an hour: rows at equal intervals, kept as columns, with an empty row where some are missing.

import {request} from "./api.js";

const HOUR = 3600;
const PATIENCE_MILLISECONDS = 60_000;  // the hour is long on a slow link

export class History {
  interval = 2;
  now = null;  // the server's time at the last answer, in seconds since 1970
  columns = {time: []};
  #asked = -Infinity;
  #busy = false;

  // Ask for what is new, unless this was done just now or is under way. Returns whether there was an answer. Raises Refused.
  async poll() {
    if (this.#busy || performance.now() < this.#asked + 1000 * this.interval - 100) return false;
    this.#busy = true;
    this.#asked = performance.now();
    try {
      const {columns} = this, newest = columns.time.at(-1), path = newest === undefined ? "/ui/history" : `/ui/history?after=${newest}`;
      const answer = await (await request(path, {signal: AbortSignal.timeout(PATIENCE_MILLISECONDS)})).json();
      if (columns !== this.columns) return false;  // cleared meanwhile
      if (newest !== undefined && answer.time < newest) this.clear();  // its clock was set back: ask for all next time
      else this.#take(answer);
      return true;
    } finally {
      this.#busy = false;
    }
  }

  clear() {
    this.columns = {time: []};
    this.#asked = -Infinity;
  }

  // The newest values, or nulls if the newest row is old.
  last(name) {
    const {time, [name]: column} = this.columns;
    return column && this.now - time.at(-1) < 5 * this.interval ? column.at(-1) : null;
  }

  // The number of what these columns count per second, in the last `seconds`. Null if that is not known.
  count(names, seconds) {
    const rows = this.columns.time.map((at, row) => at > this.now - seconds ? row : -1).filter(row => row >= 0);
    const values = names.flatMap(name => rows.map(row => this.columns[name][row])).filter(value => value !== null);
    return values.length ? Math.round(this.interval * values.reduce((one, other) => one + other)) : null;
  }

  // Whether fewer replicas were up than there are, of each row. Those being loaded after a start were not down.
  down() {
    const {time, replicas_up: up = [], replicas = []} = this.columns;
    const isDown = time.map((_, row) => up[row] !== null && up[row] < replicas[row]);
    const isSinceStart = time[0] > this.now - HOUR + 5 * this.interval;
    const first = isSinceStart ? isDown.findIndex((is, row) => !is && up[row] !== null) : 0;
    return isDown.map((is, row) => is && first >= 0 && row >= first);
  }

  // The names of these columns that have a value.
  known(names) {
    return names.filter(name => this.columns[name]?.some(value => value !== null));
  }

  #take({interval, time: now, columns}) {
    this.interval = interval;
    this.now = now;
    const mine = this.columns, length = mine.time.length;
    for (const name of Object.keys(columns)) mine[name] ??= new Array(length).fill(null);
    const names = Object.keys(mine).filter(name => name !== "time");
    columns.time.forEach((at, row) => {
      const before = mine.time.at(-1);
      if (at <= before) return;
      if (at - before > 3 * interval) {  // no line across the gap
        mine.time.push(before + interval);
        for (const name of names) mine[name].push(null);
      }
      mine.time.push(at);
      for (const name of names) mine[name].push(columns[name]?.[row] ?? null);
    });
    const old = mine.time.findIndex(at => at >= now - HOUR);
    if (old > 0) for (const column of Object.values(mine)) column.splice(0, old);
  }
}
