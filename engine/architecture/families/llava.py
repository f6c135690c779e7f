"""Models that take images, with one of several text models: LLaVA, InternVL, SmolVLM, LightOnOCR and others.

Logits are multiplied as in the model of text, of Granite for example; transformers' classes of whole models do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture.families import llama, mistral, towers, vit
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    in_language_model,
    layer_norm,
    of_multimodal,
)
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.vit_spec import AnyResolutionSpec, ProjectorSpec
from quire.engine.protocol.errors import ConfigError

_SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
"""Llama's sizes, which old config.json files omit."""
_KINDS = {
    "llama": ("LlamaForCausalLM", _SIZES),
    "mistral": ("MistralForCausalLM", _SIZES | {"intermediate_size": 14336}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
}
"""By `model_type`: the family, and sizes that config.json may omit. All have the same names of tensors."""


def text(name: str, config: Config) -> ModelSpec:
    """`model_type` is the text part's."""
    kind = config["model_type"]
    if kind not in _KINDS:
        raise ConfigError(f"text_config of model_type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    architecture, sizes = _KINDS[kind]
    family = llama.FAMILIES[architecture]
    return family.architecture(name, family.complete({**sizes, **config}))


_SMOLVLM = {module: each.replace("language_model", "text_model") for module, each in of_multimodal(llama.NAMES).items()}


def _names(arch: ModelSpec) -> Mapping[str, str]:
    return in_language_model(llama.NAMES) | towers.names(arch)


def _llava(config: Config) -> MediaSpec:
    """LLaVA, and Pixtral in its format."""
    own, fields = towers.settings(config, "clip_vision_model")
    tower = vit.tower(
        config, own, **fields, outputs=towers.outputs(config, own, -2), projector=towers.two_layers(config)
    )
    if tower.positions.kind == "learned":
        tower = replace(tower, max_features=tower.positions.grid**2)
    return vit.media(config, tower, 32000, "default")


def _llava_next(config: Config) -> MediaSpec:
    own, fields = towers.settings(config, "clip_vision_model")
    tower = vit.tower(
        config,
        own,
        **fields,
        outputs=towers.outputs(config, own, -2),
        projector=towers.two_layers(config),
        any_resolution=any_resolution(config, own),
    )
    return vit.media(config, tower, 32000, "default")


def any_resolution(config: Config, own: Config) -> AnyResolutionSpec:
    """LLaVA-NeXT's sizes, unless config.json has others."""
    sizes = config.get("image_grid_pinpoints") or [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    return AnyResolutionSpec(sizes=_sizes(sizes), tile=vit.side(own["image_size"]))


def _llava_onevision(config: Config) -> MediaSpec:
    own, fields = towers.settings(config, "siglip_vision_model")
    limit = str(config.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_")
    if not limit.isdigit():
        raise ConfigError(f"vision_aspect_ratio {limit!r} is not supported; supported: anyres_max_ and a number")
    sizes = config.get("image_grid_pinpoints") or [[384 * a, 384 * b] for a in range(1, 7) for b in range(1, 7)]
    resolution = AnyResolutionSpec(
        sizes=_sizes(sizes),
        tile=vit.side(own["image_size"]),
        max_tiles=int(limit),
        video_side=-(-vit.grid(own) // 2),
    )
    video = next((config[name] for name in ("video_token_id", "video_token_index") if name in config), 151647)
    tower = vit.tower(
        config,
        own,
        **fields,
        outputs=towers.outputs(config, own, -1),
        projector=towers.two_layers(config),
        any_resolution=resolution,
    )
    return vit.media(config, tower, 151646, "full", video_token_id=int(video))


def _sizes(pairs: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(height), int(width)) for height, width in pairs)


def _internvl(config: Config) -> MediaSpec:
    """Videos are frames whose features replace the token of images."""
    own, fields = towers.settings(config, "internvl_vision")
    # The norm after the last layer is part of its output only under the name -1.
    is_last = config.get("vision_feature_layer", -1) == -1
    norm = layer_norm(own["layer_norm_eps"]) if is_last and not own["use_mean_pooling"] else None
    projector = towers.two_layers(
        config, side=round(1 / float(config.get("downsample_ratio", 0.5))), norm=layer_norm(1e-5), bias=True
    )
    tower = vit.tower(config, own, **fields, outputs=towers.outputs(config, own, -1), norm=norm, projector=projector)
    media = vit.media(config, tower, 151667, "default")
    return replace(media, video_token_id=media.image_token_id)


def _idefics3(config: Config) -> MediaSpec:
    own, fields = towers.settings(config, "idefics3_vision")
    projector = ProjectorSpec(side=int(config.get("scale_factor", 2)), bias=False)
    tower = vit.tower(config, own, **fields, norm=layer_norm(own["layer_norm_eps"]), projector=projector)
    return vit.media(config, tower, 128257)


def _smolvlm(config: Config) -> MediaSpec:
    """Videos are frames whose features replace the token of images."""
    media = _idefics3(config)
    return replace(media, video_token_id=media.image_token_id)


_LIGHTON_OCR_NAMES = {
    module: name.replace(".vision_tower.", ".vision_encoder.").replace(".multi_modal_projector.", ".vision_projection.")
    for module, name in towers.PIXTRAL_NAMES.items()
}
_IDEFICS3_NAMES = towers.siglip_names("model.vision_model.") | {
    "tower.projector.down": "model.connector.modality_projection.proj"
}
_NOT_TEXT = (*NOT_TEXT, "image_newline")
FAMILIES = {
    **{
        f"{name}ForConditionalGeneration": Family(
            text,
            _names,
            ignored_prefixes=_NOT_TEXT,
            ignored_pattern=towers.UNUSED,
            media=vit.with_tower(media, multiplies_features=True),
        )
        for name, media in (
            ("Llava", _llava),
            ("LlavaNext", _llava_next),
            ("LlavaOnevision", _llava_onevision),
            ("InternVL", _internvl),
        )
    },
    "LightOnOcrForConditionalGeneration": Family(
        text,
        of_multimodal(llama.NAMES) | _LIGHTON_OCR_NAMES,
        {"tie_word_embeddings": True, "image_token_id": 151655},
        ignored_prefixes=("model.vision_encoder.", "model.vision_projection."),
        media=vit.with_tower(mistral.mistral3_media),
    ),
    **{
        f"{name}ForConditionalGeneration": Family(
            text, _SMOLVLM | _IDEFICS3_NAMES, ignored_prefixes=NOT_TEXT, media=vit.with_tower(media)
        )
        for name, media in (("Idefics3", _idefics3), ("SmolVLM", _smolvlm))
    },
}
