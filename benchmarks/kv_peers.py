"""What a KV store loads from that of another host: bytes per second over the loopback interface, and processor time.

.venv/bin/python benchmarks/kv_peers.py

Two processes of the bundled model's store, without a cluster token and with one, which encrypts. The owner has the
entries in memory, and checks them; the reader checks them again. A look-up is the time until a core knows what the
other host has. Processor seconds are those of both processes and all of their threads, and depend little on the load of
the machine.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from hashlib import blake2b
from pathlib import Path

import psutil

from quire.engine.config.engine_config import KVStoreConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.core.launch import reserve_ports, socket_port
from quire.engine.protocol.kv_store import KVEntry, StoredKV

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.fakes.kv_store import parents
from tests.integration.engine.kv_store.test_peer_processes import Peer
from tests.integration.engine.kv_store.test_process import ZmqCore

ENTRIES = 4000
TOGETHER = 500
MEMORY = 1 << 29


def processor_seconds(stores: list[Peer]) -> float:
    times = [psutil.Process(store.process.pid).cpu_times() for store in stores]  # type: ignore[union-attr]
    return sum(each.user + each.system for each in times)


def fill(core: ZmqCore, links: list[bytes]) -> None:
    """Store an entry for each link; the content does not matter."""
    for start in range(0, len(links), TOGETHER):
        core.offer_entries([KVEntry(link, 0) for link in links[start : start + TOGETHER]])
        core.wait(lambda: len(core.grants) == TOGETHER)
        core._send_frame(StoredKV([*core.grants], [], core.path))
        core.grants.clear()
    size = core.kinds[0].size
    core.wait_for_stats(lambda stats: stats.stored_bytes == len(links) * size)


def measure(token: str) -> None:
    reserved = reserve_ports("127.0.0.1", 2)
    first, second = (socket_port(each) for each in reserved)
    config = resolve(EngineOptions(device="cpu", max_model_len=256, max_num_seqs=4))
    stores = [Peer(config, token, first, second), Peer(config, token, second, first)]
    links = [b""]
    for number in range(ENTRIES):
        links.append(blake2b(links[-1] + b"%d" % number, digest_size=16).digest())
    del links[0]
    cores = list[ZmqCore]()
    try:
        for store in stores:
            store.config = dataclasses.replace(store.config, kv_store=KVStoreConfig(memory_bytes=MEMORY))
            store.start()
        cores += [store.connect() for store in stores]
        owner, reader = cores
        for core in cores:
            core.parents |= parents(links)
            core.check = lambda entry, offset: None  # type: ignore[method-assign]
            core.wait_for_stats(lambda stats: len(stats.peers_up) == 1)
        fill(owner, links)
        began = time.perf_counter()
        assert all(reader.tiers(links)[0])
        look_up, used = time.perf_counter() - began, processor_seconds(stores)
        began = time.perf_counter()
        reader.load_all([KVEntry(link, 0) for link in links])
        seconds, used = time.perf_counter() - began, processor_seconds(stores) - used
        size = ENTRIES * owner.kinds[0].size
        print(
            f"{'with a token' if token else 'without a token'}: look-up of {ENTRIES:,} links {look_up * 1000:.0f} ms, "
            f"{size / 1e6:.0f} MB in entries of {owner.kinds[0].size:,} bytes at {size / seconds / 1e6:.0f} MB/s, "
            f"{used / size * 1e9:.2f} processor seconds per GB"
        )
    finally:
        for core in cores:
            core.close()
        for store in stores:
            store.close()
        for port in reserved:
            port.close()


if __name__ == "__main__":
    measure("")
    measure("a token of many characters")
