"""Processes of KV stores that read from each other, over sockets with a token."""

from __future__ import annotations

import dataclasses
import itertools
import socket
from collections.abc import Iterator

import pytest

from quire.engine.config.engine_config import EngineConfig, KVStoreConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.core.launch import reserve_ports, socket_port
from quire.engine.kv_store.launch import KVStoreArgs, start_kv_store
from quire.engine.protocol.kv_store import MEMORY, NO_TIER, PEER, KVEntry
from quire.engine.protocol.supervision import Failed, Ready, UseKVPeers
from tests.fakes.kv_store import chain, parents
from tests.fakes.waiting import until
from tests.integration.engine.kv_store.test_process import StoreUnderTest, ZmqCore


class Peer(StoreUnderTest):
    """A store that is read at an address, and reads from others."""

    def __init__(self, config: EngineConfig, token: str, port: int, *others: int, host: str = "127.0.0.1") -> None:
        parallel = dataclasses.replace(config.parallel, cluster_token=token)
        kv_store = KVStoreConfig(memory_bytes=2**26)
        super().__init__(dataclasses.replace(config, parallel=parallel, kv_store=kv_store))
        self._own, self._others = f"{host}:{port}", tuple(f"127.0.0.1:{each}" for each in others)

    def start(self) -> None:
        args = KVStoreArgs(self.config, self.address, self._folder.path, "info", self._own, self._others)
        self.process = start_kv_store(args)

    def connect(self) -> ZmqCore:
        assert isinstance(self.hear(), Ready)
        core = ZmqCore(self.kinds, self.address)
        core.open()
        core.wait(lambda: bool(core.path))
        return core


@pytest.fixture
def ports() -> Iterator[list[int]]:
    reserved: list[socket.socket] = reserve_ports("127.0.0.1", 3)
    yield [socket_port(each) for each in reserved]
    for each in reserved:
        each.close()


def until_found(core: ZmqCore, links: list[bytes]) -> None:
    """Look up a chain until the peer has answered in time that it has all of it."""
    tiers = list[list[int]]()

    def are_found() -> bool:
        tiers[:] = core.tiers(links)
        return tiers == [[PEER] * len(links)] * len(core.kinds)

    until(are_found, seen=lambda: tiers)


def load_all(core: ZmqCore, entries: list[KVEntry]) -> None:
    """Load entries from a peer, and again those for which it was late, once a look-up has found them there again."""
    late, links = entries, [*dict.fromkeys(entry.link for entry in entries)]

    def are_loaded() -> bool:
        nonlocal late
        core.tiers(links)
        call = core.load(late)
        core.wait(lambda: len(core.loaded[call]) == len(late))
        late = [late[number] for number, offset in core.loaded[call].items() if offset is None]
        core.release(call)
        return not late

    until(are_loaded, seen=lambda: f"{len(late)} entries are late")


def test_stores_read_from_each_other(ports: list[int]) -> None:
    """One with another token has no part in it, and one that was killed is gone."""
    config, token = resolve(EngineOptions(device="cpu", max_model_len=256, max_num_seqs=4)), "a token of hosts"
    stores = [
        Peer(config, token, ports[0], ports[1], ports[2]),
        Peer(config, token, ports[1], ports[0], ports[2]),
        Peer(config, token + " elsewhere", ports[2], ports[0]),
    ]
    cores = list[ZmqCore]()
    try:
        for store in stores:
            store.start()
        cores += [store.connect() for store in stores]
        first, second, stranger = cores
        for core in (first, second):
            core.wait_for_stats(lambda stats: len(stats.peers_up) == 1)
        links = chain(*range(200))  # several fetches
        for core in cores:
            core.parents |= parents(links)
        first.store_all(links)
        first.wait_for_stats(lambda stats: stats.memory_bytes == stats.stored_bytes > 0)
        entries = [KVEntry(link, kind) for link in links for kind in range(len(first.kinds))]
        until_found(second, links)
        load_all(second, entries)
        stats = second.wait_for_stats(lambda stats: stats.loaded_peer_bytes > 0)
        assert stats.loaded_peer_bytes == 200 * sum(kind.size for kind in first.kinds)
        count = stats.loaded_peer_bytes
        first.wait_for_stats(lambda stats: stats.sent_peer_bytes >= count)
        assert stranger.tiers(links)[0] == [NO_TIER] * 200
        assert stranger.wait_for_stats(lambda stats: stats.peers == 1).peers_up == []

        later = chain(*range(200, 220))
        second.store_all(later)
        second.wait_for_stats(lambda stats: stats.stored_bytes > 0)
        until_found(first, later)
        num_failed = first.wait_for_stats(lambda stats: True).failed_peers
        begins = itertools.count(100, 50)

        def are_loaded_soon() -> bool:
            soon = chain(*range(begin := next(begins), begin + 50))
            second.parents |= parents(soon)
            call = second.load([KVEntry(link, 0) for link in soon], waits=True, peer=f"127.0.0.1:{ports[0]}")
            first.store_all(soon[:20])
            second.wait(lambda: len(second.loaded[call]) >= 20)
            first.store_all(soon)
            second.wait(lambda: len(second.loaded[call]) == 50)
            loaded = second.loaded[call].values()
            second.release(call)
            return None not in loaded

        until(are_loaded_soon)  # the peer may have been late
        stores[1].send(UseKVPeers(()))
        assert second.wait_for_stats(lambda stats: stats.peers == 0).peers_up == []
        stores[1].send(UseKVPeers((f"127.0.0.1:{ports[0]}",)))
        stats = second.wait_for_stats(lambda stats: stats.peers_up == [f"127.0.0.1:{ports[0]}"])
        num_failed += stats.failed_peers
        assert num_failed <= 2, "peers are late only while the machine is busy"
        assert stores[1].process is not None
        stores[1].process.kill()
        assert first.tiers(chain(*range(220, 240)))[0] == [NO_TIER] * 20
        assert first.tiers(links)[0] == [MEMORY] * 200
    finally:
        for core in cores:
            core.close()
        for store in stores:
            store.close()


def test_a_port_that_the_server_before_has_is_waited_for(ports: list[int]) -> None:
    config = resolve(EngineOptions(device="cpu", max_model_len=256, max_num_seqs=4))
    store = Peer(config, "", ports[0])
    with socket.socket() as other, socket.socket() as client:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", ports[0]))
        other.listen()
        store.start()
        assert isinstance(store.hear(), Ready)
        other.close()
        until(lambda: client.connect_ex(("127.0.0.1", ports[0])) == 0)
    store.close()


def test_an_address_of_another_host_is_the_users_error(ports: list[int]) -> None:
    config = resolve(EngineOptions(device="cpu", max_model_len=256, max_num_seqs=4))
    store = Peer(config, "", ports[0], host="192.0.2.1")
    store.start()
    failed = store.hear()
    assert isinstance(failed, Failed)
    assert "the KV store cannot listen at 192.0.2.1" in failed.reason
    store.end()
    store.close()
