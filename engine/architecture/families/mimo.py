"""MiMo-V2-Flash: values smaller than keys, and layers with windows, sinks and twice the KV heads."""

from __future__ import annotations

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.families.family import (
    Config,
    DraftHeadLayout,
    Family,
    architecture,
    attention,
    feed_forward,
    head_dim,
    require,
    rms_norm,
    rope,
    windows,
)
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT, sigmoid_experts
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec


def _attention(config: Config, window: int | None) -> AttentionSpec:
    for setting in ("num_attention_heads", "head_dim", "v_head_dim"):
        require(config, f"swa_{setting}", None, config[setting])
    require(config, "add_swa_attention_sink_bias", None, True)
    require(config, "add_full_attention_sink_bias", None, False)
    kind, kv_heads = "full_attention", int(config["num_key_value_heads"])
    if window is not None:
        kind, kv_heads = "sliding_attention", int(config.get("swa_num_key_value_heads") or 2 * kv_heads)
    partial = config.get("partial_rotary_factor") or 0.334
    thetas = {
        "full_attention": config.get("rope_theta") or 5000000.0,
        "sliding_attention": config.get("swa_rope_theta") or 10000.0,
    }
    settings = config.get("rope_parameters") or {
        each: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": partial}
        for each, theta in thetas.items()
    }
    scale = config["attention_value_scale"]
    return attention(
        config,
        rope({**config, "rope_parameters": settings}, head_dim(config), kind),
        num_kv_heads=kv_heads,
        v_head_dim=int(config["v_head_dim"]),
        output_multiplier=1.0 if scale is None else float(scale),
        window=window,
        has_sinks=window is not None,
        output_bias=False,
    )


def _with_own_key(config: Config) -> Config:
    """config.json with windows that include the query's own key; the publisher's setting excludes it."""
    if config.get("sliding_window_size") is None:
        return config
    return {**config, "sliding_window": int(config["sliding_window_size"]) + 1}


def _mtp(config: Config) -> list[LayerSpec]:
    """The layer of each head has a window and no experts."""
    config, norm = _with_own_key(config), rms_norm(config)
    return [
        LayerSpec(
            attention=_attention(config, int(config["sliding_window"])),
            attention_norm=norm,
            feed_forward=feed_forward(config, bias=False),
            feed_forward_norm=norm,
        )
    ]


def _mimo(name: str, config: Config) -> ModelSpec:
    """Lists of 0 and 1 are the publisher's form of `layer_types` and `mlp_layer_types`."""
    config = _with_own_key(config)
    count, norm = int(config["num_hidden_layers"]), rms_norm(config)
    if config.get("routed_scaling_factor") is None:
        config = {**config, "routed_scaling_factor": 1.0}
    is_local = config.get("hybrid_layer_pattern") or [number and (number + 1) % 6 for number in range(count)]
    kinds = ["sliding_attention" if local else "full_attention" for local in is_local]
    each_window = windows({"layer_types": kinds, **config})
    attentions = {window: _attention(config, window) for window in set(each_window)}
    frequency = config.get("moe_layer_freq")
    is_sparse = frequency if isinstance(frequency, list) else [number > 0 for number in range(count)]
    if config.get("mlp_layer_types"):
        is_sparse = [kind == "sparse" for kind in config["mlp_layer_types"]]
    dense, experts = feed_forward(config, bias=False), sigmoid_experts({**config, "moe_layer_freq": 1})
    layers = [
        LayerSpec(
            attention=attentions[window],
            attention_norm=norm,
            feed_forward=experts if sparse else dense,
            feed_forward_norm=norm,
        )
        for window, sparse in zip(each_window, is_sparse, strict=True)
    ]
    return architecture(name, config, layers, norm)


_MTP = DraftHeadLayout(
    layer="model.mtp.layers.{layer}",
    names={
        "heads.embedding_norm": "{prefix}.enorm",
        "heads.hidden_norm": "{prefix}.hnorm",
        "heads.projection": "{prefix}.eh_proj",
        "heads.norm": "{prefix}.final_layernorm",
        "layers.feed_forward_norm": "{prefix}.pre_mlp_layernorm",
    },
    layers=_mtp,
    reads_normed=False,
    heads="stored",
)
FAMILIES = {
    "MiMoV2FlashForCausalLM": Family(
        _mimo,
        NAMES_BY_EXPERT
        | {
            "layers.attention.sinks": "model.layers.{layer}.self_attn.attention_sink_bias",
            "layers.feed_forward.router.correction_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        },
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 129,
            "attention_value_scale": 0.707,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
        },
        ignored_prefixes=("model.mtp.",),
        draft_heads={"mtp": _MTP},
    ),
}
