"""The ranks that share a layer's experts: the ranks of one stage in all replicas. They exchange rows in uneven
numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.config.engine_config import ExpertParallelConfig
from quire.engine.distributed import watchdog
from quire.engine.distributed.communicator import Parallel


class Transfer(Protocol):
    """Rows in transit."""

    def wait(self) -> Tensor: ...


@dataclass(frozen=True)
class CompletedTransfer:
    """Rows that have arrived."""

    rows: Tensor

    def wait(self) -> Tensor:
        return self.rows


class ExpertCommunicator:
    """One rank among `size` that exchange rows; this one is alone. All ranks make the same calls in the same order.

    Rows are `[rows, columns]`, of any type, and any count may be 0.
    """

    rank: int = 0
    size: int = 1
    spent: float = 0.0
    """Seconds for which a CPU has started transfers and waited for them."""

    def start_all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Transfer:
        """Start an all-to-all: send the first `sent[0]` rows to rank 0, the next to rank 1, …; the result has the
        received rows in the same order."""
        return CompletedTransfer(x)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self.start_all_to_all(x, sent, received).wait()

    def start_all_gather(self, x: Tensor, counts: Sequence[int]) -> Transfer:
        """Start an all-gather of every rank's rows, in rank order; `counts` are their numbers."""
        return self.start_all_to_all(x.repeat(self.size, 1), [len(x)] * self.size, counts)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The sum of all ranks' rows for this one, where `x` has `counts[rank]` rows for each rank; in float32 and in
        rank order, so that it is deterministic."""
        mine = counts[self.rank]
        rows = self.all_to_all(x, counts, [mine] * self.size)
        first, *others = rows.view(self.size, mine, x.shape[1])
        total: Tensor = sum(others, start=first.float())
        return total.to(x.dtype)

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, the same number from each. Does not wait for a device."""
        return [list(numbers)]


class ProcessGroupExpertCommunicator(ExpertCommunicator):
    """The ranks of a torch process group; `host` is a CPU process group of the same ranks.

    If `group` is a gloo group, rows are copied through the host.
    """

    def __init__(self, group: dist.ProcessGroup, host: dist.ProcessGroup) -> None:
        self.rank, self.size, self._group, self._host = group.rank(), group.size(), group, host

    def start_all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Transfer:
        begun, device = time.perf_counter(), x.device
        x = (x.cpu() if dist.get_backend(self._group) == "gloo" else x).contiguous()
        rows = torch.empty((sum(received), x.shape[1]), dtype=x.dtype, device=x.device)
        # As bytes, since gloo does not support every type.
        work = dist.all_to_all_single(
            rows.view(torch.uint8), x.view(torch.uint8), list(received), list(sent), group=self._group, async_op=True
        )
        assert work is not None
        self.spent += time.perf_counter() - begun
        return PendingTransfer(work, rows, x, self._group, device, self)

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        all_ranks = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(self.size)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        begun = time.perf_counter()
        try:
            dist.all_gather(all_ranks, mine, group=self._host)
        except RuntimeError as error:
            raise watchdog.collective_error("all-gather of integers", mine, self._host, error) from error
        self.spent += time.perf_counter() - begun
        return [reported.tolist() for reported in all_ranks]


@dataclass(frozen=True)
class PendingTransfer:
    """Rows that a process group is transferring."""

    work: dist.Work
    rows: Tensor
    sent: Tensor
    """Kept alive until it is sent."""
    group: dist.ProcessGroup
    device: torch.device
    """The device of the result."""
    communicator: ExpertCommunicator
    """Counts the time."""

    def wait(self) -> Tensor:
        begun = time.perf_counter()
        try:
            self.work.wait()
        except RuntimeError as error:
            raise watchdog.collective_error("all-to-all of experts' rows", self.sent, self.group, error) from error
        self.communicator.spent += time.perf_counter() - begun
        return self.rows.to(self.device)


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that have the experts of this rank's layers: the `tp` ranks of its stage, in each of the `dp`
    replicas."""

    config: ExpertParallelConfig
    tp: Parallel
    dp: ExpertCommunicator
    """The ranks in the same position of each replica's stage, in the order of replicas."""
    all_ranks: ExpertCommunicator
    """All ranks of the group; `all_ranks.rank == rank`."""

    @property
    def rank(self) -> int:
        return self.dp.rank * self.tp.size + self.tp.rank

    @property
    def size(self) -> int:
        return self.dp.size * self.tp.size
