"""Ranks as processes on this host: plans go out through a shared-memory ring, results come back by pipe.

The processes come from a fork server that has imported torch once, so that many start as quickly as one. Nothing of
the engine core is inherited by them, and no device is touched before they are apart.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from quire.engine.config.options import EngineConfig
from quire.engine.distributed.shm_broadcast import ShmBroadcast
from quire.engine.executor.base import WorkerError
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.messages import ModelRunnerOutput, WorkerFailed, WorkerReady

_GRACE = 1.0
"""Seconds to look for the rank that died first, once the first trouble shows: its neighbours complain too."""

_ABORTED = (
    "its last words are in the log above; those of NCCL's watchdog name the exchange that others did not come to "
    "(NCCL_DEBUG=INFO shows the links)"
)


def _run(*arguments: Any) -> None:
    """A rank's process. Torch is imported there alone: a process that does so gives no signs of life for a while."""
    from quire.engine.worker.worker import main

    main(*arguments)


@dataclass(frozen=True)
class LocalStepFuture:
    """A step under way. `receive` takes the next result that comes, as steps are asked for in their order."""

    receive: Callable[[int, float], ModelRunnerOutput]
    step: int
    timeout: float

    def result(self) -> ModelRunnerOutput:
        result = self.receive(self.step, self.timeout)
        assert result.step == self.step, "results are to be taken in the order of plans"
        return result


class RankFailed(WorkerError):
    """A rank of this host is in trouble; the cause is certain when it was killed, else it may lie with another."""

    def __init__(self, reason: str, *, is_certain: bool) -> None:
        super().__init__(reason)
        self.is_certain = is_certain


