"""The arithmetic, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from quire.engine.protocol.errors import ConfigError
from quire.server.cli.bench import metrics
from quire.server.cli.bench.load import SendTimes
from quire.server.cli.bench.stream import RequestRecord

MILLISECONDS = 0.001


def record(
    start: float, arrivals: list[float], *, end: float | None = None, tokens: int = 1, sent: float = 0
) -> RequestRecord:
    """A request that began at `start`, with `tokens` in each chunk; milliseconds."""
    arrivals = [moment * MILLISECONDS for moment in arrivals]
    start *= MILLISECONDS
    made = RequestRecord(SendTimes(start, max(start, sent * MILLISECONDS), start), prompt_len=10)
    made.arrivals, made.tokens = arrivals, [tokens] * len(arrivals)
    made.close(arrivals[-1] if end is None else end * MILLISECONDS)
    return made


def failed(start: float, end: float) -> RequestRecord:
    made = RequestRecord(SendTimes(start * MILLISECONDS, start * MILLISECONDS, start * MILLISECONDS), 10)
    made.error = "refused"
    made.close(end * MILLISECONDS)
    return made


def summary(*records: RequestRecord, goodput: dict[str, float] | None = None) -> dict[str, float]:
    return metrics.summarize(
        records, metrics=["ttft", "tpot", "itl", "e2el"], percentiles=[50, 99.5], goodput=goodput or {}
    )


def test_spread() -> None:
    of = metrics.spread([0.001, 0.002, 0.003, 0.010], [0, 50, 75, 90, 100])
    assert of["mean"] == pytest.approx(4)
    assert of["median"] == of["p50"] == pytest.approx(2.5)
    assert of["std"] == pytest.approx(math.sqrt((9 + 4 + 1 + 36) / 4))
    assert of["p75"] == pytest.approx(3 + 0.25 * 7)
    assert of["p90"] == pytest.approx(3 + 0.7 * 7)
    assert [of["p0"], of["p100"]] == pytest.approx([1, 10])
    assert metrics.spread([], [99]) == {"mean": 0, "median": 0, "std": 0, "p99": 0}


def test_times_of_one_request() -> None:
    one = record(100, [300, 320, 380])
    assert one.ttft == pytest.approx(0.200)
    assert one.latency == pytest.approx(0.280)
    assert one.itls == pytest.approx([0.020, 0.060])
    assert one.tpot == pytest.approx(0.040)


def test_several_tokens_in_a_chunk_count_as_such() -> None:
    one = record(0, [100, 190], tokens=4)
    assert one.output_len == 8
    assert one.tpot == pytest.approx(0.090 / 7)
    assert one.itls == pytest.approx([0.090])


def test_a_single_token_has_no_time_per_following_token() -> None:
    result = summary(record(0, [100]), record(0, [100, 150]))
    assert result["mean_tpot_ms"] == pytest.approx(50)


def test_a_run() -> None:
    result = summary(record(0, [100, 200]), record(500, [900, 1000, 1100]), record(600, [2000]), failed(0, 50))
    assert result["duration"] == pytest.approx(2.0)
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 6)
    assert result["request_throughput"] == pytest.approx(1.5)
    assert result["output_throughput"] == pytest.approx(3.0)
    assert result["total_token_throughput"] == pytest.approx(18.0)
    assert result["median_ttft_ms"] == pytest.approx(400)
    assert result["p50_itl_ms"] == pytest.approx(100)
    assert result["p99.5_e2el_ms"] == pytest.approx(600 + 0.99 * 800)
    assert result["max_output_tokens_per_s"] == 3  # 100, 200, 900 | 1000, 1100 | 2000
    assert result["max_concurrent_requests"] == 2
    assert result["request_goodput"] is None


def test_goodput_takes_every_limit_inclusively() -> None:
    runs = [record(0, [100, 150]), record(0, [101, 150]), record(0, [50, 150]), record(0, [100]), failed(0, 1)]
    limits = {"ttft": 100.0, "tpot": 50.0}
    assert [metrics.is_good(run, limits) for run in runs[:4]] == [True, False, False, True]
    assert summary(*runs, goodput=limits)["request_goodput"] == pytest.approx(2 / 0.150)
    assert summary(*runs, goodput={"e2el": 0.0})["request_goodput"] == 0


def test_one_request_that_ends_as_another_begins_makes_room_for_it() -> None:
    assert summary(record(0, [100]), record(100, [200]), record(100, [300]))["max_concurrent_requests"] == 2


def test_tokens_are_spread_over_chunks_that_did_not_say() -> None:
    one = record(0, [100, 1100])
    one.feed(1.1, b'data: {"choices": [], "usage": {"completion_tokens": 10, "prompt_tokens": 3}}\n\n')
    assert (one.output_len, one.prompt_len) == (10, 3)
    assert metrics.token_times([one])[1] == [5, 5]
    assert metrics.peak_token_rate([one]) == 5


def test_a_slow_benchmark_client_is_reported() -> None:
    assert summary(record(0, [100]), record(50, [100], sent=62))["max_client_lag_ms"] == pytest.approx(12)


def test_all_requests_failed() -> None:
    result = summary(failed(0, 100), failed(0, 200))
    assert (result["completed"], result["failed"], result["mean_ttft_ms"]) == (0, 2, 0)


@pytest.mark.parametrize("limit", ["ttft", "ttft:", "ttft:fast", "itl:3", "tpot:-1", "tpot:nan", ":3"])
def test_a_goodput_that_cannot_be_read(limit: str) -> None:
    with pytest.raises(ConfigError, match=r"--goodput .*expected NAME:MILLISECONDS"):
        metrics.parse_goodput(["e2el:1000", limit])


def test_what_can_be_read() -> None:
    assert metrics.parse_goodput(["ttft:500", "tpot:12.5"]) == {"ttft": 500, "tpot": 12.5}
    assert metrics.parse_percentiles("50, 99.9") == [50, 99.9]
    assert metrics.parse_metrics("ttft,itl") == ["ttft", "itl"]
    for wrong in ("", "fifty", "101", "-1", "nan"):
        with pytest.raises(ConfigError, match="--metric-percentiles"):
            metrics.parse_percentiles(wrong)
    with pytest.raises(ConfigError, match="unknown metric 'speed'"):
        metrics.parse_metrics("ttft,speed")
