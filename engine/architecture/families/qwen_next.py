"""Qwen3-Next and Qwen3.5: three layers with the gated delta rule for each one with attention, whose output is gated.
Lara Mini: layers with the gated delta rule beside windows, and full attention without positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.architecture.attention_spec import AttentionSpec
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
    layers_by_kind,
    of_multimodal,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT, STACKED_EXPERTS
from quire.engine.architecture.families.qwen_vl import QWEN3_TOWER, qwen3_media
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.recurrent_spec import GatedDeltaNetSpec

_NAMES = NAMES_BY_EXPERT | {
    "layers.attention.qkv.gate": "model.layers.{layer}.self_attn.q_proj",
    "layers.state.conv": "model.layers.{layer}.linear_attn.conv1d",
    "layers.state.decay": "model.layers.{layer}.linear_attn.A_log",
    "layers.state.step_bias": "model.layers.{layer}.linear_attn.dt_bias",
    "layers.state.norm": "model.layers.{layer}.linear_attn.norm",
    "layers.state.output": "model.layers.{layer}.linear_attn.out_proj",
    "layers.feed_forward.shared.gate_up": "model.layers.{layer}.mlp.shared_expert.{part}_proj",
    "layers.feed_forward.shared.down": "model.layers.{layer}.mlp.shared_expert.down_proj",
    "layers.feed_forward.shared_gate": "model.layers.{layer}.mlp.shared_expert_gate",
}
_NEXT_NAMES = _NAMES | {
    "layers.state.input": "model.layers.{layer}.linear_attn.in_proj_qkvz",
    "layers.state.gates": "model.layers.{layer}.linear_attn.in_proj_ba",
}
QWEN35_NAMES = _NAMES | {
    "layers.state.input": "model.layers.{layer}.linear_attn.in_proj_qkv",
    "layers.state.input.z": "model.layers.{layer}.linear_attn.in_proj_z",
    "layers.state.gates": "model.layers.{layer}.linear_attn.in_proj_{part}",
}


def _hybrid(name: str, config: Config, feed_forwards: list[MLPSpec | MoESpec]) -> ModelSpec:
    """The model with these feed-forwards in its layers."""
    require(config, "hidden_act", "silu")
    norm = rms_norm(config, offset=1.0)
    mixers: dict[str, dict[str, Any]] = {
        "linear_attention": {
            "attention": None,
            "state": delta_net(config),
        },
        "full_attention": {
            "attention": attention(config, rope(config, head_dim(config)), qk_norm=norm, output_gate="features")
        },
    }
    every, count = int(config["full_attention_interval"]), len(feed_forwards)
    kinds = config.get("layer_types") or [
        "linear_attention" if number % every else "full_attention" for number in range(1, count + 1)
    ]
    layers = layers_by_kind(kinds, mixers, feed_forwards, attention_norm=norm, feed_forward_norm=norm)
    return architecture(name, config, layers, norm)


def delta_net(config: Config, **changes: Any) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(
        num_value_heads=int(config["linear_num_value_heads"]),
        num_key_heads=int(config["linear_num_key_heads"]),
        key_head_dim=int(config["linear_key_head_dim"]),
        value_head_dim=int(config["linear_value_head_dim"]),
        conv_size=int(config["linear_conv_kernel_dim"]),
        norm=rms_norm(config),
        **changes,
    )


def _lara_mini(name: str, config: Config) -> ModelSpec:
    require(config, "hidden_act", "silu")
    norm, count = rms_norm(config), int(config["num_hidden_layers"])
    turns, window = rope(config, head_dim(config)), int(config["sliding_window"])
    mixers: dict[str, dict[str, Any]] = {
        "linear_attention": {"attention": None, "state": delta_net(config, has_joint_input=True)},
        "sliding_attention": {"attention": attention(config, turns, qk_norm=norm, window=window)},
        "full_attention": {"attention": attention(config, None, qk_norm=norm)},
    }
    kinds = config.get("layer_types") or [_LARA_KINDS[number % len(_LARA_KINDS)] for number in range(count)]
    experts = replace(gated_experts(config, renormalize=bool(config["norm_topk_prob"])), shared_gate=False)
    layers = layers_by_kind(kinds, mixers, [experts] * count, attention_norm=norm, feed_forward_norm=norm)
    return architecture(name, config, layers, norm)


def gated_experts(config: Config, *, renormalize: bool) -> MoESpec:
    return MoESpec(
        num_experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        activation=activation(config.get("hidden_act", "silu")),
        renormalize=renormalize,
        shared=feed_forward(config, intermediate_size=int(config["shared_expert_intermediate_size"])),
        shared_gate=True,
    )


def _qwen3_next(name: str, config: Config) -> ModelSpec:
    experts, dense = gated_experts(config, renormalize=bool(config["norm_topk_prob"])), feed_forward(config)
    step, without = int(config["decoder_sparse_step"]), set(config.get("mlp_only_layers") or ())
    return _hybrid(
        name,
        config,
        [
            experts if number not in without and (number + 1) % step == 0 else dense
            for number in range(int(config["num_hidden_layers"]))
        ],
    )


def _qwen35(name: str, config: Config) -> ModelSpec:
    return _hybrid(name, config, [feed_forward(config)] * int(config["num_hidden_layers"]))


def _qwen35_moe(name: str, config: Config) -> ModelSpec:
    return _hybrid(name, config, [gated_experts(config, renormalize=True)] * int(config["num_hidden_layers"]))


def _media(arch: ModelSpec, config: Config) -> ModelSpec:
    return qwen3_media(arch, config, sections=(11, 11, 10), has_levels=False)


def _next_rows(layer: LayerSpec, module: str, part: str) -> Runs | None:
    """Each key head has all parts together."""
    spec = layer.state
    if not isinstance(spec, GatedDeltaNetSpec):
        return gate_rows(layer, module, part)
    repeats = spec.num_value_heads // spec.num_key_heads
    if module == "layers.state.gates":
        return _interleaved({"b": repeats, "a": repeats}, part, spec.num_key_heads)
    if module == "layers.state.input":
        keys, values = spec.key_head_dim, repeats * spec.value_head_dim
        return _interleaved({"q": keys, "k": keys, "v": values, "z": values}, part, spec.num_key_heads)
    return None


def gate_rows(layer: LayerSpec, module: str, part: str) -> Runs | None:
    """Each head has its query and its gate together."""
    spec = layer.attention
    if isinstance(spec, AttentionSpec) and module == "layers.attention.qkv" and part in ("q", "gate"):
        return _interleaved({"q": spec.head_dim, "gate": spec.head_dim}, part, spec.num_heads)
    return None


def _interleaved(sizes: dict[str, int], part: str, heads: int) -> Runs:
    """The rows of a part, where each head has all parts one after another."""
    names, width = list(sizes), sum(sizes.values())
    first = sum(sizes[name] for name in names[: names.index(part)])
    return [range(start + first, start + first + sizes[part]) for start in range(0, heads * width, width)]


_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "max_position_embeddings": 32768,
}

_QWEN35_DEFAULTS = _DEFAULTS | {"num_key_value_heads": 4}
_QWEN35_MOE_DEFAULTS = _DEFAULTS | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
_TOKENS = {"image_token_id": 248056, "video_token_id": 248057}
NOT_TEXT = ("mtp.", "model.visual.")
_LARA_KINDS = (*("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention"),)
_LARA_NAMES = (
    _NAMES
    | STACKED_EXPERTS
    | {
        "layers.state.input": "model.layers.{layer}.linear_attn.in_proj",
        "layers.state.norm": "model.layers.{layer}.linear_attn.out_norm",
    }
)
NEXT_MTP = DraftHeadLayout(
    layer="mtp.layers.0",
    names={
        "heads.embedding_norm": "mtp.pre_fc_norm_embedding",
        "heads.hidden_norm": "mtp.pre_fc_norm_hidden",
        "heads.projection": "mtp.fc",
        "heads.norm": "mtp.norm",
    },
)
"""Multi-token prediction as Qwen3-Next stores it."""
_QWEN35_MTP = replace(NEXT_MTP, count="mtp_num_hidden_layers")

FAMILIES = {
    "Qwen3NextForCausalLM": Family(
        _qwen3_next,
        _NEXT_NAMES,
        _DEFAULTS
        | {
            "num_key_value_heads": 2,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
        },
        rows=_next_rows,
        ignored_prefixes=NOT_TEXT,
        draft_heads={"mtp": NEXT_MTP},
    ),
    "LaraMiniForCausalLM": Family(
        _lara_mini,
        _LARA_NAMES,
        {
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "head_dim": 128,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 4,
            "num_experts": 128,
            "norm_topk_prob": True,
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3_5ForCausalLM": Family(
        _qwen35,
        QWEN35_NAMES,
        _QWEN35_DEFAULTS,
        rows=gate_rows,
        ignored_prefixes=NOT_TEXT,
        draft_heads={"mtp": _QWEN35_MTP},
    ),
    "Qwen3_5ForConditionalGeneration": Family(
        _qwen35,
        of_multimodal(QWEN35_NAMES) | QWEN3_TOWER,
        _QWEN35_DEFAULTS | _TOKENS,
        media=_media,
        rows=gate_rows,
        ignored_prefixes=NOT_TEXT,
        draft_heads={"mtp": _QWEN35_MTP},
    ),
    "Qwen3_5MoeForCausalLM": Family(
        _qwen35_moe, QWEN35_NAMES, _QWEN35_MOE_DEFAULTS, rows=gate_rows, ignored_prefixes=NOT_TEXT
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        _qwen35_moe,
        of_multimodal(QWEN35_NAMES | STACKED_EXPERTS) | QWEN3_TOWER,
        _QWEN35_MOE_DEFAULTS | _TOKENS,
        media=_media,
        rows=gate_rows,
        ignored_prefixes=NOT_TEXT,
    ),
}
