"""Plans applied to the request state, and the batch they make."""

from __future__ import annotations

import pytest
import torch

from quire.engine.messages import NewRequest, SamplingParams, Scheduled, StepPlan
from quire.engine.worker.batch import RequestStates

CPU = torch.device("cpu")
PARAMS = SamplingParams()


def new(slot: int, tokens: list[int], computed: int, blocks: list[int]) -> NewRequest:
    return NewRequest(slot, tokens, len(tokens), computed, blocks, PARAMS)


def test_mixed_batch() -> None:
    states = RequestStates(4, 32, 4)
    first = StepPlan(
        0,
        [],
        [new(2, list(range(10, 20)), 4, [7, 3]), new(0, [5], 0, [9])],
        [Scheduled(2, 3, [], []), Scheduled(0, 1, [], [])],
    )
    rows = states.apply(first)
    assert rows.sampling.tolist() == [1]
    batch, _ = states.batch(rows)
    assert batch.token_ids.tolist() == [14, 15, 16, 5]
    assert batch.positions.tolist() == [4, 5, 6, 0]
    assert batch.slots.tolist() == [12, 13, 14, 36]
    assert batch.block_tables[0].tolist() == [7, 3]
    assert batch.block_tables[1, 0].item() == 9
    assert batch.sequence_lengths.tolist() == [7, 1]
    assert batch.query_starts.tolist() == [0, 3, 4]
    assert batch.sampled.tolist() == [3]
    states.advance(rows)

    rows = states.apply(StepPlan(1, [], [], [Scheduled(0, 1, [77], []), Scheduled(2, 3, [], [6])]))
    assert rows.sampling.tolist() == [0, 1]
    batch, _ = states.batch(rows)
    assert batch.token_ids.tolist() == [77, 17, 18, 19]
    assert batch.positions.tolist() == [1, 7, 8, 9]
    assert batch.slots.tolist() == [37, 15, 24, 25]
    assert batch.block_tables[1].tolist() == [7, 3, 6]
    assert batch.sampled.tolist() == [0, 3]


def test_each_group_of_layers_has_slots_and_block_tables() -> None:
    states = RequestStates(4, 32, 4, groups=2)
    start = [new(2, list(range(10, 20)), 4, [7, 8, 3, 4]), new(0, [5], 0, [9, 1])]
    rows = states.apply(StepPlan(0, [], start, [Scheduled(2, 3, [], []), Scheduled(0, 1, [], [])]))
    batch, _ = states.batch(rows)
    of_groups = [batch.of(group) for group in range(2)]
    assert [each.slots.tolist() for each in of_groups] == [[12, 13, 14, 36], [16, 17, 18, 4]]
    assert [each.block_tables.tolist() for each in of_groups] == [[[7, 3], [9, 0]], [[8, 4], [1, 0]]]
    assert all(each.block_tables.is_contiguous() for each in of_groups)
    assert all(each.sequence_lengths.tolist() == [7, 1] for each in of_groups)
    states.advance(rows)

    rows = states.apply(StepPlan(1, [], [], [Scheduled(2, 3, [], [6, 2])]))
    batch, _ = states.batch(rows)
    assert [batch.of(group).slots.tolist() for group in range(2)] == [[15, 24, 25], [19, 8, 9]]
    assert [batch.of(group).block_tables.tolist() for group in range(2)] == [[[7, 3, 6]], [[8, 4, 2]]]


def test_a_slot_is_taken_until_it_is_released() -> None:
    states = RequestStates(2, 8, 4)
    states.apply(StepPlan(0, [], [new(1, [1, 2, 3, 4, 5], 0, [1, 2])], []))
    with pytest.raises(AssertionError, match="slot 1"):
        states.apply(StepPlan(1, [], [new(1, [6], 0, [3])], []))
    rows = states.apply(StepPlan(2, [1], [new(1, [6], 0, [3])], [Scheduled(1, 1, [], [])]))
    assert rows.sampling.tolist() == [0]
    batch, _ = states.batch(rows)
    assert (batch.token_ids.tolist(), batch.slots.tolist()) == ([6], [12])


def test_decodes_are_bare_slots_that_go_on_from_what_was_kept() -> None:
    states = RequestStates(4, 32, 4)
    start = [new(2, [1, 2, 3], 0, [7]), new(0, [5], 0, [9])]
    rows = states.apply(StepPlan(0, [], start, [Scheduled(2, 3, [], []), Scheduled(0, 1, [], [])]))
    _, places = states.batch(rows)
    states.advance(rows)
    states.keep(rows, places, torch.tensor([40, 50]))

    rows = states.apply(StepPlan(1, [], [], [], decodes=[0, 2]))
    batch, _ = states.batch(rows)
    assert rows.sampling.tolist() == [0, 1]
    assert batch.token_ids.tolist() == [50, 40]
    assert batch.positions.tolist() == [1, 3]
    assert batch.slots.tolist() == [37, 31]
    assert batch.query_starts.tolist() == [0, 1, 2]
    assert batch.sampled.tolist() == [0, 1]
    states.advance(rows)

    # Stages that do not sample are told the tokens; a row that needs a block stands behind the bare ones.
    rows = states.apply(StepPlan(2, [], [], [Scheduled(2, 1, [41], [3])], decodes=[0], token_ids=[51]))
    batch, _ = states.batch(rows)
    assert batch.token_ids.tolist() == [51, 41]
    assert batch.slots.tolist() == [38, 12]
