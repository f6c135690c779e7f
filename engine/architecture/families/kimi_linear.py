"""Kimi Linear and Ling's hybrid: layers with Kimi Delta Attention, and a few with multi-head latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.architecture.attention_spec import MLASpec
from quire.engine.architecture.families.family import (
    Config,
    Family,
    architecture,
    feed_forward,
    layers_by_kind,
    require,
    rms_norm,
    rope,
    yarn_temperature,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.families.moe import MTP_LAYER, sigmoid_experts
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.recurrent_spec import KimiDeltaSpec
from quire.engine.architecture.spec_parts import NormSpec, RopeSpec

_OTHER_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "topk_group": "topk_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""Usual names in config.json, and these families' names for them."""


def _hybrid(name: str, config: Config, kinds: list[str], state: KimiDeltaSpec, latent: MLASpec) -> ModelSpec:
    norm, count = rms_norm(config), int(config["num_hidden_layers"])
    first = int(config["first_k_dense_replace"])
    inner = config.get("mlp_layer_types") or ["dense" if number < first else "sparse" for number in range(count)]
    dense, experts = feed_forward(config), _experts(config)
    feed_forwards: list[MLPSpec | MoESpec] = [dense if kind == "dense" else experts for kind in inner]
    mixers: dict[str, dict[str, Any]] = {
        "linear_attention": {"attention": None, "state": state},
        "full_attention": {"attention": latent},
    }
    layers = layers_by_kind(kinds, mixers, feed_forwards, attention_norm=norm, feed_forward_norm=norm)
    return architecture(name, config, layers, norm)


def _experts(config: Config) -> MoESpec:
    """DeepSeek-V3's experts, under other names."""
    require(config, "moe_router_activation_func", "sigmoid")
    named = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    return sigmoid_experts({**config, **named})


def _latent(config: Config, norm: NormSpec, rope_spec: RopeSpec, **changes: Any) -> MLASpec:
    plain = int(config["qk_nope_head_dim"])
    return MLASpec(
        **{
            "num_heads": int(config["num_attention_heads"]),
            "q_lora_rank": None if config["q_lora_rank"] is None else int(config["q_lora_rank"]),
            "kv_lora_rank": int(config["kv_lora_rank"]),
            "qk_nope_head_dim": plain,
            "v_head_dim": int(config["v_head_dim"]),
            "scale": (plain + rope_spec.dim) ** -0.5,
            "rope": rope_spec,
            "norm": replace(norm, eps=1e-6),  # the latents' norm, independent of the model's eps
            "bias": bool(config.get("attention_bias", False)),
            **changes,
        }
    )


def _usual_names(config: Config) -> dict[str, Any]:
    return {**config, **{usual: config[name] for usual, name in _OTHER_NAMES.items()}}


def _kimi_linear(name: str, config: Config) -> ModelSpec:
    """Latent attention has no positions. Layers are numbered from 1 in `linear_attn_config`."""
    config, norm = _usual_names(config), rms_norm(config)
    require(config, "mla_use_nope", True)
    require(config, "hidden_act", "silu")
    linear, count = config.get("linear_attn_config") or {}, int(config["num_hidden_layers"])
    width = int(linear.get("head_dim", config["linear_head_dim"]))
    state = KimiDeltaSpec(
        num_value_heads=int(linear.get("num_heads", config["linear_num_heads"])),
        value_head_dim=width,
        rank=width,
        conv_size=int(linear.get("short_conv_kernel_size", config["linear_conv_kernel_dim"])),
        norm=norm,
        has_rate_grid=True,
    )
    kinds = config.get("layer_types")
    if kinds is None:
        full = {number - 1 for number in linear.get("full_attn_layers") or range(5, count + 1, 4)}
        kinds = ["full_attention" if number in full else "linear_attention" for number in range(count)]
    rope_spec = RopeSpec(theta=1.0, dim=int(config["qk_rope_head_dim"]), kind="none")
    return _hybrid(name, config, kinds, state, _latent(config, norm, rope_spec))


def _bailing_hybrid(name: str, config: Config) -> ModelSpec:
    """The output of latent attention is gated, and decays may have a lower bound."""
    config, norm = _usual_names(config), rms_norm(config)
    require(config, "hidden_act", "silu")
    state = KimiDeltaSpec(
        num_value_heads=int(config["num_attention_heads"]),
        value_head_dim=int(config.get("linear_head_dim") or config["head_dim"]),
        rank=None,
        lower_bound=float(config["kda_lower_bound"]) if config["kda_safe_gate"] else None,
        conv_size=int(config["short_conv_kernel_size"]),
        norm=norm,
    )
    rotary_dim, every = int(config["qk_rope_head_dim"]), int(config["layer_group_size"])
    rope_spec = rope({**config, "partial_rotary_factor": None}, rotary_dim, is_interleaved=True)
    scale = (int(config["qk_nope_head_dim"]) + rotary_dim) ** -0.5
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope_spec.kind != "default" and scaling.get("mscale_all_dim"):
        scale *= yarn_temperature(rope_spec.factor, float(scaling["mscale_all_dim"])) ** 2
    kinds = config.get("layer_types") or [
        "linear_attention" if number % every else "full_attention"
        for number in range(1, int(config["num_hidden_layers"]) + 1)
    ]
    return _hybrid(name, config, kinds, state, _latent(config, norm, rope_spec, scale=scale, output_gate="heads"))


