"""How large the KV cache can be on a GPU: the largest step runs once, and what it leaves free is filled.

The budget is --gpu-memory-utilization of what was free before the rank touched the device. Out of it go, as measured,
the weights, the most that the largest step and its sampling hold beside them, and what no allocator of torch's knows of
(the CUDA context, kernels, libraries, communicators); and CUDA graphs, as estimated, since they are captured over the
cache. The part of the memory that the budget leaves out is the cushion for what is not measured. torch's allocator may
not take the last of it: what is not torch's (a kernel that is loaded late, a library's workspace) fails for good where
torch gives its cached memory back and tries again.

torch's allocator works with expandable segments, unless PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF says otherwise.
With segments of fixed size, steps of every size leave segments that fit no other step, and a cache that fills the
device has no room for that; expandable ones are a single range of addresses, of which pages are mapped as needed. In
torch 2.13 the pools of CUDA graphs have them, too; collectives of NCCL take such memory as any other as long as
buffers are not registered; and symmetric memory, as all pools with an allocator of their own, is made without them.

Ranks that share a device have equal shares of it. What its free memory tells is of all of them, and the driver does
not always say which process has how much (not in containers). So they read it together, while all are at rest, and
divide what none of their allocators knows of.
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
from quire.engine.config.options import DTYPE_BYTES, EngineConfig
from quire.engine.config.resolve import Sizes, human, limit_blocks
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.messages import SchedulerOutput
from quire.engine.worker import warm_up

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RESERVED_BYTES = 256 << 20
"""Bytes of the device that torch's allocator never takes."""


class MemoryMeter(Protocol):
    """What a rank knows of its device's memory, in bytes."""

    at_start: int
    """Free before the rank took any."""

    def free(self) -> int:
        """Not taken by anybody."""

    def reserved(self) -> int:
        """By torch's allocator, once it has given back what it only keeps."""

    def reset_peak(self) -> None:
        """Forget the peak."""

    def peak(self) -> int:
        """The most that torch's allocator has held since."""

    def keep_free(self, size: int) -> None:
        """From now on torch's allocator leaves so much of the device free."""


class CudaMemoryMeter:
    """Of an NVIDIA GPU. To be made before anything else uses the device, as that sets up torch's allocator."""

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
class MemoryReading:
    """A rank's memory, in bytes, with the largest step behind it and no KV cache yet."""

    replica: int
    rank: int
    at_start: int
    """Free before, or the rank's share of that."""
    budget: int
    weights: int
    """And what a step leaves behind for the next."""
    activations: int
    graphs: int
    others: int
    """Taken otherwise than by torch's allocator."""
    block_bytes: int
    """Of the KV cache."""
    fixed_blocks: int
    """Of --kv-cache-memory-bytes; 0: as many as there is room for."""
    other_ranks: int = 0
    """Of what is free with all this taken, what belongs to other ranks on the device."""

    @property
    def used(self) -> int:
        return self.weights + self.activations + self.graphs + self.others

    @property
    def num_blocks(self) -> int:
        """That there is room for; none where the fixed number does not fit."""
        if self.fixed_blocks:
            left = self.at_start - self.used - _RESERVED_BYTES
            return self.fixed_blocks if self.fixed_blocks * self.block_bytes <= left else 0
        return max(0, self.budget - self.used) // self.block_bytes

    def parts(self) -> str:
        graphs = f", CUDA graphs about {human(self.graphs)}" * (self.graphs > 0)
        return (
            f"weights {human(self.weights)}, activations {human(self.activations)} at most{graphs}, "
            f"CUDA and libraries {human(self.others)}"
        )


