"""The counts of adapters in the table of all API processes (`quire.server.client.metrics`).

As for API keys, a process counts in rows of its own, which have the names of adapters; if there are too many, new ones
get the rows of names that no adapter has any more, and the last row has the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quire.server.client.http_metrics import NAME_CELLS, NamedRows

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Bounds of the buckets of durations."""
COUNTS = (
    ("adapter_requests", "Finished requests with an adapter."),
    ("adapter_prompt_tokens", "Prompt tokens of finished requests with an adapter."),
    ("adapter_generation_tokens", "Generated tokens of finished requests with an adapter."),
)
"""Counters by adapter: name, and help."""

_MAX_ADAPTERS = 128
_RUNNING, _WAITING, _COUNTS = 0, 1, 2
_BUCKETS = _COUNTS + len(COUNTS)
_WIDTH = _BUCKETS + len(SECONDS) + 2
_FAILED, _LOADS = 0, 1
_ROWS_AT = _LOADS + len(SECONDS) + 2
CELLS = _ROWS_AT + _MAX_ADAPTERS * (NAME_CELLS + _WIDTH)
"""The number of cells of a process. Memory that is not used is not allocated."""


@dataclass
class AdapterTotals:
    """The counts of all processes."""

    failed: float = 0.0
    """Adapters that could not be loaded."""
    loads: list[float] = field(default_factory=lambda: [0.0] * (len(SECONDS) + 2))
    """Durations of loading, as a histogram and a sum."""
    running: dict[str, float] = field(default_factory=dict)
    """Requests by adapter that have an output."""
    waiting: dict[str, float] = field(default_factory=dict)
    """Requests by adapter that have none."""
    counts: dict[str, list[float]] = field(default_factory=dict)
    """Each of `COUNTS` by adapter."""
    first_tokens: dict[str, list[float]] = field(default_factory=dict)
    """Times to the first token by adapter, as a histogram and a sum."""


class AdapterMetrics:
    """The counts of one API process."""

    def __init__(self, cells: memoryview[float]) -> None:
        """`cells` are the `CELLS` of the process."""
        self._all, self._cells = cells[:_ROWS_AT], cells[_ROWS_AT:]
        self._rows = NamedRows(self._cells, _MAX_ADAPTERS, _WIDTH)
        self.is_named: Callable[[str], bool] = lambda name: True
        """Whether an adapter has the name."""

    def _row(self, name: str) -> int:
        return self._rows.at(name, self._is_free)

    def _is_free(self, name: str, row: int) -> bool:
        return not (self.is_named(name) or self._cells[row + _RUNNING] or self._cells[row + _WAITING])

    def load(self, seconds: float) -> None:
        """Count an adapter that was loaded."""
        self._all[_LOADS + bisect_left(SECONDS, seconds)] += 1
        self._all[_ROWS_AT - 1] += seconds

    def fail(self) -> None:
        """Count an adapter that could not be loaded."""
        self._all[_FAILED] += 1

    def add(self, name: str) -> None:
        """Count a request that waits for its first output."""
        self._cells[self._row(name) + _WAITING] += 1

    def start(self, name: str, seconds: float) -> None:
        """Count the first output of a request."""
        row, cells = self._row(name), self._cells
        cells[row + _WAITING] -= 1
        cells[row + _RUNNING] += 1
        cells[row + _BUCKETS + bisect_left(SECONDS, seconds)] += 1
        cells[row + _WIDTH - 1] += seconds

    def finish(self, name: str, num_prompt_tokens: int, num_tokens: int, *, has_started: bool) -> None:
        """Count the end of a request."""
        row, cells = self._row(name), self._cells
        cells[row + (_RUNNING if has_started else _WAITING)] -= 1
        for at, value in enumerate((1, num_prompt_tokens, num_tokens), row + _COUNTS):
            cells[at] += value

    def cut(self) -> None:
        """Forget the requests in progress. The process must have ended."""
        for _, row in self._rows:
            self._cells[row + _RUNNING] = self._cells[row + _WAITING] = 0

    @staticmethod
    def totals(processes: Iterable[AdapterMetrics]) -> AdapterTotals:
        """Return the sums over processes."""
        found = AdapterTotals()
        for each in processes:
            found.failed += each._all[_FAILED]
            found.loads = _sum(found.loads, each._all[_LOADS:_ROWS_AT].tolist())
            for name, row in each._rows:
                cells = each._cells[row : row + _WIDTH].tolist()
                found.running[name] = found.running.get(name, 0.0) + cells[_RUNNING]
                found.waiting[name] = found.waiting.get(name, 0.0) + cells[_WAITING]
                counts, seconds = cells[_COUNTS:_BUCKETS], cells[_BUCKETS:]
                found.counts[name] = _sum(found.counts.get(name, [0.0] * len(counts)), counts)
                found.first_tokens[name] = _sum(found.first_tokens.get(name, [0.0] * len(seconds)), seconds)
        return found


def _sum(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]
