"""Phi-3.5-MoE: LayerNorm, biases in attention, and experts that SparseMixer chooses."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture.families.family import (
    Config,
    Family,
    activation,
    architecture,
    attention,
    head_dim,
    layer_norm,
    require,
    rope,
)
from quire.engine.architecture.families.moe import MIXTRAL_NAMES
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.protocol.errors import ConfigError


def _phimoe(name: str, config: Config) -> ModelSpec:
    require(config, "num_experts_per_tok", 2)
    if (window := config.get("sliding_window")) and int(window) < int(config["max_position_embeddings"]):
        raise ConfigError(f"sliding_window {window} is not supported; supported: at least max_position_embeddings")
    norm, rope_spec = layer_norm(config["rms_norm_eps"]), rope(config, head_dim(config))
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope_spec.kind == "longrope":
        require(settings, "long_mscale", settings["short_mscale"])
        rope_spec = replace(rope_spec, amplitude=float(settings["short_mscale"]))
    bias = bool(config["attention_bias"])
    layer = LayerSpec(
        attention=attention(config, rope_spec, qkv_bias=bias, output_bias=bias),
        attention_norm=norm,
        feed_forward=MoESpec(
            num_experts=int(config["num_local_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            intermediate_size=int(config["intermediate_size"]),
            activation=activation(config.get("hidden_act", "silu")),
            scoring="sparse_mixer",
            sparse_mixer_distance=2 * float(config["router_jitter_noise"]),
        ),
        feed_forward_norm=norm,
    )
    layers = [layer] * int(config["num_hidden_layers"])
    return architecture(name, config, layers, norm, head_bias=bool(config["lm_head_bias"]))


_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "router_jitter_noise": 0.01,
    "attention_bias": False,
    "lm_head_bias": False,
}
FAMILIES = {
    "PhimoeForCausalLM": Family(_phimoe, MIXTRAL_NAMES, _DEFAULTS),
}