def fit(config: EngineConfig, rank: int, meter: MemoryMeter, run: Callable[[SchedulerOutput], object]) -> int:
    """The KV blocks that every rank of the replica has room for, all of which call this at once.

    The weights are loaded; `run` carries a plan out on a cache of one block. Raises `ConfigError` where the rest is too
    little for a request of full length, or for --kv-cache-memory-bytes.
    """
    own = measure(config, rank, meter, run)
    readings = [reading for reading in _all_gather_object(own) if reading.replica == own.replica]
    least = min(readings, key=lambda reading: reading.num_blocks)
    share = " for it" * (config.parallel.ranks_per_device > 1)
    where = f" on rank {least.rank}, beside {least.parts()} of the {human(least.at_start)} that were free{share}"
    if least.fixed_blocks and not least.num_blocks:
        raise ConfigError(
            f"--kv-cache-memory-bytes {config.options.kv_cache_memory_bytes} does not fit{where}; ask for less, "
            "lower --max-num-batched-tokens or --max-num-seqs, or use more ranks (-tp, -pp)"
        )
    num_blocks = limit_blocks(config, least.num_blocks, least.block_bytes, where)
    if rank == 0:
        cache = num_blocks * own.block_bytes
        logger.info(
            "of %s free%s at the start %s may be used: %s, KV cache %s in %s blocks%s; %s are left",
            human(own.at_start),
            share,
            human(own.budget),
            own.parts(),
            human(cache),
            f"{num_blocks:,}",
            f" (rank {least.rank} has no room for more)" * (least is not own and least.num_blocks < own.num_blocks),
            human(max(0, own.at_start - own.used - cache)),
        )
    meter.keep_free(_RESERVED_BYTES + own.other_ranks)
    if config.parallel.ranks_per_device > 1:
        dist.barrier()  # nobody takes memory before all have seen what is free
    return num_blocks


def measure(
    config: EngineConfig, rank: int, meter: MemoryMeter, run: Callable[[SchedulerOutput], object]
) -> MemoryReading:
    """Run the largest step, and read off what it took."""
    stage, sizes = config.parallel.stage_of(rank), Sizes.of(config)
    meter.reserved()
    meter.reset_peak()
    for plan in warm_up.largest_step(config):
        run(plan)
    peak = meter.peak()
    gc.collect()
    reserved = meter.reserved()
    at_start, others, other_ranks = _device_shares(config, rank, meter, reserved)
    # What other ranks send to the experts of this one depends on the tokens: these may have been kind.
    activations = max(peak - reserved, sizes.workspace if config.parallel.experts is not None else 0)
    return MemoryReading(
        replica=config.parallel.replica,
        rank=rank,
        at_start=at_start,
        budget=int(at_start * config.options.gpu_memory_utilization),
        weights=reserved,
        activations=activations + _extra_workspace(config),
        graphs=sizes.graphs,
        others=others,
        block_bytes=sizes.kv_block[stage],
        fixed_blocks=config.cache.num_blocks if config.options.kv_cache_memory_bytes is not None else 0,
        other_ranks=other_ranks,
    )


def _device_shares(config: EngineConfig, rank: int, meter: MemoryMeter, reserved: int) -> tuple[int, int, int]:
    """Of what was free at the start, of what no allocator of torch's has, and of what is free now that of others."""
    if config.parallel.ranks_per_device == 1:
        return meter.at_start, max(0, meter.at_start - meter.free() - reserved), 0
    dist.barrier()  # all have given back what they only kept
    device, free = config.parallel.device_of(rank), meter.free()
    reported = [each for each in _all_gather_object((device, meter.at_start, free, reserved)) if each[0] == device]
    _, starts, frees, helds = zip(*reported, strict=True)
    at_start, least = max(starts), min(frees)  # the first to look saw none of the others
    others = max(0, at_start - least - sum(helds)) // len(reported)
    share = at_start // len(reported)
    return share, others, max(0, free - (share - others - reserved))


def _extra_workspace(config: EngineConfig) -> int:
    """Bytes that attention holds more of a sequence of full length than of the longest in `warm_up.largest_step`."""
    model, tp = config.model, config.parallel.tensor_parallel_size
    arch = parallel_config.on_a_rank(model.architecture, config.parallel)
    warm_up_length = max(map(sum, warm_up.largest_rows(config)))
    more = (
        layer.attention.workspace(model.max_model_len, tp) - layer.attention.workspace(warm_up_length, tp)
        for layer in arch.layers
    )
    return max(0, *more) * DTYPE_BYTES[model.dtype]


def _all_gather_object(own: T) -> list[T]:
    """Of all ranks of the grid; a rank alone tells nobody."""
    if not dist.is_initialized():
        return [own]
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone
