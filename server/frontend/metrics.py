"""All Prometheus metrics, in one table. Names and meanings are vLLM's, with the prefix `quire:`."""

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

from quire.engine.config.parallel_config import MAX_REPLICAS
from quire.engine.protocol.engine_core import FinishReason
from quire.engine.protocol.stats import EngineStats, ExpertLoad, RankTimes

# Engine metrics: name, kind, help, value.
ENGINE_METRICS: tuple[tuple[str, Literal["gauge", "counter"], str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "gauge", "Requests in the running batch.", lambda s: s.running),
    ("num_requests_waiting", "gauge", "Requests waiting to be scheduled.", lambda s: s.waiting),
    (
        "kv_cache_usage_perc",
        "gauge",
        "Fraction of KV blocks in use, from 0 to 1.",
        lambda s: s.kv_blocks_used / s.kv_blocks if s.kv_blocks else 0.0,
    ),
    ("kv_cache_blocks", "gauge", "Total number of KV blocks.", lambda s: s.kv_blocks),
    (
        "prefix_cache_queries",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_queried_tokens,
    ),
    ("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hit_tokens),
    (
        "num_preemptions",
        "counter",
        "Preemptions: requests that lost their KV blocks and were recomputed.",
        lambda s: s.preemptions,
    ),
    ("prompt_tokens", "counter", "Prompt tokens of started requests.", lambda s: s.prompt_tokens),
    ("generation_tokens", "counter", "Generated tokens.", lambda s: s.generated_tokens),
    ("engine_steps", "counter", "Steps of the engine loop.", lambda s: s.steps),
    (
        "idle_stage_steps",
        "counter",
        "Steps in which a pipeline stage was idle while a request was waiting.",
        lambda s: s.idle_stage_steps,
    ),
)

# Server timings, in seconds: name, help, buckets.
HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "Time from a request's arrival to its first token, in seconds.",
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    ),
    "inter_token_latency_seconds": (
        "Time between two consecutive outputs of a request, in seconds.",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40, 80),
    ),
    "e2e_request_latency_seconds": (
        "Time from a request's arrival to its last token, in seconds.",
        (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920),
    ),
}


_EXPERT_SERIES = 4096
"""Maximum number of experts (over all layers) with individual metrics; above it, there are only sums over ranks and
layers.
"""


class Histogram:
    """A histogram of seconds, stored in shared memory: the counts of its buckets and the sum.

    The client library would cost several µs per token of each request.
    """

    def __init__(self, name: str, cells: memoryview[float]) -> None:
        self._bounds = HISTOGRAMS[name][1]
        self._cells = cells

    def observe(self, seconds: float, count: int = 1) -> None:
        at = bisect_left(self._bounds, seconds)
        self._cells[at] = self._cells[at] + count
        self._cells[-1] = self._cells[-1] + seconds * count


def _layout() -> tuple[dict[str, slice], int]:
    """Return where each group of a process's own values is in its row of the table, and their number.

    They are followed by the newest stats of each replica that there may be, its state and the number of its deaths; of
    these two, only those in the first row are used.
    """
    sizes = {name: len(bounds) + 2 for name, (_, bounds) in HISTOGRAMS.items()}
    sizes |= {"finished": len(FINISH_REASONS)}
    ends = list(accumulate(sizes.values()))
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}, ends[-1]


FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)
_AT, _CELLS = _layout()
_STATS = len(EngineStats.__struct_fields__)
_PER_REPLICA = _STATS + 2
_WIDTH = _CELLS + MAX_REPLICAS * _PER_REPLICA
"""Of a row; memory that is not used is not allocated."""
ReplicaState = Literal["absent", "loading", "up", "draining", "dead"]
STATES: tuple[ReplicaState, ...] = get_args(ReplicaState)


