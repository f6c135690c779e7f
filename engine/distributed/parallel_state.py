"""Connects a rank to the other ranks of the grid."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from quire.engine.cluster.network import limit_all_retransmission
from quire.engine.config.engine_config import ParallelConfig
from quire.engine.distributed import watchdog
from quire.engine.distributed.communicator import HostStagedParallel, Parallel
from quire.engine.distributed.cpu_communicator import CpuParallel
from quire.engine.distributed.cuda_communicator import CudaParallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup, ProcessGroupExpertCommunicator
from quire.engine.distributed.link_store import LinkStore
from quire.engine.distributed.pipeline import Pipeline

_NCCL_EXTRA_TIMEOUT = timedelta(seconds=30)
"""How much later torch's own NCCL watchdog, which ends the process, fires than ours, whose report is more detailed."""


@dataclass(frozen=True)
class ParallelState:
    """A rank's connections: the ranks that share its layers, those that compute other tokens with the same weights, the
    previous and next stage, and the ranks that share its experts."""

    tp: Parallel
    pipeline: Pipeline
    experts: ExpertGroup | None = None
    """None: no expert parallelism; experts are sliced over the ranks of the stage."""
    timeout: timedelta = timedelta(minutes=30)
    store: LinkStore | None = None
    """The ranks' rendezvous if they are on several hosts."""
    pcp: Parallel = field(default_factory=Parallel)
    """The ranks of the stage that divide the tokens of a step with this one (prefill context parallelism)."""

    @property
    def waited(self) -> float:
        """Seconds for which a CPU has waited for other ranks; see `Parallel.waited`."""
        return self.tp.waited + self.pcp.waited + self.pipeline.waited

    @property
    def communication(self) -> tuple[float, ...]:
        """Seconds for which a CPU has communicated, including waiting, for each of `GROUPS`."""
        experts = 0.0 if self.experts is None else self.experts.dp.spent + self.experts.all_ranks.spent
        return self.tp.spent + self.pcp.spent, self.pipeline.spent, experts

    @property
    def is_ahead(self) -> bool:
        """Whether this rank has got further than another one of its stage; see `Parallel.is_ahead`."""
        return self.tp.is_ahead or self.pcp.is_ahead

    def begin_step(self) -> None:
        """See `Parallel.begin_step`."""
        self.tp.begin_step()
        self.pcp.begin_step()

    def finalize(self) -> None:
        """See `Parallel.finalize`."""
        self.tp.finalize()
        self.pcp.finalize()

    def watch(self, report: Callable[[str], None]) -> None:
        """Call `report`, from another thread, if a GPU waits in a collective for longer than the timeout."""
        if dist.is_initialized() and dist.get_backend() == "nccl":
            watchdog.watch(self.timeout.total_seconds(), report, watchdog.pending_on_gpu)

    def close(self) -> None:
        """Leave the process groups, after all pending sends have completed."""
        self.pipeline.drain()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.store is not None:
            self.store.close()


def connect(
    config: ParallelConfig,
    rank: int,
    init_method: str | None,
    device: torch.device,
    timeout: timedelta = timedelta(minutes=30),
) -> ParallelState:
    """Join the grid as `rank` of the configuration's replica; returns when all other ranks have joined.

    If replicas share experts, the grid has the ranks of all replicas, otherwise only this replica's. `init_method` is
    the same for all ranks: `file:///path` on one host, `tcp://host:port` of the leader of several (see `LinkStore`); a
    single rank needs none and creates no process group. `timeout` bounds every collective and message.
    """
    width, stages, tp_size = config.stage_ranks, config.pipeline_parallel_size, config.tensor_parallel_size
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
    store = None
    if init_method is not None and init_method.startswith("tcp://"):
        store, init_method = LinkStore(init_method, config.cluster_token, timeout), None
    timeouts = {"gloo": timeout, "nccl": timeout + _NCCL_EXTRA_TIMEOUT}
    dist.init_process_group(
        backend,
        init_method=init_method,
        store=store,
        world_size=world_size,
        rank=world_rank,
        timeout=timeouts[backend],
        device_id=device if backend == "nccl" else None,
    )
    pipeline.post_ahead()

    @cache
    def group_of(ranks: tuple[int, ...], among: str = backend) -> dist.ProcessGroup:
        """Create a group. All ranks create their groups in the same order."""
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

    def joined(tp: Parallel, pcp: Parallel, experts: ExpertGroup | None = None) -> ParallelState:
        if store is not None:
            limit_all_retransmission()
        return ParallelState(tp, pipeline, experts, timeout, store, pcp)

    of_stage = tuple(  # in each replica
        tuple(range(first, first + width)) for first in range(stage * width, world_size, config.world_size)
    )

    def stage_communicator(ranks: tuple[int, ...], *, is_custom: bool) -> Parallel:
        group = group_of(ranks)
        if backend == "nccl":
            return CudaParallel(group, device, is_custom)
        return CpuParallel(group, timeout) if device.type == "cpu" else HostStagedParallel(group)

    tp, pcp, own_stage = Parallel(), Parallel(), of_stage[replica]
    if tp_size > 1:
        first = config.pcp_rank_of(rank) * tp_size
        tp = stage_communicator(own_stage[first : first + tp_size], is_custom=config.custom_all_reduce)
        if (size := config.decode_context_parallel_size) > 1:
            first = position - position % size
            tp.context = stage_communicator(own_stage[first : first + size], is_custom=False)
    if config.prefill_context_parallel_size > 1:
        pcp = stage_communicator(own_stage[position::tp_size], is_custom=False)
    if config.experts is None:
        return joined(tp, pcp)
    dp, all_ranks = communicator(tuple(ranks[position] for ranks in of_stage)), communicator(sum(of_stage, ()))
    return joined(tp, pcp, ExpertGroup(config.experts, tp, dp, all_ranks))


def _backend(config: ParallelConfig, device: torch.device) -> str:
    """torch's backend for the collectives; NCCL does not support several ranks on one GPU."""
    return "nccl" if device.type == "cuda" and config.ranks_per_device == 1 else "gloo"
