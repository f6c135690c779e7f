"""Loads of a KV store: entries that cores read, from memory, disk and peers.

Each entry of a load is verified, read or fetched, or the load waits while somebody else does that or stores it. The
core is told of each entry as soon as it is in memory, or cannot be had. A load keeps the places of its entries until it
releases them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from quire.engine.config.kv_layout import KVKind
from quire.engine.kv_store.checksum import bind, checksum
from quire.engine.kv_store.disk import DiskTier
from quire.engine.kv_store.entries import JOB_BYTES, Lane, StoreEntries
from quire.engine.kv_store.index import Entry, EntryState, Key
from quire.engine.kv_store.peers import PeerTier
from quire.engine.kv_store.tier_events import TierEvents
from quire.engine.protocol.kv_store import DISK, MEMORY, PEER, FromStore, KVEntry, KVStoreStats, LoadedKV, LoadKV

_LOAD_READS = 4
"""Maximum reads of one load that run or wait for a thread, so that a long load does not delay others."""
_WAVE = 64
"""Entries that are handled at a time by a load that has not found places for all of them."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StoreLoad:
    """A `LoadKV`."""

    core: OpenCore
    call_id: int
    entries: list[KVEntry]
    parents: list[bytes]
    held: dict[int, Entry] = field(default_factory=dict)
    """By number: the entries that it has pinned, including those that may still fail."""
    waits: bool = False
    """It waits even for entries that nobody is writing yet."""
    peer: str = ""
    """See `LoadKV`."""
    expected: set[int] = field(default_factory=set)
    """Numbers of the entries that it waits for others to store."""
    unread: deque[int] = field(default_factory=deque)
    """Numbers of the entries for which there is no place until some held entries have been released."""
    is_released: bool = False


@dataclass(eq=False)
class OpenCore:
    """A core that has opened the store."""

    replica: int
    """Below 0: the store of another host, for which this store asks no third one."""
    incarnation: int
    client: bytes
    """The name of its connection."""
    loads: dict[int, StoreLoad] = field(default_factory=dict)
    """By call."""
    grants: dict[int, Entry] = field(default_factory=dict)
    """By offset."""
    connections: dict[int, int] = field(default_factory=dict)
    """By rank: the number of the last connection with which a rank of another host has used an entry."""


