"""Measures the most memory that loading takes in this process."""

from __future__ import annotations

import threading
from pathlib import Path

from quire import kernels
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.models.build import load
from quire.engine.worker.heap import return_freed_memory
from tests.fakes.model_logits import CPU, configure


def anonymous() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def measure(folder: Path, dtype: str, tp: int, is_spread: bool, quantization: str | None) -> tuple[int, int]:
    """Load rank 0; returns its bytes at most, and as planned. Pages of the checkpoint, which the system keeps and drops
    as it likes, are not the process's own."""
    config = configure(
        folder,
        dtype=dtype,
        tensor_parallel_size=tp,
        enable_expert_parallel=is_spread,
        max_model_len=32,
        quantization=quantization,
    )
    parallel = Parallel()
    parallel.size = tp
    kernels.prepare("cpu")()
    return_freed_memory()
    base, seen, is_over = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            seen.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    spread = config.parallel.experts
    group = None if spread is None else ExpertGroup(spread, parallel, ExpertCommunicator(), ExpertCommunicator())
    decoder = load(config, 0, parallel, CPU, experts=group)
    is_over.set()
    watcher.join()
    most = max(*seen, anonymous()) - base
    del decoder
    return most, MemoryPlan.of(config).weights[0]
