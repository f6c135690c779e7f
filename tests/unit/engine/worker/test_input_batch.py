"""Plans applied to the request state, and the batch they make."""

from __future__ import annotations

import pytest
import torch

from quire.engine.architecture.media_spec import MediaSpec, TowerSpec
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker import async_copies, input_batch
from quire.engine.worker.async_copies import Array
from quire.engine.worker.input_batch import InputBatch
from quire.engine.worker.media_rows import MediaRows

CPU = torch.device("cpu")
PARAMS = SamplingParams()


def new(
    slot: int, tokens: list[int], computed: int, blocks: list[int], params: SamplingParams = PARAMS
) -> NewRequestData:
    return NewRequestData(slot, tokens, len(tokens), computed, blocks, params)


@pytest.fixture(params=[True, False], ids=["one memory", "apart"])
def is_shared(request: pytest.FixtureRequest) -> bool:
    """Whether the device's memory is the host's."""
    shared: bool = request.param
    return shared


def test_mixed_batch(is_shared: bool) -> None:
    states = InputBatch(4, 32, 4, is_shared=is_shared)
    first = SchedulerOutput(
        0,
        [],
        [new(2, list(range(10, 20)), 4, [7, 3]), new(0, [5], 0, [9])],
        [CachedRequestData(2, 3, [], []), CachedRequestData(0, 1, [], [])],
    )
    rows = states.apply(first)
    assert rows.sampling.tolist() == [1]
    step, _ = states.batch(rows)
    assert step.token_ids.tolist() == [14, 15, 16, 5]
    assert step.positions.tolist() == [4, 5, 6, 0]
    assert step.attention(0).slot_mapping.tolist() == [12, 13, 14, 36]
    assert step.attention(0).block_tables[0].tolist() == [7, 3]
    assert step.attention(0).block_tables[1, 0].item() == 9
    assert step.sequence_lengths.tolist() == [7, 1]
    assert step.query_starts.tolist() == [0, 3, 4]
    assert step.logits_indices.tolist() == [3]
    states.advance(rows)

    rows = states.apply(
        SchedulerOutput(1, [], [], [CachedRequestData(0, 1, [77], []), CachedRequestData(2, 3, [], [6])])
    )
    assert rows.sampling.tolist() == [0, 1]
    step, _ = states.batch(rows)
    assert step.token_ids.tolist() == [77, 17, 18, 19]
    assert step.positions.tolist() == [1, 7, 8, 9]
    assert step.attention(0).slot_mapping.tolist() == [37, 15, 24, 25]
    assert step.attention(0).block_tables[1].tolist() == [7, 3, 6]
    assert step.logits_indices.tolist() == [0, 3]


def test_rows_by_adapters(is_shared: bool) -> None:
    """Of tokens from where the adapter starts, of rows' last tokens, and of drafts; none has one later."""
    states = InputBatch(5, 32, 4, is_shared=is_shared, num_adapter_slots=3)
    requests = [new(slot, [*range(10)], 0, [slot]) for slot in range(4)]
    requests[0].adapter_slot = requests[2].adapter_slot = 2
    requests[3].adapter_slot, requests[3].adapter_start = 1, 2
    scheduled = [CachedRequestData(slot, count, [], []) for slot, count in enumerate((1, 1, 2, 3))]
    rows = states.apply(SchedulerOutput(0, [], requests, scheduled))
    batch, _ = states.batch(rows)
    assert batch.adapters is not None
    assert [(each.order.tolist(), each.starts.tolist()) for each in batch.adapters] == [
        ([6, 0, 2, 3, 1, 4, 5], [0, 0, 1, 4, 7]),
        ([3, 0, 2, 1], [0, 0, 1, 3, 4]),
        ([], [0, 0, 0, 0, 0]),
    ]
    states.advance(rows)
    for slot, count in enumerate((9, 9, 8, 7)):
        states.num_computed_tokens[slot] += count
    scheduled = [CachedRequestData(slot, 2, [slot], [], draft_token_ids=[7]) for slot in (1, 3)]
    rows = states.apply(SchedulerOutput(1, [0], [], scheduled))
    batch, _ = states.batch(rows)
    assert batch.adapters is not None
    assert len(batch.sequence_lengths) == 4  # each token is a row
    for each in batch.adapters:
        assert (each.order.tolist(), each.starts.tolist()) == ([2, 3, 0, 1], [0, 0, 2, 2, 4])
    states.advance(rows)
    before = new(0, [5, 6, 7], 0, [8])
    before.adapter_slot, before.adapter_start = 0, 3
    scheduled = [CachedRequestData(slot, 1, [], []) for slot in (0, 1)]
    batch, _ = states.batch(states.apply(SchedulerOutput(2, [], [before], scheduled)))
    assert batch.adapters is None


def test_tokens_of_images_have_logits(is_shared: bool) -> None:
    """Their id may be outside the vocabulary, whose logits penalties and log-probabilities index."""
    spec = MediaSpec(tower=TowerSpec(hidden_size=8), image_token_id=100)
    states = InputBatch(2, 8, 4, is_shared=is_shared, media=MediaRows(2, spec, 100, has_axes=False))
    request = new(1, [98, 100, 100, 5], 0, [0], SamplingParams(prompt_logprobs=0))
    request.media = [MediaItem(b"a" * 16, "image", 1, 2, (MediaRun(0, 2),))]
    rows = states.apply(SchedulerOutput(0, [], [request], [CachedRequestData(1, 4, [], [])]))
    assert states.scored_tokens(rows)[1].tolist() == [99, 99, 5]
    states.batch(rows)
    assert states.memory[8:12].tolist() == [98, 99, 99, 5]


