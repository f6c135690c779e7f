"""Runs work in separate processes, so that it can be stopped from outside, regardless of the libraries that it uses.

A helper process starts with the first question and prepares the state that all answers need. Each question is answered
by a fork of the helper; one fork always waits for the next question. The kernel kills a fork that has used up its
processor time (setitimer(2)), which affects nothing else. Forks for short questions are kept for the next ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
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
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

from quire.engine.process import current_process, log

T = TypeVar("T")
Answer = Callable[[bytes], bytes]

MAX_MEMORY = 2**29
"""Memory limit of an answer in bytes, in addition to the prepared state."""
_NICE_AFTER_SECONDS = 0.25
"""Seconds after which the scheduling priority of an answer is lowered."""
_NICENESS = 5
WALL_CLOCK_FACTOR = 10.0
"""Wall-clock limit of an answer, as a multiple of its processor time limit; it matters on a busy machine."""
_MAX_KEPT_QUESTIONS = 1000
"""Questions that a kept fork answers; then another one takes its place, which has not grown."""
_SILENT_SECONDS, _START_SECONDS = 10.0, 60.0
"""Seconds after which a helper that has taken no question is taken to hang; the second value is for one that may still
be starting."""
_GRACE_SECONDS = 1.0
"""Seconds of grace after that: this process may have been stopped meanwhile, together with the helper."""
_PID = struct.Struct("!i")
_QUESTION = struct.Struct("!Qdd")
"""The bytes of a question, and the limits of its answer in seconds of processor time and of time."""
_ANSWER = struct.Struct("!?Q")
"""Whether there is an answer, and its bytes; otherwise those of the traceback."""
_HELPER = "from quire.server.text import sandbox; sandbox.main()"

logger = logging.getLogger(__name__)


class SandboxStopped(Exception):
    """The answer exceeded its time or memory limit."""


class SandboxFailed(RuntimeError):
    """The function that answers raised an exception, which is a mistake of ours. The text has its traceback."""


@dataclass(eq=False)
class _Helper:
    """A helper process."""

    control: socket.socket
    """Takes the sockets of questions."""
    end: weakref.finalize[Any, Any]
    """Kills the helper and its forks."""
    has_answered: bool = False
    is_replaced: bool = False

    @property
    def patience(self) -> float:
        """Seconds within which a fork takes a question, unless the helper hangs."""
        return _SILENT_SECONDS if self.has_answered else _START_SECONDS


class _KeptFork(asyncio.Protocol):
    """A fork that answers one question after another."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._num_questions = 0
        self._received = bytearray()
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._received += data
        if _is_whole(self._received) and not self._answer.done():
            self._answer.set_result(bytes(self._received))
            self._received.clear()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._answer.done():
            self._answer.set_exception(SandboxStopped())
            self._answer.exception()  # nobody may wait for it

    @property
    def is_alive(self) -> bool:
        return not self._transport.is_closing()

    @property
    def is_used_up(self) -> bool:
        return self._num_questions >= _MAX_KEPT_QUESTIONS

    async def ask(self, question: bytes, seconds: float, wall_seconds: float) -> bytes:
        """Return the answer. The fork is stopped at any exception."""
        loop = asyncio.get_running_loop()
        self._num_questions += 1
        self._answer = loop.create_future()
        self._transport.write(_QUESTION.pack(len(question), seconds, wall_seconds) + question)
        overdue = loop.call_later(wall_seconds + _SILENT_SECONDS, self.stop)
        try:
            return _answer_in(await self._answer)
        except BaseException:
            self.stop()
            raise
        finally:
            overdue.cancel()

    def stop(self) -> None:
        """Kill the fork, unless it has ended."""
        if self.is_alive:
            _kill(self._pid)
            self._transport.abort()


