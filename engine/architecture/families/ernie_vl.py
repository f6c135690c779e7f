"""ERNIE 4.5 VL: ERNIE 4.5 with experts of their own for the tokens of images and videos.

config.json is as published, or in transformers' format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.families import ernie
from quire.engine.architecture.families.family import Config, Family, activation, layer_norm, require, rms_norm
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT
from quire.engine.architecture.families.qwen_vl import grid_media, tower_names
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.tower_spec import PatchSpec, ResamplerSpec
from quire.engine.protocol.errors import ConfigError


def _sizes(config: Config) -> tuple[int, int]:
    """Inner features of the experts for text and for media."""
    text, media = (int(each) for each in config["moe_intermediate_size"])
    return text, media


def _decoder(name: str, config: Config) -> ModelSpec:
    """For text alone."""
    require(config, "use_bias", False)
    count: Any = config["moe_num_experts"]
    if isinstance(count, Sequence):
        if len({*count}) > 1:
            raise ConfigError(f"moe_num_experts {count}: different numbers are not supported")
        count = count[0]
    starts, ends = (config[f"moe_layer_{end}_index"] for end in ("start", "end"))
    first, last = (min(each) if isinstance(each, Sequence) else each for each in (starts, ends))
    size, _ = _sizes(config)
    own = {"moe_num_experts": count, "moe_intermediate_size": size}
    own |= {"moe_layer_start_index": first, "moe_layer_end_index": last}
    return ernie.mixture(name, {**config, **own}, config.get("mlp_layer_types"), media_size=0)


def _media(arch: ModelSpec, config: Config) -> ModelSpec:
    vision, eps = config["vision_config"], config["vision_config"].get("rms_norm_eps", 1e-6)
    width, merge = int(vision.get("hidden_size", 1280)), int(vision.get("spatial_merge_size", 2))
    require(vision, "temporal_merge_size", 2)
    require(vision, "embed_dim", width, None)
    inner = MLPSpec(
        intermediate_size=int(vision.get("intermediate_size") or width * vision.get("mlp_ratio", 4)),
        activation=activation(vision.get("hidden_act", "quick_gelu")),
        is_gated=False,
        bias=True,
    )
    patch = PatchSpec(shape=(int(vision.get("in_channels", 3)) * int(vision.get("patch_size", 14)) ** 2,), bias=False)
    merger = ResamplerSpec(
        width=width,
        merged=merge**2,
        output=arch.hidden_size,
        norm=layer_norm(eps),
        output_norm=rms_norm(config),
    )
    norm = layer_norm(eps)
    media = grid_media(arch, config, width, norm, inner, arch.hidden_size, patch=patch, merger=merger, norm=norm)
    _, size = _sizes(config)
    tokens = ("image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id")
    ids = tuple(int(config[name]) for name in (*tokens, "video_start_token_id", "video_end_token_id"))
    turns = config.get("rope_parameters") or config.get("rope_scaling") or {}
    height, columns, time = (int(each) for each in turns.get("mrope_section") or (22, 22, 20))

    def of(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.attention, AttentionSpec)
        assert layer.attention.rope is not None
        rope = replace(layer.attention.rope, sections=(time, height, columns), has_time_last=True)
        mixture = layer.feed_forward
        if isinstance(mixture, MoESpec):
            mixture = replace(mixture, media_size=size, media_token_ids=ids)
        return replace(layer, attention=replace(layer.attention, rope=rope), feed_forward=mixture)

    return replace(arch, layers=tuple(map(of, arch.layers)), media=media)


_GATE = "model.layers.{layer}.mlp.gate.weight"
_RESAMPLER = "model.resampler_model."
_NAMES = (
    NAMES_BY_EXPERT
    | tower_names("model.vision_model", {"gate_up": "fc1", "down": "fc2"}, {})
    | {
        "layers.feed_forward.router.text.weight": _GATE,
        "layers.feed_forward.router.media.weight": f"{_GATE}_1",
        ernie.CORRECTION: "model.layers.{layer}.mlp.moe_statics.e_score_correction_bias",
        "layers.feed_forward.media_experts.gate_up": "model.layers.{layer}.mlp.experts.{expert}.{part}_proj",
        "layers.feed_forward.media_experts.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
        "tower.norm": "model.vision_model.ln",
        **{
            f"tower.merger.{part}.{module}": f"{_RESAMPLER}{theirs}_linear.{number}"
            for part, theirs in (("squares", "spatial"), ("frames", "temporal"))
            for module, number in (("up", 0), ("down", 2), ("norm", 3))
        },
        "tower.merger.projection": f"{_RESAMPLER}mlp",
        "tower.merger.norm": f"{_RESAMPLER}after_norm",
    }
)


def _is_transposed(module: str) -> bool:
    return module == "layers.feed_forward.router"


FAMILIES = {
    "Ernie4_5_VLMoeForConditionalGeneration": Family(
        _decoder,
        _NAMES,
        ernie.MOE_DEFAULTS
        | {"moe_intermediate_size": [1536, 512], "image_token_id": 100295, "video_token_id": 103367}
        | {"image_start_token_id": 101304, "image_end_token_id": 101305}
        | {"video_start_token_id": 101306, "video_end_token_id": 101307},
        {"im_patch_id": "image_token_id"},
        is_transposed=_is_transposed,
        leading_ones=frozenset({ernie.CORRECTION}),
        ignored_prefixes=("model.vision_model.", _RESAMPLER),
        media=_media,
    ),
}
