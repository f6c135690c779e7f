"""The cost of metrics: CPU time with them divided by CPU time without them, in turns.

.venv/bin/python benchmarks/metrics.py [--quick] [--scrape] [--json]

`steps`: decode steps of the demo model in this process, with and without the times of each step and the samples of the
rank's usage; and the microseconds of each, because the ratios differ among themselves by more. `requests`: the API
process's work for requests between the engine's messages and the output streams, with and without its counts. `scrape`:
milliseconds for the text of /metrics with this number of replicas, and the KiB that it takes in memory, with the table
that processes share; and the same of prometheus_client, with metrics of the same names, labels and buckets. Divide by
the scrape interval for the cost. --scrape measures only this. Ratios are medians over the rounds, in which both ways
take turns; --quick only shows that it works.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tensor_parallel import CONTEXT, requests

from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.core.launch import Endpoints
from quire.engine.executor.uni import UniExecutor
from quire.engine.executor.usage import UsageSampler, read_usage
from quire.engine.protocol.engine_core import EngineCoreOutput, EngineCoreOutputs, FinishReason
from quire.engine.protocol.rank_state import RankState
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.protocol.stats import EngineStats, GpuUsage, RankStats, RankUsage
from quire.engine.protocol.supervision import ReplicaUp
from quire.server.client.engine_client import EngineClient
from quire.server.client.metrics import HISTOGRAMS, Metrics, _histogram_template, _series

REPLICAS = (1, 8, 64)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of all threads of this process."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def paired(rounds: int, with_metrics: Callable[[], float], without: Callable[[], float]) -> tuple[float, float]:
    """The median ratio and difference of the two's results, in turns, the first time left out."""
    pairs = []
    for turn in range(rounds + 1):
        if turn % 2:
            pairs.append((with_metrics(), without()))
        else:
            second = without()
            pairs.append((with_metrics(), second))
    return statistics.median(a / b for a, b in pairs[1:]), statistics.median(a - b for a, b in pairs[1:])


# --- the engine's side ------------------------------------------------------------------------------------------


