"""Hosts that join, talk and are lost, as threads and processes of one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import psutil
import pytest
import zmq

from quire.engine.cluster import control_plane, handshake, network
from quire.engine.cluster.control_plane import LinkEnded, WakeQueue, WeightDigests
from quire.engine.cluster.follower import Follower
from quire.engine.cluster.handshake import Hello, compare
from quire.engine.cluster.leader import Leader
from quire.engine.distributed.link_store import LinkStore
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.weights_digest import digests
from tests.fakes.frames import DEEP

TOKEN = "a token for tests only"
NODE_0 = Hello(name="node 0 (here)", number=0)
_FOLLOW = """
import sys, time
from quire.engine.cluster.follower import Follower
from quire.engine.cluster.handshake import Hello
follower = Follower("127.0.0.1", int(sys.argv[1]), Hello(name="node 1 (here)", number=1), seconds=30)
time.sleep(60)
"""


class Host:
    """A leader, and the reports that it has received."""

    def __init__(self, *expected: int, rejoin: bool = False, token: str = "") -> None:
        self.token = token
        self.lost: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self.messages: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self.compared: SimpleQueue[int] = SimpleQueue()
        self.leader = Leader(
            NODE_0,
            "127.0.0.1",
            0,
            expected,
            on_lost=lambda number, end: self.lost.put((number, end.reason)),
            on_message=lambda number, body: self.messages.put((number, body)),
            on_compared=lambda number: self.compared.put(number),
            admits="again" if rejoin else "once",
            token=token,
        )
        self.followers: list[Follower] = []
        self.ends: SimpleQueue[LinkEnded] = SimpleQueue()

    def join(self, number: int, seconds: float = 60.0, name: str | None = None, token: str | None = None) -> Follower:
        hello = Hello(name=name or f"node {number} (here)", number=number)
        follower = Follower(
            "127.0.0.1",
            self.leader.port,
            hello,
            seconds=seconds,
            on_end=self.ends.put,
            leader="node 0",
            token=self.token if token is None else token,
        )
        self.followers.append(follower)
        return follower


@pytest.fixture
def two() -> Iterator[Host]:
    yield from hosting(1)


@pytest.fixture
def three() -> Iterator[Host]:
    yield from hosting(1, 2)


def hosting(*expected: int) -> Iterator[Host]:
    host = Host(*expected)
    yield host
    for follower in host.followers:
        follower.close()
    host.leader.close()


def test_messages_go_both_ways_in_their_order(three: Host) -> None:
    second, first = three.join(2), three.join(1)
    assert {n: hello.name for n, hello in three.leader.wait(10).items()} == {1: "node 1 (here)", 2: "node 2 (here)"}
    large = bytes(range(256)) * 20_000
    for number, follower in ((1, first), (2, second)):
        for n in range(100):
            three.leader.send(number, b"%d to %d" % (n, number))
            follower.send(b"%d" % n)
        three.leader.send(number, large)
        assert [follower.receive(10) for _ in range(100)] == [b"%d to %d" % (n, number) for n in range(100)]
        assert follower.receive(10) == large
        assert [three.messages.get(timeout=10) for _ in range(100)] == [(number, b"%d" % n) for n in range(100)]
    with pytest.raises(TimeoutError):
        first.receive(0.01)
    assert three.lost.empty()


def test_a_follower_measures_how_far_the_clock_of_the_leader_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "_HEARTBEAT_SECONDS", 0.1)
    hour, now = 3600 * 10**9, time.time_ns
    is_leader = {"cluster-leader": 1}
    monkeypatch.setattr(time, "time_ns", lambda: now() + hour * is_leader.get(threading.current_thread().name, 0))
    for host in hosting(1):
        follower = host.join(1)
        while not follower.clock.error:
            assert host.ends.empty()
            time.sleep(0.01)
        assert abs(follower.clock.offset - hour) <= follower.clock.error < hour


@pytest.mark.skipif(network.interface_of("::1") is None, reason="this host has no IPv6")
@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_leader_is_reached_over_ipv6_too(token: str) -> None:
    leader = Leader(NODE_0, "::1", 0, [1], on_lost=lambda *_: None, on_message=lambda *_: None, token=token)
    follower = Follower("::1", leader.port, Hello(name="node 1 (::1)", number=1), seconds=60, token=token)
    assert leader.wait(60).keys() == {1}
    follower.close()
    leader.close()


def test_followers_with_the_token_join_and_others_do_not(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(1, token=TOKEN)
    other = r"node 0 has another --cluster-token than this host, or none; use the same on all"
    with caplog.at_level("WARNING", "quire"):
        for token in ("", "another token that is long enough"):
            with pytest.raises(LinkEnded, match=other):
                host.join(1, token=token)
    assert "rejected a connection without the right --cluster-token" in caplog.text
    follower = host.join(1)
    large = bytes(range(256)) * 20_000
    host.leader.send(1, large)
    assert follower.receive(10) == large
    follower.send(large)
    assert host.messages.get(timeout=10) == (1, large)
    follower.close()
    host.leader.close()


def test_a_follower_with_a_token_finds_a_leader_without_one(two: Host) -> None:
    with pytest.raises(LinkEnded, match="node 0 has another --cluster-token than this host, or none"):
        two.join(1, token=TOKEN)


def test_an_address_of_another_host_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"--master-addr 192.0.2.1 is not an address of this host.*as another node"):
        Leader(NODE_0, "192.0.2.1", 0, [1], on_lost=lambda *_: None, on_message=lambda *_: None, token=TOKEN)


def test_a_follower_may_come_first(free_port: int) -> None:
    came: SimpleQueue[Follower] = SimpleQueue()

    def follow() -> None:
        hello = Hello(name="node 1", number=1)
        came.put(Follower("127.0.0.1", free_port, hello, seconds=60))

    thread = threading.Thread(target=follow)
    thread.start()
    thread.join(0.5)
    leader = Leader(NODE_0, "127.0.0.1", free_port, [1], on_lost=lambda *_: None, on_message=lambda *_: None)
    assert list(leader.wait(60)) == [1]
    follower = came.get(timeout=10)
    leader.send(1, b"plan")
    assert follower.receive(10) == b"plan"
    follower.close()
    leader.close()
    thread.join()


def test_who_does_not_come_is_named_in_time(three: Host) -> None:
    three.join(1)
    with pytest.raises(ConfigError, match=r"node 2 did not join at port \d+ within 1 s: 1 of 2 joined \(node 1 \(here"):
        three.leader.wait(0.6)


def test_a_leader_that_does_not_come_is_named_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        port = silent.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"node 0 did not answer at 127.0.0.1:{port} within 1 s; check that"):
            Follower(
                "127.0.0.1",
                port,
                Hello(name="node 1", number=1),
                seconds=0.6,
                leader="node 0",
            )


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"cannot join at port \d+ .* in use; choose another with --master-port"):
            Leader(NODE_0, "127.0.0.1", port, [1], on_lost=lambda *_: None, on_message=lambda *_: None)


def test_a_number_is_taken_once(two: Host) -> None:
    first = two.join(1)
    with pytest.raises(LinkEnded, match=r"other cannot join: node 1 \(here\) is node 1 already"):
        two.join(1, name="other")
    with pytest.raises(LinkEnded, match="node 1 can join here, not 7"):
        two.join(7)
    two.leader.wait(10)
    two.leader.send(1, b"still")
    assert first.receive(10) == b"still"


def test_a_follower_that_differs_is_rejected_and_named() -> None:
    def check(hello: Hello) -> None:
        if hello.body:
            raise ConfigError(f"{hello.name} is not wanted")

    for changes, address, text in (
        ({"error": "no such model"}, "", r"node 1 \(10.0.0.2\): no such model"),
        ({"settings": {"--dtype": "float16"}}, "", "has --dtype float16, and node 0 .here. has float32; start every"),
        ({}, "10.0.0.2", r"--master-addr 127.0.0.1: node 1 .* cannot reach that address of node 0 \(here\); start"),
        ({"body": b"x"}, "", "is not wanted"),
    ):
        own = Hello(name="node 0 (here)", number=0, settings={"--dtype": "float32"})
        leader = Leader(own, "127.0.0.1", 0, [1], on_lost=lambda *_: None, on_message=lambda *_: None, check=check)
        hello = msgspec.structs.replace(Hello(name="node 1 (10.0.0.2)", number=1, address=address), **changes)
        with pytest.raises(LinkEnded, match=text):
            Follower("127.0.0.1", leader.port, hello, seconds=10)
        with pytest.raises(ConfigError, match=text):
            leader.wait(10)
        leader.close()


def test_the_launcher_reports_processes_that_end(three: Host) -> None:
    follower = three.join(1)
    three.leader.fail(1, "node 1 (here): its Ray actor died")
    assert three.lost.get(timeout=10) == (1, "node 1 (here): its Ray actor died")
    three.leader.fail(2, "too late")
    with pytest.raises(ConfigError, match="its Ray actor died"):
        three.leader.wait(10)
    while 2 not in three.leader._lost:
        time.sleep(0.001)
    with pytest.raises(LinkEnded, match="cannot join again"):
        three.join(2)
    assert follower.ended is None


@pytest.mark.parametrize("reason", ["", "rank 1 was killed by SIGKILL"])
def test_closing_sends_the_reason(two: Host, reason: str) -> None:
    follower = two.join(1)
    two.leader.send(1, b"last")
    two.leader.close(reason)
    assert follower.receive(10) == b"last"
    for _ in range(2):
        with pytest.raises(LinkEnded) as ended:
            follower.receive(10)
        assert ended.value.reason == reason
    assert two.ends.get(timeout=10).reason == reason


def test_a_follower_that_leaves_says_why(two: Host) -> None:
    two.join(1).close("out of memory")
    assert two.lost.get(timeout=10) == (1, "node 1 (here) has ended: out of memory")


@pytest.mark.parametrize(
    ("number", "how", "lost_seconds"),
    [(signal.SIGKILL, "connection has closed", 60.0), (signal.SIGSTOP, "received from it", 1.0)],
)
def test_a_follower_that_is_lost_is_noticed(two: Host, number: signal.Signals, how: str, lost_seconds: float) -> None:
    two.leader._lost_seconds = lost_seconds
    process = subprocess.Popen([sys.executable, "-c", _FOLLOW, str(two.leader.port)])
    try:
        two.leader.wait(30)
        os.kill(process.pid, number)
        lost, text = two.lost.get(timeout=10)
        assert (lost, how in text, text.startswith("node 1 (here) was lost")) == (1, True, True)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(LinkEnded, match="cannot join again"):
        two.join(1)


def test_a_leader_that_falls_silent_is_noticed() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as leader:
        leader.setsockopt(zmq.LINGER, 0)
        port = leader.bind_to_random_port("tcp://127.0.0.1")
        ends: SimpleQueue[LinkEnded] = SimpleQueue()

        def welcome() -> None:
            identity, *_ = leader.recv_multipart()
            leader.send_multipart((identity, control_plane.WELCOME, b""))

        thread = threading.Thread(target=welcome)
        thread.start()
        hello = Hello(name="n", number=1)
        follower = Follower("127.0.0.1", port, hello, seconds=10, on_end=ends.put, lost_seconds=1.0)
        thread.join()
        assert "was lost: nothing was received from it for 1 s" in ends.get(timeout=10).reason
        with pytest.raises(LinkEnded, match="was lost: nothing was received from it for 1 s"):
            follower.receive(10)
        follower.close()


def test_a_leader_whose_connection_closes_is_noticed() -> None:
    with zmq.Context() as context:
        leader = context.socket(zmq.ROUTER)
        leader.setsockopt(zmq.LINGER, 0)
        port = leader.bind_to_random_port("tcp://127.0.0.1")

        def welcome() -> None:
            identity, *_ = leader.recv_multipart()
            leader.send_multipart((identity, control_plane.WELCOME, b""))

        thread = threading.Thread(target=welcome)
        thread.start()
        ends: SimpleQueue[LinkEnded] = SimpleQueue()
        follower = Follower("127.0.0.1", port, Hello(name="n", number=1), seconds=10, on_end=ends.put)
        thread.join()
        leader.close()
        assert f"the host at 127.0.0.1:{port} was lost: its connection has closed" in ends.get(timeout=10).reason
        follower.close()


def test_who_is_lost_may_come_again_where_that_is_wanted() -> None:
    host = Host(1, rejoin=True)
    first = host.join(1)
    host.leader.start(b"addresses")
    assert first.receive(10) == b"addresses"
    first.close()
    assert host.lost.get(timeout=10) == (1, "node 1 (here) has left")
    assert host.join(1).receive(10) == b"addresses"
    assert list(host.leader.wait(1)) == [1]
    host.leader.close()
    host.followers[1].close()


def test_the_store_of_the_ranks_is_empty_after_each_start(two: Host) -> None:
    follower, store = two.join(1), LinkStore(network.tcp_url("127.0.0.1", two.leader.port), "")
    with contextlib.closing(store):
        for body in (b"first", b"second"):
            two.leader.start(body)
            assert follower.receive(10) == body
            assert store.num_keys() == 0
            store.set("a rank's address", body)


def test_a_leader_that_fails_by_itself_has_lost_everybody(two: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = two.join(1)

    def fail(number: int, body: bytes) -> None:
        raise ValueError("what is this?")

    monkeypatch.setattr(two.leader, "_on_message", fail)
    follower.send(b"")
    assert two.lost.get(timeout=10) == (1, "node 1 (here) was lost: ValueError: what is this?")
    assert two.ends.get(timeout=10).reason == "node 0 was lost: its connection has closed"


def test_what_is_said_after_the_end_goes_nowhere(two: Host) -> None:
    """By a thread that found the leader's alive a moment ago."""
    two.join(1)
    two.leader.wait(10)
    two.leader.close()
    two.leader.send(1, b"too late")


