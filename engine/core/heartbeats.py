"""The engine core's heartbeats: a thread sends them as long as the busy loop keeps its promises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from quire.engine.process.supervisor import HEARTBEAT_SECONDS


class Beats(Protocol):
    def beat(self) -> None: ...


class Heartbeats:
    """Sends a heartbeat every second. The loop promises, with each `expect`, when it will make progress again."""

    def __init__(self, connection: Beats, on_stall: Callable[[str], None]) -> None:
        """`on_stall` is called once, from the thread, with the reason, if a promise is broken."""
        self._promise = (float("inf"), 0.0)
        threading.Thread(target=self._run, args=(connection, on_stall), daemon=True, name="heartbeats").start()

    def expect(self, seconds: float) -> None:
        """Promise to call this again within `seconds`."""
        self._promise = (time.monotonic() + seconds, seconds)

    def _run(self, connection: Beats, on_stall: Callable[[str], None]) -> None:
        while True:
            until, seconds = self._promise
            if time.monotonic() > until:
                return on_stall(f"the engine loop has not made progress for {seconds:.0f} s (--watchdog-seconds)")
            connection.beat()
            time.sleep(HEARTBEAT_SECONDS)
