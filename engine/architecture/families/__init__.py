"""The supported model families: config.json → `ModelSpec`, and the names of checkpoint tensors. No torch here.

A new family is a file here, with a mapping from its config.json to the specs in `quire.engine.architecture`, and a
mapping from our names of their parameters to the checkpoint's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.families import (
    bert,
    bloom,
    cohere,
    dbrx,
    deepseek,
    deepseek_ocr,
    deepseek_v4,
    dots_note,
    ernie,
    ernie_vl,
    exaone,
    gated_latent,
    gemma,
    glm_next,
    glm_vl,
    gpt,
    gptj,
    granite_vision,
    gte,
    hunyuan,
    kimi_k25,
    kimi_linear,
    lfm,
    llama,
    llama4,
    llava,
    mamba,
    mimo,
    minimax,
    mistral,
    modernbert,
    moe,
    nomic,
    olmo,
    paddleocr,
    phimoe,
    qwen4,
    qwen_next,
    qwen_vl,
    recurrent_gemma,
    rwkv,
    step,
    xlstm,
    zamba,
)
from quire.engine.architecture.families.family import LENGTHS, Family
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.protocol.errors import ConfigError

ENCODERS: dict[str, Family] = {**bert.FAMILIES, **modernbert.FAMILIES, **nomic.FAMILIES, **gte.FAMILIES}
FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **llama4.FAMILIES,
    **llava.FAMILIES,
    **granite_vision.FAMILIES,
    **mistral.FAMILIES,
    **gemma.FAMILIES,
    **olmo.FAMILIES,
    **cohere.FAMILIES,
    **exaone.FAMILIES,
    **gpt.FAMILIES,
    **gptj.FAMILIES,
    **bloom.FAMILIES,
    **moe.FAMILIES,
    **dbrx.FAMILIES,
    **phimoe.FAMILIES,
    **mimo.FAMILIES,
    **ernie.FAMILIES,
    **ernie_vl.FAMILIES,
    **hunyuan.FAMILIES,
    **deepseek.FAMILIES,
    **kimi_k25.FAMILIES,
    **deepseek_ocr.FAMILIES,
    **deepseek_v4.FAMILIES,
    **dots_note.FAMILIES,
    **gated_latent.FAMILIES,
    **glm_next.FAMILIES,
    **glm_vl.FAMILIES,
    **qwen_next.FAMILIES,
    **qwen4.FAMILIES,
    **qwen_vl.FAMILIES,
    **paddleocr.FAMILIES,
    **lfm.FAMILIES,
    **mamba.FAMILIES,
    **zamba.FAMILIES,
    **recurrent_gemma.FAMILIES,
    **xlstm.FAMILIES,
    **rwkv.FAMILIES,
    **kimi_linear.FAMILIES,
    **minimax.FAMILIES,
    **step.FAMILIES,
    **ENCODERS,
}
"""Families by the architecture's name in config.json."""


def family_of(arch: ModelSpec) -> Family:
    """How to read the checkpoint of a model that is one of FAMILIES."""
    family = FAMILIES[arch.name]
    if isinstance(arch, DraftHeadSpec):
        family = family.of_draft_head(arch)
    return family.with_separate_experts() if arch.separate_experts else family


def _text_parts(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """config.json and the parts of it that describe the text model, by the prefix of their keys, from the outermost."""
    prefix, parts = "", {"": config}
    for name in ("vlm_config", "text_config", "language_config"):  # ColPali's are made of a whole model
        if isinstance(part := parts[prefix].get(name), Mapping):
            prefix = f"{prefix}{name}."
            parts[prefix] = part
    return parts


def length_key(config: Mapping[str, Any]) -> str:
    """Return the key of config.json that states the model's length, such as `text_config.max_position_embeddings`."""
    parts = [*_text_parts(config).items()][::-1]
    stated = (f"{prefix}{name}" for prefix, part in parts for name in LENGTHS.split() if part.get(name))
    return next(stated, f"{parts[0][0]}max_position_embeddings")


def of_text(config: Mapping[str, Any], names: Collection[str] = ()) -> dict[str, Any]:
    """config.json with the settings of the text part on top, if we know the text part of a model that takes more, by
    its architectures or by `names`."""
    names, parts = [*names, *(config.get("architectures") or ())], _text_parts(config)
    if (model := parts.get("vlm_config.")) is not None:
        config = {**config, **model, "architectures": config.get("architectures")}
    if not any(name in FAMILIES for name in names):
        return dict(config)
    *_, part = parts.values()
    shared = {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    if config.get("eos_token_id") is not None:  # what ends an answer; the part may have the base model's
        shared["eos_token_id"] = config["eos_token_id"]
    return {**config, **part, **shared}


def from_hf_config(config: Mapping[str, Any], *, media: bool = True) -> ModelSpec:
    """Map a Hugging Face config to a `ModelSpec`, without `media` to the text part alone. Raises `ConfigError` if the
    model is not supported."""
    names = config.get("architectures") or []
    name = next((n for n in names if n in FAMILIES), None)
    if name is None:
        raise ConfigError(f"{', '.join(names) or 'the model'} has no implementation of Quire's own")
    family, remedy = FAMILIES[name], ""
    try:
        complete = family.complete(config)
        arch = family.architecture(name, complete)
        if media and family.media is not None and isinstance(config.get("vision_config"), Mapping):
            remedy = "; with --language-model-only, the model takes only text"
            arch = family.media(arch, complete)
        return arch
    except KeyError as missing:
        raise ConfigError(f"config.json lacks {missing}, which {name} needs{remedy}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise ConfigError(f"{name}: {error}{remedy}") from None
        raise ConfigError(f"config.json has a value that {name} cannot use: {error}{remedy}") from None