class StoreLoads:
    """The loads of all cores."""

    def __init__(
        self,
        kinds: Sequence[KVKind],
        entries: StoreEntries,
        events: TierEvents,
        stats: KVStoreStats,
        send: Callable[[bytes, FromStore], None],
        clock: Callable[[], float],
    ) -> None:
        self._kinds, self._entries, self._index = kinds, entries, entries.index
        self._events, self._stats, self._send, self._clock = events, stats, send, clock
        self.peers: PeerTier | None = None
        self.reads_peers_at = 0.0
        """Peers have nothing before this time."""
        self._waiting: dict[Entry, list[tuple[StoreLoad, int]]] = {}
        """For each coming entry: the loads that wait until it is ready, and its number in each."""
        self._expected: dict[Key, dict[StoreLoad, int]] = {}
        """For each missing entry: the loads that wait until it is stored, and its number in each."""

    @property
    def usable_peers(self) -> PeerTier | None:
        """The stores of other hosts, if some may have something."""
        is_usable = self.peers is not None and self.peers.is_usable and self._clock() >= self.reads_peers_at
        return self.peers if is_usable else None

    def begin(self, core: OpenCore, message: LoadKV) -> None:
        """Handle a `LoadKV`; its entries are answered as they arrive."""
        assert message.call_id not in core.loads
        peer = message.peer if self.peers is not None else ""
        load = StoreLoad(core, message.call_id, message.entries, message.parents, waits=message.waits, peer=peer)
        core.loads[message.call_id] = load
        self._fetch(load, range(len(message.entries)))
        if load.peer and load.waits and self.peers is not None:
            self.peers.expect(
                load.peer,
                lambda: self._expected_links(load) if load.waits and not load.is_released else None,
                partial(self._fetch_expected, load),
            )

    def _fetch(self, load: StoreLoad, numbers: Iterable[int]) -> None:
        """Find entries of a load in memory, on disk or at peers."""
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
        peers = self.usable_peers if load.core.replica >= 0 else None
        for at, number in enumerate(missing):  # now that nothing is forgotten that the load needs, too
            key = load.entries[number]
            entry = self._index.get(key.link, key.kind)
            is_on_disk = self._entries.is_on_disk(key.link, key.kind)
            is_elsewhere = peers is not None and key in peers
            if entry is None and (is_on_disk or is_elsewhere):
                entry = self._entries.make(key, load.parents[number] if load.parents else b"", EntryState.COMING)
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
        """Continue a load that has not found places for all entries, as long as there are places."""
        while load.unread:
            numbers = [load.unread.popleft() for _ in range(min(_WAVE, len(load.unread)))]
            left = len(load.unread)
            self._fetch(load, numbers)
            if len(load.unread) > left:
                break

    def wait_for(self, entry: Entry) -> None:
        """Note that an entry is coming: the loads that expect it now wait until it is ready."""
        self._waiting[entry] = []
        for load, number in self._expected.pop(entry.key, {}).items():
            load.expected.discard(number)
            self._hold(load, number, entry)
            self._waiting[entry].append((load, number))

    def _expected_links(self, load: StoreLoad) -> list[bytes]:
        """The links of the entries that a load expects, in the order of the chain."""
        return [*dict.fromkeys(load.entries[number].link for number in sorted(load.expected))]

    def _fetch_expected(self, load: StoreLoad) -> bool:
        """Fetch the entries that a load expects and peers have by now; returns whether any were found, with places for
        them."""
        count = len(load.expected)
        if (peers := self.usable_peers) is not None:
            numbers = sorted(number for number in load.expected if load.entries[number] in peers)
            for number in numbers:
                self._expect_no_more(load, number)
            self._fetch(load, numbers)
        return len(load.expected) < count

    def settle(self, load: StoreLoad, *, gives_up: bool) -> None:
        """Let the entries fail that a load expects, except those that a core is writing: on this host, or on another
        one, which is asked a last time."""
        load.waits = False

        def found(has: Sequence[bytes]) -> None:
            self._fetch_expected(load)
            self._fail(load, [*load.expected])

        if load.peer and load.expected and (peers := self.usable_peers) is not None:
            assert not gives_up, "only readers on other hosts do, whose loads name no peer"
            return peers.look_up(self._expected_links(load), load.peer, found, asks_others=False)
        self._fail(load, [*load.expected], gives_up=gives_up)

    def _fail(self, load: StoreLoad, numbers: Iterable[int], *, gives_up: bool = False) -> None:
        """Let these expected entries fail: those that no core is writing, or all with `gives_up`."""
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
        """Verify the checksums of entries in memory that the load holds."""
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
                self._entries.save(entry)  # its file may have been evicted since
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
        assert self._entries.disk is not None
        waiting = [self._waiting[entry] for entry in batch]
        job = partial(
            _read, self._entries.disk, [KVEntry(*entry.key) for entry in batch], self._entries.views(batch), waiting
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
        """Note that entries have come from a tier with these checksums. None: an entry could not be read; empty: it is
        damaged."""
        answers: dict[StoreLoad, tuple[list[int], list[int]]] = {}
        again: list[tuple[StoreLoad, int]] = []
        for entry, found in zip(entries, sums, strict=True):
            if found == b"":
                self._stats.wrong_checksums += 1
            if found:
                entry.checksum, entry.state = found, EntryState.READY
                self._events.note(MEMORY, entry.link, entry.kind)
                self._entries.save(entry)
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
        """Release some entries of a load; without numbers, release all, which ends it."""
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
        """Note that an entry will not be stored."""
        for load, number in [*self._expected.get(entry.key, {}).items()]:
            if not load.waits:
                self._fail(load, [number])

    def take(self, entries: list[Entry]) -> None:
        """Note that stored entries are ready."""
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
    """Return the checksums of entries that came from a peer with these bound checksums; empty if an entry is
    damaged."""
    found = [None if each is None else checksum(view) for view, each in zip(views, sums, strict=True)]
    return [
        own and own * (bind(own, key.link, key.kind) == each) for key, own, each in zip(keys, found, sums, strict=True)
    ]


def _read(
    disk: DiskTier, entries: list[KVEntry], views: list[memoryview], waiting: list[list[tuple[StoreLoad, int]]]
) -> list[bytes | None]:
    """Read entries, unless nobody waits for them any more; returns their checksums. None: an entry could not be read;
    empty: it is damaged.
    """
    if all(load.is_released for loads in waiting for load, _ in loads):
        return [None] * len(entries)
    sums = disk.read(entries, views)
    for number, (found, view) in enumerate(zip(sums, views, strict=True)):
        if found is not None and checksum(view) != found:
            disk.drop(entries[number])  # which names the file, once for all of its entries
            sums[number] = b""
    return sums
