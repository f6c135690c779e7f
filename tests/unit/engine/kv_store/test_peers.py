"""The stores of several hosts, which read from each other, under faults."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import msgspec
import pytest

from quire.engine.kv_store.peer_server import PeerServer
from quire.engine.kv_store.peers import ANSWER_SECONDS, PIECE_SECONDS, PeerTier
from quire.engine.protocol import kv_peers
from quire.engine.protocol.kv_peers import FromPeer, ToPeer
from quire.engine.protocol.kv_store import MEMORY, NO_TIER, PEER, ClearKV, FoundKV, KVEntry, LookUpKV
from tests.fakes.kv_store import KINDS, SIGNATURE, FakeDisk, Host, StoreCore, chain, parents

SIZES = [kind.size for kind in KINDS]
ROOM = 20 * 4096


def address(name: str) -> str:
    return f"{name}:1"


class Network:
    """Hosts whose messages arrive in order. Each is called by its number."""

    def __init__(
        self,
        count: int,
        *,
        signatures: tuple[bytes, ...] = (),
        bandwidth: float = 0,
        own: Callable[[str], str] = address,
    ) -> None:
        """`own`: the address that a host has for itself."""
        self.now = 0.0
        self.messages: list[Callable[[], None]] = []
        """Those under way."""
        self.change: Callable[[bytes], bytes | None] = lambda frame: frame
        """What becomes of a frame; None: it is lost."""
        self.cut = set[str]()
        """Hosts that nothing reaches or leaves."""
        self.full = set[str]()
        """Hosts that take no answers."""
        self.bandwidth = bandwidth
        self.signatures = {str(at): signatures[at] if signatures else SIGNATURE for at in range(count)}
        self.own = own
        self.hosts: dict[str, Host] = {}
        self.tiers: dict[str, PeerTier] = {}
        self.cores: dict[str, StoreCore] = {}
        for name in self.signatures:
            self.start(name)
        self.wait(0.0)

    def start(self, name: str) -> None:
        """Start a host, in place of an earlier one."""
        host = self.hosts[name] = Host(KINDS, ROOM, clock=lambda: self.now, doubling=5)
        tier = self.tiers[name] = PeerTier(
            self.signatures[name], SIZES, lambda to, message: self.carry(name, to, message), lambda: self.now
        )
        tier.use([address(each) for each in self.signatures])  # a store knows itself
        host.server = PeerServer(
            self.signatures[name],
            SIZES,
            host.store.handle,
            lambda links, counts_granted: host.store.find(links, counts_granted=counts_granted),
            host.store.locate,
            host.store.forget_replica,
            tier,
            self.own(name),
            lambda to, message, content: self.answer(name, to.decode(), message, content),
            self.bandwidth,
            lambda: self.now,
        )
        host.store.use_peers(tier, 1)
        self.cores[name] = host.core()

    def carry(self, name: str, to: str, message: ToPeer) -> None:
        self._send(name, to.partition(":")[0], [msgspec.msgpack.encode(message)], self._ask)

    def answer(self, name: str, to: str, message: FromPeer, content: memoryview | None) -> bool:
        if to in self.full:
            return False
        frames = [msgspec.msgpack.encode(message), *([] if content is None else [bytes(content)])]
        self._send(name, to, frames, self._tell)
        return True

    def _send(self, name: str, to: str, frames: list[bytes], arrive: Callable[[str, str, list[bytes]], None]) -> None:
        if self.cut & {name, to}:
            return
        changed = [each for frame in frames if (each := self.change(frame)) is not None]
        tier, host = self.tiers[name], self.hosts[to]

        def deliver() -> None:
            if self.tiers[name] is tier and self.hosts[to] is host and not self.cut & {name, to}:
                arrive(name, to, changed)

        self.messages.append(deliver)

    def _ask(self, name: str, to: str, frames: list[bytes]) -> None:
        if frames:
            server = self.hosts[to].server
            assert server is not None
            server.receive(name.encode(), frames)
            self.hosts[to].deliver()

    def _tell(self, name: str, to: str, frames: list[bytes]) -> None:
        if frames:
            self.tiers[to].receive(address(name), frames)
            self.hosts[to].deliver()

    def run(self) -> None:
        """Let all messages arrive, and those that follow."""
        while True:
            for host in self.hosts.values():
                assert host.server is not None
                host.server.pump()
                host.deliver()
            if not self.messages:
                return
            waiting, self.messages = self.messages, []
            for deliver in waiting:
                deliver()

    def wait(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        self.run()
        self.now += seconds
        for name, tier in self.tiers.items():
            tier.tick()
            self.hosts[name].deliver()
        self.run()
        self.check()

    def check(self) -> None:
        for name, host in self.hosts.items():
            host.store.check_integrity()
            self.tiers[name].check_integrity()

    def look_up(self, name: str, links: list[bytes], peer: str = "") -> list[list[int]]:
        core = self.cores[name]
        count = sum(isinstance(each, FoundKV) for each in core.received)
        core._send(LookUpKV(1, links, peer=peer))
        self.run()
        if sum(isinstance(each, FoundKV) for each in core.received) == count:
            self.wait(ANSWER_SECONDS)
        found = [each for each in core.received if isinstance(each, FoundKV)]
        assert len(found) == count + 1, "every look-up is answered in time"
        return [list(each) for each in found[-1].tiers]

    def load(self, name: str, entries: list[KVEntry]) -> list[bool]:
        """Load entries; returns which have come. The core checks what it gets."""
        core = self.cores[name]
        call = core.load(entries)
        self.run()
        for _ in range(20):
            if len(core.loaded[call]) == len(entries):
                break
            self.wait(PIECE_SECONDS / 2)
        loaded = core.loaded[call]
        assert len(loaded) == len(entries), "every load is answered in time"
        come = [loaded[number] is not None for number in range(len(entries))]
        core.release(call)
        self.run()
        return come


def entries(links: list[bytes], *kinds: int) -> list[KVEntry]:
    return [KVEntry(link, kind) for link in links for kind in kinds or range(len(KINDS))]


def test_entries_of_other_hosts_are_found_and_fetched() -> None:
    """From their memory and their disk; then the reader has them itself, also on disk."""
    network, links = Network(3), chain(1, 2, 3, 4)
    disk, own_disk = FakeDisk(), FakeDisk()
    network.hosts["1"].store.use_disk(disk)
    network.hosts["0"].store.use_disk(own_disk)
    network.cores["0"].store(links[:1])
    network.cores["1"].store(links[:3])
    network.hosts["1"].store.entries.write(all_now=True)
    network.cores["1"].flip(KVEntry(links[2], 0))  # it finds that itself, and reads its file
    network.cores["2"].store(links, [0])
    assert network.look_up("0", links) == [[MEMORY, PEER, PEER, PEER], [MEMORY, PEER, PEER, NO_TIER]]
    network.cores["0"].parents |= parents(links)
    assert network.load("0", entries(links)) == [True] * 7 + [False]
    assert network.look_up("0", links) == [[MEMORY] * 4, [MEMORY, MEMORY, MEMORY, NO_TIER]]
    network.check()
    stats = network.hosts["0"].store.stats()
    assert (stats.peers_up, stats.peers, stats.failed_peers) == (["1:1", "2:1"], 2, 0)
    assert stats.loaded_peer_bytes == 3 * SIZES[0] + 2 * SIZES[1]
    network.hosts["0"].store.entries.write(all_now=True)
    assert own_disk.num_entries == 7
    assert network.hosts["1"].store.stats().wrong_checksums == 1


def test_another_model_has_nothing() -> None:
    network, links = Network(2, signatures=(SIGNATURE, b"another model   ")), chain(1)
    network.cores["1"].store(links)
    assert network.look_up("0", links) == [[NO_TIER], [NO_TIER]]
    assert network.tiers["0"]._peers["1:1"].error == "it has another model, version or cache type"


def test_the_peer_that_a_request_names_is_read() -> None:
    network, links = Network(3), chain(1, 2)
    network.cores["1"].store(chain(1, 2))
    network.cores["2"].store(links)
    for peer in ("1", "2"):
        network.look_up("0", links, address(peer))
        assert {*network.tiers["0"]._places.values()} == {address(peer)}


def test_what_the_named_peer_is_writing_is_waited_for() -> None:
    """As when another server has just computed a prompt; what others are writing may take long. It is known by the name
    that it has for itself, too."""
    network, links = Network(3, own=lambda name: f"{name}:7"), chain(1, 2)
    network.wait(1.0)
    network.cores["1"].store(links[:1])
    network.cores["1"].offer(links)
    network.cores["2"].offer(links)
    assert network.look_up("0", links)[0] == [PEER, NO_TIER]
    assert network.look_up("0", links, "1:7")[0] == [PEER, PEER]
    assert network.look_up("0", links, address("1"))[0] == [PEER, PEER]
    core = network.cores["0"]
    call = core.load(entries(links))
    network.run()
    assert {number for number, offset in core.loaded[call].items() if offset is not None} <= {0, 1}
    network.cores["1"].finish()
    network.run()
    assert sum(offset is not None for offset in core.loaded[call].values()) == 4
    network.check()


def come(core: StoreCore, call: int) -> dict[int, bool]:
    """Which entries of a load have come or failed."""
    return {number: offset is not None for number, offset in core.loaded[call].items()}


def test_what_a_peer_will_store_comes_as_it_is_stored() -> None:
    """What is still being written when the load settles is waited for; what nobody writes fails at once."""
    network, links = Network(2), chain(*range(5))
    reader, owner = network.cores["0"], network.cores["1"]
    reader.store(links[:1])
    owner.store(links[:2])
    reader.parents |= parents(links)
    call, again = (reader.load(entries(links), waits=True, peer=address("1")) for _ in range(2))
    network.wait(0.01)
    assert come(reader, call) == come(reader, again) == dict.fromkeys(range(4), True)
    owner.offer(links[:4])
    network.wait(0.05)
    owner.finish([offset for offset, entry in owner.grants.items() if entry.link == links[2]])
    network.wait(0.1)
    assert come(reader, call) == dict.fromkeys(range(6), True)
    network.wait(0.05)
    for each in (call, again):
        reader.settle(each)
    network.run()
    assert come(reader, call) == come(reader, again) == dict.fromkeys(range(6), True) | dict.fromkeys((8, 9), False)
    owner.finish()
    network.run()
    assert come(reader, call) == come(reader, again) == dict.fromkeys(range(8), True) | dict.fromkeys((8, 9), False)
    network.wait(0.5)
    assert not network.tiers["0"]._expectations
    assert not network.hosts["0"].store._loads._expected


def test_a_peer_that_will_store_nothing_is_asked_less_and_less() -> None:
    network, links = Network(2), chain(*range(3))
    asked = list[float]()
    ask = network.tiers["0"]._send

    def send(to: str, message: ToPeer) -> None:
        asked.extend([network.now] * isinstance(message, kv_peers.AskPeer))
        ask(to, message)

    network.tiers["0"]._send = send
    core = network.cores["0"]
    call = core.load(entries(links), waits=True, peer=address("1"))
    for _ in range(200):
        network.wait(0.01)
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert pauses[:5] == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.4], abs=0.02)
    core.release(call)
    network.wait(0.4)
    assert not network.tiers["0"]._expectations


@pytest.mark.parametrize("fault", ["vanishes", "starts again", "loses", "damages", "leaves"])
def test_a_load_of_what_a_peer_will_store_ends_in_time(fault: str) -> None:
    """Whatever happens to the peer. What did not come is asked for again until the load settles."""
    network, links = Network(2), chain(*range(6))
    reader, owner = network.cores["0"], network.cores["1"]
    reader.parents |= parents(links)
    call = reader.load(entries(links, 0), waits=True, peer=address("1"))
    owner.store(links[:2], [0])
    network.wait(0.4)
    assert come(reader, call) == {0: True, 1: True}
    owner.store(links[:4], [0])
    match fault:
        case "vanishes":
            network.cut.add("1")
        case "starts again":
            network.start("1")
        case "leaves":
            network.tiers["0"].use([])
        case _:
            network.change = lambda frame: (
                (bytes(1000) if fault == "damages" else None) if len(frame) == 1000 else frame
            )
    for _ in range(10):
        network.wait(0.4)
    assert come(reader, call) == {0: True, 1: True}
    if fault in ("loses", "damages"):
        network.change = lambda frame: frame
        for _ in range(30):
            network.wait(0.5)
        assert come(reader, call) == dict.fromkeys(range(4), True)
    before = network.now
    reader.settle(call)
    while len(come(reader, call)) < 6:
        network.wait(0.1)
    assert network.now <= before + ANSWER_SECONDS + 0.1
    assert not come(reader, call)[5]


def test_what_was_lost_on_its_way_is_asked_for_again() -> None:
    """Also if nothing else is expected, until the load settles or ends."""
    network, links = Network(2), chain(*range(4))
    reader, tier = network.cores["0"], network.tiers["0"]
    reader.parents |= parents(links)
    network.cores["1"].store(links, [0])
    network.change = lambda frame: None if len(frame) == SIZES[0] else frame
    calls = [reader.load(entries(links, 0), waits=True, peer=address("1")) for _ in range(2)]
    network.wait(0.1)
    assert not any(come(reader, call) for call in calls)
    network.change = lambda frame: frame
    for _ in range(10):
        network.wait(0.4)
    assert [come(reader, call) for call in calls] == [dict.fromkeys(range(4), True)] * 2
    assert len(tier._expectations) == 2
    reader.settle(calls[0])
    reader.release(calls[1])
    network.wait(0.4)
    assert not tier._expectations


def test_a_load_that_settles_waits_for_the_named_peer_alone() -> None:
    network, links = Network(3), chain(1, 2)
    network.wait(1.0)
    reader = network.cores["0"]
    reader.parents |= parents(links)
    call = reader.load(entries(links, 0), waits=True, peer=address("1"))
    network.wait(0.01)
    network.cores["1"].store(links[:1], [0])
    network.cut.add("2")
    reader.settle(call)
    network.run()
    assert come(reader, call) == {0: True, 1: False}


def test_a_peer_that_falls_silent_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and when it is back, also if nobody has asked it for anything."""
    caplog.set_level("INFO")
    network = Network(2)
    network.wait(1.0)
    caplog.clear()
    network.cut.add("1")
    for _ in range(8):
        network.wait(1.0)
    assert network.hosts["0"].store.stats().peers_up == []
    network.cut.clear()
    network.wait(1.0)
    assert network.hosts["0"].store.stats().peers_up == ["1:1"]
    silent = "is not in use: it has been silent for 3 seconds"
    told = [text.split("1:1 ")[1] for text in caplog.messages if "1:1" in text]
    assert told == [silent, "is in use"]


