"""The sockets between KV stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import msgspec
import pytest
import zmq

from quire.engine.kv_store import peer_links
from quire.engine.kv_store.peer_links import PeerLinks
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.kv_peers import HelloPeer, PeerPiece


def test_a_name_server_that_hangs_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers with addresses are used meanwhile, and those with names once they are known, again if they have moved."""
    may_answer, found = threading.Event(), iter(["127.0.0.2", "127.0.0.2", "127.0.0.3"])
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    connected = list[tuple[str, str]]()

    def resolve(name: str) -> str:
        may_answer.wait(20)
        if name == "unknown":
            raise ConfigError("unknown: no such host")
        return next(found, "127.0.0.3")

    monkeypatch.setattr(peer_links, "resolve_address", resolve)
    monkeypatch.setattr(peer_links, "_RESOLVE_SECONDS", 0.01)
    links = PeerLinks(zmq.Poller(), "", calls.put)
    connect = links._connect

    def note(address: str, to: str) -> None:
        connected.append((address, to))
        connect(address, to)

    monkeypatch.setattr(links, "_connect", note)
    links.use(["127.0.0.1:7", "unknown:8", "known:9"])
    assert connected == [("127.0.0.1:7",) * 2]
    links.ask("known:9", HelloPeer(b""))  # nothing waits for it
    may_answer.set()
    for _ in range(2):
        calls.get(timeout=20)()
    assert connected[1:] == [("known:9", "127.0.0.2:9"), ("known:9", "127.0.0.3:9")]
    links.close()


def test_a_reader_that_does_not_read_holds_few_messages(free_port: int) -> None:
    """The rest waits where it is; others get theirs, and one that has gone stops nothing."""
    links, context = PeerLinks(poller := zmq.Poller(), "", lambda function: function()), zmq.Context()
    assert links.listen(f"tcp://127.0.0.1:{free_port}")
    slow, other = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for option in (zmq.RCVHWM, zmq.RCVBUF):
        slow.setsockopt(option, 1)
    names = list[bytes]()
    for reader in (slow, other):
        reader.connect(f"tcp://127.0.0.1:{free_port}")
        reader.send(b"hello")
        while len(names) < 1 + (reader is other):
            ready = dict(poller.poll(20_000))
            assert ready
            links.receive(ready, lambda address, frames: None, lambda name, frames: names.append(name))
    piece, content = PeerPiece(1, 0, 0, b""), memoryview(bytes(1 << 20))
    sent, full_since = 0, 0.0
    while not full_since or time.monotonic() < full_since + 0.2:  # what the kernel takes depends on it
        if links.answer(names[0], piece, content):
            sent, full_since = sent + 1, 0.0
            assert sent < 64
        elif not full_since:
            full_since = time.monotonic()
    assert links.answer(names[1], piece, content)
    assert msgspec.msgpack.decode(other.recv_multipart()[0], type=PeerPiece) == piece
    assert links.answer(b"gone", piece, content)
    context.destroy(0)
    links.close()
