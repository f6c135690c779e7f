"""A supervised process that is played by the test."""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing.connection import Pipe

import msgspec

from quire.engine.protocol.supervision import FromProcess, ToProcess


class FakeProcess:
    """A process controlled by the test; `theirs` is its end of the connection."""

    def __init__(self) -> None:
        self.connection, self.theirs = Pipe()
        self.code: int | None = None
        self.is_session_killed = False
        self.on_poll: Callable[[], None] = lambda: None
        """Called while the process runs, each time the supervisor checks it."""

    def poll(self) -> int | None:
        if self.code is None:
            self.on_poll()
        return self.code

    def kill(self) -> None:
        self.exit(-signal.SIGKILL)

    def kill_session(self) -> None:
        self.is_session_killed = True

    def exit(self, code: int) -> None:
        self.code = code
        self.theirs.close()

    def say(self, message: FromProcess) -> None:
        self.theirs.send_bytes(msgspec.msgpack.encode(message))

    def heard(self) -> list[ToProcess]:
        found = []
        while self.theirs.poll(0):
            found.append(msgspec.msgpack.decode(self.theirs.recv_bytes(), type=ToProcess))
        return found