def test_a_peer_that_has_never_been_reached_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Once: the port or the token may be wrong, or its server starts later."""
    caplog.set_level("INFO")
    network = Network(2)
    network.cut.add("1")
    network.start("0")
    caplog.clear()
    for _ in range(25):
        network.wait(1.0)
    network.cut.clear()
    network.wait(1.0)
    told = [text.split("1:1 ")[1] for text in caplog.messages if "the KV store at 1:1" in text]
    unreached = "has not been reached yet: is its server up, with the same --cluster-token, and is this port open?"
    assert told == [unreached, "is in use"]


def test_nobody_asks_on_behalf_of_another() -> None:
    """Host 0 has learned that 2 has an entry, and 1 asks 0 for it."""
    network, links = Network(3), chain(1)
    network.cores["2"].store(links)
    assert network.look_up("0", links) == [[PEER], [PEER]]
    server = network.hosts["0"].server
    assert server is not None
    told: list[FromPeer] = []

    def tell(name: bytes, message: FromPeer, content: memoryview | None) -> bool:
        told.append(message)
        return True

    server._send = tell
    server.receive(b"1", [msgspec.msgpack.encode(kv_peers.FetchKV(SIGNATURE, 5, entries(links)))])
    network.hosts["0"].deliver()
    assert told == [kv_peers.PeerLacks(5, [0, 1])]
    assert network.hosts["0"].store.stats().memory_entries == 0


def test_a_peer_that_hangs_costs_one_wait() -> None:
    """It is asked again when it has been heard of, later each time; the others answer meanwhile."""
    network, links = Network(3), chain(1, 2)
    network.cores["1"].store(links)
    network.cores["2"].store(links[:1])
    assert network.look_up("0", links)[0] == [PEER, PEER]
    network.cut.add("1")
    before = network.now
    assert network.look_up("0", links)[0] == [PEER, NO_TIER]
    assert network.now == before + ANSWER_SECONDS
    assert network.look_up("0", links)[0] == [PEER, NO_TIER]
    assert network.now == before + ANSWER_SECONDS
    assert network.load("0", entries(links, 0)) == [True, False]
    network.cut.clear()
    for _ in range(2):
        network.wait(1.0)
    assert network.look_up("0", links)[0] == [MEMORY, PEER]


@pytest.mark.parametrize("fault", ["vanishes", "hangs", "starts again", "damages", "loses", "repeats"])
def test_half_an_entry_is_never_used(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Whatever happens between any two pieces, the load is answered, with right bytes."""
    monkeypatch.setattr("quire.engine.kv_store.peer_server.PIECE_BYTES", 300)
    links = chain(1, 2, 3)
    for at in range(9):
        network, count = Network(2), 0
        network.cores["1"].store(links)
        assert network.look_up("0", links)[0] == [PEER] * 3

        def change(frame: bytes, network: Network = network, at: int = at) -> bytes | None:
            nonlocal count
            count += len(frame) in (300, 100)
            if len(frame) not in (300, 100) or count != at + 1:
                return frame
            match fault:
                case "vanishes" | "hangs":
                    network.cut.add("1")
                case "starts again":
                    network.start("1")
                case "damages":
                    return bytes([frame[0] ^ 1]) + frame[1:]
                case "repeats":
                    return frame + frame
            return None

        network.change = change
        come = network.load("0", entries(links, 0))
        assert sum(come) == 2 if fault == "damages" else sum(come) < 3
        network.change = lambda frame: frame
        stats = network.hosts["0"].store.stats()
        assert stats.wrong_checksums == (fault == "damages")
        network.wait(1.0)


