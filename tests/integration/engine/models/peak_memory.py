"""Prints the most memory that loading took in this process, and what the plan says of the rank's weights, in bytes.

Run as `python -m tests.integration.engine.models.peak_memory FOLDER DTYPE TP EXPERTS [QUANTIZATION]`, for rank 0;
EXPERTS is spread or sliced. Pages of the checkpoint, which the system keeps and drops as it likes, are not the
process's own.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from quire import kernels
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.models.loader import load
from quire.engine.worker.heap import return_freed_memory
from tests.fakes.model_logits import CPU, configure


def anonymous() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def main() -> None:
    folder, dtype, tp, experts, *quantization = sys.argv[1:]
    config = configure(
        Path(folder),
        dtype=dtype,
        tensor_parallel_size=int(tp),
        enable_expert_parallel=experts == "spread",
        max_model_len=32,
        quantization=(*quantization, None)[0],
    )
    parallel = Parallel()
    parallel.size = int(tp)
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
    sizes = MemoryPlan.of(config)
    print(max(*seen, anonymous()) - base, sizes.weights[0])
    del decoder


if __name__ == "__main__":
    main()
