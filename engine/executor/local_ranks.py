"""Ranks as processes on this host: plans are sent by shared-memory broadcast, results come back through pipes,
which carry orders about the logs to them.

The processes are forked from a fork server that has imported torch once, so that many start as fast as one. They
inherit nothing from the engine core, and no device is used before the fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.shm_broadcast import ShmBroadcast
from quire.engine.executor.base import WorkerError
from quire.engine.executor.usage import UsageSampler
from quire.engine.process import log
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.profile import RankTrace
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.rank_state import RankState
from quire.engine.protocol.runner_output import EncoderOutput, ModelRunnerOutput, WorkerFailed, WorkerReady
from quire.engine.protocol.stats import LogRecord, RankStats
from quire.engine.protocol.supervision import LogLevel, Reload, SetLogLevel

_KILLED_TIMEOUT = 1.0
"""Seconds to look for the rank that died first after the first error, because its neighbours fail too."""

_EXITS = {
    -signal.SIGABRT: "aborted: see its last messages in the log above; NCCL's watchdog names the collective that other "
    "ranks did not join (NCCL_DEBUG=INFO shows the links)",
    255: "was lost: the fork server of the ranks has ended",
}
"""Meanings of exit codes. 255 is multiprocessing's; a rank itself exits with 0 or 1."""

FromRank = WorkerReady | WorkerFailed | ModelRunnerOutput | EncoderOutput | LogRecord | RankTrace


def _run(*arguments: Any) -> None:
    """Run a rank's process. Torch is imported only there, because the import blocks heartbeats for a while."""
    from quire.engine.worker.worker import main

    main(*arguments)


class RankFailed(WorkerError):
    """A rank of this host failed. The cause is certain if it was killed; otherwise another rank may be the cause."""

    def __init__(self, reason: str, *, is_certain: bool) -> None:
        super().__init__(reason)
        self.is_certain = is_certain


