"""LFM2, LFM2-MoE and LFM3: layers with a short gated convolution, and a few with attention."""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.families import towers, vit
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    layer_norm,
    layers_by_kind,
    of_multimodal,
    rms_norm,
    rope,
)
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.recurrent_spec import ShortConvSpec
from quire.engine.architecture.vit_spec import ProjectorSpec

_NAMES = {
    "embedding": "model.embed_tokens",
    "layers.attention_norm": "model.layers.{layer}.operator_norm",
    "layers.attention.qkv": "model.layers.{layer}.self_attn.{part}_proj",
    "layers.attention.query_norm": "model.layers.{layer}.self_attn.q_layernorm",
    "layers.attention.key_norm": "model.layers.{layer}.self_attn.k_layernorm",
    "layers.attention.output": "model.layers.{layer}.self_attn.out_proj",
    "layers.state.input": "model.layers.{layer}.conv.in_proj",
    "layers.state.conv": "model.layers.{layer}.conv.conv",
    "layers.state.output": "model.layers.{layer}.conv.out_proj",
    "layers.feed_forward_norm": "model.layers.{layer}.ffn_norm",
    "layers.feed_forward.gate_up.gate": "model.layers.{layer}.feed_forward.w1",
    "layers.feed_forward.gate_up.up": "model.layers.{layer}.feed_forward.w3",
    "layers.feed_forward.down": "model.layers.{layer}.feed_forward.w2",
    "layers.feed_forward.router": "model.layers.{layer}.feed_forward.gate",
    "layers.feed_forward.router.correction_bias": "model.layers.{layer}.feed_forward.expert_bias",
    "layers.feed_forward.experts.gate_up.gate": "model.layers.{layer}.feed_forward.experts.{expert}.w1",
    "layers.feed_forward.experts.gate_up.up": "model.layers.{layer}.feed_forward.experts.{expert}.w3",
    "layers.feed_forward.experts.down": "model.layers.{layer}.feed_forward.experts.{expert}.w2",
    "norm": "model.embedding_norm",
    "head": "lm_head",
}


def _hybrid(name: str, config: Config, feed_forwards: list[MLPSpec | MoESpec]) -> ModelSpec:
    """The model with these feed-forwards in its layers."""
    norm, bias = rms_norm(config, eps=float(config["norm_eps"])), bool(config["conv_bias"])
    conv = ShortConvSpec(width=int(config["hidden_size"]), conv_size=int(config["conv_L_cache"]), bias=bias)
    mixers: dict[str, dict[str, Any]] = {
        "conv": {"attention": None, "state": conv},
        "full_attention": {"attention": attention(config, rope(config, head_dim(config)), qk_norm=norm)},
    }
    kinds = config.get("layer_types")
    if kinds is None:
        count = len(feed_forwards)
        numbers = config.get("full_attn_idxs")
        with_attention = set(range(count) if numbers is None else numbers)
        kinds = ["full_attention" if number in with_attention else "conv" for number in range(count)]
    layers = layers_by_kind(kinds, mixers, feed_forwards, attention_norm=norm, feed_forward_norm=norm)
    tied = bool(config.get("tie_embedding", config["tie_word_embeddings"]))
    return architecture(name, config, layers, norm, tie_embeddings=tied)


def _lfm2(name: str, config: Config) -> ModelSpec:
    """The inner size may be derived from the one in config.json, as for Llama 1."""
    size = int(config.get("block_ff_dim", config["intermediate_size"]))
    if config["block_auto_adjust_ff_dim"]:
        size, multiple = int(2 * size / 3), int(config["block_multiple_of"])
        if config["block_ffn_dim_multiplier"] is not None:
            size = int(config["block_ffn_dim_multiplier"] * size)
            size = -(-size // multiple) * multiple
    dense = feed_forward(config, intermediate_size=size, activation="silu")
    return _hybrid(name, config, [dense] * int(config["num_hidden_layers"]))


def _lfm2_moe(name: str, config: Config) -> ModelSpec:
    """The first layers are dense."""
    dense = feed_forward(config, activation="silu")
    experts = MoESpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        scoring="sigmoid",
        renormalize=bool(config["norm_topk_prob"]),
        scale=float(config["routed_scaling_factor"]),
        correction_bias=bool(config["use_expert_bias"]),
    )
    count, first = int(config["num_hidden_layers"]), int(config["num_dense_layers"])
    return _hybrid(name, config, [dense if number < first else experts for number in range(count)])


