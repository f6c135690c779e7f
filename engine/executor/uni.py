"""One rank, in the engine-core process itself."""

from __future__ import annotations

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
        from quire.engine.worker.worker import Worker

        self._worker = Worker(config, rank=0, init_method=None)
        self.seconds = self._worker.seconds

    def submit(self, plan: StepPlan) -> Done:
        result = self._worker.execute(plan)
        assert result is not None
        return Done(result)

    def close(self) -> None:
        self._worker.close()
