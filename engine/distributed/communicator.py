"""Tensor parallelism: the ranks that share each layer."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.distributed import watchdog

UNLIMITED = timedelta(days=1)
"""Time to wait for a rank that computes, as long as the core lets it."""


class Parallel:
    """One rank among `size` that each have a part of every layer. This one is alone: its collectives do nothing."""

    rank: int = 0
    size: int = 1

    context: Parallel
    """Those of the ranks that divide the tokens of the same KV heads; alone, without decode context parallelism."""

    @property
    def waited(self) -> float:
        """Seconds for which a CPU has waited for other ranks to compute. Waiting in the first collective of a step does
        not count, as ranks need not start it at the same time, nor in broadcasts, for which rank 0 may have more to do.
        """
        return 0.0

    @property
    def spent(self) -> float:
        """Seconds for which a CPU has been in collectives, including waiting."""
        return 0.0

    @property
    def is_ahead(self) -> bool:
        """Whether this rank has got further than another one, for which it waits or soon will, as far as it can tell.
        May be read in any thread."""
        return False

    def begin_step(self) -> None:
        """Start a step, for `waited`."""

    @property
    def supports_op_replay(self) -> bool:
        """Whether a CPU's collectives are pure tensor operations, which op replay can record."""
        return self.size == 1

    def finalize(self) -> None:
        """Choose the transport, once it is known whether compiled kernels are available. Every rank calls this
        before its first step."""

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this. On CPUs, one of them may compute alone before it does, for which only
        the core's limit of a step allows the time, so the others wait without one. GPUs have none but that of their
        collectives, so this does nothing there."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, which may be overwritten."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x`, of the same shape, concatenated along the last dimension in the order of ranks."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`. All ranks pass a tensor of the same shape and type, which may be overwritten."""
        return x


Parallel.context = Parallel()


class GroupParallel(Parallel):
    """The ranks of a torch process group. Failures raise `watchdog.CollectiveError`, which names the missing ranks."""

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
    """The ranks of a gloo group whose tensors are on a GPU that several of them share: gloo gets copies on the host."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return super().all_reduce(x.cpu().contiguous()).to(x.device)

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x.cpu()).to(x.device)

    def broadcast(self, x: Tensor) -> Tensor:
        return super().broadcast(x.cpu().contiguous()).to(x.device)
