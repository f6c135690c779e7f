"""How ranks divide the tokens of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch, KVBlocks
from tests.fakes.ranks import on_ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("counts", [[12], [4, 1, 4], [1, 1, 8], [5, 2], [1, 2]])
def test_ranks_gather_what_each_has_of_its_own_tokens(counts: list[int], ranks: int) -> None:
    """Also where shares overlap, and where requests end there: each row comes from one rank."""
    lengths, ends = torch.tensor(counts) + 3, torch.tensor(counts).cumsum(0)
    x = torch.arange(2.0 * sum(counts)).view(-1, 2) + 1
    whole = Batch(
        token_ids=torch.arange(sum(counts)),
        positions=torch.cat([torch.arange(3, count + 3) for count in counts]),
        sequence_lengths=lengths,
        query_starts=torch.nn.functional.pad(ends, (1, 0)),
        logits_indices=ends - 1,
        groups={0: KVBlocks(torch.arange(sum(counts)), torch.zeros(len(counts), 1, dtype=torch.int64))},
    )

    def work(parallel: Parallel) -> tuple[Batch, Tensor, Tensor]:
        own = whole.share(parallel)
        assert own.shares is not None
        hidden = x[own.token_ids]
        return own, own.shares.gather(hidden), own.shares.gather_last(hidden[own.query_starts[1:] - 1])

    found = on_ranks(ranks, work)
    for own, every, last in found:
        assert torch.equal(every, x)
        assert torch.equal(last, x[ends - 1])
        assert torch.equal(own.sequence_lengths, own.positions[own.query_starts[1:] - 1] + 1)
    assert len({len(own.token_ids) for own, *_ in found}) == 1
