"""The core's socket to the KV store of its host."""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq

from quire.engine.cluster.security import join
from quire.engine.core.engine_core import EngineCoreIO
from quire.engine.core.launch import Endpoints
from quire.engine.protocol.engine_core import KVStoreState, ToServer
from quire.engine.protocol.kv_store import KVStoreOpened, KVStoreStats, LookUpKV, OpenKVStore, ToStore
from tests.fakes.frames import DEEP

_WAIT_MS = 30_000


def bound(address: str) -> zmq.Socket[bytes]:
    store: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    store.setsockopt(zmq.RCVTIMEO, _WAIT_MS)
    store.bind(address)
    return store


def receive(store: zmq.Socket[bytes], io: EngineCoreIO) -> tuple[bytes, ToStore]:
    """The first message, which is sent until there is a connection."""
    while not store.poll(50):
        io.send_store(OpenKVStore(3, 7))
    client, frame = store.recv_multipart()
    return client, msgspec.msgpack.decode(frame, type=ToStore)


def test_stats_of_the_store_do_not_wait_for_the_loop(tmp_path: Path) -> None:
    """Which may be in a long step. There is no loop here."""
    replies: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    replies.setsockopt(zmq.RCVTIMEO, _WAIT_MS)
    replies.bind(f"ipc://{tmp_path}/server")
    store = bound(f"ipc://{tmp_path}/store")
    endpoints = Endpoints({3: f"ipc://{tmp_path}/core"}, (f"ipc://{tmp_path}/server",), f"ipc://{tmp_path}/store")
    io = EngineCoreIO(endpoints, 3, incarnation=7, has_store=True)
    try:
        client, _ = receive(store, io)
        store.send_multipart([client, msgspec.msgpack.encode(KVStoreStats(memory_bytes=5))])
        reply = msgspec.msgpack.decode(join(replies.recv_multipart()), type=ToServer)
        assert reply == KVStoreState(KVStoreStats(memory_bytes=5), 3, 7)
    finally:
        io.close()
        for socket in (store, replies):
            socket.close(0)


def test_a_store_that_is_started_again_gets_nothing_that_was_meant_for_another(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/store"
    endpoints = Endpoints({3: f"ipc://{tmp_path}/core"}, (), address)
    io = EngineCoreIO(endpoints, 3, incarnation=7, has_store=True)
    try:
        store = bound(address)
        assert receive(store, io) == (b"3.7", OpenKVStore(3, 7))
        for dropped in (b"\xc1", msgspec.msgpack.encode(["KVStoreOpened", "deep", 1, "", DEEP])):
            store.send_multipart([b"3.7", dropped])
        store.send_multipart([b"3.7", msgspec.msgpack.encode(KVStoreOpened("first", 1))])
        assert io.inbox.get(timeout=_WAIT_MS / 1000) == KVStoreOpened("first", 1)
        store.close(0)
        io.send_store(LookUpKV(1, [b"x" * 16 * 70_000]))  # in two frames on the way
        another = bound(address)
        client, message = receive(another, io)
        assert (client, message) == (b"3.7", OpenKVStore(3, 7))
        io.send_store(LookUpKV(2, [b"x" * 16 * 70_000]))
        while isinstance(message, OpenKVStore):
            _, message = receive(another, io)
        assert message == LookUpKV(2, [b"x" * 16 * 70_000])
        another.close(0)
    finally:
        io.close()
