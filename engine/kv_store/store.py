"""The KV store of a host: what it does with the messages of engine cores (`quire.engine.protocol.kv_store`).

One thread calls everything here. What takes long (checksums, reads, writes) is a job that runs elsewhere, and whose
result comes back to this thread.

An entry is granted to a core, which has its ranks write it; then it is summed, and is ready. Its checksum is compared
each time before a core gets its offset, so nothing is ever read that was not stored. An entry that somebody uses (a
core, a job) keeps its place, even after it has been forgotten. Entries are written to disk some seconds after they
came, those of one chain together, and are read from there into a place in memory. What this host lacks is fetched from
the stores of others (`PeerTier`), which read from this one like cores (`PeerServer`).

Invariants (`check_integrity`): the places in use are those of the entries in the index and of forgotten ones that are
still in use; an entry's pins are the loads, grants and jobs that have it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import msgspec

from quire.engine.config.kv_layout import KVKind
from quire.engine.config.kv_store_config import FILE_SHARE
from quire.engine.kv_store.arena import Arena
from quire.engine.kv_store.checksum import bind, checksum
from quire.engine.kv_store.disk import FILE_BYTES, DiskTier
from quire.engine.kv_store.index import Entry, EntryState, Index, Key
from quire.engine.kv_store.peers import PeerTier
from quire.engine.kv_store.tier_events import TierEvents
from quire.engine.protocol.kv_store import (
    DISK,
    MEMORY,
    PEER,
    ClearKV,
    DescribeKV,
    FoundKV,
    FromStore,
    GrantedKV,
    HeardKVTiers,
    KVCleared,
    KVEntry,
    KVStoreOpened,
    KVStoreStats,
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

CLEAR_SECONDS = 10.0
"""Time after which `ClearKV` is answered, even if not all files have been removed."""
JOB_BYTES = 8 * 2**20
"""Bytes that one job reads or sums, at least one entry: a long load is answered in parts."""
WRITE_SECONDS = 5.0
"""Time after which entries are written, even if they are fewer."""
_LOAD_READS = 4
"""Jobs of one load that are being read, or wait for a thread: a long load does not delay others."""
_WAVE = 64
"""Entries for which a load looks at once that has found no place for all."""
_MAX_REFUSED = 4096
"""Links that are remembered because there was no room for their entries."""
_CHOICE = 4
"""Files' worth of the oldest entries among which those of one chain are found."""

logger = logging.getLogger(__name__)


class Lane(Enum):
    """Jobs of a lane do not wait for those of others."""

    SUM = auto()
    READ = auto()
    """The disk tier is read by several threads."""
    WRITE = auto()
    """By one thread."""


class Submit(Protocol):
    """Runs a job, then calls `done` with the result in the thread of the store."""

    def __call__(self, lane: Lane, job: Callable[[], Any], done: Callable[[Any], None], /) -> None: ...


