"""The ranks of a stage as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from quire.engine.parallel import Parallel

T = TypeVar("T")


class ThreadParallel(Parallel):
    """Collectives over a list that the ranks share, a barrier before and after each."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: list[Tensor]) -> None:
        self.rank, self.size, self._barrier, self._shared = rank, size, barrier, shared

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._shared[self.rank] = x.clone()
        self._barrier.wait(60)
        everyone = list(self._shared)
        self._barrier.wait(60)
        return everyone

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._exchange(x)[0]


def on_ranks(size: int, work: Callable[[Parallel], T]) -> list[T]:
    """What `work` returns on each of `size` ranks, run side by side without gradients."""
    barrier, shared = threading.Barrier(size), [torch.empty(0)] * size

    def run(rank: int) -> T:
        with torch.no_grad():
            try:
                return work(ThreadParallel(rank, size, barrier, shared) if size > 1 else Parallel())
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error  # the one that the others broke off for
    return [future.result() for future in futures]
