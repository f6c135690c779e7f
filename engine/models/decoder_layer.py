"""The layer that most decoders consist of. Other residual paths are classes beside it; `make_layers` chooses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec, feed_forward_spec, model_spec, spec_parts
from quire.engine.architecture.attention_spec import BlockIndexerSpec, GroupIndexerSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.layers.attention import Attention
from quire.engine.layers.batch import Batch
from quire.engine.layers.chunked_attention import ChunkedAttention
from quire.engine.layers.compressed import CompressedAttention
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.linear import Linear
from quire.engine.layers.mla import MLA
from quire.engine.layers.mlp import MLP
from quire.engine.layers.moe import MixtureOfExperts
from quire.engine.layers.norm import Norm, RMSNorm, make_norm
from quire.engine.layers.recurrent import make_mixer
from quire.engine.layers.shared_kv_attention import SharedKVAttention
from quire.engine.layers.sparse_attention import SparseAttention


class LayerStep(NamedTuple):
    """The inputs of a layer in a step besides the hidden states."""

    batch: Batch
    cos_sin: Tensor | None
    cache: LayerCache
    own: Tensor | None = None
    """The layer's own input, or the embedded token if the layer reads it."""
    last_tokens: Tensor | None = None
    """The indices of the requests' last tokens, if only these are needed after the layer: the model's last layer needs
    only keys and values of the other tokens."""


