"""The running requests: their slots, and which of them are in prefill and in decode."""

from __future__ import annotations

from quire.engine.scheduler.drafts_in_flight import DraftsInFlight
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_queue import discard, insert, order
from quire.engine.scheduler.structured_output import StructuredOutputManager


class RunningRequests(list[Request]):
    """All admitted requests, sorted by `Request.order`.

    One whose last token is in flight, or that waits for a grammar or for the result of its drafts, is neither in
    prefill nor in decode.
    """

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__()
        self.prefilling: list[Request] = []
        """Requests with known tokens that are not scheduled yet, sorted the same way."""
        self.decoding: list[Request] = []
        """Requests in decode, sorted the same way."""
        self.decode_context = 0
        """Sum of `num_computed_tokens` over `decoding`; callers that move a decode forward must update it."""
        self.free_slots = list(reversed(range(max_num_seqs)))
        self._freed_slots: list[int] = []
        """Slots that the next plan tells the workers to free."""

    def start(self, request: Request) -> None:
        """Give an admitted request a slot."""
        request.slot = self.free_slots.pop()
        request.share.count_running(1)
        insert(self, request)
        insert(self.prefilling, request)

    def stop(self, request: Request) -> None:
        """Take the slot of a request that has ended or is preempted."""
        assert request.slot is not None
        discard(self, request)
        discard(self.prefilling, request)
        self.end_decode(request)
        request.share.count_running(-1)
        self._freed_slots.append(request.slot)
        self.free_slots.append(request.slot)
        request.slot = None

    def take_freed_slots(self) -> list[int]:
        """Return the slots that the workers do not know to be free."""
        freed, self._freed_slots = self._freed_slots, []
        return freed

    def begin_decode(self, request: Request) -> None:
        """Count a request as a decode, which `Request.decode_until` must suit."""
        insert(self.decoding, request)
        self.decode_context += request.num_computed_tokens

    def end_decode(self, request: Request) -> None:
        """Count a request no longer as a decode, if it is one. Its `num_computed_tokens` must be as before."""
        if discard(self.decoding, request):
            self.decode_context -= request.num_computed_tokens

    def check_integrity(self, structured_output: StructuredOutputManager, drafts: DraftsInFlight) -> None:
        """Assert that slots and lists agree."""
        slots = [request.slot for request in self] + self.free_slots
        assert sorted(slots, key=lambda s: -1 if s is None else s) == list(range(len(slots)))
        for queue in (self, self.prefilling, self.decoding, structured_output.ready):
            assert queue == sorted(queue, key=order)
        queued = self.prefilling + self.decoding + structured_output.ready
        in_last_step = [r for r in self if r not in queued and r.grammar is None and r not in drafts]
        num_others = len(structured_output) + len(drafts)
        assert len(self.prefilling + self.decoding + in_last_step) + num_others == len(self)
        assert all(r.num_pending_tokens for r in self.prefilling)
        assert self.decode_context == sum(r.num_computed_tokens for r in self.decoding)
        assert all(r.num_computed_tokens == r.max_tokens - 1 for r in in_last_step)
