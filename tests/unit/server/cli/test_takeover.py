"""The hand-over of a listening socket, between two servers in one process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.protocol.errors import ConfigError
from quire.server.cli import takeover
from quire.server.cli.listen import listen
from quire.server.cli.takeover import Offer, Predecessor
from quire.server.config.server_options import ServerOptions


class Running:
    """A server that offers its listening socket."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.where = self.listener.getsockname()
        self.is_taken = threading.Event()
        self.offer = Offer(self.listener, self.is_taken.set)

    def find(self) -> Predecessor:
        predecessor = Predecessor.find(self.where)
        assert predecessor is not None
        return predecessor


@pytest.fixture
def running() -> Iterator[Running]:
    found = Running()
    yield found
    found.offer.close()
    found.listener.close()


def test_a_successor_gets_the_socket_and_the_connections_that_wait(running: Running) -> None:
    for _ in range(2):  # one that ends before it is ready changes nothing
        failing = running.find()
        failing.close()
        failing.listener.close()
    assert not running.is_taken.is_set()
    predecessor = running.find()
    client = socket.create_connection(running.where)
    client.sendall(b"hello")
    predecessor.end()
    assert running.is_taken.wait(10)
    assert Predecessor.find(running.where) is None, "its own offer can take the name"
    running.listener.close()
    with predecessor.listener, client:
        accepted, _ = predecessor.listener.accept()
        with accepted:
            assert accepted.recv(10) == b"hello"
        following = Offer(predecessor.listener, lambda: None)
        again = Predecessor.find(running.where)
        assert again is not None
        again.close()
        again.listener.close()
        following.close()


def test_it_serves_even_if_its_predecessor_has_ended(running: Running) -> None:
    predecessor = running.find()
    running.offer.close()
    running.listener.close()
    predecessor.end()
    with predecessor.listener, socket.create_connection(running.where):
        predecessor.listener.accept()[0].close()


def test_an_offer_outlives_a_lack_of_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(takeover, "_RETRY_SECONDS", 0.0)

    class Scarce(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if not failures:
                failures.append(error := OSError(errno.EMFILE, "Too many open files"))
                raise error
            return super().accept()

    failures: list[OSError] = []
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", Scarce)
        running = Running()
    predecessor = running.find()
    predecessor.end()
    assert running.is_taken.wait(10)
    assert "--takeover has failed: Too many open files; serving on" in caplog.text
    predecessor.listener.close()
    running.listener.close()


def test_only_one_at_a_time(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    first = running.find()
    monkeypatch.setattr(takeover, "_ANSWER_SECONDS", 0.05)
    with pytest.raises(ConfigError, match="another server is about to take over"):
        running.find()
    first.close()
    first.listener.close()


def test_only_for_the_same_user(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strangers = {"takeover"}  # by the thread that asks
    monkeypatch.setattr(
        takeover, "_user", lambda connection: os.getuid() + (threading.current_thread().name in strangers)
    )
    with pytest.raises(ConfigError, match="the running server refuses; its log says why"):
        running.find()
    assert f"a process of user {os.getuid() + 1} is not allowed to take over" in caplog.text
    strangers.add(threading.current_thread().name)
    with pytest.raises(ConfigError, match=f"the running server is user {os.getuid() + 1}'s"):
        running.find()


def test_where_nobody_runs_it_is_a_plain_start(caplog: pytest.LogCaptureFixture, free_port: int) -> None:
    options = ServerOptions(port=free_port, takeover=True)
    with caplog.at_level("INFO", "quire"), listen(options) as (listener, predecessor):
        assert predecessor is None
        assert listener.getsockname() == ("127.0.0.1", free_port)
        with pytest.raises(ConfigError, match=f"port {free_port} on 127.0.0.1 is in use.*--takeover needs"):
            listen(options).__enter__()  # of another program, that offers nothing
    assert "no server runs there yet" in caplog.text


@pytest.mark.parametrize(
    ("options", "error"),
    [({"port": 0}, "--takeover with --port 0"), ({"headless": True}, "--takeover with --headless")],
)
def test_what_cannot_work_is_an_error(options: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        ServerOptions(takeover=True, **options).check()  # type: ignore[arg-type]


def test_a_unix_socket_stays_in_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with contextlib.ExitStack() as successor:
        with listen(ServerOptions(uds=str(path))) as (listener, _):
            offer = Offer(listener, lambda: None)
            _, predecessor = successor.enter_context(listen(ServerOptions(uds=str(path), takeover=True)))
            assert predecessor is not None
            predecessor.end()
            offer.close()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()
