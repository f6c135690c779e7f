"""All-reduce of the ranks on this host: shared memory compared with gloo, alternating in one run.

.venv/bin/python benchmarks/all_reduce.py --ranks 2 4

The floor of a size is the time in which every rank copies it twice, all ranks at once, measured in the same run: a rank
hands over the shares that the others sum, sums its own share, and takes the rest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire import kernels
from quire.engine.config.engine_config import ParallelConfig
from quire.engine.distributed.communicator import GroupParallel
from quire.engine.distributed.cpu_communicator import CpuParallel
from quire.engine.distributed.parallel_state import connect

SIZES = [1 << power for power in range(12, 23)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def microseconds(work: Callable[[Tensor], object], x: Tensor, calls: int) -> float:
    """Seconds per call over `calls` consecutive ones; all ranks start together."""
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        work(x)
    return (time.perf_counter() - begun) / calls * 1e6


def measure(rank: int, size: int, init_method: str, rounds: int, results: Connection) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    kernels.prepare("cpu")()
    grid = ParallelConfig(
        tensor_parallel_size=size, pipeline_parallel_size=1, stages=(range(1),), executor="mp", device="cpu"
    )
    links = connect(grid, rank, init_method, torch.device("cpu"), timedelta(seconds=60))
    links.tp.finalize()
    tp = links.tp
    if not isinstance(tp, CpuParallel) or tp.memory is None:
        raise SystemExit("the ranks do not share memory; is a C++ compiler installed?")
    rows = []
    for name, dtype in DTYPES.items():
        for length in SIZES:
            x = torch.zeros(length // dtype.itemsize, dtype=dtype)
            out = torch.empty_like(x)
            ways: dict[str, Callable[[Tensor], object]] = {
                "copy": out.copy_,
                "gloo": partial(GroupParallel.all_reduce, tp),
                "shared": tp.all_reduce,
            }
            calls = min(50, max(5, (1 << 22) // length))
            times: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(rounds + 1):
                for way, work in ways.items():
                    spent = microseconds(work, x, calls)
                    if turn:
                        times[way].append(spent)
            medians = {way: statistics.median(spent) for way, spent in times.items()}
            rows.append({"ranks": size, "dtype": name, "bytes": length, **medians})
    if rank == 0:
        results.send(rows)
    links.close()


def run(size: int, rounds: int) -> list[dict[str, Any]]:
    """Rank 0's medians in µs for each type and size."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        init_method = (Path(folder) / "rendezvous").as_uri()
        processes = [
            spawn.Process(target=measure, args=(rank, size, init_method, rounds, sender), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            rows: list[dict[str, Any]] = receiver.recv()
        except EOFError:
            raise SystemExit("a rank ended early") from None
        for process in processes:
            process.join()
    for row in rows:
        row["floor"] = 2 * row.pop("copy")
        row["ratio"] = row["gloo"] / row["shared"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="medians in µs, and the ratio of gloo to shared memory")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rows = [row for size in options.ranks for row in run(size, options.rounds)]
    if options.json:
        return print(json.dumps(rows))
    print(f"{'ranks':>5} {'type':9} {'KiB':>5} {'gloo µs':>9} {'shared µs':>9} {'ratio':>6} {'floor µs':>9}")
    for row in rows:
        numbers = f"{row['gloo']:9.1f} {row['shared']:9.1f} {row['ratio']:6.2f} {row['floor']:9.1f}"
        print(f"{row['ranks']:5} {row['dtype']:9} {row['bytes'] >> 10:5} {numbers}")


if __name__ == "__main__":
    main()
