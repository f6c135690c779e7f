"""A drafter that is a head on the target (`quire.engine.models.draft_head`): multi-token prediction and EAGLE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import LayerCache
from quire.engine.models.draft_head import DraftHead
from quire.engine.worker.async_copies import send
from quire.engine.worker.drafter import Drafts, RowsAhead, SampledStep, sample_drafts
from quire.engine.worker.input_batch import InputBatch
from quire.engine.worker.sampler import Sampler


class HeadDrafter:
    """Runs the head on all tokens of a step, each with the token that follows it, and then on its own drafts.

    The KV of the head at a position depends on the target's hidden state there, and on the next token. It is computed
    in the target's step, when that is known; behind drafts that do not count, it is computed again in a later step.
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
            ahead = RowsAhead.of(span.batch, everyone, limits, newest[drafting] - 1, input_batch.block_size)
        for number in range(1, count):
            # The head reads the draft at the position before the draft's own.
            batch = ahead.batch(tokens[-1], positions + (number - 1), number)
            out = head(tokens[-1], head.fed_back(out), batch, self._caches)
            tokens.append(sample_drafts(head.logits(out), *common, positions + (number + 1)))
        return Drafts(drafting, most[drafting], torch.stack(tokens, dim=1))
