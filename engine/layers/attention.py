"""Self-attention over the paged KV cache, with the heads sharded over the ranks of a stage."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec
from quire.engine.config.engine_config import EngineConfig, ParallelConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import AttentionMetadata, Batch
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.head_changes import Heads, head_changes
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.linear import Linear, divided
from quire.engine.layers.norm import AcrossHeadsNorm, PerHeadNorm, make_norm
from quire.engine.layers.weight import Shard


class Attention(nn.Module):
    """Attention as described by `quire.engine.architecture.attention_spec.AttentionSpec`.

    This is the path of most families. `head_changes` has the operations of other families on heads before they are
    stored; where queries read something else, there is a class that inherits from this one.
    """

    def __init__(self, spec: attention_spec.AttentionSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec, self._context = spec, parallel.context
        own = FromSpec(spec.parameters(hidden_size), parallel)
        query, *others = own.shards("attention.qkv")
        self._widths = {shard.part: shard.length for shard in (query, *others)}
        self._features = {"q": spec.head_dim, "k": spec.head_dim, "v": spec.value_dim, "gate": spec.gate_dim}
        self.qkv, self.output = own.column_parallel("attention.qkv"), own.row_parallel("attention.output")
        self.query_norm = head_norm(spec, query, parallel)
        self.key_norm = None if spec.kv_source is not None else head_norm(spec, others[0], parallel)
        self._changes = head_changes(spec, self.query_norm, self.key_norm)
        self._window, self._slopes = spec.window or 0, None
        self.sinks = own.weight("attention", "sinks") if spec.has_sinks else None
        if spec.alibi:
            heads = divided("", spec.num_heads, parallel)
            self._slopes = spec.alibi * alibi_slopes(spec.num_heads)[heads.start : heads.start + heads.length]

    @property
    def reads_input(self) -> Linear | None:
        """The layer that alone multiplies the input, if there is one."""
        return self.qkv

    def forward(
        self,
        x: Tensor | kernels.RoundedRows,
        batch: Batch,
        cos_sin: Tensor,
        cache: LayerCache,
        last_tokens: Tensor | None = None,
    ) -> Tensor:
        """`[tokens, hidden_size]` → the same, or only the rows `last_tokens`, the last ones of the requests. Writes the
        keys and values of all tokens to this layer's `cache`."""
        return self.from_qkv(self.qkv(x, batch.adapters_of()), batch, cos_sin, cache, last_tokens)

    def from_qkv(
        self, qkv: Tensor, batch: Batch, cos_sin: Tensor, cache: LayerCache, last_tokens: Tensor | None = None
    ) -> Tensor:
        """The same, given the projections of the input."""
        query, gate = self._write(qkv, batch, cos_sin, cache)
        if last_tokens is not None:
            query, gate = query[last_tokens], None if gate is None else gate[last_tokens]
        metadata = self._metadata(batch, cache, last_tokens)
        return self._result(self._attend(query, metadata, cache), gate, batch.adapters_of(last_tokens))

    def _write(self, qkv: Tensor, batch: Batch, cos_sin: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor | None]:
        """Write keys and values; returns the rotated queries, and the gates of results if there are any."""
        parts = self._split(qkv)
        key = parts["k"]
        heads = Heads(parts["q"], key, parts.get("v", key), batch.positions, cos_sin)
        for change in self._changes:
            heads = change(heads)
        return cache.write(*heads[:3], heads.cos_sin, batch, self._context), parts.get("gate")

    def _split(self, qkv: Tensor) -> dict[str, Tensor]:
        """The parts of the projections, `[tokens, heads, features]` each."""
        parts = qkv.split_with_sizes([*self._widths.values()], dim=-1)
        features = self._features
        return {
            name: torch.unflatten(part, -1, (-1, features[name]))
            for name, part in zip(self._widths, parts, strict=True)
        }

    def _metadata(self, batch: Batch, cache: LayerCache, last_tokens: Tensor | None) -> AttentionMetadata:
        """The metadata of all queries, or of the last tokens' queries only."""
        metadata = cache.own_metadata(batch, self._context)
        return metadata if last_tokens is None else metadata.last_tokens()

    def _attend(self, query: Tensor, metadata: AttentionMetadata, cache: LayerCache) -> Tensor:
        """`[tokens, heads, head_dim]` → the same."""
        return cache.attend(
            query,
            metadata,
            self._spec.scale,
            self._context,
            window=self._window,
            softcap=self._spec.softcap,
            sinks=None if self.sinks is None else self.sinks.float(),
            slopes=self._slopes,
        )

    def _result(self, mixed: Tensor, gate: Tensor | None, adapters: kernels.AdapterRows | None) -> Tensor:
        """`[tokens, heads, head_dim]` → `[tokens, hidden_size]`"""
        spec = self._spec
        if spec.value_dim < spec.head_dim:
            mixed = mixed[..., : spec.value_dim]
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        out: Tensor = self.output(mixed.flatten(1), adapters)
        return out if spec.output_multiplier == 1.0 else out * spec.output_multiplier


