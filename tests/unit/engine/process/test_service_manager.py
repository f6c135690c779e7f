"""Notifications to systemd."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.engine.process import service_manager
from quire.engine.process.service_manager import ServiceManager


@pytest.fixture(params=["a path", "abstract"])
def manager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    name = str(tmp_path / "notify") if request.param == "a path" else f"\0quire-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name)
        receiver.settimeout(10.0)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        yield receiver


def test_it_hears_every_state(manager: socket.socket) -> None:
    service = ServiceManager()
    service.notify("READY=1", "STATUS=serving\nmodel")
    assert manager.recv(1000) == b"READY=1\nSTATUS=serving model"
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    service.reloading()
    first, second = manager.recv(1000).decode().split("\n")
    assert first == "RELOADING=1"
    assert before <= int(second.removeprefix("MONOTONIC_USEC=")) < before + 60e6
    service.notify("STOPPING=1")
    assert manager.recv(1000) == b"STOPPING=1"


@pytest.mark.parametrize("mine", [True, False, None])
def test_signs_of_life_come_twice_as_often_as_needed(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, mine: bool | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    if mine is not None:  # some managers do not name the process
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + (not mine)))
    now = 1000.0
    monkeypatch.setattr(service_manager, "time", SimpleNamespace(monotonic=lambda: now))
    manager.settimeout(0.0)
    service, beats = ServiceManager(), []
    for _ in range(31):
        service.beat()
        try:
            assert manager.recv(1000) == b"WATCHDOG=1"
            beats.append(now)
        except BlockingIOError:
            pass
        now += 1.0
    assert beats == ([] if mine is False else [1000.0, 1015.0, 1030.0])


def test_nobody_needs_to_listen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    for address in ("", str(tmp_path / "none"), "@quire-test-none", "vsock:2:1"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        service = ServiceManager()
        service.notify("READY=1")
        service.beat()
