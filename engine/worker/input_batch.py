"""The state of all running requests on a worker, updated by plans, and the batch that is built for each plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.config.engine_config import RecentBlocks
from quire.engine.layers.batch import Batch, BatchAdapters, KVBlocks, RecentTokens, by_slot
from quire.engine.protocol.adapters import NO_SLOT
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import NewRequestData, SchedulerOutput
from quire.engine.worker.async_copies import send
from quire.engine.worker.media_rows import FeatureRange, MediaRows
from quire.engine.worker.recent_slots import RecentSlots
from quire.kernels import AdapterRows, HostMetadata, StateSegments

Ints = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers", Ints, Tensor)
_NONE: Ints = np.empty(0, np.int64)

_CONTROLS: dict[str, tuple[type[np.generic], Callable[[SamplingParams], float | None]]] = {
    "temperature": (np.float32, lambda params: params.temperature),
    "top_k": (np.int64, lambda params: params.top_k),
    "top_p": (np.float32, lambda params: params.top_p),
    "min_p": (np.float32, lambda params: params.min_p),
    "seed": (np.int64, lambda params: params.seed or 0),
    "presence_penalty": (np.float32, lambda params: params.presence_penalty),
    "frequency_penalty": (np.float32, lambda params: params.frequency_penalty),
    "repetition_penalty": (np.float32, lambda params: params.repetition_penalty),
    "min_tokens": (np.int64, lambda params: params.min_tokens),
    "num_biases": (np.int64, lambda params: len(params.logit_bias)),
    "num_bans": (np.int64, lambda params: len(params.allowed_token_ids or ()) + len(params.bad_word_ids)),
    "num_scored": (np.int64, lambda params: len(params.logprob_token_ids or ())),
    "logprobs": (np.int64, lambda params: -1 if params.logprobs is None else params.logprobs),
}
"""The columns that the sampler reads for each row, with their values for a request. -1 in `logprobs`: none."""


@dataclass(frozen=True)
class StepRows:
    """The rows of a plan, in the plan's order."""

    slots: Ints
    counts: Ints
    """Tokens of each row in this step."""
    sampling: Ints
    """Indices of the rows that sample: those whose computed tokens reach their known tokens. A row with drafts samples
    several tokens, and is repeated for each."""
    lengths: Ints
    """The number of tokens before each sampled token."""
    scoring: list[int]
    """Indices of the rows with tokens whose logits score the next token of a prompt."""
    num_drafts: Ints | None = None
    """The number of drafts of each row, its last tokens; None: no row has drafts."""


@dataclass(frozen=True)
class Span:
    """Tokens of some rows as a batch."""

    batch: Batch
    rows: Ints
    """For each of these rows, its row in the batch, or, if each token is a row of its own, its first token's row."""


