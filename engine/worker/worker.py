"""The lifecycle of one rank: device, process groups, weights, then plans until shutdown."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import FrameType
from typing import NoReturn

import msgspec
import torch
from tqdm import tqdm

from quire import kernels
from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec, TransformersLayerSpec
from quire.engine.architecture.residual_spec import ConnectionSpec
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.distributed import parallel_state
from quire.engine.distributed.parallel_state import connect
from quire.engine.distributed.shm_broadcast import ShmBroadcast
from quire.engine.distributed.watchdog import CollectiveError
from quire.engine.layers.attention import attention_config
from quire.engine.layers.quantized import quantized_formats
from quire.engine.process import current_process, log
from quire.engine.process.supervisor import HEARTBEAT_SECONDS
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.profile import RankTrace, StartProfile, StopProfile
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.rank_state import RankState
from quire.engine.protocol.runner_output import EncoderOutput, ModelRunnerOutput, WorkerFailed, WorkerReady
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import LogRecord
from quire.engine.protocol.supervision import Reload, SetLogLevel
from quire.engine.worker.async_copies import AsyncOutput
from quire.engine.worker.heap import ActivationHeap, return_freed_memory
from quire.engine.worker.memory import CudaMemoryMeter, MemoryMeter
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.oom import REMEDY, is_out_of_memory
from quire.engine.worker.profiler import RankProfiler

logger = logging.getLogger(__name__)

_DISTRIBUTED = os.path.dirname(parallel_state.__file__)


class Worker:
    """A loaded rank. `init_method` is the rendezvous of the ranks (torch.distributed); a single rank needs none."""

    def __init__(self, config: EngineConfig, rank: int, init_method: str | None) -> None:
        parallel = config.parallel
        started = time.perf_counter()
        meter: MemoryMeter | None = None
        if parallel.device == "cpu":
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // parallel.num_local_ranks)))
            device = torch.device("cpu")
        else:
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's order, by which the devices were chosen
            device = torch.device("cuda", parallel.device_of(rank))
            meter = CudaMemoryMeter(device.index)
            torch.cuda.set_device(device)
        dtype = getattr(torch, config.model.dtype)
        formats, complete = quantized_formats(config), needs_all_kernels(config)
        wait_for_kernels = kernels.prepare(device, dtype, attention_config(config), formats, complete=complete)
        self._parallel_state = connect(parallel, rank, init_method, device, timedelta(seconds=parallel.timeout))
        connected, waited = time.perf_counter(), 0.0

        def ready() -> None:
            nonlocal waited
            begin = time.perf_counter()
            try:
                wait_for_kernels()
            except kernels.BackendUnavailable as error:
                raise ConfigError(str(error)) from error
            waited += time.perf_counter() - begin
            # Measures while nothing else runs, before CUDA graphs capture the chosen algorithms.
            self._parallel_state.finalize()

        if parallel.device == "cpu":
            ready()  # packing weights depends on the kernels
        self.on_report: Callable[[RankReport], None] = lambda report: None
        """Called, in any thread, with the answers to `AdapterPlan.prepared` and the ends of copies of `KVCopyPlan`."""
        return_freed_memory()
        try:
            self._runner = ModelRunner(
                config, rank, self._parallel_state, device, meter, ready, lambda report: self.on_report(report)
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"rank {rank} ran out of memory while loading and warming up the model: {error}; use more ranks (-tp, "
                f"-pp) or a smaller --dtype, or {REMEDY}"
            ) from None
        self.num_blocks = self._runner.num_blocks
        self._heap = ActivationHeap(MemoryPlan.of(config).workspace) if parallel.device == "cpu" else None
        self._rank, self._device = rank, device
        self._profiler: RankProfiler | None = None
        self.on_trace: Callable[[RankTrace], None] = lambda trace: None
        """Called, in another thread, with the trace of a profile."""
        self.post_receive = self._runner.post_receive
        self.is_asynchronous = parallel.device != "cpu"
        """Whether a step may still be running when `launch` returns."""
        # A pending NCCL receive would occupy a part of the GPU.
        self.posts_receives = self._runner.receives and parallel.device == "cpu"
        loaded = time.perf_counter()
        spent = self._runner.finalize()
        self.seconds = {
            "connect ranks": connected - started,
            "compile kernels": waited,
            "load weights": loaded - connected - waited,
            **spent,
        }

    def launch(self, plan: SchedulerOutput) -> AsyncOutput:
        """See `ModelRunner.launch`."""
        if plan.profile is not None:
            self._profile(plan.profile)
        with contextlib.nullcontext() if self._profiler is None else self._profiler.step(plan):
            launched = self._runner.launch(plan)
        if self._heap is not None:
            self._heap.limit()
        return launched

    def _profile(self, command: StartProfile | StopProfile) -> None:
        """Start or stop the profiler."""
        ended, self._profiler = self._profiler, None
        if isinstance(command, StartProfile):
            if ended is not None:  # nobody has asked for its trace
                ended.discard()
            self._profiler = RankProfiler(self._rank, command.options, self._device)
        elif ended is not None:
            ended.finish(command, self.on_trace)

    @contextlib.contextmanager
    def count_step(self, state: RankState) -> Iterator[None]:
        """Add the times of a step to `state`, on a CPU."""
        others = self._parallel_state
        begun, waited, communication = time.perf_counter(), others.waited, others.communication
        yield
        if not self.is_asynchronous:
            state.steps += 1
            state.seconds += time.perf_counter() - begun
            state.waited += others.waited - waited
            for group, (before, after) in enumerate(zip(communication, others.communication, strict=True)):
                state.communication[group] += after - before

    @property
    def is_ahead(self) -> bool:
        """See `ParallelState.is_ahead`."""
        return self._parallel_state.is_ahead

    def watch(self, report: Callable[[str], None]) -> None:
        """Call `report`, from another thread, if this rank's GPU waits in a collective for longer than the timeout."""
        self._parallel_state.watch(report)

    def discard_profile(self) -> None:
        """End a profile that runs, by the thread of the steps: torch would crash in another one."""
        ended, self._profiler = self._profiler, None
        if ended is not None:
            ended.discard()

    def close(self) -> None:
        self._runner.close()
        self._parallel_state.close()


