"""Which requests may wait for the engine, besides those that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from quire.engine.protocol.stats import EngineStats
from quire.server.client.fair_share import SHARE, Share


class QueueFull(RuntimeError):
    """Too many requests are waiting for the engine."""


class Admission:
    """The limit of waiting requests, and with fair sharing, how many each share has."""

    def __init__(self, max_num_seqs: int, max_queue: int | None) -> None:
        """Requests that run at once on a replica, and those that may wait; None: any number."""
        self._max_num_seqs, self._max_queue = max_num_seqs, max_queue
        self._num_waiting: Counter[Share] = Counter()
        """Requests without output, with fair sharing."""

    def check(self, num_open: int, stats: Collection[EngineStats]) -> None:
        """Raise `QueueFull` if no more may wait, given the number of this process's open requests and the newest stats
        of the replicas.

        A request counts as waiting if its replica's newest stats do not count it as running. If these stats count none
        as waiting, each free place in the running batch admits one more. The queue is never full while this process has
        no open requests, as the stats may be outdated then.

        Each API process counts its own open requests, and takes the other processes' from the stats that the engine
        last sent to any of them. So several processes may accept more requests between two steps than one would.

        With fair sharing, a share may always have its part of the queue, also if others have filled it.
        """
        if self._max_queue is None or not num_open:
            return
        # The second sum includes other processes' requests.
        num_open = max(num_open, sum(each.running + each.waiting for each in stats))
        num_waiting = num_open - sum(each.running if each.waiting else self._max_num_seqs for each in stats)
        if num_waiting < self._max_queue:
            return
        share = SHARE.get()
        weights = dict([*self._num_waiting, share])
        part = self._max_queue * share.weight / sum(weights.values()) if share.key else 0.0
        if self._num_waiting[share] >= part:
            raise QueueFull(f"{max(0, num_waiting)} requests are waiting already, the maximum is {self._max_queue}")

    def add(self, share: Share, count: int) -> None:
        """Requests were submitted."""
        if share.key:
            self._num_waiting[share] += count

    def start(self, share: Share) -> None:
        """A request has its first output, or has ended without one."""
        if share.key:
            self._num_waiting[share] -= 1
            if not self._num_waiting[share]:
                del self._num_waiting[share]

    def clear(self) -> None:
        """All requests have ended."""
        self._num_waiting.clear()
