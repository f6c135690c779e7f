"""The ranks of a stage as threads of one process, for checks and tests."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from quire.engine.parallel.tensor import Parallel


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
