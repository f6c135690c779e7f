"""The numbers of the last hour, which the page at `/` draws, and the rates of the last seconds.

The hour is a table that all API processes map, so that any of them can answer, and a new one has what its predecessor
had. Each process takes a sample every second; the first one to do so in an interval writes its row. A row is computed
from nothing but earlier rows and the samples of its writer: two that write the same row at once do no harm.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from quire.engine.protocol.stats import EngineStats, RankStats
from quire.server.client.http_metrics import REASONS
from quire.server.client.metrics import HISTOGRAMS, Metrics
from quire.server.client.table import map_table

INTERVAL = 2.0
"""Seconds between rows."""
SAMPLE_SECONDS = 1.0
"""Seconds between samples."""
_RATE_SAMPLES = 5
"""Samples over which `activity` looks."""
_ROWS = 1800
_WINDOW = 30
"""Rows over which percentiles and shares look: a minute."""

_HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
}
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_RATES = {
    "output_tokens": "generated_tokens",
    "prompt_tokens": "prompt_tokens",
    "preemptions": "preemptions",
}
"""Columns that are rates of fields of `EngineStats`."""
_SHARES = {
    "prefix_hits": ("prefix_hit_tokens", "prefix_queried_tokens"),
    "drafts_accepted": ("num_accepted_tokens", "num_draft_tokens"),
}
"""Columns that are quotients of fields of `EngineStats`, as these have grown within the window."""
_FAILED = tuple(f"failed_{reason}" for reason in REASONS)
COLUMNS = (
    *("running", "prefilling", "waiting", "kv_cache", "replicas_up", "replicas"),
    *("gpu_utilization", "gpu_memory", "gpu_power", "cpu"),
    *_RATES,
    *_SHARES,
    *(f"{name}_{quantile}" for name in _HISTOGRAMS for quantile in _QUANTILES),
    *("requests", *_FAILED),
)
"""The values of a row, with four significant digits; what is unknown is not a number. Times are in seconds, rates per
second, power in watts."""
_GROWING = tuple(field for pair in _SHARES.values() for field in pair)
"""Fields of `EngineStats` that a row has as sums over all replicas since the start of the hour: a replica's own count
starts at 0 again with the replica."""

# A row has the number of its interval since 1970, or 0; its values; and what later rows need: the monotonic clock,
# `_GROWING`, finished requests, failed ones by reason, and the buckets of the histograms.
_BASE = 1 + len(COLUMNS)
_COUNTED = 1 + len(_GROWING)
_FIRST_BUCKET = _COUNTED + 1 + len(REASONS)
_WIDTH = _BASE + _FIRST_BUCKET + sum(len(HISTOGRAMS[full][1]) + 1 for full in _HISTOGRAMS.values())


class _Sample(NamedTuple):
    clock: float
    """Seconds, monotonic."""
    stats: dict[int, EngineStats]
    """By replica; those that have been removed are left out."""
    ranks: dict[int, list[RankStats]]
    """By replica, of those that are up."""


class RankActivity(NamedTuple):
    """What a rank has done within the last seconds. None: not measured."""

    computing: float | None = None
    """Share of the time."""
    waiting: float | None = None
    """Share of the time that it waited in a step for other ranks."""
    step_seconds: float | None = None
    """Mean duration of a step."""


class Activity(NamedTuple):
    """What a replica has done within the last seconds. None: not known."""

    tokens_per_second: float | None = None
    """Generated tokens."""
    prompt_tokens_per_second: float | None = None
    step_seconds: float | None = None
    """Mean duration of a step of its ranks."""
    ranks: Sequence[RankActivity] = ()
    """One for each rank that is known."""


class History:
    """The last hour of a server."""

    def __init__(self, metrics: Metrics, path: str | None = None) -> None:
        """`path` is the table's file, which all processes map; None: this process is the only one."""
        self._metrics = metrics
        self._cells: memoryview[float] = memoryview(map_table(path, _ROWS * _WIDTH)).cast("d")
        self._samples: deque[_Sample] = deque(maxlen=_RATE_SAMPLES + 1)
        self._number: float = math.inf
        """Of the newest interval."""

    def sample(self, now: float, clock: float) -> None:
        """Take a sample at `now`, in seconds since 1970, and write the row of its interval if there is none. `clock` is
        the monotonic clock, which the processes of a host have in common.
        """
        metrics, states = self._metrics, self._metrics.states
        present = [replica for replica, state in states.items() if state != "removed"]
        live = [replica for replica in present if states[replica] in ("up", "draining")]
        stats = {replica: metrics.of(replica) for replica in present}
        new = _Sample(clock, stats, {each: metrics.rank_stats[each] for each in live if each in metrics.rank_stats})
        number = int(now // INTERVAL)
        at = number % _ROWS * _WIDTH
        if number < self._number:
            self._forget_future(number)
        self._number = number
        if self._cells[at] != number:
            self._cells[at] = 0.0  # others read it meanwhile
            num_up = sum(state == "up" for state in states.values())
            gauges = {"replicas_up": num_up, "replicas": len(present), **_gauges(new, live)}
            self._cells[at + 1 : at + _WIDTH] = memoryview(self._row(number, new, gauges, states.keys()))
            self._cells[at] = number
        self._samples.append(new)

    def after(self, time: float, now: float) -> dict[str, list[float]]:
        """Return the columns of all rows after `time`, and the times of the rows: seconds since 1970."""
        last, cells, width = int(now // INTERVAL), self._cells, 1 + len(COLUMNS)
        first = max(last - _ROWS + 1, int(time // INTERVAL) + 1)
        starts = [number % _ROWS * _WIDTH for number in range(first, last + 1)]
        rows = [cells[start : start + width].tolist() for start in starts]
        rows = [row for number, row in enumerate(rows, first) if row[0] == number]
        columns = zip(*rows, strict=True) if rows else [()] * width
        numbers, *values = map(list, columns)
        return {"time": [number * INTERVAL for number in numbers], **dict(zip(COLUMNS, values, strict=True))}

    def activity(self, replica: int) -> Activity:
        """Return what a replica has done within the last seconds."""
        if len(self._samples) < 2 or replica not in self._samples[-1].stats:
            return Activity()
        old, new = self._samples[0], self._samples[-1]
        seconds = new.clock - old.clock
        fields = ("generated_tokens", "prompt_tokens")
        tokens, prompt_tokens = (_growth(old, new, field, [replica]) / seconds for field in fields)
        before, after = old.ranks.get(replica, []), new.ranks.get(replica, [])
        if len(before) != len(after):
            return Activity(tokens, prompt_tokens)
        grown = [_rank_growth(*each) for each in zip(before, after, strict=True)]
        num_steps = sum(each.steps for each in grown)
        mean = sum(each.seconds for each in grown) / num_steps if num_steps else None
        ranks = [_rank_activity(*each, seconds) for each in zip(after, grown, strict=True)]
        return Activity(tokens, prompt_tokens, mean, ranks)

    def _row(self, number: int, new: _Sample, gauges: dict[str, float], replicas: Collection[int]) -> array[float]:
        """The cells of a new row after its number. `replicas` are all that there have been."""
        metrics, values = self._metrics, dict.fromkeys(COLUMNS, math.nan) | gauges
        base = [new.clock, *[0.0] * len(_GROWING), sum(metrics.totals("finished", replicas)), *metrics.failed]
        base += [count for full in _HISTOGRAMS.values() for count in metrics.totals(full, replicas)[:-1]]
        if (earlier := self._earlier(number)) is not None:
            first, last = earlier
            base[1:_COUNTED] = last[1:_COUNTED]
            seconds = new.clock - last[0]
            counted = zip(
                ("requests", *_FAILED), base[_COUNTED:_FIRST_BUCKET], last[_COUNTED:_FIRST_BUCKET], strict=True
            )
            values |= {name: (value - before) / seconds for name, value, before in counted}
            if self._samples:
                old = min(self._samples, key=lambda each: abs(each.clock - last[0]))
                values |= _rates(old, new)
                for place, field in enumerate(_GROWING, 1):
                    base[place] += _growth(old, new, field)
            grown = [value - before for value, before in zip(base, first, strict=True)]
            for at, name in enumerate(_SHARES):
                part, whole = grown[1 + 2 * at : 3 + 2 * at]
                values[name] = part / whole if whole else math.nan
            at = _FIRST_BUCKET
            for name, full in _HISTOGRAMS.items():
                bounds = HISTOGRAMS[full][1]
                counts = grown[at : (at := at + len(bounds) + 1)]
                values |= {f"{name}_{each}": _quantile(bounds, counts, of) for each, of in _QUANTILES.items()}
        return array("d", [*(float(f"{values[name]:.4g}") for name in COLUMNS), *base])

    def _earlier(self, number: int) -> tuple[list[float], list[float]] | None:
        """What the first and the last row of the minute before a row have for later rows, if there are any."""
        numbers = range(number - _WINDOW, number)
        starts = [each % _ROWS * _WIDTH for each in numbers]
        known = [start for each, start in zip(numbers, starts, strict=True) if self._cells[start] == each]
        if not known:
            return None
        first, last = (list(self._cells[start + _BASE : start + _WIDTH]) for start in (known[0], known[-1]))
        return first, last

    def _forget_future(self, number: int) -> None:
        """Forget rows after this one, which were written before the clock was set back."""
        for row, each in enumerate(self._cells[::_WIDTH].tolist()):
            if each > number:
                self._cells[row * _WIDTH] = 0.0


def _gauges(new: _Sample, live: Collection[int]) -> dict[str, float]:
    stats = new.stats.values()
    blocks = sum(new.stats[replica].kv_blocks for replica in live)
    usages = [rank.usage for ranks in new.ranks.values() for rank in ranks if rank.usage is not None]
    gpus = [usage.gpu for usage in usages if usage.gpu is not None]
    used = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    power = [gpu.power for gpu in gpus if gpu.power is not None]
    return {
        "running": sum(each.running for each in stats),
        "prefilling": sum(each.prefilling for each in stats),
        "waiting": sum(each.waiting for each in stats),
        "kv_cache": sum(each.kv_blocks_used for each in stats) / blocks if blocks else math.nan,
        "gpu_utilization": sum(used) / len(used) if used else math.nan,
        "gpu_memory": max((gpu.memory_used / gpu.memory_total for gpu in gpus), default=math.nan),
        "gpu_power": sum(power) if power else math.nan,
    }


def _rates(old: _Sample, new: _Sample) -> dict[str, float]:
    seconds = new.clock - old.clock
    found = {name: _growth(old, new, field) / seconds for name, field in _RATES.items()}
    both = old.ranks.keys() & new.ranks.keys()
    ranks = [pair for each in both for pair in zip(old.ranks[each], new.ranks[each], strict=False)]
    if any(after.usage is not None for _, after in ranks):
        found["cpu"] = sum(_rank_growth(*pair).cpu_seconds for pair in ranks) / seconds
    return found


def _growth(old: _Sample, new: _Sample, field: str, replicas: Collection[int] | None = None) -> int:
    """How much a counter has grown, summed over these replicas, or over all. A replica that has restarted has counted
    from 0; what a new one had when it was first seen does not count.
    """
    total = 0
    for replica in new.stats if replicas is None else replicas:
        if (before := old.stats.get(replica)) is not None:
            after = new.stats[replica]
            is_same = before.started == after.started
            total += getattr(after, field) - (getattr(before, field) if is_same else 0)
    return total


class _RankGrowth(NamedTuple):
    steps: float
    seconds: float
    waited: float
    cpu_seconds: float


def _rank_growth(old: RankStats, new: RankStats) -> _RankGrowth:
    """The difference; a rank that has restarted has counted from 0."""
    after, before = (
        _RankGrowth(each.steps, each.seconds, each.waited, each.usage.cpu_seconds if each.usage else 0.0)
        for each in (new, old)
    )
    has_restarted = any(now < then for now, then in zip(after, before, strict=True))
    return after if has_restarted else _RankGrowth(*(now - then for now, then in zip(after, before, strict=True)))


def _rank_activity(new: RankStats, grown: _RankGrowth, seconds: float) -> RankActivity:
    if not new.seconds:
        return RankActivity()
    whole = max(seconds, grown.seconds)  # reports of ranks are up to a second old
    computing = (grown.seconds - grown.waited) / whole
    return RankActivity(computing, grown.waited / whole, grown.seconds / grown.steps if grown.steps else None)


def _quantile(bounds: Sequence[float], counts: Sequence[float], of: float) -> float:
    """A quantile of a histogram, interpolated as Prometheus does: values beyond the last bound count as this."""
    *below, total = accumulate(counts)
    at = bisect_left(below, of * total)
    if not total or at == len(bounds):
        return bounds[-1] if total else math.nan
    low, under = (bounds[at - 1], below[at - 1]) if at else (0.0, 0.0)
    return low + (bounds[at] - low) * (of * total - under) / counts[at]
