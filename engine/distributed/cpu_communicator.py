"""Tensor parallelism on CPUs: through shared memory if all ranks are on this host, otherwise through gloo."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.distributed import symmetric_memory, watchdog
from quire.engine.distributed.communicator import UNLIMITED, GroupParallel
from quire.kernels.cpu import shared

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CpuParallel(GroupParallel):
    """The ranks of a gloo group. Invariant: either all of them have `memory`, or none has."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__(group)
        self._timeout = timeout.total_seconds()
        self.memory: Tensor | None = None
        """The shared segment, `[bytes]`; None: gloo is used."""
        self._own = shared.Header()
        self._headers = [self._own]
        """Headers of all ranks, if memory is shared."""

    def begin_step(self) -> None:
        self._own.has_met = 0
        self.context.begin_step()

    @property
    def waited(self) -> float:
        return self._own.waited * 1e-9 + self.context.waited

    @property
    def spent(self) -> float:
        return self._own.spent * 1e-9 + self.context.spent

    @property
    def is_ahead(self) -> bool:
        own = self._own.published
        return self.context.is_ahead or any(0 < (own - other.published) % 2**32 < 2**31 for other in self._headers)

    @property
    def supports_op_replay(self) -> bool:
        return self.memory is not None and self.context.supports_op_replay

    def finalize(self) -> None:
        """Switch to shared memory if all ranks have the compiled kernels and are on this host."""
        # A memfd has no name, so nothing is left behind when the ranks exit or crash.
        length = shared.segment_bytes(self.size)
        fd = _create(length) if self.rank == 0 and shared.available() else -1
        try:
            gathered = self._all_gather_object((symmetric_memory.host(), os.getpid(), fd, shared.available()))
            hosts = {host for host, *_ in gathered}
            reason, memory = "", None
            if len(hosts) > 1 or None in hosts:
                reason = "the ranks are not all on one host"
            elif not all(available for *_, available in gathered):
                reason = "not every rank has the compiled kernels"
            else:
                _, owner, number, _ = gathered[0]
                try:
                    memory = _map(Path(f"/proc/{owner}/fd/{number}"), length)
                except OSError as error:
                    reason = f"rank {self.rank} cannot map the memory: {error}"
            reason = next(filter(None, self._all_gather_object(reason)), "")
        finally:
            if fd >= 0:
                os.close(fd)
        self.memory = None if reason else memory
        if self.memory is not None:
            self._headers = shared.headers(self.memory, self.size)
            self._own = self._headers[self.rank]
        if self.rank == 0:
            log = logger.warning if reason else logger.debug
            log("collectives of a stage: %s", f"gloo, since {reason}" if reason else "shared memory")
        self.context.finalize()

    def _all_gather_object(self, own: T) -> list[T]:
        gathered: list[T] = [own] * self.size
        dist.all_gather_object(gathered, own, self._group)
        return gathered

    def wait_for_all(self) -> None:
        x = torch.zeros(1)
        if self.memory is None:
            self._count(self._patient_all_reduce, x)
        else:
            shared.all_reduce(self.memory, self.rank, self.size, UNLIMITED.total_seconds(), x)

    def _patient_all_reduce(self, x: Tensor) -> Tensor:
        options = dist.AllreduceOptions()
        options.timeout = UNLIMITED
        try:
            self._group.allreduce([x], options).wait()
        except RuntimeError as error:
            raise watchdog.collective_error("all_reduce", x, self._group, error) from error
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.memory is None or x.dtype not in shared.SUMMED:
            return self._count(super().all_reduce, x)
        x = x.contiguous()
        shared.all_reduce(self.memory, self.rank, self.size, self._timeout, x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if self.memory is None:
            return self._count(super().all_gather, x)
        return shared.all_gather(self.memory, self.rank, self.size, self._timeout, x.contiguous())

    def _count(self, collective: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a collective of gloo, all of which counts as waiting."""
        begun = time.perf_counter_ns()
        result = collective(x)
        spent = time.perf_counter_ns() - begun
        self._own.spent += spent
        self._own.waited += self._own.has_met * spent
        self._own.has_met = 1
        return result

    def broadcast(self, x: Tensor) -> Tensor:
        if self.memory is None:
            begun = time.perf_counter_ns()
            x = super().broadcast(x)
            self._own.spent += time.perf_counter_ns() - begun
            return x
        x = x.contiguous()
        shared.broadcast(self.memory, self.rank, self.size, self._timeout, x)
        return x


def _create(length: int) -> int:
    """Create an anonymous in-memory file of zeros; -1 if the system does not allow it."""
    try:
        fd = os.memfd_create("quire-collectives", os.MFD_CLOEXEC)
    except OSError:
        return -1
    os.ftruncate(fd, length)
    return fd


def _map(path: Path, length: int) -> Tensor:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(fd, length), dtype=torch.uint8)
    finally:
        os.close(fd)
