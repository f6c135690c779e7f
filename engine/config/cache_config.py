"""Resolves the KV cache (`EngineOptions` → `CacheConfig`), except for its number of blocks. No torch."""

from __future__ import annotations

from typing import NoReturn

from quire.engine.architecture.attention_spec import AttentionSpec, CompressedAttentionSpec
from quire.engine.architecture.encoder_spec import EncoderSpec
from quire.engine.architecture.model_spec import ModelSpec, TransformersModelSpec
from quire.engine.config import context_parallel
from quire.engine.config.devices import FP8_CAPABILITY, Devices
from quire.engine.config.engine_config import (
    DTYPE_BYTES,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    RecentBlocks,
    SchedulerConfig,
)
from quire.engine.config.kv_cache_groups import cached_layers, count_blocks_per_page, group_layers
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.scheduler_output import CATCH_UP_TOKENS


def resolve(
    options: EngineOptions, model: ModelConfig, parallel: ParallelConfig, scheduler: SchedulerConfig
) -> CacheConfig:
    """Return the layout and data type of the cache; `num_blocks` is 0 until `memory_plan.count_blocks` sets it."""
    # The rounding is negligible compared with the quantized weights', and decodes read half as much.
    automatic = "bfloat16" if model.is_quantized_online and model.dtype == "float32" else model.dtype
    dtype = automatic if options.kv_cache_dtype == "auto" else options.kv_cache_dtype.removesuffix("_e4m3")
    _check_chunks(model, options.block_size)
    speculative = scheduler.speculative
    drafter = None if speculative is None else speculative.model
    for arch in (model.architecture, *([] if drafter is None else [drafter.architecture])):
        _check_entries(arch, options.block_size, dtype)
        if dtype == "int4":
            _check_int4(arch, options.block_size)
    context_parallel.check(options, model, parallel, speculative, dtype)
    context_parallel.check_shares(model, parallel, dtype)
    specs, stages = cached_layers(model, parallel, speculative, options.block_size)
    page = count_blocks_per_page(specs, options.block_size, dtype)
    max_len, row, size = model.max_model_len, scheduler.max_num_batched_tokens, options.block_size
    return CacheConfig(
        block_size=options.block_size,
        num_blocks=0,
        dtype=dtype,
        enable_prefix_caching=options.enable_prefix_caching and _supports_prefix_caching(model),
        groups=group_layers(specs, stages, lambda group: group.max_pages(max_len, row, size, page)),
        blocks_per_page=page,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        recent=_recent_blocks(automatic, scheduler, options.block_size) if dtype == "int4" else None,
    )


def _recent_blocks(dtype: str, scheduler: SchedulerConfig, size: int) -> RecentBlocks:
    """Return the blocks of keys and values that are not quantized yet.

    Drafts may be computed again. A draft model computes tokens ahead of these, and later those of steps that have
    passed without it. Several heads, of which there are no more than drafts, compute one token less than there are
    heads before each row's again.
    """
    again, tokens = scheduler.max_drafts, scheduler.max_num_batched_tokens
    if scheduler.speculative is not None and scheduler.speculative.model is not None:
        again = 2 * (again + 1)
        tokens += CATCH_UP_TOKENS + scheduler.max_num_seqs * again
    # With two blocks of its own, a row of n tokens needs no more than n / size others.
    return RecentBlocks(dtype, 1 + max(1, -(-again // size)), tokens // size)


def _check_int4(arch: ModelSpec, block_size: int) -> None:
    """Check that all layers can have keys and values in 4 bits."""

    def refuse(reason: str, remedy: str = "use int8, fp8 or auto") -> NoReturn:
        raise ConfigError(f"--kv-cache-dtype int4 is not supported for {arch.name}, {reason}; {remedy}")

    attentions = [layer.attention for layer in arch.layers if layer.attention is not None]
    if not attentions:
        refuse("which keeps no keys and values", "use auto")
    if isinstance(arch, EncoderSpec) or (arch.media is not None and arch.media.is_bidirectional):
        refuse("whose tokens attend to later ones")
    for attention in dict.fromkeys(attentions):
        if not isinstance(attention, AttentionSpec) or attention.indexer is not None:
            refuse("whose attention is latent, sparse or compressed", "use auto")
        head_dim = attention.head_dim
        if head_dim % 2:
            refuse(f"whose heads have {head_dim} features")
        if block_size % 2 or 4 * head_dim % block_size:
            refuse(
                f"whose heads have {head_dim} features, with --block-size {block_size}",
                f"use an even one that divides {4 * head_dim}, e.g. 16",
            )


def _check_chunks(model: ModelConfig, block_size: int) -> None:
    """Check that chunks of attention begin where blocks do."""
    for attention in dict.fromkeys(layer.attention for layer in model.architecture.layers):
        if not isinstance(attention, AttentionSpec) or not attention.is_chunked or attention.window is None:
            continue
        if attention.window < model.max_model_len and attention.window % block_size:
            raise ConfigError(
                f"--block-size {block_size} does not divide the {attention.window} tokens of a chunk that "
                f"{model.architecture.name} attends to"
            )


def _check_entries(arch: ModelSpec, block_size: int, dtype: str) -> None:
    """Check that a block has whole groups of tokens that share a key of an indexer, and numbers of a float type if
    there are such groups, entries of compressed attention, or biases among the features of keys."""
    if isinstance(arch, TransformersModelSpec) and arch.has_key_biases and dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"--kv-cache-dtype {dtype} is not supported for {arch.name}, which stores biases of attention "
            "scores with the keys, where they would be rounded; use auto"
        )
    for attention in dict.fromkeys(layer.attention for layer in arch.layers):
        if attention is None or (attention.tokens_per_key == 1 and not isinstance(attention, CompressedAttentionSpec)):
            continue
        if dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"--kv-cache-dtype {dtype} is not supported for {arch.name}, whose cache has what "
                "entries are computed from; use auto"
            )
        if block_size % attention.tokens_per_key:
            raise ConfigError(
                f"--block-size {block_size} is not a multiple of the {attention.tokens_per_key} tokens that "
                f"{arch.name} compresses to one entry"
            )


def check_gpus(options: EngineOptions, cache: CacheConfig, available: Devices) -> None:
    """Check that this host's GPUs, or the described GPUs, support the data type of the KV cache.

    Ranks on other hosts check theirs. GPUs whose compute capability is not known are not checked.
    """
    if cache.dtype != "fp8" or options.attention_backend == "reference":
        return
    for number, (major, minor) in available.capabilities().items():
        if (major, minor) < FP8_CAPABILITY:
            minimum = "{}.{}".format(*FP8_CAPABILITY)
            raise ConfigError(
                f"--kv-cache-dtype {options.kv_cache_dtype} needs GPUs of compute capability {minimum} or higher, but "
                f"GPU {number} has {major}.{minor}; use --kv-cache-dtype int8 or auto"
            )


def _supports_prefix_caching(model: ModelConfig) -> bool:
    """Whether the model can use the prefix cache; pooling may need the hidden states of all tokens."""
    if isinstance(model.architecture, EncoderSpec):
        return False
    return model.pooling is None or not model.pooling.needs_all_tokens
