"""A chained row is the row that the core would plan if it knew how the step before ended."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from quire.engine.layers.batch import Batch
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker.chained_rows import StepEnd
from quire.engine.worker.drafter import Drafts, count_accepted
from quire.engine.worker.input_batch import InputBatch, StepRows

CPU = torch.device("cpu")
SAMPLED = {0: [50, 51, 99, 98], 1: [60], 2: [70, 99], 3: [80, 81, 82]}
"""By slot, the tokens that the first step samples after its row's last known token and drafts."""
GUESSED = {0: [50, 51, 52], 1: [], 2: [71], 3: [80, 81]}
"""Its drafts, of which two, none, none and two are accepted."""
COUNTS = {0: 2, 1: 2, 3: 1}
"""Number of drafts that are made at the end of the first step; none in slot 2."""
DRAFTS = {0: [10, 11], 1: [20, 21], 3: [30, 31]}


def started(*, is_shared: bool) -> tuple[InputBatch, StepRows, Batch, torch.Tensor]:
    """The first step, of rows with three, no, one and two drafts, and all that it samples."""
    states = InputBatch(5, 64, 4, is_shared=is_shared)
    blocks = [[slot * 8 + number for number in range(4)] for slot in range(4)]
    prompts = SchedulerOutput(
        0,
        [],
        [NewRequestData(slot, [1, 2, 3 + slot], 3, 0, blocks[slot], SamplingParams()) for slot in range(4)],
        [CachedRequestData(slot, 2, [], []) for slot in range(4)],
    )
    rows = states.apply(prompts)
    states.batch(rows)
    states.advance(rows)
    verified = [CachedRequestData(slot, 1 + len(GUESSED[slot]), [], [], GUESSED[slot]) for slot in (3, 0, 2)]
    rows = states.apply(SchedulerOutput(1, [], [], verified, [1]))
    batch, places = states.batch(rows)
    states.advance(rows)
    tokens = torch.tensor([token for slot in (1, 3, 0, 2) for token in SAMPLED[slot]])
    states.write_sampled(places, tokens)
    states.append_sampled(rows)
    return states, rows, batch, tokens


def parts(batch: Batch, rows: StepRows) -> list[list[int]]:
    tensors = [*(getattr(batch, each.name) for each in fields(batch)), *batch.attention(0)]
    arrays = [getattr(rows, each.name) for each in fields(rows)]
    found = [value.ravel().tolist() for value in tensors if isinstance(value, torch.Tensor)]
    return found + [value.tolist() for value in arrays if isinstance(value, np.ndarray)]


@pytest.mark.parametrize("is_shared", [True, False], ids=["one memory", "apart"])
@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_a_chained_row_is_that_of_a_core_that_waits(most: int, is_shared: bool) -> None:
    states, rows, batch, tokens = started(is_shared=is_shared)
    end = StepEnd(rows, count_accepted(rows, batch, tokens), CPU)
    made = {row: slot for row, slot in enumerate(rows.slots.tolist()) if slot in DRAFTS}
    end.drafts = Drafts(
        np.array([*made]),
        np.array([COUNTS[slot] for slot in made.values()]),
        torch.tensor([DRAFTS[slot] for slot in made.values()]),
    )
    order = [2, 0, 3, 1]
    plan = SchedulerOutput(
        2, [], [], [CachedRequestData(slot, 1 + most, [], [slot * 8 + 4], is_chained=True) for slot in order]
    )
    counts = end.resume(plan, states)
    assert counts == {slot: min(most, COUNTS.get(slot, 0)) for slot in order}
    rows = states.apply(plan, counts)
    batch, places = states.batch(rows)

    others, *_ = started(is_shared=is_shared)
    known = {0: ([50, 51, 99], 2), 1: ([], 0), 2: ([70], 0), 3: ([80, 81, 82], 2)}
    told = [
        CachedRequestData(slot, 1 + counts[slot], *(known[slot][0], [slot * 8 + 4]), drafts, known[slot][1])
        for slot in order
        for drafts in [DRAFTS.get(slot, [])[: counts[slot]]]
    ]
    expected = others.apply(SchedulerOutput(2, [], [], told))
    other_batch, other_places = others.batch(expected)
    assert parts(batch, rows) == parts(other_batch, expected)
    assert places.tolist() == other_places.tolist()
    assert (rows.num_drafts is None) == (most == 0)
    used = [slice(slot * 64, slot * 64 + int(others.num_tokens[slot]) + counts[slot]) for slot in range(4)]
    for memory in used:
        assert states.memory[memory].tolist() == others.memory[memory].tolist()


def test_where_no_drafts_were_made_a_chained_row_has_one_token() -> None:
    states, rows, batch, tokens = started(is_shared=True)
    end = StepEnd(rows, count_accepted(rows, batch, tokens), CPU)
    plan = SchedulerOutput(2, [], [], [CachedRequestData(0, 4, [], [], is_chained=True)])
    rows = states.apply(plan, end.resume(plan, states))
    batch, _ = states.batch(rows)
    assert (batch.token_ids.tolist(), batch.positions.tolist(), rows.counts.tolist()) == ([99], [5], [1])


def test_a_row_is_chained_only_to_a_row_of_the_step_before() -> None:
    states, rows, *_ = started(is_shared=True)
    plan = SchedulerOutput(2, [], [], [CachedRequestData(4, 2, [], [], is_chained=True)])
    with pytest.raises(KeyError):
        StepEnd(rows, None, CPU).resume(plan, states)
