"""The ranks of a whole grid as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from quire.engine.config.engine_config import EngineConfig, ExpertParallelConfig
from quire.engine.distributed.parallel_state import ParallelState
from quire.engine.distributed.pipeline import Pipeline
from quire.engine.executor.base import StepFuture
from quire.engine.protocol.profile import TracePiece
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import RankStats
from quire.engine.protocol.supervision import LogLevel, Reload
from quire.engine.worker.model_runner import ModelRunner
from tests.fakes.ranks import expert_groups, peers_of


class QueuePipeline(Pipeline):
    """Hidden states through queues, one before each stage."""

    def __init__(self, stage: int, size: int, queues: list[SimpleQueue[Tensor]]) -> None:
        self.stage, self.size, self._queues = stage, size, queues

    def send(self, message: Tensor) -> None:
        self._queues[self.stage + 1].put(message.clone())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, *, is_patient: bool = False) -> Tensor:
        message = self._queues[self.stage].get(timeout=60)
        assert (message.shape, message.dtype) == (shape, dtype)
        return message


class ThreadExecutor:
    """Loads as it is made, and runs each rank's plans in a thread."""

    on_trace: Callable[[TracePiece], None]
    on_report: Callable[[RankReport], None]

    def __init__(self, config: EngineConfig) -> None:
        self.config, parallel = config, config.parallel
        tp, pcp, stages = parallel.tensor_parallel_size, parallel.prefill_context_parallel_size, len(parallel.stages)
        self.seconds: dict[str, float] = {}
        self._plans: list[SimpleQueue[tuple[SchedulerOutput, Future[Any]] | None]] = []
        self._threads: list[threading.Thread] = []
        queues: list[list[SimpleQueue[Tensor]]] = [[SimpleQueue() for _ in range(stages)] for _ in range(tp * pcp)]
        for stage in range(stages):
            spread = parallel.experts or ExpertParallelConfig()
            groups = [
                group
                for _ in range(pcp)
                for group in expert_groups(1, tp, spread, parallel.decode_context_parallel_size)[0]
            ]
            columns = [peers_of(pcp) for _ in range(tp)]
            for rank, group in enumerate(groups):
                experts = None if parallel.experts is None else group
                pipeline = QueuePipeline(stage, stages, queues[rank])
                links = ParallelState(group.tp, pipeline, experts, pcp=columns[rank % tp][rank // tp])
                number, cpu = stage * tp * pcp + rank, torch.device("cpu")
                runner = ModelRunner(config, number, links, cpu, on_report=lambda report: self.on_report(report))
                plans: SimpleQueue[tuple[SchedulerOutput, Future[Any]] | None] = SimpleQueue()
                self._plans.append(plans)
                self._threads.append(threading.Thread(target=self._run, args=(runner, plans), daemon=True))
        for thread in self._threads:
            thread.start()
        self._last = (stages - 1) * tp * pcp

    @staticmethod
    def _run(runner: ModelRunner, plans: SimpleQueue[tuple[SchedulerOutput, Future[Any]] | None]) -> None:
        runner.finalize()
        while (entry := plans.get()) is not None:
            plan, future = entry
            try:
                future.set_result(runner.launch(plan).result())
            except BaseException as error:
                future.set_exception(error)
        runner.close()

    def submit(self, plan: SchedulerOutput, limit: float) -> StepFuture:
        futures: list[Future[Any]] = [Future() for _ in self._plans]
        for plans, future in zip(self._plans, futures, strict=True):
            plans.put((plan, future))
        return futures[self._last]

    def check(self) -> None:
        """Threads do not die."""

    def set_log_level(self, level: LogLevel) -> None:
        """The threads have the level of their process."""

    def reload_logs(self, message: Reload) -> None:
        """The threads log as their process does."""

    def rank_stats(self) -> list[RankStats]:
        return []

    def close(self, reason: str = "") -> None:
        for plans in self._plans:
            plans.put(None)
        for thread in self._threads:
            thread.join(60)
