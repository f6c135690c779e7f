"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 with a tower for pictures of any size, and positions along time,
height and width."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.families import llama, moe
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    activation,
    layer_norm,
    of_multimodal,
    rms_norm,
)
from quire.engine.architecture.families.moe import NAMES_BY_EXPERT, STACKED_EXPERTS
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import NormSpec, RopeSpec
from quire.engine.architecture.tower_spec import (
    GridTowerSpec,
    MergerSpec,
    PatchSpec,
    StretchedPositionsSpec,
    tower_layer,
)
from quire.engine.protocol.errors import ConfigError

_QWEN2 = {**llama.QWEN, "max_window_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_QWEN3 = {**llama.QWEN, "head_dim": 128, "max_position_embeddings": 128000}
_QWEN3_MOE = {
    **moe.QWEN_MOE,
    "max_position_embeddings": 128000,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}
_TOKENS = {"image_token_id": 151655, "video_token_id": 151656}


def with_axes(arch: ModelSpec, config: Config, sections: tuple[int, ...], *, is_mixed: bool) -> ModelSpec:
    """The model with positions along time, height and width; `sections` is the default of mrope_section. See
    `RopeSpec.sections`."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    own = tuple(map(int, settings.get("mrope_section") or sections))

    def of(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        if not isinstance(attention, AttentionSpec) or attention.rope is None:
            return layer
        turns = replace(attention.rope, sections=own, has_mixed_sections=is_mixed)
        return replace(layer, attention=replace(attention, rope=turns))

    changed = {layer: of(layer) for layer in set(arch.layers)}
    return replace(arch, layers=tuple(changed[layer] for layer in arch.layers))


def grid_media(
    arch: ModelSpec,
    config: Config,
    width: int,
    layer_norms: NormSpec,
    feed_forward: MLPSpec,
    output: int,
    *,
    depth: int = 32,
    heads: int = 16,
    patch_size: int = 14,
    patch_bias: bool = True,
    tokens_per_second: float = 0.0,
    levels: tuple[int, ...] = (),
    attention: Mapping[str, Any] | None = None,
    **changes: Any,
) -> MediaSpec:
    """A tower like Qwen2-VL's, with layers of `width` features, and features of `output`. Numbers by name are defaults
    of vision_config's settings; `attention` are fields of the layers' attention, and `changes` are fields of the
    tower."""
    vision: Mapping[str, Any] = config["vision_config"]
    if output != arch.hidden_size:
        raise ConfigError(
            f"the tower has features of size {output}, but the decoder's hidden size is {arch.hidden_size}"
        )
    heads, merge = int(vision.get("num_heads", heads)), int(vision.get("spatial_merge_size", 2))
    turns = vision.get("rope_parameters") or {}
    rope = RopeSpec(theta=float(turns.get("rope_theta") or vision.get("rope_theta") or 10000.0), dim=width // heads)
    size, frames = int(vision.get("patch_size", patch_size)), int(vision.get("temporal_patch_size", 2))
    channels = int(vision.get("in_channels") or vision.get("in_chans") or 3)
    layer = tower_layer(width, heads, feed_forward, layer_norms, **{"rope": rope, **(attention or {})})
    merger = MergerSpec(width=width, merged=merge**2, output=output, inner=width * merge**2, norm=layer_norms)
    tower: dict[str, Any] = {
        "hidden_size": output,
        "num_levels": len(levels),
        "width": width,
        "patch": PatchSpec(shape=(channels, frames, size, size), bias=patch_bias),
        "layers": (layer,) * int(vision.get("depth", depth)),
        "merge": merge,
        "merger": merger,
        "levels": levels,
        "level_merger": replace(merger, normalizes_merged=True) if levels else None,
    }
    return MediaSpec(
        tower=GridTowerSpec(**tower | changes),
        image_token_id=int(config["image_token_id"]),
        video_token_id=int(config["video_token_id"]),
        tokens_per_second=tokens_per_second,
    )


def _qwen2_media(arch: ModelSpec, config: Config) -> ModelSpec:
    vision = config["vision_config"]
    width = int(vision.get("embed_dim", 1280))
    inner = MLPSpec(
        intermediate_size=int(width * vision.get("mlp_ratio", 4)),
        activation=activation(vision.get("hidden_act", "quick_gelu")),
        is_gated=False,
        bias=True,
    )
    output = int(vision.get("hidden_size", 3584))
    media = grid_media(arch, config, width, layer_norm(1e-6), inner, output, patch_bias=False)
    return replace(with_axes(arch, config, (16, 24, 24), is_mixed=False), media=media)


def _colqwen2_media(arch: ModelSpec, config: Config) -> ModelSpec:
    """Its processor knows no videos."""
    found = _qwen2_media(arch, config)
    assert found.media is not None
    return replace(found, media=replace(found.media, video_token_id=None))


def _qwen25_media(arch: ModelSpec, config: Config) -> ModelSpec:
    vision = config["vision_config"]
    inner = MLPSpec(
        intermediate_size=int(vision.get("intermediate_size", 3420)),
        activation=activation(vision.get("hidden_act", "silu")),
        bias=True,
    )
    square = int(vision.get("spatial_merge_size", 2)) * int(vision.get("patch_size", 14))
    media = grid_media(
        arch,
        config,
        int(vision.get("hidden_size", 3584)),
        rms_norm({}, eps=1e-6),
        inner,
        int(vision.get("out_hidden_size", 3584)),
        patch_bias=False,
        tokens_per_second=float(vision.get("tokens_per_second", 4)),
        window=int(vision.get("window_size", 112)) // square,
        full_layers=tuple(map(int, vision.get("fullatt_block_indexes", (7, 15, 23, 31)))),
    )
    return replace(with_axes(arch, config, (16, 24, 24), is_mixed=False), media=media)


def qwen3_media(
    arch: ModelSpec, config: Config, *, sections: tuple[int, ...] = (24, 20, 20), has_levels: bool = True
) -> ModelSpec:
    """Of Qwen3-VL, and without levels of Qwen3.5."""
    vision = config["vision_config"]
    inner = MLPSpec(
        intermediate_size=int(vision.get("intermediate_size", 4304)),
        activation=activation(vision.get("hidden_act", "gelu_pytorch_tanh")),
        is_gated=False,
        bias=True,
    )
    media = grid_media(
        arch,
        config,
        int(vision.get("hidden_size", 1152)),
        layer_norm(1e-6),
        inner,
        int(vision.get("out_hidden_size", 3584)),
        depth=27,
        patch_size=16,
        positions=StretchedPositionsSpec(side=math.isqrt(int(vision.get("num_position_embeddings", 2304)))),
        levels=tuple(map(int, vision.get("deepstack_visual_indexes", (8, 16, 24)))) if has_levels else (),
    )
    return replace(with_axes(arch, config, sections, is_mixed=True), media=media)


def tower_names(prefix: str, feed_forward: Mapping[str, str], merger: Mapping[str, str]) -> dict[str, str]:
    """The names of such a tower, given those of the parts of a layer's feed-forward and of the merger."""
    block = f"{prefix}.blocks.{{layer}}"
    return {
        "tower.patches": f"{prefix}.patch_embed.proj",
        "tower.layers.attention_norm": f"{block}.norm1",
        "tower.layers.attention.qkv": f"{block}.attn.qkv",
        "tower.layers.attention.output": f"{block}.attn.proj",
        "tower.layers.feed_forward_norm": f"{block}.norm2",
        **{f"tower.layers.feed_forward.{part}": f"{block}.mlp.{name}" for part, name in feed_forward.items()},
        **{f"tower.merger.{part}": f"{prefix}.merger.{name}" for part, name in merger.items()},
    }


_QWEN2_MERGER = {"norm": "ln_q", "up": "mlp.0", "down": "mlp.2"}
_QWEN2_FEED_FORWARD = {"gate_up": "fc1", "down": "fc2"}
_QWEN2_TOWER = tower_names("visual", _QWEN2_FEED_FORWARD, _QWEN2_MERGER)
_QWEN25_TOWER = tower_names("visual", {"gate_up": "{part}_proj", "down": "down_proj"}, _QWEN2_MERGER)
_QWEN3_MERGER = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}
QWEN3_TOWER = {
    **tower_names("model.visual", {"gate_up": "linear_fc1", "down": "linear_fc2"}, _QWEN3_MERGER),
    "tower.positions": "model.visual.pos_embed",
    **{
        f"tower.level_mergers.{part}": f"model.visual.deepstack_merger_list.{{layer}}.{name}"
        for part, name in _QWEN3_MERGER.items()
    },
}


