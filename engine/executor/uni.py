"""The executor that runs a single rank in the engine-core process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from quire.engine.config.engine_config import EngineConfig
from quire.engine.executor.base import StepFuture, WorkerError
from quire.engine.executor.traces import send_trace
from quire.engine.executor.usage import UsageSampler
from quire.engine.process import current_process
from quire.engine.protocol.profile import TracePiece
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.rank_state import RankState
from quire.engine.protocol.runner_output import ModelRunnerOutput, RankOutput
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import RankStats
from quire.engine.protocol.supervision import LogLevel, Reload

if TYPE_CHECKING:
    from quire.engine.worker.async_copies import AsyncOutput

_CLOSE_TIMEOUT = 5.0
"""Seconds for the step in flight to finish when the executor is closed."""


@dataclass(frozen=True)
class FinishedStep:
    """A step that ran inside `submit`. A `Future` takes 5 µs more."""

    step_result: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.step_result


@dataclass(frozen=True)
class RunningStep:
    """A step launched by the rank's thread; `result` raises its errors."""

    future: Future[RankOutput]
    timeout: float

    def result(self) -> ModelRunnerOutput:
        try:
            result = self.future.result(self.timeout)
        except TimeoutError:
            if self.future.done():
                raise  # a TimeoutError of the step itself
            raise WorkerError(f"rank 0 did not answer within {self.timeout:.0f} s") from None
        assert isinstance(result, ModelRunnerOutput)
        return result


class UniExecutor:
    """Runs plans inside `submit`, or, if several plans can be in flight, in a thread that owns the rank.

    A second thread then waits for the device, while the first one launches the next step.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        with current_process.imports():  # of torch, unless this process was prepared
            from quire.engine.worker import IMPORT_SECONDS
            from quire.engine.worker.worker import Worker

        self._work: SimpleQueue[tuple[Callable[[], None], Future[Any]] | None] = SimpleQueue()
        self._launched: SimpleQueue[tuple[AsyncOutput, Future[RankOutput]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._state = RankState()
        load = partial(Worker, config, rank=0, init_method=config.parallel.init_method)
        if config.scheduler.depth == 1:
            self._worker = load()
        else:
            for run, name in (self._run, "quire-rank-0"), (self._finish, "quire-results"):
                self._threads.append(threading.Thread(target=run, daemon=True, name=name))
                self._threads[-1].start()
            loaded: Future[Worker] = Future()
            self._work.put((lambda: loaded.set_result(load()), loaded))
            self._worker = loaded.result()
        self.config = config.with_blocks(self._worker.num_blocks)
        parallel = config.parallel
        self.on_trace: Callable[[TracePiece], None] = lambda piece: None
        self.on_report: Callable[[RankReport], None] = lambda report: None
        self._worker.on_report = lambda report: self.on_report(report)
        self._worker.on_trace = lambda trace: send_trace(trace, parallel, self.on_trace)
        self._usage = UsageSampler([os.getpid()], [parallel.device_of(0)] if parallel.device == "cuda" else None)
        self.seconds = {"import torch": IMPORT_SECONDS, **self._worker.seconds}

    def submit(self, plan: SchedulerOutput, limit: float) -> StepFuture:
        if self._threads:
            future: Future[RankOutput] = Future()
            self._work.put((partial(self._launch, plan, future), future))
            return RunningStep(future, limit)
        with self._worker.count_step(self._state):
            result = self._worker.launch(plan).result()
        assert isinstance(result, ModelRunnerOutput)
        return FinishedStep(result)

    def check(self) -> None:
        """Do nothing: the rank lives as long as this process."""

    def rank_stats(self) -> list[RankStats]:
        """Return the stats of the rank."""
        return [self._state.stats(self._usage.usage[0])]

    def set_log_level(self, level: LogLevel) -> None:
        """Do nothing: the rank is in this process, which has the level already."""

    def reload_logs(self, message: Reload) -> None:
        """Do nothing, for the same reason."""

    def close(self, reason: str = "") -> None:
        """Stop the threads. A thread that hangs ends with the process."""
        self._usage.close()
        if not self._threads:
            self._worker.discard_profile()
        else:
            self._work.put((self._worker.discard_profile, Future()))
            self._work.put(None)
            deadline = time.monotonic() + _CLOSE_TIMEOUT
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        self._worker.close()

    def _launch(self, plan: SchedulerOutput, future: Future[RankOutput]) -> None:
        self._launched.put((self._worker.launch(plan), future))

    def _run(self) -> None:
        while (entry := self._work.get()) is not None:
            work, future = entry
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
        self._launched.put(None)

    def _finish(self) -> None:
        while (entry := self._launched.get()) is not None:
            launched, future = entry
            try:
                future.set_result(launched.result())
            except BaseException as error:
                future.set_exception(error)
