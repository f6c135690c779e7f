"""Blocks of attention and a feed-forward layer that several layers share, as described by
`quire.engine.architecture.model_spec.SharedBlockSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.model_spec import MLPSpec, SharedBlockSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import Attention, Batch
from quire.engine.layers.linear import ColumnParallelLinear, Partition, divided, kv_heads
from quire.engine.layers.mlp import MLP
from quire.engine.layers.norm import make_norm


class SharedBlock(nn.Module):
    """What layers with the same block share."""

    def __init__(
        self,
        spec: SharedBlockSpec,
        attention: AttentionSpec,
        feed_forward: MLPSpec,
        hidden_size: int,
        parallel: Parallel,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec.norm, attention.input_size)
        self.attention = Attention(attention, hidden_size, parallel)
        self.feed_forward_norm = make_norm(spec.norm, hidden_size)
        self.feed_forward = MLP(feed_forward, hidden_size, parallel)

    def forward(
        self,
        x: Tensor,
        batch: Batch,
        cos_sin: Tensor,
        cache: Tensor,
        attention_adapter: Adapter | None,
        feed_forward_adapter: Adapter | None,
    ) -> Tensor:
        """`[tokens, input_size]`, and what is the layer's own, → `[tokens, hidden_size]`."""
        normed = self.attention_norm(x)
        added = None if attention_adapter is None else attention_adapter(normed)
        normed = self.feed_forward_norm(self.attention(normed, batch, cos_sin, cache, added=added))
        added = () if feed_forward_adapter is None else (feed_forward_adapter(normed),)
        return self.feed_forward(normed, *added)  # type: ignore[no-any-return]


class Adapter(nn.Module):
    """Changes of low rank to linear layers with the same input; `ups` are the rank's rows of each of their weights."""

    def __init__(self, in_features: int, rank: int, ups: Mapping[str, Sequence[Partition]]) -> None:
        super().__init__()
        self.down = ColumnParallelLinear(in_features, [Partition(name, rank, 0, rank) for name in ups], bias=False)
        self.up = nn.ModuleDict({name: ColumnParallelLinear(rank, parts, bias=False) for name, parts in ups.items()})

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, in_features]` → `[tokens, rows of this rank]`"""
        inner = self.down(x).chunk(len(self.up), dim=-1)
        return torch.cat([up(each) for up, each in zip(self.up.values(), inner, strict=True)], dim=-1)


def attention_adapter(spec: SharedBlockSpec, attention: AttentionSpec, parallel: Parallel) -> Adapter | None:
    """A layer's changes to queries, keys and values."""
    if not spec.adapts_attention:
        return None
    dim, keys = attention.head_dim, kv_heads("", attention.num_kv_heads, attention.head_dim, parallel)
    parts = {"q": [divided("", attention.num_heads * dim, parallel)], "k": [keys], "v": [keys]}
    return Adapter(attention.input_size, spec.rank, parts)


def feed_forward_adapter(spec: SharedBlockSpec, mlp: MLPSpec, hidden_size: int, parallel: Parallel) -> Adapter | None:
    """A layer's changes to gates and ups."""
    if not spec.rank:
        return None
    parts = [divided(name, mlp.intermediate_size, parallel) for name in ("gate", "up")]
    return Adapter(hidden_size, spec.rank, {"gate_up": parts})
