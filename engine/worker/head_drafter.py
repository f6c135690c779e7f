"""Drafters that are heads on the target (`quire.engine.models.draft_head`): multi-token prediction and EAGLE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.models.draft_head import DraftHead
from quire.engine.worker.async_copies import send
from quire.engine.worker.drafter import Drafts, RowsAhead, SampledStep, sample_drafts
from quire.engine.worker.input_batch import InputBatch, Ints
from quire.engine.worker.sampler import Sampler


class HeadDrafter:
    """Runs the head on all tokens of a step, each with the token that follows it, and then on its own drafts.

    The KV of the head at a position depends on the target's hidden state there, and on the next token. It is computed
    in the target's step, when both are known; behind drafts that do not count, it is computed again in a later step.
    Steps without the head leave a gap, with which later guesses are worse; so does the end of a prefix of the cache,
    where the next token was another one.
    """

    def __init__(self, head: DraftHead, caches: Sequence[LayerCache], parallel: Parallel, sampler: Sampler) -> None:
        self._head, self._caches, self._parallel, self._sampler = head, caches, parallel, sampler

    def close(self) -> None:
        """Do nothing: there are no graphs."""

    def draft(self, step: SampledStep, input_batch: InputBatch) -> Drafts | None:
        rows, head, slots = step.rows, self._head, step.rows.slots
        following = input_batch.following(slots, step.first, rows.counts)
        out = head(following, head.hidden_states(step.hidden), step.batch, self._caches)
        newest, room = step.first + rows.counts, input_batch.capacity(slots)  # at most: not all drafts may count
        most = np.minimum(step.count, room - newest)
        drafting = step.drafting[most[step.drafting] > 0]
        if not len(drafting):
            return None
        num_drafts = np.zeros_like(newest) if rows.num_drafts is None else rows.num_drafts
        last = rows.counts.cumsum() - 1 - num_drafts
        numbers = np.stack([last, newest - num_drafts, room])[:, drafting]
        places, positions, limits = send(numbers, out.device)
        accepted = step.accepted_of(drafting)
        places, positions = places + accepted, positions + accepted
        own, count = slots[drafting], int(most[drafting].max())
        out = out[places]
        common = self._parallel, self._sampler, input_batch, own
        tokens = [sample_drafts(head.logits(out), *common, positions + 1)]
        if count > 1:
            span = input_batch.span(own, newest[drafting] - 1, np.ones_like(own), ahead=count, as_decodes=False)
            everyone = torch.arange(len(own), device=out.device)
            ahead = RowsAhead.of(span.batch, everyone, limits, newest[drafting] - 1, input_batch)
        for number in range(1, count):
            # The head reads the draft at the position before the draft's own.
            batch = ahead.batch(tokens[-1], positions + (number - 1), number)
            out = head(tokens[-1], head.fed_back(out), batch, self._caches)
            tokens.append(sample_drafts(head.logits(out), *common, positions + (number + 1)))
        return Drafts(drafting, most[drafting], torch.stack(tokens, dim=1))


class SeveralHeadsDrafter:
    """Runs several heads on all tokens of a step. Head n reads a hidden state at a position, the target's or the
    previous head's, and the token n + 1 places after the position, and guesses the token behind that one: all drafts of
    a row are made at its last position.

    At the last n positions of a step, drafts stand for tokens that are not sampled yet. In the next step, the KV there
    is computed again: the target's hidden states are kept by request slot. They are not known at the end of a prefix of
    the cache, and after steps without the heads: there nothing is computed again, and guesses are worse.
    """

    def __init__(self, head: DraftHead, caches: Sequence[LayerCache], parallel: Parallel, sampler: Sampler) -> None:
        self._head, self._caches, self._parallel, self._sampler = head, caches, parallel, sampler
        self._first: Ints = np.zeros(0, np.int64)
        """The first position of the last step, by slot."""
        self._behind: Ints = np.zeros(0, np.int64)
        """The positions before it whose KV that step has computed again."""
        self._kept: Tensor | None = None
        """`[slots, heads - 1, hidden_size]`: the target's hidden states at the last positions that count, the newest
        last."""

    def close(self) -> None:
        """Do nothing: there are no graphs."""

    def draft(self, step: SampledStep, input_batch: InputBatch) -> Drafts | None:
        rows, first, head, slots = step.rows, step.first, self._head, step.rows.slots
        num_drafts = np.zeros_like(first) if rows.num_drafts is None else rows.num_drafts
        newest = first + rows.counts  # at most: not all drafts may count
        most = np.minimum(step.count, input_batch.capacity(slots) - newest)
        drafting = step.drafting[most[step.drafting] > 0]
        behind = self._catch_up(first, slots, input_batch)
        input_batch.drafted_until[slots] = 0  # until the new states are kept
        starts, counts = first - behind, rows.counts + behind
        ends = counts.cumsum()
        last, begins = ends - 1 - num_drafts, ends - counts
        states = head.hidden_states(step.hidden)
        batch = input_batch.span(slots, starts, counts, ahead=0, as_decodes=False).batch
        numbers = np.stack([slots, last, begins, newest - num_drafts])
        own_slots, places, begins_there, positions = send(numbers, states.device)
        if step.num_accepted is not None:
            accepted = torch.zeros_like(places)
            accepted[send(np.unique(rows.sampling), states.device)] = step.num_accepted
            places, positions = places + accepted, positions + accepted
        stream = hidden = self._read(states, own_slots, rows.counts, behind)
        chosen = send(drafting, states.device)
        drafts_at, drafts_from, positions = places[chosen], begins_there[chosen], positions[chosen]
        common = self._parallel, self._sampler, input_batch, slots[drafting]
        wanted, tokens = int(most[drafting].max(initial=0)), list[Tensor]()
        for number in range(head.arch.num_heads):
            following = input_batch.following(slots, starts, counts, number + 1)
            if tokens:  # draft i stands where it follows, number - i places before the last one
                back = torch.arange(number - 1, number - 1 - len(tokens), -1, device=places.device)
                there = drafts_at[:, None] - back
                there = torch.where(there < drafts_from[:, None], len(following), there)  # behind the end: not used
                following = torch.cat((following, following.new_zeros(1)))
                following = following.scatter(0, there.flatten(), torch.stack(tokens, dim=1).flatten())[:-1]
            out = head(following, stream, batch, self._caches, number)
            stream = out if head.arch.is_chained else hidden
            if number < wanted:
                logits = head.logits(out[drafts_at], number)
                tokens.append(sample_drafts(logits, *common, positions + (number + 1)))
        self._keep(hidden, own_slots, places, begins_there)
        self._remember(slots, first, behind, newest, input_batch)
        return Drafts(drafting, most[drafting], torch.stack(tokens, dim=1)) if tokens else None

    def _catch_up(self, first: Ints, slots: Ints, input_batch: InputBatch) -> Ints:
        """The positions before each row's first one whose KV is computed again."""
        missing = int(slots.max()) + 1 - len(self._first)
        if missing > 0:
            self._first, self._behind = (np.pad(each, (0, missing)) for each in (self._first, self._behind))
        # Above 0 only if the heads have run in the last step of the same request, so that it begins where that one's
        # states are kept up to.
        follows = input_batch.drafted_until[slots] > 0
        known = np.where(follows, self._behind[slots] + first - self._first[slots], 0)
        behind: Ints = np.minimum(known, self._head.arch.num_heads - 1)
        return behind

    def _remember(self, slots: Ints, first: Ints, behind: Ints, newest: Ints, input_batch: InputBatch) -> None:
        """Record that the heads have run in a step, and that its states are kept."""
        self._first[slots], self._behind[slots], input_batch.drafted_until[slots] = first, behind, newest

    def _read(self, states: Tensor, slots: Tensor, counts: Ints, behind: Ints) -> Tensor:
        """The target's hidden states at each row's positions: the kept ones, then `states` of the step's tokens."""
        kept, each = self._head.arch.num_heads - 1, counts + behind
        if self._kept is None or len(self._kept) < len(self._first):
            grown = states.new_zeros(len(self._first), kept, states.shape[1])
            if self._kept is not None:
                grown[: len(self._kept)] = self._kept
            self._kept = grown
        at = np.arange(each.sum()) - np.repeat(each.cumsum() - counts, each)  # below 0: kept
        old = np.repeat(np.arange(len(counts)) * kept, each) + kept + at
        new = len(counts) * kept + np.repeat(counts.cumsum() - counts, each) + at
        source = torch.cat((self._kept[slots].flatten(0, 1), states))
        return source.index_select(0, send(np.where(at < 0, old, new), states.device))

    def _keep(self, hidden: Tensor, slots: Tensor, places: Tensor, begins: Tensor) -> None:
        """Keep the target's hidden states up to `places`, of rows that begin at `begins`."""
        assert self._kept is not None
        back = torch.arange(1 - self._kept.shape[1], 1, device=places.device)
        self._kept[slots] = hidden[torch.maximum(places[:, None] + back, begins[:, None])]
