"""Resolves what a server does with images and videos (`EngineOptions` → `MediaConfig`). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.config.engine_config import MediaConfig, ModelConfig, ParallelConfig, SchedulerConfig
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.media import MAX_ITEMS, MediaKind

_CACHE_FEATURES = 16_384
"""Default size of the cache. It suffices for an image of 16 megapixels in models with a feature for 32 x 32 pixels."""


def is_text_only(options: EngineOptions, spec: MediaSpec) -> bool:
    """Whether a model that takes images is to take only text. Raises `ConfigError`."""
    return options.language_model_only or not any(_max_items(options, spec).values())


def resolve(
    options: EngineOptions, model: ModelConfig, parallel: ParallelConfig, scheduler: SchedulerConfig
) -> MediaConfig | None:
    """Return what the server does with images and videos; None: it takes only text. Raises `ConfigError`."""
    spec = model.architecture.media
    if spec is None:
        return None
    remedy = "or --language-model-only, without images"
    if not scheduler.enable_chunked_prefill:
        raise ConfigError(
            f"--no-enable-chunked-prefill is not supported for models that take images; omit it, {remedy}"
        )
    needed = 1 + max(spec.tower.targets, default=-1)
    if (first := len(parallel.stages[0])) < needed:
        raise ConfigError(
            f"the first pipeline stage has {first} layers, and features of images are added to the outputs of the "
            f"model's first {needed}, which must be in one stage; use a lower --pipeline-parallel-size, "
            f"a --pipeline-layer-partition with at least {needed} layers in the first stage, {remedy}"
        )
    most, needed = scheduler.max_num_batched_tokens, spec.run_length or 0
    if spec.is_bidirectional and most < needed:
        raise ConfigError(
            f"--max-num-batched-tokens {most} is less than the {needed} tokens of an image, which must be in one step; "
            f"use at least {needed}, {remedy}"
        )
    if spec.joins_prompt and needed >= model.min_window:
        raise ConfigError(
            f"a prompt with an image has more than the {needed} tokens of the image, which must all be in a window or "
            f"in the model's length, {model.min_window}; use --language-model-only, without images"
        )
    kept = options.encoder_cache_size or min(_CACHE_FEATURES, model.position_len)
    return MediaConfig(
        max_items=_max_items(options, spec),
        max_encoder_features=scheduler.max_num_batched_tokens,
        encoder_cache_features=kept,
        max_item_features=options.encoder_cache_size or min(kept, spec.tower.max_features or kept),
    )


def _max_items(options: EngineOptions, spec: MediaSpec) -> Mapping[MediaKind, int]:
    """Return the maximum items of each kind in a prompt: those of --limit-mm-per-prompt, if the model takes them."""
    given, flag = options.limit_mm_per_prompt or {}, "--limit-mm-per-prompt"
    kinds: tuple[MediaKind, ...] = get_args(MediaKind)
    if unknown := sorted(given.keys() - {*kinds, "audio"}):
        raise ConfigError(f"{flag}: {unknown[0]} is not supported; the kinds are {', '.join(kinds)}")
    # vLLM also takes sizes, for which it reserves memory.
    counts = {kind: each.get("count", MAX_ITEMS) if isinstance(each, Mapping) else each for kind, each in given.items()}
    for kind, count in counts.items():
        if type(count) is not int or not 0 <= count <= MAX_ITEMS:
            raise ConfigError(f"{flag}: {kind} must be a number from 0 to {MAX_ITEMS}, got {count!r}")
    if counts.get("audio"):
        raise ConfigError(f"{flag}: audio is not supported; omit it, or use 0")
    limits: dict[MediaKind, int] = {kind: counts.get(kind, MAX_ITEMS) for kind in kinds}
    return limits if spec.video_token_id is not None else {**limits, "video": 0}
