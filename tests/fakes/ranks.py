"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from quire.engine.config.engine_config import ExpertParallelConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.distributed.threads import ThreadExpertCommunicator, ThreadParallel

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Parallel], T], context: int = 1) -> list[T]:
    """The results of `work` on each of `size` ranks, run side by side without gradients. `context` successive ranks
    divide the tokens of the cache."""
    stage = _stage(size, context)
    return _side_by_side(size, lambda rank: work(stage[rank]), _barriers(stage))


def expert_groups(
    dp: int, tp: int, config: ExpertParallelConfig, context: int = 1
) -> tuple[list[ExpertGroup], list[threading.Barrier]]:
    """The expert groups of the ranks of a stage in `dp` replicas, and the barriers to break when one of the ranks
    fails. `context` successive ranks divide the tokens of the cache."""
    barriers: list[threading.Barrier] = []

    def peers(size: int) -> list[ExpertCommunicator]:
        if size == 1:
            return [ExpertCommunicator()]
        barriers.append(threading.Barrier(size))
        shared: list[list[Tensor]] = [[]] * size
        return [ThreadExpertCommunicator(rank, size, barriers[-1], shared) for rank in range(size)]

    stages = [_stage(tp, context) for _ in range(dp)]
    for stage in stages:
        barriers += _barriers(stage)
    columns, everyone = [peers(dp) for _ in range(tp)], peers(dp * tp)
    ranks = [(replica, position) for replica in range(dp) for position in range(tp)]
    groups = [
        ExpertGroup(config, stages[replica][position], columns[position][replica], everyone[replica * tp + position])
        for replica, position in ranks
    ]
    return groups, barriers


def on_replicas(dp: int, tp: int, config: ExpertParallelConfig, work: Callable[[ExpertGroup], T]) -> list[T]:
    """As `on_ranks`, for the ranks of a stage in replicas that share experts."""
    groups, barriers = expert_groups(dp, tp, config)
    return _side_by_side(dp * tp, lambda rank: work(groups[rank]), barriers)


def peers_of(size: int) -> list[Parallel]:
    """Ranks that communicate with each other alone."""
    return _stage(size)


def _stage(size: int, context: int = 1) -> list[Parallel]:
    if size == 1:
        return [Parallel()]
    barrier, shared = threading.Barrier(size), [torch.empty(0)] * size
    ranks: list[Parallel] = [ThreadParallel(rank, size, barrier, shared) for rank in range(size)]
    if context > 1:
        for first in range(0, size, context):
            for rank, own in zip(ranks[first : first + context], _stage(context), strict=True):
                rank.context = own
    return ranks


def _barriers(stage: list[Parallel]) -> list[threading.Barrier]:
    every = [group for rank in stage for group in (rank, rank.context)]
    return [each._barrier for each in every if isinstance(each, ThreadParallel)]


def _side_by_side(size: int, work: Callable[[int], T], barriers: list[threading.Barrier]) -> list[T]:
    def run(rank: int) -> T:
        with torch.no_grad():
            try:
                return work(rank)
            except BaseException:
                for barrier in barriers:
                    barrier.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error  # the one that the others broke off for
    return [future.result() for future in futures]
