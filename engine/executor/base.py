"""The executor interface: `submit(plan)` starts a step, `result()` waits for it, in order."""

from __future__ import annotations

from typing import Protocol

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.scheduler_output import SchedulerOutput

STEP_TIMEOUT = 600.0
"""Maximum seconds of computation in a step; a single rank that takes longer counts as hung."""
HEARTBEAT_TIMEOUT = 15.0
"""The same for a heartbeat, which needs almost no computation."""
_TIMEOUT_MARGIN = 5.0
"""Seconds for a rank to report a collective that timed out (see `quire.engine.distributed.watchdog`), including what
its GPU computes before the collective."""


class WorkerError(RuntimeError):
    """A rank died, hung or failed; the text names the rank."""


def step_timeout(plan: SchedulerOutput, config: EngineConfig) -> float:
    """Return the seconds after which a step without a result counts as hung.

    The timeout is longer than that of collectives, because errors of collectives name the missing ranks, which the core
    cannot know.
    """
    parallel = config.parallel
    if plan.has_work is None:  # otherwise a step takes as long as the slowest replica's
        if not plan.num_rows:  # cuts of the network that the hosts survive only delay it
            return (
                max(HEARTBEAT_TIMEOUT, parallel.cluster_timeout + _TIMEOUT_MARGIN)
                if parallel.nodes > 1
                else (HEARTBEAT_TIMEOUT)
            )
        if parallel.world_size == 1:
            return STEP_TIMEOUT
    # On a GPU a step takes well below a second, and nothing else limits waiting inside CUDA graphs.
    return parallel.timeout + _TIMEOUT_MARGIN + (0.0 if parallel.device == "cuda" else STEP_TIMEOUT)


class StepFuture(Protocol):
    """A submitted step."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the result; raises `WorkerError`."""


class Executor(Protocol):
    """The ranks of one replica, loaded and ready."""

    config: EngineConfig
    """The final configuration, with the number of KV blocks that fits on every rank."""
    seconds: dict[str, float]
    """Duration of each phase of their start-up."""

    def submit(self, plan: SchedulerOutput) -> StepFuture:
        """Send a plan to every rank. Results must be taken in the same order."""

    def check(self) -> None:
        """Raise `WorkerError` if a rank has exited."""

    def close(self, reason: str = "") -> None:
        """Stop every rank; `reason` is the error after a failure."""