def main(
    config: EngineConfig,
    rank: int,
    local_rank: int,
    init_method: str,
    plans: ShmBroadcast,
    states: ctypes.Array[RankState],
    results: Connection,
    reports_beside: Connection,
    log_level: str,
) -> None:
    """The main function of a worker process: reads `plans`, writes `results`, and updates its state for `LocalRanks`,
    which sends orders about the logs in the other direction of `results`. What is reported beside the steps
    goes to `reports_beside`.

    `local_rank` is the rank's index on this host.
    """
    started = current_process.age()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # handled by the process that started this one
    current_process.set_name(f"quire-rank-{rank}")
    state = states[local_rank]
    worker: Worker | None = None
    log.setup(log_level, f"rank {rank}")
    _end_with_parent(state, results, lambda: worker is not None and worker.is_ahead)
    tqdm.set_lock(threading.RLock())  # tqdm's default is a system semaphore, which a killed rank would leak
    reports = Reports(results, state)
    log.RECENT.keep = reports.send
    try:
        worker = Worker(config, rank, init_method)
        worker.on_trace = reports.send
        sending_beside = threading.Lock()

        def report_beside(report: RankReport) -> None:
            with sending_beside:
                reports_beside.send_bytes(msgspec.msgpack.encode(report))

        worker.on_report = report_beside
        worker.watch(lambda reason: _fail(rank, CollectiveError(reason), reports))
        reports.send(WorkerReady({"start processes": started, **worker.seconds}, worker.num_blocks))
        decode = msgspec.msgpack.Decoder(SchedulerOutput).decode
        finish: Callable[[int, AsyncOutput], None] = reports.finish
        if worker.is_asynchronous:
            finish = reports.in_thread(lambda error: _fail(rank, error, reports))
        for plan in read_plans(
            lambda: plans.read(local_rank), decode, worker.post_receive if worker.posts_receives else None
        ):
            reports.begin(plan.step)
            with worker.count_step(state):
                finish(plan.step, worker.launch(plan))
        reports.close()
        worker.discard_profile()
        worker.close()
    except Exception as error:
        _fail(rank, error, reports)


def needs_all_kernels(config: EngineConfig) -> bool:
    """Whether a rank needs CPU kernels that are not compiled first: for quantized weights, adapters, or layers of the
    model or of a drafter that are not known to be plain."""

    def is_plain(layer: LayerSpec) -> bool:
        attention, feed_forward = layer.attention, layer.feed_forward
        return (
            not isinstance(layer, TransformersLayerSpec)  # it may have experts
            and (isinstance(attention, AttentionSpec) and attention.indexer is None)
            and layer.state is None
            and (feed_forward is None or isinstance(feed_forward, MLPSpec))
            and not isinstance(layer.residual, ConnectionSpec)
        )

    layers = (layer for each in config.with_drafter for layer in each.model.architecture.layers)
    return bool(quantized_formats(config)) or config.lora is not None or not all(map(is_plain, layers))