def run_now(lane: Lane, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
    """Run a job in the thread of the store."""
    done(job())


@dataclass(eq=False)
class _StoreLoad:
    """A `LoadKV`."""

    core: _OpenCore
    call_id: int
    entries: list[KVEntry]
    parents: list[bytes]
    held: dict[int, Entry] = field(default_factory=dict)
    """By number: the entries that it has a pin on, those whose fate is not known included."""
    waits: bool = False
    """It waits for entries that nobody is writing yet."""
    expected: set[int] = field(default_factory=set)
    """Numbers of entries that are neither here nor on their way from disk, and that it waits for."""
    unread: deque[int] = field(default_factory=deque)
    """Numbers of entries that find no place before some of those that are held have been released."""
    is_released: bool = False


@dataclass(eq=False)
class _StoreClear:
    """A `ClearKV` that has not been answered."""

    core: _OpenCore
    call_id: int
    num_entries: int
    """In memory alone."""
    began: float


@dataclass(eq=False)
class _OpenCore:
    """A core that has opened the store."""

    replica: int
    """Below 0: the store of another host, which gets what this one has itself."""
    incarnation: int
    client: bytes
    """The name of its connection."""
    loads: dict[int, _StoreLoad] = field(default_factory=dict)
    """By call."""
    grants: dict[int, Entry] = field(default_factory=dict)
    """By offset."""


class KVStore:
    """Entries in memory and on disk, for the cores of a host."""

    def __init__(
        self,
        kinds: Sequence[KVKind],
        memory_bytes: int,
        send: Callable[[bytes, FromStore], None],
        submit: Submit = run_now,
        clock: Callable[[], float] = time.monotonic,
        on_piece: Callable[[], None] = lambda: None,
        doubling: float = math.inf,
    ) -> None:
        """`send` sends a message to a client; for `on_piece` see `Arena`, for `doubling` `Index`. Raises `ConfigError`
        if the memory is too small for the model, or cannot be had."""
        self._kinds, self._send, self._submit, self._clock = kinds, send, submit, clock
        self._all_tokens = [number for number, kind in enumerate(kinds) if kind.window is None]
        self.arena = Arena(memory_bytes, [kind.size for kind in kinds], on_piece)
        self._events = TierEvents(len(kinds), self._has_entry, self._has_block, send)
        self.index = Index(
            [kind.window is not None for kind in kinds],
            lambda entry: self._events.note(MEMORY, entry.link, entry.kind),
            [kind.size / memory_bytes for kind in kinds],
            doubling,
        )
        self.disk: DiskTier | None = None
        self.disk_error = ""
        """Why there is no disk tier, although there should be one."""
        self.peers: PeerTier | None = None
        self.sent_peer_bytes = 0
        self._reads_peers_at = 0.0
        """Peers have nothing before this time."""
        self._least_asked = 1
        """Blocks that must be missing before peers are asked."""
        self._at: dict[int, Entry] = {}
        """By offset: entries in the index, and forgotten ones in use."""
        self._cores: dict[int, _OpenCore] = {}
        """By replica."""
        self._clients: dict[bytes, _OpenCore] = {}
        self._refused: dict[bytes, None] = {}
        """Links of the last blocks for whose entries of all tokens there was no room."""
        self._waiting: dict[Entry, list[tuple[_StoreLoad, int]]] = {}
        """Loads, with the numbers of their entries, that wait until an entry is ready."""
        self._expected: dict[Key, dict[_StoreLoad, int]] = {}
        """Loads that wait until an entry is stored, with its number in each."""
        self._busy: Counter[Entry] = Counter()
        """Jobs on each entry."""
        self._unwritten: dict[Entry, float] = {}
        """Ready entries that are not known to be on disk, with the time when they came."""
        self._unwritten_bytes = 0
        # Smaller tiers have smaller files: memory is written before it is needed for others, and disk evicts a part.
        self._file_bytes = min(FILE_BYTES, memory_bytes // FILE_SHARE)
        self._is_writing = False
        self._next_write = 0.0
        """Nothing is written before this time: after a failure, or because of the bandwidth."""
        self._write_bandwidth = 0.0
        self._clearing = 0
        """`ClearKV` whose jobs have not ended: the disk tier is as good as empty."""
        self._unanswered: dict[_StoreClear, None] = {}
        """Those of them that have not been answered, either."""
        self._clears_disk = False
        """Whether the disk tier is to be cleared when it comes into use."""
        self._stats = KVStoreStats(memory_capacity=memory_bytes)

    @property
    def memory(self) -> memoryview:
        """The arena's bytes."""
        return self.arena.memory

    @property
    def path(self) -> str:
        return self.arena.path

    @property
    def num_unwritten(self) -> int:
        """Entries that are to be written to disk, if it can be used; those that are being written included."""
        return len(self._unwritten) + self._is_writing if self.disk is not None and not self.disk.error else 0

    def use_disk(self, disk: DiskTier, bandwidth: float = 0.0) -> None:
        """Begin to use a disk tier, and write so many bytes per second to it at most; 0: no limit."""
        self._write_bandwidth = bandwidth
        self.disk, self._file_bytes = disk, min(self._file_bytes, disk.capacity // FILE_SHARE)
        if self._clears_disk:
            self._remove_files(disk, None)
        for entry in self.index:
            if entry.state is EntryState.READY:
                self._save(entry)

    def use_peers(self, peers: PeerTier, least: int) -> None:
        """Begin to use the stores of other hosts, for chains of which this one lacks `least` blocks or more."""
        self.peers, self._least_asked = peers, least

    def handle(self, client: bytes, message: ToStore) -> None:
        """Handle a message of a client."""
        self.index.advance()
        if isinstance(message, OpenKVStore):
            return self._open(client, message)
        if (core := self._clients.get(client)) is None:
            return self._send(client, KVStoreOpened(self.arena.path, self.arena.size))
        match message:
            case LookUpKV():
                self._look_up(core, message)
            case LoadKV():
                self._load(core, message)
            case SettleKV(call_id, gives_up):
                if (load := core.loads.get(call_id)) is not None:
                    load.waits = False
                    self._fail_expected(load, load.expected, gives_up=gives_up)
            case ReleaseKV(call_id, numbers):
                if (load := core.loads.get(call_id)) is not None:
                    self._release(load, numbers)
            case OfferKV():
                self._grant(core, message)
            case DescribeKV():
                self._events.describe(message)
            case HeardKVTiers(number):
                self._events.hear(core.replica, number)
            case StoredKV():
                if message.arena == self.arena.path:
                    self._store(core, message)
            case ClearKV(call_id):
                self._clear(core, call_id)

    def forget_replica(self, replica: int) -> None:
        """End what a core was granted or has loaded: all its ranks have ended."""
        if (core := self._cores.pop(replica, None)) is None:
            return
        self._clients.pop(core.client, None)
        self._events.forget(replica)
        for load in [*core.loads.values()]:
            self._release(load, [])
        for entry in core.grants.values():
            self._abandon(entry)

    def seconds_left(self) -> float:
        """Seconds until `write` has a file's worth to write that waits for the bandwidth alone."""
        is_waiting = self._unwritten_bytes >= self._file_bytes and not self._is_writing and not self._clearing
        return max(0.0, self._next_write - self._clock()) if is_waiting and self.disk is not None else math.inf

    def lose_replica(self, replica: int) -> None:
        """Let nobody wait for what a core should have stored: it has ended. Its ranks may not have: what they have been
        granted keeps its place until they have."""
        if (core := self._cores.get(replica)) is not None:
            for entry in core.grants.values():
                entry.pins += 1
                self._abandon(entry)

    def tick(self) -> None:
        """Tell the cores the state of the store, and write entries that have waited; called about once a second."""
        self.write()
        self._events.begin_turn()
        self.tell()
        for clear in [*self._unanswered]:
            if self._clock() - clear.began > CLEAR_SECONDS:
                self._cleared(clear, 0, self.stats().disk_error or f"not done after {CLEAR_SECONDS:g} seconds")
        stats = self.stats()
        for core in self._cores.values():
            self._send(core.client, stats)

    def tell(self) -> bool:
        """Tell the cores what the tiers have, for KV events, as much as takes little time. Returns whether there is
        more."""
        return self._events.tell(deque() if self.disk is None else self.disk.changed)

    def stats(self) -> KVStoreStats:
        """Return a copy of gauges and counters."""
        stats, disk = self._stats, self.disk
        stats.memory_bytes, stats.memory_entries = self.arena.used_bytes, self.index.num_entries
        stats.disk_error = self.disk_error
        if disk is not None:
            stats.disk_bytes, stats.disk_capacity, stats.disk_entries = disk.used_bytes, disk.capacity, disk.num_entries
            stats.written_disk_bytes, stats.evicted_disk_entries = disk.written_bytes, disk.evicted_entries
            stats.failed_disk, stats.disk_error = disk.failed, disk.error
        if self.peers is not None:
            stats.peers_up, stats.peers, stats.failed_peers = self.peers.stats()
            stats.sent_peer_bytes = self.sent_peer_bytes
        return msgspec.structs.replace(stats)

    # --- cores --------------------------------------------------------------------------------------------------------

    def _open(self, client: bytes, message: OpenKVStore) -> None:
        core = self._cores.get(message.replica)
        if core is not None and message.incarnation < core.incarnation:
            return  # late: all its ranks have ended
        if core is not None and message.incarnation > core.incarnation:
            self.forget_replica(message.replica)
            core = None
        if core is None:
            core = self._cores[message.replica] = _OpenCore(message.replica, message.incarnation, client)
        self._clients.pop(core.client, None)
        self._clients[client], core.client = core, client
        if message.has_events:
            self._events.follow(core.replica, client)
        self._send(client, KVStoreOpened(self.arena.path, self.arena.size))

    def _look_up(self, core: _OpenCore, message: LookUpKV) -> None:
        links, peers = message.links, self._usable_peers()
        tiers = self.find(links, counts_granted=message.counts_granted)
        in_memory = [
            KVEntry(link, kind)
            for kind, found in enumerate(tiers)
            for link, tier in zip(links, found, strict=True)
            if tier == MEMORY
        ]
        for entry in in_memory:
            self.index.touch(entry.link)
        if self.disk is not None:
            self.disk.use(in_memory)  # so that the files of what is used in memory do not look old
        # The longest prefix with all that may be needed to go on after it.
        num_found = next((at + 1 for at in reversed(range(len(links))) if all(each[at] for each in tiers)), 0)
        if peers is None or len(links) - num_found < self._least_asked:
            return self._send(core.client, FoundKV(message.call_id, tiers))
        start = 0 if len(self._all_tokens) < len(self._kinds) else num_found

        def found(has: Sequence[bytes]) -> None:
            elsewhere = [bytes(start) + each for each in has]
            tiers = self.find(links, elsewhere, counts_granted=message.counts_granted)
            self._send(core.client, FoundKV(message.call_id, tiers))

        peers.look_up(links[start:], message.peer, found)

    def _usable_peers(self) -> PeerTier | None:
        """The stores of other hosts, if some may have something."""
        is_usable = self.peers is not None and self.peers.is_usable and self._clock() >= self._reads_peers_at
        return self.peers if is_usable else None

    def find(
        self, links: Sequence[bytes], elsewhere: Sequence[bytes] | None = None, *, counts_granted: bool = False
    ) -> list[bytes]:
        """Return where the entries of a chain are, as `FoundKV.tiers`. `elsewhere`: those that peers have, by kind: a
        byte for each link. `counts_granted`: see `LookUpKV`. Nothing is younger for it."""
        tiers = [bytearray(len(links)) for _ in self._kinds]
        for at, link in enumerate(links):
            entries = self.index.entries(link)
            for kind, found in enumerate(tiers):
                entry = entries.get(kind)
                if entry is not None and (counts_granted or entry.state is not EntryState.GRANTED):
                    found[at] = MEMORY
                elif entry is None and self._is_on_disk(link, kind):  # one that is being written cannot be read now
                    found[at] = DISK
                elif entry is None and elsewhere is not None and elsewhere[kind][at]:
                    found[at] = PEER
            if not all(tiers[kind][at] for kind in self._all_tokens):
                break
        return [bytes(each) for each in tiers]

    def locate(self, kind: int, offset: int) -> tuple[memoryview, bytes]:
        """Return the bytes and the checksum of an entry that is loaded for somebody."""
        return self.arena.view(kind, offset), self._at[offset].checksum

    # --- loading ------------------------------------------------------------------------------------------------------

    def _load(self, core: _OpenCore, message: LoadKV) -> None:
        assert message.call_id not in core.loads
        load = _StoreLoad(core, message.call_id, message.entries, message.parents, waits=message.waits)
        core.loads[message.call_id] = load
        self._fetch(load, range(len(message.entries)))

    def _fetch(self, load: _StoreLoad, numbers: Iterable[int]) -> None:
        """Find entries of a load in memory or on disk."""
        checked, missing = list[int](), list[int]()
        for number in numbers:
            key = load.entries[number]
            entry = self.index.get(key.link, key.kind)
            if entry is None or entry.state is EntryState.GRANTED:
                missing.append(number)
                continue
            self.index.use(entry)
            self._hold(load, number, entry)
            if entry.state is EntryState.READY:
                checked.append(number)
            else:
                self._waiting[entry].append((load, number))
        failed, reading, fetching = list[int](), list[Entry](), list[Entry]()
        peers = self._usable_peers() if load.core.replica >= 0 else None
        for at, number in enumerate(missing):  # now that nothing is forgotten that the load needs, too
            key = load.entries[number]
            entry = self.index.get(key.link, key.kind)
            is_on_disk = self._is_on_disk(key.link, key.kind)
            is_elsewhere = peers is not None and key in peers
            if entry is None and (is_on_disk or is_elsewhere):
                entry = self._make(key, load.parents[number] if load.parents else b"", EntryState.COMING)
                if entry is not None:
                    self._await(entry)
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
            self._fetch_from_peers(fetching)

    def _fetch_unread(self, load: _StoreLoad) -> None:
        """Go on with a load that has found no place for all entries, as long as there are places."""
        while load.unread:
            numbers = [load.unread.popleft() for _ in range(min(_WAVE, len(load.unread)))]
            left = len(load.unread)
            self._fetch(load, numbers)
            if len(load.unread) > left:
                break

    def _await(self, entry: Entry) -> None:
        """An entry is coming, which loads may wait for."""
        self._waiting[entry] = []
        for load, number in self._expected.pop(entry.key, {}).items():
            load.expected.discard(number)
            self._hold(load, number, entry)
            self._waiting[entry].append((load, number))

    def _fail_expected(self, load: _StoreLoad, numbers: Iterable[int], *, gives_up: bool = False) -> None:
        """Let those of these expected entries fail that no core is writing, or all."""
        keys = {number: (load.entries[number].link, load.entries[number].kind) for number in numbers}
        failed = [number for number, key in keys.items() if gives_up or self.index.get(*key) is None]
        for number in failed:
            self._expect_no_more(load, number)
        self._answer(load, [], failed)

    def _expect_no_more(self, load: _StoreLoad, number: int) -> None:
        load.expected.discard(number)
        key = load.entries[number].link, load.entries[number].kind
        del self._expected[key][load]
        if not self._expected[key]:
            del self._expected[key]

    def _hold(self, load: _StoreLoad, number: int, entry: Entry) -> None:
        entry.pins += 1
        load.held[number] = entry

    def _check(self, load: _StoreLoad, numbers: list[int]) -> None:
        """Compare the checksums of entries in memory, which the load holds."""
        for batch in self._batches([load.held[number] for number in numbers], JOB_BYTES):
            own, numbers = numbers[: len(batch)], numbers[len(batch) :]
            sums, views = [entry.checksum for entry in batch], self._views(batch)
            self._keep(batch)
            self._begin(Lane.SUM, batch, partial(_are_right, views, sums), partial(self._checked, load, own, batch))

    def _checked(self, load: _StoreLoad, numbers: list[int], entries: list[Entry], are_right: list[bool]) -> None:
        loaded, wrong = list[int](), list[int]()
        for number, entry, is_right in zip(numbers, entries, are_right, strict=True):
            if not is_right and entry.is_known:
                self._stats.wrong_checksums += 1
                logger.warning("a damaged entry was dropped from memory")
                self._forget(entry)
            if load.is_released:
                continue
            if is_right:
                loaded.append(number)
                self._save(entry)  # its file may have been evicted since
                self._stats.loaded_memory_bytes += self._kinds[entry.kind].size
            else:
                wrong.append(number)
                self._unpin(load.held.pop(number))
        self._answer(load, loaded, [])
        self._fetch(load, wrong)
        self._fetch_unread(load)

    def _read(self, entries: list[Entry]) -> None:
        """Read entries from disk, each of which some load waits for."""
        self._keep(entries)
        batches = self._batches(entries, JOB_BYTES)
        for _ in range(_LOAD_READS):
            self._read_next(batches)

    def _read_next(self, batches: Iterator[list[Entry]]) -> None:
        if (batch := next(batches, None)) is None:
            return
        assert self.disk is not None
        waiting = [self._waiting[entry] for entry in batch]
        job = partial(_read, self.disk, [KVEntry(*entry.key) for entry in batch], self._views(batch), waiting)

        def came(sums: list[bytes | None]) -> None:
            self._came(batch, DISK, sums)
            self._read_next(batches)

        self._begin(Lane.READ, batch, job, came)

    def _fetch_from_peers(self, entries: list[Entry]) -> None:
        """Fetch entries that some load waits for."""
        assert self.peers is not None
        self._keep(entries)
        waiting = [self._waiting[entry] for entry in entries]

        def is_wanted() -> bool:
            return not all(load.is_released for loads in waiting for load, _ in loads)

        peers, keys = self.peers, [KVEntry(*entry.key) for entry in entries]

        def fetched(peer: str, numbers: list[int], sums: list[bytes | None]) -> None:
            batch, own = [entries[number] for number in numbers], [keys[number] for number in numbers]

            def compared(sums: list[bytes | None]) -> None:
                peers.checked(peer, own, sums)
                self._came(batch, PEER, sums)

            self._begin(Lane.SUM, batch, partial(_compare, own, self._views(batch), sums), compared)

        peers.fetch(keys, self._views(entries), is_wanted, fetched)

    def _came(self, entries: list[Entry], tier: int, sums: list[bytes | None]) -> None:
        """Entries have come from a tier, and have these checksums: None: they could not be read, empty: they are
        damaged."""
        answers: dict[_StoreLoad, tuple[list[int], list[int]]] = {}
        for entry, found in zip(entries, sums, strict=True):
            if found == b"":
                self._stats.wrong_checksums += 1
            if found:
                entry.checksum, entry.state = found, EntryState.READY
                self._events.note(MEMORY, entry.link, entry.kind)
                self._save(entry)
            elif entry.is_known:
                self._forget(entry)
            for load, number in self._waiting.pop(entry):
                if load.is_released:
                    continue
                answers.setdefault(load, ([], []))[not found].append(number)
                if not found:
                    self._unpin(load.held.pop(number))
                elif tier == DISK:
                    self._stats.loaded_disk_bytes += self._kinds[entry.kind].size
                else:
                    self._stats.loaded_peer_bytes += self._kinds[entry.kind].size
        for load, (loaded, failed) in answers.items():
            self._answer(load, loaded, failed)
            if failed:
                self._fetch_unread(load)

    def _answer(self, load: _StoreLoad, loaded: list[int], failed: list[int]) -> None:
        if (loaded or failed) and not load.is_released:
            offsets = [load.held[number].offset for number in loaded]
            self._send(load.core.client, LoadedKV(load.call_id, loaded, offsets, failed))

    def _release(self, load: _StoreLoad, numbers: list[int]) -> None:
        """Release some entries of a load, or all, which ends it."""
        if not numbers:
            del load.core.loads[load.call_id]
            load.is_released = True
            load.unread.clear()
            for number in [*load.expected]:
                self._expect_no_more(load, number)
        for number in numbers or [*load.held]:
            if (entry := load.held.pop(number, None)) is not None:
                self._unpin(entry)
        self._fetch_unread(load)

    # --- storing ------------------------------------------------------------------------------------------------------

    def _grant(self, core: _OpenCore, message: OfferKV) -> None:
        granted = GrantedKV([], [])
        for number, key in enumerate(message.entries):
            if (entry := self.index.get(key.link, key.kind)) is not None:
                self.index.use(entry)
                continue
            parent = message.parents[number] if message.parents else b""
            # Of a chain for whose middle there is no room, the end has no use.
            before, keeps_all = (parent, True) if self._kinds[key.kind].window is None else (key.link, False)
            entry = None if before in self._refused else self._make(key, parent, EntryState.GRANTED)
            if entry is not None:
                entry.pins += 1
                core.grants[entry.offset] = entry
                granted.entries.append(key)
                granted.offsets.append(entry.offset)
            if keeps_all:
                self._refused.pop(key.link, None)
                if entry is None:
                    self._refused[key.link] = None
        while len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._send(core.client, granted)

    def _store(self, core: _OpenCore, message: StoredKV) -> None:
        for offset in message.abandoned:
            if (entry := core.grants.pop(offset, None)) is not None:
                self._abandon(entry)
        granted = [core.grants.pop(offset) for offset in message.offsets if offset in core.grants]
        for entry in granted:
            entry.state = EntryState.COMING
            self._await(entry)
        self._keep(granted)
        for batch in self._batches(granted, JOB_BYTES):
            self._begin(Lane.SUM, batch, partial(_sums, self._views(batch)), partial(self._summed, batch))
        for entry in granted:
            self._unpin(entry)

    def _abandon(self, entry: Entry) -> None:
        """End a grant whose entry has not been written."""
        if entry.is_known:
            self._forget(entry)
        self._unpin(entry)
        for load, number in [*self._expected.get(entry.key, {}).items()]:
            if not load.waits:
                self._fail_expected(load, [number])

    def _summed(self, entries: list[Entry], sums: list[bytes]) -> None:
        loaded: dict[_StoreLoad, list[int]] = {}
        for entry, found in zip(entries, sums, strict=True):
            entry.checksum, entry.state = found, EntryState.READY
            self._events.note(MEMORY, entry.link, entry.kind)
            self._stats.stored_bytes += self._kinds[entry.kind].size
            self._save(entry)
            for load, number in self._waiting.pop(entry):
                if not load.is_released:
                    self._stats.loaded_memory_bytes += self._kinds[entry.kind].size
                    loaded.setdefault(load, []).append(number)
        for load, numbers in loaded.items():
            self._answer(load, numbers, [])
        self.write()

    def _make(self, key: KVEntry, parent: bytes, state: EntryState) -> Entry | None:
        """Find a place for an entry. None: all are in use, or have what comes before it in its chain."""
        is_readable = self.disk is not None and not self.disk.error
        is_on_disk = (lambda entry: self._is_on_disk(*entry.key)) if is_readable else None
        entry = Entry(key.link, key.kind, state, pins=1)
        self.index.add(entry, parent)  # what comes before is no end of a chain from now on
        while (offset := self.arena.allocate(key.kind)) is None:
            if not self.arena.vacate(lambda offset: not self._at[offset].pins, self._move):
                evicted = self.index.evict(key.link, is_on_disk)
                if not evicted:
                    self.index.remove(entry)
                    return None
                self._stats.evicted_memory_entries += len(evicted)
                for each in evicted:
                    self._drop_unwritten(each)
                    self._free(each)
        self._at[offset], entry.offset, entry.pins = entry, offset, 0
        return entry

    def _move(self, old: int, new: int) -> None:
        entry = self._at[new] = self._at.pop(old)
        entry.offset = new

    def _forget(self, entry: Entry) -> None:
        """Find an entry no more. Its place is free when nobody uses it."""
        self.index.remove(entry)
        self._drop_unwritten(entry)
        if not entry.pins:
            self._free(entry)

    def _unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        if not entry.pins and not entry.is_known:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        del self._at[entry.offset]
        self.arena.free(entry.kind, entry.offset)

    def _views(self, entries: list[Entry]) -> list[memoryview]:
        return [self.arena.view(entry.kind, entry.offset) for entry in entries]

    # --- disk ---------------------------------------------------------------------------------------------------------

    def write(self, *, all_now: bool = False) -> None:
        """Begin to write entries to disk, if enough of them wait or one has waited long enough, or with `all_now`."""
        disk = self.disk
        if not self._unwritten or self._is_writing or self._clearing or disk is None:
            return
        now, oldest = self._clock(), next(iter(self._unwritten.values()))
        if now < self._next_write:
            return
        if self._unwritten_bytes < self._file_bytes and now - oldest < WRITE_SECONDS and not all_now:
            return
        batch = self._next_chains()
        for entry in batch:
            self._drop_unwritten(entry)
        entries, views, sums = [KVEntry(*entry.key) for entry in batch], self._views(batch), [e.checksum for e in batch]
        if self._write_bandwidth:
            self._next_write = now + sum(map(len, views)) / self._write_bandwidth
        self._is_writing = True
        self._keep(batch)
        self._begin(Lane.WRITE, batch, partial(disk.write, entries, views, sums), partial(self._written, disk, batch))

    def _written(self, disk: DiskTier, entries: list[Entry], has_written: bool) -> None:
        self._is_writing = False
        for entry in entries if has_written else ():
            self.index.keep_on_disk(entry)
        if not has_written and disk.error:  # it tells when it is asked whether it can be used again
            self._next_write = self._clock() + WRITE_SECONDS
            for entry in entries:
                if entry.is_known:
                    self._add_unwritten(entry)
        self.write()

    def _next_chains(self) -> list[Entry]:
        """The entries to be written next: those of one chain one after another, the oldest chains first."""
        chains: dict[bytes, list[Entry]] = {}
        first: dict[bytes, bytes] = {}
        """By link: the first one of its chain that is to be written."""
        size = 0
        for entry in self._unwritten:
            start = first.setdefault(entry.link, first.get(self.index.parent(entry.link), entry.link))
            chains.setdefault(start, []).append(entry)
            size += self._kinds[entry.kind].size
            if size > _CHOICE * self._file_bytes:
                break
        return next(self._batches([entry for chain in chains.values() for entry in chain], self._file_bytes))

    def _save(self, entry: Entry) -> None:
        """Have an entry written, unless it is on disk."""
        if self._is_on_disk(*entry.key):
            self.index.keep_on_disk(entry)
        elif entry.is_known and self.disk is not None:
            self._add_unwritten(entry)

    def _add_unwritten(self, entry: Entry) -> None:
        if entry not in self._unwritten:
            self._unwritten[entry] = self._clock()
            self._unwritten_bytes += self._kinds[entry.kind].size

    def _drop_unwritten(self, entry: Entry) -> None:
        if self._unwritten.pop(entry, None) is not None:
            self._unwritten_bytes -= self._kinds[entry.kind].size

    def _is_on_disk(self, link: bytes, kind: int) -> bool:
        return self.disk is not None and not self._clearing and KVEntry(link, kind) in self.disk

    def _has_entry(self, tier: int, link: bytes, kind: int) -> bool:
        """Whether a tier has an entry, for KV events."""
        if tier == DISK:
            return self.disk is not None and not self._clearing and self.disk.holds(KVEntry(link, kind))
        entry = self.index.get(link, kind)
        return entry is not None and entry.state is EntryState.READY

    def _has_block(self, link: bytes) -> bool:
        """Whether some tier has an entry of a block, or will have it."""
        return bool(self.index.entries(link)) or any(
            self.disk is not None and self.disk.holds(KVEntry(link, kind)) for kind in range(len(self._kinds))
        )

    def _clear(self, core: _OpenCore, call_id: int) -> None:
        # By then the other stores of the server are cleared, or the call has failed: nothing comes back from them.
        self._reads_peers_at = self._clock() + CLEAR_SECONDS
        entries = list(self.index)
        count = sum(not self._is_on_disk(*entry.key) for entry in entries)
        for entry in entries:
            self._forget(entry)
        clear = _StoreClear(core, call_id, count, self._clock())
        self._unanswered[clear] = None
        if self.disk is not None:
            return self._remove_files(self.disk, clear)
        self._clears_disk = bool(self.disk_error)
        self._cleared(clear, 0, self.disk_error)

    def _remove_files(self, disk: DiskTier, clear: _StoreClear | None) -> None:
        def removed(result: tuple[int, str]) -> None:
            self._clearing -= 1
            if result[1]:
                logger.warning("the disk tier was not cleared: %s", result[1])
            if clear is not None:
                self._cleared(clear, *result)

        self._clearing += 1
        self._submit(Lane.WRITE, disk.clear, removed)

    def _cleared(self, clear: _StoreClear, on_disk: int, error: str) -> None:
        """Answer, unless that has been done."""
        if clear in self._unanswered:
            del self._unanswered[clear]
            error = error and f"the disk tier has not been cleared yet: {error}"
            self._send(clear.core.client, KVCleared(clear.call_id, clear.num_entries + on_disk, error))

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _keep(self, entries: list[Entry]) -> None:
        """Let entries keep their places until their job ends, which may begin later."""
        for entry in entries:
            entry.pins += 1
        self._busy.update(entries)

    def _begin(self, lane: Lane, entries: list[Entry], job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run a job on entries that are kept."""

        def end(result: Any) -> None:
            self._busy -= Counter(entries)
            done(result)
            for entry in entries:
                self._unpin(entry)

        self._submit(lane, job, end)

    def _batches(self, entries: list[Entry], limit: int) -> Iterator[list[Entry]]:
        """Divide entries into batches of at most `limit` bytes, or of one entry."""
        batch, size = list[Entry](), 0
        for entry in entries:
            own = self._kinds[entry.kind].size
            if batch and size + own > limit:
                yield batch
                batch, size = [], 0
            batch.append(entry)
            size += own
        if batch:
            yield batch

    # --- tests and the end --------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the invariants, between two messages."""
        self.arena.check_integrity()
        self.index.check_integrity()
        assert self.arena.used() == {(entry.kind, offset) for offset, entry in self._at.items()}
        assert all(entry.offset == offset for offset, entry in self._at.items())
        known, placed = set(self.index), set(self._at.values())
        assert known <= placed
        assert all(entry.is_known == (entry in known) for entry in placed)
        assert all(entry.pins or entry.is_known for entry in placed)
        pins = Counter(self._busy)
        for replica, core in self._cores.items():
            assert core.replica == replica
            assert self._clients[core.client] is core
            pins.update(core.grants.values())
            for offset, entry in core.grants.items():
                assert entry.offset == offset
                assert entry.state is EntryState.GRANTED
            for call_id, load in core.loads.items():
                assert load.call_id == call_id
                assert not load.is_released
                assert load.held or not load.unread
                assert all(
                    self._expected[load.entries[number].link, load.entries[number].kind][load] == number
                    for number in load.expected
                )
                pins.update(load.held.values())
        assert len(self._clients) == len(self._cores)
        loads = [load for core in self._cores.values() for load in core.loads.values()]
        assert sum(map(len, self._expected.values())) == sum(len(load.expected) for load in loads)
        known_keys = {entry.key for entry in known if entry.state is not EntryState.GRANTED}
        assert known_keys.isdisjoint(self._expected)
        assert pins == {entry: entry.pins for entry in placed if entry.pins}
        granted = {entry for core in self._cores.values() for entry in core.grants.values()}
        assert granted == {entry for entry in placed if entry.state is EntryState.GRANTED}
        assert set(self._waiting) == {entry for entry in placed if entry.state is EntryState.COMING}
        assert set(self._unwritten) <= {entry for entry in known if entry.state is EntryState.READY}
        assert self._unwritten_bytes == sum(self._kinds[entry.kind].size for entry in self._unwritten)

    def close(self) -> None:
        """Give the arena back."""
        self.arena.close()


def _are_right(views: list[memoryview], sums: list[bytes]) -> list[bool]:
    return [checksum(view) == each for view, each in zip(views, sums, strict=True)]


def _compare(keys: list[KVEntry], views: list[memoryview], sums: list[bytes | None]) -> list[bytes | None]:
    """Return the checksums of entries that have come from a peer with these bound ones, empty if they are damaged."""
    found = [None if each is None else checksum(view) for view, each in zip(views, sums, strict=True)]
    return [
        own and own * (bind(own, key.link, key.kind) == each) for key, own, each in zip(keys, found, sums, strict=True)
    ]


def _sums(views: list[memoryview]) -> list[bytes]:
    return [checksum(view) for view in views]


def _read(
    disk: DiskTier, entries: list[KVEntry], views: list[memoryview], waiting: list[list[tuple[_StoreLoad, int]]]
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
