"""Drafters that are models: at the end of a step, the last stage guesses the next tokens of the rows that have sampled.

The drafts travel to the core in `ModelRunnerOutput.draft_token_ids`, and are verified in a later step. A drafter's
layers are numbered after the target's, and take part in its KV cache groups: their KV is in the blocks of the same
requests, for the same positions. So prefix caching, preemption and freeing cover it.

Drafts are sampled with the noise of their places, as the target's tokens are: where both distributions are alike, so
are the tokens (common random numbers; Daliri, Musco and Suresh, drafter-invariant speculative decoding, 2024).

Nothing here waits for a GPU: how many drafts have counted in a step is known on the device only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch, KVBlocks, RecentTokens
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.models.decoder import Decoder
from quire.engine.protocol.scheduler_output import CATCH_UP_TOKENS
from quire.engine.worker.async_copies import send
from quire.engine.worker.cuda_graphs import DecodeGraphs
from quire.engine.worker.input_batch import InputBatch, Ints, StepRows
from quire.engine.worker.recent_slots import RecentSlots
from quire.engine.worker.sampler import Sampler
from quire.kernels import HostMetadata


@dataclass(frozen=True)
class SampledStep:
    """A sampled step as a drafter sees it. The sampled tokens are in the input batch's memory."""

    rows: StepRows
    first: Ints
    """`[rows]`, tokens that were computed before the step."""
    batch: Batch
    """The target's batch."""
    hidden: Tensor
    """The target's output: the residual stream after its last layer, `[tokens, hidden_size]`; with
    `Batch.logits_indices_only`, only for the rows' last tokens."""
    num_accepted: Tensor | None
    """int64 on the device, for each row that samples, in order: drafts that count; None: no row has drafts."""
    drafting: Ints
    """The rows that sample and for which drafts are to be made; see `may_draft`."""
    count: int
    """Maximum drafts of a row."""

    def accepted_of(self, rows: Ints) -> Tensor | int:
        """The number of drafts that count of each of these rows, which sample."""
        if self.num_accepted is None:
            return 0
        places = np.searchsorted(np.unique(self.rows.sampling), rows)
        return self.num_accepted[send(places, self.num_accepted.device)]


@dataclass(frozen=True)
class Drafts:
    """The drafts of a step."""

    rows: Ints
    """Numbers of the rows that have drafts."""
    counts: Ints
    """How many of `tokens` each of these rows has: there are slots for their KV."""
    tokens: Tensor
    """int64 `[rows, drafts]`, on the device."""

    def by_row(self, tokens: np.ndarray) -> dict[int, list[int]]:
        """`ModelRunnerOutput.draft_token_ids`, given `tokens` on the host."""
        rows = zip(self.rows.tolist(), self.counts.tolist(), tokens.tolist(), strict=True)
        return {row: found[:count] for row, count, found in rows}


class Drafter(Protocol):
    """A model that guesses tokens, on a rank of the last stage."""

    def draft(self, step: SampledStep, input_batch: InputBatch) -> Drafts | None:
        """Compute the drafter's KV of the step's tokens, and make drafts; None: no row has drafts."""

    def close(self) -> None:
        """Release graphs."""


