"""Work that can be stopped from outside, whatever library it is in: each question is answered by a process of its own.

A helper process is started with the first question and prepares what all answers need. Each question is for a fork of
it, and one fork always waits for the next. The kernel ends a fork that has used up its processor time (setitimer(2)),
and nobody else notices.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from quire.engine import process

T = TypeVar("T")
Answer = Callable[[bytes], bytes]

MAX_MEMORY = 2**29
"""Bytes that an answer may take, beside what is prepared."""
_PATIENCE = 0.25
"""Seconds after which an answer goes on with less of the processor than others get."""
_NICENESS = 5
_WALL = 10
"""Times the processor time that an answer may take, by the clock, where others leave it none."""
_PID = struct.Struct("!i")
_HELPER = "from quire.server.frontend import sandbox; sandbox.main()"


class SandboxStopped(Exception):
    """There was no answer in time, or with so much memory."""


class Sandbox(Generic[T]):
    """Answers to questions, as `make(argument)` gives them. Any thread may ask, and waits; many may at once.

    `make` and `argument` are pickled; the helper imports the module of `make`. `seconds` of processor time are enough
    for an answer.
    """

    def __init__(self, make: Callable[[T], Answer], argument: T, seconds: float) -> None:
        self._order = pickle.dumps((make, argument, seconds))
        self._lock = threading.Lock()
        self._helper: tuple[socket.socket, weakref.finalize[Any, Any]] | None = None

    def ask(self, question: bytes) -> bytes:
        """The answer; raises `SandboxStopped`, and `OSError` where no process can be started."""
        for _ in range(2):  # the helper may just have died
            if (reported := self._ask(question)) is not None:
                break
        else:
            raise OSError(errno.EAGAIN, "the helper process cannot answer")
        if not reported.endswith(b"."):
            raise SandboxStopped
        return reported[:-1]

    def _ask(self, question: bytes) -> bytes | None:
        """What a fork has said; None where there was none."""
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                self._hand_over(theirs)
            with contextlib.suppress(BrokenPipeError):
                mine.sendall(question)
            mine.shutdown(socket.SHUT_WR)
            mine.settimeout(_PATIENCE)
            reported = b""
            while True:
                try:
                    part = mine.recv(2**16)
                except ConnectionResetError:
                    break
                except TimeoutError:
                    mine.settimeout(None)
                    if reported:
                        with contextlib.suppress(OSError):
                            os.setpriority(os.PRIO_PROCESS, _PID.unpack_from(reported)[0], _NICENESS)
                    continue
                if not part:
                    break
                reported += part
        return reported[_PID.size :] if reported else None

    def close(self) -> None:
        """End the helper and its answers, for which `ask` raises `SandboxStopped`; the next question starts another."""
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper[1]()

    def _hand_over(self, channel: socket.socket) -> None:
        with self._lock:
            for is_new in (False, True):
                if self._helper is None or is_new:
                    self._start()
                assert self._helper is not None
                try:
                    socket.send_fds(self._helper[0], [b"?"], [channel.fileno()])
                    return
                except OSError:
                    if is_new:
                        raise

    def _start(self) -> None:
        if self._helper is not None and (held := self._helper[1].detach()) is not None:
            _retire(*held[2])
        control, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undone:
            undone.callback(control.close)
            helper = subprocess.Popen(
                [sys.executable, "-P", "-c", _HELPER, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads do not survive a fork
                start_new_session=True,
            )
            undone.pop_all()
        self._helper = control, weakref.finalize(self, _end, control, helper)
        assert helper.stdin is not None
        with contextlib.suppress(BrokenPipeError), helper.stdin:
            helper.stdin.write(self._order)


def _end(control: socket.socket, helper: subprocess.Popen[bytes]) -> None:
    """End a helper and all its forks, which are the group of processes that it leads."""
    control.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(helper.pid, signal.SIGKILL)
    helper.wait()


def _retire(control: socket.socket, helper: subprocess.Popen[bytes]) -> None:
    """End a helper that cannot be asked any more, but not its forks, which still answer."""
    control.close()  # which the waiting fork notices
    helper.kill()
    helper.wait()


def main() -> None:
    """The helper: prepares, and forks for each question until nobody can ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    process.set_name("quire-helper")
    make, argument, seconds = pickle.load(sys.stdin.buffer)
    answer: Answer = make(argument)
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    closed = select.poll()
    closed.register(control, select.POLLHUP)
    while not closed.poll(0):
        is_busy, idle = os.pipe()
        if os.fork() == 0:
            os.close(is_busy)
            _answer(answer, control, idle, seconds)
        os.close(idle)
        os.read(is_busy, 1)  # until the fork closes its end: it has got a question, or has died
        os.close(is_busy)


def _answer(answer: Answer, control: socket.socket, idle: int, seconds: float) -> NoReturn:
    """A fork's life: a question, up to its end; the process id, the answer and a full stop."""
    code = 1
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY, used + MAX_MEMORY))
        _, channels, _, _ = socket.recv_fds(control, 1, 1)
        control.close()
        os.close(idle)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds * _WALL)
        with socket.socket(fileno=channels[0]) as connection:
            connection.sendall(_PID.pack(os.getpid()))
            question = b"".join(iter(lambda: connection.recv(2**16), b""))
            connection.sendall(answer(question) + b".")
        code = 0
    finally:
        os._exit(code)
