"""Models that take images, with one of several text models: LLaVA, InternVL, SmolVLM, LightOnOCR and others.

Logits are multiplied as in the model of text, of Granite for example; transformers' classes of whole models do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.families import llama, vit
from quire.engine.architecture.families.family import NOT_TEXT, Config, Family, in_language_model, of_multimodal
from quire.engine.architecture.model_spec import ModelSpec
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


def _text(name: str, config: Config) -> ModelSpec:
    """`model_type` is the text part's."""
    kind = config["model_type"]
    if kind not in _KINDS:
        raise ConfigError(f"text_config of model_type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    architecture, sizes = _KINDS[kind]
    family = llama.FAMILIES[architecture]
    return family.architecture(name, family.complete({**sizes, **config}))


def _granite4(name: str, config: Config) -> ModelSpec:
    return _text(name, {**config, "model_type": "granite"})


_SMOLVLM = {module: each.replace("language_model", "text_model") for module, each in of_multimodal(llama.NAMES).items()}


def _names(arch: ModelSpec) -> Mapping[str, str]:
    return in_language_model(llama.NAMES) | vit.names(arch)


_NOT_TEXT = (*NOT_TEXT, "image_newline")
FAMILIES = {
    **{
        f"{name}ForConditionalGeneration": Family(
            _text,
            _names,
            ignored_prefixes=_NOT_TEXT,
            ignored_pattern=vit.UNUSED,
            media=vit.with_tower(media, multiplies_features=True),
        )
        for name, media in (
            ("Llava", vit.llava),
            ("LlavaNext", vit.llava_next),
            ("LlavaOnevision", vit.llava_onevision),
            ("InternVL", vit.internvl),
        )
    },
    "Granite4VisionForConditionalGeneration": Family(
        _granite4,
        of_multimodal(llama.NAMES) | vit.GRANITE4_NAMES,
        ignored_prefixes=(*NOT_TEXT, "model.image_newline", "model.layerwise_projectors.", "model.spatial_projectors."),
        ignored_pattern=vit.UNUSED,
        media=vit.with_tower(vit.granite4),
    ),
    "LightOnOcrForConditionalGeneration": Family(
        _text,
        of_multimodal(llama.NAMES) | vit.LIGHTON_OCR_NAMES,
        {"tie_word_embeddings": True, "image_token_id": 151655},
        ignored_prefixes=("model.vision_encoder.", "model.vision_projection."),
        media=vit.with_tower(vit.mistral3),
    ),
    **{
        f"{name}ForConditionalGeneration": Family(
            _text, _SMOLVLM | vit.IDEFICS3_NAMES, ignored_prefixes=NOT_TEXT, media=vit.with_tower(media)
        )
        for name, media in (("Idefics3", vit.idefics3), ("SmolVLM", vit.smolvlm))
    },
}