class DecoderLayer(nn.Module):
    """Attention, a recurrent state or both, and a feed-forward layer, sequential or parallel, each with norms before
    and after, added to the residual stream."""

    sole_readers: ClassVar[Collection[str]] = ("attention", "feed_forward")
    """The modules that are the only readers of the norm before them; that norm may round for them."""

    def __init__(
        self, spec: model_spec.LayerSpec, hidden_size: int, parallel: Parallel, experts: ExpertGroup | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.attention_norm = norm_of(spec.attention_norm, hidden_size)
        self.attention = _attention(spec.attention, hidden_size, parallel)
        self.state = None if spec.state is None else make_mixer(spec.state, hidden_size, parallel)
        self.attention_post_norm = norm_of(spec.attention_post_norm, hidden_size)
        self.feed_forward_norm = norm_of(spec.feed_forward_norm, hidden_size)
        self.feed_forward = _feed_forward(spec.feed_forward, hidden_size, parallel, experts)
        self.feed_forward_post_norm = norm_of(spec.feed_forward_post_norm, hidden_size)
        if not spec.is_parallel or self.feed_forward_norm is not None:
            if self.state is None and "attention" in self.sole_readers:
                _feed(self.attention_norm, self.attention)
            if "feed_forward" in self.sole_readers:
                _feed(self.feed_forward_norm, self.feed_forward)

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """`[tokens, width]` → the same, only the rows of `last_tokens` if they are set. `x` is not yet added to
        `residual`, in the arguments as in the result."""
        normed, residual = add(self.attention_norm, x, residual)
        mixed = self._mix(self._mixer_input(normed, step.own), step)
        if step.last_tokens is not None:
            normed, residual = normed[step.last_tokens], residual[step.last_tokens]
        if self.feed_forward is None:
            return mixed, residual
        if not self.spec.is_parallel:
            normed, residual = add(self.feed_forward_norm, mixed, residual)
        elif self.feed_forward_norm is not None:
            normed = self.feed_forward_norm(residual)
        x = self._fed(normed, step)
        return (x + mixed, residual) if self.spec.is_parallel else (x, residual)

    def _mixer_input(self, normed: Tensor | kernels.RoundedRows, own: Tensor | None) -> Tensor | kernels.RoundedRows:
        return normed

    def _mix(self, normed: Tensor | kernels.RoundedRows, step: LayerStep) -> Tensor:
        """The contribution of the mixers to the residual stream."""
        outputs, batch, cache = [], step.batch, step.cache
        if self.attention is not None:
            last = () if step.last_tokens is None else (step.last_tokens,)
            outputs.append(self.attention(normed, batch, step.cos_sin, cache, *last))
        if self.state is not None:
            outputs.append(self._recur(normed, step))
        return self._scaled(apply(self.attention_post_norm, sum(outputs[1:], start=outputs[0])))

    def _recur(self, normed: Tensor | kernels.RoundedRows, step: LayerStep) -> Tensor:
        """The output of the recurrent state."""
        assert self.state is not None
        batch, cache = step.batch, step.cache
        if batch.shares is not None:
            assert isinstance(normed, Tensor)
            return batch.shares.recur(self.state, normed, cache.state_group, cache.state)
        segments = batch.segments(cache.state_group)
        out: Tensor = self.state(normed, batch.positions, segments, cache.state, batch.adapters_of())
        return out

    def _fed(self, normed: Tensor | kernels.RoundedRows, step: LayerStep) -> Tensor:
        """The contribution of the feed-forward layer to the residual stream."""
        layer, batch, adapters = self.feed_forward, step.batch, step.batch.adapters_of(step.last_tokens)
        assert layer is not None
        if isinstance(layer, MixtureOfExperts) and step.last_tokens is not None:
            batch = replace(batch, token_ids=batch.token_ids[step.last_tokens])
        is_mixture = isinstance(layer, MixtureOfExperts)
        out = layer(normed, batch, adapters) if is_mixture else layer(normed, adapters)
        return self._scaled(apply(self.feed_forward_post_norm, out))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.spec.residual_multiplier == 1.0 else x * self.spec.residual_multiplier


class FeedForwardLayer(DecoderLayer):
    """A layer without mixers."""

    def forward(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        if (last := step.last_tokens) is not None:
            x, residual = x[last], None if residual is None else residual[last]
        normed, residual = add(self.feed_forward_norm, x, residual)
        return self._fed(normed, step), residual


def norm_of(spec: spec_parts.NormSpec | None, hidden_size: int) -> Norm | None:
    return None if spec is None else make_norm(spec, hidden_size)


def add(norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor | kernels.RoundedRows, Tensor]:
    """`residual + x`, normalized and unchanged."""
    if norm is not None and residual is not None:
        return norm.add(x, residual)
    residual = x if residual is None else residual + x
    return apply(norm, residual), residual


def apply(norm: Norm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    out: Tensor = norm(x)
    return out


def _feed(norm: Norm | None, layer: nn.Module | None) -> None:
    """Let a norm round for a layer that does nothing but multiply its input, or for the experts of a mixture."""
    reader = layer.reads_input if isinstance(layer, Attention | MLA | CompressedAttention | MLP) else layer
    if isinstance(norm, RMSNorm) and isinstance(reader, Linear | MixtureOfExperts):
        norm.feed(reader)


def _attention(
    spec: attention_spec.AnyAttentionSpec | None, hidden_size: int, parallel: Parallel
) -> Attention | MLA | CompressedAttention | None:
    match spec:
        case None:
            return None
        case attention_spec.AttentionSpec(indexer=BlockIndexerSpec() | GroupIndexerSpec()):
            return SparseAttention(spec, hidden_size, parallel)
        case attention_spec.AttentionSpec(is_chunked=True, window=int()):
            return ChunkedAttention(spec, hidden_size, parallel)
        case attention_spec.AttentionSpec(kv_source=int()):
            return SharedKVAttention(spec, hidden_size, parallel)
        case attention_spec.AttentionSpec():
            return Attention(spec, hidden_size, parallel)
        case attention_spec.MLASpec():
            return MLA(spec, hidden_size, parallel)
        case attention_spec.CompressedAttentionSpec():
            return CompressedAttention(spec, hidden_size, parallel)


def _feed_forward(
    spec: feed_forward_spec.MLPSpec | feed_forward_spec.MoESpec | None,
    hidden_size: int,
    parallel: Parallel,
    experts: ExpertGroup | None,
) -> MLP | MixtureOfExperts | None:
    match spec:
        case None:
            return None
        case feed_forward_spec.MLPSpec():
            return MLP(spec, hidden_size, parallel)
        case feed_forward_spec.MoESpec():
            return MixtureOfExperts(spec, hidden_size, parallel, experts)
