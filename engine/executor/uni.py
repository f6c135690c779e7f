"""One rank, in the engine-core process itself."""

from __future__ import annotations

import time
from dataclasses import dataclass

from quire.engine.config import EngineConfig
from quire.engine.messages import StepPlan, StepResult


@dataclass(frozen=True)
class Done:
    """A step that ran inside `submit`."""

    step_result: StepResult

    def result(self) -> StepResult:
        return self.step_result


class UniExecutor:
    def __init__(self, config: EngineConfig) -> None:
        begun = time.perf_counter()
        from quire.engine.worker.worker import Worker

        imported = time.perf_counter()
        self._worker = Worker(config, rank=0, init_method=None)
        self.seconds = {"import torch": imported - begun, **self._worker.seconds}

    def submit(self, plan: StepPlan) -> Done:
        result = self._worker.execute(plan)
        assert result is not None
        return Done(result)

    def check(self) -> None:
        """The rank lives as long as this process."""

    def close(self) -> None:
        self._worker.close()
