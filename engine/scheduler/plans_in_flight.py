"""The plans whose results have not arrived yet."""

from __future__ import annotations

from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.request import Request


class PlansInFlight:
    """Numbers the plans, and keeps the requests of each until its result arrives. Results arrive in the same order."""

    def __init__(self) -> None:
        self.next_step = 0
        self.last_finished = -1
        """The last step whose result has arrived. A request with a later `last_step` is in flight."""
        self.rows: dict[int, list[Request]] = {}
        """The requests of each plan, row by row."""
        self.num_tokens = 0
        """Tokens of all plans in flight."""
        self._skipped_until = -1
        """After a failed step, the workers skip the plans in flight up to this step."""
        self._next_clears_failure = False
        """The next plan is the first one that the workers run after a failure."""

    def __len__(self) -> int:
        return len(self.rows)

    def contains(self, request: Request) -> bool:
        """Whether a plan in flight has a row of this request."""
        return request.last_step > self.last_finished

    def add(self, plan: SchedulerOutput, rows: list[Request]) -> None:
        """Add the next plan."""
        plan.clears_failure, self._next_clears_failure = self._next_clears_failure, False
        self.rows[plan.step] = rows
        self.num_tokens += plan.num_tokens
        self.next_step += 1

    def fail(self, step: int) -> list[Request] | None:
        """Record that the oldest plan has failed; returns the requests of the plans behind it, which the workers skip.

        None: the workers have skipped it, too.
        """
        if step <= self._skipped_until:
            return None
        self._skipped_until, self._next_clears_failure = self.next_step - 1, True
        return [*dict.fromkeys(request for later, rows in self.rows.items() if later > step for request in rows)]

    def finish(self, plan: SchedulerOutput) -> None:
        """Remove the oldest plan."""
        del self.rows[plan.step]
        self.last_finished = plan.step
        self.num_tokens -= plan.num_tokens
