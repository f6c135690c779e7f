"""The counts of HTTP requests in the table of all API processes (`quire.server.client.metrics`).

A process counts in rows of its own, one for each route and for each API key. Rows have names, so that processes need
not agree on them: a reader adds up the rows of the same name. A process that dies leaves the number of its requests in
progress, which were cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import NamedTuple

REASONS = (
    *("auth", "invalid", "too_large", "not_found", "conflict", "client_timeout", "client_closed"),
    *("queue_full", "overloaded", "loading", "draining", "unavailable"),
    *("timeout", "aborted", "failed", "internal", "cut"),
)
"""Why requests are refused or fail."""
CUT = 0
"""In place of the status of a request whose process has ended."""
STATUSES = (CUT, *sorted({*map(int, HTTPStatus), 499}))
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bounds of the buckets of durations. These have all buckets of vLLM's."""
NO_ROUTE = "none none"
"""Method and route of requests for unknown paths or with unknown methods, and of connections that are refused."""

_STATUS_AT = {status: at for at, status in enumerate(STATUSES)}
_REASON_AT = {reason: at for at, reason in enumerate(REASONS)}
NAME_CELLS = 16
_MAX_ROUTES = 96
_MAX_KEYS = 256
_OTHERS = b"others"
"""Name of the last row, if there are too many."""


class NamedRows:
    """Rows of `width` cells with names, `count` at most; a cell has 8 bytes."""

    def __init__(self, cells: memoryview[float], count: int, width: int) -> None:
        self._bytes, self._count, self._step = cells.cast("B"), count, NAME_CELLS + width
        self._at: dict[str, int] = {}

    def at(self, name: str, is_free: Callable[[str, int], bool] = lambda name, at: False) -> int:
        """Return where the cells of a row begin; it is made if there is none. If there are too many, it is one that
        `is_free`, which gets its name and where it begins, or else the last one, which all others share.
        """
        if name not in self._at:
            rows, encoded = dict(self), name.encode(errors="replace")[: 8 * NAME_CELLS]
            at = rows.get(encoded.decode(errors="replace"), len(rows) * self._step + NAME_CELLS)
            if at not in rows.values() and len(rows) >= self._count - 1:
                others = rows.pop(_OTHERS.decode(), at)
                free = next((at for other, at in rows.items() if is_free(other, at)), None)
                if free is None:
                    at, encoded = others, _OTHERS
                else:
                    at = free
                    self._at = {each: own for each, own in self._at.items() if own != at}
                    self._bytes[8 * at : 8 * (at - NAME_CELLS + self._step)] = bytes(8 * (self._step - NAME_CELLS))
            self._at[name] = at
            self._bytes[8 * (at - NAME_CELLS) : 8 * at] = encoded.ljust(8 * NAME_CELLS, b"\0")
        return self._at[name]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """The names of the rows, and where their cells begin."""
        for start in range(0, self._count * self._step, self._step):
            name = bytes(self._bytes[8 * start : 8 * (start + NAME_CELLS)]).rstrip(b"\0")
            if not name:
                return
            yield name.decode(errors="replace"), start + NAME_CELLS


# The row of a route begins with its requests in progress. There follow:
_STATUSES = 1
_BUCKETS = _STATUSES + len(STATUSES)
_SUM = _BUCKETS + len(SECONDS) + 1
_ROUTE_WIDTH = _SUM + 1
_KEY_WIDTH = 3
_ROUTES_AT = len(REASONS)
_KEYS_AT = _ROUTES_AT + _MAX_ROUTES * (NAME_CELLS + _ROUTE_WIDTH)
CELLS = _KEYS_AT + _MAX_KEYS * (NAME_CELLS + _KEY_WIDTH)
"""The number of cells of a process. Memory that is not used is not allocated."""


class HttpTotals(NamedTuple):
    """The counts of all processes."""

    reasons: dict[str, float]
    """Requests that were refused or failed, by each of `REASONS`."""
    statuses: dict[str, list[float]]
    """Requests by `METHOD ROUTE`, and by each of `STATUSES`."""
    seconds: dict[str, list[float]]
    """Durations by `METHOD ROUTE`, as a histogram and a sum."""
    keys: dict[str, list[float]]
    """Requests, prompt tokens and generated tokens, by the name of the API key."""


class HttpMetrics:
    """The counts of one API process."""

    def __init__(self, cells: memoryview[float]) -> None:
        """`cells` are the `CELLS` of the process."""
        self._reasons = cells[:_ROUTES_AT]
        self._route_cells = cells[_ROUTES_AT:_KEYS_AT]
        self._routes = NamedRows(self._route_cells, _MAX_ROUTES, _ROUTE_WIDTH)
        self._key_cells = cells[_KEYS_AT:]
        self._keys = NamedRows(self._key_cells, _MAX_KEYS, _KEY_WIDTH)

    def row(self, route: str) -> int:
        """Return the row of `METHOD ROUTE`, for `begin` and `end`."""
        return self._routes.at(route)

    def begin(self, row: int) -> None:
        """Count a request in progress."""
        self._route_cells[row] += 1

    def end(self, row: int, status: int, seconds: float) -> None:
        """Count the end of a request."""
        cells = self._route_cells
        cells[row] -= 1
        cells[row + _STATUSES + _STATUS_AT.get(status, _STATUS_AT[500])] += 1
        cells[row + _BUCKETS + bisect_left(SECONDS, seconds)] += 1
        cells[row + _SUM] += seconds

    def fail(self, reason: str, count: float = 1) -> None:
        """Count requests that were refused or have failed."""
        self._reasons[_REASON_AT[reason]] += count

    def use_key(self, name: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Count a request with an API key."""
        row, cells = self._keys.at(name), self._key_cells
        for at, value in enumerate((1, num_prompt_tokens, num_tokens), row):
            cells[at] += value

    def cut(self) -> int:
        """Count the requests in progress as cut, and return their number. The process must have ended."""
        total, cells = 0, self._route_cells
        for _, row in self._routes:
            count, cells[row] = cells[row], 0
            cells[row + _STATUSES + _STATUS_AT[CUT]] += count
            total += int(count)
        self.fail("cut", total)
        return total

    @staticmethod
    def failed(processes: Iterable[HttpMetrics]) -> list[float]:
        """Return the requests that were refused or have failed, by each of `REASONS`, summed over processes."""
        return [sum(counts, 0.0) for counts in zip(*(each._reasons.tolist() for each in processes), strict=True)]

    @staticmethod
    def totals(processes: Iterable[HttpMetrics]) -> HttpTotals:
        """Return the sums over processes."""
        processes = list(processes)
        found = HttpTotals(dict(zip(REASONS, HttpMetrics.failed(processes), strict=True)), {}, {}, {})
        for each in processes:
            for name, row in each._routes:
                cells = each._route_cells[row : row + _ROUTE_WIDTH].tolist()
                _add(found.statuses, name, cells[_STATUSES:_BUCKETS])
                _add(found.seconds, name, cells[_BUCKETS:])
            for name, row in each._keys:
                _add(found.keys, name, each._key_cells[row : row + _KEY_WIDTH].tolist())
        return found


def _add(sums: dict[str, list[float]], name: str, values: Sequence[float]) -> None:
    sums[name] = [sum(each) for each in zip(sums[name], values, strict=True)] if name in sums else list(values)