class Sandbox(Generic[T]):
    """Answers questions by `make(argument)`. `ask` blocks, and is safe to call from several threads at once.

    `make` and `argument` are pickled; the helper imports the module of `make`. `seconds` is the processor time limit of
    an answer, and `memory` its memory limit in bytes, in addition to the prepared state. `niceness` lowers the
    scheduling priority of everything. The wall-clock limit is `wall_clock_factor` times the processor time limit.
    """

    def __init__(
        self,
        make: Callable[[T], Answer],
        argument: T,
        seconds: float,
        memory: int = MAX_MEMORY,
        niceness: int = 0,
        wall_clock_factor: float = WALL_CLOCK_FACTOR,
    ) -> None:
        self._order = pickle.dumps(niceness) + pickle.dumps((make, argument, memory))
        self._seconds = seconds
        self._lock = threading.Lock()
        self._wall_clock_factor = wall_clock_factor
        self._patience = _SILENT_SECONDS
        """Seconds beyond the wall-clock limit after which a fork is killed; one that is not stopped ends before."""
        self._helper: _Helper | None = None
        self._kept: list[_KeptFork] = []
        """The forks that wait for the next question of `ask_kept`."""

    def ask(self, question: bytes) -> bytes:
        """Return the answer; raises `SandboxStopped`, `SandboxFailed`, and `OSError` if no process can be started."""
        return _answer_of(self._ask(question) or self._ask(question))  # twice, as the helper may just have died

    async def ask_async(self, *question: bytes | memoryview, seconds: float | None = None) -> bytes:
        """Like `ask`, on the event loop, for a question in parts, and with another limit in seconds, if given.
        Cancelling it kills the process that answers.
        """
        limit = self._seconds if seconds is None else seconds
        return _answer_of(await self._ask_async(question, limit) or await self._ask_async(question, limit))

    async def ask_kept(self, question: bytes, seconds: float) -> bytes:
        """Like `ask_async`, with another limit in seconds, and faster: the fork is kept for the next question, unless
        it was stopped. All calls must be on the same event loop.
        """
        self._kept = [fork for fork in self._kept if fork.is_alive]
        fork = self._kept.pop() if self._kept else await self._keep()
        answer = await fork.ask(question, seconds, seconds * self._wall_clock_factor)
        if fork.is_used_up:
            fork.stop()
        else:
            self._kept.append(fork)
        return answer

    async def _keep(self) -> _KeptFork:
        if (found := await self._reach() or await self._reach()) is None:
            raise _cannot_answer()
        connection, pid, _ = found
        _, fork = await asyncio.get_running_loop().create_connection(partial(_KeptFork, pid), sock=connection)
        return fork

    def _ask(self, question: bytes) -> bytes | None:
        """Return a fork's report (see `_answer_of`), or None if the helper cannot be reached."""
        mine, theirs = socket.socketpair()
        with mine:
            helper = self._hand_over(theirs)
            for patience in (helper.patience, _GRACE_SECONDS):
                mine.settimeout(patience)
                try:
                    reported = mine.recv(_PID.size)
                    break
                except ConnectionResetError:
                    return None
                except TimeoutError:
                    continue
            else:
                self._replace(helper)
                return None
            if reported:
                helper.has_answered = True
                reported += self._exchange(mine, question, _PID.unpack(reported)[0])
        return None if helper.is_replaced else reported or None

    def _exchange(self, fork: socket.socket, question: bytes, pid: int) -> bytes:
        """Return a fork's report on a question; kill it if that takes too long."""
        reported, wall_seconds = b"", self._seconds * self._wall_clock_factor
        limit = wall_seconds + self._patience
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            try:
                fork.settimeout(limit)
                fork.sendall(_QUESTION.pack(len(question), self._seconds, wall_seconds) + question)
                fork.shutdown(socket.SHUT_WR)
                fork.settimeout(_NICE_AFTER_SECONDS)
                while part := self._receive(fork, pid, limit):
                    reported += part
            except TimeoutError:
                _kill(pid)
        return reported

    def _receive(self, fork: socket.socket, pid: int, limit: float) -> bytes:
        """Return the next bytes; lower the priority of a fork that takes long. Raises `TimeoutError`."""
        try:
            return fork.recv(2**16)
        except TimeoutError:
            if fork.gettimeout() == limit:
                raise
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)
        fork.settimeout(limit)
        return fork.recv(2**16)

    async def _ask_async(self, question: Sequence[bytes | memoryview], seconds: float) -> bytes | None:
        if (found := await self._reach()) is None:
            return None
        wall_seconds = seconds * self._wall_clock_factor
        loop = asyncio.get_running_loop()
        mine, pid, helper = found
        reported = bytearray(_PID.pack(pid))
        with mine:
            try:
                async with asyncio.timeout(wall_seconds + self._patience):
                    for part in (_QUESTION.pack(sum(map(len, question)), seconds, wall_seconds), *question):
                        await loop.sock_sendall(mine, part)
                    mine.shutdown(socket.SHUT_WR)
                    while part := await loop.sock_recv(mine, 2**18):
                        reported += part
            except (BrokenPipeError, ConnectionResetError):
                pass
            except TimeoutError:
                _kill(pid)
            except asyncio.CancelledError:
                _kill(pid)
                raise
        return None if helper.is_replaced else bytes(reported)

    async def _reach(self) -> tuple[socket.socket, int, _Helper] | None:
        """Return a connection to a fork that takes questions, the fork's process id and the helper; None if the helper
        cannot be reached.
        """
        loop, reported = asyncio.get_running_loop(), b""
        mine, theirs = socket.socketpair()
        with contextlib.ExitStack() as undone:
            undone.callback(mine.close)
            mine.setblocking(False)
            # It closes its end, also for a question that is cancelled before the thread begins.
            helper = await asyncio.shield(asyncio.to_thread(self._hand_over, theirs))
            for patience in (helper.patience, _GRACE_SECONDS):
                try:
                    async with asyncio.timeout(patience):
                        reported = await loop.sock_recv(mine, _PID.size)
                        break
                except ConnectionResetError:
                    break
                except TimeoutError:
                    continue
            else:
                await asyncio.to_thread(self._replace, helper)
            if not reported:
                return None
            undone.pop_all()
        helper.has_answered = True
        return mine, _PID.unpack(reported)[0], helper

    def _hand_over(self, channel: socket.socket) -> _Helper:
        """Give the helper its end of a connection, and close it here; returns the helper."""
        with channel:
            return self._pass_socket(channel)

    def start(self) -> None:
        """Start the helper, unless it runs, so that the first question need not wait for it."""
        with self._lock:
            if self._helper is None:
                self._start()

    def close(self) -> None:
        """Stop the helper and its forks; pending `ask` calls raise `SandboxStopped`. The next question starts a new
        helper.
        """
        for fork in self._kept:
            fork.stop()
        self._kept.clear()
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()

    def _replace(self, helper: _Helper) -> None:
        """Kill a helper that hangs, with its forks, whose questions are asked again. The next question starts another
        one.
        """
        with self._lock:
            if self._helper is helper:
                logger.warning("a helper process did not respond for %g s and was killed", helper.patience)
                self._helper, helper.is_replaced = None, True
                helper.end()

    def _pass_socket(self, channel: socket.socket) -> _Helper:
        with self._lock:
            for is_new in (False, True):
                if self._helper is None or is_new:
                    self._start()
                assert self._helper is not None
                try:
                    socket.send_fds(self._helper.control, [b"?"], [channel.fileno()])
                    return self._helper
                except OSError:
                    if is_new:
                        raise
        raise AssertionError

    def _start(self) -> None:
        if self._helper is not None and (held := self._helper.end.detach()) is not None:
            _retire(*held[2])
        control, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undone:
            undone.callback(control.close)
            helper = subprocess.Popen(
                [sys.executable, "-P", "-c", _HELPER, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                # Threads do not survive a fork.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                process_group=0,
            )
            undone.pop_all()
        self._helper = _Helper(control, weakref.finalize(self, _end, control, helper))
        assert helper.stdin is not None
        with contextlib.suppress(BrokenPipeError), helper.stdin:
            helper.stdin.write(self._order)


def _answer_of(reported: bytes | None) -> bytes:
    """The answer in a fork's report: its process id, and then as in `_answer_in`."""
    if reported is None:
        raise _cannot_answer()
    if not _is_whole(received := reported[_PID.size :]):
        raise SandboxStopped
    return _answer_in(received)


def _is_whole(received: bytes | bytearray) -> bool:
    return len(received) >= _ANSWER.size and len(received) - _ANSWER.size >= _ANSWER.unpack_from(received)[1]


def _answer_in(received: bytes) -> bytes:
    """The answer after its header."""
    is_answer, _ = _ANSWER.unpack_from(received)
    content = received[_ANSWER.size :]
    if not is_answer:
        raise SandboxFailed(content.decode())
    return content


def _cannot_answer() -> OSError:
    return OSError(errno.EAGAIN, "the helper process cannot answer")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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
    current_process.set_name("quire-helper")
    log.setup("warning", "helper")
    try:
        os.nice(pickle.load(sys.stdin.buffer))  # first, as the next line imports much
        make, argument, memory = pickle.load(sys.stdin.buffer)
    except EOFError:  # the asking process has died
        return
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
            _answer(answer, control, idle, memory)
        os.close(idle)
        os.read(is_busy, 1)  # until the fork closes its end: it has received a question, or has died
        os.close(is_busy)


def _answer(answer: Answer, control: socket.socket, idle: int, memory: int) -> NoReturn:
    """Main function of a fork: write the process id; then read questions and write answers, each after its header."""
    code = 1
    gc.disable()
    try:
        # Native code does not write to the log: a panic in Rust has 70 lines, and ends in an exception anyway.
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        log.setup("warning", "helper")  # on the new stream
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        _, channels, _, _ = socket.recv_fds(control, 1, 1)
        control.close()
        os.close(idle)
        with socket.socket(fileno=channels[0]) as connection, connection.makefile("rb") as questions:
            connection.sendall(_PID.pack(os.getpid()))
            while header := questions.read(_QUESTION.size):
                size, seconds, wall_seconds = _QUESTION.unpack(header)
                _limit_time(seconds, wall_seconds)
                is_answer, answered = _tried(answer, questions.read(size))
                _limit_time(0.0, 0.0)
                connection.sendall(_ANSWER.pack(is_answer, len(answered)) + answered)
                gc.enable()  # there may be more questions
        code = 0
    finally:
        os._exit(code)


def _tried(answer: Answer, question: bytes) -> tuple[bool, bytes]:
    """Return whether there is an answer, and the answer or the traceback. Raises `MemoryError`, as at the limit."""
    try:
        return True, answer(question)
    except MemoryError:
        raise
    except BaseException:
        return False, traceback.format_exc().encode(errors="replace")


def _limit_time(seconds: float, wall_seconds: float) -> None:
    """Limit this process's processor time and time from now on; 0: do not limit it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)