class Metrics(Collector):
    """The metrics of one model, summed over its API processes. Each process has its own row in a table of float64.

    The table is the file at `path`, which all processes map. The process that is scraped adds up the rows. The counts
    of a process survive its death, and its successor continues them. Without a path, this process is the only one.
    Engine metrics are reported per replica, with its number in the label `engine`.
    """

    def __init__(
        self,
        model_name: str,
        path: str | None = None,
        index: int = 0,
        count: int = 1,
    ) -> None:
        """`index` is the number of this process among `count`."""
        size = _WIDTH * 8
        if path is None:
            table: mmap.mmap = mmap.mmap(-1, size * count)
        else:
            with open(path, "ab+") as file:
                file.truncate(size * count)
                table = mmap.mmap(file.fileno(), size * count)
        cells = memoryview(table).cast("d")
        self._rows = [cells[row * _WIDTH : (row + 1) * _WIDTH] for row in range(count)]
        self._states = self._rows[0][_CELLS + _STATS :: _PER_REPLICA]
        """By replica, as places in `STATES`."""
        self._deaths = self._rows[0][_CELLS + _STATS + 1 :: _PER_REPLICA]
        self._index = index
        mine = self._rows[index]
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.time_to_first_token, self.inter_token_latency, self.e2e_latency = (
            Histogram(name, mine[_AT[name]]) for name in HISTOGRAMS
        )
        self._finished = mine[_AT["finished"]]
        self.expert_load: ExpertLoad | None = None
        """The newest value; every process receives it."""
        self.rank_times: dict[int, list[RankTimes]] = {}
        """By replica, as above."""

    def finished(self, reason: FinishReason, seconds: float) -> None:
        """Count a finished request and its duration."""
        self._finished[FINISH_REASONS.index(reason)] += 1
        self.e2e_latency.observe(seconds)

    def take(self, replica: int, stats: EngineStats) -> None:
        """Store the stats of a replica."""
        start = _CELLS + replica * _PER_REPLICA
        self._rows[self._index][start : start + _STATS] = memoryview(array("d", astuple(stats)))

    def state(self, replica: int, state: ReplicaState) -> None:
        """Set the state of a replica; called by the process that supervises it."""
        self._states[replica] = STATES.index(state)

    def count_death(self, replica: int) -> None:
        """Count the death of a replica; called by the process that supervises it."""
        self._deaths[replica] += 1

    def of(self, replica: int) -> EngineStats:
        """Return the newest stats that a replica has sent to any process; nothing runs on one that is not up."""
        start = _CELLS + replica * _PER_REPLICA
        rows = [EngineStats(*map(int, row[start : start + _STATS])) for row in self._rows]
        stats = max(rows, key=lambda stats: (stats.started, stats.steps))
        if STATES[int(self._states[replica])] not in ("up", "draining"):
            stats.running = stats.waiting = stats.kv_blocks_used = 0
        return stats

    @property
    def stats(self) -> EngineStats:
        """Return the sum over the replicas."""
        each = [astuple(self.of(replica)) for replica in self._replicas]
        return EngineStats(*map(int, map(sum, zip(*each, strict=True))))

    def collect(self) -> Iterator[Metric]:
        """Return all metrics when Prometheus scrapes."""
        labels = [self._model_name]
        stats = {str(replica): self.of(replica) for replica in self._replicas}
        families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        for name, kind, meaning, value in ENGINE_METRICS:
            family = families[kind](f"quire:{name}", meaning, labels=["model_name", "engine"])
            for replica, reported in stats.items():
                family.add_metric([*labels, replica], value(reported))
            yield family
        replicas = GaugeMetricFamily("quire:replicas", "Replicas of the engine.", labels=["model_name", "state"])
        states = [STATES[int(self._states[replica])] for replica in self._replicas]
        for state in STATES[1:]:
            replicas.add_metric([*labels, state], states.count(state))
        yield replicas
        meaning = "Deaths of a replica, each followed by a restart if that is possible."
        deaths = CounterMetricFamily("quire:engine_deaths", meaning, labels=["model_name", "engine"])
        for number in self._replicas:
            deaths.add_metric([*labels, str(number)], self._deaths[number])
        yield deaths
        yield from self._ranks(labels)
        yield from self._experts(labels)
        for name, (meaning, bounds) in HISTOGRAMS.items():
            *counts, seconds = self._sum(name)
            times = HistogramMetricFamily(f"quire:{name}", meaning, labels=["model_name"])
            edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
            times.add_metric(labels, list(zip(edges, accumulate(counts), strict=True)), seconds)
            yield times
        meaning = "Finished requests, by finish reason."
        finished = CounterMetricFamily("quire:request_success", meaning, labels=["model_name", "finished_reason"])
        for reason, count in zip(FINISH_REASONS, self._sum("finished"), strict=True):
            finished.add_metric([*labels, reason], count)
        yield finished

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def _ranks(self, labels: list[str]) -> Iterator[Metric]:
        """Metrics of the ranks of replicas that are up, if they run on CPUs."""
        names = ["model_name", "engine", "rank"]
        meaning = "Seconds for which a rank computed."
        busy = CounterMetricFamily("quire:rank_busy_seconds", meaning, labels=names)
        meaning = "Seconds for which a rank waited in a step for other ranks to compute."
        waited = CounterMetricFamily("quire:rank_wait_seconds", meaning, labels=names)
        meaning = "1 if a rank is persistently slower than the other ranks of its stage, which wait for it."
        stragglers = GaugeMetricFamily("quire:straggler", meaning, labels=names)
        up = [number for number in self._replicas if STATES[int(self._states[number])] in ("up", "draining")]
        for number in up:
            for rank, times in enumerate(self.rank_times.get(number, [])):
                rank_labels = [*labels, str(number), str(rank)]
                busy.add_metric(rank_labels, times.busy)
                waited.add_metric(rank_labels, times.waited)
                stragglers.add_metric(rank_labels, times.is_straggler)
        if busy.samples:
            yield from (busy, waited, stragglers)

    @property
    def _replicas(self) -> list[int]:
        """The replicas that exist."""
        return [number for number, state in enumerate(self._states) if state]

    def _experts(self, labels: list[str]) -> Iterator[Metric]:
        """Metrics of the load balance between experts, if whole experts are distributed over ranks."""
        load = self.expert_load
        if load is None:
            return
        meaning = "Load of the busiest rank of each MoE layer, divided by the mean over ranks; 1 is balanced."
        imbalance = GaugeMetricFamily("quire:expert_load_imbalance", meaning, labels=["model_name"])
        imbalance.add_metric(labels, load.imbalance)
        yield imbalance
        moved = CounterMetricFamily("quire:experts_moved", "Experts moved to another place.", labels=["model_name"])
        moved.add_metric(labels, load.moved)
        yield moved
        counts = iter(array("q", load.tokens))
        by_layer = {layer: list(islice(counts, number)) for layer, number in load.layers.items()}
        meaning = "Load of a layer's most used expert since the start, divided by the mean over its experts."
        peak = GaugeMetricFamily("quire:expert_load_peak", meaning, labels=["model_name", "layer"])
        meaning = "Tokens routed to an expert."
        tokens = CounterMetricFamily("quire:expert_tokens", meaning, labels=["model_name", "layer", "expert"])
        for layer, used in by_layer.items():
            peak.add_metric([*labels, str(layer)], max(used) * len(used) / max(1, sum(used)))
            for expert, count in enumerate(used):
                tokens.add_metric([*labels, str(layer), str(expert)], count)
        yield peak
        if sum(load.layers.values()) <= _EXPERT_SERIES:
            yield tokens

    def _sum(self, name: str) -> list[float]:
        return [sum(column) for column in zip(*(row[_AT[name]] for row in self._rows), strict=True)]
