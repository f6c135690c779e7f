"""Runs work in separate processes, so that it can be stopped from outside, whatever library it uses.

A helper process starts with the first question and prepares what all answers need. Each question is answered by a fork
of the helper; one fork always waits for the next question. The kernel kills a fork that has used up its processor time
(setitimer(2)), which affects nothing else.
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
"""Memory limit of an answer in bytes, in addition to what is prepared."""
_NICE_AFTER_SECONDS = 0.25
"""Seconds after which the scheduling priority of an answer is lowered."""
_NICENESS = 5
_WALL_CLOCK_FACTOR = 10
"""Wall-clock limit of an answer, as a multiple of its processor time limit; it matters on a busy machine."""
_PID = struct.Struct("!i")
_HELPER = "from quire.server.frontend import sandbox; sandbox.main()"


class SandboxStopped(Exception):
    """The answer exceeded its time or memory limit."""


class Sandbox(Generic[T]):
    """Answers questions by `make(argument)`. `ask` blocks, and is safe to call from several threads at once.

    `make` and `argument` are pickled; the helper imports the module of `make`. `seconds` is the processor time limit of
    an answer.
    """

    def __init__(self, make: Callable[[T], Answer], argument: T, seconds: float) -> None:
        self._order = pickle.dumps((make, argument, seconds))
        self._lock = threading.Lock()
        self._helper: tuple[socket.socket, weakref.finalize[Any, Any]] | None = None

    def ask(self, question: bytes) -> bytes:
        """Return the answer; raises `SandboxStopped`, and `OSError` if no process can be started."""
        for _ in range(2):  # the helper may just have died
            if (reported := self._ask(question)) is not None:
                break
        else:
            raise OSError(errno.EAGAIN, "the helper process cannot answer")
        if not reported.endswith(b"."):
            raise SandboxStopped
        return reported[:-1]

    def _ask(self, question: bytes) -> bytes | None:
        """Return the answer of a fork, or None if the helper cannot be reached."""
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                self._pass_socket(theirs)
            with contextlib.suppress(BrokenPipeError):
                mine.sendall(question)
            mine.shutdown(socket.SHUT_WR)
            mine.settimeout(_NICE_AFTER_SECONDS)
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
        """Stop the helper and its forks; pending `ask` calls raise `SandboxStopped`. The next question starts a new
        helper.
        """
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper[1]()

    def _pass_socket(self, channel: socket.socket) -> None:
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
    """Kill a helper and all its forks, which form its process group."""
    control.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(helper.pid, signal.SIGKILL)
    helper.wait()


def _retire(control: socket.socket, helper: subprocess.Popen[bytes]) -> None:
    """Stop a helper that accepts no more questions, but not its forks, which are still answering."""
    control.close()  # the waiting fork notices this
    helper.kill()
    helper.wait()


def main() -> None:
    """Main function of the helper: prepare, then fork for each question until the socket is closed."""
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
        os.read(is_busy, 1)  # until the fork closes its end: it has received a question, or has died
        os.close(is_busy)


def _answer(answer: Answer, control: socket.socket, idle: int, seconds: float) -> NoReturn:
    """Main function of a fork: read a question to its end; write the process id, the answer and a full stop."""
    code = 1
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY, used + MAX_MEMORY))
        _, channels, _, _ = socket.recv_fds(control, 1, 1)
        control.close()
        os.close(idle)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds * _WALL_CLOCK_FACTOR)
        with socket.socket(fileno=channels[0]) as connection:
            connection.sendall(_PID.pack(os.getpid()))
            question = b"".join(iter(lambda: connection.recv(2**16), b""))
            connection.sendall(answer(question) + b".")
        code = 0
    finally:
        os._exit(code)
