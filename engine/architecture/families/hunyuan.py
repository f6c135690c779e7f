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
    layer_norm,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.llama import NAMES
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.architecture.vit_spec import FramedSpec, ViTSpec


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
    media = vit.media(config, _tower(config), 120120, place_axes=len(sections))
    return replace(arch, layers=tuple(changed[layer] for layer in arch.layers), media=media)


def _tower(config: Config) -> ViTSpec:
    own = {**_VISION, **config["vision_config"]}
    require(own, "model_type", None, "hunyuan_vl_vision")
    require(own, "interpolate_mode", "bilinear", "bicubic")
    require(own, "temporal_patch_size", 1)
    grid = int(own["max_image_size"]) // vit.side(own["patch_size"])
    projector = FramedSpec(
        side=int(own["spatial_merge_size"]),
        activation=activation(own["hidden_act"]),
        norm=NormSpec(eps=float(own["rms_norm_eps"])),
    )
    return vit.tower(
        config,
        own,
        **vit.tokens(own, kind=own["interpolate_mode"], grid=grid, unused=1),
        pixels="grids",
        layer=vit.layer(own, layer_norm(own["rms_norm_eps"])),
        projector=projector,
    )


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
_VISION = (
    vit.DEFAULTS
    | {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    | {"patch_size": 16, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "max_image_size": 2048}
    | {"interpolate_mode": "bilinear", "temporal_patch_size": 1, "spatial_merge_size": 2}
)
_LAYER = "vit.layers.{layer}."
_TOWER_NAMES = {
    "tower.patches": "vit.embeddings.patch_embedding",
    "tower.positions.weight": "vit.embeddings.position_embedding.weight",
    "tower.layers.attention_norm": f"{_LAYER}input_layernorm",
    "tower.layers.attention.qkv": f"{_LAYER}self_attn.{{part}}_proj",
    "tower.layers.attention.output": f"{_LAYER}self_attn.o_proj",
    "tower.layers.feed_forward_norm": f"{_LAYER}post_attention_layernorm",
    "tower.layers.feed_forward.gate_up": f"{_LAYER}mlp.dense_h_to_4h",
    "tower.layers.feed_forward.down": f"{_LAYER}mlp.dense_4h_to_h",
    "tower.projector.patch_norm": "vit.perceive.before_rms",
    "tower.projector.first": "vit.perceive.proj.0",
    "tower.projector.second": "vit.perceive.proj.2",
    "tower.projector.down": "vit.perceive.mlp",
    **{f"tower.projector.marks.{kind}": f"vit.perceive.image_{kind}" for kind in ("newline", "begin", "end")},
    "tower.projector.norm": "vit.perceive.after_rms",
}
_COMMON = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = {
    "HunYuanDenseV1ForCausalLM": Family(_hunyuan, NAMES | _QK_NORM, _COMMON),
    "HunYuanVLForConditionalGeneration": Family(
        _hunyuan_vl,
        NAMES | _QK_NORM | _TOWER_NAMES,
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
