"""GTE and Jina's embeddings v3: BERT's layers with rotary positions (Zhang et al. 2024, Sturua et al. 2024).

`NewModel` is the first name of `GteModel`, in Alibaba's own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.encoder_spec import EncoderAttentionSpec, EncoderSpec
from quire.engine.architecture.families.family import (
    Config,
    Family,
    HeadLayer,
    Runs,
    activation,
    head_dim,
    layer_norm,
    require,
    rope,
)
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec
from quire.engine.architecture.spec_parts import RopeSpec
from quire.engine.protocol.errors import ConfigError


def _encoder(name: str, config: Config, rope_spec: RopeSpec, feed_forward: Mapping[str, Any]) -> EncoderSpec:
    heads, norm = int(config["num_attention_heads"]), layer_norm(config["layer_norm_eps"])
    layer = LayerSpec(
        attention=EncoderAttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim(config),
            scale=head_dim(config) ** -0.5,
            rope=rope_spec,
            qkv_bias=True,
            output_bias=True,
        ),
        attention_norm=None,
        attention_post_norm=norm,
        feed_forward=MLPSpec(
            intermediate_size=int(config["intermediate_size"]),
            activation=activation(config["hidden_act"]),
            **feed_forward,
        ),
        feed_forward_norm=None,
        feed_forward_post_norm=norm,
    )
    return EncoderSpec(
        name=name,
        hidden_size=int(config["hidden_size"]),
        vocab_size=int(config["vocab_size"]),
        max_position=int(config["max_position_embeddings"]),
        layers=(layer,) * int(config["num_hidden_layers"]),
        norm=None,
        embedding_norm=norm,
        tie_embeddings=True,
        token_types=int(config["type_vocab_size"]),
    )


def _gte(name: str, config: Config) -> EncoderSpec:
    require(config, "position_embedding_type", "rope")
    require(config, "layer_norm_type", "layer_norm")
    require(config, "logn_attention_scale", False, None)
    require(config, "pack_qkv", True)
    return _encoder(name, config, _scaled_rope(config), {"output_bias": True})


def _scaled_rope(config: Config) -> RopeSpec:
    """Rotary positions, which GTE extends with a fixed NTK scaling (https://kexue.fm/archives/9706, equation 6): all
    frequencies of a larger base, divided by one number."""
    dim, scaling = head_dim(config), config.get("rope_scaling") or {}
    if (scaling.get("rope_type") or scaling.get("type")) != "ntk":
        return rope(config, dim)
    if scaling.get("mixed_b") is not None:
        raise ConfigError("rope_scaling with mixed_b is not supported")
    factor = float(scaling["factor"])
    return RopeSpec(
        kind="linear",
        theta=float(config["rope_theta"]) * factor,
        dim=dim,
        factor=factor ** (2 / dim),
        original_max_position=int(config["max_position_embeddings"]),
    )


def _up_first(layer: LayerSpec, module: str, part: str) -> Runs | None:
    if module != "layers.feed_forward.gate_up" or not isinstance(layer.feed_forward, MLPSpec):
        return None
    size = layer.feed_forward.intermediate_size
    return [range(size)] if part == "up" else [range(size, 2 * size)]


def _jina(name: str, config: Config) -> EncoderSpec:
    return _encoder(name, config, rope(config, head_dim(config)), {"is_gated": False, "bias": True})


_GTE = {
    "embedding": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "layers.attention.qkv": "encoder.layer.{layer}.attention.qkv_proj",
    "layers.attention.output": "encoder.layer.{layer}.attention.o_proj",
    "layers.attention_post_norm": "encoder.layer.{layer}.attn_ln",
    "layers.feed_forward.gate_up": "encoder.layer.{layer}.mlp.up_gate_proj",
    "layers.feed_forward.down": "encoder.layer.{layer}.mlp.down_proj",
    "layers.feed_forward_post_norm": "encoder.layer.{layer}.mlp_ln",
}
_JINA = {
    "embedding": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "emb_ln",
    "layers.attention.qkv": "encoder.layers.{layer}.mixer.Wqkv",
    "layers.attention.output": "encoder.layers.{layer}.mixer.out_proj",
    "layers.attention_post_norm": "encoder.layers.{layer}.norm1",
    "layers.feed_forward.gate_up": "encoder.layers.{layer}.mlp.fc1",
    "layers.feed_forward.down": "encoder.layers.{layer}.mlp.fc2",
    "layers.feed_forward_post_norm": "encoder.layers.{layer}.norm2",
}
_COMMON = {"hidden_act": "gelu", "type_vocab_size": 1}
_GTE_DEFAULTS = {
    **_COMMON,
    "vocab_size": 250048,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "rope_theta": 160000.0,
}
_NEW_DEFAULTS = {**_GTE_DEFAULTS, "vocab_size": 30528, "max_position_embeddings": 2048, "rope_theta": 10000.0}
_JINA_DEFAULTS = {
    **_COMMON,
    "vocab_size": 250002,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 8194,
    "rope_theta": 20000.0,
}
_HEADS = ("pooler.", "lm_head.", "classifier.")


def _family_of_gte(prefix: str, defaults: Config) -> Family:
    return Family(
        _gte,
        {module: prefix + name for module, name in _GTE.items()},
        defaults,
        prefix=prefix,
        rows=_up_first,
        ignored_prefixes=(*_HEADS, *(prefix + head for head in _HEADS)),
        classifier=(HeadLayer(f"{prefix}pooler.dense", "Tanh"), HeadLayer("classifier")),
    )


_KINDS = {
    "Gte": _family_of_gte("gte.", _GTE_DEFAULTS),
    "New": _family_of_gte("new.", _NEW_DEFAULTS),
    "JinaEmbeddingsV3": Family(
        _jina,
        {module: f"roberta.{name}" for module, name in _JINA.items()},
        _JINA_DEFAULTS,
        prefix="roberta.",
        ignored_prefixes=(*_HEADS, *(f"roberta.{head}" for head in _HEADS)),
        classifier=(HeadLayer("classifier.dense", "Tanh"), HeadLayer("classifier.out_proj")),
    ),
}
FAMILIES = {
    f"{kind}{end}": family
    for kind, family in _KINDS.items()
    for end in ("Model", "ForMaskedLM", "ForSequenceClassification")
}
