"""An API process's connection to one engine core; and the core's process, if this API process manages it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from typing import Literal

import msgspec
import zmq

from quire.engine.cluster.security import Security, split
from quire.engine.protocol.engine_core import Shutdown, ToCore

SHUTDOWN_SECONDS = 10.0
LOADING_SHUTDOWN_SECONDS = 1.0
"""A core that is still loading reads no messages."""
WATCH_SECONDS = 0.2
RECONNECT_MILLISECONDS = 10
"""Interval between attempts to connect to a core that is starting."""

logger = logging.getLogger(__name__)


class CoreConnection:
    """Sends requests to a core, and stores its state."""

    def __init__(self, number: int, address: str, context: zmq.Context[zmq.Socket[bytes]], security: Security) -> None:
        self.number = number
        self.state: Literal["loading", "up", "dead"] = "loading"
        self.has_been_ready = False
        """It has been ready before, so it is restarted if it dies."""
        self.is_unresponsive = False
        """It has not answered a probe in time, and has sent nothing since."""
        self.core: subprocess.Popen[bytes] | None = None
        self._address = address
        self._context, self._security = context, security
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.Socket[bytes] | None = None
        self.open()

    def open(self) -> None:
        """Connect, unless connected. Messages sent before the core exists wait for it."""
        if self._socket is None:
            self._socket = self._context.socket(zmq.PUSH)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.set_hwm(0)
            self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
            self._security.connect(self._socket, self._address)

    def send(self, message: ToCore) -> None:
        """Send a message, unless the core is dead: the next core at this address would receive it."""
        if self._socket is not None:
            self._socket.send_multipart(split(self._encoder.encode(message)), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket and discard unread messages."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def wait_exit(self) -> str:
        """Wait until the core's process exits, and return how. A core that is dead but does not exit is killed."""
        core, died = self.core, None
        assert core is not None
        while (code := core.poll()) is None:
            await asyncio.sleep(WATCH_SECONDS)
            if self.state == "dead":
                died = died or time.monotonic()
                if time.monotonic() - died > SHUTDOWN_SECONDS:
                    core.kill()
        await asyncio.sleep(WATCH_SECONDS)  # its last message may still be on its way
        _close_stdin(core)
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    async def end(self) -> None:
        """Stop the core; kill it if it does not exit in time."""
        if (core := self.core) is None:
            return
        self.send(Shutdown())
        patience = LOADING_SHUTDOWN_SECONDS if self.state == "loading" else SHUTDOWN_SECONDS
        deadline = time.monotonic() + patience
        while core.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if core.poll() is None:
            logger.warning("the engine core did not stop within %g seconds and will be killed", patience)
            core.kill()
            core.wait()
        _close_stdin(core)


def _close_stdin(core: subprocess.Popen[bytes]) -> None:
    if core.stdin is not None:
        core.stdin.close()