class LocalRanks:
    """Worker processes of some ranks of a replica."""

    def __init__(
        self, config: EngineConfig, ranks: range, init_method: str, log_level: str, on_end: Callable[[], None]
    ) -> None:
        """Start the processes without waiting until they have loaded the model (see `is_ready`).

        `on_end` is called, in any thread, as soon as one of them exits. `init_method` is torch.distributed's.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["quire.engine.executor.preload", __name__])
        self.ranks = ranks
        self.arrived: deque[ModelRunnerOutput] = deque()
        self.encoded: dict[int, EncoderOutput] = {}
        """By step: what the first rank has reported."""
        self.seconds: dict[str, float] = {}
        """Start-up durations of the slowest rank."""
        self.on_trace: Callable[[RankTrace], None] = lambda trace: None
        """Called by `poll` with the trace of a rank."""
        self.on_report: Callable[[RankReport], None] = lambda report: None
        """Called, in a thread of its own, with what a rank reports beside the steps."""
        self.num_blocks = 0
        """KV blocks of every rank, once all are loaded; 0: as configured."""
        self._loading = set(ranks)
        self._ring = ShmBroadcast(context, readers=len(ranks))
        self._states = context.RawArray(RankState, [(-1,)] * len(ranks))
        self._watchdog_seconds = config.parallel.watchdog_seconds
        self._checked_at = self._grace_until = time.monotonic()
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self._processes: dict[int, BaseProcess] = {}
        self._usage: UsageSampler | None = None
        self._pipes: list[Connection] = []
        self._report_pipes: list[Connection] = []
        """Pipes for `on_report`: nothing is read from the others while no step runs."""
        self._selector = selectors.DefaultSelector()
        try:
            for index, rank in enumerate(ranks):
                own, theirs = context.Pipe()
                report_pipe, their_reports = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run,
                    args=(
                        config,
                        rank,
                        index,
                        init_method,
                        self._ring,
                        self._states,
                        theirs,
                        their_reports,
                        log_level,
                    ),
                    name=f"quire-rank-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                their_reports.close()
                self._processes[rank] = process
                self._pipes.append(own)
                self._report_pipes.append(report_pipe)
                self._selector.register(own, selectors.EVENT_READ, rank)
                self._selector.register(process.sentinel, selectors.EVENT_READ, rank)
        except BaseException:
            self.kill()
            raise
        threading.Thread(target=self._watch, args=(on_end,), daemon=True, name="rank-watch").start()
        self._usage = UsageSampler(
            [process.pid or 0 for process in self._processes.values()],
            [config.parallel.device_of(rank) for rank in ranks] if config.parallel.device == "cuda" else None,
        )

    def _watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_report` until one of the ranks has ended."""
        sentinels, decode = [process.sentinel for process in self._processes.values()], msgspec.msgpack.decode
        while not {*sentinels} & {*(ready := wait([*sentinels, *self._report_pipes]))}:
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    self.on_report(decode(pipe.recv_bytes(), type=RankReport))
                except (EOFError, OSError):
                    self._report_pipes.remove(pipe)  # its rank is about to end
        on_end()

    def set_log_level(self, level: LogLevel) -> None:
        """Show log messages of at least this level in the ranks; they notice it within a second."""
        self._order(SetLogLevel(level))

    def reload_logs(self, message: Reload) -> None:
        """Let the ranks log as the message says; they notice it within a second."""
        self._order(message)

    def _order(self, message: SetLogLevel | Reload) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the rank has ended
                pipe.send_bytes(msgspec.msgpack.encode(message))

    @property
    def is_ready(self) -> bool:
        """Whether all ranks have reported that they are loaded."""
        return not self._loading

    @property
    def progress(self) -> list[int]:
        """Progress of each rank: 2 × step of the oldest plan in flight; if there is none, 2 × last step + 1."""
        return [state.progress for state in self._states]

    @property
    def waiting(self) -> list[int]:
        """The ranks that waited for others in a collective a moment ago."""
        return [rank for rank, state in zip(self.ranks, self._states, strict=True) if state.is_waiting]

    @property
    def stats(self) -> list[RankStats]:
        """The times and the usage of each rank."""
        assert self._usage is not None
        return [state.stats(usage) for state, usage in zip(self._states, self._usage.usage, strict=True)]

    def listen(self, fd: int, callback: Callable[[], None]) -> None:
        """Let `poll` also call `callback` when `fd` is readable; `poll` raises its exceptions."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def write(self, plan: bytes, while_waiting: Callable[[], object]) -> None:
        """Send an encoded plan to every rank; `while_waiting` is called repeatedly while the buffer is full."""
        self._ring.write(plan, while_waiting)

    def poll(self, timeout: float | None) -> bool:
        """Wait for messages of the ranks and handle them; returns False on a timeout.

        Raises `RankFailed` if a rank has failed or exited or sends no heartbeats, `ConfigError` if it could not load
        the model. Must be called every few seconds.
        """
        events = self._selector.select(timeout)
        ended: int | None = None
        is_message_received = False
        for key, _ in events:
            if callable(key.data):
                key.data()
            elif isinstance(key.fileobj, Connection):
                try:
                    message = self._decoder.decode(key.fileobj.recv_bytes())
                except EOFError:
                    ended = key.data
                    continue
                is_message_received = True
                match message:
                    case ModelRunnerOutput():
                        self.arrived.append(message)
                    case EncoderOutput(step):
                        self.encoded[step] = message
                    case LogRecord():
                        log.RECENT.records.append(message)
                    case RankTrace():
                        self.on_trace(message)
                    case WorkerReady(seconds, num_blocks):
                        self.num_blocks = num_blocks  # the same for all ranks of a replica
                        self._loading.discard(key.data)
                        self.seconds = slowest(self.seconds, seconds)
                    case WorkerFailed(reason, user_error=True):
                        raise ConfigError(reason)
                    case WorkerFailed(reason):
                        raise self._root_cause(key.data, reason)
            else:
                ended = key.data
        if ended is not None and not is_message_received:
            raise self._root_cause(ended, None)
        self._check_heartbeats()
        return bool(events)

    def _check_heartbeats(self) -> None:
        """Raise `RankFailed` if a rank has been silent for too long. Ranks may be silent while they load the model, and
        if this process was stopped, they probably were, too.
        """
        now = time.monotonic()
        late, self._checked_at = now - self._checked_at > self._watchdog_seconds / 2, now
        if late or self._loading:
            self._grace_until = now + self._watchdog_seconds
        if now > self._grace_until:
            silent = [
                rank
                for rank, state in zip(self.ranks, self._states, strict=True)
                if now - state.heartbeat > self._watchdog_seconds
            ]
            if silent:
                text = f"{ranks_text(silent)} did not respond for {self._watchdog_seconds:g} s (--watchdog-seconds)"
                raise RankFailed(text, is_certain=True)

    def killed(self, seconds: float) -> RankFailed | None:
        """Return the rank that was killed, waiting for up to `seconds`; None if there is none."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, process in self._processes.items():
                process.join(seconds / 20 / len(self._processes))
                if process.exitcode is not None and process.exitcode < 0 and -process.exitcode != signal.SIGABRT:
                    text = f"rank {rank} was killed by {signal.Signals(-process.exitcode).name}"
                    return RankFailed(text, is_certain=True)
            if time.monotonic() >= deadline:
                return None

    def _root_cause(self, rank: int, reason: str | None) -> RankFailed:
        """Return the error for a failed rank, or for the rank that was killed and caused the failure.

        If a rank dies, its neighbours fail too, or abort inside the communication library.
        """
        if (killed := self.killed(_KILLED_TIMEOUT)) is not None:
            return killed
        if reason is not None:
            return RankFailed(f"rank {rank} failed: {reason}{self._late_text(rank)}", is_certain=False)
        code = self._processes[rank].exitcode
        text = _EXITS.get(code or 0, f"ended with exit code {code}")
        return RankFailed(f"rank {rank} {text}{self._late_text(rank)}", is_certain=False)

    def _late_text(self, rank: int) -> str:
        """Return a text that names the ranks that have not reached the step of this rank."""
        progress = dict(zip(self.ranks, self.progress, strict=True))
        late = [other for other, position in progress.items() if position // 2 < progress[rank] // 2]
        return f" ({ranks_text(late)} had not reached that step)" if late else ""

    def close(self) -> None:
        """Stop every rank, and kill those that do not exit."""
        try:
            self.write(b"", while_waiting=lambda: self.poll(0))
        except (WorkerError, ConfigError):
            return self.kill()
        deadline = time.monotonic() + 5.0
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill every rank."""
        self._selector.close()
        if self._usage is not None:
            self._usage.close()
        for process in self._processes.values():
            process.kill()  # unlike os.kill, it may find that the process has ended
            process.join()
        for pipe in self._pipes:
            pipe.close()


def find_late_ranks(progress: dict[int, int], step: int, waiting: Collection[int] = ()) -> list[int]:
    """Return the ranks that delay a step: those that have not received its plan, or else those that have not run it.

    Ranks that are `waiting` for others are not named if some are not. Returns all ranks if each has launched the step
    on its GPU and none of the GPUs finishes.
    """
    late = [rank for rank, position in progress.items() if position < 2 * step]
    late = late or [rank for rank, position in progress.items() if position < 2 * step + 1] or list(progress)
    return [rank for rank in late if rank not in waiting] or late


def slowest(*seconds: dict[str, float]) -> dict[str, float]:
    """Return the start-up durations, by phase, with the largest sum."""
    return max(seconds, key=lambda each: sum(each.values()))


def ranks_text(ranks: list[int]) -> str:
    """rank 1, or ranks 1, 2"""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
