"""Strangers at the sockets between hosts, and the store that ranks rendezvous with."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import pytest
import torch.distributed as dist
import zmq

from quire.engine.cluster import network
from quire.engine.cluster.handshake import Hello
from quire.engine.cluster.key_value_store import STORE, Call
from quire.engine.cluster.leader import Leader
from quire.engine.cluster.network import is_local, tcp_url
from quire.engine.cluster.security import FRAME_BYTES, Security, derive
from quire.engine.core.engine_core import EngineCoreIO
from quire.engine.core.launch import Endpoints
from quire.engine.distributed.link_store import LinkStore
from quire.engine.process.log import printable
from quire.engine.protocol.engine_core import AbortRequests, Join
from tests.fakes.frames import DEEP

TOKEN = "a token for tests only"
STRANGE = (
    b"\x01\x00\x02\x00\x07",  # an undecodable message of ZMTP 1
    b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n",
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48),
    bytes(range(256)) * 8,
)


class Sockets:
    """The sockets of a process."""

    def __init__(self, token: str) -> None:
        self._context = zmq.Context()
        self._made: list[zmq.Socket[bytes]] = []
        self.security = Security(self._context, token)

    def make(self, kind: int) -> zmq.Socket[bytes]:
        self._made.append(self._context.socket(kind))
        self._made[-1].setsockopt(zmq.LINGER, 0)
        return self._made[-1]

    def listen(self) -> tuple[zmq.Socket[bytes], str]:
        """A socket that messages are pushed to, and its address."""
        listening = self.make(zmq.PULL)
        self.security.bind(listening, "tcp://127.0.0.1:0")
        return listening, listening.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, kind: int, url: str) -> zmq.Socket[bytes]:
        connected = self.make(kind)
        self.security.connect(connected, url)
        return connected

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._made:
            each.close()
        self._context.term()


@pytest.fixture
def host() -> Iterator[Sockets]:
    with Sockets(TOKEN) as sockets:
        yield sockets


@pytest.mark.parametrize("token", ["", TOKEN])
def test_strange_messages_to_a_core_are_dropped(token: str, free_port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Messages from API processes still arrive, small or large."""
    url = tcp_url("127.0.0.1", free_port)
    io = EngineCoreIO(Endpoints({0: url}, ()), token=token)
    with Sockets(token) as own, caplog.at_level("WARNING", "quire"):
        pushing = own.connect(zmq.PUSH, url)
        pushing.send(msgspec.msgpack.encode(Join(1)))
        assert io.inbox.get(timeout=10) == Join(1)
        for message in STRANGE:
            with socket.create_connection(("127.0.0.1", free_port)) as stranger:
                stranger.sendall(message)
        pushing.send_multipart([b"\xc1"])
        pushing.send_multipart([b"\x91\xa1\xff"])  # a text that is not UTF-8
        pushing.send(msgspec.msgpack.encode(["Join", 1, DEEP]))
        large = AbortRequests(["x" * FRAME_BYTES, "y"])
        encoded = msgspec.msgpack.encode(large)
        pushing.send_multipart([encoded[:FRAME_BYTES], encoded[FRAME_BYTES:]])
        assert io.inbox.get(timeout=10) == large
    assert "dropped a message to this core that could not be decoded" in caplog.text
    assert "Traceback" not in caplog.text
    io.close()


def test_only_holders_of_the_token_are_heard(host: Sockets) -> None:
    listening, url = host.listen()
    keys, other = derive(TOKEN), derive("another token that is long enough")
    with Sockets("") as strangers, Sockets(TOKEN) as friends:
        for server in (keys.server, other.server):  # the first is known to nobody without the token
            stranger = strangers.make(zmq.PUSH)
            stranger.curve_publickey, stranger.curve_secretkey = other.client, other.client_secret
            stranger.curve_serverkey = server
            stranger.connect(url)
            stranger.send(b"strange", zmq.DONTWAIT)
        strangers.connect(zmq.PUSH, url).send(b"strange", zmq.DONTWAIT)
        friends.connect(zmq.PUSH, url).send(b"known")
        assert listening.recv() == b"known"
        assert not listening.poll(200)


def test_what_is_sent_cannot_be_read(host: Sockets) -> None:
    """An attacker in the middle, who sees every byte, cannot read it."""
    listening, url = host.listen()
    seen = bytearray()

    def forward(source: socket.socket, sink: socket.socket) -> None:
        while part := source.recv(65536):
            seen.extend(part)
            sink.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as middle:
        pushing = host.connect(zmq.PUSH, tcp_url("127.0.0.1", middle.getsockname()[1]))
        caller, _ = middle.accept()
    with caller, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as callee:
        threads = [threading.Thread(target=forward, args=each) for each in ((caller, callee), (callee, caller))]
        for thread in threads:
            thread.start()
        pushing.send(b"token ids" * 100)
        assert listening.recv() == b"token ids" * 100
        for each in (caller, callee):
            each.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
    assert len(seen) > 900
    assert b"token ids" not in seen


