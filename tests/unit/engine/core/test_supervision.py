"""What the supervisor tells an engine core."""

from __future__ import annotations

import logging
import os
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.core import engine_core
from quire.engine.executor.base import WorkerError
from quire.engine.protocol.supervision import SetLogLevel, Shutdown, ToProcess


def test_it_sets_the_level_ends_the_core_and_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[ToProcess] = [SetLogLevel("debug"), Shutdown("why")]
    exits: list[int] = []

    def receive() -> ToProcess:
        if not messages:
            raise EOFError
        return messages.pop(0)

    monkeypatch.setattr(engine_core, "_SHUTDOWN_GRACE", 0.0)
    monkeypatch.setattr(os, "_exit", exits.append)
    logger, inbox = logging.getLogger("quire"), SimpleQueue[Any]()
    level = logger.level
    try:
        engine_core._listen(SimpleNamespace(receive=receive), SimpleNamespace(inbox=inbox))  # type: ignore[arg-type]
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(level)
    assert inbox.get() == SetLogLevel("debug")  # for the ranks
    assert inbox.get() == Shutdown("why")
    assert isinstance(inbox.get(), WorkerError)
    assert exits == [1]
