"""The ranks that share each layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.distributed import watchdog


class Parallel:
    """One rank among `size` that hold a part of each layer. This one is alone: its collectives do nothing."""

    rank: int = 0
    size: int = 1

    @property
    def supports_op_replay(self) -> bool:
        """Whether a CPU's collectives are operations on tensors and nothing else, which a tape keeps."""
        return self.size == 1

    def finalize(self) -> None:
        """Choose how to talk, once it is known whether there are compiled kernels. Every rank calls it, then serves."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, which may be overwritten."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, all of one shape, joined along the last dimension in the order of ranks."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, of the shape and type of every rank's, which may be overwritten."""
        return x


class GroupParallel(Parallel):
    """The ranks of a torch process group. What fails raises `watchdog.ExchangeError`, which names who was missing."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self._group = group.rank(), group.size(), group

    def all_reduce(self, x: Tensor) -> Tensor:
        try:
            dist.all_reduce(x, group=self._group)
        except RuntimeError as error:
            raise watchdog.collective_error("all_reduce", x, self._group, error) from error
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        try:
            dist.all_gather(parts, x.contiguous(), group=self._group)
        except RuntimeError as error:
            raise watchdog.collective_error("all_gather", x, self._group, error) from error
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        try:
            dist.broadcast(x, group=self._group, group_src=0)
        except RuntimeError as error:
            raise watchdog.collective_error("broadcast", x, self._group, error) from error
        return x


class HostStagedParallel(GroupParallel):
    """The ranks of a gloo group whose tensors lie on a GPU that several of them share: gloo sees copies on the host."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return super().all_reduce(x.cpu().contiguous()).to(x.device)

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x.cpu()).to(x.device)

    def broadcast(self, x: Tensor) -> Tensor:
        return super().broadcast(x.cpu().contiguous()).to(x.device)
