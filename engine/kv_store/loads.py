"""Loads of a KV store: entries that cores read, from memory, disk and peers.

Each entry of a load is checked, read or fetched, or waited for while somebody else does that or stores it. The core is
told of each as soon as it is there, or cannot be had. Until it is released, its place stays the load's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from quire.engine.config.kv_layout import KVKind
from quire.engine.kv_store.checksum import bind, checksum
from quire.engine.kv_store.disk import DiskTier
from quire.engine.kv_store.entries import JOB_BYTES, Lane, StoreEntries
from quire.engine.kv_store.index import Entry, EntryState, Key
from quire.engine.kv_store.peers import PeerTier
from quire.engine.kv_store.tier_events import TierEvents
from quire.engine.protocol.kv_store import DISK, MEMORY, PEER, FromStore, KVEntry, KVStoreStats, LoadedKV, LoadKV

_LOAD_READS = 4
"""Jobs of one load that are being read, or wait for a thread: a long load does not delay others."""
_WAVE = 64
"""Entries for which a load looks at once that has found no place for all."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StoreLoad:
    """A `LoadKV`."""

    core: OpenCore
    call_id: int
    entries: list[KVEntry]
    parents: list[bytes]
    held: dict[int, Entry] = field(default_factory=dict)
    """By number: the entries that it has a pin on, those whose fate is not known included."""
    waits: bool = False
    """It waits for entries that nobody is writing yet."""
    peer: str = ""
    """See `LoadKV`."""
    expected: set[int] = field(default_factory=set)
    """Numbers of entries that are neither here nor on their way from disk, and that it waits for."""
    unread: deque[int] = field(default_factory=deque)
    """Numbers of entries that find no place before some of those that are held have been released."""
    is_released: bool = False


@dataclass(eq=False)
class OpenCore:
    """A core that has opened the store."""

    replica: int
    """Below 0: the store of another host, which gets what this one has itself."""
    incarnation: int
    client: bytes
    """The name of its connection."""
    loads: dict[int, StoreLoad] = field(default_factory=dict)
    """By call."""
    grants: dict[int, Entry] = field(default_factory=dict)
    """By offset."""
    connections: dict[int, int] = field(default_factory=dict)
    """By rank: the number of the last connection with which a rank of another host has used an entry."""


class LoadSources(Protocol):
    """Where loads find what is not in memory, and a place for it: the store."""

    disk: DiskTier | None
    peers: PeerTier | None

    @property
    def usable_peers(self) -> PeerTier | None: ...

    def is_on_disk(self, link: bytes, kind: int, /) -> bool: ...

    def make(self, key: KVEntry, parent: bytes, state: EntryState, /) -> Entry | None: ...

    def save(self, entry: Entry, /) -> None: ...


