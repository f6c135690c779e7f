"""The plan of a step while it is made: its rows, and the changes of their requests that the workers do not know yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from quire.engine.protocol.adapters import NO_SLOT
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.scheduler.request import Request


class PlanLimits(NamedTuple):
    """Limits of a whole plan, for the rows that are added next."""

    max_rows: int
    max_tokens: int
    max_chunk: int
    """Maximum tokens of one prompt."""


class PlanBuilder:
    """Adds rows to a plan. Each method sends changes of a request once. The methods for requests that the workers have
    expect them to have been moved forward."""

    def __init__(self, step: int, *, is_chunked: bool = True, workers_keep_tokens: bool = True) -> None:
        self.output = SchedulerOutput(step=step, freed_slots=[], new=[], scheduled=[])
        self._is_chunked, self._workers_keep_tokens = is_chunked, workers_keep_tokens
        self.decodes: list[Request] = []
        """Rows of `SchedulerOutput.decodes`."""
        self.changed: list[Request] = []
        """Rows of `SchedulerOutput.scheduled`."""
        self._num_changed_tokens = 0

    @property
    def rows(self) -> list[Request]:
        return self.decodes + self.changed

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.changed)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self._num_changed_tokens

    def is_full(self, limits: PlanLimits) -> bool:
        return self.num_tokens >= limits.max_tokens or self.num_rows >= limits.max_rows

    def chunk(self, request: Request, limits: PlanLimits) -> int:
        """Return how many of the pending tokens fit; without chunked prefill all or none."""
        pending, tokens_left = request.num_pending_tokens, limits.max_tokens - self.num_tokens
        if self._is_chunked:
            return min(pending, tokens_left, limits.max_chunk)
        return pending if pending <= tokens_left else 0

    def _add(self, request: Request, row: CachedRequestData) -> None:
        self.changed.append(request)
        self.output.scheduled.append(row)
        self._num_changed_tokens += row.num_tokens

    def add_decode(self, request: Request, count: int, new_blocks: list[int], drafts: Sequence[int] = ()) -> None:
        """Add a decode of `count` tokens, of which the last ones are drafts."""
        self._add(request, self._decode(request, count, new_blocks, drafts))

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
        self._add(request, CachedRequestData(request.slot, count, [], new_blocks, is_chained=True))

    def add_chunk(self, request: Request, count: int, new_blocks: list[int]) -> None:
        """Add a row of known tokens."""
        assert request.slot is not None
        self._add(request, CachedRequestData(request.slot, count, request.unsent_to_workers, new_blocks))
        request.unsent_to_workers = []

    def add_new(self, request: Request, block_table: list[int], adapter_slot: int = NO_SLOT) -> None:
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
                media=[msgspec.structs.replace(item, data=None) for item in request.core_request.media],
                adapter_slot=adapter_slot,
                adapter_start=request.core_request.adapter_start,
            )
        )

    def add_blocks(self, blocks: Mapping[Request, list[int]]) -> None:
        """Give rows blocks for tokens beyond their own."""
        for request, row in zip(self.changed, self.output.scheduled, strict=True):
            row.new_block_ids += blocks.get(request, [])
        if moved := [request for request in self.decodes if request in blocks]:
            self.output.scheduled[:0] = [self._decode(request, 1, blocks[request], ()) for request in moved]
            self.changed[:0] = moved
            self._num_changed_tokens += len(moved)
            self.decodes = [request for request in self.decodes if request not in blocks]

    def finish(self) -> tuple[SchedulerOutput, list[Request]]:
        """Return the plan and the requests of its rows."""
        plan = self.output
        plan.decodes = [request.slot for request in self.decodes]  # type: ignore[misc]  # a decode has a slot
        if not self._workers_keep_tokens:
            plan.token_ids = [request.token_ids[-1] for request in self.decodes]
        return plan, self.rows
