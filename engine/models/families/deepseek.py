"""DeepSeek V2 and V3 (and R1, and Kimi K2, which has V3's architecture), and Mistral 4: multi-head latent attention and
grouped routing."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.models.families.family import (
    Config,
    Family,
    activation,
    architecture,
    feed_forward,
    query_scale,
    require,
    rms_norm,
    rope,
    yarn_temperature,
)
from quire.engine.models.families.moe import NAMES_BY_EXPERT, STACKED_EXPERTS, sigmoid_experts
from quire.engine.models.model_spec import LayerSpec, MLASpec, ModelSpec, MoESpec


def _deepseek(name: str, config: Config, experts: MoESpec | None = None) -> ModelSpec:
    norm, rotary_dim = rms_norm(config), int(config["qk_rope_head_dim"])
    scaling = {**(config.get("rope_parameters") or config.get("rope_scaling") or {}), "partial_rotary_factor": None}
    config = {**config, "rope_parameters": scaling, "partial_rotary_factor": None}
    rope_spec = rope(config, rotary_dim, is_interleaved=bool(config.get("rope_interleave", True)))
    scale = (int(config["qk_nope_head_dim"]) + rotary_dim) ** -0.5
    if rope_spec.kind != "default" and scaling.get("mscale_all_dim"):
        scale *= yarn_temperature(rope_spec.factor, float(scaling["mscale_all_dim"])) ** 2
    attention = MLASpec(
        num_heads=int(config["num_attention_heads"]),
        q_lora_rank=None if config["q_lora_rank"] is None else int(config["q_lora_rank"]),
        kv_lora_rank=int(config["kv_lora_rank"]),
        qk_nope_head_dim=int(config["qk_nope_head_dim"]),
        v_head_dim=int(config["v_head_dim"]),
        scale=scale,
        rope=rope_spec,
        norm=replace(norm, eps=1e-6),  # the latents' norm, independent of the model's eps
        bias=bool(config.get("attention_bias", False)),
        query_scale=query_scale(scaling),
    )
    dense = feed_forward(config)
    if experts is None:
        experts = sigmoid_experts(config) if name.startswith("DeepseekV3") else _softmax_experts(config)
    layers = [
        LayerSpec(
            attention=attention,
            attention_norm=norm,
            feed_forward=dense if number < int(config["first_k_dense_replace"]) else experts,
            feed_forward_norm=norm,
        )
        for number in range(int(config["num_hidden_layers"]))
    ]
    return architecture(name, config, layers, norm)


def _softmax_experts(config: Config) -> MoESpec:
    """V2: softmax scores, and optionally groups that are chosen by their best expert."""
    require(config, "topk_method", "greedy", "group_limited_greedy")
    require(config, "scoring_func", "softmax")
    require(config, "moe_layer_freq", 1)
    require(config, "mlp_bias", False)
    grouped = config["topk_method"] == "group_limited_greedy"
    size, shared = int(config["moe_intermediate_size"]), int(config.get("n_shared_experts") or 0)
    return MoESpec(
        num_experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=size,
        activation=activation(config.get("hidden_act", "silu")),
        renormalize=False,
        scale=float(config["routed_scaling_factor"]),
        groups=int(config["n_group"]) if grouped else 1,
        top_groups=int(config["topk_group"]) if grouped else 1,
        shared=feed_forward(config, intermediate_size=size * shared, bias=False) if shared else None,
    )


def mistral4(name: str, config: Config) -> ModelSpec:
    """DeepSeek-V3's layers, with softmax scores, and queries that grow with their position."""
    experts = sigmoid_experts({**config, "scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    if not config.get("rope_parameters"):
        config = {**config, "rope_parameters": _MISTRAL4_ROPE}
    return _deepseek(name, config, replace(experts, scoring="softmax", correction_bias=False))


_NAMES = NAMES_BY_EXPERT | {
    "layers.attention.down.q": "model.layers.{layer}.self_attn.q_a_proj",
    "layers.attention.down.kv": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa",
    "layers.attention.query_norm": "model.layers.{layer}.self_attn.q_a_layernorm",
    "layers.attention.latent_norm": "model.layers.{layer}.self_attn.kv_a_layernorm",
    "layers.attention.up": "model.layers.{layer}.self_attn.kv_b_proj",
    "layers.feed_forward.router.correction_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
}


def names(arch: ModelSpec) -> dict[str, str]:
    attention = arch.layers[0].attention
    is_direct = isinstance(attention, MLASpec) and attention.q_lora_rank is None
    return {**_NAMES, "layers.attention.query": f"model.layers.{{layer}}.self_attn.q_{'' if is_direct else 'b_'}proj"}


def mistral4_names(arch: ModelSpec) -> dict[str, str]:
    return names(arch) | STACKED_EXPERTS


_COMMON = {"rms_norm_eps": 1e-6, "q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128} | {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MISTRAL4 = {
    **_COMMON,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
FAMILIES = {
    "DeepseekV2ForCausalLM": Family(
        _deepseek,
        names,
        {
            **_COMMON,
            "max_position_embeddings": 2048,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
    ),
    "DeepseekV3ForCausalLM": Family(
        _deepseek,
        names,
        {
            **_COMMON,
            "max_position_embeddings": 4096,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        after_layers="multi-token prediction",
    ),
    "Mistral4ForCausalLM": Family(mistral4, mistral4_names, MISTRAL4),
}