def _is_transposed(module: str) -> bool:
    return module.startswith("layers.feed_forward.experts.")


FAMILIES = {
    "Qwen2VLForConditionalGeneration": Family(
        llama.qwen2, llama.NAMES | _QWEN2_TOWER, _QWEN2 | _TOKENS, ignored_prefixes=NOT_TEXT, media=_qwen2_media
    ),
    "ColQwen2ForRetrieval": Family(
        llama.qwen2,
        {module: name.replace("model.", "vlm.language_model.", 1) for module, name in llama.NAMES.items()}
        | tower_names("vlm.visual", _QWEN2_FEED_FORWARD, _QWEN2_MERGER),
        _QWEN2 | _TOKENS,
        prefix="vlm.",
        ignored_prefixes=("vlm.lm_head.", "vlm.visual."),
        token_layer="embedding_proj_layer",
        media=_colqwen2_media,
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        llama.qwen2, llama.NAMES | _QWEN25_TOWER, _QWEN2 | _TOKENS, ignored_prefixes=NOT_TEXT, media=_qwen25_media
    ),
    "Qwen3VLForConditionalGeneration": Family(
        llama.qwen3,
        of_multimodal(llama.NAMES) | QWEN3_TOWER,
        _QWEN3 | _TOKENS,
        ignored_prefixes=NOT_TEXT,
        media=qwen3_media,
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        moe.qwen_moe,
        of_multimodal(NAMES_BY_EXPERT | STACKED_EXPERTS) | QWEN3_TOWER,
        _QWEN3_MOE | _TOKENS,
        is_transposed=_is_transposed,
        ignored_prefixes=NOT_TEXT,
        media=qwen3_media,
    ),
}
