"""The counts of images and videos, in a table that the media process writes, and API processes read.

The supervisor of the media process writes its state. The counts survive the process.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal, get_args

from quire.engine.protocol.media import MediaKind
from quire.server.client.table import map_table

MediaResult = Literal["loaded", "cached", "refused", "failed"]
"""What became of an item: it was fetched and processed, it was in the cache, the request is wrong, or the server has
failed.
"""
MediaState = Literal["loading", "up", "down", "failed"]
"""down: it has died, and is started again. failed: so has its last start."""

KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
RESULTS: tuple[MediaResult, ...] = get_args(MediaResult)
STATES: tuple[MediaState, ...] = get_args(MediaState)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Bounds of the buckets of durations."""

_STATE, _CACHE, _COUNTS = 0, 1, 2
_WIDTH = len(RESULTS) + len(SECONDS) + 2
"""Cells of a kind: the items by result, then a histogram with its sum."""
_CELLS = _COUNTS + len(KINDS) * _WIDTH


class MediaMetrics:
    """The table of a server, for its writers and its readers."""

    def __init__(self, path: str | None = None) -> None:
        """`path` is the file; None: the table is this process's own."""
        self._cells: memoryview[float] = memoryview(map_table(path, _CELLS)).cast("d")

    def count(self, kind: MediaKind, result: MediaResult, seconds: float) -> None:
        """Count an item, and the seconds that it took from its request; called by the media process."""
        start = _COUNTS + KINDS.index(kind) * _WIDTH
        self._cells[start + RESULTS.index(result)] += 1
        self._cells[start + len(RESULTS) + bisect_left(SECONDS, seconds)] += 1
        self._cells[start + _WIDTH - 1] += seconds

    @property
    def state(self) -> MediaState:
        """The state of the media process, which its supervisor sets."""
        return STATES[int(self._cells[_STATE])]

    @state.setter
    def state(self, state: MediaState) -> None:
        self._cells[_STATE] = STATES.index(state)

    @property
    def cache_bytes(self) -> float:
        """Bytes of processed items in shared memory, which the media process sets."""
        return self._cells[_CACHE]

    @cache_bytes.setter
    def cache_bytes(self, count: float) -> None:
        self._cells[_CACHE] = count

    def results(self, kind: MediaKind) -> list[float]:
        """Return the number of items by each of `RESULTS`."""
        start = _COUNTS + KINDS.index(kind) * _WIDTH
        return list(self._cells[start : start + len(RESULTS)])

    def seconds(self, kind: MediaKind) -> list[float]:
        """Return the histogram of the durations: the items in each bucket of `SECONDS`, and the sum."""
        start = _COUNTS + KINDS.index(kind) * _WIDTH
        return list(self._cells[start + len(RESULTS) : start + _WIDTH])