def test_a_load_that_is_given_up_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been asked for comes, and has a place until it has come."""
    monkeypatch.setattr("quire.engine.kv_store.peers.FETCH_BYTES", 1000)
    network, links = Network(2), chain(*range(8))
    network.cores["1"].store(links, [0])
    network.look_up("0", links)
    core = network.cores["0"]
    call = core.load(entries(links, 0))
    core.release(call)
    network.check()
    network.run()
    network.check()
    assert network.hosts["0"].store.stats().memory_entries == kv_peers.MAX_FETCHES


def test_bytes_leave_as_fast_as_the_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.kv_store.peers.LEAST_RATE", 1000)
    network, links = Network(2, bandwidth=4000.0), chain(*range(10))
    network.cores["1"].store(links, [0])
    network.look_up("0", links)
    core, before = network.cores["0"], network.now
    call = core.load(entries(links, 0))
    while len(core.loaded[call]) < 10:
        network.wait(0.05)
    assert network.now - before == pytest.approx(10_000 / 4000, abs=0.3)


@pytest.mark.parametrize("how", ["cut", "full"])
def test_a_reader_that_has_gone_gives_its_entries_back(how: str) -> None:
    """Also one that goes on to say hello, and takes nothing."""
    network, links = Network(2, bandwidth=100.0), chain(1, 2, 3)
    network.cores["1"].store(links, [0])
    network.look_up("0", links)
    network.cores["0"].load(entries(links, 0))
    for _ in range(3):
        network.wait(0.01)
    getattr(network, how).add("0")
    assert any(entry.pins for entry in network.hosts["1"].store.index)
    for _ in range(80):
        network.wait(0.5)
    assert not any(entry.pins for entry in network.hosts["1"].store.index)


def test_readers_share_a_budget_or_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are so small that no reader finds the store late; one that would get too little is told at once."""
    for module in ("peers", "peer_server"):
        monkeypatch.setattr(f"quire.engine.kv_store.{module}.LEAST_RATE", 500)
    network, links = Network(4, bandwidth=2000.0), chain(*range(4))
    network.cores["0"].store(links, [0])
    calls = dict[str, int]()
    for name in ("1", "2", "3"):
        network.look_up(name, links)
        calls[name] = network.cores[name].load(entries(links, 0))
        network.run()
    assert [*network.cores["3"].loaded[calls["3"]].values()] == [None] * 4
    for _ in range(100):
        network.wait(0.05)
    assert all(None not in network.cores[name].loaded[calls[name]].values() for name in ("1", "2"))
    assert [tier.stats().failed for tier in network.tiers.values()] == [0] * 4


