"""Executors whose ranks are processes; `MpExecutor` runs all ranks of a replica on this host."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.engine.config.engine_config import EngineConfig, ParallelConfig
from quire.engine.executor.base import POLL_SECONDS, WorkerError
from quire.engine.executor.local_ranks import LocalRanks, find_late_ranks, ranks_text
from quire.engine.executor.stragglers import StragglerDetector
from quire.engine.executor.traces import send_trace
from quire.engine.protocol.profile import RankTrace, TracePiece
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import RankStats
from quire.engine.protocol.supervision import LogLevel, Reload


@dataclass(frozen=True)
class PendingStep:
    """A step in flight. `receive` returns the next result, because results are taken in order."""

    receive: Callable[[int, float, bool], ModelRunnerOutput]
    step: int
    limit: float
    encodes: bool

    def result(self) -> ModelRunnerOutput:
        result = self.receive(self.step, self.limit, self.encodes)
        assert result.step == self.step, "results must be taken in the order of plans"
        return result


class ProcessExecutor:
    """Carries plans to ranks that are processes, and their results back. Subclasses start them."""

    config: EngineConfig
    seconds: dict[str, float]
    _ranks: LocalRanks
    """The ranks of this host."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._stragglers = StragglerDetector(parallel.tensor_parallel_size, self._name)
        self._encode = msgspec.msgpack.Encoder().encode
        self._has_stages = parallel.pipeline_parallel_size > 1
        self.on_trace: Callable[[TracePiece], None] = lambda piece: None
        self.on_report: Callable[[RankReport], None] = lambda report: None

    def submit(self, plan: SchedulerOutput, limit: float) -> PendingStep:
        encoded = self._encode(plan)
        self._send(encoded)
        # A rank that waits to send a result does not read plans, so results are received while writing.
        self._ranks.write(encoded, while_waiting=self.check)
        return PendingStep(self.receive, plan.step, limit, plan.encodes)

    def receive(self, step: int, limit: float, encodes: bool = False) -> ModelRunnerOutput:
        """Return the next result; raises `WorkerError` if a rank dies or fails, or if none makes progress for `limit`
        seconds. `encodes`: see `SchedulerOutput`.
        """
        deadline, position = time.monotonic() + limit, self._position()
        awaits_encoder = encodes and self._has_stages  # otherwise the first rank's result tells

        def has_arrived() -> bool:
            return bool(self._ranks.arrived) and (not awaits_encoder or step in self._ranks.encoded)

        while not has_arrived():
            self._poll(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            now, position_before = time.monotonic(), position
            if (position := self._position()) != position_before:
                deadline = now + limit
            elif now >= deadline and not has_arrived():
                raise WorkerError(f"{self._name(self._late_ranks(step))} did not answer within {limit:.0f} s")
        result = self._ranks.arrived.popleft()
        if awaits_encoder:
            result.encoding_failures = self._ranks.encoded.pop(step).failures
        return result

    def check(self) -> None:
        """Raise `WorkerError` if a rank has exited or been stopped."""
        while self._poll(0):
            pass

    def rank_stats(self) -> list[RankStats]:
        """Return the stats of all ranks, in order. Logs which of them are stragglers."""
        return self._stragglers.update(self._stats())

    def set_log_level(self, level: LogLevel) -> None:
        """Show log messages of at least this level in all processes of the ranks."""
        self._ranks.set_log_level(level)

    def reload_logs(self, message: Reload) -> None:
        """Let the ranks of this host log as the message says."""
        self._ranks.reload_logs(message)

    def close(self, reason: str = "") -> None:
        """Stop every rank, and kill those that do not exit; after a failure, kill all at once."""
        if reason:
            self._ranks.kill()
        else:
            self._ranks.close()

    def _on_rank_trace(self, trace: RankTrace) -> None:
        send_trace(trace, self.config.parallel, self.on_trace)

    def _send(self, plan: bytes) -> None:
        """Send a plan to other hosts."""

    def _poll(self, timeout: float | None) -> bool:
        """Wait for messages and handle them; returns False on a timeout. Raises `WorkerError` or `ConfigError`."""
        return self._ranks.poll(timeout)

    def _position(self) -> object:
        """Return a value that changes when a rank makes progress."""
        return self._ranks.progress

    def _late_ranks(self, step: int) -> list[int]:
        """Return the ranks that delay a step."""
        return find_late_ranks(dict(enumerate(self._ranks.progress)), step, self._ranks.waiting)

    def _stats(self) -> list[RankStats]:
        """Return the stats of all ranks, in order."""
        return self._ranks.stats

    def _name(self, ranks: list[int]) -> str:
        """Return a text that names ranks."""
        return ranks_text(ranks)


class MpExecutor(ProcessExecutor):
    """Runs `tp × pp` worker processes on this host."""

    def __init__(self, config: EngineConfig, log_level: str, on_end: Callable[[], None]) -> None:
        super().__init__(config.parallel)
        # All ranks are on this host, so gloo must not depend on its host name and networks.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with tempfile.TemporaryDirectory(prefix="quire-") as folder:
            init_method = config.parallel.init_method or (Path(folder) / "rendezvous").as_uri()
            self._ranks = LocalRanks(config, range(config.parallel.world_size), init_method, log_level, on_end)
            try:
                while not self._ranks.is_ready:
                    self._ranks.poll(POLL_SECONDS)
            except BaseException:
                self._ranks.kill()
                raise
        self._ranks.on_trace = self._on_rank_trace
        self._ranks.on_report = lambda report: self.on_report(report)
        self.config = config.with_blocks(self._ranks.num_blocks)
        self.seconds = self._ranks.seconds
