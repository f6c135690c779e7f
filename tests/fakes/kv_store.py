"""Stands in for what is around a KV store: cores with their ranks, threads, a disk tier."""

from __future__ import annotations

import math
import mmap
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_128
from typing import Any

from quire.engine.config.kv_layout import KVKind
from quire.engine.kv_store.arena import open_arena
from quire.engine.kv_store.disk import DiskTier
from quire.engine.kv_store.entries import Lane, run_now
from quire.engine.kv_store.index import EntryState
from quire.engine.kv_store.peer_server import PeerServer
from quire.engine.kv_store.store import KVStore
from quire.engine.protocol.kv_store import (
    DISK,
    MEMORY,
    DescribeKV,
    FoundKV,
    FromStore,
    GrantedKV,
    HeardKVTiers,
    KVEntry,
    KVStoreOpened,
    KVTiersChanged,
    LoadedKV,
    LoadKV,
    LookUpKV,
    OfferKV,
    OpenKVStore,
    ReleaseKV,
    SettleKV,
    StoredKV,
    ToStore,
)

KINDS = (KVKind((0,), 1000), KVKind((1,), 600, window=2))
"""All tokens, and a window of two blocks."""
SIGNATURE = b"signature of 16 "


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def chain(*numbers: int) -> list[bytes]:
    """Return the links of a chain of blocks, each of which has a number."""
    links = [b""]
    for number in numbers:
        links.append(blake2b(links[-1] + bytes([number]), digest_size=16).digest())
    return links[1:]


def number_of(link: bytes) -> int:
    """Return how events name a block."""
    return int.from_bytes(link[:8])