def test_a_reader_that_takes_nothing_holds_no_other_up() -> None:
    """What it was told waits, within a bound, until it takes it."""
    network, links = Network(3), chain(*range(4))
    network.cores["0"].store(links, [0])
    for name in ("1", "2"):
        network.look_up(name, links)
    network.full.add("1")
    call = network.cores["1"].load(entries(links, 0))
    assert network.load("2", entries(links, 0)) == [True] * 4
    server = network.hosts["0"].server
    assert server is not None
    ask = msgspec.msgpack.encode(kv_peers.AskPeer(SIGNATURE, 5, links))
    for _ in range(200):
        server.receive(b"1", [ask])
    assert len(server._readers[b"1"].untold) == 64
    assert 0 < server.seconds_left() < 0.1
    network.full.clear()
    network.wait(0.01)
    assert all(offset is not None for offset in network.cores["1"].loaded[call].values())


def test_a_peer_that_drips_is_late() -> None:
    """However often a piece of it comes."""
    network, links = Network(2), chain(1, 2)
    network.cores["1"].store(links)
    network.look_up("0", links)
    server, tier = network.hosts["1"].server, network.tiers["0"]
    assert server is not None
    server._send = lambda name, message, content: True
    call = network.cores["0"].load(entries(links[:1], 0))
    network.run()
    (call_id,) = tier._fetches
    for at in range(5):
        network.wait(PIECE_SECONDS / 2)
        piece = kv_peers.PeerPiece(call_id, 0, at, b"x" * 16)
        tier.receive(address("1"), [msgspec.msgpack.encode(piece), b"y"])
    assert [*network.cores["0"].loaded[call].values()] == [None]
    assert tier.stats().failed == 1


