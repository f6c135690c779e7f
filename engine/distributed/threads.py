"""Ranks as threads of one process, for checks and tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import CompletedTransfer, ExpertCommunicator, Transfer


class ThreadParallel(Parallel):
    """Collectives over a shared list, with a barrier before and after each."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: list[Tensor]) -> None:
        self.rank, self.size, self._barrier, self._shared = rank, size, barrier, shared

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        self._shared[self.rank] = x.clone()
        self._barrier.wait(60)
        gathered = list(self._shared)
        self._barrier.wait(60)
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all_gather(x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all_gather(x), dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._all_gather(x)[0]


class ThreadExpertCommunicator(ExpertCommunicator):
    """Transfers through a shared list, with a barrier before and after each; they complete immediately."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: list[list[Tensor]]) -> None:
        self.rank, self.size, self._barrier, self._shared = rank, size, barrier, shared

    def start_all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Transfer:
        assert sum(sent) == len(x)
        self._shared[self.rank] = [part.clone() for part in x.split_with_sizes(list(sent))]
        self._barrier.wait(60)
        parts = [sent_parts[self.rank] for sent_parts in self._shared]
        self._barrier.wait(60)
        assert [len(part) for part in parts] == list(received)
        return CompletedTransfer(torch.cat(parts))

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        ones = [1] * self.size
        return self.all_to_all(torch.tensor([numbers] * self.size), ones, ones).tolist()
