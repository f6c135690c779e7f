"""Self-attention over the paged KV cache, its heads cut over the ranks of a stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.config.options import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import ColumnParallelLinear, Partition, RowParallelLinear, divided, kv_heads
from quire.engine.layers.norm import AcrossHeadsNorm, PerHeadNorm, make_norm
from quire.engine.layers.weight import Weight
from quire.engine.models import model_spec

HostRows = kernels.HostRows


@dataclass(frozen=True)
class Batch:
    """A step as the model sees it: the scheduled tokens of all requests, one request after the other. All int64."""

    token_ids: Tensor
    """`[tokens]`"""
    positions: Tensor
    """`[tokens]`, each token's index in its request."""
    slot_mapping: Tensor
    """`[tokens]`, where each token's keys and values go: block * block_size + offset."""
    block_tables: Tensor
    """`[requests, max_blocks]`; any block stands where all queries of a request have left it behind their window."""
    sequence_lengths: Tensor
    """`[requests]`, tokens of each request up to and with this step's."""
    query_starts: Tensor
    """`[requests + 1]`, where each request's tokens begin in `token_ids`."""
    logits_indices: Tensor
    """`[sampling requests]`, where the last stage's output has the last token of each request that samples."""
    others: tuple[Batch, ...] = ()
    """The same step for the other groups of layers, whose slots and block tables differ (`engine.cache_groups`)."""
    replica_tokens: tuple[int, ...] = ()
    """Tokens of each replica in this step, where they share experts."""
    host: HostRows | None = None
    """None: what is needed of it is read from the tensors."""
    micro_batches: tuple[Batch, ...] = ()
    """The step cut in two, where one half's exchange is to run beside the other's computation; else empty."""
    logits_indices_only: bool = False
    """Of the last stage's output, only each request's last token is read: it is `[requests, hidden_size]`."""

    def of(self, group: int) -> Batch:
        """As the layers of this group see it."""
        return self.others[group - 1] if group else self

    def with_last_tokens_only(self) -> Batch:
        """The same with one query for each request: its last token."""
        starts = torch.arange(len(self.query_starts), device=self.query_starts.device)
        host = None if self.host is None else HostRows(np.ones_like(self.host.counts), self.host.lengths, {})
        return replace(self, query_starts=starts, host=host)

    def rows(self) -> HostRows:
        """`host`, or else read from the tensors."""
        if self.host is not None:
            return self.host
        return HostRows(self.query_starts.diff().cpu().numpy(), self.sequence_lengths.cpu().numpy())


class LayerCache(NamedTuple):
    """Where a layer's keys and values lie."""

    memory: Tensor
    """`[sides, blocks, kv_heads, block_size, row]`, as `quire.kernels.cache` has it."""
    group: int = 0
    """The group of layers whose slots and block tables it has."""


class Attention(nn.Module):
    """The attention that `quire.engine.models.model_spec.AttentionSpec` describes."""

    def __init__(self, spec: model_spec.AttentionSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec = spec
        parts = (
            divided("q", spec.num_heads * spec.head_dim, parallel),
            kv_heads("k", spec.num_kv_heads, spec.head_dim, parallel),
            kv_heads("v", spec.num_kv_heads, spec.head_dim, parallel),
        )
        heads = divided("", spec.num_heads, parallel)
        self._heads = [part.length // spec.head_dim for part in parts]
        self.qkv = ColumnParallelLinear(hidden_size, parts, bias=spec.qkv_bias)
        self.output = RowParallelLinear(spec.num_heads * spec.head_dim, hidden_size, parallel, bias=spec.output_bias)
        self.query_norm, self.key_norm = (_head_norm(spec, part, parallel) for part in parts[:2])
        self.sinks = Weight((heads.length,), heads.shard()) if spec.has_sinks else None
        self._slopes = None
        if spec.alibi:
            self._slopes = spec.alibi * alibi_slopes(spec.num_heads)[heads.start : heads.start + heads.length]

    def forward(
        self, x: Tensor, batch: Batch, cos_sin: Tensor, cache: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        """`[tokens, hidden_size]` → the same, or of the tokens `last_tokens` alone, the last ones of the requests.

        Writes the keys and values of all tokens into this layer's `cache`.
        """
        spec = self._spec
        heads = self.qkv(x).unflatten(-1, (-1, spec.head_dim))  # [tokens, heads + 2 kv_heads, head_dim]
        query, key, value = heads.split(self._heads, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query = kernels.rotary_write_kv(query, key, value, cos_sin, cache, batch.slot_mapping)
        if last_tokens is not None:
            query, batch = query[last_tokens], batch.with_last_tokens_only()
        mixed = kernels.paged_attention(
            query,
            cache,
            batch.block_tables,
            batch.sequence_lengths,
            batch.query_starts,
            spec.scale,
            window=spec.window or 0,
            softcap=spec.softcap,
            sinks=None if self.sinks is None else self.sinks.float(),
            slopes=self._slopes,
            host=batch.host,
        )
        out: Tensor = self.output(mixed.flatten(1))
        return out


def attention_needs(config: EngineConfig) -> kernels.AttentionNeeds:
    """What a rank asks of `kernels.paged_attention`: the kinds of the model's layers, as the rank has them."""
    arch, tp = config.model.architecture, config.parallel.tensor_parallel_size
    specs = {layer.attention: None for layer in arch.layers} if config.cache.num_blocks else {}
    return kernels.AttentionNeeds(
        tuple(dict.fromkeys(_kernel_layer(spec, tp) for spec in specs)),
        config.cache.block_size,
        kernels.kv_cache_dtype(config.cache.dtype),
        config.options.attention_backend,
    )


def _kernel_layer(spec: model_spec.AttentionSpec | model_spec.MLASpec, tp: int) -> kernels.AttentionLayer:
    sides, kv_heads, size = spec.kv_shape(tp)
    if isinstance(spec, model_spec.MLASpec):
        return kernels.AttentionLayer(spec.num_heads // tp, kv_heads, size, spec.scale, is_latent=sides == 1)
    return kernels.AttentionLayer(
        *(spec.num_heads // tp, kv_heads, size, spec.scale, spec.window or 0, spec.softcap),
        has_sinks=spec.has_sinks,
        has_slopes=bool(spec.alibi),
    )


def _head_norm(spec: model_spec.AttentionSpec, part: Partition, parallel: Parallel) -> nn.Module | None:
    """What normalizes queries or keys."""
    if spec.qk_norm is None:
        return None
    match spec.qk_norm_over:
        case "head":
            return make_norm(spec.qk_norm, spec.head_dim)
        case "each head":
            return PerHeadNorm(spec.qk_norm, part.shard(), spec.head_dim)
        case "all heads":
            return AcrossHeadsNorm(spec.qk_norm, part.shard(), parallel)


def alibi_slopes(heads: int) -> Tensor:
    """Float32 `[heads]`: powers of 2^(-8/n) for the n heads up to a power of 2, between them for the rest.

    Source: Press et al. 2022, and the authors' code for numbers that are no power of 2.
    """
    even = 1 << (heads.bit_length() - 1)
    powers = torch.arange(1, even + 1, dtype=torch.float32) * (-8.0 / even)
    between = (2 * torch.arange(heads - even, dtype=torch.float32) + 1) * (-4.0 / even)
    return torch.cat((powers, between)).exp2()
