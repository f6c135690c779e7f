"""The workers' request state, kept up to date by plans, and the batch that a plan makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.engine.layers.attention import Batch, HostRows
from quire.engine.messages import NewRequest, SamplingParams, StepPlan

Ints = npt.NDArray[np.int64]

_CONTROLS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.int64),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("min_tokens", np.int64),
        ("num_biases", np.int64),
        ("num_bans", np.int64),  # tokens allowed and words forbidden
        ("logprobs", np.int64),  # -1: none
    ]
)


@dataclass(frozen=True)
class Rows:
    """The rows of a plan, in its order."""

    slots: Ints
    counts: Ints
    """Tokens that each runs in this step."""
    sampling: Ints
    """The rows that sample, by number: those whose computed tokens reach their known tokens."""
    scoring: list[int]
    """The rows with tokens whose logits are to score a prompt's next token, by number."""


class RequestStates:
    """What is known of each running request, by slot. Every rank holds the same."""

    def __init__(self, slots: int, max_length: int, block_size: int, groups: int = 1) -> None:
        self._block_size, self._groups = block_size, groups
        self.tokens = np.zeros((slots, max_length), np.int32)
        self.block_tables = [np.zeros((slots, -(-max_length // block_size)), np.int32) for _ in range(groups)]
        self.num_prompt = np.zeros(slots, np.int64)
        self.num_known = np.zeros(slots, np.int64)
        self.num_computed = np.zeros(slots, np.int64)
        self.num_blocks = np.zeros(slots, np.int64)
        """Of each group."""
        self.score_from = np.zeros(slots, np.int64)
        self.score_until = np.zeros(slots, np.int64)
        """Positions whose logits score the next token of the prompt; 0: none."""
        self.controls = np.zeros(slots, _CONTROLS)
        """The numbers of `params`, for whole batches at once."""
        self.params: list[SamplingParams | None] = [None] * slots

    def apply(self, plan: StepPlan) -> Rows:
        """Bring the state to where `plan` starts, and say which rows it runs."""
        for slot in plan.released:
            self.params[slot] = None
        for request in plan.new:
            self._add(request)
        for row in plan.scheduled:
            if row.new_token_ids:
                _extend(self.tokens, self.num_known, row.slot, row.new_token_ids)
            if row.new_block_ids:
                self._extend_tables(row.slot, row.new_block_ids)
        if plan.token_ids:
            self.keep(np.array(plan.decodes, np.int64), plan.token_ids)
        slots = np.array(plan.decodes + [row.slot for row in plan.scheduled], np.int64)
        counts = np.ones(len(slots), np.int64)
        if plan.scheduled:
            counts[len(plan.decodes) :] = [row.num_tokens for row in plan.scheduled]
        sampling = np.flatnonzero(self.num_computed[slots] + counts == self.num_known[slots])
        scoring = [
            number
            for number, row in enumerate(plan.scheduled, len(plan.decodes))
            if self.num_computed[row.slot] < self.score_until[row.slot]
        ]
        return Rows(slots, counts, sampling, scoring)

    def num_top(self, slot: int) -> int:
        """Likeliest tokens that a prompt is scored with."""
        params = self.params[slot]
        assert params is not None, f"slot {slot} is free"
        return params.prompt_logprobs or 0

    def to_score(self, rows: Rows) -> tuple[Ints, Ints, list[int]]:
        """Of the rows that score: which of the batch's tokens do, the tokens that follow these, and how many a row.

        To be called before `advance`.
        """
        starts = rows.counts.cumsum() - rows.counts
        places, following, counts = [], [], []
        for row in rows.scoring:
            slot, first = rows.slots[row], self.num_computed[rows.slots[row]]
            begin = max(first, self.score_from[slot])
            end = max(begin, min(first + rows.counts[row], self.score_until[slot]))
            places.append(starts[row] - first + np.arange(begin, end))
            following.append(self.tokens[slot, begin + 1 : end + 1].astype(np.int64))
            counts.append(int(end - begin))
        return np.concatenate(places), np.concatenate(following), counts

    def keep(self, slots: Ints, token_ids: Sequence[int] | Ints) -> None:
        """One more known token for each of `slots`."""
        places = self.num_known[slots]
        self.tokens[slots, places] = token_ids
        self.num_known[slots] = places + 1

    def _add(self, request: NewRequest) -> None:
        slot, params = request.slot, request.params
        assert self.params[slot] is None, f"slot {slot} is taken"
        self.params[slot] = params
        self.num_prompt[slot] = request.num_prompt_tokens
        self.num_computed[slot] = request.num_computed_tokens
        self.num_known[slot] = self.num_blocks[slot] = 0
        _extend(self.tokens, self.num_known, slot, request.token_ids)
        self._extend_tables(slot, request.block_ids)
        is_scored = params.prompt_logprobs is not None
        self.score_from[slot] = request.num_scored_tokens
        self.score_until[slot] = request.num_prompt_tokens - 1 if is_scored else 0
        self.controls[slot] = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seed or 0,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            params.min_tokens,
            len(params.logit_bias),
            len(params.allowed_token_ids or ()) + len(params.bad_word_ids),
            -1 if params.logprobs is None else params.logprobs,
        )

    def _extend_tables(self, slot: int, block_ids: list[int]) -> None:
        """Append blocks, of which each group takes one after the other."""
        begin, groups = int(self.num_blocks[slot]), self._groups
        end = begin + len(block_ids) // groups
        if groups == 1:
            self.block_tables[0][slot, begin:end] = block_ids
        else:
            for group, table in enumerate(self.block_tables):
                table[slot, begin:end] = block_ids[group::groups]
        self.num_blocks[slot] = end

    def batch(self, rows: Rows, device: torch.device, replica_tokens: tuple[int, ...] = ()) -> Batch:
        """The rows' next tokens, in one transfer to the device. See `Batch.replica_tokens`."""
        first = self.num_computed[rows.slots]
        lengths = first + rows.counts
        if rows.counts.max(initial=1) == 1:
            owners, positions, starts = rows.slots, first, np.arange(len(first) + 1)
        else:
            starts = np.concatenate(([0], rows.counts.cumsum()))
            owners = np.repeat(rows.slots, rows.counts)  # [tokens]
            positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], rows.counts)
        blocks, offsets = np.divmod(positions, self._block_size)
        width = -(-int(lengths.max(initial=1)) // self._block_size)
        slots = [table[owners, blocks] * self._block_size + offsets for table in self.block_tables]
        host: tuple[npt.NDArray[np.integer[Any]], ...] = (
            self.tokens[owners, positions],
            positions,
            lengths,
            starts,
            starts[1:][rows.sampling] - 1,
            *slots,
            *[table[rows.slots, :width].ravel() for table in self.block_tables],
        )
        sent = torch.from_numpy(np.concatenate(host)).to(device)
        tokens, places, ends, query_starts, sampled, *by_group = sent.split_with_sizes([len(part) for part in host])
        tables = [table.view(-1, width) for table in by_group[self._groups :]]
        batch = Batch(
            *(tokens, places, by_group[0], tables[0], ends, query_starts, sampled),
            replica_tokens=replica_tokens,
            host=HostRows(rows.counts, lengths),
        )
        if self._groups == 1:
            return batch
        others = zip(by_group[1 : self._groups], tables[1:], strict=True)
        return replace(batch, others=tuple(replace(batch, slots=slots, block_tables=table) for slots, table in others))

    def advance(self, rows: Rows) -> None:
        """The rows' tokens are computed."""
        self.num_computed[rows.slots] += rows.counts


def halve(batch: Batch, counts: Ints) -> tuple[Batch, Batch]:
    """The first and the second half of a step's tokens, and of each replica's; what samples is left to the whole.

    `counts` are the tokens of each row. A row may be cut: its first tokens come first in every layer, so that its last
    ones find their keys.
    """
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    cut = -(-total // 2)
    stop = min(len(ends), int(ends.searchsorted(cut)) + 1)  # of the rows with tokens before the cut
    start = int(ends.searchsorted(cut, "right"))  # of those with tokens behind it
    behind = int(ends[stop - 1]) - cut if stop else 0
    lengths = batch.sequence_lengths[:stop].clone()
    lengths[stop - 1 :] -= behind

    def parts(whole: Batch) -> tuple[Batch, Batch]:
        firsts, seconds = zip(*[parts(other) for other in whole.others], strict=True) if whole.others else ((), ())
        first = Batch(
            token_ids=whole.token_ids[:cut],
            positions=whole.positions[:cut],
            slots=whole.slots[:cut],
            block_tables=whole.block_tables[:stop],
            sequence_lengths=lengths,
            query_starts=whole.query_starts[: stop + 1].clamp(max=cut),
            sampled=whole.sampled[:0],
            others=firsts,
            replica_tokens=tuple(-(-tokens // 2) for tokens in whole.replica_tokens),
        )
        second = Batch(
            token_ids=whole.token_ids[cut:],
            positions=whole.positions[cut:],
            slots=whole.slots[cut:],
            block_tables=whole.block_tables[start:],
            sequence_lengths=whole.sequence_lengths[start:],
            query_starts=whole.query_starts[start:].clamp(min=cut) - cut,
            sampled=whole.sampled[:0],
            others=seconds,
            replica_tokens=tuple(tokens // 2 for tokens in whole.replica_tokens),
        )
        return first, second

    return parts(batch)


def _extend(table: npt.NDArray[np.int32], ends: Ints, slot: int, values: list[int]) -> None:
    end = int(ends[slot])
    table[slot, end : end + len(values)] = values
    ends[slot] = end + len(values)
