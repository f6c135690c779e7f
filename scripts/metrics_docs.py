"""docs/reference/metrics.md from the metrics that a server exports; `scripts/docs` writes it."""

from __future__ import annotations

from array import array

from markdown_table import code, table
from prometheus_client.metrics_core import Metric

from quire.engine.protocol.stats import ExpertLoad, RankTimes
from quire.server.frontend.metrics import FINISH_REASONS, STATES, Metrics

INTRODUCTION = """# Metrics

`GET /metrics` returns these metrics in Prometheus text format. `scripts/docs` generates this page from the code, and a
test fails if it is out of date. [Monitoring](../guides/monitoring.md) says which ones to watch.

Names follow vLLM's, with the prefix `quire:` instead of `vllm:`. With `--api-server-count` above 1, every process
returns the sum over all of them.
"""


def render() -> str:
    """The page as Markdown."""
    metrics = Metrics("MODEL")
    metrics.state(0, "up")
    plain = list(metrics.collect())
    metrics.expert_load = ExpertLoad(layers={0: 1}, tokens=array("q", [1]).tobytes(), imbalance=1.0, moved=0)
    known = {metric.name for metric in plain}
    experts = [metric for metric in metrics.collect() if metric.name not in known]
    metrics.expert_load, metrics.rank_times = None, {0: [RankTimes()]}
    metrics.state(0, "up")
    ranks = [metric for metric in metrics.collect() if metric.name not in known]
    histograms = [metric for metric in plain if metric.type == "histogram"]
    return "\n".join(
        [
            INTRODUCTION,
            "## All models\n",
            _table(plain),
            f"`finished_reason` is one of {_values(FINISH_REASONS)}. `state` is one of {_values(STATES[1:])}. "
            "`engine` is the number of the replica.\n",
            "## Several ranks\n",
            "On CPUs only. `rank` is the number of the rank in its replica. [Reliability](../design/reliability.md#"
            "stragglers) says how stragglers are found.\n",
            _table(ranks),
            "## Mixtures of experts\n",
            "With `--enable-expert-parallel` only. Models with very many experts have no `quire:expert_tokens`.\n",
            _table(experts),
            "## Buckets\n",
            "Upper bounds of the histograms' buckets, in seconds:\n",
            table(("histogram", "buckets"), [(code(metric.name), _buckets(metric)) for metric in histograms]),
        ]
    )


def _table(metrics: list[Metric]) -> str:
    rows = (
        (
            code(metric.name + ("_total" if metric.type == "counter" else "")),
            metric.type,
            _labels(metric),
            metric.documentation,
        )
        for metric in metrics
    )
    return table(("metric", "type", "labels", ""), rows)


def _labels(metric: Metric) -> str:
    names = dict.fromkeys(name for sample in metric.samples for name in sample.labels if name != "le")
    return ", ".join(map(code, names))


def _buckets(metric: Metric) -> str:
    return ", ".join(
        f"{float(sample.labels['le']):g}".replace("inf", "+Inf") for sample in metric.samples if "le" in sample.labels
    )


def _values(names: tuple[str, ...]) -> str:
    return ", ".join(map(code, names))


if __name__ == "__main__":
    print(render())