def _fail(rank: int, error: Exception, reports: Reports) -> NoReturn:
    """Report the failure to the core and exit this process, from any thread."""
    if isinstance(error, ConfigError):
        failure = WorkerFailed(str(error), user_error=True)
    else:
        logger.error("rank %d failed:\n%s", rank, "".join(traceback.format_exception(error)))
        advice = f"; {REMEDY}" * is_out_of_memory(error)
        failure = WorkerFailed(f"{type(error).__name__}: {error}{advice}", user_error=False)
    reports.send(failure)
    os._exit(1)  # skips the clean-up of process groups, which would wait for ranks that may have died


class Reports:
    """Sends a rank's messages to the core. One thread finishes the steps in order, while another may start more."""

    def __init__(self, results: Connection, state: RankState) -> None:
        self._results, self._state = results, state
        self._encode = msgspec.msgpack.Encoder().encode
        self._sending, self._counting = threading.Lock(), threading.Lock()
        self._in_flight: deque[int] = deque()
        self._launched: SimpleQueue[tuple[int, AsyncOutput] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(
        self, message: WorkerReady | WorkerFailed | ModelRunnerOutput | EncoderOutput | LogRecord | RankTrace
    ) -> None:
        with self._sending:
            self._results.send_bytes(self._encode(message))

    def begin(self, step: int) -> None:
        """Record that a plan has arrived. Progress is measured on the oldest step in flight."""
        with self._counting:
            self._in_flight.append(step)
            self._state.progress = 2 * self._in_flight[0]

    def finish(self, step: int, launched: AsyncOutput) -> None:
        """Wait for a step, and send its result if this rank has one."""
        result = launched.result()
        with self._counting:
            assert self._in_flight.popleft() == step, "steps must finish in order"
            self._state.progress = 2 * self._in_flight[0] if self._in_flight else 2 * step + 1
        if result is not None:
            self.send(result)

    def in_thread(self, fail: Callable[[Exception], None]) -> Callable[[int, AsyncOutput], None]:
        """Return a version of `finish` that waits in a thread and calls `fail` with any exception."""

        def run() -> None:
            try:
                while (entry := self._launched.get()) is not None:
                    self.finish(*entry)
            except Exception as error:
                fail(error)

        self._thread = threading.Thread(target=run, daemon=True, name="results")
        self._thread.start()
        return lambda step, launched: self._launched.put((step, launched))

    def close(self) -> None:
        """Return when all steps are finished."""
        if self._thread is not None:
            self._launched.put(None)
            self._thread.join()


def read_plans(
    read: Callable[[], bytes],
    decode: Callable[[bytes], SchedulerOutput],
    post_receive: Callable[[SchedulerOutput], None] | None,
) -> Iterator[SchedulerOutput]:
    """The plans from `read`, until it returns an empty message. With `post_receive`, a thread reads ahead and calls it
    with each plan."""
    if post_receive is None:
        while message := read():
            yield decode(message)
        return
    plans: SimpleQueue[SchedulerOutput | BaseException | None] = SimpleQueue()

    def read_ahead() -> None:
        try:
            while message := read():
                plan = decode(message)
                post_receive(plan)
                plans.put(plan)
        except BaseException as error:
            plans.put(error)
        else:
            plans.put(None)

    threading.Thread(target=read_ahead, daemon=True, name="plans").start()
    while (plan := plans.get()) is not None:
        if isinstance(plan, BaseException):
            raise plan
        yield plan


def _end_with_parent(state: RankState, orders: Connection, is_ahead: Callable[[], bool]) -> None:
    """Exit this process as soon as the engine core's process ends, for whatever reason, or the fork server, without
    which the core cannot watch this one; until then, write heartbeats, and log as the core asks for.
    """
    parent, fork_server = multiprocessing.parent_process(), os.getppid()
    assert parent is not None

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):  # the core has ended
            while parent.is_alive() and os.getppid() == fork_server:
                state.heartbeat = time.monotonic()
                while orders.poll():
                    log_as_asked(orders.recv_bytes())
                frame = sys._current_frames().get(threading.main_thread().ident or 0)
                state.is_waiting = is_ahead() or is_in_collective(frame)
                parent.join(HEARTBEAT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def log_as_asked(order: bytes) -> None:
    """Log as an encoded `SetLogLevel` or `Reload` asks for."""
    match msgspec.msgpack.decode(order, type=SetLogLevel | Reload):
        case SetLogLevel(level):
            log.set_level(level)
            logger.debug("debug messages are shown")
        case Reload(config, level):
            log.reload(config, level)


def is_in_collective(frame: FrameType | None) -> bool:
    """Return whether a thread waits for other ranks, by its stack. `Parallel.is_ahead` tells for collectives through
    shared memory, which may also be replayed."""
    while frame is not None:
        folder, name = os.path.split(frame.f_code.co_filename)
        if folder == _DISTRIBUTED and name != "cpu_communicator.py":
            return True
        frame = frame.f_back
    return False