@pytest.mark.parametrize("what", ["damaged", "nonsense"])
def test_a_peer_whose_bytes_are_wrong_is_left_alone(what: str) -> None:
    """For longer each time; what it has is computed."""
    network, links = Network(2), chain(*range(30))
    network.cores["1"].store(links)
    rests = list[float]()

    def damage(frame: bytes) -> bytes:
        return bytes(SIZES[0] * (what == "damaged")) if len(frame) == SIZES[0] else frame

    for link in links[:3]:
        assert network.look_up("0", [link])[0] == [PEER]
        network.change = damage
        assert network.load("0", entries([link], 0)) == [False]
        network.change = lambda frame: frame
        start = network.now
        while not network.tiers["0"].is_usable:
            network.wait(0.5)
        rests.append(network.now - start)
    assert rests == [1.0, 2.0, 4.0]
    assert network.load("0", entries(links[3:4], 0)) == [False]  # nobody has said where it is
    assert network.look_up("0", links[3:4])[0] == [PEER]
    assert network.load("0", entries(links[3:4], 0)) == [True]
    assert network.tiers["0"]._peers[address("1")].num_failed == 0


def test_an_entry_in_place_of_another_is_damaged() -> None:
    """Also if its bytes are whole."""
    network, links = Network(2), chain(1, 2)
    network.cores["1"].store(links)
    network.look_up("0", links)

    def swap(frame: bytes) -> bytes:
        try:
            message = msgspec.msgpack.decode(frame, type=kv_peers.FetchKV)
        except msgspec.DecodeError:
            return frame
        message.entries.reverse()
        return msgspec.msgpack.encode(message)

    network.change = swap
    assert network.load("0", entries(links, 0)) == [False, False]
    assert network.hosts["0"].store.stats().wrong_checksums == 2


