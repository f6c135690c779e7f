"""Ranks as processes that take plans from pipes, and read ahead as workers do.

No transformers here: it imports slowly, and in every rank.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.parallel_state import connect
from quire.engine.protocol.runner_output import EncoderOutput, ModelRunnerOutput, RankOutput
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.worker import read_plans
from tests.fakes.processes import CONTEXT


def serve(config: EngineConfig, rank: int, init_method: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    links = connect(config.parallel, rank, init_method, cpu)
    runner = ModelRunner(config, rank, links, cpu)
    runner.finalize()
    for plan in read_plans(pipe.recv_bytes, pickle.loads, runner.post_receive if runner.receives else None):
        pipe.send(runner.launch(plan).result())
    links.close()


class Ranks:
    def __init__(self, config: EngineConfig, folder: Path) -> None:
        init_method = f"file://{folder}/rendezvous-{config.parallel.world_size}-{id(self)}"
        pipes = [CONTEXT.Pipe() for _ in range(config.parallel.world_size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            CONTEXT.Process(target=serve, args=(config, rank, init_method, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def send(self, plan: SchedulerOutput) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(plan))

    def receive(self) -> ModelRunnerOutput:
        """The result of a step, with the report of the first rank."""
        results: list[RankOutput] = [pipe.recv() for pipe in self._pipes]
        (found,) = [each for each in results if isinstance(each, ModelRunnerOutput)]
        for report in results:
            if isinstance(report, EncoderOutput):
                found.encoding_failures = report.failures
        return found

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.send(plan)
        return self.receive()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(b"")
        for process in self._processes:
            process.join(30)
            assert process.exitcode == 0
