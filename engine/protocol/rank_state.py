"""A rank's report while it runs, in memory that it shares with the process that has started it. No torch."""

from __future__ import annotations

import ctypes

from quire.engine.protocol.stats import GROUPS, RankStats, RankUsage


class RankState(ctypes.Structure):
    """Written by the rank."""

    progress: int
    """2 × step of the oldest plan in flight; if there is none, 2 × last step + 1."""
    heartbeat: float
    """Time of the rank's last sign of life, on the monotonic clock."""
    is_waiting: bool
    """Whether the rank waited for others at that time."""
    steps: int
    """Steps that are counted in `seconds` and `waited`: only steps on a CPU."""
    seconds: float
    """Duration of all steps."""
    waited: float
    """The part of `seconds` in which the rank waited for others."""
    communication: ctypes.Array[ctypes.c_double]
    """The part of `seconds` in communication, for each of `quire.engine.protocol.stats.GROUPS`."""

    _fields_ = (
        ("progress", ctypes.c_longlong),
        ("heartbeat", ctypes.c_double),
        ("is_waiting", ctypes.c_bool),
        ("steps", ctypes.c_longlong),
        ("seconds", ctypes.c_double),
        ("waited", ctypes.c_double),
        ("communication", ctypes.c_double * len(GROUPS)),
    )

    def stats(self, usage: RankUsage | None) -> RankStats:
        """Return the times, with the rank's `usage`."""
        return RankStats(self.steps, self.seconds, self.waited, communication=tuple(self.communication), usage=usage)
