"""Requests that may be the cause of the deaths of their replicas."""

from __future__ import annotations

from collections.abc import Mapping

from quire.server.client.running_request import CLEARING_TOKENS, RunningRequest

MAX_DEATHS = 2
"""Deaths of its replicas after which a request is suspected to be their cause."""
_SAME_MOMENT_SECONDS = 1.0
"""Replicas that die within this time count as one death: no engine restarts so soon."""


class Suspects:
    """Finds out which request causes deaths.

    A request whose replicas have died `MAX_DEATHS` times in a row, while it hardly made progress, is a suspect. If it
    is the only one, it is the cause. Several suspects run one at a time, the oldest one first.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._ids: list[str] = []

    def waits(self, request_id: str) -> bool:
        """Whether a request must not run now: it is a suspect, and another one runs."""
        return request_id in self._ids[1:]

    def on_death(self, lost: Mapping[str, RunningRequest], now: float) -> RunningRequest | None:
        """Record the death of the replica of these requests; returns the one that has caused it, if that is known."""
        for place, (request_id, running) in enumerate(lost.items()):
            if running.last_output is None and place >= self._max_num_seqs:
                continue  # it has not run yet
            if now - running.died_at < _SAME_MOMENT_SECONDS:
                continue  # it was sent to a replica that was dying, too
            running.died_at = now
            running.num_deaths += 1
            if running.num_deaths >= MAX_DEATHS and request_id not in self._ids:
                self._ids.append(request_id)
        first = lost.get(self._ids[0]) if self._ids else None
        return first if first is not None and (len(self._ids) == 1 or first.num_deaths > MAX_DEATHS) else None

    def on_tokens(self, request_id: str, running: RunningRequest) -> str | None:
        """Forget the deaths of a request's replicas once it has made progress; returns the suspect that runs next, if
        another one may."""
        if len(running.delivered) - running.num_resumed < CLEARING_TOKENS:
            return None
        running.num_deaths = 0
        return self.clear(request_id)

    def clear(self, request_id: str) -> str | None:
        """A request has ended, or is no suspect any more. Returns the suspect that runs next, if another one may."""
        if request_id not in self._ids:
            return None
        was_first = self._ids[0] == request_id
        self._ids.remove(request_id)
        return self._ids[0] if was_first and self._ids else None

    def forget(self) -> None:
        """All requests have ended."""
        self._ids.clear()
