"""The executor interface: `submit(plan)` starts a step, `result()` waits for it, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.profile import TracePiece
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import RankStats
from quire.engine.protocol.supervision import LogLevel, Reload

STEP_TIMEOUT = 600.0
"""Maximum seconds of computation in a step; a single rank that takes longer counts as hung."""
_SECONDS_PER_FEATURE = 1.0
"""The same for each feature of the images that a step encodes, at an unknown cost: less than a large tower needs on a
few cores, where the patches of a large image attend to each other."""
POLL_SECONDS = 1.0
"""Interval at which waiting executors look after their ranks."""
_SLOWER = 10.0
"""How many times longer than predicted a step may take, in addition to `--watchdog-seconds`."""
_TIMEOUT_MARGIN = 5.0
"""Seconds for a rank to report a collective that timed out (see `quire.engine.distributed.watchdog`), including its
GPU's computations before the collective."""


class WorkerError(RuntimeError):
    """A rank died, hung or failed; the text names the rank."""


def step_timeout(plan: SchedulerOutput, config: EngineConfig, predicted: float | None) -> float:
    """Return the seconds without progress after which a step counts as hung.

    `predicted` is the expected duration of the step in seconds, if known: a rank is watched closely only after it has
    run similar steps. Errors of collectives, which name the missing ranks, come earlier where ranks are on several
    hosts, as their connections are allowed to be interrupted.
    """
    parallel = config.parallel
    changes = plan.media, plan.adapters
    if plan.has_work is None and not plan.num_rows and changes == (None, None):  # a heartbeat computes almost nothing
        return parallel.watchdog_seconds + parallel.cluster_timeout * (parallel.nodes > 1)
    if predicted is None or parallel.nodes > 1 or parallel.is_coupled:
        # On a GPU a step takes well below a second, and nothing else limits waiting inside CUDA graphs.
        computation = 0.0
        if parallel.device != "cuda" or parallel.world_size == 1:
            features = 0 if plan.media is None else sum(item.num_features for item in plan.media.encoded)
            computation = STEP_TIMEOUT + features * _SECONDS_PER_FEATURE
        return computation + (parallel.timeout + _TIMEOUT_MARGIN) * (parallel.world_size > 1 or parallel.is_coupled)
    return parallel.watchdog_seconds + _SLOWER * predicted


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
    on_trace: Callable[[TracePiece], None]
    """Called, in any thread, with the ranks' traces after a `StopProfile`."""
    on_report: Callable[[RankReport], None]
    """Called, in any thread, whether or not steps run, with what each rank answers to `AdapterPlan.prepared`
    and `KVCopyPlan`."""

    def submit(self, plan: SchedulerOutput, limit: float) -> StepFuture:
        """Send a plan to every rank. Results must be taken in the same order.

        A step without progress for `limit` seconds counts as hung.
        """

    def check(self) -> None:
        """Raise `WorkerError` if a rank has exited or been stopped."""

    def rank_stats(self) -> list[RankStats]:
        """Return the stats of all ranks, in order.

        Logs which of them are stragglers, so it must be called every few seconds while steps run.
        """

    def set_log_level(self, level: LogLevel) -> None:
        """Show log messages of at least this level in all processes of the ranks, on other hosts, too."""

    def reload_logs(self, message: Reload) -> None:
        """Let the ranks of this host log as the message says; this process does already."""

    def close(self, reason: str = "") -> None:
        """Stop every rank; `reason` is the error after a failure."""
