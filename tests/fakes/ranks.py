"""The ranks of a stage as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from quire.engine.parallel import Parallel
from quire.engine.parallel.threads import ThreadParallel

T = TypeVar("T")


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
