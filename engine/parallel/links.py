"""Joining a rank to the others of the grid."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from quire.engine.config import ParallelConfig
from quire.engine.parallel.host import HostParallel
from quire.engine.parallel.pipeline import Pipeline
from quire.engine.parallel.tensor import GroupParallel, Parallel

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Links:
    """What a rank is connected to: the ranks of its stage, and the stages before and after."""

    tp: Parallel
    pipeline: Pipeline

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
) -> Links:
    """Join the grid as `rank`; returns when the others of the grid have joined too.

    `init_method` is torch's (`tcp://host:port`, `file:///path`) and the same for all; a world of one needs none and
    starts no process group. `timeout` bounds every collective and message.
    """
    width, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    stage = config.stage_of(rank)
    pipeline = Pipeline(stage, stages, rank, width, device)
    if config.world_size == 1:
        return Links(Parallel(), pipeline)
    dist.init_process_group(
        _BACKENDS[device.type],
        init_method=init_method,
        world_size=config.world_size,
        rank=rank,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if width == 1:
        return Links(Parallel(), pipeline)
    if stages == 1:
        group = dist.group.WORLD
    else:
        ranks = list(range(stage * width, (stage + 1) * width))
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    tp = HostParallel(group, timeout) if device.type == "cpu" else GroupParallel(group)
    return Links(tp, pipeline)
