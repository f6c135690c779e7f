"""A store's process, and ranks of another host that write to its memory and read it over sockets with a token."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading

import pytest
import zmq

from quire.engine.config.engine_config import EngineConfig, KVStoreConfig
from quire.engine.config.kv_layout import KVKind
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.kv_store.launch import KVStoreArgs, start_kv_store
from quire.engine.kv_store.rank_server import RankServer
from quire.engine.protocol.kv_ranks import KVRuns, RankPlace
from quire.engine.protocol.kv_store import KVEntry, KVStoreOpened, RemoteArena
from quire.engine.protocol.supervision import Ready
from quire.engine.worker import arena_link
from quire.engine.worker.arena_link import ArenaLink, ArenaTransfer
from tests.fakes.kv_store import Host, chain, content, parents
from tests.integration.engine.kv_store.test_process import StoreUnderTest, ZmqCore

TOKEN = "a token of hosts"


class FirstHost(StoreUnderTest):
    """Has the store of a replica that spans hosts."""

    def __init__(self, config: EngineConfig) -> None:
        parallel = dataclasses.replace(config.parallel, cluster_token=TOKEN)
        store = KVStoreConfig(memory_bytes=2**26)
        super().__init__(dataclasses.replace(config, parallel=parallel, kv_store=store))

    def start(self) -> None:
        args = KVStoreArgs(self.config, self.address, self._folder.path, "info", rank_host="192.0.2.1")
        self.process = start_kv_store(args)

    def connect(self) -> tuple[ZmqCore, RemoteArena]:
        assert isinstance(self.hear(), Ready)
        core = ZmqCore(self.kinds, self.address)
        core.open()
        core.wait(lambda: bool(core.path))
        opened = core.received[0]
        assert isinstance(opened, KVStoreOpened)
        return core, RemoteArena(opened.address, core.replica, core.incarnation)


def transfers(core: ZmqCore, places: list[tuple[int, int]], *contents: bytes) -> list[ArenaTransfer]:
    """Whole entries, given by kind and offset."""
    found = []
    for number, (kind, offset) in enumerate(places):
        size = core.kinds[kind].size
        memory = memoryview(bytearray(contents[number] if contents else size))
        found.append(
            ArenaTransfer.of(RankPlace(core.path, kind, offset, [KVRuns(0, 2, size // 2, 1, 0, size // 2)]), memory)
        )
    return found


def test_ranks_of_another_host_write_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is killed is late once, and not asked again at once; the next one has another address."""
    monkeypatch.setattr(arena_link, "SECONDS", 30.0)
    monkeypatch.setenv("QUIRE_HOST_IP", "127.0.0.1")  # the other address is translated
    host = FirstHost(resolve(EngineOptions(device="cpu", max_model_len=256, max_num_seqs=4)))
    with contextlib.ExitStack() as stack:
        stack.callback(host.close)
        host.start()
        core, remote = host.connect()
        stack.callback(core.close)
        links = chain(*range(20))
        core.parents |= parents(links)
        core.offer(links)
        core.wait(lambda: bool(core.grants))
        link = ArenaLink(remote, 1, TOKEN, clock=lambda: 0.0)
        stack.callback(link.close)
        grants = [(entry.kind, offset) for offset, entry in core.grants.items()]
        expected = [content(entry, core.kinds[entry.kind].size) for entry in core.grants.values()]
        assert not link.copy(transfers(core, grants, *expected), is_store=True)
        for offset, own in zip(core.grants, expected, strict=True):
            assert core.memory[offset : offset + len(own)] == own
        core.finish()
        call = core.load_all([KVEntry(each, 0) for each in links])
        places = [(0, offset) for offset in core.loaded[call].values() if offset is not None]
        asked = transfers(core, places)
        assert not link.copy(asked, is_store=False)
        for each, own in zip(asked, links, strict=True):
            assert each.memory == content(KVEntry(own, 0), core.kinds[0].size)
        core.release(call)
        core.tiers(links)  # what came before is done
        assert [*link.copy(asked[:2], is_store=False)] == [0, 1]

        monkeypatch.setattr(arena_link, "SECONDS", 0.3)
        stranger = ArenaLink(remote, 1, "another token")
        stack.callback(stranger.close)
        assert "did not answer" in stranger.copy(asked[:1], is_store=False)[0]
        assert host.process is not None
        host.process.kill()
        host.end()
        assert "did not answer" in link.copy(asked[:1], is_store=False)[0]
        assert link.copy(asked[:1], is_store=False) == {0: "it has been late"}
        host.start()
        again, moved = host.connect()
        stack.callback(again.close)
        assert moved.address != remote.address


def test_a_store_that_ranks_of_other_hosts_cannot_reach_serves_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOST_IP", "192.0.2.1")  # nobody's
    host = FirstHost(resolve(EngineOptions(device="cpu", max_model_len=256, max_num_seqs=4)))
    with contextlib.ExitStack() as stack:
        stack.callback(host.close)
        host.start()
        core, remote = host.connect()
        stack.callback(core.close)
        assert remote.address == ""


