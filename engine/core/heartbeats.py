"""The engine core's heartbeats: a thread sends them as long as the busy loop keeps its promises.

There are two promises. The supervisor kills a core that breaks the first one, which is generous. The API processes give
no work to a core that breaks the second one, which is tight, until it makes progress again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from quire.engine.process.supervisor import HEARTBEAT_SECONDS


class Beats(Protocol):
    def beat(self) -> None: ...


PULSE_SECONDS = 0.25


class Heartbeats:
    """Sends the supervisor a heartbeat every second, and the API processes a pulse every `PULSE_SECONDS`. The loop
    promises, with each `expect`, when it will make progress again.
    """

    def __init__(
        self, connection: Beats, on_stall: Callable[[str], None], pulse: Callable[[], None] = lambda: None
    ) -> None:
        """The thread calls `pulse` to send a pulse, and `on_stall` once, with the reason, if a promise is broken."""
        self._promise = (float("inf"), 0.0)
        self._usually_by = 0.0
        threading.Thread(target=self._run, args=(connection, on_stall, pulse), daemon=True, name="heartbeats").start()

    def expect(self, seconds: float, usually: float = 0.0) -> None:
        """Promise to call this again within `seconds`, and usually within `usually`: there are no pulses after that."""
        now = time.monotonic()
        self._promise, self._usually_by = (now + seconds, seconds), now + usually

    def _run(self, connection: Beats, on_stall: Callable[[str], None], pulse: Callable[[], None]) -> None:
        next_beat = 0.0
        while True:
            now = time.monotonic()
            until, seconds = self._promise
            if now > until:
                return on_stall(f"the engine loop has not made progress for {seconds:.0f} s (--watchdog-seconds)")
            if now >= next_beat:
                connection.beat()
                next_beat = now + HEARTBEAT_SECONDS
            if now < self._usually_by:
                pulse()
            time.sleep(PULSE_SECONDS)
