"""Heads that draft: from the target's config.json, or from their own checkpoint's, to a `DraftHeadSpec`.

Layouts and settings follow the publishers: SafeAILab, vLLM's speculators and ModelOpt for EAGLE, and the model's own
publisher for multi-token prediction. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from quire.engine.architecture.attention_spec import AttentionSpec, MLASpec
from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.families import FAMILIES, from_hf_config
from quire.engine.architecture.families.family import require
from quire.engine.architecture.model_spec import ModelSpec, TransformersModelSpec
from quire.engine.architecture.residual_spec import AltUpSpec, EmbeddingReaderSpec
from quire.engine.protocol.errors import ConfigError

ARCHITECTURES = {
    "eagle": ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLM"),
    "eagle3": (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLM",
        "Eagle3Speculator",
        "Eagle3DraftModel",
    ),
}
"""Names in config.json of the heads of each method. The first publishers left the name of the layer's family."""
MTP_FAMILIES = tuple(name for name, family in FAMILIES.items() if "mtp" in family.draft_heads)
"""Architectures with a head for multi-token prediction whose layout is known."""


def mtp_head(config: Mapping[str, Any], target: ModelSpec, names: Collection[str] | None) -> DraftHeadSpec:
    """Return the head for multi-token prediction in the checkpoint of `target`, whose config.json is `config`; or all
    heads, where they are for tokens further and further ahead. `names` are the names of the checkpoint's tensors; None:
    they are not known.

    Raises `ConfigError` if there is none, if one of several is missing, or if its layout is not known.
    """
    if target.name not in MTP_FAMILIES or isinstance(target, TransformersModelSpec):
        raise ConfigError(f"mtp is not supported for {target.name}; supported: {', '.join(MTP_FAMILIES)}")
    family = FAMILIES[target.name]
    layout = family.draft_heads["mtp"]
    if config.get(layout.count, 1) in (0, None):
        raise ConfigError(f"mtp: {target.name} has no head for multi-token prediction ({layout.count} is 0)")
    if layout.layers is not None:
        layers = tuple(layout.layers(family.complete(config)))
    else:
        layers = (next((each for each in reversed(target.layers) if each.attention is not None), target.layers[-1]),)
    if any(isinstance(each.attention, MLASpec) and each.attention.shares_selection for each in layers):
        raise ConfigError(f"mtp is not supported for {target.name} with layers that share a selection (indexer_types)")
    found = _stored_layers(layout.layer, target.num_layers, names or ())
    if names and not found:
        raise ConfigError("mtp: this checkpoint has no head; omit --spec-method mtp")
    number = len(layers) if layout.heads == "listed" else 1
    if layout.heads == "stored":
        number = max(found) + 1 if found else int(config.get(layout.count, 1))
        if found and (missing := {*range(number)} - found):
            raise ConfigError(f"mtp: this checkpoint has no head {min(missing)} of {number}; omit --spec-method mtp")
        layers *= number
    return DraftHeadSpec(
        name=target.name,
        method="mtp",
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        max_position=target.max_position,
        layers=layers,
        norm=target.norm,
        tie_embeddings=False,
        separate_experts=target.separate_experts,
        target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        num_heads=number,
        is_chained=layout.is_chained,
        first_layer=target.num_layers if "{after}" in layout.layer else 0,
        reads_normed=layout.reads_normed,
        embedding_norm=target.norm,
        hidden_norm=target.norm,
        joins="sum" if target.streams else "hidden first" if layout.hidden_first else "embedding first",
        reads_layers=(target.num_layers,) if target.streams else (),  # it continues the residual streams themselves
        draft_vocab_size=target.vocab_size,
        has_head=layout.has_own_logits,
        feeds_normed=layout.reads_normed,
    )


def _stored_layers(layer: str, after: int, names: Collection[str]) -> set[int]:
    """The numbers of the heads' layers among these tensors, by `DraftHeadLayout.layer`; 0 if there can be only one."""
    own = re.escape(layer.removeprefix("model.")).replace(r"\{layer\}", r"(\d+)").replace(r"\{after\}", r"(\d+)")
    pattern, first = re.compile(rf"(?:.*\.)?{own}\."), after if "{after}" in layer else 0
    found = {int(match[1]) - first if match.groups() else 0 for name in names if (match := pattern.match(name))}
    return {number for number in found if number >= 0}


