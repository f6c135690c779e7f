"""The stores of several servers on one folder, under faults."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.engine.kv_store.disk import DiskTier
from quire.engine.protocol.kv_store import DISK, NO_TIER, ClearKV, KVEntry
from tests.fakes.disk_faults import FailingCalls, damage
from tests.fakes.kv_store import KINDS, SIGNATURE, Clock, Host, StoreCore, chain


class Server:
    """A store with a disk tier and a core."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.host = Host(KINDS, 20 * 4096, clock=clock)
        self.disk = DiskTier(path, 100_000, SIGNATURE, [kind.size for kind in KINDS], model="", clock=clock)
        self.host.store.use_disk(self.disk)
        self.core: StoreCore = self.host.core()

    def request(self, links: list[bytes]) -> int:
        """Load what there is of a prompt, and store the rest; returns how many entries came from disk. The core checks
        what it gets."""
        tiers = self.core.look_up(links)
        found = [
            (KVEntry(link, kind), tiers[kind][number])
            for number, link in enumerate(links)
            for kind in range(len(KINDS))
            if tiers[kind][number] != NO_TIER
        ]
        came = 0
        if found:
            self.core.parents |= dict(zip(links, [b"", *links], strict=False))
            call_id = self.core.load([entry for entry, _ in found])
            loaded = self.core.loaded[call_id]
            assert len(loaded) == len(found)
            came = sum(tier == DISK and loaded[number] is not None for number, (_, tier) in enumerate(found))
            self.core.release(call_id)
        self.core.store(links)
        return came

    def tick(self) -> None:
        self.host.store.tick()
        while self.disk.scan():
            pass
        self.host.deliver()
        self.host.store.check_integrity()
        self.disk.check_integrity()


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_request_gets_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """With a fault in a hundred requests: damaged files, calls that fail for some time, servers that end and start
    again, bits that flip in memory, and all entries forgotten."""
    choose, clock = random.Random(count), Clock()
    calls, servers = FailingCalls(monkeypatch, choose), [Server(tmp_path, clock) for _ in range(2)]
    prompts = [chain(*range(choose.randrange(5)), *(choose.randrange(3) for _ in range(10))) for _ in range(40)]
    from_disk = wrong = 0
    for number in range(count):
        clock.now += choose.random() * 2
        server = choose.choice(servers)
        from_disk += server.request(choose.choice(prompts)[: choose.randrange(1, 15)])
        if number % 5 == 0:
            for each in servers:
                each.tick()
        if number % 100 == 50:
            calls.rate = 0.0
            match choose.randrange(6):
                case 0 | 1:
                    damage(tmp_path, choose)
                case 2:
                    calls.rate = choose.choice((0.02, 0.5))
                case 3:
                    at = servers.index(server)
                    wrong += server.host.store.stats().wrong_checksums + server.disk.failed
                    server.host.store.close()
                    servers[at] = Server(tmp_path, clock)
                case 4:
                    server.core.memory[choose.randrange(len(server.core.memory))] ^= 1
                case 5 if choose.random() < 0.2:
                    server.host.store.handle(b"0.1", ClearKV(1))
                    server.host.deliver()
    calls.rate = 0.0
    assert from_disk > count / 10
    wrong += sum(each.host.store.stats().wrong_checksums + each.disk.failed for each in servers)
    assert wrong > 0