class Steps:
    """Decode steps in which some requests of the demo model get one token each."""

    def __init__(self, rows: int, steps: int) -> None:
        options = EngineOptions(
            model=str(DEMO_MODEL), device="cpu", max_num_seqs=rows, block_size=16, kv_cache_memory_bytes=1 << 28
        )
        config = resolve(options)
        assert rows * (CONTEXT // 16 + steps // 16 + 2) <= config.cache.num_blocks, "fewer --rows or --steps"
        self.executor, self._rows, self._steps, self._step = UniExecutor(config), rows, steps, 0
        self.executor._usage.close()

    def run(self) -> float:
        new, ids = requests(self._rows, CONTEXT, CONTEXT + self._steps), range(self._rows)
        self._submit(new=new, cached=[CachedRequestData(row, CONTEXT, [], []) for row in ids])
        decoding = [CachedRequestData(row, 1, [9], []) for row in ids]
        spent = cpu_seconds(lambda: self._decode(decoding))
        self._submit(freed=list(ids))
        return spent

    def _decode(self, rows: list[CachedRequestData]) -> None:
        for _ in range(self._steps):
            self._submit(cached=rows)

    def _submit(
        self, new: Sequence[NewRequestData] = (), cached: Sequence[CachedRequestData] = (), freed: Sequence[int] = ()
    ) -> None:
        plan = SchedulerOutput(self._step, list(freed), list(new), list(cached))
        self._step += 1
        self.executor.submit(plan, 60.0).result()

    def without_times(self) -> float:
        """As `run`, without the times of each step."""

        @contextlib.contextmanager
        def nothing(state: RankState) -> Iterator[None]:
            yield

        self.executor._worker.count_step = nothing  # type: ignore[method-assign]
        try:
            return self.run()
        finally:
            del self.executor._worker.count_step

    def microseconds(self) -> dict[str, float]:
        """CPU time of a step, of its times, and of a sample of the rank's usage."""
        worker, state, count = self.executor._worker, self.executor._state, 10_000

        def times() -> None:
            for _ in range(count):
                with worker.count_step(state):
                    pass

        def samples() -> None:
            for _ in range(count):
                read_usage(os.getpid(), None)

        return {
            "µs of a step": self.run() / self._steps * 1e6,
            "µs of its times": cpu_seconds(times) / count * 1e6,
            "µs of a sample": cpu_seconds(samples) / count * 1e6,
        }

    def with_sampler(self) -> float:
        """As `run`, with samples of the rank's usage."""
        sampler = UsageSampler([os.getpid()], None)
        try:
            return self.run()
        finally:
            sampler.close()


# --- the API process's side -------------------------------------------------------------------------------------


class NoMetrics(Metrics):
    """Counts nothing of requests and of the engine."""

    def observe(self, replica: int, name: str, value: float, count: int = 1) -> None:
        pass

    def finished(self, replica: int, reason: FinishReason, seconds: float) -> None:
        pass

    def take(self, replica: int, stats: EngineStats) -> None:
        pass


async def request_cost(rounds: int, num_requests: int, tokens: int) -> tuple[float, float]:
    """The API process's ratio, for requests at a time with this number of tokens each; and the microseconds that a
    token takes longer with the counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        clients = []
        for name, metrics in (("with", Metrics("m")), ("without", NoMetrics("m"))):
            ends = Endpoints({0: f"ipc://{folder}/{name}-requests"}, (f"ipc://{folder}/{name}-responses",))
            clients.append(EngineClient(ends, metrics))
            clients[-1].update(ReplicaUp(0, 1))

        def run(client: EngineClient) -> None:
            ids = [f"{number}" for number in range(num_requests)]
            for request_id in ids:
                client.submit([(request_id, [1] * 16, SamplingParams(max_tokens=tokens))])
            client._deliver(EngineCoreOutputs([EngineCoreOutput(i, [5], num_cached_tokens=0) for i in ids]))
            for step in range(tokens - 2):
                stats = EngineStats(running=num_requests, steps=step)
                client._deliver(EngineCoreOutputs(request_ids=ids, token_ids=[5] * num_requests, stats=stats))
            client._deliver(EngineCoreOutputs([EngineCoreOutput(i, [5], finish_reason="length") for i in ids]))
            assert not client.num_open

        counted, uncounted = clients
        found, more = paired(
            rounds, lambda: cpu_seconds(lambda: run(counted)), lambda: cpu_seconds(lambda: run(uncounted))
        )
        for client in clients:
            await client.close()
        return found, more / num_requests / tokens * 1e6


def filled(replicas: int) -> Metrics:
    """Our metrics of replicas with a rank each, all of which have values."""
    metrics = Metrics("m", config=resolve(EngineOptions(device="cpu")))
    for replica in range(replicas):
        metrics.state(replica, "up")
        metrics.take(replica, EngineStats(running=2, kv_blocks=9, steps=3, started=1))
        for name in HISTOGRAMS:
            metrics.observe(replica, name, 0.3, 4)
        usage = RankUsage(1.0, 2, 3, GpuUsage(1, 2, 0.5, 300.0, 1, 1, 1, 1))
        metrics.rank_stats[replica] = [RankStats(4, 9.0, 1.0, usage=usage)]
    metrics.exposition()  # it keeps the parts of the text
    return metrics


def same(exposition: str) -> CollectorRegistry:
    """The metrics of a text as prometheus_client's metrics."""
    registry = CollectorRegistry()
    for family in text_string_to_metric_families(exposition):
        rows = [
            (sample, {name: text for name, text in sample.labels.items() if name != "le"}) for sample in family.samples
        ]
        names = list(rows[0][1]) if rows else []
        if family.type == "histogram":
            bounds = sorted({float(sample.labels["le"]) for sample, _ in rows if "le" in sample.labels})
            histogram = Histogram(family.name, family.documentation, names, registry=registry, buckets=bounds)
            for sample, labels in rows:
                if sample.name.endswith("_count"):
                    (histogram.labels(**labels) if names else histogram).observe(0.3)
        elif family.type == "counter":
            counter = Counter(family.name, family.documentation, names, registry=registry)
            for sample, labels in rows:
                (counter.labels(**labels) if names else counter).inc(sample.value)
        else:
            gauge = Gauge(family.name, family.documentation, names, registry=registry)
            for sample, labels in rows:
                (gauge.labels(**labels) if names else gauge).set(sample.value)
    return registry


def kept(make: Callable[[], object]) -> float:
    """The KiB that a result takes, including its caches."""
    _series.cache_clear()
    _histogram_template.cache_clear()
    tracemalloc.start()
    made = make()
    found = tracemalloc.get_traced_memory()[0] + (len(made._table) if isinstance(made, Metrics) else 0)
    tracemalloc.stop()
    return found / 1024


def scrape(replicas: int, rounds: int) -> dict[str, float]:
    """Milliseconds and KiB of the text of /metrics."""
    metrics = filled(replicas)
    text = metrics.exposition().decode()
    registry = same(text)
    ours = [cpu_seconds(metrics.exposition) for _ in range(rounds)]
    theirs = [cpu_seconds(lambda: generate_latest(registry)) for _ in range(rounds)]
    return {
        "lines": sum(not line.startswith("#") for line in text.splitlines()),
        "ms": statistics.median(ours) * 1e3,
        "prometheus_client ms": statistics.median(theirs) * 1e3,
        "KiB": kept(lambda: filled(replicas)),
        "prometheus_client KiB": kept(lambda: same(text)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="requests that decode at the same time")
    parser.add_argument(
        "--steps", type=int, default=500, help="decode steps per round; several seconds for the samples"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few steps, two rounds: a smoke test")
    parser.add_argument("--scrape", action="store_true", help="only the text of /metrics")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.steps, options.requests, options.rounds = [2], 8, 4, 2
    results: dict[str, float] = {}
    for rows in [] if options.scrape else options.rows:
        steps = Steps(rows, options.steps)
        results[f"steps of {rows}, times"], _ = paired(options.rounds, steps.run, steps.without_times)
        results[f"steps of {rows}, samples"], _ = paired(options.rounds, steps.with_sampler, steps.run)
        results |= {f"steps of {rows}, {name}": value for name, value in steps.microseconds().items()}
        steps.executor.close()
    if not options.scrape:
        results["requests"], results["requests, µs of a token more"] = asyncio.run(
            request_cost(options.rounds, options.requests, options.tokens)
        )
    for replicas in REPLICAS:
        results |= {f"scrape of {replicas}, {name}": value for name, value in scrape(replicas, options.rounds).items()}
    if options.json:
        json.dump(results, sys.stdout, indent=1)
        print()
        return
    for name, value in results.items():
        print(f"{name:40} {value:10.3f}")


if __name__ == "__main__":
    main()
