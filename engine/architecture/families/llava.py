"""The text part of models that take images, with one of several text models: LLaVA, LLaVA-NeXT, InternVL, SmolVLM.

Logits are multiplied as in the model of text, of Granite for example; transformers' classes of whole models do not.
"""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.families import llama
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


_SMOLVLM = {module: each.replace("language_model", "text_model") for module, each in of_multimodal(llama.NAMES).items()}
FAMILIES = {
    **dict.fromkeys(
        (
            "LlavaForConditionalGeneration",
            "LlavaNextForConditionalGeneration",
            "InternVLForConditionalGeneration",
        ),
        Family(_text, in_language_model(llama.NAMES), ignored_prefixes=(*NOT_TEXT, "image_newline")),
    ),
    **dict.fromkeys(
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        Family(_text, _SMOLVLM, ignored_prefixes=NOT_TEXT),
    ),
}