def test_each_group_of_layers_has_slots_and_block_tables(is_shared: bool) -> None:
    states = InputBatch(4, 32, 4, groups=2, is_shared=is_shared)
    start = [new(2, list(range(10, 20)), 4, [7, 8, 3, 4]), new(0, [5], 0, [9, 1])]
    rows = states.apply(
        SchedulerOutput(0, [], start, [CachedRequestData(2, 3, [], []), CachedRequestData(0, 1, [], [])])
    )
    step, _ = states.batch(rows)
    of_groups = [step.attention(group) for group in range(2)]
    assert [each.slot_mapping.tolist() for each in of_groups] == [[12, 13, 14, 36], [16, 17, 18, 4]]
    assert [each.block_tables.tolist() for each in of_groups] == [[[7, 3], [9, 0]], [[8, 4], [1, 0]]]
    assert all(each.block_tables.is_contiguous() for each in of_groups)
    assert all(each.sequence_lengths.tolist() == [7, 1] for each in of_groups)
    states.advance(rows)

    rows = states.apply(SchedulerOutput(1, [], [], [CachedRequestData(2, 3, [], [6, 2])]))
    step, _ = states.batch(rows)
    assert [step.attention(group).slot_mapping.tolist() for group in range(2)] == [[15, 24, 25], [19, 8, 9]]
    assert [step.attention(group).block_tables.tolist() for group in range(2)] == [[[7, 3, 6]], [[8, 4, 2]]]


def test_a_slot_is_taken_until_it_is_released(is_shared: bool) -> None:
    states = InputBatch(2, 8, 4, is_shared=is_shared)
    states.apply(SchedulerOutput(0, [], [new(1, [1, 2, 3, 4, 5], 0, [1, 2])], []))
    with pytest.raises(AssertionError, match="slot 1"):
        states.apply(SchedulerOutput(1, [], [new(1, [6], 0, [3])], []))
    rows = states.apply(SchedulerOutput(2, [1], [new(1, [6], 0, [3])], [CachedRequestData(1, 1, [], [])]))
    assert rows.sampling.tolist() == [0]
    step, _ = states.batch(rows)
    assert (step.token_ids.tolist(), step.attention(0).slot_mapping.tolist()) == ([6], [12])


def test_decodes_continue_from_the_appended_tokens(is_shared: bool) -> None:
    states = InputBatch(4, 32, 4, is_shared=is_shared)
    start = [new(2, [1, 2, 3], 0, [7]), new(0, [5], 0, [9])]
    rows = states.apply(
        SchedulerOutput(0, [], start, [CachedRequestData(2, 3, [], []), CachedRequestData(0, 1, [], [])])
    )
    _, places = states.batch(rows)
    states.advance(rows)
    states.write_sampled(places, torch.tensor([40, 50]))
    states.append_sampled(rows)

    rows = states.apply(SchedulerOutput(1, [], [], [], decodes=[0, 2]))
    step, _ = states.batch(rows)
    assert rows.sampling.tolist() == [0, 1]
    assert step.token_ids.tolist() == [50, 40]
    assert step.positions.tolist() == [1, 3]
    assert step.attention(0).slot_mapping.tolist() == [37, 31]
    assert step.query_starts.tolist() == [0, 1, 2]
    assert step.logits_indices.tolist() == [0, 1]
    states.advance(rows)

    # Stages that do not sample are told the tokens; a row that needs a block stands behind the bare ones.
    rows = states.apply(SchedulerOutput(2, [], [], [CachedRequestData(2, 1, [41], [3])], decodes=[0], token_ids=[51]))
    step, _ = states.batch(rows)
    assert step.token_ids.tolist() == [51, 41]
    assert step.attention(0).slot_mapping.tolist() == [38, 12]


def test_only_what_changed_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def send(values: Array, device: torch.device) -> torch.Tensor:
        sent.append(len(values))
        return async_copies.send(values, device)

    monkeypatch.setattr(input_batch, "send", send)
    states = InputBatch(4, 1024, 4, is_shared=False)
    prompt = list(range(900))
    rows = states.apply(
        SchedulerOutput(0, [], [new(1, prompt, 0, list(range(225)))], [CachedRequestData(1, 900, [], [])])
    )
    _, places = states.batch(rows)
    states.advance(rows)
    states.write_sampled(places, torch.tensor([77]))
    states.append_sampled(rows)
    rows = states.apply(SchedulerOutput(1, [], [], [CachedRequestData(1, 1, [], [300])]))
    step, places = states.batch(rows)
    assert (step.token_ids.tolist(), step.attention(0).slot_mapping.tolist(), places.tolist()) == (
        [77],
        [1200],
        [1024 + 901],
    )
    assert step.attention(0).block_tables[0].tolist() == [*range(225), 300]
    assert sent[0] > 2 * 900
    assert sent[1] < 16
