"""How far a draft model is behind the requests that it drafts for.

In steps without the model, requests move on, and the model must compute the missed tokens before it drafts for them.
The workers do so in the first steps in which it runs again, `CATCH_UP_TOKENS` in each, the first rows first
(`quire.engine.worker.drafter.DraftModel`). This module counts how far they are, so that the cost is known in advance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.protocol.scheduler_output import CATCH_UP_TOKENS
from quire.engine.scheduler.request import Request


class CatchUp:
    """Owns `Request.num_drafter_tokens`."""

    def __init__(self, max_behind: int) -> None:
        """`max_behind`: tokens farther behind the newest one are skipped, as the model's windows end there."""
        self._max_behind = max_behind
        self._in_flight: dict[int, int] = {}
        """By step in flight, the tokens that it computes for rows that are behind."""

    def run(self, step: int, rows: Iterable[tuple[Request, int]]) -> None:
        """Record that the model runs at the end of a step with these rows, of so many tokens each."""
        left = CATCH_UP_TOKENS
        for request, count in rows:
            end = request.num_computed_tokens + (not request.num_pending_tokens)
            first = request.num_computed_tokens - count
            start = max(min(request.num_drafter_tokens, first + 1), first + 1 - self._max_behind)
            if end - start > count + 1:
                num_computed = min(max(left, 0), end - start)
                left -= end - start
                end = start + num_computed
            request.num_drafter_tokens = end
        if left < CATCH_UP_TOKENS:
            self._in_flight[step] = CATCH_UP_TOKENS - max(left, 0)

    def in_step(self, step: int) -> int:
        """Return the tokens that a step in flight computes for rows that are behind."""
        return self._in_flight.get(step, 0)

    def finish(self, step: int) -> None:
        """Forget a step whose result has arrived."""
        self._in_flight.pop(step, None)

    def behind(self, requests: Sequence[Request]) -> list[tuple[int, int]]:
        """Return, for each of these requests, which have rows in this order, the known tokens that the model lacks, and
        the number of steps before the model can draft for the request, if it runs from now on."""
        found, total = [], 0
        for request in requests:
            lag = min(len(request.token_ids) - 1 - request.num_drafter_tokens, self._max_behind)
            if lag > 0:
                total += lag
                found.append((lag, (total - 1) // CATCH_UP_TOKENS))
            else:
                found.append((0, 0))
        return found
