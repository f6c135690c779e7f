"""Who runs the ranks. One narrow verb: `submit(plan)` now, `result()` later, in order."""

from __future__ import annotations

from typing import Protocol

from quire.engine.config.options import EngineConfig
from quire.engine.protocol.messages import ModelRunnerOutput, SchedulerOutput

STEP_TIMEOUT = 600.0
"""Seconds that a step may compute; a rank alone that takes longer counts as hung."""
HEARTBEAT_TIMEOUT = 15.0
"""The same for a plan without rows, which costs nothing."""
_LATER = 5.0
"""Seconds that ranks which give up an exchange have to say so (see `quire.engine.distributed.watchdog`), and in which a
GPU has computed what comes before it."""


class WorkerError(RuntimeError):
    """A rank died, hung or failed; the text names it."""


def step_timeout(plan: SchedulerOutput, config: EngineConfig) -> float:
    """Seconds after which a step that does not come back counts as hung.

    Ranks that wait for others give up before, whatever they have computed until then: their errors name the exchange
    and who was missing, where the core could only guess.
    """
    parallel = config.parallel
    if plan.has_work is None:  # else, rows or none, it takes as long as the longest of all replicas
        if not plan.num_rows:
            return HEARTBEAT_TIMEOUT
        if parallel.world_size == 1:
            return STEP_TIMEOUT
    # On a GPU a step takes well below a second, and nothing else bounds what waits inside CUDA graphs.
    return parallel.timeout + _LATER + (0.0 if parallel.device == "cuda" else STEP_TIMEOUT)


class StepFuture(Protocol):
    """A step under way."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it; raises `WorkerError`."""


class Executor(Protocol):
    """The ranks of one replica, loaded and ready."""

    config: EngineConfig
    """What it came to: the KV cache is as large as that of the rank with the least room for it."""
    seconds: dict[str, float]
    """Where their start-up time went."""

    def submit(self, plan: SchedulerOutput) -> StepFuture:
        """Hand a plan to every rank. Results are to be taken in the same order."""

    def check(self) -> None:
        """Raise `WorkerError` if a rank has ended."""

    def close(self, reason: str = "") -> None:
        """End every rank; `reason` is the trouble, if there was any."""
