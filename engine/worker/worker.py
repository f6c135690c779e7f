"""One rank's life: device, groups, weights, then plans until the end."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

import msgspec
import torch

from quire.engine import log
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.messages import StepPlan, StepResult, WorkerFailed, WorkerReady
from quire.engine.parallel import connect
from quire.engine.ring import Ring
from quire.engine.worker.runner import Runner

logger = logging.getLogger(__name__)


class Worker:
    """A loaded rank. `init_method` is where the ranks meet (torch.distributed); a single rank needs none."""

    def __init__(self, config: EngineConfig, rank: int, init_method: str | None) -> None:
        parallel = config.parallel
        started = time.perf_counter()
        if parallel.device == "cpu":
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // parallel.world_size))
            device = torch.device("cpu")
        else:
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        self._links = connect(parallel, rank, init_method, device)
        connected = time.perf_counter()
        self._runner = Runner(config, rank, self._links, device)
        self.execute = self._runner.execute
        self.seconds = {"connect ranks": connected - started, "load weights": time.perf_counter() - connected}

    def close(self) -> None:
        self._links.close()


def main(
    config: EngineConfig,
    rank: int,
    init_method: str,
    plans: Ring,
    completed: ctypes.Array[ctypes.c_longlong],
    results: Connection,
    log_level: str,
) -> None:
    """A worker process: `plans` in, `results` out, `completed[rank]` is the last step run."""
    imported = time.time()
    _end_with_parent()
    log.setup(log_level, f"rank {rank}")
    encode = msgspec.msgpack.Encoder().encode
    try:
        worker = Worker(config, rank, init_method)
        results.send_bytes(encode(WorkerReady({"start processes": imported - _process_start(), **worker.seconds})))
        decode = msgspec.msgpack.Decoder(StepPlan).decode
        while message := plans.read(rank):
            plan = decode(message)
            result: StepResult | None = worker.execute(plan)
            completed[rank] = plan.step
            if result is not None:
                results.send_bytes(encode(result))
        worker.close()
    except ConfigError as error:
        results.send_bytes(encode(WorkerFailed(str(error), user_error=True)))
        sys.exit(1)
    except Exception as error:
        logger.error("rank %d failed:\n%s", rank, traceback.format_exc())
        results.send_bytes(encode(WorkerFailed(f"{type(error).__name__}: {error}", user_error=False)))
        sys.exit(1)


def _end_with_parent() -> None:
    """End this process as soon as the engine core does, however it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _process_start() -> float:
    """When this process was started, in seconds since the epoch."""
    with open("/proc/self/stat") as stat, open("/proc/stat") as system:
        ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
        boot = next(int(line.split()[1]) for line in system if line.startswith("btime"))
    return boot + ticks / os.sysconf("SC_CLK_TCK")
