"""The copies between devices and KV store that are planned, or that some rank has not answered yet."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from quire.engine.protocol.kv_store import KVCopied, KVCopy, KVCopyPlan, RemoteArena
from quire.engine.scheduler.plans_in_flight import PlansInFlight
from quire.engine.scheduler.request import Request

_RETRY_SECONDS = 20.0
"""Time after which a rank whose copies have failed is tried again with a load, if it has stored nothing since."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class CopyInFlight:
    """An entry that the ranks copy, and the references to its blocks."""

    planned: KVCopy
    arena: str
    ranks: set[int]
    """The ranks that have not answered yet."""
    has_failed: bool = False
    step: int = -1
    """The step that it runs beside; -1: it is in no plan."""
    request: Request | None = None
    """Set if `step` itself writes the blocks: the request that they belong to. The result of the step tells whether it
    succeeded."""

    @property
    def returns(self) -> bool:
        """Whether its blocks become free when it ends."""
        return True


class CopiesInFlight:
    """The copies by number, the oldest first; `plan` has the copies of the next plan."""

    def __init__(self, in_flight: PlansInFlight, world_size: int) -> None:
        self.by_number: dict[int, CopyInFlight] = {}
        self.plan = KVCopyPlan("")
        self.unmaps = False
        """Whether the next plan makes ranks unmap the arena."""
        self._in_flight, self._world_size = in_flight, world_size
        self._is_mapped = False
        """Whether ranks have an arena mapped."""
        self._oldest: CopyInFlight | None = None
        """The oldest copy, if the ranks have run its step."""
        self._copied_at = [-math.inf] * self._world_size
        """By rank: when it last answered, or when the oldest copy should have begun."""
        self._failed_at: dict[int, float] = {}
        """The ranks whose last copies have all failed, and when."""
        self._watched_at = -math.inf
        """When `hung_ranks` was last called."""

    @property
    def ranks(self) -> set[int]:
        """The ranks of the replica."""
        return {*range(self._world_size)}

    @property
    def has_changes(self) -> bool:
        """Whether the ranks have something to copy or to unmap."""
        return bool(self.plan.loads or self.plan.stores or self.plan.step_stores or self.unmaps)

    @property
    def are_failing(self) -> bool:
        """Whether some rank cannot copy at present: it may not reach the store. Its next stores tell when it can again,
        and no request waits for these."""
        return any(time.monotonic() - failed_at < _RETRY_SECONDS for failed_at in self._failed_at.values())

    def forget_arena(self) -> None:
        """Make ranks give back the memory of a store that may have ended."""
        self.unmaps = self._is_mapped
        self._failed_at.clear()

    def take_plan(self, arena: str, remote: RemoteArena | None) -> KVCopyPlan | None:
        """Return the copies for the current plan; None: there are none."""
        if not self.has_changes:
            return None
        plan, self.plan = self.plan, KVCopyPlan("")
        copies = (*plan.loads, *plan.stores, *plan.step_stores)
        for copy in copies:
            self.by_number[copy.number].step = self._in_flight.next_step
        self._is_mapped, self.unmaps = bool(copies), False
        plan.arena, plan.remote = (arena, remote) if self._is_mapped else ("", None)
        return plan

    def on_copied(self, message: KVCopied) -> Iterator[CopyInFlight]:
        """Process a rank's answer; yields the copies that all ranks have answered, which the caller removes."""
        self._copied_at[message.rank] = time.monotonic()
        if len(message.failed) < len(message.numbers):
            self._failed_at.pop(message.rank, None)
        elif message.failed:
            self._failed_at[message.rank] = time.monotonic()
        for number in message.numbers:
            if (copy := self.by_number.get(number)) is None:
                logger.warning("rank %d has reported a copy that is not in flight: %d", message.rank, number)
                continue
            copy.ranks.discard(message.rank)
            copy.has_failed |= number in message.failed
            if not copy.ranks:
                yield copy

    def hung_ranks(self, seconds: float) -> list[int]:
        """Return the ranks that have finished no copy for `seconds`, though they have run the step of the oldest copy.
        Must be called more often than that, after all answers that have arrived have been processed."""
        oldest, now = next(iter(self.by_number.values()), None), time.monotonic()
        if oldest is not None and not 0 <= oldest.step <= self._in_flight.last_finished:
            oldest = None
        late, self._watched_at = now - self._watched_at > seconds / 2, now
        if oldest is not self._oldest or late:  # this process was busy, or stopped like the ranks
            self._oldest, self._copied_at = oldest, [now] * self._world_size
        if oldest is None:
            return []
        return sorted(rank for rank in oldest.ranks if now - self._copied_at[rank] > seconds)

    def check_integrity(self) -> None:
        """Assert that planned copies are in flight."""
        assert not self.plan.step_stores, "only a plan with rows has these"
        assert {copy.number for copy in (*self.plan.loads, *self.plan.stores)} <= self.by_number.keys()