def test_garbage_at_the_port_costs_nothing(two: Host) -> None:
    follower = two.join(1)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), b"\xff" * 64):
        with socket.create_connection(("127.0.0.1", two.leader.port)) as stranger:
            stranger.sendall(garbage)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://127.0.0.1:{two.leader.port}")
        deep = msgspec.msgpack.encode({"name": "deep", "number": 1, "unknown": DEEP})
        hellos = [[control_plane.HELLO, each] for each in (b"\xc1", deep)]
        for frames in ([b""], *hellos, [control_plane.BODY, b"x"], [b"?", b"?"], [b"a"] * 5):
            stranger.send_multipart(frames)
    two.leader.send(1, b"plan")
    assert follower.receive(10) == b"plan"
    follower.send(b"result")
    assert two.messages.get(timeout=10) == (1, b"result")
    assert two.lost.empty()


def test_other_versions_and_other_files_are_named(tmp_path: Path) -> None:
    def hello(number: int, versions: dict[str, str], model: dict[str, str]) -> Hello:
        return Hello(name=f"node {number} (10.0.0.{number})", number=number, versions=versions, model=model)

    mine = hello(0, {"torch": "2.11"}, {"config.json": "a", "b.safetensors": "5 bytes"})
    compare(mine, hello(1, mine.versions, mine.model))
    for versions, model, text in (
        ({"torch": "2.12"}, mine.model, r"node 1 \(10.0.0.1\) has torch 2.12, and node 0 \(10.0.0.0\) has 2.11"),
        (mine.versions, {**mine.model, "config.json": "b"}, r"node 1 .* has other bytes in config.json, unlike node 0"),
        (mine.versions, {"config.json": "a"}, r"node 1 .* has no b.safetensors, unlike node 0"),
        (mine.versions, {**mine.model, "c": "1"}, r"node 1 .* has a c, unlike node 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            compare(mine, hello(1, versions, model))
    assert handshake.versions().keys() == {"python", "torch", "quire-llm"}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    found = handshake.fingerprint(tmp_path)
    assert found["model.safetensors"].startswith("5 bytes, ")
    (tmp_path / "config.json").write_text("{ }")
    changed = handshake.fingerprint(tmp_path)
    assert {name for name in found if found[name] != changed[name]} == {"config.json"}


def test_other_weights_of_the_same_size_are_found(tmp_path: Path) -> None:
    """At once if a sample differs, and otherwise in the background."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(3 << 20)
            if name == "b":
                file.write(b"another header")
            if name == "c":
                file.seek((1 << 20) + 77)
                file.write(b"!")
    samples = {name: handshake.fingerprint(tmp_path / name)["model.safetensors"] for name in ("a", "b", "c")}
    assert samples["a"] == samples["c"] != samples["b"]
    whole = {name: digests(handshake.weight_files(tmp_path / name))["model.safetensors"] for name in ("a", "b", "c")}
    assert len(set(whole.values())) == 3


@pytest.mark.parametrize("first", ["leader", "follower"])
def test_a_follower_with_other_weights_is_lost(three: Host, first: str) -> None:
    same, other = three.join(1), three.join(2)
    three.leader.wait(10)
    if first == "leader":
        three.leader.set_digests(WeightDigests({"model.safetensors": "a"}))
    same.set_digests(WeightDigests({"model.safetensors": "a"}))
    other.set_digests(WeightDigests({"model.safetensors": "b"}))
    if first == "follower":
        three.leader.set_digests(WeightDigests({"model.safetensors": "a"}))
    what = "has other bytes in model.safetensors, unlike node 0 (here)"
    text = f"node 2 (here) {what}; copy the same model files to every host"
    assert three.lost.get(timeout=10) == (2, text)
    with pytest.raises(LinkEnded) as ended:
        other.receive(10)
    assert ended.value.reason == text
    assert ended.value.is_final
    assert three.compared.get(timeout=10) == 1
    three.leader.send(1, b"plan")
    assert same.receive(10) == b"plan"
    assert same.has_same_weights
    assert three.leader.has_same_weights(1)
    assert three.lost.empty()
    assert three.compared.empty()


def test_a_host_that_cannot_read_its_weights_is_lost(two: Host) -> None:
    follower = two.join(1)
    two.leader.wait(10)
    two.leader.set_digests(WeightDigests({"model.safetensors": "a"}))
    follower.set_digests(WeightDigests({}, "the weights cannot be read: it is broken"))
    assert two.lost.get(timeout=10) == (1, "node 1 (here): the weights cannot be read: it is broken")


def test_a_failure_that_cannot_heal_is_told(three: Host) -> None:
    follower, leaver = three.join(1), three.join(2)
    three.leader.wait(10)
    leaver.close("it does not fit", is_final=True)
    assert three.lost.get(timeout=10) == (2, "node 2 (here) has ended: it does not fit")
    three.leader.close("it does not fit", is_final=True)
    with pytest.raises(LinkEnded) as ended:
        follower.receive(10)
    assert (ended.value.reason, ended.value.is_final) == ("it does not fit", True)


def test_a_queue_wakes_who_polls_it() -> None:
    queue: WakeQueue[int] = WakeQueue()
    with select.epoll() as epoll:
        epoll.register(queue.fd, select.EPOLLIN)
        assert not epoll.poll(0)
        for number in range(3):
            queue.put(number)
        assert epoll.poll(0)
        assert list(queue.drain()) == [0, 1, 2]
        assert not epoll.poll(0)
        assert not list(queue.drain())
    queue.close()
    queue.put(4)
    assert queue.get(0) == 4


def test_own_address_and_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_HOST_IP", raising=False)
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.77") is None
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid cannot be reached"):
        network.address_towards("no-such-host.invalid")
    monkeypatch.setenv("QUIRE_HOST_IP", "10.9.8.7")
    assert network.address_towards("127.0.0.1") == "10.9.8.7"


def test_every_address_has_its_interface() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for family, address, *_ in addresses:
            if family in (socket.AF_INET, socket.AF_INET6):
                assert network.interface_of(address) == name