class DraftModel:
    """A smaller model with the same vocabulary, which reads a request's tokens as the target does.

    `InputBatch.num_drafter_tokens` says for how many of a request's tokens its KV is complete. In each step it computes
    the tokens after these, up to the newest one, whatever the target has computed: where steps have passed without it,
    it catches up, a few rows at a time so that no step takes long, and by no more than its windows, as the blocks
    before them are freed. A row that is still behind has no drafts. The core expects this
    (`quire.engine.scheduler.catch_up`). Where there is such a gap, or one in blocks of the prefix cache that were
    filled in such steps, its guesses are worse.

    On a CPU its passes of few tokens are replayed; on a GPU they run without graphs.
    """

    def __init__(
        self, config: EngineConfig, model: Decoder, caches: Sequence[LayerCache], parallel: Parallel, sampler: Sampler
    ) -> None:
        """`config` is `EngineConfig.drafter`."""
        self._model, self._caches, self._parallel, self._sampler = model, caches, parallel, sampler
        self._max_behind = config.model.min_window
        """Tokens before a row's first one that have blocks in all groups."""
        self._max_replayed, self._graphs = 0, None
        device = caches[0].memory.device if caches and caches[0].memory is not None else torch.device("cpu")
        if device.type == "cpu" and config.graphs.sizes:
            self._graphs = DecodeGraphs(model, caches, config, device, 0, parallel)
            self._max_replayed = config.graphs.sizes[-1]

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()

    def draft(self, step: SampledStep, input_batch: InputBatch) -> Drafts | None:
        rows, first = step.rows, step.first
        slots, room = rows.slots, input_batch.capacity(rows.slots)
        # A sampled token follows the row's tokens; if drafts do not count, the tokens behind it have no meaning.
        samples = np.zeros(len(slots), bool)
        samples[rows.sampling] = True
        ends = np.minimum(first + rows.counts + samples, room)
        # Its results after the newest token that was known then had no meaning.
        starts = np.minimum(input_batch.num_drafter_tokens[slots], first + 1)
        starts = np.maximum(starts, first + 1 - self._max_behind)
        wanted = np.maximum(ends - starts, 0)
        late = np.where(wanted > rows.counts + 1, wanted, 0)
        counts = np.where(late, np.clip(CATCH_UP_TOKENS - (late.cumsum() - late), 0, late), wanted)
        input_batch.num_drafter_tokens[slots] = starts + counts
        fed = np.flatnonzero(counts)
        if not len(fed):
            return None
        newest = first + rows.counts  # at most; less the drafts that do not count
        most = np.minimum(step.count, room - newest)
        drafting = step.drafting[(counts == wanted)[step.drafting] & (most[step.drafting] > 0)]
        span = input_batch.span(
            slots[fed],
            starts[fed],
            counts[fed],
            ahead=step.count,
            as_decodes=int(counts.max()) <= step.count + 1 and int(counts.sum()) <= self._max_replayed,
        )
        hidden = self._forward(span.batch)
        if not len(drafting):
            return None
        numbers = np.searchsorted(fed, drafting)
        least = newest - (0 if rows.num_drafts is None else rows.num_drafts)
        starts_of_rows = (counts[fed].cumsum() - counts[fed])[numbers]
        least_places = starts_of_rows + (least - starts)[drafting]
        device = span.batch.positions.device
        places, positions, limits, row_numbers = send(
            np.stack([least_places, least[drafting], room[drafting], span.rows[numbers]]), device
        )
        accepted = step.accepted_of(drafting)
        places, positions = places + accepted, positions + accepted
        ahead = RowsAhead.of(span.batch, row_numbers, limits, newest[drafting], input_batch)
        tokens = [self._sample(hidden[places], input_batch, slots[drafting], positions + 1)]
        for number in range(1, int(most[drafting].max())):
            positions = positions + 1
            hidden = self._forward(ahead.batch(tokens[-1], positions, number))
            tokens.append(self._sample(hidden, input_batch, slots[drafting], positions + 1))
        return Drafts(drafting, most[drafting], torch.stack(tokens, dim=1))

    def _forward(self, batch: Batch) -> Tensor:
        replayed = None if self._graphs is None else self._graphs.run(None, batch)
        return self._model(None, batch, self._caches) if replayed is None else replayed

    def _sample(self, hidden: Tensor, input_batch: InputBatch, slots: Ints, lengths: Tensor) -> Tensor:
        return sample_drafts(self._model.logits(hidden), self._parallel, self._sampler, input_batch, slots, lengths)


