"""The plan of a step while it is made: its rows, and what the workers do not know yet of their requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.scheduler.request import Request


class PlanBuilder:
    """Adds rows to a plan. Each method sends changes of a request once. The methods for requests that the workers have
    expect them to have been moved forward."""

    def __init__(
        self,
        step: int,
        max_rows: int = 0,
        tokens_left: int = 0,
        *,
        is_chunked: bool = True,
        workers_keep_tokens: bool = True,
    ) -> None:
        self.output = SchedulerOutput(step=step, freed_slots=[], new=[], scheduled=[])
        self.max_rows, self.tokens_left, self.max_chunk = max_rows, tokens_left, tokens_left
        """The limits of rows, of further tokens, and of the tokens of one prompt, set by the caller."""
        self._is_chunked, self._workers_keep_tokens = is_chunked, workers_keep_tokens
        self.decodes: list[Request] = []
        """Rows of `SchedulerOutput.decodes`."""
        self.changed: list[Request] = []
        """Rows of `SchedulerOutput.scheduled`."""

    @property
    def rows(self) -> list[Request]:
        return self.decodes + self.changed

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.changed)

    @property
    def is_full(self) -> bool:
        return not self.tokens_left or self.num_rows >= self.max_rows

    def chunk(self, request: Request) -> int:
        """Return how many of the pending tokens fit; without chunked prefill all or none."""
        pending = request.num_pending_tokens
        if self._is_chunked:
            return min(pending, self.tokens_left, self.max_chunk)
        return pending if pending <= self.tokens_left else 0

    def add_decode(self, request: Request, count: int, new_blocks: list[int], drafts: Sequence[int] = ()) -> None:
        """Add a decode of `count` tokens, of which the last ones are drafts."""
        self.changed.append(request)
        self.output.scheduled.append(self._decode(request, count, new_blocks, drafts))

    def _decode(self, request: Request, count: int, new_blocks: list[int], drafts: Sequence[int]) -> CachedRequestData:
        assert request.slot is not None
        new_tokens = request.unsent_to_workers or ([] if self._workers_keep_tokens else request.token_ids[-1:])
        row = CachedRequestData(request.slot, count, new_tokens, new_blocks, [*drafts], request.num_accepted)
        request.unsent_to_workers, request.num_accepted = [], 0
        return row

    def add_chained(self, request: Request, count: int, new_blocks: list[int]) -> None:
        """Add a row that continues where the one in flight ends, of at most `count` tokens."""
        assert request.slot is not None
        assert not request.unsent_to_workers
        self.changed.append(request)
        self.output.scheduled.append(CachedRequestData(request.slot, count, [], new_blocks, is_chained=True))

    def add_chunk(self, request: Request, count: int, new_blocks: list[int]) -> None:
        """Add a row of known tokens, within the limits."""
        assert request.slot is not None
        self.changed.append(request)
        self.output.scheduled.append(CachedRequestData(request.slot, count, request.unsent_to_workers, new_blocks))
        if request.unsent_to_workers:
            request.unsent_to_workers = []
        self.tokens_left -= count

    def add_new(self, request: Request, block_table: list[int]) -> None:
        """Send a whole request, before its first row."""
        assert request.slot is not None
        request.unsent_to_workers = []
        params = request.core_request.params
        if params.predicted_token_ids:  # which only the scheduler reads
            params = msgspec.structs.replace(params, predicted_token_ids=[])
        self.output.new.append(
            NewRequestData(
                slot=request.slot,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=block_table,
                params=params,
                num_scored_tokens=request.num_scored_tokens,
                second_segment=request.core_request.second_segment,
            )
        )

    def add_blocks(self, blocks: Mapping[Request, list[int]]) -> None:
        """Give rows blocks for tokens beyond their own."""
        for request, row in zip(self.changed, self.output.scheduled, strict=True):
            row.new_block_ids += blocks.get(request, [])
        if moved := [request for request in self.decodes if request in blocks]:
            self.output.scheduled[:0] = [self._decode(request, 1, blocks[request], ()) for request in moved]
            self.changed[:0] = moved
            self.decodes = [request for request in self.decodes if request not in blocks]

    def finish(self) -> tuple[SchedulerOutput, list[Request]]:
        """Return the plan and the requests of its rows."""
        plan = self.output
        plan.decodes = [request.slot for request in self.decodes]  # type: ignore[misc]  # a decode has a slot
        if not self._workers_keep_tokens:
            plan.token_ids = [request.token_ids[-1] for request in self.decodes]
        return plan, self.rows