class InputBatch:
    """The state of each running request, by request slot. It is the same on every rank.

    Tokens and block tables are on the device. Sampled tokens are written there directly: the host knows their number,
    but not their values until a plan contains them. The host writes the contents of plans into its own memory, and
    sends the changes with the next batch. On a CPU, device memory and host memory are the same, and nothing is sent.
    """

    def __init__(
        self,
        slots: int,
        max_length: int,
        block_size: int,
        groups: int = 1,
        device: torch.device | str = "cpu",
        *,
        states: Collection[int] = (),
        blocks_per_page: int = 1,
        is_shared: bool | None = None,
        media: MediaRows | None = None,
        num_adapter_slots: int = 0,
        recent: RecentBlocks | None = None,
    ) -> None:
        """`states` are the groups with recurrent states, in pages of `blocks_per_page` blocks. `is_shared`: whether
        device and host share their memory; None: they do on a CPU. `media`: None: the model takes text only. `recent`:
        the blocks beside a cache in 4 bits."""
        self._states, self._blocks_per_page = states, blocks_per_page
        self.block_size = block_size
        self.recent = None if recent is None else RecentSlots(recent, block_size)
        """None: the cache is not in 4 bits."""
        self._groups, self._device = groups, torch.device(device)
        self._attention_groups = [group for group in range(groups) if group not in states]
        self._slots, self._max_length, self._width = slots, max_length, -(-max_length // block_size)
        self._tables_start = slots * max_length
        self._host_memory = np.zeros(slots * (max_length + groups * self._width), np.int32)
        """Tokens `[slots, max_length]`, then block tables `[groups, slots, width]`."""
        self._is_shared = self._device.type == "cpu" if is_shared is None else is_shared
        self.memory = torch.from_numpy(self._host_memory)
        """The same on the device, and the sampled tokens as well."""
        if not self._is_shared:
            self.memory = torch.zeros(len(self._host_memory), dtype=torch.int32, device=self._device)
        shape = groups, slots, self._width
        self._tables = [*self._host_memory[self._tables_start :].reshape(shape)]
        self._device_tables = self.memory[self._tables_start :].view(shape)
        self._changes: list[Ints] = []
        """Indices in the memory that plans have changed since the last batch."""
        self.num_prompt_tokens = np.zeros(slots, np.int64)
        self.num_tokens = np.zeros(slots, np.int64)
        self.num_computed_tokens = np.zeros(slots, np.int64)
        self.num_drafter_tokens = np.zeros(slots, np.int64)
        """Tokens whose KV a draft model has computed after its last step, drafts included."""
        self.drafted_until = np.zeros(slots, np.int64)
        """Tokens at the end of the request's last step, drafts included, if several heads have run in it; otherwise 0.
        """
        self.num_blocks = np.zeros(slots, np.int64)
        """Blocks of each request in each group."""
        self.score_from = np.zeros(slots, np.int64)
        self.score_until = np.zeros(slots, np.int64)
        """Positions from `score_from` up to `score_until` have logits that score the next token of the prompt; 0: none.
        """
        self.second_segment = np.zeros(slots, np.int64)
        """The first token of a pair's second text; 0: there is one text."""
        self.controls = np.zeros(slots, [(name, dtype) for name, (dtype, _) in _CONTROLS.items()])
        """The numeric fields of `params`, as arrays."""
        self.params: list[SamplingParams | None] = [None] * slots
        self._num_adapter_slots = num_adapter_slots
        self.adapter_slots = np.full(slots, NO_SLOT, np.int64)
        """The device slot of each request's adapter."""
        self.adapter_starts = np.zeros(slots, np.int64)
        """The first token of each request that its adapter changes."""
        self.media = media
        self.features: list[FeatureRange] = []
        """The features that the last batch's `media_tokens` take, in the same order."""

    def apply(self, plan: SchedulerOutput, chained_drafts: Mapping[int, int] = MappingProxyType({})) -> StepRows:
        """Update the state to the start of `plan`, and return the rows that the plan runs.

        `chained_drafts` are the numbers of drafts of chained rows, by slot; see `StepEnd.resume`.
        """
        for slot in plan.freed_slots:
            self.params[slot] = None
        if self.media is not None:
            self.media.free(plan.freed_slots)
        for request in plan.new:
            self._add(request)
        has_drafts = any(chained_drafts.values())
        for row in plan.scheduled:
            self.num_computed_tokens[row.slot] += row.num_accepted
            if row.new_token_ids:
                self._extend_tokens(row.slot, row.new_token_ids)
            if row.draft_token_ids:
                has_drafts = True
                self._write_tokens(row.slot, row.draft_token_ids)
            if row.new_block_ids:
                self._extend_tables(row.slot, row.new_block_ids)
        if plan.token_ids:
            slots = np.array(plan.decodes, np.int64)
            places = self.token_indices(slots, self.num_tokens[slots])
            self._host_memory[places] = plan.token_ids
            self.num_tokens[slots] += 1
            if not self._is_shared:
                self._changes.append(places)
        slots = np.array(plan.decodes + [row.slot for row in plan.scheduled], np.int64)
        counts = np.ones(len(slots), np.int64)
        if plan.scheduled:
            counts[len(plan.decodes) :] = [
                1 + chained_drafts.get(row.slot, 0) if row.is_chained else row.num_tokens for row in plan.scheduled
            ]
        known: Ints = self.num_tokens[slots]
        num_drafts: Ints | None = None
        if has_drafts:
            num_drafts = np.zeros(len(slots), np.int64)
            num_drafts[len(plan.decodes) :] = [
                chained_drafts.get(row.slot, len(row.draft_token_ids)) for row in plan.scheduled
            ]
            sampling = np.flatnonzero(self.num_computed_tokens[slots] + counts == known + num_drafts)
            repeats: Ints = num_drafts[sampling] + 1
            starts: Ints = np.repeat(known[sampling] - repeats.cumsum() + repeats, repeats)
            sampling = np.repeat(sampling, repeats)
            lengths: Ints = starts + np.arange(len(sampling))
        else:
            sampling = np.flatnonzero(self.num_computed_tokens[slots] + counts == known)
            lengths = known[sampling]
        scoring = [
            number
            for number, row in enumerate(plan.scheduled, len(plan.decodes))
            if self.num_computed_tokens[row.slot] < self.score_until[row.slot]
        ]
        return StepRows(slots, counts, sampling, lengths, scoring, num_drafts)

    def num_top(self, slot: int) -> int:
        """The number of most likely tokens to report with each prompt token."""
        params = self.params[slot]
        assert params is not None, f"slot {slot} is free"
        return params.prompt_logprobs or 0

    def scored_tokens(self, rows: StepRows) -> tuple[Ints, Ints, Ints, list[int]]:
        """For the rows that score: indices of the scoring tokens in the batch, the tokens that follow them, their
        adapters' slots, and the number of scoring tokens per row.

        Call this before `advance`.
        """
        starts = rows.counts.cumsum() - rows.counts
        places, following, adapters, counts = [], [], [], []
        for row in rows.scoring:
            slot, first = rows.slots[row], self.num_computed_tokens[rows.slots[row]]
            start = max(first, self.score_from[slot])
            end = max(start, min(first + rows.counts[row], self.score_until[slot]))
            places.append(starts[row] - first + np.arange(start, end))
            place = slot * self._max_length  # the prompt is in host memory
            following.append(self._host_memory[place + start + 1 : place + end + 1].astype(np.int64))
            is_changed = np.arange(start, end) >= self.adapter_starts[slot]
            adapters.append(np.where(is_changed, self.adapter_slots[slot], NO_SLOT))
            counts.append(int(end - start))
        return np.concatenate(places), np.concatenate(following), np.concatenate(adapters), counts

    def token_types(self, rows: StepRows) -> Tensor | None:
        """`Batch.token_types` of whole prompts."""
        seconds = self.second_segment[rows.slots]
        if not seconds.any():
            return None
        lengths = np.where(seconds > 0, seconds, rows.counts)
        types = np.repeat(np.tile([0, 1], len(seconds)), np.column_stack((lengths, rows.counts - lengths)).ravel())
        return send(types, self._device)

    def token_indices(self, slots: Numbers, positions: Numbers) -> Numbers:
        """Indices in `memory` of the tokens at these positions."""
        return slots * self._max_length + positions

    def write_sampled(self, places: Tensor, tokens: Tensor) -> None:
        """Write the sampled tokens, on the device, at the indices that `batch` returned."""
        if self._is_shared:  # the same, but faster
            self._host_memory[places.numpy()] = tokens.numpy()
        else:
            self.memory.index_copy_(0, places, tokens.int())

    def append_sampled(self, rows: StepRows) -> None:
        """Append the written tokens to the rows without drafts. The tokens of a row with drafts are known when a plan
        contains them, or chains a row to it."""
        sampling = rows.sampling
        if rows.num_drafts is not None:
            sampling = sampling[rows.num_drafts[sampling] == 0]
        self.num_tokens[rows.slots[sampling]] += 1

    def _add(self, request: NewRequestData) -> None:
        slot, params = request.slot, request.params
        assert self.params[slot] is None, f"slot {slot} is taken"
        self.params[slot] = params
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed_tokens[slot] = self.num_drafter_tokens[slot] = request.num_computed_tokens
        self.num_tokens[slot] = self.num_blocks[slot] = self.drafted_until[slot] = 0
        token_ids = request.token_ids
        if self.media is not None and request.media:
            token_ids = self.media.valid(token_ids)
        self._extend_tokens(slot, token_ids)
        self._extend_tables(slot, request.block_ids)
        is_scored = params.prompt_logprobs is not None
        self.score_from[slot] = request.num_scored_tokens
        self.score_until[slot] = request.num_prompt_tokens - 1 if is_scored else 0
        self.second_segment[slot] = request.second_segment
        assert request.adapter_slot < self._num_adapter_slots
        self.adapter_slots[slot], self.adapter_starts[slot] = request.adapter_slot, request.adapter_start
        self.controls[slot] = tuple(value(params) for _, value in _CONTROLS.values())
        if self.media is not None:
            self.media.add(slot, request.media, request.num_prompt_tokens)

    def _extend_tokens(self, slot: int, token_ids: list[int]) -> None:
        self._write_tokens(slot, token_ids)
        self.num_tokens[slot] += len(token_ids)

    def _write_tokens(self, slot: int, token_ids: list[int]) -> None:
        """Write tokens after the known ones."""
        start = slot * self._max_length + int(self.num_tokens[slot])
        end = start + len(token_ids)
        self._host_memory[start:end] = token_ids
        if not self._is_shared:
            self._changes.append(np.arange(start, end))

    def _extend_tables(self, slot: int, block_ids: list[int]) -> None:
        """Append blocks, which the groups take in rotation."""
        start, groups = int(self.num_blocks[slot]), self._groups
        end = start + len(block_ids) // groups
        for group, table in enumerate(self._tables):
            table[slot, start:end] = block_ids if groups == 1 else block_ids[group::groups]
            if not self._is_shared:
                place = self._tables_start + (group * self._slots + slot) * self._width
                self._changes.append(np.arange(place + start, place + end))
        self.num_blocks[slot] = end

    def batch(
        self, rows: StepRows, replica_tokens: tuple[int, ...] = (), *, logits_indices_only: bool = False
    ) -> tuple[Batch, Tensor]:
        """The rows' next tokens, sent to the device in one transfer, and the indices in `memory` for the tokens to be
        sampled.

        Call this once after each `apply` that returns rows, before `advance`. See `Batch.replica_tokens`.
        """
        slots, counts, first = rows.slots, rows.counts, self.num_computed_tokens[rows.slots]
        starts = np.concatenate(([0], counts.cumsum()))
        last = starts[rows.sampling] + rows.lengths - first[rows.sampling] - 1  # the sampled token follows it
        tensors: dict[str, Ints] = {}
        if self.media is not None:
            tensors, self.features = self.media.step(slots, first, counts)
        owners, positions = slots, first  # [tokens]
        if counts.max(initial=1) > 1:
            owners = np.repeat(slots, counts)
            positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
        recent = self._recent(slots, first, counts, owners, positions)
        if rows.num_drafts is not None and not self._states and (counts - rows.num_drafts == 1).all():
            # Every token is a row of its own: KV is written before any row attends. So the step is one of decodes.
            slots, counts, first, starts = owners, np.ones_like(owners), positions, np.arange(len(owners) + 1)
        lengths = first + counts
        blocks, offsets = np.divmod(positions, self.block_size)
        width = -(-int(lengths.max(initial=1)) // self.block_size)
        tokens = self.token_indices(owners, positions)
        segments = {group: self._segments(rows, starts, self._tables[group]) for group in self._states}
        adapter_slots, adapters = self._adapters(owners, positions, starts, last)
        token_ids, tables, sent = self._gather(
            tokens,
            slots,
            width,
            positions,
            lengths,
            starts,
            rows.sampling if logits_indices_only else last,
            tokens[last] + 1,
            *self._slot_mappings(owners, blocks, offsets),
            *chain.from_iterable(segments.values()),
            *(each.ravel() for each in tensors.values()),
            *adapters,
            *recent,
        )
        places, ends, query_starts, sampled, kept, *others = sent
        slot_mappings, rest = others[: len(tables)], iter(others[len(tables) :])
        groups: dict[int, KVBlocks | StateSegments] = {**_kv_blocks(slot_mappings, tables)}
        groups |= {group: StateSegments(*islice(rest, 4)) for group in segments}
        of_media = {name: next(rest).view(each.shape) for name, each in tensors.items()}
        batch = Batch(
            token_ids=token_ids,
            positions=places,
            sequence_lengths=ends,
            query_starts=query_starts,
            logits_indices=sampled,
            groups=groups,
            host=HostMetadata(counts, lengths, {}),
            replica_tokens=replica_tokens,
            logits_indices_only=logits_indices_only,
            rope_positions=of_media.get("rope_positions"),
            media_tokens=of_media.get("media_tokens"),
            media_places=tensors.get("media_tokens"),
            key_ends=of_media.get("key_ends"),
            adapters=BatchAdapters(*(AdapterRows(next(rest), next(rest), True, each) for each in adapters[1::2]))
            if adapters
            else None,
            adapter_slots=adapter_slots,
            recent=_recent_tokens([*rest]),
        )
        return batch, kept

    def _recent(self, slots: Ints, first: Ints, counts: Ints, owners: Ints, positions: Ints) -> list[Ints]:
        """The fields of `RecentTokens`, of one dimension, for rows of tokens: see `RecentSlots.of_step`; empty: there
        are none."""
        if self.recent is None:
            return []
        places, moves = self.recent.of_step(slots, first, counts, owners, positions)
        return [places] if moves is None else [places, moves.ravel()]

    def _adapters(self, owners: Ints, positions: Ints, starts: Ints, last: Ints) -> tuple[Ints | None, list[Ints]]:
        """The adapters' slots of tokens at these positions of these request slots, and the tensors of `AdapterRows` of
        these tokens, of the last one of each row, and of the tokens `last`; None and empty: no token has an adapter."""
        if not self._num_adapter_slots:
            return None, []
        of_tokens: Ints = np.where(positions < self.adapter_starts[owners], NO_SLOT, self.adapter_slots[owners])
        if (of_tokens < 0).all():
            return None, []
        parts = of_tokens, of_tokens[starts[1:] - 1], of_tokens[last]
        return of_tokens, [each for slots in parts for each in by_slot(slots, self._num_adapter_slots)]

    def adapter_rows(self, slots: Ints) -> AdapterRows | None:
        """Rows with the adapters in these slots; None: no row has one."""
        if (slots < 0).all():
            return None
        order, starts = by_slot(slots, self._num_adapter_slots)
        return AdapterRows(send(order, self._device), send(starts, self._device), True, starts)

    def _slot_mappings(self, slots: Ints, blocks: Ints, offsets: Ints) -> Iterator[Ints]:
        """For each group of attention layers, the places in the cache of tokens at `offsets` in these blocks of the
        slots."""
        for group in self._attention_groups:
            yield self._tables[group][slots, blocks] * self.block_size + offsets

    def capacity(self, slots: Ints) -> Ints:
        """Tokens of each request that there are slots for."""
        found: Ints = np.minimum(self.num_blocks[slots] * self.block_size, self._max_length)
        return found

    def following(self, slots: Ints, first: Ints, counts: Ints, distance: int = 1) -> Tensor:
        """The token `distance` places after each of `counts` tokens of each row from position `first` on, int64 on the
        device. Call this after `batch`."""
        positions = np.arange(counts.sum()) + np.repeat(first - (counts.cumsum() - counts), counts)
        places = self.token_indices(np.repeat(slots, counts), np.minimum(positions + distance, self._max_length - 1))
        if self._is_shared:
            return torch.from_numpy(self._host_memory[places].astype(np.int64))
        return self.memory.index_select(0, send(places, self._device)).long()

    def span(self, slots: Ints, first: Ints, counts: Ints, *, ahead: int, as_decodes: bool) -> Span:
        """A batch of `counts` tokens of each row from position `first` on, whatever is computed of them, within the
        rows' capacity. The tables reach `ahead` tokens further, or as far as the rows do.

        `as_decodes`: each token is a row of its own, since KV is written before any row attends.
        """
        starts = np.concatenate(([0], counts.cumsum()))
        owners = np.repeat(slots, counts)
        positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
        rows: Ints = np.arange(len(slots))
        recent = self._recent(slots, first, counts, owners, positions)
        if as_decodes:
            slots, counts, first, rows = owners, np.ones_like(owners), positions, starts[:-1]
            starts = np.arange(len(owners) + 1)
        lengths = first + counts
        blocks, offsets = np.divmod(positions, self.block_size)
        width = min(self._width, -(-(int(lengths.max()) + ahead) // self.block_size))
        mappings = self._slot_mappings(owners, blocks, offsets)
        token_ids, tables, sent = self._gather(
            self.token_indices(owners, positions), slots, width, positions, lengths, starts, *mappings, *recent
        )
        places, ends, query_starts, *others = sent
        slot_mappings, rest = others[: len(tables)], others[len(tables) :]
        batch = Batch(
            token_ids=token_ids,
            positions=places,
            sequence_lengths=ends,
            query_starts=query_starts,
            logits_indices=query_starts[1:] - 1,
            groups=_kv_blocks(slot_mappings, tables),
            host=HostMetadata(counts, lengths, {}),
            recent=_recent_tokens(rest),
        )
        return Span(batch, rows)

    def _segments(self, rows: StepRows, starts: Ints, table: npt.NDArray[np.int32]) -> tuple[Ints, Ints, Ints, Ints]:
        """The fields of `StateSegments`: a row ends a segment at each block boundary for which `table` has a page, and
        before its drafts, whose state is not stored."""
        size, first = self.block_size, self.num_computed_tokens[rows.slots]
        counts = rows.counts if rows.num_drafts is None else rows.counts - rows.num_drafts
        ends = first + counts
        read = np.where(first > 0, table[rows.slots, (first - 1) // size], -1).astype(np.int64)
        write = table[rows.slots, (ends - 1) // size].astype(np.int64)
        inner = {
            row: found
            for row in np.flatnonzero(counts > 1).tolist()
            if len(found := np.flatnonzero(table[rows.slots[row], first[row] // size : (ends[row] - 1) // size] >= 0))
        }
        numbers = np.arange(len(first) + 1)
        for row, found in reversed(inner.items()):
            boundaries = (first[row] // size + found + 1) * size
            pages = table[rows.slots[row], boundaries // size - 1].astype(np.int64)
            starts = np.insert(starts, row + 1, starts[row] + boundaries - first[row])
            read, write = np.insert(read, row + 1, pages), np.insert(write, row, pages)
            numbers[row + 1 :] += len(found)
        if rows.num_drafts is not None:
            for row in np.flatnonzero(rows.num_drafts)[::-1].tolist():
                last = numbers[row + 1]  # the segment of the drafts follows the row's others
                starts = np.insert(starts, last, starts[last] - rows.num_drafts[row])
                read, write = np.insert(read, last, write[last - 1]), np.insert(write, last, -1)
                numbers[row + 1 :] += 1
        return starts, numbers, read // self._blocks_per_page, write // self._blocks_per_page

    def _gather(
        self, tokens: Ints, slots: Ints, width: int, *numbers: npt.NDArray[np.integer[Any]]
    ) -> tuple[Tensor, dict[int, Tensor], Sequence[Tensor]]:
        """The tokens at these indices, the first `width` blocks of these slots in each group of attention layers, and
        `numbers`.

        All are int64 on the device. Pending changes are applied to the device's memory first.
        """
        groups = self._attention_groups
        if self._is_shared:
            tables = (self._tables[group][slots, :width].ravel() for group in groups)
            token_ids, *sent = self._send(self._host_memory[tokens], *tables, *numbers)
            found = {group: part.view(-1, width) for group, part in zip(groups, sent, strict=False)}
            return token_ids, found, sent[len(groups) :]
        changed = np.concatenate(self._changes) if self._changes else _NONE
        self._changes.clear()
        places, reported, at, rows, *sent = self._send(changed, self._host_memory[changed], tokens, slots, *numbers)
        if len(changed):
            self.memory.index_copy_(0, places, reported.int())
        found = {group: self._device_tables[group, :, :width].index_select(0, rows).long() for group in groups}
        return self.memory.index_select(0, at).long(), found, sent

    def _send(self, *parts: npt.NDArray[np.integer[Any]]) -> Sequence[Tensor]:
        """Send all parts in one transfer, as int64."""
        return send(np.concatenate(parts), self._device).split_with_sizes([*map(len, parts)])

    def advance(self, rows: StepRows) -> None:
        """Mark the rows' tokens as computed, except drafts."""
        self.num_computed_tokens[rows.slots] += rows.counts
        if rows.num_drafts is not None:
            self.num_computed_tokens[rows.slots] -= rows.num_drafts


def _recent_tokens(sent: Sequence[Tensor]) -> RecentTokens | None:
    """Of the tensors of `InputBatch._recent`."""
    if not sent:
        return None
    places, *moves = sent
    return RecentTokens(places, moves[0].view(2, -1) if moves else None)


def _kv_blocks(slot_mappings: Sequence[Tensor], tables: Mapping[int, Tensor]) -> dict[int, KVBlocks]:
    return {group: KVBlocks(*own) for group, *own in zip(tables, slot_mappings, tables.values(), strict=True)}
