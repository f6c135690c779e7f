"""Self-attention over the paged KV cache, its heads cut over the ranks of a stage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import Architecture
from quire.engine.layers.linear import ColumnParallelLinear, RowParallelLinear, divided, kv_heads
from quire.engine.layers.norm import RMSNorm
from quire.engine.parallel import Parallel


@dataclass(frozen=True)
class Batch:
    """A step as the model sees it: the scheduled tokens of all requests, one request after the other. All int64."""

    token_ids: Tensor
    """`[tokens]`"""
    positions: Tensor
    """`[tokens]`, each token's index in its request."""
    slots: Tensor
    """`[tokens]`, where each token's keys and values go: block * block_size + offset."""
    block_tables: Tensor
    """`[requests, max_blocks]`"""
    sequence_lengths: Tensor
    """`[requests]`, tokens of each request up to and with this step's."""
    query_starts: Tensor
    """`[requests + 1]`, where each request's tokens begin in `token_ids`."""
    sampled: Tensor
    """`[sampling requests]`, the last token of each request that samples, as an index into `token_ids`."""


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023), with RMSNorm of queries and keys where the model has it."""

    def __init__(self, arch: Architecture, parallel: Parallel) -> None:
        super().__init__()
        self._head_dim = arch.head_dim
        self._scale = arch.head_dim**-0.5
        parts = (
            divided("q", arch.num_heads * arch.head_dim, parallel),
            kv_heads("k", arch.num_kv_heads, arch.head_dim, parallel),
            kv_heads("v", arch.num_kv_heads, arch.head_dim, parallel),
        )
        self._heads = [part.length // arch.head_dim for part in parts]
        self.qkv = ColumnParallelLinear(arch.hidden_size, parts, bias=arch.qkv_bias)
        self.output = RowParallelLinear(
            arch.num_heads * arch.head_dim, arch.hidden_size, parallel, bias=arch.output_bias
        )
        self.query_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.key_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None

    def forward(self, x: Tensor, batch: Batch, rotations: Tensor, cache: Tensor) -> Tensor:
        """`[tokens, hidden_size]` → the same; writes the tokens' keys and values into this layer's `cache`."""
        heads = self.qkv(x).unflatten(-1, (-1, self._head_dim))  # [tokens, heads + 2 kv_heads, head_dim]
        query, key, value = heads.split(self._heads, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query = kernels.rotary_write_kv(query, key, value, rotations, cache, batch.slots)
        mixed = kernels.paged_attention(
            query, cache, batch.block_tables, batch.sequence_lengths, batch.query_starts, self._scale
        )
        out: Tensor = self.output(mixed.flatten(1))
        return out
