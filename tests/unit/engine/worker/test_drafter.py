"""The batches of a drafter, and how many drafts count, without a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker.drafter import Drafts, RowsAhead, count_accepted, may_draft
from quire.engine.worker.input_batch import InputBatch, Ints


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


@pytest.fixture(params=[True, False], ids=["one memory", "apart"])
def states(request: pytest.FixtureRequest) -> InputBatch:
    """Slot 2 has 10 tokens and 3 blocks of 4, in two groups of layers; slot 0 one token and one block."""
    made = InputBatch(4, 32, 4, groups=2, is_shared=request.param)
    start = [
        NewRequestData(2, list(range(10, 20)), 10, 4, [7, 8, 3, 4, 6, 2], SamplingParams()),
        NewRequestData(0, [5], 1, 0, [9, 1], SamplingParams()),
    ]
    rows = made.apply(SchedulerOutput(0, [], start, [CachedRequestData(2, 6, [], []), CachedRequestData(0, 1, [], [])]))
    made.batch(rows)
    return made


def test_a_request_starts_with_what_is_cached(states: InputBatch) -> None:
    assert states.num_drafter_tokens[[2, 0]].tolist() == [4, 0]
    assert states.capacity(ints(2, 0)).tolist() == [12, 4]


def test_a_span_has_any_tokens_of_some_rows(states: InputBatch) -> None:
    span = states.span(ints(2, 0), ints(7, 0), ints(3, 1), ahead=2, as_decodes=False)
    batch = span.batch
    assert batch.token_ids.tolist() == [17, 18, 19, 5]
    assert batch.positions.tolist() == [7, 8, 9, 0]
    assert batch.sequence_lengths.tolist() == [10, 1]
    assert batch.query_starts.tolist() == [0, 3, 4]
    assert batch.attention(0).slot_mapping.tolist() == [15, 24, 25, 36]
    assert batch.attention(1).slot_mapping.tolist() == [19, 8, 9, 4]
    assert batch.attention(0).block_tables[0].tolist() == [7, 3, 6]  # far enough for two more tokens
    assert span.rows.tolist() == [0, 1]


def test_each_token_may_be_a_row(states: InputBatch) -> None:
    span = states.span(ints(2, 0), ints(7, 0), ints(3, 1), ahead=2, as_decodes=True)
    assert span.batch.sequence_lengths.tolist() == [8, 9, 10, 1]
    assert span.batch.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert span.batch.attention(0).block_tables[:3].tolist() == [[7, 3, 6]] * 3
    assert span.rows.tolist() == [0, 3]


def test_guessed_tokens_follow_in_the_rows_slots(states: InputBatch) -> None:
    """And are not stored beyond them."""
    span = states.span(ints(2, 0), ints(7, 0), ints(3, 1), ahead=3, as_decodes=False)
    ahead = RowsAhead.of(span.batch, torch.tensor([0, 1]), torch.tensor([12, 4]), ints(9, 0), states)
    batch = ahead.batch(torch.tensor([70, 71]), torch.tensor([10, 1]), 1)
    assert batch.positions.tolist() == [10, 1]
    assert batch.sequence_lengths.tolist() == [11, 2]
    assert batch.attention(0).slot_mapping.tolist() == [26, 37]
    assert batch.attention(1).slot_mapping.tolist() == [10, 5]
    batch = ahead.batch(torch.tensor([70, 71]), torch.tensor([12, 4]), 3)
    assert batch.attention(0).slot_mapping.tolist() == [-1, -1]
    assert batch.positions.tolist() == [11, 3]


def test_drafts_count_up_to_the_first_wrong_one() -> None:
    states = InputBatch(4, 32, 4)
    start = [NewRequestData(slot, [1, 2], 2, 0, [slot], SamplingParams()) for slot in range(4)]
    prompts = [CachedRequestData(slot, 2, [], []) for slot in range(4)]
    rows = states.apply(SchedulerOutput(0, [], start, prompts))
    batch, places = states.batch(rows)
    assert count_accepted(rows, batch, torch.zeros(4, dtype=torch.int64)) is None
    states.advance(rows)
    states.write_sampled(places, torch.full((4,), 3))
    states.append_sampled(rows)
    drafted = [
        CachedRequestData(1, 4, [], [5], [30, 31, 32]),
        CachedRequestData(2, 2, [], [], [30]),
        CachedRequestData(3, 4, [], [6], [30, 31, 32]),
    ]
    rows = states.apply(SchedulerOutput(1, [], [], drafted, decodes=[0]))
    batch, _ = states.batch(rows)
    sampled = torch.tensor([30, *(30, 31, 32, 33), *(30, 31), *(30, 9, 32, 33)])
    counted = count_accepted(rows, batch, sampled)
    assert counted is not None
    assert counted.tolist() == [0, 3, 1, 1]
    assert may_draft(rows, []).tolist() == [0, 1, 2, 3]
    assert may_draft(rows, [2]).tolist() == [0, 1, 3]


def test_a_row_reports_as_many_drafts_as_have_slots() -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert Drafts(ints(3, 5), ints(2, 3), tokens).by_row(tokens.numpy()) == {3: [1, 2], 5: [4, 5, 6]}
