"""Step 3.5 and 3.7: windows with more heads than the full layers, a gate for each head, and experts in limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.models.families.family import (
    NOT_TEXT,
    Config,
    Family,
    architecture,
    attention,
    head_dim,
    layers_by_kind,
    require,
    rms_norm,
    rope,
)
from quire.engine.models.families.llama import NAMES
from quire.engine.models.model_spec import MLPSpec, ModelSpec, MoESpec
from quire.engine.models.spec_parts import GatedActivation, RopeSpec
from quire.engine.protocol.errors import ConfigError


def _step(name: str, config: Config) -> ModelSpec:
    """Lists may have entries of layers for multi-token prediction after those of the layers."""
    require(config, "hidden_act", "silu")
    require(config, "attention_bias", False)
    require(config, "mlp_bias", False)
    require(config, "moe_router_activation", "sigmoid")
    require(config, "yarn_only_types", ["full_attention"])
    require(config, "sink", False)
    for setting in (
        "use_head_wise_attn_gate",
        "use_qk_norm",
        "zero_centered",
        "norm_expert_weight",
        "use_moe_router_bias",
    ):
        require(config, setting, True)
    count = int(config["num_hidden_layers"])
    kinds = (config.get("layer_types") or ["full_attention"] * count)[:count]
    norm, dim, sliding = rms_norm(config, offset=1.0), head_dim(config), config.get("attention_other_setting") or {}
    for setting, value in (("num_attention_groups", config["num_key_value_heads"]), ("head_dim", dim)):
        require(sliding, setting, value)
    heads = config.get("num_sliding_attention_heads") or sliding.get("num_attention_heads")
    common: dict[str, Any] = {
        "scale": float(config.get("query_pre_attn_scalar") or dim) ** -0.5,
        "qk_norm": norm,
        "output_gate": "heads",
    }
    windows = {
        "num_heads": int(heads or config["num_attention_heads"]),
        "window": int(config.get("sliding_window") or 0),
    }
    mixers = {
        kind: {"attention": attention(config, _rope(config, kind, kinds), **common, **changes)}
        for kind, changes in (("full_attention", {}), ("sliding_attention", windows))
        if kind in kinds
    }
    inner = [
        _experts(config, number) if is_sparse else _mlp(config, "intermediate_size", number)
        for number, is_sparse in enumerate(_are_sparse(config, count))
    ]
    layers = layers_by_kind(kinds, mixers, inner, attention_norm=norm, feed_forward_norm=norm)
    return architecture(name, config, layers, norm)


def _rope(config: Config, kind: str, kinds: list[str]) -> RopeSpec:
    """In the publisher's config.json, lists have the settings of each layer, and full attention alone is scaled."""
    settings, number = config.get("rope_parameters") or {}, kinds.index(kind)
    if not isinstance(settings.get(kind), Mapping):
        theta, factors = config["rope_theta"], config.get("partial_rotary_factors") or [1.0] * len(kinds)
        scaling = (settings or config.get("rope_scaling") or {}) if kind == "full_attention" else {}
        theta = theta[number] if isinstance(theta, list) else theta
        settings = {kind: {"rope_theta": theta, "partial_rotary_factor": factors[number], **scaling}}
    return rope({**config, "rope_parameters": settings[kind], "rope_scaling": None}, head_dim(config))


def _are_sparse(config: Config, count: int) -> list[bool]:
    """Whether the layers have experts."""
    if kinds := config.get("mlp_layer_types"):
        return [kind == "sparse" for kind in kinds[:count]]
    if (numbers := config.get("moe_layers_enum")) is None:
        return [number >= 3 for number in range(count)]
    numbers = numbers.split(",") if isinstance(numbers, str) else numbers
    return [number in {int(each) for each in numbers if str(each).strip()} for number in range(count)]


def _experts(config: Config, number: int) -> MoESpec:
    return MoESpec(
        num_experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        activation=_activation(config, "swiglu_limits", number),
        scoring="sigmoid",
        renormalize=True,
        scale=float(config["moe_router_scaling_factor"]),
        correction_bias=True,
        shared=_mlp(config, "share_expert_dim", number),
    )


def _mlp(config: Config, size: str, number: int) -> MLPSpec:
    activation = _activation(config, "swiglu_limits_shared", number)
    return MLPSpec(intermediate_size=int(config[size]), activation=activation)


def _activation(config: Config, setting: str, number: int) -> GatedActivation:
    """With the limit of the layer."""
    limit = (config.get(setting) or {number: 0})[number] or 0
    if limit not in _LIMITED:
        raise ConfigError(f"{setting}: a limit of {limit} is not supported; supported: {', '.join(map(str, _LIMITED))}")
    return _LIMITED[limit]


_LIMITED: dict[float, GatedActivation] = {0: "silu", 7: "silu_7", 16: "silu_16"}
_NAMES = NAMES | {
    "layers.attention.qkv.gate": "model.layers.{layer}.self_attn.g_proj",
    "layers.feed_forward.router": "model.layers.{layer}.moe.gate",
    "layers.feed_forward.router.correction_bias": "model.layers.{layer}.moe.router_bias",
    "layers.feed_forward.experts.gate_up": "model.layers.{layer}.moe.{part}_proj",
    "layers.feed_forward.experts.down": "model.layers.{layer}.moe.down_proj",
    "layers.feed_forward.shared.gate_up": "model.layers.{layer}.share_expert.{part}_proj",
    "layers.feed_forward.shared.down": "model.layers.{layer}.share_expert.down_proj",
}
_FAMILY = Family(
    _step,
    _NAMES,
    {
        "max_position_embeddings": 128000,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_router_scaling_factor": 1.0,
    },
    {
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
    },
    ignored_prefixes=(*NOT_TEXT, "vit_large_projector."),
    after_layers="multi-token prediction",
)
FAMILIES = dict.fromkeys(("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"), _FAMILY)
