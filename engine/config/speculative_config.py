"""Resolves speculative decoding (`EngineOptions` → `SpeculativeConfig`). No torch."""

from __future__ import annotations

from typing import Any

from quire.engine.config.engine_config import ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.stats import MAX_DRAFT_TOKENS

_METHODS = {"auto": "auto", "ngram": "ngram", "[ngram]": "ngram", "none": "none"}
_UNSUPPORTED = "is not supported; omit it, the answers are the same"
_LIMITS = {
    "num_speculative_tokens": (1, MAX_DRAFT_TOKENS),
    "prompt_lookup_min": (1, 16),
    "prompt_lookup_max": (1, 16),
}


def resolve(
    options: EngineOptions, model: ModelConfig, parallel: ParallelConfig, scheduler: SchedulerConfig
) -> SpeculativeConfig | None:
    """Return how tokens are guessed; None: not at all. Raises `ConfigError` if that is not supported."""
    given = dict(options.speculative_config or {})
    method = _method(options, given)
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
    return SpeculativeConfig(**settings)


def _method(options: EngineOptions, given: dict[str, Any]) -> str:
    method, model = given.pop("method", None), given.pop("model", None)
    named = method or model or options.spec_method
    if not isinstance(named, str) or named not in _METHODS:
        raise ConfigError(f"--speculative-config: method {named!r} {_UNSUPPORTED}, or use ngram")
    if model is not None and (not isinstance(model, str) or model not in _METHODS):
        raise ConfigError("--speculative-config: model does not apply to ngram; omit it")
    return _METHODS[named]


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
