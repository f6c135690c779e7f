"""Starts processes, watches them, and restarts processes that die or hang.

A supervised process runs `main` of a module (`quire.engine.process.supervised`). Its standard input is one end of a
pair of sockets, over which it receives its arguments (pickled), then `ToProcess` messages, and sends `FromProcess`
messages. Either side's end of file means that the other has exited, so a supervised process never outlives its
supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgspec

from quire.engine.protocol.supervision import (
    AdapterSeen,
    ChangeAdapter,
    Drained,
    Failed,
    FromProcess,
    Heartbeat,
    Ready,
    Resize,
    SetLogLevel,
    Shutdown,
    ToProcess,
)

HEARTBEAT_SECONDS = 1.0
_TICK_SECONDS = 0.1
"""Interval at which processes are checked."""
_EXIT_SECONDS = 12.0
"""Time for a process to exit after `Failed`, or after its connection has closed; a little more than an engine core
takes at most."""
_LOADING_EXIT_SECONDS = 1.0
"""The same for a process that is still starting, which has nothing to finish."""
_START_FACTOR = 12.0
"""A process that starts may be silent for this many times the usual limit: imports and loading block heartbeats."""

_READ_BYTES = 2**18
_HEADER = struct.Struct("!i")
"""The size of a message, as `multiprocessing.connection` sends it."""

logger = logging.getLogger(__name__)


class Process(Protocol):
    """A started process (`subprocess.Popen`), and the supervisor's end of its connection."""

    connection: Connection[bytes, bytes]

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def kill_session(self) -> None:
        """Kill the processes that it has left behind."""


class StartedProcess(subprocess.Popen[bytes]):
    """A process that leads a session (setsid(2)), and waits for its arguments when its imports are done."""

    connection: Connection[bytes, bytes]

    def give(self, args: Any) -> None:
        """Send the process its arguments."""
        self.connection.send_bytes(pickle.dumps(args))

    def kill_session(self) -> None:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                _, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
                if int(session) == self.pid:
                    os.kill(int(stat.parent.name), signal.SIGKILL)


def start_process(
    module: str, args: Any, *, pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None
) -> Process:
    """Start a module as a separate process (not a fork: the caller's `__main__` is not imported again)."""
    process = start_imports(module, pass_fds=pass_fds, env=env)
    process.give(args)
    return process


def start_imports(
    module: str, *others: str, pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None
) -> StartedProcess:
    """Start a process that imports the module, and others that it will need, before its arguments are known."""
    own, theirs = Pipe()
    # -P: imports nothing from the current folder.
    command = [sys.executable, "-P", "-m", "quire.engine.process.supervised", module, *others]
    with theirs:
        process = StartedProcess(
            command,
            stdin=theirs.fileno(),
            start_new_session=True,
            pass_fds=pass_fds,
            env=None if env is None else {**os.environ, **env},
        )
    process.connection = own
    return process


class SupervisorConnection:
    """A supervised process's connection to its supervisor. Messages may be sent from any thread."""

    def __init__(self) -> None:
        """Take over standard input, so that this process's own children do not inherit the connection."""
        self._connection: Connection[bytes, bytes] = Connection(os.dup(0))
        with open(os.devnull) as null:
            os.dup2(null.fileno(), 0)
        self._sending = threading.Lock()
        self._decode = msgspec.msgpack.Decoder[ToProcess](ToProcess).decode
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._connection, selectors.EVENT_WRITE)

    def receive_args(self) -> Any:
        """Return the first message, the arguments of the process, which exits if the supervisor exits before."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except EOFError:
            sys.exit(1)

    def receive(self) -> ToProcess:
        """Wait for a message; raises `EOFError` if the supervisor has exited."""
        try:
            message: ToProcess = self._decode(self._connection.recv_bytes())
        except OSError:
            raise EOFError from None
        return message

    def listen(self, on_message: Callable[[ToProcess], None]) -> None:
        """Call `on_message` on the running event loop for each message, and with `Shutdown` if the supervisor exits.

        A thread reads all the time, so that neither side waits for the other to read before it sends.
        """
        loop = asyncio.get_running_loop()

        def read() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                with contextlib.suppress(EOFError):
                    while True:
                        loop.call_soon_threadsafe(on_message, self.receive())
                loop.call_soon_threadsafe(on_message, Shutdown())

        threading.Thread(target=read, daemon=True, name="supervisor").start()

    def send(self, message: FromProcess) -> None:
        """Send a message; dropped if the supervisor has exited."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(message))

    def beat(self) -> None:
        """Send a heartbeat, unless the supervisor reads none at the moment."""
        if self._selector.select(0):
            self.send(Heartbeat())