class StoreLoads:
    """The loads of all cores."""

    def __init__(
        self,
        kinds: Sequence[KVKind],
        entries: StoreEntries,
        sources: LoadSources,
        events: TierEvents,
        stats: KVStoreStats,
        send: Callable[[bytes, FromStore], None],
    ) -> None:
        self._kinds, self._entries, self._index, self._sources = kinds, entries, entries.index, sources
        self._events, self._stats, self._send = events, stats, send
        self._waiting: dict[Entry, list[tuple[StoreLoad, int]]] = {}
        """Loads, with the numbers of their entries, that wait until an entry is ready."""
        self._expected: dict[Key, dict[StoreLoad, int]] = {}
        """Loads that wait until an entry is stored, with its number in each."""

    def begin(self, core: OpenCore, message: LoadKV) -> None:
        """Handle a `LoadKV`; entries are answered as they come."""
        assert message.call_id not in core.loads
        peer = message.peer if self._sources.peers is not None else ""
        load = StoreLoad(core, message.call_id, message.entries, message.parents, waits=message.waits, peer=peer)
        core.loads[message.call_id] = load
        self._fetch(load, range(len(message.entries)))
        if load.peer and load.waits and self._sources.peers is not None:
            self._sources.peers.expect(
                load.peer,
                lambda: self._expected_links(load) if load.waits and not load.is_released else None,
                partial(self._fetch_expected, load),
            )

    def _fetch(self, load: StoreLoad, numbers: Iterable[int]) -> None:
        """Find entries of a load in memory or on disk."""
        checked, missing = list[int](), list[int]()
        for number in numbers:
            key = load.entries[number]
            entry = self._index.get(key.link, key.kind)
            if entry is None or entry.state is EntryState.GRANTED:
                missing.append(number)
                continue
            self._index.use(entry)
            self._hold(load, number, entry)
            if entry.state is EntryState.READY:
                checked.append(number)
            else:
                self._waiting[entry].append((load, number))
        failed, reading, fetching = list[int](), list[Entry](), list[Entry]()
        peers = self._sources.usable_peers if load.core.replica >= 0 else None
        for at, number in enumerate(missing):  # now that nothing is forgotten that the load needs, too
            key = load.entries[number]
            entry = self._index.get(key.link, key.kind)
            is_on_disk = self._sources.is_on_disk(key.link, key.kind)
            is_elsewhere = peers is not None and key in peers
            if entry is None and (is_on_disk or is_elsewhere):
                entry = self._sources.make(key, load.parents[number] if load.parents else b"", EntryState.COMING)
                if entry is not None:
                    self.wait_for(entry)
                    (reading if is_on_disk else fetching).append(entry)
                elif load.held:
                    load.unread.extendleft(reversed(missing[at:]))
                    break
            if entry is None or entry.state is not EntryState.COMING:
                if load.waits or entry is not None:
                    load.expected.add(number)
                    self._expected.setdefault((key.link, key.kind), {})[load] = number
                else:
                    failed.append(number)
            else:
                self._hold(load, number, entry)
                self._waiting[entry].append((load, number))
        self._answer(load, [], failed)
        self._check(load, checked)
        self._read(reading)
        if fetching:
            assert peers is not None
            self._fetch_from_peers(peers, fetching)

    def _fetch_unread(self, load: StoreLoad) -> None:
        """Go on with a load that has found no place for all entries, as long as there are places."""
        while load.unread:
            numbers = [load.unread.popleft() for _ in range(min(_WAVE, len(load.unread)))]
            left = len(load.unread)
            self._fetch(load, numbers)
            if len(load.unread) > left:
                break

    def wait_for(self, entry: Entry) -> None:
        """An entry is coming, which loads may wait for."""
        self._waiting[entry] = []
        for load, number in self._expected.pop(entry.key, {}).items():
            load.expected.discard(number)
            self._hold(load, number, entry)
            self._waiting[entry].append((load, number))

    def _expected_links(self, load: StoreLoad) -> list[bytes]:
        """The links of what a load expects, in the order of the chain."""
        return [*dict.fromkeys(load.entries[number].link for number in sorted(load.expected))]

    def _fetch_expected(self, load: StoreLoad) -> bool:
        """Fetch what a load expects and peers have by now; returns whether there is something, and a place for it."""
        count = len(load.expected)
        if (peers := self._sources.usable_peers) is not None:
            numbers = sorted(number for number in load.expected if load.entries[number] in peers)
            for number in numbers:
                self._expect_no_more(load, number)
            self._fetch(load, numbers)
        return len(load.expected) < count

    def settle(self, load: StoreLoad, *, gives_up: bool) -> None:
        """Let what a load expects fail, unless it is being written: by a core of this host, or of another, which is
        asked a last time."""
        load.waits = False

        def found(has: Sequence[bytes]) -> None:
            self._fetch_expected(load)
            self._fail(load, [*load.expected])

        if load.peer and load.expected and (peers := self._sources.usable_peers) is not None:
            assert not gives_up, "only readers on other hosts do, whose loads name no peer"
            return peers.look_up(self._expected_links(load), load.peer, found, asks_others=False)
        self._fail(load, [*load.expected], gives_up=gives_up)

    def _fail(self, load: StoreLoad, numbers: Iterable[int], *, gives_up: bool = False) -> None:
        """Let those of these expected entries fail that no core is writing, or all."""
        keys = {number: (load.entries[number].link, load.entries[number].kind) for number in numbers}
        failed = [number for number, key in keys.items() if gives_up or self._index.get(*key) is None]
        for number in failed:
            self._expect_no_more(load, number)
        self._answer(load, [], failed)

    def _expect_no_more(self, load: StoreLoad, number: int) -> None:
        load.expected.discard(number)
        key = load.entries[number].link, load.entries[number].kind
        del self._expected[key][load]
        if not self._expected[key]:
            del self._expected[key]

    def _hold(self, load: StoreLoad, number: int, entry: Entry) -> None:
        entry.pins += 1
        load.held[number] = entry

    def _check(self, load: StoreLoad, numbers: list[int]) -> None:
        """Compare the checksums of entries in memory, which the load holds."""
        for batch in self._entries.batches([load.held[number] for number in numbers], JOB_BYTES):
            own, numbers = numbers[: len(batch)], numbers[len(batch) :]
            sums, views = [entry.checksum for entry in batch], self._entries.views(batch)
            self._entries.keep(batch)
            self._entries.begin(
                Lane.SUM, batch, partial(_are_right, views, sums), partial(self._checked, load, own, batch)
            )

    def _checked(self, load: StoreLoad, numbers: list[int], entries: list[Entry], are_right: list[bool]) -> None:
        loaded, wrong = list[int](), list[int]()
        for number, entry, is_right in zip(numbers, entries, are_right, strict=True):
            if not is_right and entry.is_known:
                self._stats.wrong_checksums += 1
                logger.warning("a damaged entry was dropped from memory")
                self._entries.forget(entry)
            if load.is_released:
                continue
            if is_right:
                loaded.append(number)
                self._sources.save(entry)  # its file may have been evicted since
                self._stats.loaded_memory_bytes += self._kinds[entry.kind].size
            else:
                wrong.append(number)
                self._entries.unpin(load.held.pop(number))
        self._answer(load, loaded, [])
        self._fetch(load, wrong)
        self._fetch_unread(load)

    def _read(self, entries: list[Entry]) -> None:
        """Read entries from disk, each of which some load waits for."""
        self._entries.keep(entries)
        batches = self._entries.batches(entries, JOB_BYTES)
        for _ in range(_LOAD_READS):
            self._read_next(batches)

    def _read_next(self, batches: Iterator[list[Entry]]) -> None:
        if (batch := next(batches, None)) is None:
            return
        assert self._sources.disk is not None
        waiting = [self._waiting[entry] for entry in batch]
        job = partial(
            _read, self._sources.disk, [KVEntry(*entry.key) for entry in batch], self._entries.views(batch), waiting
        )

        def came(sums: list[bytes | None]) -> None:
            self._came(batch, DISK, sums)
            self._read_next(batches)

        self._entries.begin(Lane.READ, batch, job, came)

    def _fetch_from_peers(self, peers: PeerTier, entries: list[Entry]) -> None:
        """Fetch entries that some load waits for."""
        self._entries.keep(entries)
        waiting = [self._waiting[entry] for entry in entries]

        def is_wanted() -> bool:
            return not all(load.is_released for loads in waiting for load, _ in loads)

        keys = [KVEntry(*entry.key) for entry in entries]

        def fetched(peer: str, numbers: list[int], sums: list[bytes | None]) -> None:
            batch, own = [entries[number] for number in numbers], [keys[number] for number in numbers]

            def compared(sums: list[bytes | None]) -> None:
                peers.checked(peer, own, sums)
                self._came(batch, PEER, sums)

            self._entries.begin(Lane.SUM, batch, partial(_compare, own, self._entries.views(batch), sums), compared)

        peers.fetch(keys, self._entries.views(entries), is_wanted, fetched)

    def _came(self, entries: list[Entry], tier: int, sums: list[bytes | None]) -> None:
        """Entries have come from a tier, and have these checksums: None: they could not be read, empty: they are
        damaged."""
        answers: dict[StoreLoad, tuple[list[int], list[int]]] = {}
        again: list[tuple[StoreLoad, int]] = []
        for entry, found in zip(entries, sums, strict=True):
            if found == b"":
                self._stats.wrong_checksums += 1
            if found:
                entry.checksum, entry.state = found, EntryState.READY
                self._events.note(MEMORY, entry.link, entry.kind)
                self._sources.save(entry)
            elif entry.is_known:
                self._entries.forget(entry)
            for load, number in self._waiting.pop(entry):
                if load.is_released:
                    continue
                if not found and tier == PEER and load.waits:
                    again.append((load, number))
                else:
                    answers.setdefault(load, ([], []))[not found].append(number)
                if not found:
                    self._entries.unpin(load.held.pop(number))
                elif tier == DISK:
                    self._stats.loaded_disk_bytes += self._kinds[entry.kind].size
                else:
                    self._stats.loaded_peer_bytes += self._kinds[entry.kind].size
        for load, (loaded, failed) in answers.items():
            self._answer(load, loaded, failed)
            if failed:
                self._fetch_unread(load)
        for load, number in again:
            self._fetch(load, [number])
            self._fetch_unread(load)

    def _answer(self, load: StoreLoad, loaded: list[int], failed: list[int]) -> None:
        if (loaded or failed) and not load.is_released:
            offsets = [load.held[number].offset for number in loaded]
            self._send(load.core.client, LoadedKV(load.call_id, loaded, offsets, failed))

    def release(self, load: StoreLoad, numbers: list[int]) -> None:
        """Release some entries of a load, or all, which ends it."""
        if not numbers:
            del load.core.loads[load.call_id]
            load.is_released = True
            load.unread.clear()
            for number in [*load.expected]:
                self._expect_no_more(load, number)
        for number in numbers or [*load.held]:
            if (entry := load.held.pop(number, None)) is not None:
                self._entries.unpin(entry)
        self._fetch_unread(load)

    def lose(self, entry: Entry) -> None:
        """An entry will not be stored."""
        for load, number in [*self._expected.get(entry.key, {}).items()]:
            if not load.waits:
                self._fail(load, [number])

    def take(self, entries: list[Entry]) -> None:
        """Entries that have been stored are ready."""
        loaded: dict[StoreLoad, list[int]] = {}
        for entry in entries:
            for load, number in self._waiting.pop(entry):
                if not load.is_released:
                    self._stats.loaded_memory_bytes += self._kinds[entry.kind].size
                    loaded.setdefault(load, []).append(number)
        for load, numbers in loaded.items():
            self._answer(load, numbers, [])

    def check_integrity(self, loads: Sequence[StoreLoad]) -> None:
        """Check the invariants, with the loads of all cores."""
        for load in loads:
            assert not load.is_released
            assert load.held or not load.unread
            assert all(
                self._expected[load.entries[number].link, load.entries[number].kind][load] == number
                for number in load.expected
            )
        assert sum(map(len, self._expected.values())) == sum(len(load.expected) for load in loads)
        known_keys = {entry.key for entry in self._index if entry.state is not EntryState.GRANTED}
        assert known_keys.isdisjoint(self._expected)
        placed = self._entries.at.values()
        assert set(self._waiting) == {entry for entry in placed if entry.state is EntryState.COMING}


