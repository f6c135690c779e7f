"""A process beside the engine cores that no request needs to be accepted."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from typing import Literal, Protocol

from quire.engine.process.supervisor import SupervisedProcess
from quire.engine.protocol.supervision import Failed, Ready

_MAX_FAILED_STARTS = 3
"""Failures in a row, at the start of the server, after which it gives up."""
_MIN_UP_SECONDS = 10.0
"""A process that dies earlier after it was ready has failed to start, too."""
_MAX_RESTART_SECONDS = 60.0
_MAX_DOUBLINGS = 16

logger = logging.getLogger(__name__)


class Host(Protocol):
    """The supervisor of a host's processes (`quire.server.client.engine_manager.EngineManager`)."""

    is_started: bool

    def fail(self, reason: str, *, user_error: bool = False) -> None: ...


class HelperProcess(SupervisedProcess):
    """It is started again whenever it dies or hangs. If it cannot start when the server does, the engine has failed."""

    def __init__(self, name: str, host: Host, meanwhile: str) -> None:
        """`meanwhile` says what happens without it."""
        super().__init__(name)
        self.has_been_ready = False
        self._host, self._meanwhile = host, meanwhile
        self._num_failed_starts = 0
        self._up_at = 0.0

    @abstractmethod
    def on_state(self, state: Literal["up", "down", "failed"]) -> None:
        """Handle a new state. down: it has died, and is started again; failed: so has its last start."""

    def on_ready(self, ready: Ready) -> None:
        if self.has_been_ready:
            logger.info("%s is ready again", self.name)
        self.has_been_ready, self._up_at = True, time.monotonic()
        self.on_state("up")

    def on_exit(self, failure: Failed) -> float | None:
        self.on_state("down" if self.is_ready else "failed")
        has_run = self.is_ready and time.monotonic() - self._up_at >= _MIN_UP_SECONDS
        self._num_failed_starts = 0 if has_run else self._num_failed_starts + 1
        is_hopeless = failure.user_error or self._num_failed_starts >= _MAX_FAILED_STARTS
        if is_hopeless and not self.has_been_ready and not self._host.is_started:
            self._host.fail(failure.reason, user_error=failure.user_error)
            return None
        logger.error("%s; restarting it. %s meanwhile", failure.reason, self._meanwhile)
        return min(2.0 ** min(self._num_failed_starts, _MAX_DOUBLINGS) - 1.0, _MAX_RESTART_SECONDS)
