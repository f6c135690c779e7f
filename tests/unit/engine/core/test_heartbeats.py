"""Heartbeats of the engine core: sent as long as the loop keeps its deadlines."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from quire.engine.core import heartbeats as module
from quire.engine.core.heartbeats import Heartbeats


class Connection:
    def __init__(self) -> None:
        self.beats: SimpleQueue[None] = SimpleQueue()

    def beat(self) -> None:
        self.beats.put(None)


def test_beats_end_when_a_promise_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.001)
    connection, reasons = Connection(), SimpleQueue[str]()
    heartbeats = Heartbeats(connection, reasons.put)
    for _ in range(3):  # nothing is promised while the model is loaded
        connection.beats.get(timeout=10)
    heartbeats.expect(3600.0)
    while not connection.beats.empty():
        connection.beats.get()
    connection.beats.get(timeout=10)
    assert reasons.empty()
    heartbeats.expect(0.0)
    assert reasons.get(timeout=10) == "the engine loop has not made progress for 0 s (--watchdog-seconds)"
