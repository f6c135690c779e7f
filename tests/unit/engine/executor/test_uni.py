"""The executor of one rank in the core's own process, with a scripted worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.executor.base import WorkerError
from quire.engine.executor.uni import UniExecutor
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.rank_state import RankState
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.scheduler_output import CachedRequestData, SchedulerOutput
from tests.fakes.configs import engine_config

FAILS, REFUSED, REFUSES = 13, 17, "refuses"
MEASURED = 77
"""KV blocks."""


class FakeStep:
    """A step whose result comes late."""

    def __init__(self, plan: SchedulerOutput, may_go: threading.Event) -> None:
        self._plan, self._may_go = plan, may_go

    def result(self) -> ModelRunnerOutput | None:
        assert self._may_go.wait(60)
        if self._plan.step == FAILS:
            raise ValueError("no such block")
        return ModelRunnerOutput(self._plan.step, [7] * self._plan.num_rows)


class FakeWorker:
    def __init__(self, config: EngineConfig, rank: int, init_method: str | None) -> None:
        if config.model.dtype == REFUSES:
            raise ConfigError("lm_head.weight is missing")
        self.seconds = {"load weights": 0.0}
        self.num_blocks = MEASURED
        self.may_go = threading.Event()
        self.launched: list[int] = []
        self.threads = {threading.current_thread().name}

    def launch(self, plan: SchedulerOutput) -> FakeStep:
        self.threads.add(threading.current_thread().name)
        self.launched.append(plan.step)
        if plan.step == REFUSED:
            raise ValueError("no such slot")
        return FakeStep(plan, self.may_go)

    @contextlib.contextmanager
    def count_step(self, state: RankState) -> Iterator[None]:
        yield
        state.steps += 1

    def discard_profile(self) -> None:
        self.threads.add(threading.current_thread().name)

    def close(self) -> None:
        self.may_go.set()


@pytest.fixture(autouse=True)
def _fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.worker.worker.Worker", FakeWorker)


@pytest.fixture
def executor() -> Iterator[UniExecutor]:
    running = UniExecutor(engine_config(depth=2))
    yield running
    worker_of(running).may_go.set()
    running.close()


def worker_of(executor: UniExecutor) -> FakeWorker:
    worker: object = executor._worker
    assert isinstance(worker, FakeWorker)
    return worker


def plan(step: int) -> SchedulerOutput:
    return SchedulerOutput(step, [], [], [CachedRequestData(0, 1, [], [])])


def test_plans_wait_for_one_another_and_nobody_for_them(executor: UniExecutor) -> None:
    steps = [executor.submit(plan(step), 60.0) for step in range(3)]  # returns although none can end
    worker_of(executor).may_go.set()
    assert [step.result().step for step in steps] == [0, 1, 2]
    assert worker_of(executor).launched == [0, 1, 2]
    assert worker_of(executor).threads == {"quire-rank-0"}  # loading too: a device belongs to a thread


def test_the_cache_is_as_large_as_the_rank_has_found(executor: UniExecutor) -> None:
    assert executor.config.cache.num_blocks == MEASURED


def test_what_a_step_raises_comes_out_of_its_result(executor: UniExecutor) -> None:
    good, bad = executor.submit(plan(FAILS - 1), 60.0), executor.submit(plan(FAILS), 60.0)
    worker_of(executor).may_go.set()
    assert good.result().step == FAILS - 1
    with pytest.raises(ValueError, match="no such block"):
        bad.result()
    with pytest.raises(ValueError, match="no such slot"):
        executor.submit(plan(REFUSED), 60.0).result()


def test_a_rank_that_hangs_is_named(executor: UniExecutor) -> None:
    with pytest.raises(WorkerError, match="rank 0 did not answer within 0 s"):
        executor.submit(SchedulerOutput(0, [], [], []), 0.0).result()


def test_one_plan_in_flight_needs_no_thread() -> None:
    executor = UniExecutor(engine_config(depth=1))
    worker_of(executor).may_go.set()
    assert executor.submit(plan(0), 60.0).result().step == 0
    assert worker_of(executor).threads == {threading.current_thread().name}
    assert [stats.steps for stats in executor.rank_stats()] == [1]
    executor.close()


def test_a_model_that_cannot_be_loaded_is_refused_from_the_thread_too() -> None:
    with pytest.raises(ConfigError, match="is missing"):
        UniExecutor(engine_config(depth=2, dtype=REFUSES))
