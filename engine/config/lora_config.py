"""Resolves what a server does with adapters (`EngineOptions` → `LoraConfig`). No torch."""

from __future__ import annotations

import math

from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import LayerSpec, TransformersModelSpec
from quire.engine.architecture.spec_parts import Parameter
from quire.engine.config import devices, parallel_config
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import DTYPE_BYTES, LoraConfig, ModelConfig, ParallelConfig, SchedulerConfig
from quire.engine.config.memory_plan import format_bytes
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError

_MAX_SLOTS = 64
"""Adapters that a step may mix, unless --max-loras is higher. Small ones are limited by this number, others by their
bytes."""
_HOST_BYTES = 4 << 30
"""Default of --lora-memory, if that is no more than `_HOST_SHARE` of the free memory."""
_HOST_SHARE = 0.1


def resolve(
    options: EngineOptions,
    model: ModelConfig,
    parallel: ParallelConfig,
    scheduler: SchedulerConfig,
    available: Devices,
) -> LoraConfig | None:
    """Return what the server does with adapters; None: requests have none. Raises `ConfigError`."""
    if not options.enable_lora:
        return None
    if isinstance(arch := model.architecture, TransformersModelSpec):
        raise ConfigError(f"--enable-lora is not supported for {arch.name} by transformers; use quire merge")
    if options.lora_memory == "auto":
        free = available.memory if available.kind == "cpu" else devices.free_host_memory()
        host_bytes = min(_HOST_BYTES, int(free * _HOST_SHARE))
    else:
        host_bytes = int(options.lora_memory * (1 << 30))
    ranks = parallel.num_local_ranks if parallel.placement is None else max(parallel.placement.all_ranks_per_node)
    return LoraConfig(
        num_slots=min(scheduler.max_num_seqs, max(_MAX_SLOTS, options.max_loras)),
        device_bytes=options.max_loras * adapter_bytes(model, parallel, options.max_lora_rank),
        host_bytes=host_bytes // max(1, ranks),
    )


def check_host(options: EngineOptions, available: Devices) -> None:
    """Check that this host, which has GPUs, has the memory that adapters may take; that of CPUs is planned."""
    is_described = available.capability is not None
    if not options.enable_lora or options.lora_memory == "auto" or is_described:
        return
    if options.lora_memory * (1 << 30) > (free := devices.free_host_memory()):
        raise ConfigError(
            f"--lora-memory {options.lora_memory:g} (GiB): the host has {format_bytes(free)} of free memory"
        )


def too_large(needed: int, reserved: int) -> str:
    """Why an adapter that needs so many bytes on a device cannot be used."""
    return (
        f"the adapter needs {format_bytes(needed)} on each device, where {format_bytes(reserved)} are reserved; use a "
        "higher --max-loras or --max-lora-rank"
    )


def no_room_to_pin(pinned: int, reserved: int) -> str:
    """Why another adapter cannot be pinned beside those that take so many bytes of a rank's host memory."""
    return (
        f"the adapter cannot be pinned: each rank keeps {format_bytes(reserved)} of adapters in the host's memory, of "
        f"which {format_bytes(pinned)} are pinned; unload some, or use a higher --lora-memory"
    )


def adapter_bytes(model: ModelConfig, parallel: ParallelConfig, rank: int) -> int:
    """Bytes on a device, on the stage with the most, of an adapter of this rank that changes all linear layers.

    A token chooses `top_k` experts, whose changes have the rank together (Schulman et al. 2025, "LoRA Without
    Regret").
    """
    arch = parallel_config.rank_spec(model.architecture, parallel)
    stages = (arch.held_layers(layers) for layers in parallel.stages)
    tp = parallel.tensor_parallel_size
    values = [sum(_values(layer, arch.hidden_size, tp, rank) for _, layer in stage) for stage in stages]
    tower = (each for each in arch.parameters_before() if each.module.startswith("tower.") and each.is_quantizable)
    values[0] += sum(_pool_values(each, tp, rank) for each in tower)
    return max(values) * DTYPE_BYTES[model.dtype]


def _values(layer: LayerSpec, hidden: int, tp: int, rank: int) -> int:
    """Values of the matrices A and B of a layer on a rank."""
    top_k = layer.feed_forward.top_k if isinstance(layer.feed_forward, MoESpec) else 1
    return sum(
        _pool_values(each, tp, math.ceil(rank / top_k) if each.number > 1 else rank)
        for each in layer.parameters(hidden)
        if each.is_quantizable
    )


def _pool_values(weight: Parameter, tp: int, rank: int) -> int:
    """The same of a linear layer, or of all experts: each part has its own matrices, as wide as the widest part's
    (`quire.kernels.LowRankPool`)."""
    shapes = [*weight.shapes(tp)]
    return weight.number * rank * len(shapes) * (shapes[0][1] + max(rows for rows, _ in shapes))
