"""Resolves the options, once: `EngineOptions` → `EngineConfig`, before weights are read. No torch.

Each part is resolved by a module of its own (`model_config`, `parallel_config`, `scheduler_config`, `cache_config`,
`media_config`, `lora_config`, `kv_store_config`, `kv_events_config`, `cuda_graph_sizes`), and `memory_plan`
computes what fits. Each rejects what it does not support.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.config import (
    cache_config,
    checkpoint_tensors,
    context_parallel,
    cuda_graph_sizes,
    devices,
    draft_heads,
    kv_events_config,
    kv_store_config,
    lora_config,
    media_config,
    memory_plan,
    model_config,
    parallel_config,
    scheduler_config,
    speculative_config,
)
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import EngineConfig, ModelConfig, RayPlacement
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import gguf_folder, model_files

logger = logging.getLogger(__name__)

MIN_WATCHDOG_SECONDS = 3.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": (r"0*[1-9]\d{0,3}", "a number of threads"),
    "QUIRE_CPU_ISA": (
        "avx512_bf16|avx512_vnni|avx512|avx_vnni|avx2|neon_dotprod",
        "avx512_bf16, avx512_vnni, avx512, avx_vnni, avx2 or neon_dotprod",
    ),
}
"""Patterns that variables read by ranks must match, and descriptions of the patterns."""
MAX_TIMEOUT_SECONDS = 1e9
"""torch.distributed counts nanoseconds in 64 bits."""


def resolve(
    options: EngineOptions,
    placement: RayPlacement | None = None,
    described: Devices | None = None,
    model: ModelConfig | None = None,
    find: Callable[[EngineOptions], tuple[tuple[RayPlacement, ...], Devices] | None] | None = None,
) -> EngineConfig:
    """Resolve all options. Raises `ConfigError` with numbers and a remedy if the configuration is not supported; if a
    model of random weights does not fit, with its plan as a note.

    `placement` is given on nodes of a Ray cluster: another node has already determined where the ranks are.
    `described` are a host's devices for a plan only, instead of this host's or a Ray cluster's; `model` is the
    resolved model of other options with the same model. `find` looks for places in a Ray cluster (`ray_cluster.find`).
    """
    _check_ranges(options)
    _check_environment()
    context_parallel.check_options(options)
    parallel_config.check_roles(options)
    is_remote, available = False, described
    placements: tuple[RayPlacement, ...] = () if placement is None else (placement,)
    if find is not None and (found := find(options)) is not None:
        placements, remote_devices = found
        is_remote, available = True, available or remote_devices
        options = placements[0].options
    available = available or devices.find(options.device, parallel_config.local_group_sizes(options, placement))
    layouts, configs = parallel_config.local_layouts(options), list[EngineConfig]()
    for own in layouts:
        with _named(own, options):
            # Models that transformers builds are measured in each layout.
            if model is None or (configs and isinstance(model.architecture, TransformersModelSpec)):
                model = model_config.resolve(own, available)
            configs.append(_resolve_layout(own, options, model, available, placements, checks_gpus=not is_remote))
    config = configs[0]
    store = kv_store_config.resolve(options, config, available)
    if described is None:
        kv_store_config.check_disk(store)
    if available.kind == "cuda" or (is_remote and described is None):
        kv_store_config.check_host(store, config.lora, config.parallel.num_local_ranks, available)
    for place, own in enumerate(layouts):
        with _named(own, options):
            configs[place] = _with_cache(options, replace(configs[place], kv_store=store), available)
    length = min(each.model.max_model_len for each in configs)  # any replica can run any request
    config, *others = (replace(each, model=each.model.with_length(length)) for each in configs)
    if config.model.max_model_len < config.model.position_len:
        level = logging.INFO if options.max_model_len == "auto" else logging.WARNING
        logger.log(level, "%s", memory_plan.length_text(config.model))
    settings = shared_settings(options, config)
    for prefill in others:
        kv_store_config.check_layouts(config, prefill)
        config = replace(config, prefill=replace(prefill, shared_settings=settings))
    return replace(config, shared_settings=settings)


def _resolve_layout(
    options: EngineOptions,
    server: EngineOptions,
    model: ModelConfig,
    available: Devices,
    placements: tuple[RayPlacement, ...],
    *,
    checks_gpus: bool,
) -> EngineConfig:
    """Resolve everything of the replicas with one layout but their memory. `options` have this layout, and `server` the
    layouts of all replicas."""
    parallel = parallel_config.resolve(options, model.architecture, available, placements, server)
    model_config.check_rank(model, parallel_config.rank_spec(model.architecture, parallel), parallel)
    scheduler = scheduler_config.resolve(options, model, parallel, available)
    speculative = speculative_config.resolve(options, model, parallel, scheduler, available)
    scheduler = replace(scheduler, speculative=speculative)
    if speculative is not None and speculative.model is not None and speculative.reads_hidden_states:
        model = draft_heads.with_aux_layers(model, speculative.model)
    cache = cache_config.resolve(options, model, parallel, scheduler)
    if available.kind == "cuda" and checks_gpus:
        cache_config.check_gpus(options, cache, available)
        lora_config.check_host(options, available)
    graphs = cuda_graph_sizes.resolve(options, model, parallel, scheduler)
    media = media_config.resolve(options, model, parallel, scheduler)
    lora = lora_config.resolve(options, model, parallel, scheduler, available)
    config = EngineConfig(
        model=model, parallel=parallel, cache=cache, scheduler=scheduler, graphs=graphs, media=media, lora=lora
    )
    return replace(config, kv_events=kv_events_config.resolve(options, config))


@contextlib.contextmanager
def _named(own: EngineOptions, options: EngineOptions) -> Iterator[None]:
    """Say whose layout the text of a `ConfigError` is about, if replicas have several."""
    try:
        yield
    except ConfigError as error:
        if parallel_config.layout(own) == parallel_config.layout(parallel_config.for_decode(options)):
            raise
        named = ConfigError(f"of the --prefill-replicas: {error}")
        for note in getattr(error, "__notes__", ()):
            named.add_note(note)
        raise named from None


def _with_cache(options: EngineOptions, config: EngineConfig, available: Devices) -> EngineConfig:
    """Return the configuration with what fits into memory."""
    kv_store_config.check_size(config)
    try:
        config = memory_plan.with_cache(config, available)
    except ConfigError as error:
        if config.model.load_format == "dummy":
            error.add_note(plan_text(config))
        raise
    blocks = config.cache.num_blocks
    if blocks and options.max_num_seqs > max(blocks, EngineOptions.max_num_seqs):
        raise ConfigError(
            f"--max-num-seqs {options.max_num_seqs} is more than the {blocks} blocks of the KV cache, and each running "
            f"request holds at least one; use at most {blocks}"
        )
    return config


def fetch_weights(options: EngineOptions, config: EngineConfig) -> None:
    """Check that the weights are complete and fit the model; downloads them from a Hugging Face repository.

    Separate from `resolve`, so that everything else is checked, and the plan printed, before a large download,
    which shows a progress bar.
    """
    _fetch_weights(options, config.model)
    speculative = config.scheduler.speculative
    if speculative is not None and speculative.model is not None:
        if speculative.method != "mtp":  # its head is in the model's checkpoint
            options = speculative_config.drafter_options(options, config.model)
        _fetch_weights(options, speculative.model)


def _fetch_weights(options: EngineOptions, model: ModelConfig) -> None:
    if (load_format := model.load_format) != "dummy":
        if load_format == "gguf":
            return checkpoint_tensors.check_model(model, gguf_folder.headers(model.path))
        pooler = model.pooling
        inner = [dense.folder for dense in pooler.dense if dense.folder] if pooler is not None else []
        model_files.fetch_weights(options.model, options.revision, options.download_dir, model.path, load_format, inner)
        for folder in ("", *inner):
            headers = model_files.check_weights(model.path / folder, load_format)
            if headers is not None and not folder and not isinstance(model.architecture, TransformersModelSpec):
                checkpoint_tensors.check_model(model, headers)


def shared_settings(options: EngineOptions, config: EngineConfig) -> dict[str, str]:
    """Return the settings that must be the same on every host: value by flag, resolved where the flag's value may be
    automatic.

    A host without replicas resolves for no device, and has no values that depend on it. A length that depends on the
    memory is not compared: it follows from the number of KV blocks (`EngineConfig.with_blocks`).
    """
    model, parallel = config.model, config.parallel
    drafter = None if config.drafter is None else config.drafter.model.architecture
    prefill = parallel_config.for_prefill(options)
    resolved = {
        "runner": "generate" if model.pooling is None else "pooling",
        "pipeline_layer_partition": ",".join(
            str(len(layers)) for layers in parallel_config.partition_layers(model.architecture, options)
        ),
        "prefill_tensor_parallel_size": prefill.tensor_parallel_size,
        "prefill_pipeline_parallel_size": prefill.pipeline_parallel_size,
        "quantization": model.requested_quantization or (model.quantized and model.quantized.name),
        "max_model_len": "auto" if options.max_model_len == "auto" else model.position_len,
        "load_format": model.load_format,
        "spec_model": drafter and f"{drafter.name} with {drafter.num_layers} layers of {drafter.hidden_size}",
    }
    if parallel.nodes > 1:  # all ranks of a replica copy KV, or none
        resolved["kv_offloading_size"] = "unset" if config.kv_store is None else "set"
    of_the_device = {
        "device": parallel.device,
        "dtype": model.dtype,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "kv_cache_dtype": config.cache.dtype,
    }
    per_host = {field.name for field in dataclasses.fields(options) if field.metadata["is_per_host"]}
    if not options.enable_expert_parallel and options.nnodes == 1:
        # Independent replicas may be added and removed, unless they are nodes.
        per_host |= {"data_parallel_size", "prefill_replicas", "decode_replicas"}
    left_out = per_host | of_the_device.keys()
    settings = {name: value for name, value in vars(options).items() if name not in left_out} | resolved
    if parallel.local_replicas:
        settings |= of_the_device
    return {f"--{name.replace('_', '-')}": str(value) for name, value in settings.items()}


def _check_ranges(options: EngineOptions) -> None:
    for name, hint in typing.get_type_hints(EngineOptions).items():
        kinds = [kind for kind in (hint, *typing.get_args(hint)) if typing.get_origin(kind) is Literal]
        value = getattr(options, name)
        if kinds and isinstance(value, str) and value not in typing.get_args(kinds[0]):
            raise ConfigError(
                f"--{name.replace('_', '-')} must be one of {', '.join(typing.get_args(kinds[0]))}, got {value}"
            )
    for field in dataclasses.fields(options):
        low, value = field.metadata.get("least"), getattr(options, field.name)
        if low is None or value in (None, "auto", "off"):
            continue
        if not isinstance(value, int | float):
            raise ConfigError(f"--{field.name.replace('_', '-')} must be a number, got {value!r}")
        if not low <= value < math.inf:
            expected = f"at least {low}" if value < low else "finite"
            raise ConfigError(f"--{field.name.replace('_', '-')} must be {expected}, got {value}")
    if not -(1 << 63) <= options.seed < 1 << 63:
        raise ConfigError(f"--seed must be a 64-bit integer, got {options.seed}")
    if options.itl_target_ms is not None and not 0.0 < options.itl_target_ms < math.inf:
        raise ConfigError(f"--itl-target-ms must be above 0, got {options.itl_target_ms}")
    if not 0.0 < options.distributed_timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise ConfigError(
            f"--distributed-timeout-seconds must be above 0 and at most {MAX_TIMEOUT_SECONDS:g}, "
            f"got {options.distributed_timeout_seconds:g}"
        )
    if not MIN_WATCHDOG_SECONDS <= options.watchdog_seconds <= MAX_TIMEOUT_SECONDS:
        raise ConfigError(
            f"--watchdog-seconds must be at least {MIN_WATCHDOG_SECONDS:g}, as processes report every second, and at "
            f"most {MAX_TIMEOUT_SECONDS:g}, got {options.watchdog_seconds:g}"
        )
    if not 2.0 <= options.cluster_timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise ConfigError(
            f"--cluster-timeout-seconds must be at least 2, as heartbeats are sent every second, and at most "
            f"{MAX_TIMEOUT_SECONDS:g}, got {options.cluster_timeout_seconds:g}"
        )
    if not 0.0 < options.gpu_memory_utilization <= 1.0:
        raise ConfigError(
            f"--gpu-memory-utilization must be above 0 and at most 1, got {options.gpu_memory_utilization}"
        )


def _check_environment() -> None:
    for name, (pattern, expected) in _ENVIRONMENT.items():
        if (value := os.environ.get(name)) and not re.fullmatch(pattern, value):
            raise ConfigError(f"environment variable {name}={value}: expected {expected}")
