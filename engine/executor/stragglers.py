"""Notices stragglers: ranks that are persistently slower than the others of their stage, which wait for them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from msgspec.structs import replace

from quire.engine.protocol.stats import RankStats

logger = logging.getLogger("quire.engine.executor.stragglers")

_WINDOW_SECONDS = 5.0
"""Ranks are compared each time one of them has computed for this long."""
_NUM_WINDOWS = 3
"""Windows in a row after which a rank becomes a straggler, or is one no longer."""
_SLOW, _RECOVERED = 1.25, 1.15
"""A rank is slow if its computing time is this many times the median of the others, and has recovered below the
second."""


class StragglerDetector:
    """Compares the ranks that share each layer. Stages are not compared, as their times depend on how the layers are
    split; nor ranks that divide the tokens of steps, as later tokens attend to more keys.

    All ranks of such a group do the same work, and end a step at the same time. So the slower one hardly waits for
    others, and the others wait for it.
    """

    def __init__(self, width: int, name: Callable[[list[int]], str]) -> None:
        """`width` is the number of ranks that share a layer; `name` returns the names of ranks for log messages."""
        self._width, self._name = width, name
        self._stragglers: set[int] = set()
        self._starts: dict[int, RankStats] = {}
        """By rank: its times at the start of the window."""
        self._contrary: Counter[int] = Counter()
        """By rank: the number of windows in a row that contradict the present verdict."""

    def update(self, times: Sequence[RankStats]) -> list[RankStats]:
        """Mark the stragglers, given the present stats of all ranks. Logs when a rank becomes one, and when it has
        recovered."""
        for first in range(0, len(times) if self._width > 1 else 0, self._width):
            ranks = range(first, first + self._width)
            starts = [self._starts.setdefault(rank, times[rank]) for rank in ranks]
            steps = [times[rank].steps - start.steps for rank, start in zip(ranks, starts, strict=True)]
            busy = [times[rank].busy - start.busy for rank, start in zip(ranks, starts, strict=True)]
            if max(busy) < _WINDOW_SECONDS or not all(steps):
                continue
            per_step = [seconds / count for seconds, count in zip(busy, steps, strict=True)]
            for place, rank in enumerate(ranks):
                self._starts[rank] = times[rank]
                self._judge(rank, per_step[place], median(per_step[:place] + per_step[place + 1 :]))
        return [replace(each, is_straggler=rank in self._stragglers) for rank, each in enumerate(times)]

    def _judge(self, rank: int, seconds: float, others: float) -> None:
        """Judge a rank by the seconds per step for which it has computed, and the median of the others."""
        is_straggler = rank in self._stragglers
        is_contrary = seconds < _RECOVERED * others if is_straggler else seconds >= _SLOW * others
        self._contrary[rank] = is_contrary * (self._contrary[rank] + 1)
        if self._contrary[rank] < _NUM_WINDOWS:
            return
        self._contrary[rank] = 0
        self._stragglers ^= {rank}
        if is_straggler:
            logger.info("%s is no longer slower than the other ranks of its stage", self._name([rank]))
            return
        logger.warning(
            "%s is slower than the other ranks of its stage, which wait for it: it computes for %.1f ms in a step, "
            "they for %.1f ms; look for other processes on its cores, and for throttled or slower cores",
            self._name([rank]),
            1e3 * seconds,
            1e3 * others,
        )