def _lfm3(name: str, config: Config) -> ModelSpec:
    """With windows in some layers, norms before and after each part, and gates of heads. Where config.json gives no
    positions, full attention rotates half of a head's pairs."""
    norm, bias, dim = rms_norm(config, eps=float(config["norm_eps"])), bool(config["conv_bias"]), head_dim(config)
    turns: dict[str, dict[str, Any]] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
    }
    config = {**config, "rope_parameters": config.get("rope_parameters") or turns}
    gate, post_norm = "heads" if config["use_attention_gate"] else None, norm if config["use_sandwich_norm"] else None
    window = config["sliding_window"]
    mixers: dict[str, dict[str, Any]] = {
        "conv": {
            "attention": None,
            "state": ShortConvSpec(width=int(config["hidden_size"]), conv_size=int(config["conv_L_cache"]), bias=bias),
        }
    } | {
        kind: {
            "attention": attention(
                config,
                rope(config, dim, kind),
                qk_norm=norm,
                output_gate=gate,
                window=int(window) if window and kind == "sliding_attention" else None,
            )
        }
        for kind in turns
    }
    kinds = config.get("layer_types") or [
        {2: "full_attention", 0: "sliding_attention" if number else "conv"}.get(number % 4, "conv")
        for number in range(int(config["num_hidden_layers"]))
    ]
    layers = layers_by_kind(
        kinds,
        mixers,
        [feed_forward(config, activation="silu")] * int(config["num_hidden_layers"]),
        attention_norm=norm,
        attention_post_norm=post_norm,
        feed_forward_norm=norm,
        feed_forward_post_norm=post_norm,
    )
    return architecture(name, config, layers, norm)


_LFM3_NAMES = _NAMES | {
    "layers.attention_post_norm": "model.layers.{layer}.post_operator_norm",
    "layers.attention.qkv.gate": "model.layers.{layer}.self_attn.gate_proj",
    "layers.attention.query_norm": "model.layers.{layer}.self_attn.q_norm",
    "layers.attention.key_norm": "model.layers.{layer}.self_attn.k_norm",
    "layers.attention.output": "model.layers.{layer}.self_attn.o_proj",
    "layers.feed_forward_post_norm": "model.layers.{layer}.post_ffn_norm",
}
_DEFAULTS = {
    "norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "conv_bias": False,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}


def _media(config: Config) -> MediaSpec:
    own, fields = towers.settings(config, "siglip2_vision_model")
    projector = ProjectorSpec(
        side=int(config.get("downsample_factor", 2)),
        norm=layer_norm(1e-5) if config.get("projector_use_layernorm", True) else None,
        inner_size=int(config.get("projector_hidden_size", 2560)),
        activation=activation(config.get("projector_hidden_act") or "gelu"),
        bias=bool(config.get("projector_bias", True)),
    )
    tower = vit.tower(config, own, **fields, norm=layer_norm(own["layer_norm_eps"]), projector=projector)
    return vit.media(config, tower, 396)


_LFM2 = (
    _DEFAULTS
    | {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True}
    | {"intermediate_size": 12288}
)
FAMILIES = {
    "Lfm2ForCausalLM": Family(_lfm2, _NAMES, _LFM2),
    "Lfm2VlForConditionalGeneration": Family(
        _lfm2,
        of_multimodal(_NAMES)
        | towers.SIGLIP_NAMES
        | {"tower.projector.norm": "model.multi_modal_projector.layer_norm"},
        _LFM2,
        ignored_prefixes=NOT_TEXT,
        ignored_pattern=towers.UNUSED,
        media=vit.with_tower(_media),
    ),
    "Lfm2MoeForCausalLM": Family(
        _lfm2_moe,
        _NAMES,
        _DEFAULTS
        | {
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
    ),
    "Lfm3ForCausalLM": Family(
        _lfm3,
        _LFM3_NAMES,
        _DEFAULTS
        | {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "conv_L_cache": 7,
            "sliding_window": 256,
            "use_sandwich_norm": True,
            "use_attention_gate": True,
        },
    ),
}
