"""Attention to the keys and values of a layer before, whose cache it shares (Gemma 3n)."""

from __future__ import annotations

from torch import Tensor

from quire import kernels
from quire.engine.layers.attention import Attention
from quire.engine.layers.batch import Batch
from quire.engine.layers.head_changes import Heads
from quire.engine.layers.kv_cache import LayerCache


class SharedKVAttention(Attention):
    """There are only queries, and nothing is written."""

    def _write(self, qkv: Tensor, batch: Batch, cos_sin: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor | None]:
        parts = self._split(qkv)
        none = parts["q"][:, :0]
        heads = Heads(parts["q"], none, none, batch.positions, cos_sin)
        for change in self._changes:
            heads = change(heads)
        query, _ = kernels.rotary(heads.query, heads.key, heads.cos_sin)
        return query, parts.get("gate")