class _Frames:
    """The supervisor's end of a connection: messages of any size, and no waiting for the process."""

    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        self._fd = connection.fileno()
        os.set_blocking(self._fd, False)
        self._received, self.unsent = bytearray(), bytearray()

    def send(self, message: bytes) -> None:
        """Send a message, or as much of it as the process takes now. Raises `OSError`."""
        self.unsent += _HEADER.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send more of what is left. Raises `OSError`."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: os.write(self._fd, self.unsent)]

    def receive(self) -> list[bytes]:
        """Read what has arrived, and return the messages that are complete. Raises `EOFError` and `OSError`."""
        try:
            chunk = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return []
        if not chunk:
            raise EOFError
        self._received += chunk
        found, at = list[bytes](), 0
        while len(self._received) >= (start := at + _HEADER.size):
            end = start + _HEADER.unpack_from(self._received, at)[0]
            if len(self._received) < end:
                break
            found.append(bytes(self._received[start:end]))
            at = end
        del self._received[:at]
        return found


class SupervisedProcess(ABC):
    """A process that a supervisor keeps running. Subclasses decide what happens when it is ready and when it dies."""

    def __init__(self, name: str) -> None:
        """`name` is the subject of log messages."""
        self.name = name
        self.process: Process | None = None
        self.frames: _Frames | None = None
        """The connection of the present process, as long as it is open."""
        self.is_ready = False
        """Whether the present process has reported that it is ready."""
        self.failure: Failed | None = None
        """The last message of a process that exits because of an error."""
        self.restart_at: float | None = None
        """When to start it again, on the monotonic clock."""
        self.is_stopping = False
        """Whether its exit is expected."""
        self.last_heard = 0.0
        self.kill_at = float("inf")

    @abstractmethod
    def start(self) -> Process:
        """Start the process."""

    @abstractmethod
    def on_ready(self, ready: Ready) -> None:
        """Handle the first message of the process."""

    @abstractmethod
    def on_exit(self, failure: Failed) -> float | None:
        """Handle the exit of the process; returns the seconds after which to start it again, None: never."""

    def on_stopped(self) -> None:
        """Handle that the process was to stop, and has ended with all that it had started."""
        return

    def on_message(self, message: Drained | Resize | SetLogLevel | ChangeAdapter | AdapterSeen) -> None:
        """Handle a message that only API processes send."""
        raise AssertionError(message)

    def send(self, message: ToProcess) -> None:
        """Send a message; dropped if the process is not running."""
        if self.frames is not None:
            with contextlib.suppress(OSError):
                self.frames.send(msgspec.msgpack.encode(message))