class LateStore:
    """A store in this process that hears ranks of other hosts only at times."""

    def __init__(self, num_entries: int, size: int) -> None:
        self.host, self._poller = Host([KVKind((0,), size)], 4 * num_entries * size), zmq.Poller()
        self._server = RankServer(self.host.store.of_ranks, "127.0.0.1", TOKEN, self._poller)
        self.core, self.hears, self.size = self.host.core(0, 5), threading.Event(), size
        self.core.offer(chain(*range(num_entries)))
        self.offsets, self.lock = [*self.core.grants], threading.Lock()
        self.remote = RemoteArena(self._server.address, 0, 5)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self.hears.wait() and not self._is_closed:
            ready = dict(self._poller.poll(10))
            with self.lock:
                self._server.run(ready)

    def transfers(self, content: bytes) -> list[ArenaTransfer]:
        return [
            ArenaTransfer.of(
                RankPlace(self.core.path, 0, offset, [KVRuns(0, 1, 0, 1, 0, self.size)]),
                memoryview(bytearray(content * self.size)),
            )
            for offset in self.offsets
        ]

    @property
    def contents(self) -> list[bytes]:
        with self.lock:
            return [bytes(self.host.store.arena.view(0, each)) for each in self.offsets]

    def close(self) -> None:
        self._is_closed = True
        self.hears.set()
        self._thread.join()
        while ready := dict(self._poller.poll(0)):  # what came before
            self._server.run(ready)
        self._poller = zmq.Poller()
        self._server.close()


def test_a_store_that_was_late_gets_fewer_bytes_and_nothing_that_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier connection sent is still on its way when the next one writes the same entries."""
    monkeypatch.setattr(arena_link, "SECONDS", 60.0)
    monkeypatch.setattr(arena_link, "BATCH_BYTES", 64 << 10)
    now = 0.0
    with contextlib.ExitStack() as stack:
        store = LateStore(8, 1 << 10)
        stack.callback(store.close)
        link = ArenaLink(store.remote, 1, TOKEN, 0.05, lambda: now)
        stack.callback(link.close)
        assert not link.copy([], is_store=True)
        for number, (content, seconds) in enumerate(((b"a", 1.0), (b"b", 2.0), (b"c", 4.0), (b"d", 8.0), (b"e", 16.0))):
            assert link.copy(store.transfers(content), is_store=True)[7] == "it did not answer within 0.05 s"
            assert link.batch_bytes == 64 << 10 >> number + 1
            now += seconds - 0.01
            assert link.copy(store.transfers(content), is_store=True)[7] == "it has been late"
            now += 0.02
        assert "did not answer" in link.copy(store.transfers(b"f"), is_store=True)[7]
        now += 16.01
        link._max_seconds = 60.0
        threading.Timer(0.1, store.hears.set).start()
        assert not link.copy(store.transfers(b"g"), is_store=True)
        assert link.batch_bytes == (1 << 10) + 512, "a sixteenth of what was copied in time"
        assert not link.copy(store.transfers(b"h"), is_store=True)
        store.close()
        assert {*store.contents} == {b"h" * store.size}


WHOLE = 1 << 62


class Cable:
    """Carries connections to a store, each with so many bytes there and back; what is left of them arrives later."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._store, self._listener = (host, int(port)), socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.limits = WHOLE, WHOLE
        """Of connections that come."""
        self._is_mended, self._ends = threading.Event(), list[socket.socket]()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                rank, store = self._listener.accept()[0], socket.create_connection(self._store)
                self._ends += [rank, store]
                for source, target, limit in ((rank, store, self.limits[0]), (store, rank, self.limits[1])):
                    self._threads.append(threading.Thread(target=self._carry, args=(source, target, limit)))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket, left: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data[:left])
                if len(data) > left:
                    self._is_mended.wait()
                    target.sendall(data[left:])
                    left = WHOLE
                left -= len(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let all arrive that is on its way, of connections that end."""
        self._is_mended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for each in self._threads:
            each.join()
        for end in (self._listener, *self._ends):
            end.close()


@pytest.mark.parametrize("carried", [0, 700_000, 4_000_000])
@pytest.mark.parametrize("is_store", [True, False])
def test_a_cut_in_the_middle_of_copies_copies_entries_whole_or_not_at_all(
    is_store: bool, carried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank connects again, and then what the network still had arrives, and changes nothing."""
    monkeypatch.setattr(arena_link, "SECONDS", 60.0)
    now = 0.0
    with contextlib.ExitStack() as stack:
        store = LateStore(3, 3 << 19)
        stack.callback(store.close)
        if not is_store:
            entries = [*store.core.grants.values()]
            store.core.finish()
            store.core.load(entries)
        stored = store.contents
        store.hears.set()
        cable = Cable(store.remote.address)
        stack.callback(cable.close)
        link = ArenaLink(RemoteArena(cable.address, 0, 5), 1, TOKEN, 0.3, lambda: now)
        stack.callback(link.close)
        cable.limits = (carried, WHOLE) if is_store else (WHOLE, carried)
        asked = store.transfers(b"a")
        failed = link.copy(asked, is_store=is_store)
        assert failed
        found = store.contents if is_store else [bytes(each.memory) for each in asked]
        zeros, letters = [bytes(store.size)] * 3, [b"a" * store.size] * 3
        before, after = (zeros, letters) if is_store else (letters, stored)
        for number, each in enumerate(found):
            assert each == after[number] or (number in failed and each == before[number])
        now, cable.limits, link._max_seconds = 1.1, (WHOLE, WHOLE), 60.0
        asked = store.transfers(b"b")
        assert not link.copy(asked, is_store=is_store)
        expected = [b"b" * store.size] * 3 if is_store else stored
        assert [bytes(each.memory) for each in asked] == expected
    assert store.contents == expected
