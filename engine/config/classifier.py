"""The head of a classifier, a reranker or a reward model, as config.json describes it. No torch.

`…ForSequenceClassification` has transformers' heads. With `classifier_from_token`, a vLLM extension of config.json, the
head is made from rows of a language model's output head (https://docs.vllm.ai).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.architecture.encoder_spec import EncoderSpec
from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.families.family import HeadLayer
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.config.pooling import Activation, Classes, Dense, Mode, Norm, Pooling
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import tokenizer_files

_SEQUENCE, _REWARD = "ForSequenceClassification", "ForRewardModel"
_REWARD_HEADS = {"Qwen2ForRewardModel": (HeadLayer("score.0", "ReLU"), HeadLayer("score.2"))}
_FROM_TOKEN, _METHOD = "classifier_from_token", "method"
_DIFFERENCE, _ROWS = "from_2_way_softmax", "no_post_processing"
"""Values of `method`: a single logit, the second token's minus the first's; or the logit of each token."""
_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""Activations by the name of a torch class."""


def base_names(name: str) -> list[str]:
    """Return the possible architectures of the model with an output head whose classifier is `name`; empty: it is not a
    classifier.
    """
    for end in (_SEQUENCE, _REWARD):
        if name.endswith(end):
            base = name.removesuffix(end)
            if end == _REWARD and name not in _REWARD_HEADS:
                raise ConfigError(f"{name} is not supported; supported reward models: {', '.join(_REWARD_HEADS)}")
            text = base.removesuffix("Text")
            ends = f"{base}ForCausalLM", f"{text}ForCausalLM", f"{base}LMHeadModel", f"{base}ForConditionalGeneration"
            return [name, *ends]
    return []


def read(name: str, config: Mapping[str, Any], arch: ModelSpec, tokenizer: Path) -> Pooling:
    """Read the head of the classifier `name`. Raises `ConfigError` for settings that are not supported."""
    labels = _labels(config)
    tokens = config.get(_FROM_TOKEN) or (["no", "yes"] if config.get("is_original_qwen3_reranker") else None)
    if tokens is not None:
        labels, dense = _from_tokens(tokens, config, arch, tokenizer)
        modules: list[Dense | Norm] = [dense]
    else:
        if name in _REWARD_HEADS:
            labels = labels[:1]
        family = FAMILIES[arch.name]
        head = _REWARD_HEADS.get(name, family.classifier)
        layers = head({**family.defaults, **config}) if callable(head) else head
        modules = [_module(layer, arch.hidden_size, len(labels) if layer is layers[-1] else None) for layer in layers]
    mode: Mode = "cls" if isinstance(arch, EncoderSpec) else "lasttoken"
    if (asked := config.get("classifier_pooling", mode)) != mode:  # ModernBERT's setting
        if asked != "mean":
            raise ConfigError(f"config.json: classifier_pooling {asked!r} is not supported; supported: cls, mean")
        mode = "mean"
    return Pooling(
        modes=(mode,),
        modules=tuple(modules),
        size=len(labels),
        classes=Classes(
            labels=labels,
            activation="identity" if name in _REWARD_HEADS else _activation(config, len(labels)),
            joins_texts=tokens is not None and not config.get("use_pad_token"),
        ),
    )


def _module(layer: HeadLayer | tuple[str, NormSpec], width: int, num_labels: int | None) -> Dense | Norm:
    """A module of a head. Only the last one has labels."""
    if not isinstance(layer, HeadLayer):
        name, norm = layer
        return Norm(name=name, size=width, eps=norm.eps, bias=norm.bias)
    return Dense(
        name=layer.name,
        in_features=width,
        out_features=width if num_labels is None else num_labels,
        bias=layer.bias,
        activation=layer.activation,
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the labels; transformers' default are two without names."""
    names, count = config.get("id2label"), config.get("num_labels")
    if names is not None and not isinstance(names, Mapping):
        raise ConfigError(f"config.json: id2label must be an object, got {names!r}")
    names = names or {}
    count = (len(names) or 2) if count is None else count
    if type(count) is not int or count < 1:
        raise ConfigError(f"config.json: num_labels must be at least 1, got {count!r}")
    return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count))


def _activation(config: Mapping[str, Any], num_labels: int) -> Activation:
    """The activation that transformers' loss of `problem_type` assumes, or else that a sentence-transformers
    cross-encoder states."""
    match config.get("problem_type"):
        case "regression":
            return "identity"
        case "multi_label_classification":
            return "sigmoid"
        case None | "single_label_classification" | "":
            pass
        case other:
            raise ConfigError(f"config.json: problem_type {other!r} is not supported")
    settings = config.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is None:
        return "sigmoid" if num_labels == 1 else "softmax"
    if (found := _ACTIVATIONS.get(str(named).rpartition(".")[2])) is None:
        raise ConfigError(f"config.json: the activation {named} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return found


def _from_tokens(
    tokens: Any, config: Mapping[str, Any], arch: ModelSpec, tokenizer: Path
) -> tuple[tuple[str, ...], Dense]:
    """The labels, and the head made from the output head's rows of `tokens`."""
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f"config.json: {_FROM_TOKEN} must be a list of tokens, got {tokens!r}")
    if isinstance(arch, EncoderSpec) or arch.logit_softcap or arch.logit_multiplier != 1.0 or arch.head_bias:
        raise ConfigError(
            f"config.json: {_FROM_TOKEN} is not supported for {arch.name}: its logits are not only products of an "
            "output head"
        )
    method = config.get(_METHOD) or (_DIFFERENCE if len(tokens) == 2 else _ROWS)
    if method not in (_DIFFERENCE, _ROWS) or (method == _DIFFERENCE and len(tokens) != 2):
        raise ConfigError(
            f"config.json: {_METHOD} {method!r} with {len(tokens)} tokens in {_FROM_TOKEN} is not supported; use "
            f"{_DIFFERENCE} with two tokens, or {_ROWS}"
        )
    rows = [tokenizer_files.token_id(tokenizer, token) for token in tokens]
    if None in rows:
        raise ConfigError(
            f"{tokenizer}: {_FROM_TOKEN}: the vocabulary has no token {tokens[rows.index(None)]!r} (tokens are spelled "
            "as in tokenizer.json)"
        )
    names = FAMILIES[arch.name].names_of(arch)
    is_difference = method == _DIFFERENCE
    labels = ("LABEL_0",) if is_difference else tuple(tokens)
    dense = Dense(
        name=names["embedding" if arch.tie_embeddings else "head"],
        in_features=arch.hidden_size,
        out_features=len(labels),
        bias=False,
        rows=tuple(row for row in rows if row is not None),
        is_difference=is_difference,
        total_rows=arch.vocab_size,
    )
    return labels, dense
