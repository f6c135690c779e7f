"""Every Prometheus metric, in one table. Names and meanings are vLLM's, with `quire:` in front."""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from typing import Literal, get_args

from msgspec.structs import astuple
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.messages import EngineStats, ExpertLoad, FinishReason

# What the engine counts: name, kind, meaning, value.
ENGINE_METRICS: tuple[tuple[str, Literal["gauge", "counter"], str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "gauge", "Requests in the running batch.", lambda s: s.running),
    ("num_requests_waiting", "gauge", "Requests waiting to be scheduled.", lambda s: s.waiting),
    (
        "kv_cache_usage_perc",
        "gauge",
        "KV blocks in use, from 0 to 1.",
        lambda s: s.kv_blocks_used / s.kv_blocks if s.kv_blocks else 0.0,
    ),
    (
        "prefix_cache_queries",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_queried_tokens,
    ),
    ("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hit_tokens),
    ("num_preemptions", "counter", "Requests that lost their KV blocks and start over.", lambda s: s.preemptions),
    ("prompt_tokens", "counter", "Prompt tokens of the requests begun.", lambda s: s.prompt_tokens),
    ("generation_tokens", "counter", "Tokens generated.", lambda s: s.generated_tokens),
    ("engine_steps", "counter", "Steps of the engine loop.", lambda s: s.steps),
    (
        "idle_stage_steps",
        "counter",
        "Steps in which a pipeline stage had no work although a request waited.",
        lambda s: s.idle_stage_steps,
    ),
)

# What the server times, in seconds: name, meaning, buckets.
HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "From a request's arrival to its first token.",
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    ),
    "inter_token_latency_seconds": (
        "Between two outputs of a request.",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40, 80),
    ),
    "e2e_request_latency_seconds": (
        "From a request's arrival to its last token.",
        (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920),
    ),
}


MAX_EXPERT_SERIES = 4096
"""Experts of all layers that are told of one by one; of more, there are only the sums of their ranks and layers."""


class Times:
    """A histogram of seconds, in cells that others can read: the counts of its buckets and the sum.

    The client library's own costs some µs for each token of each request.
    """

    def __init__(self, name: str, cells: memoryview[float]) -> None:
        self._bounds = HISTOGRAMS[name][1]
        self._cells = cells

    def observe(self, seconds: float, count: int = 1) -> None:
        at = bisect_left(self._bounds, seconds)
        self._cells[at] = self._cells[at] + count
        self._cells[-1] = self._cells[-1] + seconds * count


def _layout() -> tuple[dict[str, slice], int]:
    """Where each group of numbers stands in a process's row of the table, and how long the row is."""
    sizes = {name: len(bounds) + 2 for name, (_, bounds) in HISTOGRAMS.items()}
    sizes |= {"finished": len(FINISH_REASONS), "stats": len(EngineStats.__struct_fields__)}
    ends = list(accumulate(sizes.values()))
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}, ends[-1]


FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)
_AT, _CELLS = _layout()
_STEPS = EngineStats.__struct_fields__.index("steps")


class Metrics(Collector):
    """The metrics of one model, summed over its API processes; each counts in its own row of a table of float64.

    The table is the file at `path`, one page or two that all of them map; whoever is asked adds the rows up. What a
    process has counted stays when it dies, and the next in its place goes on from there. Without a path there is only
    this process.
    """

    def __init__(self, model_name: str, path: str | None = None, index: int = 0, count: int = 1) -> None:
        size = _CELLS * 8
        if path is None:
            table: mmap.mmap = mmap.mmap(-1, size * count)
        else:
            with open(path, "ab+") as file:
                file.truncate(size * count)
                table = mmap.mmap(file.fileno(), size * count)
        cells = memoryview(table).cast("d")
        self._rows = [cells[row * _CELLS : (row + 1) * _CELLS] for row in range(count)]
        mine = self._rows[index]
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.time_to_first_token, self.inter_token_latency, self.e2e_latency = (
            Times(name, mine[_AT[name]]) for name in HISTOGRAMS
        )
        self._finished = mine[_AT["finished"]]
        self._stats = mine[_AT["stats"]]
        self.expert_load: ExpertLoad | None = None
        """The newest; every process hears of it."""

    def finished(self, reason: FinishReason, seconds: float) -> None:
        """A request ended, so many seconds after it came."""
        self._finished[FINISH_REASONS.index(reason)] += 1
        self.e2e_latency.observe(seconds)

    @property
    def stats(self) -> EngineStats:
        """The newest that the engine has sent to any of the processes."""
        rows = [list(row[_AT["stats"]]) for row in self._rows]
        newest = max(rows, key=lambda row: row[_STEPS])
        return EngineStats(*map(int, newest))

    @stats.setter
    def stats(self, news: EngineStats) -> None:
        self._stats[:] = memoryview(array("d", astuple(news)))

    def collect(self) -> Iterator[Metric]:
        """Everything, read when Prometheus asks."""
        labels, stats = [self._model_name], self.stats
        families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        for name, kind, meaning, value in ENGINE_METRICS:
            family = families[kind](f"quire:{name}", meaning, labels=["model_name"])
            family.add_metric(labels, value(stats))
            yield family
        yield from self._experts(labels)
        for name, (meaning, bounds) in HISTOGRAMS.items():
            *counts, seconds = self._sum(name)
            times = HistogramMetricFamily(f"quire:{name}", meaning, labels=["model_name"])
            edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
            times.add_metric(labels, list(zip(edges, accumulate(counts), strict=True)), seconds)
            yield times
        meaning = "Requests that ended, by finish reason."
        finished = CounterMetricFamily("quire:request_success", meaning, labels=["model_name", "finished_reason"])
        for reason, count in zip(FINISH_REASONS, self._sum("finished"), strict=True):
            finished.add_metric([*labels, reason], count)
        yield finished

    def exposition(self) -> bytes:
        """All of it in the text format that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _experts(self, labels: list[str]) -> Iterator[Metric]:
        """How evenly experts are used, where whole ones are spread over ranks."""
        load = self.expert_load
        if load is None:
            return
        meaning = "What the busiest rank of each layer of experts has to do over the mean of the ranks; 1 is even."
        imbalance = GaugeMetricFamily("quire:expert_load_imbalance", meaning, labels=["model_name"])
        imbalance.add_metric(labels, load.imbalance)
        yield imbalance
        moved = CounterMetricFamily("quire:experts_moved", "Experts put in another's place.", labels=["model_name"])
        moved.add_metric(labels, load.moved)
        yield moved
        counts = iter(array("q", load.tokens))
        by_layer = {layer: list(islice(counts, number)) for layer, number in load.layers.items()}
        meaning = "The share of a layer's most used expert over the mean of its experts, since the start."
        peak = GaugeMetricFamily("quire:expert_load_peak", meaning, labels=["model_name", "layer"])
        meaning = "Tokens that went to an expert."
        tokens = CounterMetricFamily("quire:expert_tokens", meaning, labels=["model_name", "layer", "expert"])
        for layer, used in by_layer.items():
            peak.add_metric([*labels, str(layer)], max(used) * len(used) / max(1, sum(used)))
            for expert, count in enumerate(used):
                tokens.add_metric([*labels, str(layer), str(expert)], count)
        yield peak
        if sum(load.layers.values()) <= MAX_EXPERT_SERIES:
            yield tokens

    def _sum(self, name: str) -> list[float]:
        return [sum(column) for column in zip(*(row[_AT[name]] for row in self._rows), strict=True)]
