"""Ranks as processes on this host: plans go out through a shared-memory ring, results come back by pipe.

The processes come from a fork server that has imported torch once, so that many start as quickly as one. Nothing of
the engine core is inherited by them, and no device is touched before they are apart.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.executor import WorkerError, patience
from quire.engine.messages import StepPlan, StepResult, WorkerFailed, WorkerReady
from quire.engine.ring import Ring

_GRACE = 1.0
"""Seconds to look for the rank that died first, once the first trouble shows: its neighbours complain too."""


class MpExecutor:
    """`tp × pp` worker processes of this host."""

    def __init__(self, config: EngineConfig, log_level: str, on_end: Callable[[], None]) -> None:
        from quire.engine.worker.worker import main

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["quire.engine.worker.worker"])
        # All ranks are on this host, whatever its name resolves to and whichever networks it has.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._config = config
        size = config.parallel.world_size
        self._ring = Ring(context, readers=size)
        self._progress = context.RawArray("q", [-1] * size)
        """What each rank has come to, written by the rank: 2 × step on receiving a plan, one more when it has run."""
        self._decoder: msgspec.msgpack.Decoder[WorkerReady | WorkerFailed | StepResult] = msgspec.msgpack.Decoder(
            WorkerReady | WorkerFailed | StepResult
        )
        self._encode = msgspec.msgpack.Encoder().encode
        self._pending: deque[MpPending] = deque()
        self._arrived: deque[WorkerReady | StepResult] = deque()
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._selector = selectors.DefaultSelector()
        with tempfile.TemporaryDirectory(prefix="quire-") as folder:
            init_method = (Path(folder) / "rendezvous").as_uri()
            try:
                for rank in range(size):
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(
                        target=main,
                        args=(config, rank, init_method, self._ring, self._progress, sender, log_level),
                        name=f"quire-rank-{rank}",
                        daemon=True,
                    )
                    process.start()
                    sender.close()
                    self._processes.append(process)
                    self._pipes.append(receiver)
                    self._selector.register(receiver, selectors.EVENT_READ, rank)
                    self._selector.register(process.sentinel, selectors.EVENT_READ, rank)
                self.seconds = self._wait_until_ready()
            except BaseException:
                self._kill()
                raise
        threading.Thread(target=self._watch, args=(on_end,), daemon=True, name="rank-watch").start()

    def _watch(self, on_end: Callable[[], None]) -> None:
        wait([process.sentinel for process in self._processes])
        on_end()

    def submit(self, plan: StepPlan) -> MpPending:
        # A rank that waits to hand a result over does not read plans, so results are taken in meanwhile.
        self._ring.write(self._encode(plan), while_waiting=lambda: self._poll(0))
        pending = MpPending(self, plan.step, patience(plan, self._config))
        self._pending.append(pending)
        return pending

    def close(self) -> None:
        """Ask every rank to end, and kill those that do not."""
        try:
            self._ring.write(b"", while_waiting=self.check)
        except WorkerError:
            return self._kill()
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def receive(self, step: int, timeout: float) -> StepResult:
        """The next result; raises `WorkerError` when a rank dies, fails or hangs instead."""
        if not self._arrived and not self._poll(timeout):
            late = [rank for rank, progress in enumerate(self._progress) if progress < 2 * step]
            unfinished = [rank for rank, progress in enumerate(self._progress) if progress < 2 * step + 1]
            raise WorkerError(f"{_ranks(late or unfinished)} did not answer within {timeout:.0f} s")
        message = self._arrived.popleft()
        assert isinstance(message, StepResult), f"unexpected {type(message).__name__}"
        return message

    def _poll(self, timeout: float | None) -> bool:
        """Take in what the ranks have sent, waiting for the first; False when nothing has come in time.

        Raises `WorkerError` when a rank has failed or ended, `ConfigError` when it could not load the model.
        """
        events = self._selector.select(timeout)
        taken = len(self._arrived)
        for key, _ in events:
            if isinstance(key.fileobj, Connection):
                try:
                    message = self._decoder.decode(key.fileobj.recv_bytes())
                except EOFError:
                    continue
                if not isinstance(message, WorkerFailed):
                    self._arrived.append(message)
                elif message.user_error:
                    raise ConfigError(message.reason)
                else:
                    raise WorkerError(self._blame(key.data, message.reason))
        if events and len(self._arrived) == taken:
            raise WorkerError(self._blame(events[0][0].data, None))
        return bool(events)

    def _wait_until_ready(self) -> dict[str, float]:
        slowest: dict[str, float] = {}
        for _ in self._processes:
            if not self._arrived:
                self._poll(None)
            message = self._arrived.popleft()
            assert isinstance(message, WorkerReady), f"unexpected {type(message).__name__}"
            slowest = max(slowest, message.seconds, key=lambda seconds: sum(seconds.values()))
        return slowest

    def check(self) -> None:
        """Raise `WorkerError` if a rank has ended."""
        self._poll(0)

    def _blame(self, rank: int, reason: str | None) -> str:
        """The text for a rank in trouble, naming the one that was killed rather than those that noticed.

        A rank whose neighbour vanishes fails too, or aborts inside the communication library.
        """
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline:
            for other, process in enumerate(self._processes):
                process.join(_GRACE / 20 / len(self._processes))
                if process.exitcode is not None and process.exitcode < 0 and -process.exitcode != signal.SIGABRT:
                    return f"rank {other} was killed by {signal.Signals(-process.exitcode).name}"
        if reason is not None:
            return f"rank {rank} failed: {reason}"
        return f"rank {rank} ended with exit code {self._processes[rank].exitcode}"

    def _kill(self) -> None:
        self._selector.close()
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        for pipe in self._pipes:
            pipe.close()


class MpPending:
    """A step under way; taking a later result first would be our own mistake."""

    def __init__(self, executor: MpExecutor, step: int, timeout: float) -> None:
        self._executor = executor
        self._step = step
        self._timeout = timeout

    def result(self) -> StepResult:
        assert self._executor._pending.popleft() is self
        result = self._executor.receive(self._step, self._timeout)
        assert result.step == self._step
        return result


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
