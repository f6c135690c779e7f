"""Computes metrics from records. The results have the names of `vllm bench serve`'s JSON; times are in milliseconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from quire.engine.protocol.errors import ConfigError
from quire.server.cli.bench.stream import RequestRecord

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "client_queue_time": "wait for --max-concurrency",
}
_SHORTEST_SECONDS = 1e-9
"""Minimum duration of a run, to avoid division by zero."""
_GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def parse_metrics(names: str) -> list[str]:
    """Split `ttft,tpot`; raises `ConfigError`."""
    metrics = [name.strip() for name in names.split(",")]
    for name in metrics:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics: unknown metric {name!r}; available: {', '.join(METRICS)}")
    return metrics


def parse_percentiles(numbers: str) -> list[float]:
    """Split `50,99.9`; raises `ConfigError`."""
    try:
        percentiles = [float(number) for number in numbers.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= number <= 100 for number in percentiles):
        raise ConfigError(f"--metric-percentiles {numbers}: expected numbers from 0 to 100, such as 50,90,99")
    return percentiles


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """Parse `ttft:500 tpot:50` to milliseconds by name; raises `ConfigError`."""
    goodput = {}
    for limit in limits:
        name, _, number = limit.partition(":")
        try:
            goodput[name] = float(number)
        except ValueError:
            goodput[name] = -1.0
        if name not in _GOODPUT_METRICS or not goodput[name] >= 0:
            raise ConfigError(
                f"--goodput {limit}: expected NAME:MILLISECONDS, such as ttft:500 tpot:50; "
                f"the names are {', '.join(_GOODPUT_METRICS)}"
            )
    return goodput


def is_good(record: RequestRecord, limits: dict[str, float]) -> bool:
    """Whether a request kept all limits. A request with a single token has no TPOT, which cannot exceed its limit."""
    seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(seconds[name] * 1000 <= limit for name, limit in limits.items())


def percentile_name(percentile: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{percentile:g}"


def spread(seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles (interpolated linearly), in milliseconds; 0 without values."""
    values = np.asarray(seconds if len(seconds) else [0.0]) * 1000
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std()),
        **{percentile_name(p): float(np.percentile(values, p)) for p in percentiles},
    }


def samples(records: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """All values of each metric of the successful requests, in seconds."""
    good = [record for record in records if record.ok]
    return {
        "ttft": [record.ttft for record in good],
        "tpot": [tpot for record in good if (tpot := record.tpot) is not None],
        "itl": list(itertools.chain.from_iterable(record.itls for record in good)),
        "e2el": [record.latency for record in good],
        "client_queue_time": [record.moments.start - record.moments.scheduled for record in good],
    }


def concurrency(records: Iterable[RequestRecord]) -> tuple[list[float], list[int]]:
    """Moments, and the number of open requests from each on. A request that ends as another starts is not counted with
    it.
    """
    changes = sorted(
        itertools.chain.from_iterable(((record.moments.start, 1), (record.end, -1)) for record in records),
    )
    return [moment for moment, _ in changes], list(itertools.accumulate(change for _, change in changes))


def token_times(records: Iterable[RequestRecord]) -> tuple[list[float], list[float]]:
    """Moments of output, and the number of tokens at each. If chunks have no counts, a request's tokens are spread
    evenly.
    """
    moments: list[float] = []
    tokens: list[float] = []
    for record in records:
        moments += record.arrivals
        share = record.output_len / max(sum(record.tokens), 1)
        tokens += [count * share for count in record.tokens]
    return moments, tokens


def peak_token_rate(records: Iterable[RequestRecord]) -> float:
    """The maximum number of output tokens per second, in one-second windows from the first request on."""
    moments, tokens = token_times(records)
    if not moments:
        return 0.0
    begun = min(record.moments.start for record in records)
    seconds = np.floor(np.asarray(moments) - begun).astype(int)
    return float(np.bincount(seconds, weights=tokens).max())


def summarize(
    records: Sequence[RequestRecord],
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: dict[str, float],
) -> dict[str, Any]:
    """The metrics of a run."""
    good = [record for record in records if record.ok]
    begun = min(record.moments.start for record in records)
    duration = max(max(record.end for record in records) - begun, _SHORTEST_SECONDS)
    total_input = sum(record.prompt_len for record in good)
    total_output = sum(record.output_len for record in good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(is_good(record, goodput) for record in good) / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": peak_token_rate(good),
        "max_concurrent_requests": max(concurrency(records)[1]),
        "max_client_lag_ms": max(record.moments.sent - record.moments.start for record in records) * 1000,
    }
    values = samples(records)
    for name in metrics:
        result |= {f"{key}_{name}_ms": value for key, value in spread(values[name], percentiles).items()}
    return result


def details(records: Sequence[RequestRecord], begun: float) -> dict[str, list[Any]]:
    """One value for each request, in seconds; `start_times` counts from the start of the run."""
    return {
        "input_lens": [record.prompt_len for record in records],
        "output_lens": [record.output_len if record.ok else 0 for record in records],
        "ttfts": [record.ttft if record.ok else 0.0 for record in records],
        "itls": [record.itls for record in records],
        "latencies": [record.latency for record in records],
        "start_times": [record.moments.start - begun for record in records],
        "queue_times": [record.moments.start - record.moments.scheduled for record in records],
        "generated_texts": ["".join(record.texts) for record in records],
        "errors": [record.error for record in records],
    }