def test_what_a_dead_core_was_writing_makes_no_peer_late() -> None:
    """The owner gives up before the reader does, and has the rest."""
    network, links = Network(2), chain(1, 2)
    network.cores["1"].store(links[:1])
    network.cores["1"].offer(links)
    assert network.look_up("0", links, address("1"))[0] == [PEER, PEER]
    assert network.load("0", entries(links, 0)) == [True, False]
    assert network.tiers["0"].stats() == (["1:1"], 1, 0)
    core = network.cores["0"]
    core._send(LookUpKV(9, links, counts_granted=True))  # a resumed request
    network.run()
    assert core.received[-1] == FoundKV(9, [bytes([MEMORY, NO_TIER]), bytes([PEER, NO_TIER])])


def test_a_cleared_server_stays_cleared() -> None:
    """One host is told after another, and there is a request between."""
    network, links = Network(2), chain(1, 2)
    for name in ("0", "1"):
        network.cores[name].store(links)
    assert network.look_up("0", chain(1, 3))
    network.cores["0"]._send(ClearKV(9))
    network.run()
    assert [network.hosts[name].store.stats().peers_up for name in ("0", "1")] == [[], ["0:1"]], "the router is told"
    assert network.look_up("0", links) == [[NO_TIER] * 2] * 2
    assert network.load("0", entries(links)) == [False] * 4
    network.cores["1"]._send(ClearKV(9))
    for _ in range(2):
        network.wait(5.0)
        network.wait(1.0)
    network.cores["1"].store(chain(1))
    assert network.look_up("0", links)[0] == [PEER, NO_TIER]


