"""The time for which the core waits for a step: longer than the ranks wait for each other, as they can name the rank
that is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from quire.engine.config.engine_config import ExpertParallelConfig, ParallelConfig
from quire.engine.distributed import watchdog
from quire.engine.executor.base import STEP_TIMEOUT, step_timeout
from quire.engine.protocol.adapters import AdapterPlan
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.engine.protocol.scheduler_output import MediaPlan, SchedulerOutput
from tests.fakes.configs import engine_config

COMPUTES = {"cpu": STEP_TIMEOUT, "cuda": 1.0}
"""Maximum number of seconds before the exchange that another rank does not join."""
TELLS = watchdog._GRACE_SECONDS + watchdog._CHECK_SECONDS


def wait(plan: SchedulerOutput, predicted: float | None = None, **grid: Any) -> float:
    stages = tuple(range(stage, stage + 1) for stage in range(grid.get("pipeline_parallel_size", 1)))
    sizes: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "executor": "mp", "device": "cpu"}
    parallel = ParallelConfig(**(sizes | {"stages": stages} | grid))
    return step_timeout(plan, replace(engine_config(), parallel=parallel), predicted)


def plan(rows: int, has_work: bool | None = None) -> SchedulerOutput:
    return SchedulerOutput(0, [], [], [], decodes=list(range(rows)), has_work=has_work)


@pytest.mark.parametrize("timeout", [0.1, 4.0, STEP_TIMEOUT, 10 * STEP_TIMEOUT])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("rows", "grid"),
    [
        (1, {"tensor_parallel_size": 2}),
        (1, {"pipeline_parallel_size": 2}),
        (1, {"replicas": 2}),
        (0, {"replicas": 2}),
        (1, {"replicas": 2, "tensor_parallel_size": 2}),
    ],
)
def test_a_rank_that_waits_for_another_times_out_first(
    timeout: float, device: Literal["cpu", "cuda"], rows: int, grid: dict[str, Any]
) -> None:
    if "replicas" in grid:
        grid = grid | {"experts": ExpertParallelConfig()}
    step = plan(rows, has_work=True if "replicas" in grid else None)
    assert wait(step, timeout=timeout, device=device, **grid) > COMPUTES[device] + timeout + TELLS


def test_step_timeout_is_shorter_without_other_ranks() -> None:
    assert wait(plan(1), timeout=4.0) == STEP_TIMEOUT
    assert wait(plan(0), timeout=4.0, tensor_parallel_size=2) == 10.0
    dropping = SchedulerOutput(0, [], [], [], adapters=AdapterPlan(dropped=[bytes(32)]))
    assert wait(dropping, timeout=4.0) == STEP_TIMEOUT
    for cut in (2.0, 60.0):  # which the hosts survive
        assert wait(plan(0), tensor_parallel_size=2, nodes=2, cluster_timeout=cut) > cut
    assert wait(plan(1), timeout=4.0, tensor_parallel_size=2, device="cuda") < 20.0, "nothing else ends it there"


def test_a_large_image_may_take_long_on_a_cpu() -> None:
    """Until it is known how long images take."""
    step = plan(1)
    step.media = MediaPlan([MediaItem(bytes(16), "image", 0, 16_000, (MediaRun(0, 16_000),))])
    assert wait(step, timeout=4.0) == STEP_TIMEOUT + 16_000
    assert wait(step, 2.0) == pytest.approx(30.0)
    assert wait(step, timeout=4.0, tensor_parallel_size=2, device="cuda") < 20.0


def test_a_step_whose_duration_is_known_is_watched_closely() -> None:
    assert wait(plan(1), 0.02) == pytest.approx(10.2)
    assert wait(plan(1), 30.0, watchdog_seconds=5.0, tensor_parallel_size=2) == pytest.approx(305.0)
    several_hosts = wait(plan(1), 0.02, timeout=40.0, tensor_parallel_size=2, nodes=2)
    assert several_hosts > COMPUTES["cpu"] + 40.0, "connections between hosts may be interrupted"