class LocalRanks:
    """Worker processes of some ranks of a replica."""

    def __init__(
        self, config: EngineConfig, ranks: range, init_method: str, log_level: str, on_end: Callable[[], None]
    ) -> None:
        """Start them, which does not wait until they are loaded (see `is_ready`).

        `on_end` is called, in some thread, as soon as one of them ends. All ranks of the grid meet at `init_method`.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["quire.engine.worker.worker", __name__])
        self.ranks = ranks
        self.arrived: deque[ModelRunnerOutput] = deque()
        self.seconds: dict[str, float] = {}
        """Of the slowest rank that is loaded."""
        self.num_blocks = 0
        """KV blocks of every rank, once all are loaded; 0: those of the configuration."""
        self._loading = set(ranks)
        self._ring = ShmBroadcast(context, readers=len(ranks))
        self._progress = context.RawArray("q", [-1] * len(ranks))
        """What each rank has come to, written by the rank: 2 × step of the oldest plan under way; when none is, one
        more than that of the last."""
        self._decoder: msgspec.msgpack.Decoder[WorkerReady | WorkerFailed | ModelRunnerOutput] = (
            msgspec.msgpack.Decoder(WorkerReady | WorkerFailed | ModelRunnerOutput)
        )
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: list[Connection] = []
        self._selector = selectors.DefaultSelector()
        try:
            for place, rank in enumerate(ranks):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run,
                    args=(config, rank, place, init_method, self._ring, self._progress, sender, log_level),
                    name=f"quire-rank-{rank}",
                    daemon=True,
                )
                process.start()
                sender.close()
                self._processes[rank] = process
                self._pipes.append(receiver)
                self._selector.register(receiver, selectors.EVENT_READ, rank)
                self._selector.register(process.sentinel, selectors.EVENT_READ, rank)
        except BaseException:
            self.kill()
            raise
        threading.Thread(target=self._watch, args=(on_end,), daemon=True, name="rank-watch").start()

    def _watch(self, on_end: Callable[[], None]) -> None:
        wait([process.sentinel for process in self._processes.values()])
        on_end()

    @property
    def is_ready(self) -> bool:
        """Whether `poll` has heard that all are loaded."""
        return not self._loading

    @property
    def progress(self) -> list[int]:
        """Of each rank, in their order: 2 × step of the oldest plan under way; when none is, one more than the last."""
        return list(self._progress)

    def listen(self, fd: int, callback: Callable[[], None]) -> None:
        """Have `poll` call this, too, when something can be read there; what it raises comes out of `poll`."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def write(self, plan: bytes, while_waiting: Callable[[], object]) -> None:
        """Hand an encoded plan to every rank; `while_waiting` is called now and then when they are far behind."""
        self._ring.write(plan, while_waiting)

    def poll(self, timeout: float | None) -> bool:
        """Take in what the ranks have sent, waiting for the first; False when nothing has come in time.

        Raises `RankFailed` when a rank has failed or ended, `ConfigError` when it could not load the model.
        """
        events = self._selector.select(timeout)
        ended: int | None = None
        has_news = False
        for key, _ in events:
            if callable(key.data):
                key.data()
                has_news = True
            elif isinstance(key.fileobj, Connection):
                try:
                    message = self._decoder.decode(key.fileobj.recv_bytes())
                except EOFError:
                    ended = key.data
                    continue
                has_news = True
                match message:
                    case ModelRunnerOutput():
                        self.arrived.append(message)
                    case WorkerReady(seconds, num_blocks):
                        self.num_blocks = num_blocks  # all ranks of a replica say the same
                        self._loading.discard(key.data)
                        self.seconds = max(self.seconds, seconds, key=lambda each: sum(each.values()))
                    case WorkerFailed(reason, user_error=True):
                        raise ConfigError(reason)
                    case WorkerFailed(reason):
                        raise self._blame(key.data, reason)
            else:
                ended = key.data
        if ended is not None and not has_news:
            raise self._blame(ended, None)
        return bool(events)

    def killed(self, seconds: float) -> RankFailed | None:
        """The rank that was killed, if there is one or comes to be one in this time."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, process in self._processes.items():
                process.join(seconds / 20 / len(self._processes))
                if process.exitcode is not None and process.exitcode < 0 and -process.exitcode != signal.SIGABRT:
                    text = f"rank {rank} was killed by {signal.Signals(-process.exitcode).name}"
                    return RankFailed(text, is_certain=True)
            if time.monotonic() >= deadline:
                return None

    def _blame(self, rank: int, reason: str | None) -> RankFailed:
        """The error for a rank in trouble, naming the one that was killed rather than those that noticed.

        A rank whose neighbour vanishes fails too, or aborts inside the communication library.
        """
        if (killed := self.killed(_GRACE)) is not None:
            return killed
        if reason is not None:
            return RankFailed(f"rank {rank} failed: {reason}{self._behind(rank)}", is_certain=False)
        code = self._processes[rank].exitcode
        words = f"ended with exit code {code}" if code != -signal.SIGABRT else f"aborted: {_ABORTED}"
        return RankFailed(f"rank {rank} {words}{self._behind(rank)}", is_certain=False)

    def _behind(self, rank: int) -> str:
        """Who has not come to the step that this one is at."""
        progress = dict(zip(self.ranks, self.progress, strict=True))
        late = [other for other, come_to in progress.items() if come_to // 2 < progress[rank] // 2]
        return f" ({ranks_text(late)} had not come to that step)" if late else ""

    def close(self) -> None:
        """Ask every rank to end, and kill those that do not."""
        try:
            self.write(b"", while_waiting=lambda: self.poll(0))
        except (WorkerError, ConfigError):
            return self.kill()
        deadline = time.monotonic() + 5.0
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every rank now."""
        self._selector.close()
        for process in self._processes.values():
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        for pipe in self._pipes:
            pipe.close()


def describe_late(progress: dict[int, int], step: int) -> list[int]:
    """The ranks that keep a step from its result: those that never took its plan, else those that have not run it.

    All, where each has handed it to its GPU and none of these comes to the end.
    """
    late = [rank for rank, come_to in progress.items() if come_to < 2 * step]
    return late or [rank for rank, come_to in progress.items() if come_to < 2 * step + 1] or list(progress)


def ranks_text(ranks: list[int]) -> str:
    """rank 1, or ranks 1, 2"""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
