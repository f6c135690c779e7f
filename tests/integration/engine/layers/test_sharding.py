"""Sharded layers against the whole layer, the ranks being threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec
from quire.engine.architecture.spec_parts import NormSpec, RopeSpec, Units, linear
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import Attention
from quire.engine.layers.batch import Batch, KVBlocks
from quire.engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.linear import ColumnParallelLinear, RowParallelLinear, divided
from quire.engine.layers.mlp import MLP
from quire.engine.layers.rotary import Rotary, inverse_frequencies
from quire.engine.layers.weight import Weight
from tests.fakes.configs import NORM, TINY_ATTENTION, TINY_FEED_FORWARD
from tests.fakes.ranks import on_ranks

SIZES = (1, 2, 4)


def fill(module: nn.Module) -> nn.Module:
    """Each parameter from slices of whole tensors that depend on its name and the tensor's shape alone."""
    for path, weight in module.named_parameters():
        assert isinstance(weight, Weight)
        weight.data.zero_()
        for shard in weight.shards:
            generator = torch.Generator().manual_seed(
                crc32(f"{path} {shard.part} {shard.expert} {shard.shape}".encode())
            )
            tensor = torch.randn(shard.shape, generator=generator)
            weight.data[shard.target] = tensor[shard.source]
    return module


def check(build: Callable[[Parallel], nn.Module], x: Tensor, sizes: tuple[int, ...] = SIZES) -> None:
    """The layer gives the same on every rank, however many there are."""
    expected = on_ranks(1, lambda parallel: fill(build(parallel))(x))[0]
    for size in sizes:
        for result in on_ranks(size, lambda parallel: fill(build(parallel))(x)):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_column_parallel_ranks_hold_the_parts_one_after_the_other(size: int, bias: bool) -> None:
    x = torch.randn(5, 12)

    def run(parallel: Parallel) -> Tensor:
        parts = [divided("a", 8, parallel), divided("b", 16, parallel)]
        out: Tensor = fill(ColumnParallelLinear(12, parts, bias=bias))(x)
        return out

    whole_a, whole_b = on_ranks(1, run)[0].split_with_sizes([8, 16], dim=-1)
    shares = [result.split_with_sizes([8 // size, 16 // size], dim=-1) for result in on_ranks(size, run)]
    torch.testing.assert_close(torch.cat([a for a, _ in shares], -1), whole_a)
    torch.testing.assert_close(torch.cat([b for _, b in shares], -1), whole_b)


@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_sums_and_adds_its_bias_once(bias: bool) -> None:
    x = torch.randn(5, 16)

    class Row(nn.Module):
        def __init__(self, parallel: Parallel) -> None:
            super().__init__()
            self.linear = RowParallelLinear(16, 9, parallel, bias=bias)
            self.rank, self.width = parallel.rank, 16 // parallel.size

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x[:, self.rank * self.width :][:, : self.width])
            return out

    check(Row, x)


@pytest.mark.parametrize("vocab", [5, 97, 128])
def test_embedding_and_head_with_uneven_vocabulary(vocab: int) -> None:
    check(lambda parallel: VocabParallelEmbedding(vocab, 12, parallel), torch.arange(vocab))
    check(lambda parallel: ParallelLMHead(vocab, 12, parallel), torch.randn(3, 12))


@pytest.mark.parametrize("bias", [True, False])
def test_feed_forward(bias: bool) -> None:
    spec = replace(TINY_FEED_FORWARD, bias=bias)
    check(lambda parallel: MLP(spec, 32, parallel), torch.randn(7, 32))
    ungated = replace(spec, is_gated=False, activation="gelu_tanh")
    check(lambda parallel: MLP(ungated, 32, parallel), torch.randn(7, 32))


@pytest.mark.parametrize("heads", [8, 4, 2, 1])
def test_attention_replicates_kv_heads_where_there_are_fewer_than_ranks(heads: int) -> None:
    spec = replace(TINY_ATTENTION, num_kv_heads=heads, qkv_bias=True, output_bias=True, qk_norm=NORM)
    check(lambda parallel: CachedAttention(spec, parallel), torch.randn(6, 32), (1, 2, 4, 8))


@pytest.mark.parametrize("heads", [8, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": NORM, "qk_norm_over": "all heads"},
        {"qk_norm": NormSpec(eps=1e-5, kind="layer"), "qk_norm_over": "each head"},
        {"has_sinks": True},
        {"alibi": 0.5, "rope": None},
        {"window": 3, "softcap": 5.0},
    ],
    ids=str,
)
def test_what_belongs_to_heads_is_cut_with_them(heads: int, changes: dict[str, Any]) -> None:
    spec = replace(TINY_ATTENTION, num_kv_heads=heads, **changes)
    check(lambda parallel: CachedAttention(spec, parallel), torch.randn(6, 32), (1, 2, 4, 8))


class CachedAttention(nn.Module):
    """One request's prefill, as a function of its hidden states alone."""

    def __init__(self, spec: attention_spec.AttentionSpec, parallel: Parallel) -> None:
        super().__init__()
        self.attention = Attention(spec, 32, parallel)
        self.spec, self.size = spec, parallel.size

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, *prefill(self.spec, len(x), self.size))
        return out


def prefill(spec: attention_spec.AttentionSpec, count: int, ranks: int = 1) -> tuple[Batch, Tensor | None, LayerCache]:
    """One request's whole prompt, the turns of its positions, and the cache of a layer on one of the ranks."""
    shape = (1, 3, spec.kv_heads_per_rank(ranks), 4, spec.head_dim)
    cache = kernels.allocate_kv_cache(*shape, torch.float32, torch.device("cpu"))[0]
    positions = torch.arange(count)
    batch = Batch(
        token_ids=positions,
        positions=positions,
        sequence_lengths=torch.tensor([count]),
        query_starts=torch.tensor([0, count]),
        logits_indices=torch.tensor([count - 1]),
        groups={0: KVBlocks(positions, torch.arange(3)[None, : -(-count // 4)])},
    )
    return batch, Rotary(spec.rope, 100)(positions), LayerCache(cache)


def test_what_ranks_cannot_divide_is_a_mistake() -> None:
    class Rank(Parallel):
        size = 2

    own = FromSpec(linear("up", 6, 4, rows_of=Units(3, "heads")), Rank())
    with pytest.raises(AssertionError):
        own.weight("up")


def test_linear_rope_is_slower_by_its_factor() -> None:
    plain = inverse_frequencies(RopeSpec(theta=10000.0, dim=8), 100)
    slow = inverse_frequencies(RopeSpec(theta=10000.0, dim=8, kind="linear", factor=4.0), 100)
    torch.testing.assert_close(slow, plain / 4)
