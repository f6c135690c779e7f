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


def test_pulses_end_when_the_loop_takes_longer_than_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor still gets heartbeats: the loop may go on."""
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.001)
    monkeypatch.setattr(module, "PULSE_SECONDS", 0.001)
    connection, pulses = Connection(), SimpleQueue[None]()
    heartbeats = Heartbeats(connection, lambda reason: None, lambda: pulses.put(None))
    connection.beats.get(timeout=10)
    assert pulses.empty()  # nothing is promised while the model is loaded
    heartbeats.expect(3600.0, 3600.0)
    for _ in range(3):
        pulses.get(timeout=10)
    heartbeats.expect(3600.0, 0.0)
    for _ in range(2):  # a pulse that was being sent has been sent then
        while not connection.beats.empty():
            connection.beats.get()
        connection.beats.get(timeout=10)
    while not pulses.empty():
        pulses.get()
    for _ in range(3):
        connection.beats.get(timeout=10)
    assert pulses.empty()
