"""Layers that replace transformers', sharded by its plan, against the whole layer; the ranks are threads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.engine.distributed.communicator import Parallel
from quire.engine.models.transformers_backend.sharding import PlannedLinear, planned_stack
from tests.fakes.ranks import on_ranks
from tests.integration.engine.layers.test_sharding import check, fill

TRANSPOSED: Conv1D = Conv1D(10, 12)  # type: ignore[no-untyped-call]
LINEARS = (nn.Linear(12, 10), nn.Linear(12, 10, bias=False), TRANSPOSED)


@pytest.mark.parametrize("like", LINEARS, ids=["bias", "no bias", "transposed"])
def test_a_linear_layer(like: nn.Linear | Conv1D) -> None:
    x = torch.randn(5, 12)
    for style in ("replicate", "colwise_gather_output", "rowwise_split_input"):
        check(partial(PlannedLinear, "up", like, style), x)

    def down(parallel: Parallel) -> Tensor:
        out: Tensor = fill(PlannedLinear("down", like, "rowwise", parallel))(x.chunk(parallel.size, -1)[parallel.rank])
        return out

    def up(parallel: Parallel) -> Tensor:
        out: Tensor = fill(PlannedLinear("up", like, "colwise", parallel))(x)
        return out

    expected = on_ranks(1, down)[0]
    for rank in on_ranks(2, down):
        torch.testing.assert_close(rank, expected)
    torch.testing.assert_close(torch.cat(on_ranks(2, up), -1), on_ranks(1, up)[0])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("style", "dim"), [("packed_colwise", 1), ("packed_rowwise", 2)])
def test_a_rank_has_the_same_share_of_both_halves(style: str, dim: int, is_transposed: bool) -> None:
    """Of the gate and of the up projection of every expert, which are stored as one tensor."""
    experts = torch.randn(3, 8, 12)
    stored = experts.transpose(1, 2) if is_transposed else experts

    def held(parallel: Parallel) -> Tensor:
        weight = planned_stack("experts", experts, style, parallel, is_transposed=is_transposed)
        for shard in weight.shards:
            assert shard.expert is not None
            weight.data[shard.target] = stored[shard.expert][shard.source]
        return weight.transpose(1, 2) if is_transposed else weight.data

    gate, up = experts.chunk(2, dim)
    for rank, found in enumerate(on_ranks(2, held)):
        assert torch.equal(found, torch.cat([half.chunk(2, dim)[rank] for half in (gate, up)], dim))
