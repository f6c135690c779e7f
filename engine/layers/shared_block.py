"""Blocks of attention and a feed-forward layer that several layers share, as described by
`quire.engine.architecture.residual_spec.SharedBlockSpec`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.residual_spec import SharedBlockSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.attention import Attention
from quire.engine.layers.batch import Batch
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.mlp import MLP
from quire.engine.layers.norm import make_norm


class SharedBlock(nn.Module):
    """The modules that layers with the same block share."""

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
        cache: LayerCache,
        attention_adapter: Adapter | None,
        feed_forward_adapter: Adapter | None,
    ) -> Tensor:
        """`[tokens, input_size]`, with the layer's own cache and adapters, → `[tokens, hidden_size]`."""
        normed = self.attention_norm(x)
        adapters = batch.adapters_of()
        qkv = self.attention.qkv(normed, adapters)
        qkv = qkv if attention_adapter is None else qkv + attention_adapter(normed, adapters)
        normed = self.feed_forward_norm(self.attention.from_qkv(qkv, batch, cos_sin, cache))
        added = None if feed_forward_adapter is None else feed_forward_adapter(normed, adapters)
        return self.feed_forward(normed, adapters, added)  # type: ignore[no-any-return]


class Adapter(nn.Module):
    """Changes of low rank to linear layers with the same input, whose weights are `names`."""

    def __init__(self, own: FromSpec, module: str, names: Sequence[str]) -> None:
        super().__init__()
        self.down = own.column_parallel(f"{module}.down")
        self.up = nn.ModuleDict({name: own.column_parallel(f"{module}.up.{name}") for name in names})

    def forward(self, x: Tensor, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """`[tokens, in_features]` → `[tokens, rows of this rank]`"""
        inner = self.down(x, adapters).chunk(len(self.up), dim=-1)
        return torch.cat([up(each, adapters) for up, each in zip(self.up.values(), inner, strict=True)], dim=-1)


def attention_adapter(spec: SharedBlockSpec, own: FromSpec) -> Adapter | None:
    """A layer's changes to queries, keys and values; `own` has the parameters of the block."""
    return Adapter(own, "attention_adapter", "qkv") if spec.adapts_attention else None


def feed_forward_adapter(spec: SharedBlockSpec, own: FromSpec) -> Adapter | None:
    """A layer's changes to gates and ups."""
    return Adapter(own, "feed_forward_adapter", ["gate_up"]) if spec.rank else None
