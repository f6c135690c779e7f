"""The rows in flight of requests with drafts: how far each request has moved is known only with their results."""

from __future__ import annotations

from quire.engine.scheduler.request import Request


class DraftsInFlight(dict[Request, list[int]]):
    """The number of drafts of each row in flight, oldest first, of the requests that have drafts or chained rows.

    `Request.num_computed_tokens` counts all of these drafts, and so is an upper bound until the results arrive. The
    number of drafts is exact only for the oldest row. A row behind it is chained (`CachedRequestData.is_chained`): its
    drafts are made at the end of the step before it, and may be fewer than was planned.

    Invariant (`check_integrity`): a request has moved past its known tokens by one token and the drafts of each row.
    """

    def num_drafts(self, request: Request) -> int:
        """Return the maximum number of drafts in flight of a request."""
        return sum(self.get(request, ()))

    def add(self, request: Request, num_drafts: int) -> None:
        """Add a row before the request moves past its tokens; a row in flight without drafts becomes the first one."""
        if request not in self:
            self[request] = [0] * (request.num_computed_tokens + 1 - len(request.token_ids))
        self[request].append(num_drafts)

    def on_result(self, request: Request, num_made: int) -> tuple[int, int]:
        """Remove the oldest row, at whose end `num_made` drafts were made.

        Returns its number of drafts, and by how many fewer than planned the next row has. If no draft is left in
        flight, the request is removed: how far its rows move it is known.
        """
        rows = self[request]
        num_drafts, missing = rows.pop(0), 0
        if rows:
            missing = rows[0] - min(rows[0], num_made)
            rows[0] -= missing
        if not any(rows):
            del self[request]
        return num_drafts, missing

    def check_integrity(self, num_in_flight: int) -> None:
        """Assert the invariant, for this many plans in flight."""
        for request, rows in self.items():
            assert 0 < len(rows) <= num_in_flight
            assert request.num_computed_tokens == len(request.token_ids) - 1 + len(rows) + sum(rows)
