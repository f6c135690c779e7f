"""Resolves speculative decoding (`EngineOptions` → `SpeculativeConfig`). No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.encoder_spec import EncoderSpec
from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.config import draft_heads, model_config, parallel_config
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.stats import MAX_DRAFT_TOKENS
from quire.engine.repository import model_files, model_folder

_HEADS = {"mtp": 1, "eagle": 3, "eagle3": 3}
"""Methods whose drafter is a head on the target, and their default maximum of drafts."""
_MTP = (
    "deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "mimo_v2_mtp", "qwen3_next_mtp", "qwen3_5_mtp",
    "ernie_mtp", "exaone_moe_mtp", "nemotron_h_mtp", "step3p5_mtp", "bailing_hybrid_mtp", "bailing_hybrid_v3_mtp",
)  # fmt: skip
"""vLLM's names for the heads of model families."""
_METHODS = {"auto": "auto", "ngram": "ngram", "[ngram]": "ngram", "none": "none", "draft_model": "draft_model"} | {
    **{method: method for method in _HEADS},
    **dict.fromkeys(_MTP, "mtp"),
}
_SHOWN = "ngram", "draft_model", *_HEADS
_HeadMethod = Literal["mtp", "eagle", "eagle3"]
_UNSUPPORTED = "is not supported; omit it, the answers are the same"
_LIMITS = {
    "num_speculative_tokens": (1, MAX_DRAFT_TOKENS),
    "prompt_lookup_min": (1, 16),
    "prompt_lookup_max": (1, 16),
}
_DRAFT_TOKENS = 5
"""Default maximum of a draft model's tokens. Each of them takes a pass of its own."""


def resolve(
    options: EngineOptions,
    model: ModelConfig,
    parallel: ParallelConfig,
    scheduler: SchedulerConfig,
    available: Devices,
) -> SpeculativeConfig | None:
    """Return how tokens are guessed; None: not at all. Raises `ConfigError` if that is not supported."""
    given = dict(options.speculative_config or {})
    method = _method(options, given)
    tp = given.pop("draft_tensor_parallel_size", None)
    if tp is not None and method != "draft_model":
        raise ConfigError("--speculative-config: draft_tensor_parallel_size needs a draft model; omit it")
    settings = _settings(options, given)
    if method == "none":
        return None
    obstacle = _obstacle(model, parallel)
    is_chosen = method != "auto" or bool(settings)
    if obstacle and is_chosen:
        raise ConfigError(f"speculative decoding is not supported {obstacle}; omit it, the answers are the same")
    is_default = parallel.device == "cpu" and scheduler.max_num_batched_tokens > 1
    if obstacle or not (is_chosen or is_default):
        return None
    if method in ("auto", "ngram"):
        return SpeculativeConfig(**settings)
    if method in _HEADS:
        head = _head(cast(_HeadMethod, method), options, model, parallel)
        assert isinstance(head.architecture, DraftHeadSpec)
        count = head.architecture.num_heads
        settings = {"num_speculative_tokens": max(_HEADS[method], count)} | settings
        most = settings["num_speculative_tokens"]
        if 1 < count < most:
            raise ConfigError(
                f"{options.model} has {count} heads for multi-token prediction, which guess one token each; "
                f"{most} tokens are too many; use --spec-tokens {count} or less"
            )
        if count > most:  # nobody would use the guesses of the others
            layers = head.architecture.layers[:most]
            head = replace(head, architecture=replace(head.architecture, layers=layers, num_heads=most))
        if min(count, most) > 1 and any(layer.state is not None for layer in model.architecture.layers):
            raise ConfigError(
                f"{options.model} has recurrent states, with which several heads are not supported; use --spec-tokens 1"
            )
        return SpeculativeConfig(
            method=cast(_HeadMethod, method),
            model=head,
            tensor_parallel_size=parallel.tensor_parallel_size,
            **settings,
        )
    sizes = dict.fromkeys((1, parallel.tensor_parallel_size))
    if tp is not None and tp not in sizes:
        raise ConfigError(
            f"--speculative-config: draft_tensor_parallel_size must be {' or '.join(map(str, sizes))}, got {tp!r}"
        )
    return SpeculativeConfig(
        method="draft_model",
        model=_drafter(options, model, parallel, tp or parallel.tensor_parallel_size, available),
        tensor_parallel_size=tp or parallel.tensor_parallel_size,
        **{"num_speculative_tokens": _DRAFT_TOKENS} | settings,
    )


