"""One API process's end of the wire to one engine core; and the core's process, where it is this one's to keep."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from typing import Literal

import msgspec
import zmq

from quire.engine.protocol.messages import Shutdown, ToCore

SHUTDOWN_SECONDS = 10.0
LOADING_SHUTDOWN_SECONDS = 1.0
"""A core that is still loading reads no messages."""
WATCH_SECONDS = 0.2

logger = logging.getLogger(__name__)


class CoreConnection:
    """Where requests are sent, and what is known of who reads them."""

    def __init__(self, number: int, address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.number = number
        self.state: Literal["loading", "up", "dead"] = "loading"
        self.has_served = False
        """It has been up before: should it die, it is worth another start."""
        self.is_silent = False
        """It has not answered a probe in time, and has said nothing since."""
        self.core: subprocess.Popen[bytes] | None = None
        self._address = address
        self._context = context
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.Socket[bytes] | None = None
        self.open()

    def open(self) -> None:
        """Connect, if that is not so; what is sent before the core is there waits for it."""
        if self._socket is None:
            self._socket = self._context.socket(zmq.PUSH)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.set_hwm(0)
            self._socket.connect(self._address)

    def send(self, message: ToCore) -> None:
        """Nothing is sent to the dead: the next core at this address would get it."""
        if self._socket is not None:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Forget what has not been read."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def ended(self) -> str:
        """Wait until the core's process has ended, and say how. One that is dead but does not end is killed."""
        core, died = self.core, None
        assert core is not None
        while (code := core.poll()) is None:
            await asyncio.sleep(WATCH_SECONDS)
            if self.state == "dead":
                died = died or time.monotonic()
                if time.monotonic() - died > SHUTDOWN_SECONDS:
                    core.kill()
        await asyncio.sleep(WATCH_SECONDS)  # its last message may still be on the way
        _close_stdin(core)
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    async def end(self) -> None:
        """Stop the core, by force if it does not end in time."""
        if (core := self.core) is None:
            return
        self.send(Shutdown())
        patience = LOADING_SHUTDOWN_SECONDS if self.state == "loading" else SHUTDOWN_SECONDS
        deadline = time.monotonic() + patience
        while core.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if core.poll() is None:
            logger.warning("the engine core did not stop within %g seconds and is killed", patience)
            core.kill()
            core.wait()
        _close_stdin(core)


def _close_stdin(core: subprocess.Popen[bytes]) -> None:
    if core.stdin is not None:
        core.stdin.close()
