"""Measures how large the KV cache can be on a GPU: runs the largest step once, and gives the cache the remaining
memory.

The budget is --gpu-memory-utilization of the memory that was free before the rank used the device. The budget covers,
as measured, the weights, the peak of the largest step including sampling, and memory outside torch's allocator (the
CUDA context, kernels, libraries, communicators); and, as estimated, the CUDA graphs, which are captured after the cache
is allocated. The memory outside the budget is a reserve for unmeasured uses. torch's allocator never takes the last
part of it: an allocation outside torch (a kernel that is loaded late, a library's workspace) fails permanently, where
torch frees cached memory and tries again.

torch's allocator uses expandable segments, unless PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF says otherwise. With
fixed-size segments, steps of each size leave segments that fit no other step, and a cache that fills the device leaves
no room for them. Expandable segments are one range of addresses whose pages are mapped as needed. In torch 2.13 the
pools of CUDA graphs use them, too. NCCL collectives accept such memory as long as buffers are not registered. Symmetric
memory, like every pool with its own allocator, does not use them.

Ranks on the same device get equal shares of it. The device's free memory reflects all of them, and the driver cannot
always attribute memory to processes (not in containers). Therefore the ranks read it together while all are idle, and
divide the memory that belongs to none of their allocators.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from quire.engine.config import devices, parallel_config
from quire.engine.config.engine_config import DTYPE_BYTES, EngineConfig
from quire.engine.config.memory_plan import MemoryPlan, format_bytes, length_text, limit_blocks
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker import warm_up

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RESERVED_BYTES = 256 << 20
"""Bytes of the device that torch's allocator never takes."""


class MemoryMeter(Protocol):
    """Reads the memory of a rank's device, in bytes."""

    at_start: int
    """Free memory before the rank took any."""

    def free(self) -> int:
        """Memory that no process uses."""

    def reserved(self) -> int:
        """Memory of torch's allocator, after it has released its unused cache."""

    def reset_peak(self) -> None:
        """Reset the peak."""

    def peak(self) -> int:
        """The maximum of torch's allocator since the last reset."""

    def keep_free(self, size: int) -> None:
        """Limit torch's allocator, from now on, so that `size` bytes of the device stay free."""


class CudaMemoryMeter:
    """The memory of an NVIDIA GPU. Create it before anything else uses the device, as it configures torch's
    allocator."""

    def __init__(self, number: int) -> None:
        self.at_start = devices.free_gpu_memory()[number]
        self._number = number
        if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._number)[0])

    def reserved(self) -> int:
        torch.cuda.synchronize(self._number)
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(self._number))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._number)

    def peak(self) -> int:
        torch.cuda.synchronize(self._number)
        return int(torch.cuda.max_memory_reserved(self._number))

    def keep_free(self, size: int) -> None:
        total = torch.cuda.mem_get_info(self._number)[1]
        limit = torch.cuda.memory_reserved(self._number) + max(0, self.free() - size)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), self._number)


@dataclass(frozen=True)
class MemoryProfile:
    """A rank's memory in bytes, after the largest step and without a KV cache."""

    replica: int
    rank: int
    at_start: int
    """Free memory at the start, or the rank's share of it."""
    budget: int
    weights: int
    """Including memory that a step keeps for the next one."""
    activations: int
    graphs: int
    non_torch: int
    """Used outside torch's allocator."""
    block_bytes: int
    """Size of a KV block."""
    fixed_blocks: int
    """From --kv-cache-memory-bytes; 0: as many as fit."""
    other_ranks: int = 0
    """The part of the remaining free memory that belongs to other ranks on the device."""

    @property
    def used(self) -> int:
        return self.weights + self.activations + self.graphs + self.non_torch

    @property
    def num_blocks(self) -> int:
        """Blocks that fit; 0 if the fixed number does not fit. A stage without a cache has room for any number."""
        if not self.block_bytes:
            return 1 << 62
        if self.fixed_blocks:
            left = self.at_start - self.used - _RESERVED_BYTES
            return self.fixed_blocks if self.fixed_blocks * self.block_bytes <= left else 0
        return max(0, self.budget - self.used) // self.block_bytes

    def parts(self) -> str:
        graphs = f", CUDA graphs about {format_bytes(self.graphs)}" * (self.graphs > 0)
        return (
            f"weights {format_bytes(self.weights)}, activations {format_bytes(self.activations)}{graphs}, "
            f"CUDA and libraries {format_bytes(self.non_torch)}"
        )


