"""The sizes of an encoder of text, in addition to `quire.engine.architecture.model_spec`. No torch.

Every token of a prompt attends to all others, or to the tokens near it, as in BERT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import Parameters, Units, bounds, linear
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EncoderAttentionSpec(AttentionSpec):
    """Bidirectional attention inside a prompt. There is no KV cache."""

    reach: int | None = None
    """The largest distance from a query to the keys that it attends to, on both sides; None: all keys."""
    is_clipped: bool = False
    """Linear layers clamp their inputs and outputs to bounds that the checkpoint has."""

    def parameters(self, hidden: int) -> Parameters:
        """See `AttentionSpec`."""
        yield from super().parameters(hidden)
        if self.is_clipped:
            yield from bounds("attention.qkv", "qkv")
            yield from bounds("attention.output", ("",))

    def kv_shape(self, tp: int) -> tuple[int, int, int]:
        """See `AttentionSpec`."""
        return 0, self.kv_heads_per_rank(tp), self.head_dim


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(ModelSpec):
    """The sizes that determine every shape of an encoder. There is no head; `norm` is after the last layer."""

    is_post_norm: bool = True
    """A layer's post-norms normalize the residual stream after the addition of attention or feed-forward (BERT).
    Otherwise norms are before these, as in decoders.
    """
    padding_id: int | None = None
    """RoBERTa: padding tokens have this id and position. Other tokens are numbered from `position_offset`, without
    counting padding."""
    token_types: int = 0
    """Rows of the token type embedding; row 0 is added to every token. 0: no such embedding."""
    relative_buckets: int = 0
    """MPNet: buckets of relative distances, each with a bias per head on the attention scores; 0: none."""

    @property
    def num_heads(self) -> int:
        attention = self.layers[0].attention
        assert attention is not None
        return attention.num_heads

    def parameters_after(self, *, has_head: bool = True) -> Parameters:
        """See `ModelSpec`; an encoder never has a head."""
        yield from super().parameters_after(has_head=False)
        if self.token_types:
            yield from linear("token_types", self.token_types, self.hidden_size)
        if self.relative_buckets:
            heads = Units(self.num_heads, "attention heads")
            yield from linear("distance_bias", self.relative_buckets, self.num_heads, columns_of=heads)


_OF_ATTENTION = (
    "num_heads", "num_kv_heads", "head_dim", "scale", "rope",
    "window", "qkv_bias", "output_bias", "qk_norm",
)  # fmt: skip
_OF_LAYER = ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm", "feed_forward")
_OF_MODEL = (
    "name", "hidden_size", "vocab_size", "max_position", "norm", "tie_embeddings",
    "embedding_norm", "embedding_multiplier",
)  # fmt: skip
"""Fields that decoders have in common with encoders."""


def bidirectional(arch: ModelSpec, reach: int | None = None) -> EncoderSpec:
    """Return the encoder with the layers of the decoder `arch`, whose tokens also attend to later tokens.

    `reach` applies to the layers with a window. Raises `ConfigError` if the decoder has parts that encoders lack.
    """

    def encoded(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        plain = _attributes(layer, _OF_LAYER)
        if (
            not isinstance(attention, AttentionSpec)
            or not isinstance(layer.feed_forward, MLPSpec)
            or attention != AttentionSpec(**_attributes(attention, _OF_ATTENTION))
            or layer != LayerSpec(attention=attention, **plain)
            or (attention.window is not None and reach is None)
        ):
            raise ConfigError(f"bidirectional attention in the layers of {arch.name} is not supported")
        own = {**_attributes(attention, _OF_ATTENTION), "window": None}
        near = None if attention.window is None else reach
        return LayerSpec(attention=EncoderAttentionSpec(**own, reach=near), **plain)

    layers = {layer: encoded(layer) for layer in dict.fromkeys(arch.layers)}
    common = {**_attributes(arch, _OF_MODEL), "layers": tuple(layers[layer] for layer in arch.layers)}
    if arch.position_embeddings:
        raise ConfigError(f"bidirectional attention in {arch.name} is not supported")
    return EncoderSpec(**{**common, "tie_embeddings": True, "is_post_norm": False})


def _attributes(spec: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in names}
