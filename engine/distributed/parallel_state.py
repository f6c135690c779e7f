"""Joining a rank to the others of the grid."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from quire.engine.config.options import ParallelConfig
from quire.engine.distributed import watchdog
from quire.engine.distributed.communicator import HostStagedParallel, Parallel
from quire.engine.distributed.cpu_communicator import CpuParallel
from quire.engine.distributed.cuda_communicator import CudaParallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup, ProcessGroupExpertCommunicator
from quire.engine.distributed.pipeline import Pipeline

_NCCL_EXTRA_TIMEOUT = timedelta(seconds=30)
"""By how much torch's own watchdog over NCCL, which ends the process, comes later than ours, which says more."""


@dataclass(frozen=True)
class ParallelState:
    """What a rank is connected to: the ranks of its stage, the stages before and after, and who shares its experts."""

    tp: Parallel
    pipeline: Pipeline
    experts: ExpertGroup | None = None
    """None: experts are not spread, but sliced over the ranks of the stage."""
    timeout: timedelta = timedelta(minutes=30)

    def watch(self, report: Callable[[str], None]) -> None:
        """Have `report` called, by some thread, with what a GPU waits for longer than it should."""
        if dist.is_initialized() and dist.get_backend() == "nccl":
            watchdog.watch(self.timeout.total_seconds(), report, watchdog.pending_on_gpu)

    def close(self) -> None:
        """Leave the process groups, once what was sent has gone."""
        self.pipeline.drain()
        if dist.is_initialized():
            dist.destroy_process_group()


def connect(
    config: ParallelConfig,
    rank: int,
    init_method: str | None,
    device: torch.device,
    timeout: timedelta = timedelta(minutes=30),
) -> ParallelState:
    """Join the grid as `rank` of the configuration's replica; returns when the others of the grid have joined too.

    The grid is that of all replicas where they share experts, and otherwise this replica's. `init_method` is torch's
    (`tcp://host:port`, `file:///path`) and the same for all; a world of one needs none and starts no process group.
    `timeout` bounds every collective and message.
    """
    width, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    stage, position = config.stage_of(rank), config.tp_rank_of(rank)
    replicas = config.replicas if config.is_coupled else 1
    replica = config.replica if config.is_coupled else 0
    world_rank, world_size = replica * config.world_size + rank, replicas * config.world_size
    backend = _backend(config, device)
    transfer_device = device if backend == "nccl" else torch.device("cpu")
    pipeline = Pipeline(stage, stages, world_rank, width, device, transfer_device)
    if world_size == 1:
        single = Parallel()
        experts = (
            None
            if config.experts is None
            else ExpertGroup(config.experts, single, ExpertCommunicator(), ExpertCommunicator())
        )
        return ParallelState(single, pipeline, experts)
    if backend == "nccl":
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the flight recorder, which `watchdog.watch` reads
    timeouts = {"gloo": timeout, "nccl": timeout + _NCCL_EXTRA_TIMEOUT}
    dist.init_process_group(
        backend,
        init_method=init_method,
        world_size=world_size,
        rank=world_rank,
        timeout=timeouts[backend],
        device_id=device if backend == "nccl" else None,
    )

    @cache
    def group_of(ranks: tuple[int, ...], among: str = backend) -> dist.ProcessGroup:
        """All ranks make theirs in the same order."""
        if len(ranks) == world_size and among == backend:
            group = dist.group.WORLD
        else:
            group = dist.new_group(list(ranks), timeouts[among], among, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def communicator(ranks: tuple[int, ...]) -> ExpertCommunicator:
        if len(ranks) == 1:
            return ExpertCommunicator()
        return ProcessGroupExpertCommunicator(group_of(ranks), group_of(ranks, "gloo"))

    of_stage = tuple(  # in each replica
        tuple(range(first, first + width)) for first in range(stage * width, world_size, config.world_size)
    )
    tp = Parallel()
    if width > 1:
        group = group_of(of_stage[replica])
        if backend == "nccl":
            tp = CudaParallel(group, device, config.custom_all_reduce)
        else:
            tp = CpuParallel(group, timeout) if device.type == "cpu" else HostStagedParallel(group)
    if config.experts is None:
        return ParallelState(tp, pipeline, timeout=timeout)
    dp, all_ranks = communicator(tuple(ranks[position] for ranks in of_stage)), communicator(sum(of_stage, ()))
    return ParallelState(tp, pipeline, ExpertGroup(config.experts, tp, dp, all_ranks), timeout)


def _backend(config: ParallelConfig, device: torch.device) -> str:
    """Of torch's, for what is exchanged; NCCL does not take several ranks on one GPU."""
    return "nccl" if device.type == "cuda" and config.ranks_per_device == 1 else "gloo"