def determine_num_blocks(
    config: EngineConfig, rank: int, meter: MemoryMeter, run: Callable[[SchedulerOutput], object]
) -> int:
    """The number of KV blocks that fit on every rank of the replica. All ranks call this at the same time.

    The weights are loaded; `run` executes a plan on a cache of one block. Raises `ConfigError` if the remaining memory
    is too small for a request of full length, as far as that may not be reduced, or for --kv-cache-memory-bytes.
    """
    own = measure(config, rank, meter, run)
    readings = [reading for reading in _all_gather_object(own) if reading.replica == own.replica]
    least = min(readings, key=lambda reading: reading.num_blocks)
    share = " (this rank's share)" * (config.parallel.ranks_per_device > 1)
    at_start = format_bytes(least.at_start)
    where = f" on rank {least.rank}, in addition to {least.parts()}, in {at_start} free at the start{share}"
    if least.fixed_blocks and not least.num_blocks:
        raise ConfigError(
            f"--kv-cache-memory-bytes {config.cache.kv_cache_memory_bytes} does not fit{where}; lower it, "
            "lower --max-num-batched-tokens or --max-num-seqs, or use more ranks (-tp, -pp)"
        )
    num_blocks = limit_blocks(config, least.num_blocks, least.block_bytes, where)
    if rank == 0:
        if (model := config.with_blocks(num_blocks).model).max_model_len < config.model.max_model_len:
            logger.warning("%s", length_text(model))
        cache = num_blocks * own.block_bytes
        logger.info(
            "memory: %s free at the start%s, budget %s: %s, KV cache %s in %s blocks%s; %s left",
            format_bytes(own.at_start),
            share,
            format_bytes(own.budget),
            own.parts(),
            format_bytes(cache),
            f"{num_blocks:,}",
            f" (limited by rank {least.rank})" * (least is not own and least.num_blocks < own.num_blocks),
            format_bytes(max(0, own.at_start - own.used - cache)),
        )
    meter.keep_free(_RESERVED_BYTES + own.other_ranks)
    if config.parallel.ranks_per_device > 1:
        dist.barrier()  # no rank allocates before all have read the free memory
    return num_blocks


def measure(
    config: EngineConfig, rank: int, meter: MemoryMeter, run: Callable[[SchedulerOutput], object]
) -> MemoryProfile:
    """Run the largest step, and measure its memory."""
    stage, sizes = config.parallel.stage_of(rank), MemoryPlan.of(config)
    meter.reserved()
    meter.reset_peak()
    for plan in warm_up.largest_step(config):
        run(plan)
    peak = meter.peak()
    gc.collect()
    reserved = meter.reserved()
    at_start, others, other_ranks = _device_shares(config, rank, meter, reserved)
    # The rows that other ranks send to this rank's experts depend on the tokens; a real step may receive more.
    activations = max(peak - reserved, sizes.workspace if config.parallel.experts is not None else 0)
    return MemoryProfile(
        replica=config.parallel.replica,
        rank=rank,
        at_start=at_start,
        budget=int(at_start * config.cache.gpu_memory_utilization),
        weights=reserved,
        activations=activations + _extra_workspace(config) + sizes.media[stage] + sizes.adapters,
        graphs=sizes.graphs,
        non_torch=others,
        block_bytes=sizes.kv_block[stage],
        fixed_blocks=config.cache.num_blocks if config.cache.kv_cache_memory_bytes is not None else 0,
        other_ranks=other_ranks,
    )


def _device_shares(config: EngineConfig, rank: int, meter: MemoryMeter, reserved: int) -> tuple[int, int, int]:
    """This rank's shares of the memory free at the start and of the memory outside torch's allocators, and the memory
    that must stay free for other ranks."""
    if config.parallel.ranks_per_device == 1:
        return meter.at_start, max(0, meter.at_start - meter.free() - reserved), 0
    dist.barrier()  # all ranks have released their unused cache
    device, free = config.parallel.device_of(rank), meter.free()
    reported = [each for each in _all_gather_object((device, meter.at_start, free, reserved)) if each[0] == device]
    _, starts, frees, helds = zip(*reported, strict=True)
    at_start, least = max(starts), min(frees)  # the first rank to read it saw no other rank's memory
    others = max(0, at_start - least - sum(helds)) // len(reported)
    share = at_start // len(reported)
    return share, others, max(0, free - (share - others - reserved))


def _extra_workspace(config: EngineConfig) -> int:
    """Bytes that attention needs for a sequence of full length, beyond its memory for the longest sequence in
    `warm_up.largest_step`."""
    model, tp = config.model, config.parallel.tensor_parallel_size
    arch = parallel_config.rank_spec(model.architecture, config.parallel)
    warm_up_length = max(map(sum, warm_up.largest_rows(config)))
    more = (
        mixer.workspace(model.max_model_len, tp) - mixer.workspace(warm_up_length, tp)
        for layer in arch.layers
        for mixer in layer.mixers
    )
    return max(0, *more) * DTYPE_BYTES[model.dtype]


def _all_gather_object(own: T) -> list[T]:
    """The values of all ranks of the grid; a single rank gets its own."""
    if not dist.is_initialized():
        return [own]
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone
