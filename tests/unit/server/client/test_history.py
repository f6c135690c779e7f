"""The last hour of a server, which all API processes keep together."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from quire.engine.protocol.stats import EngineStats, GpuUsage, RankStats, RankUsage
from quire.server.client.history import COLUMNS, INTERVAL, Activity, History
from quire.server.client.metrics import Metrics

NOON = 1_000_000.0


class Process:
    """An API process: its metrics and its history."""

    def __init__(self, folder: Path, index: int = 0, count: int = 1) -> None:
        self.metrics = Metrics("m", str(folder / "metrics"), index, count)
        self.history = History(self.metrics, str(folder / "history"))

    def sample(self, now: float) -> None:
        """Take a sample at this second after noon."""
        self.history.sample(NOON + now, now + 50)

    def column(self, name: str, now: float, after: float = -1e5) -> dict[float, float]:
        """The known values of a column by seconds after noon."""
        found = self.history.after(NOON + after, NOON + now)
        pairs = zip(found["time"], found[name], strict=True)
        return {time - NOON: value for time, value in pairs if not math.isnan(value)}


@pytest.fixture
def process(tmp_path: Path) -> Process:
    process = Process(tmp_path)
    process.metrics.state(0, "up")
    return process


def test_rows_have_rates_of_their_interval_and_gauges_of_their_moment(process: Process) -> None:
    for second in range(5):
        stats = EngineStats(
            running=second, kv_blocks=10, kv_blocks_used=second, steps=second, generated_tokens=30 * second
        )
        process.metrics.take(0, stats)
        process.metrics.finished(0, "stop", 1.0)
        process.metrics.http.fail("queue_full", 3)
        process.sample(second)
    assert process.column("running", 4) == {0: 0, 2: 2, 4: 4}
    assert process.column("kv_cache", 4) == {0: 0, 2: 0.2, 4: 0.4}
    assert process.column("output_tokens", 4) == {2: 30, 4: 30}
    assert process.column("requests", 4) == {2: 1, 4: 1}
    assert process.column("failed_queue_full", 4) == {2: 3, 4: 3}
    assert process.column("failed_timeout", 4) == {2: 0, 4: 0}
    assert process.column("running", 4, after=2) == {4: 4}
    assert process.column("gpu_power", 4) == {}
    document = json.loads(msgspec.json.encode(process.history.after(0, NOON + 4)))
    assert document["gpu_power"] == [None] * 3
    assert list(document) == ["time", *COLUMNS]


def test_percentiles_and_shares_are_of_the_last_minute(process: Process) -> None:
    def take(second: int, hits: int) -> None:
        process.metrics.take(0, EngineStats(steps=second, prefix_queried_tokens=10 * second, prefix_hit_tokens=hits))
        process.sample(second)

    take(0, 0)
    process.metrics.observe(0, "time_to_first_token_seconds", 0.7, 100)  # in the bucket from 0.5 to 0.75
    take(2, 20)
    for second in range(4, 64, 2):
        process.metrics.observe(0, "time_to_first_token_seconds", 0.003)
        take(second, 20)
    found = process.column("ttft_p50", 62)
    assert [found[2], found[58]] == pytest.approx([0.625, 0.6], abs=0.05)
    assert found[62] == pytest.approx(0.003)  # from 0.001 to 0.005
    assert process.column("ttft_p99", 60)[60] == pytest.approx(0.75, abs=0.01)
    hits = process.column("prefix_hits", 62)
    assert (hits[2], hits[4], hits[62]) == (1.0, 0.5, 0.0)
    assert process.column("e2e_p50", 62) == process.column("drafts_accepted", 62) == {}


def test_whoever_is_asked_has_the_same_hour(tmp_path: Path) -> None:
    first, second = (Process(tmp_path, index, 2) for index in (0, 1))
    first.metrics.state(0, "up")
    for at in range(10):
        first.metrics.take(0, EngineStats(steps=at, generated_tokens=10 * at))
        if at % 2:
            second.metrics.finished(0, "stop", 0.5)
        (first if at % 4 in (0, 3) else second).sample(at)  # each writes the rows of every other interval
    assert first.column("output_tokens", 10) == second.column("output_tokens", 10) == {2: 10, 4: 10, 6: 10, 8: 10}
    assert first.column("requests", 10) == dict.fromkeys((2, 4, 6, 8), 0.5)
    del first
    successor = Process(tmp_path, 0, 2)
    assert successor.column("output_tokens", 10) == second.column("output_tokens", 10)
    successor.sample(10)  # it has nothing to compare the counts of replicas with, but what is shared
    assert successor.column("e2e_p50", 10)[10] == pytest.approx(second.column("e2e_p50", 8)[8])
    assert set(successor.column("requests", 10)) == {2, 4, 6, 8, 10}
    assert set(successor.column("output_tokens", 10)) == {2, 4, 6, 8}


def test_replicas_come_and_go(process: Process) -> None:
    metrics = process.metrics
    metrics.state(1, "up")
    metrics.take(0, EngineStats(running=4, steps=9, generated_tokens=1000, started=1, kv_blocks=5, kv_blocks_used=5))
    metrics.take(1, EngineStats(running=1, steps=9, generated_tokens=500, started=1, kv_blocks=5))
    process.sample(0)
    metrics.state(0, "restarting")
    process.sample(2)
    metrics.state(0, "up")
    metrics.take(0, EngineStats(running=2, steps=1, generated_tokens=20, started=2, kv_blocks=5))
    metrics.state(1, "removed")
    metrics.state(2, "up")
    metrics.take(2, EngineStats(running=1, steps=1, generated_tokens=7_000, started=1, kv_blocks=5))
    process.sample(4)
    assert process.column("running", 4) == {0: 5, 2: 1, 4: 3}
    assert process.column("kv_cache", 4) == {0: 0.5, 2: 0, 4: 0}
    assert process.column("output_tokens", 4) == {2: 0, 4: 10}, (
        "what a new replica counted before is not of this moment"
    )
    assert process.column("replicas_up", 4) == {0: 2, 2: 1, 4: 2}
    assert process.column("replicas", 4) == {0: 2, 2: 2, 4: 2}
    assert process.history.activity(1) == Activity(), "the client hears of a removal later"


def test_an_hour_is_kept(process: Process) -> None:
    for second in (0, 2, 4, 1800, 3600, 3604):
        process.sample(second)
    assert list(process.column("running", 3604)) == [1800, 3600, 3604], "4 was overwritten, 2 is too old"
    assert list(process.column("running", 3601)) == [2, 1800, 3600]
    assert list(process.column("running", 7000)) == [3600, 3604]


def test_a_clock_that_is_set_back_leaves_nothing_in_the_future(process: Process) -> None:
    for second in range(0, 20, 2):
        process.metrics.take(0, EngineStats(running=second, steps=second))
        process.sample(second)
    process.metrics.take(0, EngineStats(running=1, steps=99))
    process.history.sample(NOON + 11, 50 + 20)  # 9 s back
    assert process.column("running", 11) == {0: 0, 2: 2, 4: 4, 6: 6, 8: 8, 10: 10}
    process.history.sample(NOON + 12, 50 + 21)
    process.history.sample(NOON + 18, 50 + 27)
    assert process.column("running", 18) == {0: 0, 2: 2, 4: 4, 6: 6, 8: 8, 10: 10, 12: 1, 18: 1}
    assert all(value >= 0 for value in process.column("requests", 18).values())


def test_gpus_and_processors_are_those_of_live_replicas(process: Process) -> None:
    def ranks(cpu: float, *gpus: GpuUsage | None) -> list[RankStats]:
        return [RankStats(usage=RankUsage(cpu, 1, 0, gpu)) for gpu in gpus]

    metrics = process.metrics
    metrics.state(1, "dead")
    metrics.rank_stats = {0: ranks(1.0, None, None), 1: ranks(9.0, GpuUsage(9, 9, 1.0, 1000.0))}
    process.sample(0)
    gpus = GpuUsage(10, 40, 0.5, 300.0), GpuUsage(30, 40, 1.0, 400.0)
    metrics.rank_stats[0] = ranks(2.5, *gpus)
    process.sample(2)
    metrics.rank_stats[0] = ranks(0.5, *gpus)  # after a restart
    process.sample(4)
    assert process.column("cpu", 4) == {2: 1.5, 4: 0.5}
    assert process.column("gpu_utilization", 4) == {2: 0.75, 4: 0.75}
    assert process.column("gpu_memory", 4) == {2: 0.75, 4: 0.75}
    assert process.column("gpu_power", 4) == {2: 700, 4: 700}


def test_activity_is_that_of_the_last_seconds(process: Process) -> None:
    metrics, history = process.metrics, process.history
    assert history.activity(0) == Activity()
    for second in range(10):
        metrics.take(0, EngineStats(steps=second, generated_tokens=8 * second, prompt_tokens=2 * second))
        ranks = [(4 * second, 0.5 * second, 0.25 * second), (0, 0.0, 0.0)]
        metrics.rank_stats[0] = [RankStats(*each) for each in ranks]
        process.sample(second)
    tokens, prompt_tokens, step_seconds, (first, second_rank) = history.activity(0)
    assert (tokens, prompt_tokens) == (8, 2)
    assert step_seconds == pytest.approx(0.125)
    assert first == pytest.approx((0.25, 0.25, 0.125))
    assert second_rank == (None, None, None), "a GPU's rank has no times"
    metrics.rank_stats[0] = [RankStats(400, 50.0, 25.0), RankStats()]  # a report that was late
    process.sample(10)
    assert history.activity(0).ranks[0][:2] == pytest.approx((0.5, 0.5), abs=0.06)
    for second in range(11, 17):
        process.sample(second)
    assert history.activity(0).ranks == [(0, 0, None), (None, None, None)], "the first rank is idle"
    assert INTERVAL == 2
