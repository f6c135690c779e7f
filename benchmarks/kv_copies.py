"""Copies between the KV cache of a rank and the arena of the KV store: bytes per second, and decode steps beside them.

.venv/bin/python benchmarks/kv_copies.py

The model has random weights in the shape of Qwen2.5-0.5B with a vocabulary of 32,000, or the shape in `--model`'s
config.json; one rank with one thread. Seconds of processor time are a thread's, which a busy machine changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from tensor_parallel import BLOCK, CONTEXT, SHAPE, requests

from quire.engine.config.engine_config import KVStoreConfig
from quire.engine.config.kv_layout import kv_layout
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.kv_store import KVCopied, KVCopy, KVCopyPlan
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.scheduler_output import CachedRequestData, SchedulerOutput
from quire.engine.worker.worker import Worker

BYTES = 1 << 28
"""Of the cache, and of the arena."""


ROWS = 4


class CopyingRank:
    """A rank that decodes, with an arena and copies between it and the blocks that steps do not use."""

    def __init__(self, folder: Path, dtype: Literal["float32", "bfloat16"]) -> None:
        options = EngineOptions(
            model=str(folder),
            load_format="dummy",
            device="cpu",
            dtype=dtype,
            block_size=BLOCK,
            max_model_len=2048,
            kv_cache_memory_bytes=BYTES,
        )
        config = replace(resolve(options), kv_store=KVStoreConfig(memory_bytes=BYTES))
        self._worker, self._reports = Worker(config, 0, None), SimpleQueue[RankReport]()
        self._worker.on_report = self._reports.put
        self._thread = next(each.native_id for each in threading.enumerate() if each.name == "kv-copies")
        (kind,) = kv_layout(config).kinds
        new = requests(ROWS, CONTEXT, CONTEXT + 256)
        self._first = 1 + max(block for request in new for block in request.block_ids)
        self.entry, self._count = kind.size, min(BYTES // kind.size, config.cache.num_blocks) - self._first
        self._arena, self._step, self._missing = os.memfd_create("arena"), 0, 0
        os.posix_fallocate(self._arena, 0, BYTES)
        self._launch(SchedulerOutput(0, [], new, [CachedRequestData(row, CONTEXT, [], []) for row in range(ROWS)]))

    def _launch(self, plan: SchedulerOutput) -> None:
        self._worker.launch(plan).result()

    def decode(self) -> float:
        """Processor seconds of a step."""
        begun, rows = time.thread_time(), [CachedRequestData(row, 1, [9], []) for row in range(ROWS)]
        self._launch(SchedulerOutput(0, [], [], rows))
        return time.thread_time() - begun

    def begin(self, *, stores: bool) -> None:
        """Begin to copy all blocks."""
        copies = [KVCopy(number, 0, number * self.entry, [self._first + number]) for number in range(self._count)]
        plan = KVCopyPlan(f"/proc/self/fd/{self._arena}")
        (plan.stores if stores else plan.loads).extend(copies)
        self._launch(SchedulerOutput(0, [], [], [], kv_copies=plan))
        self._missing += len(copies)

    def is_copying(self, *, wait: bool = False) -> bool:
        """Whether copies have not ended; or wait for their end."""
        while self._missing and (wait or not self._reports.empty()):
            report = self._reports.get()
            assert isinstance(report, KVCopied)
            assert not report.failed
            self._missing -= len(report.numbers)
        return self._missing > 0

    def rates(self, *, stores: bool) -> tuple[float, float]:
        """Gigabytes of a round of copies per second of processor time, and of the clock."""
        spent, begun = self._processor_seconds(), time.perf_counter()
        self.begin(stores=stores)
        self.is_copying(wait=True)
        size = self._count * self.entry / 1e9
        return size / (self._processor_seconds() - spent), size / (time.perf_counter() - begun)

    def _processor_seconds(self) -> float:
        return int(Path(f"/proc/self/task/{self._thread}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with a config.json")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="decode steps per round")
    options = parser.parse_args()
    assert options.rounds * options.steps * 2 < 256
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        rank = CopyingRank(options.model or Path(folder), options.dtype)
    for stores, name in ((True, "stores"), (False, "loads")):
        (first, _), *others = [rank.rates(stores=stores) for _ in range(options.rounds)]
        processor, clock = (statistics.median(column) for column in zip(*others, strict=True))
        print(f"{name:6} {processor:5.1f} GB per processor second, the first time {first:4.1f}; {clock:5.1f} GB/s")
    steps: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(options.rounds):
        for copies, seconds in steps.items():
            for number in range(options.steps):
                if copies and not rank.is_copying():
                    rank.begin(stores=number % 2 == 0)
                seconds.append(rank.decode())
            rank.is_copying(wait=True)
    alone, beside = (statistics.median(seconds) * 1e3 for seconds in steps.values())
    print(f"entries of {rank.entry:,} bytes; a step of {ROWS} rows: {alone:.1f} ms, beside copies {beside:.1f} ms")


if __name__ == "__main__":
    main()