class Supervisor:
    """Keeps processes running. All methods but `call` belong to the thread that calls `run`."""

    def __init__(self, watchdog_seconds: float) -> None:
        """A process that is silent for `watchdog_seconds` is killed."""
        self.on_step: Callable[[], None] = lambda: None
        """Called ten times a second or more, as long as `run` makes progress."""
        self._watchdog_seconds = watchdog_seconds
        self._all: list[SupervisedProcess] = []
        self._selector = selectors.DefaultSelector()
        self._decode = msgspec.msgpack.Decoder[FromProcess](FromProcess).decode
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        weakref.finalize(self, _close, self._selector, self._wake).atexit = False
        self._checked_at = time.monotonic()
        self._patience = float("inf")
        """Maximum time for processes to exit, in seconds."""

    def add(self, supervised: SupervisedProcess) -> None:
        """Start a process and watch it from now on."""
        self._all.append(supervised)
        self._start(supervised)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the supervisor's thread, from any thread or signal handler."""
        self._calls.put(function)
        os.eventfd_write(self._wake, 1)

    def run(self, until: Callable[[], bool]) -> None:
        """Watch the processes until `until` returns true."""
        while not until():
            self._step()

    def stop(self, stopping: Sequence[SupervisedProcess], message: ToProcess, seconds: float) -> None:
        """Send processes a message, and return when they have exited; kill any that do not exit within `seconds`.

        The others are watched meanwhile.
        """
        for each in stopping:
            self.end(each, message, seconds)
        self.run(lambda: all(each.process is None for each in stopping))

    def end(self, each: SupervisedProcess, message: ToProcess, seconds: float) -> None:
        """Begin to stop a process, as `stop` does."""
        seconds = min(seconds, self._patience)
        each.is_stopping, each.restart_at = True, None
        each.send(message)
        each.kill_at = min(
            each.kill_at, time.monotonic() + (seconds if each.is_ready else min(seconds, _LOADING_EXIT_SECONDS))
        )

    def hurry(self, seconds: float) -> None:
        """Kill processes that are being stopped, now or later, if they do not exit within `seconds`."""
        self._patience = seconds
        for each in self._all:
            if each.is_stopping:
                each.kill_at = min(each.kill_at, time.monotonic() + seconds)

    def _step(self) -> None:
        for each in self._all:
            if each.process is not None and each.frames is not None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if each.frames.unsent else 0)
                self._selector.modify(each.process.connection, events, each)
        for key, events in self._selector.select(_TICK_SECONDS):
            if key.data is None:
                os.eventfd_read(self._wake)
                continue
            if events & selectors.EVENT_WRITE:
                with contextlib.suppress(OSError):  # it has exited
                    key.data.frames.flush()
            if events & selectors.EVENT_READ:
                self._receive(key.data)
        with contextlib.suppress(Empty):
            while True:
                self._calls.get_nowait()()
        now = time.monotonic()
        if now - self._checked_at > self._watchdog_seconds / 2:  # this process was stopped, probably with the others
            for each in self._all:
                each.last_heard = now
        self._checked_at = now
        for each in list(self._all):
            self._check(each, now)
        self.on_step()

    def _start(self, each: SupervisedProcess) -> None:
        each.restart_at, each.is_ready, each.failure, each.kill_at = None, False, None, float("inf")
        each.last_heard = time.monotonic()
        try:
            each.process = each.start()
        except OSError as error:
            self._exit(each, Failed(f"{each.name} cannot start: {error}"))
        else:
            each.frames = _Frames(each.process.connection)
            self._selector.register(each.process.connection, selectors.EVENT_READ, each)

    def _receive(self, each: SupervisedProcess) -> None:
        assert each.frames is not None
        try:
            messages = each.frames.receive()
        except (EOFError, OSError):
            self._disconnect(each)
            each.kill_at = min(each.kill_at, time.monotonic() + _EXIT_SECONDS)
            return
        each.last_heard = time.monotonic()
        for message in map(self._decode, messages):
            match message:
                case Ready():
                    each.is_ready = True
                    each.on_ready(message)
                case Failed():
                    each.failure = message
                    each.kill_at = min(each.kill_at, time.monotonic() + _EXIT_SECONDS)
                case Drained() | Resize() | SetLogLevel() | ChangeAdapter() | AdapterSeen():
                    each.on_message(message)

    def _disconnect(self, each: SupervisedProcess) -> None:
        assert each.process is not None
        self._selector.unregister(each.process.connection)
        each.process.connection.close()
        each.frames = None

    def _check(self, each: SupervisedProcess, now: float) -> None:
        if each.process is None:
            if each.is_stopping:
                self._all.remove(each)
                each.on_stopped()
            elif each.restart_at is not None and now >= each.restart_at:
                self._start(each)
            return
        limit = self._watchdog_seconds * (1.0 if each.is_ready else _START_FACTOR)
        if now - each.last_heard > limit and each.failure is None:
            each.failure = Failed(f"{each.name} did not respond for {limit:g} s and was killed (--watchdog-seconds)")
            each.process.kill()
        elif now > each.kill_at:
            if each.is_ready:
                logger.warning("%s did not exit in time and will be killed", each.name)
            each.kill_at = float("inf")
            each.process.kill()
        if (code := each.process.poll()) is None:
            return
        while each.frames is not None and each.process.connection.poll(0):
            self._receive(each)
        if each.frames is not None:
            self._disconnect(each)
        each.process.kill_session()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._exit(each, each.failure or Failed(f"{each.name} {how}"))

    def _exit(self, each: SupervisedProcess, failure: Failed) -> None:
        each.process = None
        delay = None if each.is_stopping else each.on_exit(failure)
        if delay is not None:
            each.restart_at = time.monotonic() + delay


def _close(selector: selectors.BaseSelector, wake: int) -> None:
    selector.close()
    os.close(wake)