def attention_config(config: EngineConfig) -> kernels.AttentionConfig:
    """The requirements of a rank for `kernels.paged_attention`: the kinds of the layers of the model, and of a drafter,
    that use it, with the rank's sizes."""
    media = config.model.architecture.media
    has_ends = media is not None and media.is_bidirectional
    context = config.parallel.decode_context_parallel_size
    kinds = (
        replace(_kernel_layer(layer.attention, each.parallel), has_ends=has_ends)
        for each in (config.with_drafter if config.cache.num_blocks else ())
        for layer in each.model.architecture.layers
        if isinstance(layer.attention, attention_spec.AttentionSpec | attention_spec.MLASpec)
    )
    return kernels.AttentionConfig(
        tuple(dict.fromkeys(kinds)),
        config.cache.block_size // context,
        kernels.kv_cache_dtype(config.cache.dtype),
        config.model.attention_backend,
    )


def _kernel_layer(
    spec: attention_spec.AttentionSpec | attention_spec.MLASpec, parallel: ParallelConfig
) -> kernels.AttentionLayer:
    tp, context = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    (num_tensors, kv_heads, size), heads = spec.kv_shape(tp), spec.num_heads // tp * context
    if context > 1:  # without sinks: see `context_parallel.attend`
        is_mla, softcap = num_tensors == 1, spec.softcap if isinstance(spec, attention_spec.AttentionSpec) else 0.0
        return kernels.AttentionLayer(
            heads, kv_heads, size, spec.scale, softcap=softcap, is_mla=is_mla, is_partial=True
        )
    if isinstance(spec, attention_spec.MLASpec):
        is_mla, window = num_tensors == 1, spec.window or 0
        return kernels.AttentionLayer(
            heads, kv_heads, size, spec.scale, window, is_mla=is_mla, has_sinks=spec.has_sinks
        )
    return kernels.AttentionLayer(
        heads,
        kv_heads,
        size,
        spec.scale,
        window=0 if spec.is_chunked else spec.window or 0,
        softcap=spec.softcap,
        has_sinks=spec.has_sinks,
        has_own_sinks=spec.has_own_sinks,
        has_alibi=bool(spec.alibi),
        num_biases=spec.num_biases,
    )


def head_norm(spec: attention_spec.AttentionSpec, rows: Shard, parallel: Parallel) -> nn.Module | None:
    """The normalization of this rank's queries or keys, which are the `rows` of their matrix."""
    shard = Shard(rows.shape[:1], rows.start, rows.length, part=rows.part)
    if spec.qk_norm is None:
        return None
    match spec.qk_norm_over:
        case "head":
            return make_norm(spec.qk_norm, spec.head_dim)
        case "each head":
            return PerHeadNorm(spec.qk_norm, shard, spec.head_dim)
        case "all heads":
            return AcrossHeadsNorm(spec.qk_norm, shard, parallel)


def alibi_slopes(heads: int) -> Tensor:
    """Float32 `[heads]`: powers of 2^(-8/n) for the first n heads, n a power of 2; the remaining heads get values in
    between.

    Source: Press et al. 2022, and the authors' code for head counts that are not a power of 2.
    """
    even = 1 << (heads.bit_length() - 1)
    powers = torch.arange(1, even + 1, dtype=torch.float32) * (-8.0 / even)
    between = (2 * torch.arange(heads - even, dtype=torch.float32) + 1) * (-4.0 / even)
    return torch.cat((powers, between)).exp2()