@dataclass(frozen=True)
class RowsAhead:
    """Makes the batches of one guessed token for each row, whose positions are known on the device only."""

    tables: Mapping[int, Tensor]
    """The block tables of these rows, by KV cache group."""
    limits: Tensor
    """`[rows]`, the slots of each row. Tokens beyond them are not stored."""
    newest: Ints
    """Positions of the newest tokens, at most."""
    block_size: int
    recent: RecentSlots | None
    owners: Tensor | None
    """`[rows]`, the request slots, if there is `recent`."""

    @staticmethod
    def of(batch: Batch, rows: Tensor, limits: Tensor, newest: Ints, input_batch: InputBatch) -> RowsAhead:
        """For these rows of a batch whose tables reach far enough."""
        tables = {group: batch.attention(group).block_tables.index_select(0, rows) for group in batch.groups}
        recent, owners = input_batch.recent, None
        if recent is not None and batch.recent is not None:  # the last token of a row is in its ring
            owners = recent.owners(batch.recent.slots[batch.query_starts[rows + 1] - 1])
        return RowsAhead(tables, limits, newest, input_batch.block_size, recent, owners)

    def batch(self, token_ids: Tensor, positions: Tensor, number: int) -> Batch:
        """The batch of tokens at these positions, `number` after the newest that are not guessed."""
        within = torch.minimum(positions, self.limits - 1)
        blocks, offsets = within // self.block_size, within % self.block_size
        is_kept = positions < self.limits
        groups = {}
        for group, table in self.tables.items():
            slots = table.gather(1, blocks[:, None])[:, 0] * self.block_size + offsets
            groups[group] = KVBlocks(torch.where(is_kept, slots, -1), table)
        kept: RecentTokens | None = None
        if self.recent is not None and self.owners is not None:
            kept = RecentTokens(torch.where(is_kept, self.recent.in_ring(self.owners, within), -1))
        rows = len(token_ids)
        starts = torch.arange(rows + 1, device=token_ids.device)
        lengths = self.newest + number + 1 if token_ids.is_cuda else (within + 1).numpy()
        return Batch(
            token_ids=token_ids,
            positions=within,
            sequence_lengths=within + 1,
            query_starts=starts,
            logits_indices=starts[:rows],
            groups=groups,
            host=HostMetadata(np.ones(rows, np.int64), lengths),
            recent=kept,
        )


def sample_drafts(
    logits: Tensor, parallel: Parallel, sampler: Sampler, input_batch: InputBatch, slots: Ints, lengths: Tensor
) -> Tensor:
    """The next token of each row, int64 `[rows]`, the same on every rank; `lengths` tokens are before it."""
    if parallel.rank > 0:
        return parallel.broadcast(torch.empty(len(slots), dtype=torch.int64, device=logits.device))
    return parallel.broadcast(sampler.draft(logits, input_batch, slots, lengths))


def may_draft(rows: StepRows, masked: Sequence[int]) -> Ints:
    """The rows that sample, except in these slots: a grammar restricts what they sample, and forces tokens."""
    sampling: Ints = np.unique(rows.sampling)
    return sampling[~np.isin(rows.slots[sampling], list(masked))] if masked else sampling


def count_accepted(rows: StepRows, batch: Batch, tokens: Tensor) -> Tensor | None:
    """`SampledStep.num_accepted`: a draft counts if it is the token that was sampled at its place, and if those before
    it count. `tokens` are the sampled ones."""
    if rows.num_drafts is None:
        return None
    drafts = rows.num_drafts[np.unique(rows.sampling)]
    ends = (drafts + 1).cumsum()
    at = np.arange(drafts.max(initial=0))
    is_draft = at < drafts[:, None]
    places = np.where(is_draft, (ends - drafts - 1)[:, None] + at, 0)
    guesses = batch.token_ids[(batch.logits_indices + 1).clamp(max=len(batch.token_ids) - 1)]
    is_right = (tokens == guesses)[send(places, tokens.device)] & send(is_draft, tokens.device)
    return is_right.long().cumprod(dim=1).sum(dim=1)
