"""Ministral, and Mistral's models that take images: Mistral Small 3, Ministral 3, Mistral 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.architecture.attention_spec import MLASpec
from quire.engine.architecture.families import deepseek, llama, towers, vit
from quire.engine.architecture.families.family import (
    NOT_TEXT,
    Config,
    Family,
    architecture,
    head_dim,
    of_multimodal,
    query_scale,
    rms_norm,
    rope,
    windows,
)
from quire.engine.architecture.families.llama import NAMES, sequential
from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.protocol.errors import ConfigError


def _ministral3(name: str, config: Config) -> ModelSpec:
    """Llama with yarn, and queries that grow with their position."""
    config = {**_MINISTRAL3, **config}
    if not config.get("rope_parameters"):
        config["rope_parameters"] = _ROPE
    norm = rms_norm(config)
    rope_spec = rope(config, head_dim(config), is_interleaved=bool(config.get("rope_interleave")))
    scale = query_scale(config["rope_parameters"])
    layers = [sequential(config, norm, rope_spec, window, query_scale=scale) for window in windows(config)]
    return architecture(name, config, layers, norm)


def _mistral3(name: str, config: Config) -> ModelSpec:
    """`model_type` is the text part's."""
    kinds: dict[str, tuple[Callable[[str, Config], ModelSpec], Mapping[str, Any]]] = {
        "mistral": (llama.mistral, llama.MISTRAL),
        "ministral3": (_ministral3, {}),
        "mistral4": (deepseek.mistral4, deepseek.MISTRAL4),
    }
    kind = config.get("model_type", "mistral")
    if kind not in kinds:
        raise ConfigError(f"text_config of model_type {kind!r} is not supported; supported: {', '.join(kinds)}")
    of_kind, defaults = kinds[kind]
    return of_kind(name, {**defaults, **config})


def mistral3_media(config: Config) -> MediaSpec:
    """Of LightOnOCR, too. The projector has the text part's norm, whose default depends on the part."""
    own, fields = towers.settings(config, "pixtral")
    outputs = towers.outputs(config, own, -1)
    if len(outputs) > 1:
        raise ConfigError("vision_feature_layer with several layers is not supported")
    projector = towers.two_layers(
        config,
        patch_norm=NormSpec(eps=float(config["rms_norm_eps"])),
        side=int(config.get("spatial_merge_size", 2)),
        merging="channels",
        merged_size=int(own["hidden_size"]),
        bias=bool(config.get("multimodal_projector_bias", False)),
    )
    return vit.media(config, vit.tower(config, own, **fields, outputs=outputs, projector=projector), 10)


def _mistral3_names(arch: ModelSpec) -> Mapping[str, str]:
    is_fourth = isinstance(arch.layers[0].attention, MLASpec)
    return of_multimodal(deepseek.mistral4_names(arch) if is_fourth else NAMES) | towers.names(arch)


_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Ministral 3's if the config has none."""
_MINISTRAL3 = {
    "max_position_embeddings": 262144,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
}
FAMILIES = {
    "MinistralForCausalLM": Family(llama.mistral, NAMES, llama.MISTRAL),
    "Ministral3ForCausalLM": Family(_ministral3, NAMES, _MINISTRAL3),
    "Mistral3ForConditionalGeneration": Family(
        _mistral3,
        _mistral3_names,
        ignored_prefixes=NOT_TEXT,
        ignored_pattern=towers.UNUSED,
        media=vit.with_tower(mistral3_media),
    ),
}