def _are_right(views: list[memoryview], sums: list[bytes]) -> list[bool]:
    return [checksum(view) == each for view, each in zip(views, sums, strict=True)]


def _compare(keys: list[KVEntry], views: list[memoryview], sums: list[bytes | None]) -> list[bytes | None]:
    """Return the checksums of entries that have come from a peer with these bound ones, empty if they are damaged."""
    found = [None if each is None else checksum(view) for view, each in zip(views, sums, strict=True)]
    return [
        own and own * (bind(own, key.link, key.kind) == each) for key, own, each in zip(keys, found, sums, strict=True)
    ]


def _read(
    disk: DiskTier, entries: list[KVEntry], views: list[memoryview], waiting: list[list[tuple[StoreLoad, int]]]
) -> list[bytes | None]:
    """Read entries, unless nobody waits for them any more; returns their checksums. None: one could not be read, empty:
    it is damaged.
    """
    if all(load.is_released for loads in waiting for load, _ in loads):
        return [None] * len(entries)
    sums = disk.read(entries, views)
    for number, (found, view) in enumerate(zip(sums, views, strict=True)):
        if found is not None and checksum(view) != found:
            logger.warning("a damaged entry was found on disk, and is dropped")
            disk.drop(entries[number])
            sums[number] = b""
    return sums