def parents(links: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the link before each link of a chain."""
    return dict(zip(links, [b"", *links], strict=False))


def content(entry: KVEntry, size: int) -> bytes:
    """What ranks have of an entry."""
    return shake_128(entry.link + bytes([entry.kind])).digest(size)


class Jobs:
    """Runs the jobs of a store when it is told to, in any order in which they may end."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Lane, Callable[[], Any], Callable[[Any], None]]] = []

    def submit(self, lane: Lane, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.waiting.append((lane, job, done))

    def run(self, choose: random.Random | None = None) -> None:
        """Run all that wait, or with `choose` one of them."""
        while self.waiting:
            first = {lane: at for at, (lane, _, _) in reversed(list(enumerate(self.waiting)))}
            # Those of one thread end in order.
            ready = [at for at, (lane, _, _) in enumerate(self.waiting) if lane is not Lane.WRITE or at == first[lane]]
            _, job, done = self.waiting.pop(choose.choice(ready) if choose else 0)
            done(job())
            if choose:
                return


class FakeDisk(DiskTier):
    """A disk tier in memory."""

    error = ""

    def __init__(self) -> None:
        self.capacity, self.evicted_entries, self.failed = 2**30, 0, 0
        self.files: list[list[KVEntry]] = []
        """What was written together."""
        self.stored: dict[KVEntry, tuple[bytes, bytes]] = {}
        """Content and checksum."""
        self.used = set[KVEntry]()
        self.written_bytes = 0
        self.changed = deque()
        self.is_broken = False
        """Whether reads fail."""

    @property
    def used_bytes(self) -> int:
        return sum(len(each) for each, _ in self.stored.values())

    @property
    def num_entries(self) -> int:
        return len(self.stored)

    def __contains__(self, entry: KVEntry) -> bool:
        return entry in self.stored

    def holds(self, entry: KVEntry) -> bool:
        return entry in self.stored

    def use(self, entries: Iterable[KVEntry]) -> None:
        self.used.update(entries)

    def drop(self, entry: KVEntry) -> None:
        self.stored.pop(entry, None)
        self.changed.append(entry)

    def read(self, entries: Sequence[KVEntry], buffers: Sequence[memoryview]) -> list[bytes | None]:
        sums = list[bytes | None]()
        for entry, buffer in zip(entries, buffers, strict=True):
            found, checksum = (b"", None) if self.is_broken else self.stored.get(entry, (b"", None))
            buffer[: len(found)] = found
            sums.append(checksum)
        return sums

    def write(self, entries: Sequence[KVEntry], contents: Sequence[memoryview], checksums: Sequence[bytes]) -> bool:
        if self.error:
            return False
        new = [number for number, entry in enumerate(entries) if entry not in self.stored]
        if new:
            self.files.append([entries[number] for number in new])
        for number in new:
            self.stored[entries[number]] = bytes(contents[number]), checksums[number]
            self.changed.append(entries[number])
            self.written_bytes += len(contents[number])
        return True

    def clear(self) -> tuple[int, str]:
        count = len(self.stored)
        self.changed.extend(self.stored)
        self.stored.clear()
        return count, ""

    def damage(self, entry: KVEntry) -> None:
        """Flip a bit of an entry."""
        found, checksum = self.stored[entry]
        self.stored[entry] = bytes([found[0] ^ 4]) + found[1:], checksum


class StoreCore:
    """A core and its ranks. It fails when it is given bytes that no rank has written for that entry."""

    def __init__(
        self,
        kinds: Sequence[KVKind],
        send: Callable[[ToStore], None],
        replica: int = 0,
        incarnation: int = 1,
        *,
        has_events: bool = False,
    ) -> None:
        self.has_events = has_events
        self.kinds, self._send, self.replica, self.incarnation = kinds, send, replica, incarnation
        self.memory = memoryview(b"")
        """The arena, as the ranks have it mapped."""
        self.path = ""
        self.received: list[FromStore] = []
        self.parents: dict[bytes, bytes] = {}
        """By link."""
        self.grants: dict[int, KVEntry] = {}
        """By offset."""
        self.loads: dict[int, list[KVEntry]] = {}
        self.loaded: dict[int, dict[int, int | None]] = {}
        """By call: the offset of each entry, None: failed."""
        self.announced: set[tuple[int, int, int]] = set()
        """Tier, kind and number in events of what the store says that it has."""
        self._next_call = 0

    def open(self) -> None:
        self._send(OpenKVStore(self.replica, self.incarnation, self.has_events))

    def receive(self, message: FromStore) -> None:
        self.received.append(message)
        match message:
            case KVTiersChanged(stored, removed, is_first, number):
                self._send(HeardKVTiers(number))
                if is_first:
                    self.announced.clear()
                self.announced.difference_update(removed)
                assert all(block == b"described" for *_, block in stored)
                self.announced |= {(tier, kind, number) for tier, kind, number, _ in stored}
            case KVStoreOpened(path, size):
                if path != self.path:
                    self.path, self.memory = path, map_arena(path, size)
            case GrantedKV(entries, offsets):
                assert len(entries) == len(offsets)
                assert not self.grants.keys() & set(offsets)
                self.grants.update(zip(offsets, entries, strict=True))
            case LoadedKV(call_id, numbers, offsets, failed):
                loaded = self.loaded[call_id]
                assert not loaded.keys() & {*numbers, *failed}
                loaded.update(zip(numbers, offsets, strict=True))
                loaded.update(dict.fromkeys(failed))
                for number, offset in zip(numbers, offsets, strict=True):
                    self.check(self.loads[call_id][number], offset)

    def check(self, entry: KVEntry, offset: int) -> None:
        size = self.kinds[entry.kind].size
        assert bytes(self.memory[offset : offset + size]) == content(entry, size), "wrong bytes"

    def offer(self, links: Sequence[bytes], kinds: Sequence[int] | None = None) -> None:
        """Offer blocks of a chain, given from its begin on."""
        self.parents |= parents(links)
        entries = [KVEntry(link, kind) for link in links for kind in kinds or range(len(self.kinds))]
        self.offer_entries(entries)

    def offer_entries(self, entries: list[KVEntry]) -> None:
        links = [*{entry.link: None for entry in entries}]
        if self.has_events:
            self._send(DescribeKV(links, [*map(number_of, links)], [b"described"] * len(links)))
        self._send(OfferKV(entries, [self.parents[entry.link] for entry in entries]))

    def write(self, offset: int) -> None:
        """Let the ranks write a granted entry."""
        entry = self.grants[offset]
        size = self.kinds[entry.kind].size
        self.memory[offset : offset + size] = content(entry, size)

    def finish(self, offsets: Sequence[int] | None = None) -> None:
        """Write granted entries and say so."""
        chosen = list(self.grants) if offsets is None else list(offsets)
        for offset in chosen:
            self.write(offset)
        for offset in chosen:
            del self.grants[offset]
        self._send(StoredKV(chosen, [], self.path))

    def abandon(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            del self.grants[offset]
        self._send(StoredKV([], list(offsets), self.path))

    def store(self, links: Sequence[bytes], kinds: Sequence[int] | None = None) -> None:
        """Store blocks of a chain, given from its begin on."""
        self.offer(links, kinds)
        self.finish()

    def load(self, entries: list[KVEntry], *, waits: bool = False, peer: str = "") -> int:
        """Begin to load; returns the call."""
        self._next_call += 1
        call_id = self._next_call
        self.loads[call_id], self.loaded[call_id] = entries, {}
        self._send(LoadKV(call_id, entries, [self.parents.get(entry.link, b"") for entry in entries], waits, peer))
        return call_id

    def settle(self, call_id: int) -> None:
        """Wait no longer for what nobody writes."""
        self._send(SettleKV(call_id))

    def release_loaded(self, call_id: int) -> None:
        """Release what has been loaded until now."""
        if numbers := [number for number, offset in self.loaded[call_id].items() if offset is not None]:
            self._send(ReleaseKV(call_id, numbers))

    def release(self, call_id: int) -> None:
        del self.loads[call_id], self.loaded[call_id]
        self._send(ReleaseKV(call_id))

    def flip(self, entry: KVEntry, byte: int = 0) -> None:
        """Let the memory flip a bit of an entry."""
        call_id = self.load([entry])
        offset = self.loaded[call_id][0]
        assert offset is not None
        self.memory[offset + byte] ^= 1
        self.release(call_id)

    def look_up(self, links: Sequence[bytes], peer: str = "") -> list[list[int]]:
        """Return the tiers of each link, by kind."""
        self._send(LookUpKV(0, list(links), peer=peer))
        found = self.received[-1]
        assert isinstance(found, FoundKV)
        return [list(each) for each in found.tiers]


def map_arena(path: str, size: int) -> memoryview:
    """Map an arena, as ranks do."""
    fd = open_arena(path)
    try:
        return memoryview(mmap.mmap(fd, size))
    finally:
        os.close(fd)


class Host:
    """A store with cores, in one process: messages arrive at once, in order."""

    def __init__(
        self,
        kinds: Sequence[KVKind],
        memory_bytes: int,
        jobs: Jobs | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        doubling: float = math.inf,
    ) -> None:
        self.kinds, self.cores = kinds, dict[bytes, StoreCore]()
        self._sent: list[tuple[bytes, FromStore]] = []
        self.server: PeerServer | None = None
        submit = run_now if jobs is None else jobs.submit
        self.store = KVStore(
            kinds, memory_bytes, lambda *each: self._sent.append(each), submit, clock, doubling=doubling
        )

    def core(self, replica: int = 0, incarnation: int = 1) -> StoreCore:
        """Return a core that has opened the store."""
        client = f"{replica}.{incarnation}".encode()

        def send(message: ToStore) -> None:
            self.store.handle(client, message)
            self.deliver()

        core = self.cores[client] = StoreCore(self.kinds, send, replica, incarnation, has_events=True)
        core.open()
        return core

    @property
    def tiers(self) -> set[tuple[int, int, int]]:
        """What cores should know: tier, kind and number in events."""
        found = {
            (MEMORY, entry.kind, number_of(entry.link)) for entry in self.store.index if entry.state is EntryState.READY
        }
        if isinstance(disk := self.store.entries.disk, FakeDisk):
            found |= {(DISK, entry.kind, number_of(entry.link)) for entry in disk.stored}
        return found

    def deliver(self) -> None:
        """Let the cores receive what the store has sent."""
        while self._sent:
            client, message = self._sent.pop(0)
            if PeerServer.is_reader(client):
                assert self.server is not None
                self.server.deliver(client, message)
            else:
                self.cores[client].receive(message)
