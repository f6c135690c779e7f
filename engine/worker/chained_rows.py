"""Rows that continue where the previous step ends; the core has planned them before it knew where that is."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker.async_copies import HostCopy, send
from quire.engine.worker.drafter import Drafts
from quire.engine.worker.input_batch import InputBatch, Ints, StepRows


class StepEnd:
    """The ends of a step's rows: the sampled tokens and, once they are made, the drafts of the following tokens."""

    def __init__(self, rows: StepRows, num_accepted: Tensor | None, device: torch.device) -> None:
        """`num_accepted` is as in `SampledStep`."""
        self._rows, self._device = rows, device
        self._num_accepted = None if num_accepted is None else HostCopy([num_accepted], device)
        self.drafts: Drafts | None = None

    def resume(self, plan: SchedulerOutput, input_batch: InputBatch) -> dict[int, int]:
        """Bring the state of the plan's chained rows up to date, and write their drafts behind their tokens. Returns
        the number of drafts of each, by slot.

        On a GPU this waits until the step has sampled, while drafts are still being made.
        """
        chained = [(row.slot, row.num_tokens - 1) for row in plan.scheduled if row.is_chained]
        if not chained:
            return {}
        numbers = {slot: number for number, slot in enumerate(self._rows.slots.tolist())}
        rows: Ints = np.array([numbers[slot] for slot, _ in chained])
        slots, most = np.array(chained, np.int64).T
        if self._num_accepted is not None and self._rows.num_drafts is not None:
            (accepted,) = self._num_accepted.arrays()
            found = accepted[np.searchsorted(np.unique(self._rows.sampling), rows)]
            had_drafts = self._rows.num_drafts[rows] > 0  # the tokens of other rows are appended at once
            input_batch.num_computed_tokens[slots] += np.where(had_drafts, found, 0)
            input_batch.num_tokens[slots] += np.where(had_drafts, found + 1, 0)
        if self.drafts is None:
            return dict.fromkeys(slots.tolist(), 0)
        made = dict(zip(self.drafts.rows.tolist(), enumerate(self.drafts.counts.tolist()), strict=True))
        at, available = np.array([made.get(row, (0, 0)) for row in rows.tolist()], np.int64).T
        counts = np.minimum(available, most)
        ahead = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        places = input_batch.token_indices(np.repeat(slots, counts), np.repeat(input_batch.num_tokens[slots], counts))
        if len(ahead):
            places, at, ahead = send(np.stack([places + ahead, np.repeat(at, counts), ahead]), self._device)
            input_batch.write_sampled(places, self.drafts.tokens[at, ahead])
        return dict(zip(slots.tolist(), counts.tolist(), strict=True))
