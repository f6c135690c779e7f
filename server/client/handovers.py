"""Hand-overs: one replica computes the prompt of a request, and another one, its *successor*, expects and continues
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from quire.engine.protocol.engine_core import AbortRequests, EngineCoreOutput, EngineCoreRequest, ToCore
from quire.server.client.metrics import Metrics
from quire.server.client.router import Router
from quire.server.client.running_request import RunningRequest


class HandOvers:
    """Owns `RunningRequest.successor` and `handed_over_at`: tells replicas which requests to expect, and counts
    hand-overs."""

    def __init__(
        self,
        running: Mapping[str, RunningRequest],
        metrics: Metrics,
        send: Callable[[ToCore, int], None],
        peer_between: Callable[[int, int], str],
    ) -> None:
        """`running` are the unfinished requests; `send` sends a message to a replica. `peer_between(a, b)` returns the
        address at which the host of replica b reads the KV store of replica a; empty: they share a store, or it is not
        known."""
        self._running, self._metrics, self._send, self._peer_between = running, metrics, send, peer_between
        self.router: Router | None = None
        """None: there has been only one replica."""

    def expect(self, running: RunningRequest, successor: int | None) -> None:
        """Make replica `successor` expect a request that was placed, and no other replica."""
        former, running.successor = running.successor, successor
        request_id = running.submit.request_id
        if former is not None and former not in (successor, running.replica):
            self._send(AbortRequests([request_id]), former)
            running.leaving.add(former)
        if running.placed is not None and successor not in (None, former):
            media = [msgspec.structs.replace(item, data=None) for item in running.placed.media]
            expected = msgspec.structs.replace(running.placed, hands_over=False, is_expected=True, media=media)
            self._send(self._with_peer(expected, running, successor), successor)

    def forget_successor(self, replica: int) -> None:
        """Let no request continue on this replica after its first token."""
        for request_id, running in self._running.items():
            if running.successor == replica:
                self.expect(running, None)
                if self.router is not None:
                    self.router.forget_successor(request_id)

    def take(self, running: RunningRequest) -> EngineCoreRequest:
        """Note that a request is being sent to its successor; returns the message."""
        assert self.router is not None
        assert running.successor is not None
        self.router.hand_over(running.submit.request_id)
        request = self._with_peer(running.resume_request, running, running.successor)
        running.successor, running.num_resumed = None, len(running.delivered)
        return request

    def _with_peer(self, request: EngineCoreRequest, running: RunningRequest, successor: int) -> EngineCoreRequest:
        """Add the address of the KV store that has the prompt to the message to the successor of a request."""
        assert running.replica is not None
        peer = self._peer_between(running.replica, successor)
        return msgspec.structs.replace(request, kv_peer=peer) if peer else request

    def on_handed_over(self, running: RunningRequest, replica: int, now: float) -> None:
        """Count a request that this replica has handed over, once it has been sent on. It does not count if it stays or
        waits, or if the next replica will hand it over, too."""
        if running.replica not in (None, replica) and running.successor is None:
            running.handed_over_at = now
            self._metrics.count(replica, "requests_handed_over", 1)

    def on_output(self, running: RunningRequest, output: EngineCoreOutput, replica: int, now: float) -> None:
        """Count the first output after a hand-over."""
        if running.handed_over_at is None or not output.token_ids:
            return
        seconds = now - running.handed_over_at
        self._metrics.observe(replica, "handover_time_seconds", seconds)
        num_prompt_tokens, running.handed_over_at = len(running.submit.prompt_token_ids), None
        self._metrics.count(replica, "handed_over_tokens", output.num_cached_tokens)
        recomputed = max(0, num_prompt_tokens - output.num_cached_tokens)
        self._metrics.count(replica, "handed_over_tokens_recomputed", recomputed)
        if self.router is not None:
            self.router.on_continued(output.request_id, recomputed, seconds)