def eagle_head(
    method: Literal["eagle", "eagle3"], config: Mapping[str, Any], names: Collection[str] | None, target: ModelSpec
) -> DraftHeadSpec:
    """Return the head that `config`, its config.json, describes. `names` are the names of its checkpoint's tensors;
    None: they are not known, and the first publisher's names are assumed.

    Raises `ConfigError` if it is not supported, or does not fit `target`.
    """
    if isinstance(target, TransformersModelSpec) or isinstance(target.streams, AltUpSpec):
        raise ConfigError(f"{method} is not supported for {target.name}, whose layers' outputs are not accessible")
    if target.streams is not None:
        raise ConfigError(f"{method} is not supported for {target.name}, which has several residual streams")
    is_speculator = "transformer_layer_config" in config
    config = {"norm_before_residual": is_speculator, **(config.get("transformer_layer_config") or {}), **config}
    known, stated = ARCHITECTURES[method], config.get("architectures") or ["LlamaForCausalLM"]
    if not any(name in known for name in stated):
        raise ConfigError(f"{method}: {', '.join(stated)} is not supported; supported: {', '.join(known)}")
    settings = config.get("eagle_config") or {}
    require(config, "model_type", "llama", "eagle", "eagle3")
    require(config, "num_hidden_layers", 1)
    require(config, "quantization_config", None)
    require(settings, "use_mtp_layernorm", False)
    require(settings, "use_last_layernorm", True)
    require(settings, "use_input_layernorm_in_first_layer", True)
    base = from_hf_config({**config, "architectures": ["LlamaForCausalLM"]})
    (layer,), hidden, norm = base.layers, base.hidden_size, base.norm
    assert isinstance(layer.attention, AttentionSpec)
    is_third = method == "eagle3"
    if names is None:
        names = ["midlayer.", "d2t", "lm_head.weight"] if is_third else ["fc.bias"] * bool(config.get("bias", True))
    own_names = {name.removeprefix("model.") for name in names}
    width = int(config.get("target_hidden_size") or hidden) if is_third else hidden
    if width != target.hidden_size:
        raise ConfigError(f"{method}: the head is for a model of hidden size {width}, not {target.hidden_size}")
    if base.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{method}: the head is for a vocabulary of {base.vocab_size} tokens, not {target.vocab_size}"
        )
    common: dict[str, Any] = {
        "name": base.name,
        "method": method,
        "hidden_size": hidden,
        "vocab_size": target.vocab_size,
        "max_position": base.max_position,
        "tie_embeddings": False,
        "logit_multiplier": float(config.get("logit_scale") or 1.0),
        "target_layers": target.num_layers,
        "target_hidden_size": width,
    }
    if not is_third:
        return DraftHeadSpec(
            **common,
            layers=(replace(layer, attention_norm=None),),
            norm=None,
            joins="embedding first",
            projection_bias="fc.bias" in own_names,
        )
    reads = _read_layers(config, target.num_layers) if settings.get("use_aux_hidden_state", True) else ()
    is_normed = bool(config["norm_before_residual"])
    layer = replace(layer, attention=replace(layer.attention, input_size=2 * hidden), residual=EmbeddingReaderSpec())
    has_embedding, has_head = "embed_tokens.weight" in own_names, "lm_head.weight" in own_names
    if not has_embedding and hidden != target.hidden_size:
        raise ConfigError(f"eagle3: the head has no embedding of its own hidden size {hidden} (embed_tokens.weight)")
    draft_vocab = int(config.get("draft_vocab_size") or target.vocab_size)
    if draft_vocab > target.vocab_size or (draft_vocab < target.vocab_size and "d2t" not in own_names):
        raise ConfigError(
            f"eagle3: the head has logits of {draft_vocab} tokens, the model {target.vocab_size}, and its checkpoint "
            "does not say which they are (d2t)"
        )
    if not has_head and (draft_vocab, hidden) != (target.vocab_size, target.hidden_size):
        raise ConfigError(f"eagle3: the head has no matrix for the logits of its {draft_vocab} tokens (lm_head.weight)")
    return DraftHeadSpec(
        **common,
        layers=(replace(layer, attention_norm=None if is_normed else norm),),
        norm=norm,
        embedding_norm=norm,
        hidden_norm=norm if is_normed else None,
        reads_layers=reads,
        projection_bias="fc.bias" in own_names,
        draft_vocab_size=draft_vocab,
        has_embedding=has_embedding,
        has_head=has_head,
        stored_layer="model.midlayer" if any(name.startswith("midlayer.") for name in own_names) else "",
    )


def _read_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads: the stated layers, or else the layers in the paper's code.

    Publishers name them by the layers' outputs or by their inputs. As SGLang does, numbers from 1 on are taken for
    outputs, because the paper's first one is the input of layer 2.
    """
    names = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
    stated: Sequence[int] = ()
    for place in (config.get("eagle_config") or {}, config):
        stated = next((each for name in names if (each := place.get(name))), stated)
    found = tuple(int(number) + (stated[0] == 1) for number in stated) or (2, num_layers // 2, num_layers - 3)
    if not all(0 <= number <= num_layers for number in found):
        raise ConfigError(f"eagle3: the head reads layers {found}, but the model has {num_layers}")
    return found