def _head(method: _HeadMethod, options: EngineOptions, model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Resolve a head. Raises `ConfigError` if it is not supported, or does not fit `model`.

    The tensors of EAGLE's checkpoints show the parts of the head: they are downloaded here.
    """
    named = _model_of(options) or options.model
    try:
        if method == "mtp":
            head = draft_heads.mtp(model)
        else:
            path = model_folder.locate(named, None, options.download_dir, has_tokenizer=False)
            load_format = model_files.find_load_format(named, None, path)
            if load_format not in ("safetensors", "pt"):
                raise ConfigError(f"weights in the format {load_format} are not supported for heads")
            if model.load_format != "dummy":
                model_files.fetch_weights(named, None, options.download_dir, path, load_format)
            head = draft_heads.eagle(method, path, load_format, model)
        model_config.check_rank(head, head.architecture, parallel)
    except ConfigError as error:
        raise ConfigError(f"{method} head of {named}: {error}") from None
    return head


def drafter_options(options: EngineOptions, model: ModelConfig) -> EngineOptions:
    """Return the options with which the draft model of `model` is resolved, as if it were a model of its own."""
    return replace(
        options,
        model=_model_of(options) or "",
        tokenizer=str(model.tokenizer),
        revision=None,
        runner="generate",
        model_impl="quire",
        dtype=cast(Literal["float32", "bfloat16", "float16"], model.dtype),
        quantization=options.quantization if model.is_quantized_online else None,
        max_model_len=None,
        load_format="dummy" if options.load_format == "dummy" else "auto",
        hf_overrides=None,
        generation_config="vllm",
        override_generation_config=None,
        language_model_only=True,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
    )


def _drafter(
    options: EngineOptions, model: ModelConfig, parallel: ParallelConfig, tp: int, available: Devices
) -> ModelConfig:
    """Resolve the draft model. Raises `ConfigError` if it cannot guess the tokens of `model`."""
    where = f"draft model {_model_of(options)}"
    try:
        drafter = model_config.resolve(drafter_options(options, model), available)
        arch = drafter.architecture
        size = replace(parallel, tensor_parallel_size=tp, experts=None)
        model_config.check_rank(drafter, parallel_config.rank_spec(arch, size), size)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    reason = ""
    if isinstance(arch, EncoderSpec | TransformersModelSpec):
        reason = f"{arch.name} is not a decoder that Quire has an implementation of its own of"
    elif any(layer.state is not None for layer in arch.layers):
        reason = "it has recurrent states"
    elif any(isinstance(each.attention, AttentionSpec) and each.attention.is_chunked for each in arch.layers):
        reason = "it has chunked attention"
    if reason:
        raise ConfigError(f"{where} is not supported: {reason}")
    if arch.vocab_size != model.architecture.vocab_size:
        raise ConfigError(
            f"{where} has a vocabulary of {arch.vocab_size:,} tokens, and {model.path} of "
            f"{model.architecture.vocab_size:,}; a draft model needs the same vocabulary"
        )
    if drafter.max_model_len < model.max_model_len:
        raise ConfigError(
            f"{where} has {drafter.max_model_len:,} positions, less than the {model.max_model_len:,} tokens of a "
            f"request; use --max-model-len {drafter.max_model_len} or less"
        )
    return replace(drafter, max_model_len=model.max_model_len)


def _method(options: EngineOptions, given: dict[str, Any]) -> str:
    """Return the method; a model without one is a draft model."""
    method, named = given.pop("method", None), given.pop("model", None)
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"--speculative-config: model must be a folder or a repository, got {named!r}")
    model = _model_of(options)
    method = method or (named if named in _METHODS else None) or options.spec_method
    method = "draft_model" if method == "auto" and model is not None else method
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(f"--speculative-config: method {method!r} {_UNSUPPORTED}, or use {', '.join(_SHOWN)}")
    method = _METHODS[method]
    if method in ("draft_model", "eagle", "eagle3") and model is None:
        raise ConfigError(f"the speculative method {method} needs a model: --spec-model FOLDER")
    if method == "mtp" and model not in (None, options.model):
        raise ConfigError(f"the speculative method mtp uses the checkpoint of {options.model}; omit {model}")
    if method in ("auto", "ngram") and model is not None:
        raise ConfigError(f"the speculative method {method} has no model of its own; omit {model}, or use draft_model")
    return method


def _model_of(options: EngineOptions) -> str | None:
    """Return the folder or repository of the draft model; in --speculative-config a method may be in its place."""
    named = (options.speculative_config or {}).get("model")
    return options.spec_model if named is None or named in _METHODS else named


def _settings(options: EngineOptions, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of `SpeculativeConfig` that the user has set."""
    values: dict[str, tuple[str, Any]] = {}
    if options.spec_tokens is not None:
        values["num_speculative_tokens"] = "--spec-tokens", options.spec_tokens
    for name, value in given.items():
        if name not in _LIMITS:
            raise ConfigError(f"--speculative-config: {name} {_UNSUPPORTED}")
        if value is not None:
            values[name] = f"--speculative-config: {name}", value
    for name, (source, value) in values.items():
        least, most = _LIMITS[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{source} must be at least {least} and at most {most}, got {value}")
    shortest, longest = values.get("prompt_lookup_min"), values.pop("prompt_lookup_max", None)
    if longest is not None and shortest is None:
        values["prompt_lookup_min"] = longest  # as in vLLM
    elif longest is not None and shortest is not None and shortest[1] > longest[1]:
        raise ConfigError(f"{shortest[0]} is {shortest[1]}, more than prompt_lookup_max ({longest[1]})")
    return {name: value for name, (_, value) in values.items()}


def _obstacle(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    if model.pooling is not None:
        return "by embedding models"
    if parallel.is_coupled:
        return "with experts shared by replicas"
    return None