def test_a_large_message_is_refused_before_it_is_received(host: Sockets) -> None:
    _, url = host.listen()
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x00" + bytes(31)
    sent = 0
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as stranger:
        stranger.sendall(greeting + b"\x06" + (900 << 20).to_bytes(8, "big"))
        try:
            while sent < 900 << 20:
                sent += stranger.send(bytes(1 << 16))
        except ConnectionError:
            pass
    assert sent < 32 << 20  # the capacity of the kernel's buffers


@pytest.fixture(params=["", TOKEN], ids=["plain", "secured"])
def leader(request: pytest.FixtureRequest) -> Iterator[tuple[Leader, str]]:
    leader = Leader(
        Hello(name="node 0", number=0),
        "127.0.0.1",
        0,
        [1],
        on_lost=lambda *_: None,
        on_message=lambda *_: None,
        token=request.param,
    )
    yield leader, request.param
    leader.close()


def test_ranks_share_a_store_at_the_leader(leader: tuple[Leader, str]) -> None:
    url = tcp_url("127.0.0.1", leader[0].port)
    first = LinkStore(url, leader[1])
    second = first.clone()
    first.set("a", "1")
    first.multi_set(["b", "c"], [b"2", b"x" * (FRAME_BYTES + 1)])
    assert second.multi_get(["a", "b"]) == [b"1", b"2"]
    assert second.get("c") == b"x" * (FRAME_BYTES + 1)
    assert (first.add("n", 3), second.add("n", 4)) == (3, 7)
    assert (first.check(["a", "n"]), first.check(["a", "z"])) == (True, False)
    assert [first.compare_set("d", "", "e"), first.compare_set("d", "x", "f"), second.get("d")] == [b"e"] * 3
    second.append("d", "f")
    assert first.get("d") == b"ef"
    assert (first.num_keys(), first.delete_key("d"), second.delete_key("d"), first.num_keys()) == (5, True, False, 4)
    setting = threading.Timer(0.1, second.set, ("late", b"here"))
    setting.start()
    assert first.get("late") == b"here"
    setting.join()
    with pytest.raises(dist.DistStoreError, match="the keys never were not all set"):
        first.wait(["never"], timedelta(seconds=0.05))
    for store in (first, second):
        store.close()


def test_strange_calls_to_the_store_are_dropped(leader: tuple[Leader, str]) -> None:
    url = tcp_url("127.0.0.1", leader[0].port)
    with Sockets(leader[1]) as own:
        stranger = own.connect(zmq.DEALER, url)
        for body in (b"\xc1", msgspec.msgpack.encode(Call(1, "add", [])), msgspec.msgpack.encode(Call(1, "system"))):
            stranger.send_multipart((STORE, body))
        stranger.send_multipart((STORE, msgspec.msgpack.encode(Call(2, "num_keys"))))
        _, answer = stranger.recv_multipart()
        assert msgspec.msgpack.decode(answer)[0] == 2


def test_ranks_form_a_group_over_the_store(leader: tuple[Leader, str]) -> None:
    """gloo and torch's wrappers call the methods that they need."""
    store = LinkStore(tcp_url("127.0.0.1", leader[0].port), leader[1])
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        gathered = [None]
        dist.all_gather_object(gathered, "own")
        dist.new_group([0])
        assert gathered == ["own"]
    finally:
        dist.destroy_process_group()
        store.close()


def test_names_from_outside_stay_on_one_line() -> None:
    assert printable("node 1\n12:00:00 ERROR \x1b[2J né") == r"node 1\n12:00:00 ERROR \x1b[2J né"
    hello = Hello(name="a\nb", number=1, error="\x1b[1m")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=Hello) == Hello(
        name=r"a\nb", number=1, error=r"\x1b[1m"
    )


def test_connections_send_again_soon_after_a_cut() -> None:
    option, limit = network._TCP_RTO_MAX_MS, network._RTO_MAX_MS
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as caller:
        try:
            before = caller.getsockopt(socket.IPPROTO_TCP, option)
        except OSError:
            network.limit_all_retransmission()  # an older kernel: nothing happens
            return
        network.limit_all_retransmission()
        assert caller.getsockopt(socket.IPPROTO_TCP, option) == limit < before
        assert caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == network._UNANSWERED_MS


def test_own_addresses_are_known() -> None:
    assert is_local("127.0.0.1")
    assert is_local("localhost")
    assert not is_local("192.0.2.1")