KIMI_NAMES = NAMES | {
    "layers.attention.down.q": "model.layers.{layer}.self_attn.q_a_proj",
    "layers.attention.down.kv": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa",
    "layers.attention.query_norm": "model.layers.{layer}.self_attn.q_a_layernorm",
    "layers.attention.latent_norm": "model.layers.{layer}.self_attn.kv_a_layernorm",
    "layers.attention.up": "model.layers.{layer}.self_attn.kv_b_proj",
    "layers.attention.gate": "model.layers.{layer}.self_attn.g_proj",
    "layers.state.input": "model.layers.{layer}.self_attn.{part}_proj",
    "layers.state.decay_up": "model.layers.{layer}.self_attn.f_b_proj",
    "layers.state.gate_up": "model.layers.{layer}.self_attn.g_b_proj",
    "layers.state.conv": "model.layers.{layer}.self_attn.{part}_conv1d",
    "layers.state.decay": "model.layers.{layer}.self_attn.A_log",
    "layers.state.step_bias": "model.layers.{layer}.self_attn.dt_bias",
    "layers.state.norm": "model.layers.{layer}.self_attn.o_norm",
    "layers.state.output": "model.layers.{layer}.self_attn.o_proj",
    "layers.feed_forward.router": "model.layers.{layer}.block_sparse_moe.gate",
    "layers.feed_forward.router.correction_bias": (
        "model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"
    ),
    "layers.feed_forward.experts.gate_up.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
    "layers.feed_forward.experts.gate_up.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
    "layers.feed_forward.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
    "layers.feed_forward.shared.gate_up": "model.layers.{layer}.block_sparse_moe.shared_experts.{part}_proj",
    "layers.feed_forward.shared.down": "model.layers.{layer}.block_sparse_moe.shared_experts.down_proj",
}
_BAILING_NAMES = {
    module: name.replace("self_attn.o_proj", "attention.dense").replace("self_attn", "attention")
    for module, name in KIMI_NAMES.items()
    if "experts.gate_up." not in module
} | {
    "embedding": "model.word_embeddings",
    "layers.feed_forward.router": "model.layers.{layer}.mlp.gate",
    "layers.feed_forward.router.correction_bias": "model.layers.{layer}.mlp.gate.expert_bias",
    "layers.feed_forward.experts.gate_up": "model.layers.{layer}.mlp.experts.{expert}.{part}_proj",
    "layers.feed_forward.experts.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
    "layers.feed_forward.shared.gate_up": "model.layers.{layer}.mlp.shared_experts.{part}_proj",
    "layers.feed_forward.shared.down": "model.layers.{layer}.mlp.shared_experts.down_proj",
}

_BAILING_MTP = replace(MTP_LAYER, names={**MTP_LAYER.names, "heads.norm": "{prefix}.final_layernorm"})


def _with_query(names: dict[str, str], arch: ModelSpec) -> dict[str, str]:
    """The name of the matrix of queries depends on whether they have a latent."""
    latent = next((layer.attention for layer in arch.layers if isinstance(layer.attention, MLASpec)), None)
    is_direct = latent is None or latent.q_lora_rank is None
    module = names["layers.attention.up"].removesuffix("kv_b_proj")
    return names | {"layers.attention.query": f"{module}q_{'' if is_direct else 'b_'}proj"}


_COMMON = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_shared_experts": 1,
    "num_experts_per_token": 8,
    "moe_renormalize": True,
}
FAMILIES = {
    "KimiLinearForCausalLM": Family(
        _kimi_linear,
        lambda arch: _with_query(KIMI_NAMES, arch),
        _COMMON
        | {
            "model_max_length": 1048576,
            "rms_norm_eps": 1e-5,
            "num_experts": 256,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
        },
        after_layers="multi-token prediction",
    ),
    "BailingHybridForCausalLM": Family(
        _bailing_hybrid,
        lambda arch: _with_query(_BAILING_NAMES, arch),
        _COMMON
        | {
            "model_max_length": 262144,
            "rms_norm_eps": 1e-6,
            "num_experts": 512,
            "num_expert_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 768,
            "first_k_dense_replace": 2,
            "rope_theta": 6000000.0,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "layer_group_size": 6,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
        },
        after_layers="multi-token prediction",
        draft_heads={"mtp": _BAILING_MTP},
    ),
}
