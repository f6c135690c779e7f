"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR: GLM-4 and GLM-4.5 with a tower for pictures of any size, and positions along time,
height and width. GLM-4.6V has an architecture of its own in transformers, which is one of the first two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.engine.architecture.families import llama
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
    of_multimodal,
    require,
    rms_norm,
    rope,
)
from quire.engine.architecture.families.moe import GLM4, GLM4_NAMES, STACKED_EXPERTS, glm4_moe
from quire.engine.architecture.families.qwen_vl import grid_media, tower_names, with_axes
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import GatedActivation
from quire.engine.architecture.tower_spec import ConvolvedMergerSpec, StretchedPositionsSpec


def _glm4(name: str, config: Config) -> ModelSpec:
    norm, turns = rms_norm(config), rope(config, head_dim(config), is_interleaved=True)
    layer = LayerSpec(
        attention=attention(config, turns, qkv_bias=name != "GlmOcrForConditionalGeneration", output_bias=False),
        attention_norm=norm,
        attention_post_norm=norm,
        feed_forward=feed_forward(config),
        feed_forward_norm=norm,
        feed_forward_post_norm=norm,
    )
    return architecture(name, config, [layer] * int(config["num_hidden_layers"]), norm)


def _merger(vision: Config, width: int, output: int, feed_forward: MLPSpec) -> ConvolvedMergerSpec:
    return ConvolvedMergerSpec(
        width=width,
        merge=int(vision.get("spatial_merge_size", 2)),
        output=output,
        norm=layer_norm(1e-5),
        feed_forward=feed_forward,
    )


def _with_frames(config: Config) -> Config:
    """Videos are pictures, with a time behind each: their features replace the same token."""
    return {**config, "video_token_id": config["image_token_id"]}


def _media(arch: ModelSpec, config: Config) -> ModelSpec:
    vision = config["vision_config"]
    width, output = int(vision.get("hidden_size", 1536)), int(vision.get("out_hidden_size", 4096))
    norm = rms_norm({}, eps=float(vision.get("rms_norm_eps", 1e-5)))
    inner = MLPSpec(intermediate_size=output, activation=activation(vision.get("hidden_act", "silu")))
    merged = replace(inner, intermediate_size=int(vision.get("intermediate_size", 13696)))
    side = int(vision.get("image_size", 336)) // int(vision.get("patch_size", 14))
    media = grid_media(
        arch,
        _with_frames(config),
        width,
        norm,
        inner,
        output,
        depth=24,
        heads=12,
        attention={"qkv_bias": bool(vision.get("attention_bias", False)), "output_bias": False},
        embedding_norm=norm,
        positions=StretchedPositionsSpec(side=side, kind="cubic"),
        norm=norm,
        merger=_merger(vision, width, output, merged),
    )
    return replace(with_axes(arch, config, (8, 12, 12), is_mixed=False), media=media)


def _media_with_norms(arch: ModelSpec, config: Config, kind: GatedActivation, merged_size: int) -> MediaSpec:
    """A tower without learned positions, whose queries and keys have norms; `merged_size` are the inner features behind
    the merger."""
    vision = config["vision_config"]
    require(vision, "hidden_act", "silu")
    width, output = int(vision.get("hidden_size", 1024)), int(vision.get("out_hidden_size", 1536))
    norm = rms_norm({}, eps=float(vision.get("rms_norm_eps", 1e-5)))
    has_biases = bool(vision.get("attention_bias", True))
    inner = MLPSpec(intermediate_size=int(vision.get("intermediate_size", 4096)), activation=kind, bias=has_biases)
    return grid_media(
        arch,
        _with_frames(config),
        width,
        norm,
        inner,
        output,
        depth=24,
        attention={"qkv_bias": has_biases, "output_bias": has_biases, "qk_norm": norm},
        norm=norm,
        merger=_merger(vision, width, output, replace(inner, intermediate_size=merged_size, bias=False)),
    )


def _ocr_media(arch: ModelSpec, config: Config) -> ModelSpec:
    vision = config["vision_config"]
    merged = int(vision.get("out_hidden_size", 1536)) * int(vision.get("in_channels", 3))
    media = _media_with_norms(arch, config, "silu", merged)
    return replace(with_axes(arch, config, (8, 12, 12), is_mixed=False), media=media)


def glm5_media(arch: ModelSpec, config: Config) -> ModelSpec:
    """Of GLM-5.3, whose decoder has no rotary positions."""
    vision = config["vision_config"]
    require(vision, "swiglu_limit", 10.0)
    merged = int(vision.get("projection_intermediate_size", 10240))
    return replace(arch, media=_media_with_norms(arch, config, "silu_clamped", merged))


def _either(name: str, config: Config) -> ModelSpec:
    """GLM-4.1V, or GLM-4.5V with experts, by the `model_type` of the text part."""
    kind = "Glm4vMoe" if config.get("model_type") == "glm4v_moe_text" else "Glm4v"
    family = FAMILIES[f"{kind}ForConditionalGeneration"]
    return family.architecture(name, family.complete(config))


def _names_of_either(arch: ModelSpec) -> Mapping[str, str]:
    has_experts = any(isinstance(layer.feed_forward, MoESpec) for layer in arch.layers)
    return of_multimodal(GLM4_NAMES | STACKED_EXPERTS if has_experts else _GLM4_NAMES) | TOWER


TOWER = {
    **tower_names(
        "model.visual",
        {"gate_up": "{part}_proj", "down": "down_proj"},
        {
            "projection": "proj",
            "norm": "post_projection_norm",
            "feed_forward.gate_up": "{part}_proj",
            "feed_forward.down": "down_proj",
        },
    ),
    "tower.embedding_norm": "model.visual.post_conv_layernorm",
    "tower.positions": "model.visual.embeddings.position_embedding",
    "tower.norm": "model.visual.post_layernorm",
    "tower.merger.convolution": "model.visual.downsample",
    "tower.layers.attention.query_norm": "model.visual.blocks.{layer}.attn.q_norm",
    "tower.layers.attention.key_norm": "model.visual.blocks.{layer}.attn.k_norm",
}
_GLM4_NAMES = llama.NAMES | {
    "layers.attention_post_norm": "model.layers.{layer}.post_self_attn_layernorm",
    "layers.feed_forward_post_norm": "model.layers.{layer}.post_mlp_layernorm",
    "layers.feed_forward.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
}
FAMILIES = {
    "Glm4vForConditionalGeneration": Family(
        _glm4,
        of_multimodal(_GLM4_NAMES) | TOWER,
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "image_token_id": 151343,
        },
        ignored_prefixes=NOT_TEXT,
        media=_media,
    ),
    "GlmOcrForConditionalGeneration": Family(
        _glm4,
        of_multimodal(_GLM4_NAMES) | TOWER,
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "image_token_id": 59280,
        },
        ignored_prefixes=NOT_TEXT,
        after_layers="multi-token prediction",
        media=_ocr_media,
    ),
    "Glm4vMoeForConditionalGeneration": Family(
        glm4_moe,
        of_multimodal(GLM4_NAMES) | TOWER,
        {
            **GLM4,
            "max_position_embeddings": 65536,
            "attention_bias": True,
            "image_token_id": 151363,
        },
        ignored_prefixes=NOT_TEXT,
        media=_media,
    ),
    "Glm46VForConditionalGeneration": Family(
        _either, _names_of_either, {"image_token_id": 151343}, ignored_prefixes=NOT_TEXT, media=_media
    ),
}
