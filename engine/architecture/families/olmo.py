"""OLMo 2 and 3: norms only after attention and feed-forward, and over all queries and all keys. The hybrid has layers
with the gated delta rule, and norms before their parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.architecture.families.family import (
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    layers_by_kind,
    require,
    rms_norm,
    rope,
    windows,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.recurrent_spec import GatedDeltaNetSpec

POST_NORM_NAMES = NAMES | {
    "layers.attention_post_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers.feed_forward_post_norm": "model.layers.{layer}.post_feedforward_layernorm",
}


def _olmo(name: str, config: Config) -> ModelSpec:
    norm, dim = rms_norm(config), head_dim(config)
    if name.startswith("Olmo3"):
        every = range(1, int(config["num_hidden_layers"]) + 1)
        config = {"layer_types": ["sliding_attention" if n % 4 else "full_attention" for n in every], **config}
    plain = {**config, "rope_scaling": None}  # in old configs, scaling applies to full attention only
    layers = {
        window: LayerSpec(
            attention=attention(
                config,
                rope(config, dim, "full_attention") if window is None else rope(plain, dim, "sliding_attention"),
                window=window,
                qk_norm=norm,
                qk_norm_over="all heads",
            ),
            attention_norm=None,
            attention_post_norm=norm,
            feed_forward=feed_forward(config),
            feed_forward_norm=None,
            feed_forward_post_norm=norm,
        )
        for window in set(windows(config))
    }
    return architecture(name, config, [layers[window] for window in windows(config)], norm)


def _hybrid(name: str, config: Config) -> ModelSpec:
    """Without positions where `rope_theta` is null, as published."""
    require(config, "hidden_act", "silu")
    norm, count = rms_norm(config), int(config["num_hidden_layers"])
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    key_heads = int(config.get("linear_num_key_heads") or heads)
    key_dim = int(config.get("linear_key_head_dim") or 0.75 * hidden / key_heads)
    state = GatedDeltaNetSpec(
        num_value_heads=int(config.get("linear_num_value_heads") or heads),
        num_key_heads=key_heads,
        key_head_dim=key_dim,
        value_head_dim=int(config.get("linear_value_head_dim") or 2 * key_dim),
        conv_size=int(config["linear_conv_kernel_dim"]),
        norm=replace(norm, eps=1e-5),  # independent of the model's eps
        beta_scale=2.0 if config["linear_allow_neg_eigval"] else 1.0,
    )
    scaling = config.get("rope_parameters") or {}
    turns = rope(config, head_dim(config)) if scaling.get("rope_theta", 1) is not None else None
    full = attention(config, turns, qk_norm=norm, qk_norm_over="all heads")
    mixers: dict[str, dict[str, Any]] = {
        "linear_attention": {
            "attention": None,
            "state": state,
            "attention_norm": norm,
            "feed_forward_norm": norm,
        },
        "full_attention": {
            "attention": full,
            "attention_norm": None,
            "attention_post_norm": norm,
            "feed_forward_norm": None,
            "feed_forward_post_norm": norm,
        },
    }
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if number % 4 else "full_attention" for number in range(1, count + 1)]
        kinds[-1] = kinds[-1] if "full_attention" in kinds else "full_attention"
    return architecture(name, config, layers_by_kind(kinds, mixers, [feed_forward(config)] * count), norm)


_HYBRID_NAMES = POST_NORM_NAMES | {
    "layers.attention_norm": "model.layers.{layer}.attention_layer_norm",
    "layers.feed_forward_norm": "model.layers.{layer}.feedforward_layer_norm",
    "layers.state.input": "model.layers.{layer}.linear_attn.{part}_proj",
    "layers.state.input.z": "model.layers.{layer}.linear_attn.g_proj",
    "layers.state.gates": "model.layers.{layer}.linear_attn.{part}_proj",
    "layers.state.conv": "model.layers.{layer}.linear_attn.{part}_conv1d",
    "layers.state.decay": "model.layers.{layer}.linear_attn.A_log",
    "layers.state.step_bias": "model.layers.{layer}.linear_attn.dt_bias",
    "layers.state.norm": "model.layers.{layer}.linear_attn.o_norm",
    "layers.state.output": "model.layers.{layer}.linear_attn.o_proj",
}


def _olmoe(name: str, config: Config) -> ModelSpec:
    """OLMoE has Llama's norms, and QK norm over all heads."""
    norm, clip = rms_norm(config), float(config.get("clip_qkv") or 0)
    layer = LayerSpec(
        attention=attention(config, rope(config, head_dim(config)), qk_norm=norm, qk_norm_over="all heads", clip=clip),
        attention_norm=norm,
        feed_forward=MoESpec(
            num_experts=int(config["num_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            intermediate_size=int(config["intermediate_size"]),
            activation=activation(config.get("hidden_act", "silu")),
            renormalize=bool(config["norm_topk_prob"]),
        ),
        feed_forward_norm=norm,
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


_COMMON = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = {
    "Olmo2ForCausalLM": Family(_olmo, POST_NORM_NAMES, _COMMON),
    "OlmoHybridForCausalLM": Family(
        _hybrid,
        _HYBRID_NAMES,
        {"max_position_embeddings": 65536, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
    ),
    "Olmo3ForCausalLM": Family(_olmo, POST_NORM_NAMES, {**_COMMON, "sliding_window": 4096, "rope_theta": 500000.0}),
    "OlmoeForCausalLM": Family(
        _olmoe,
        NAMES_BY_EXPERT,
        {
            **_COMMON,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
}
