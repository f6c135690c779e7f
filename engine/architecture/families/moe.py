"""Mixtures of experts: Mixtral, Qwen2 and Qwen3 MoE, PowerMoE and GraniteMoE, GLM-4 MoE, dots1, MiniMax-M2, gpt-oss."""

from __future__ import annotations

from quire.engine.architecture.families.family import (
    Config,
    DraftHeadLayout,
    Family,
    Runs,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    require,
    rms_norm,
    rope,
    windows,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec

NAMES_BY_EXPERT = NAMES | {
    "layers.feed_forward.router": "model.layers.{layer}.mlp.gate",
    "layers.feed_forward.experts.gate_up": "model.layers.{layer}.mlp.experts.{expert}.{part}_proj",
    "layers.feed_forward.experts.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
    "layers.feed_forward.shared.gate_up": "model.layers.{layer}.mlp.shared_experts.{part}_proj",
    "layers.feed_forward.shared.down": "model.layers.{layer}.mlp.shared_experts.down_proj",
}
"""Names of Qwen and DeepSeek."""
STACKED_EXPERTS = {
    "layers.feed_forward.experts.gate_up.weight": "model.layers.{layer}.mlp.experts.gate_up_proj",
    "layers.feed_forward.experts.down.weight": "model.layers.{layer}.mlp.experts.down_proj",
}
"""Names of experts that are stacked in two tensors."""

MTP_LAYER = DraftHeadLayout(
    layer="model.layers.{after}",
    names={
        "heads.embedding_norm": "{prefix}.enorm",
        "heads.hidden_norm": "{prefix}.hnorm",
        "heads.projection": "{prefix}.eh_proj",
        "heads.norm": "{prefix}.shared_head.norm",
    },
)
"""Multi-token prediction as DeepSeek stores it: a layer after the last one, with copies of embedding and head."""

MIXTRAL_NAMES = NAMES | {
    "layers.feed_forward.router": "model.layers.{layer}.block_sparse_moe.gate",
    "layers.feed_forward.experts.gate_up.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
    "layers.feed_forward.experts.gate_up.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
    "layers.feed_forward.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
}


def _mixtral(name: str, config: Config) -> ModelSpec:
    norm = rms_norm(config)
    rope_spec = rope(config, head_dim(config), is_interleaved=bool(config.get("rope_interleave")))  # of GGUF
    experts = MoESpec(
        num_experts=int(config["num_local_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        activation=activation(config.get("hidden_act", "silu")),
        renormalize=True,
    )
    layers = [
        LayerSpec(
            attention=attention(config, rope_spec, window=window),
            attention_norm=norm,
            feed_forward=experts,
            feed_forward_norm=norm,
        )
        for window in windows(config)
    ]
    return architecture(name, config, layers, norm)


def qwen_moe(name: str, config: Config) -> ModelSpec:
    """Qwen2 has a shared expert with a gate; in both families some layers may be dense."""
    norm, rope_spec, is_second = rms_norm(config), rope(config, head_dim(config)), name.startswith("Qwen2")
    dense = feed_forward(config)
    shared = (
        feed_forward(config, intermediate_size=int(config["shared_expert_intermediate_size"])) if is_second else None
    )
    experts = MoESpec(
        num_experts=int(config.get("num_local_experts") or config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        activation=activation(config.get("hidden_act", "silu")),
        renormalize=bool(config["norm_topk_prob"]),
        shared=shared,
        shared_gate=is_second,
    )
    biases = {"qkv_bias": bool(config.get("qkv_bias", True)), "output_bias": False} if is_second else {"qk_norm": norm}
    every, without = int(config["decoder_sparse_step"]), set(config.get("mlp_only_layers") or ())
    require(config, "use_sliding_window", False)
    layers = [
        LayerSpec(
            attention=attention(config, rope_spec, **biases),
            attention_norm=norm,
            feed_forward=experts if number not in without and (number + 1) % every == 0 else dense,
            feed_forward_norm=norm,
        )
        for number in range(int(config["num_hidden_layers"]))
    ]
    return architecture(name, config, layers, norm)


def _granite_moe(name: str, config: Config) -> ModelSpec:
    norm, rope_spec = rms_norm(config), rope(config, head_dim(config))
    layer = LayerSpec(
        attention=attention(config, rope_spec, scale=float(config["attention_multiplier"])),
        attention_norm=norm,
        feed_forward=MoESpec(
            num_experts=int(config["num_local_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            intermediate_size=int(config["intermediate_size"]),
            activation=activation(config.get("hidden_act", "silu")),
            scoring="topk_softmax",
        ),
        feed_forward_norm=norm,
        residual_multiplier=float(config["residual_multiplier"]),
    )
    return architecture(
        name,
        config,
        [layer] * int(config["num_hidden_layers"]),
        norm,
        embedding_multiplier=float(config["embedding_multiplier"]),
        logit_multiplier=1 / float(config["logits_scaling"]),
    )


_GRANITE_NAMES = NAMES | {
    "layers.feed_forward.router": "model.layers.{layer}.block_sparse_moe.router.layer",
    "layers.feed_forward.experts.gate_up": "model.layers.{layer}.block_sparse_moe.input_linear",
    "layers.feed_forward.experts.down": "model.layers.{layer}.block_sparse_moe.output_linear",
}


def glm4_moe(name: str, config: Config) -> ModelSpec:
    """The first layers are dense; routing is DeepSeek-V3's."""
    norm, rope_spec = rms_norm(config), rope(config, head_dim(config))
    dense, experts = feed_forward(config), sigmoid_experts(config)
    biases = {"qkv_bias": bool(config.get("attention_bias", False)), "output_bias": False}
    layers = [
        LayerSpec(
            attention=attention(config, rope_spec, **biases, qk_norm=norm if config.get("use_qk_norm") else None),
            attention_norm=norm,
            feed_forward=dense if number < int(config["first_k_dense_replace"]) else experts,
            feed_forward_norm=norm,
        )
        for number in range(int(config["num_hidden_layers"]))
    ]
    return architecture(name, config, layers, norm)


def sigmoid_experts(config: Config) -> MoESpec:
    """DeepSeek-V3's experts: sigmoid scores, a correction bias for the choice, groups by their two best experts, a
    shared expert."""
    require(config, "scoring_func", "sigmoid")
    require(config, "topk_method", "noaux_tc")
    require(config, "moe_layer_freq", 1)
    size, shared = int(config["moe_intermediate_size"]), int(config.get("n_shared_experts") or 0)
    return MoESpec(
        num_experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=size,
        activation=activation(config.get("hidden_act", "silu")),
        scoring="sigmoid",
        renormalize=bool(config["norm_topk_prob"]),
        scale=float(config["routed_scaling_factor"]),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        group_score="top2_sum",
        correction_bias=True,
        shared=feed_forward(config, intermediate_size=size * shared, bias=False) if shared else None,
    )


def _dots1(name: str, config: Config) -> ModelSpec:
    """GLM-4 MoE's layers, in some models with windows."""
    require(config, "scoring_func", "sigmoid", "noaux_tc")  # the publisher's code calls it noaux_tc
    norm, rope_spec = rms_norm(config), rope(config, head_dim(config))
    dense, experts = feed_forward(config), sigmoid_experts({**config, "scoring_func": "sigmoid"})
    layers = [
        LayerSpec(
            attention=attention(config, rope_spec, window=window, qk_norm=norm),
            attention_norm=norm,
            feed_forward=dense if number < int(config["first_k_dense_replace"]) else experts,
            feed_forward_norm=norm,
        )
        for number, window in enumerate(windows(config))
    ]
    return architecture(name, config, layers, norm)


def _minimax_m2(name: str, config: Config) -> ModelSpec:
    require(config, "scoring_func", "sigmoid")
    require(config, "shared_intermediate_size", 0)
    require(config, "use_qk_norm", True)
    require(config, "qk_norm_type", "per_layer")
    dim = head_dim(config)
    rotary = config.get("rotary_dim")
    rope_spec = rope({**config, "partial_rotary_factor": int(rotary) / dim} if rotary else config, dim)
    norm = rms_norm(config)
    layer = LayerSpec(
        attention=attention(config, rope_spec, qk_norm=norm, qk_norm_over="all heads"),
        attention_norm=norm,
        feed_forward=MoESpec(
            num_experts=int(config["num_local_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            intermediate_size=int(config["intermediate_size"]),
            activation=activation(config.get("hidden_act", "silu")),
            scoring="sigmoid",
            renormalize=True,
            correction_bias=True,
        ),
        feed_forward_norm=norm,
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary settings if the config has none."""


def _gpt_oss(name: str, config: Config) -> ModelSpec:
    require(config, "swiglu_alpha", 1.702)
    require(config, "swiglu_limit", 7.0)
    every = range(int(config["num_hidden_layers"]))
    config = {"layer_types": [("sliding_attention", "full_attention")[number % 2] for number in every], **config}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_scaling"] = _GPT_OSS_ROPE
    norm, rope_spec = rms_norm(config), rope(config, head_dim(config))
    experts = MoESpec(
        num_experts=int(config["num_local_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        activation="swiglu_oai",
        scoring="topk_softmax",
        router_bias=True,
        bias=True,
    )
    layers = {
        window: LayerSpec(
            attention=attention(config, rope_spec, window=window, has_sinks=True),
            attention_norm=norm,
            feed_forward=experts,
            feed_forward_norm=norm,
        )
        for window in set(windows(config))
    }
    return architecture(name, config, [layers[window] for window in windows(config)], norm)


_GPT_OSS_NAMES = NAMES | {
    "layers.attention.sinks": "model.layers.{layer}.self_attn.sinks",
    "layers.feed_forward.router": "model.layers.{layer}.mlp.router",
    "layers.feed_forward.experts.gate_up.weight": "model.layers.{layer}.mlp.experts.gate_up_proj",
    "layers.feed_forward.experts.gate_up.bias": "model.layers.{layer}.mlp.experts.gate_up_proj_bias",
    "layers.feed_forward.experts.down.weight": "model.layers.{layer}.mlp.experts.down_proj",
    "layers.feed_forward.experts.down.bias": "model.layers.{layer}.mlp.experts.down_proj_bias",
}


def _gpt_oss_rows(layer: LayerSpec, module: str, part: str) -> Runs | None:
    """Rows of gate and up alternate."""
    if module != "layers.feed_forward.experts.gate_up" or not isinstance(layer.feed_forward, MoESpec):
        return None
    return [range(("gate", "up").index(part), 2 * layer.feed_forward.intermediate_size, 2)]


QWEN_MOE = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
GLM4_NAMES = NAMES_BY_EXPERT | {
    "layers.feed_forward.router.correction_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias"
}
GLM4 = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 1,
}
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
FAMILIES = {
    "MixtralForCausalLM": Family(
        _mixtral,
        MIXTRAL_NAMES,
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        qwen_moe,
        NAMES_BY_EXPERT
        | {
            "layers.feed_forward.shared.gate_up": "model.layers.{layer}.mlp.shared_expert.{part}_proj",
            "layers.feed_forward.shared.down": "model.layers.{layer}.mlp.shared_expert.down_proj",
            "layers.feed_forward.shared_gate": "model.layers.{layer}.mlp.shared_expert_gate",
        },
        {**QWEN_MOE, "num_experts_per_tok": 4, "num_key_value_heads": 16},
    ),
    "Qwen3MoeForCausalLM": Family(
        qwen_moe, NAMES_BY_EXPERT, {**QWEN_MOE, "num_experts_per_tok": 8, "num_key_value_heads": 4}
    ),
    "GraniteMoeForCausalLM": Family(
        _granite_moe,
        _GRANITE_NAMES,
        {
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **dict.fromkeys(_MULTIPLIERS, 1.0),
        },
    ),
    "Glm4MoeForCausalLM": Family(
        glm4_moe,
        GLM4_NAMES,
        GLM4,
        after_layers="multi-token prediction",
        draft_heads={"mtp": MTP_LAYER},
    ),
    "Dots1ForCausalLM": Family(
        _dots1,
        GLM4_NAMES,
        {
            "max_position_embeddings": 2048,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        _minimax_m2,
        MIXTRAL_NAMES
        | {
            "layers.feed_forward.router.correction_bias": (
                "model.layers.{layer}.block_sparse_moe.e_score_correction_bias"
            )
        },
        {
            "max_position_embeddings": 196608,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5000000.0,
        },
        after_layers="multi-token prediction",
    ),
    "GptOssForCausalLM": Family(
        _gpt_oss,
        _GPT_OSS_NAMES,
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
            "rope_theta": 150000.0,
        },
        is_transposed=lambda module: module.startswith("layers.feed_forward.experts."),
        rows=_gpt_oss_rows,
    ),
}
