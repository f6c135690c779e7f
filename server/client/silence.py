"""Replicas from which nothing arrives: they get no new requests, and their requests move to others."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from quire.server.client.replica import Replica
from quire.server.client.running_request import RunningRequest

SILENT_SECONDS = 1.0
"""A replica from which nothing has arrived for this time gets no new requests, and those that have not begun move."""
MOVE_STREAMS_SECONDS = 3.0
"""The same for requests that have begun. Both are doubled each time that a request moves."""
CHECK_SECONDS = 0.1
"""Interval of checks."""

logger = logging.getLogger(__name__)


class SilenceCheck:
    """Finds silent replicas. They are several: requests could not move from a single one.

    A replica sends pulses as long as its loop makes progress (`quire.engine.core.heartbeats`). Time in which this
    process stood still does not count: there may be unread messages.
    """

    def __init__(self, replicas: Mapping[int, Replica], now: float) -> None:
        """`now` is the time on the clock of `Replica.heard_at`."""
        self._replicas = replicas
        self.checked_at = now
        """Time of the last check."""

    def update(self, now: float) -> dict[int, float]:
        """Mark the replicas that are silent. Must be called every `CHECK_SECONDS`; returns the seconds of their
        silence.
        """
        late = max(0.0, now - self.checked_at - 2 * CHECK_SECONDS)
        self.checked_at = now
        present = [replica for replica in self._replicas.values() if replica.state in ("up", "draining")]
        for replica in present:
            replica.heard_at = min(now, replica.heard_at + late)
            if now - replica.heard_at > SILENT_SECONDS and not replica.is_silent and len(present) > 1:
                replica.is_silent = True
                logger.warning("replica %d has not responded for %g s", replica.number, SILENT_SECONDS)
        return {replica.number: now - replica.heard_at for replica in present if replica.is_silent}


def must_move(running: RunningRequest, silence: float) -> bool:
    """Return whether a request leaves a replica that has been silent for so many seconds."""
    return silence > (MOVE_STREAMS_SECONDS if running.delivered else SILENT_SECONDS) * (1 << running.num_moves)
