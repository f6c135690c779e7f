"""Hunyuan V1, dense and mixtures: queries and keys are normalized after they are rotated. Hunyuan VL is the dense one
with a tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.families import vit
from quire.engine.architecture.families.family import (
    Config,
    Family,
    activation,
    architecture,
    attention,
    feed_forward,
    head_dim,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec


def _attention(config: Config) -> AttentionSpec:
    """Scaling of kind "dynamic" with an `alpha` is another base, at every length."""
    dim = head_dim(config)
    settings: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (settings.get("rope_type") or settings.get("type")) == "dynamic" and settings.get("alpha"):
        theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10000.0)
        theta *= float(settings["alpha"]) ** (dim / (dim - 2))
        config = {**config, "rope_parameters": None, "rope_scaling": None, "rope_theta": theta}
    require(config, "use_qk_norm", True)
    return attention(config, rope(config, dim), qk_norm=rms_norm(config), norm_after_rope=True)


def _hunyuan(name: str, config: Config) -> ModelSpec:
    norm = rms_norm(config)
    layer = LayerSpec(
        attention=_attention(config),
        attention_norm=norm,
        feed_forward=feed_forward(config, bias=False),
        feed_forward_norm=norm,
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


def _hunyuan_vl(name: str, config: Config) -> ModelSpec:
    """Positions have a kind of scaling of their own, which is the dense model's."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "xdrope" in (settings.get("rope_type"), settings.get("type")):
        settings |= {"rope_type": "dynamic", "type": "dynamic"}
    return _hunyuan(name, {**config, "rope_scaling": None, "rope_parameters": settings})


def _media(arch: ModelSpec, config: Config) -> ModelSpec:
    settings: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sections = tuple(map(int, settings.get("mrope_section") or settings["xdrope_section"]))

    def of(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        assert attention.rope is not None
        turns = replace(attention.rope, sections=sections, splits_features=True)
        return replace(layer, attention=replace(attention, rope=turns))

    changed = {layer: of(layer) for layer in set(arch.layers)}
    media = replace(vit.hunyuan(config), place_axes=len(sections))
    return replace(arch, layers=tuple(changed[layer] for layer in arch.layers), media=media)


def _hunyuan_moe(name: str, config: Config) -> ModelSpec:
    """Some settings may be lists, with a value for each layer."""
    require(config, "use_mixed_mlp_moe", True)
    require(config, "use_cla", False)
    norm, layers = rms_norm(config), []
    for number in range(int(config["num_hidden_layers"])):
        own = {**config, **{key: config[key][number] for key in _OF_EACH_LAYER if isinstance(config.get(key), list)}}
        require(own, "num_shared_expert", 1, None)
        require(own, "moe_intermediate_size", own["intermediate_size"], None)
        experts = MoESpec(
            num_experts=int(own["num_experts"]),
            top_k=int(own["moe_topk"]),
            intermediate_size=int(own["intermediate_size"]),
            activation=activation(own.get("hidden_act", "silu")),
            renormalize=True,
            shared=feed_forward(own, bias=False),
        )
        layers.append(
            LayerSpec(attention=_attention(own), attention_norm=norm, feed_forward=experts, feed_forward_norm=norm)
        )
    return architecture(name, config, layers, norm)


_OF_EACH_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
_QK_NORM = {
    "layers.attention.query_norm": "model.layers.{layer}.self_attn.query_layernorm",
    "layers.attention.key_norm": "model.layers.{layer}.self_attn.key_layernorm",
}
_COMMON = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = {
    "HunYuanDenseV1ForCausalLM": Family(_hunyuan, NAMES | _QK_NORM, _COMMON),
    "HunYuanVLForConditionalGeneration": Family(
        _hunyuan_vl,
        NAMES | _QK_NORM | vit.HUNYUAN_NAMES,
        {**_COMMON, "tie_word_embeddings": True, "image_token_id": 120120},
        {"attention_head_dim": "head_dim", "org_vocab_size": "vocab_size"},
        ignored_prefixes=("vit.",),
        ignored_pattern=r"rotary_emb\.inv_freq$|^vit\.perceive\.image_sep$",
        media=_media,
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        _hunyuan_moe,
        NAMES_BY_EXPERT
        | _QK_NORM
        | {
            "layers.feed_forward.router": "model.layers.{layer}.mlp.gate.wg",
            "layers.feed_forward.shared.gate_up": "model.layers.{layer}.mlp.shared_mlp.{part}_proj",
            "layers.feed_forward.shared.down": "model.layers.{layer}.mlp.shared_mlp.down_proj",
        },
        {**_COMMON, "num_experts": 1, "moe_topk": 1},
    ),
}
