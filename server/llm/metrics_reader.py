"""Metrics as objects, for programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

_PREFIX = "vllm:"
Labels = tuple[tuple[str, str], ...]


@dataclass
class Metric:
    """A metric of one set of labels; the classes derived from it have the value."""

    name: str
    """The name, without `_total` at the end."""
    labels: dict[str, str]
    """Such as `model_name`, and `engine`, the number of the replica."""


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int
    """The number."""


@dataclass
class Vector(Metric):
    """Numbers that only grow, by position: `vllm:spec_decode_num_accepted_tokens_per_pos`."""

    values: list[int]
    """The numbers."""


@dataclass
class Gauge(Metric):
    """A number that grows and shrinks."""

    value: float
    """The number."""


@dataclass
class Histogram(Metric):
    """The distribution of a value."""

    count: int
    """The number of observations."""
    sum: float
    """Their sum."""
    buckets: dict[str, int]
    """The number of observations up to each bound; the last bound is `+Inf`."""


def read_metrics(exposition: bytes) -> list[Metric]:
    """Return the metrics in a text of Prometheus that have vLLM's names."""
    from prometheus_client.parser import text_string_to_metric_families  # imports ssl and HTTP servers

    families = text_string_to_metric_families(exposition.decode())
    return [metric for family in families if family.name.startswith(_PREFIX) for metric in _metrics(family)]


def _metrics(family: Family) -> Iterator[Metric]:
    if family.type == "gauge":
        for sample in family.samples:
            yield Gauge(family.name, sample.labels, sample.value)
    elif family.type == "counter":
        by_position = defaultdict[Labels, dict[int, int]](dict)
        for sample in family.samples:
            labels = dict(sample.labels)
            if (position := labels.pop("position", None)) is None:
                yield Counter(family.name, labels, int(sample.value))
            else:
                by_position[tuple(labels.items())][int(position)] = int(sample.value)
        for key, values in by_position.items():
            yield Vector(family.name, dict(key), [values[at] for at in sorted(values)])
    elif family.type == "histogram":
        found = defaultdict[Labels, Histogram](lambda: Histogram(family.name, {}, 0, 0.0, {}))
        for sample in family.samples:
            labels = dict(sample.labels)
            bound = labels.pop("le", None)
            histogram = found[tuple(labels.items())]
            histogram.labels = labels
            if bound is not None:
                histogram.buckets[bound] = int(sample.value)
            elif sample.name.endswith("_count"):
                histogram.count = int(sample.value)
            else:
                histogram.sum = sample.value
        yield from found.values()