def test_questions_of_others_keep_nothing_young() -> None:
    """What they fetch is used."""
    network, first, second = Network(2), chain(1), chain(2)
    network.cores["1"].store(first)
    network.cores["1"].store(second)
    network.look_up("0", first)
    assert network.hosts["1"].store.index.evict(b"")[0].link == first[0]


def test_a_reader_tells_nothing_of_chains() -> None:
    """What it fetches from disk has no parents, so that it cannot make a circle of them."""
    network, links, disk = Network(2), chain(1, 2), FakeDisk()
    store = network.hosts["1"].store
    store.use_disk(disk)
    network.cores["1"].store(links)
    store.entries.write(all_now=True)
    for entry in [*store.index]:
        store.entries.forget(entry)
    network.cores["0"].parents = dict(zip(links, reversed(links), strict=True))
    assert network.look_up("0", links)[0] == [PEER, PEER]
    assert network.load("0", entries(links)) == [True] * 4
    assert [store.index.parent(link) for link in links] == [b"", b""]


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_request_gets_wrong_bytes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """With a fault in a hundred requests: hosts that vanish, hang and start again, messages that are lost or damaged,
    bits that flip in memory, and all entries forgotten."""
    monkeypatch.setattr("quire.engine.kv_store.peer_server.PIECE_BYTES", 256)
    choose, network = random.Random(count), Network(3)
    prompts = [chain(*range(choose.randrange(5)), *(choose.randrange(3) for _ in range(10))) for _ in range(40)]
    rate, until, from_peers, failed, wrong = 0.0, 0.0, 0, 0, 0

    def change(frame: bytes) -> bytes | None:
        is_content = len(frame) in (256, SIZES[0] % 256, SIZES[1] % 256)
        if choose.random() >= (rate if is_content else rate / 10):
            return frame
        if not is_content:
            return None  # of other frames, whose damage the links find, only the loss
        at = choose.randrange(len(frame))
        return frame[:at] + bytes([frame[at] ^ 1 << choose.randrange(8)]) + frame[at + 1 :]

    network.change = change
    for number in range(count):
        name = choose.choice([*network.hosts])
        core, links = network.cores[name], choose.choice(prompts)[: choose.randrange(1, 15)]
        tiers = network.look_up(name, links, address(choose.choice([*network.hosts])))
        found = [entry for entry in entries(links) if tiers[entry.kind][links.index(entry.link)] != NO_TIER]
        core.parents |= parents(links)
        if found and choose.random() < 0.2:  # of a request whose prompt the other computes meanwhile
            call = core.load(entries(links), waits=True, peer=address(choose.choice([*network.hosts])))
            network.cores[choose.choice([*network.hosts])].store(links)
            for seconds in (0.1, 0.2):
                network.wait(seconds)
            core.settle(call)
            for _ in range(10):
                network.wait(0.3)
            assert len(core.loaded[call]) == len(entries(links)), "every load is answered in time"
            core.release(call)
        elif found:
            from_peers += sum(tiers[entry.kind][links.index(entry.link)] == PEER for entry in found)
            failed += network.load(name, found).count(False)
        core.store(links)
        network.wait(choose.random())
        if network.now >= until:
            network.cut.clear()
            rate = 0.0
        if number % 100 == 50:
            until = network.now + choose.random() * 20
            match choose.randrange(6):
                case 0:
                    network.cut.add(name)
                case 1 | 5:
                    rate = choose.choice((0.1, 0.5))
                case 2:
                    wrong += network.hosts[name].store.stats().wrong_checksums
                    network.hosts[name].store.close()
                    network.start(name)
                case 3:
                    core.memory[choose.randrange(len(core.memory))] ^= 1
                case 4 if choose.random() < 0.3:
                    network.hosts[name].store.handle(b"0.1", ClearKV(1))
                    network.hosts[name].deliver()
    assert from_peers > count / 10
    assert failed > 0
    assert wrong + sum(host.store.stats().wrong_checksums for host in network.hosts.values()) > 0
