"""The KV store of a host: what it does with the messages of engine cores (`quire.engine.protocol.kv_store`).

One thread calls everything here. What takes long (checksums, reads, writes) is a job that runs elsewhere, and whose
result comes back to this thread.

An entry is granted to a core, which has its ranks write it; then it is summed, and is ready. Its checksum is compared
each time before a core gets its offset, so nothing is ever read that was not stored. An entry that somebody uses (a
core, a job) keeps its place, even after it has been forgotten. Entries are written to disk some seconds after they
came, those of one chain together, and are read from there into a place in memory. What this host lacks is fetched from
the stores of others (`PeerTier`), which read from this one like cores (`PeerServer`).

Its entries are in `StoreEntries`, and the loads in `StoreLoads`.

Invariants (`check_integrity`): the places in use are those of the entries in the index and of forgotten ones that are
still in use; an entry's pins are the loads, grants and jobs that have it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from quire.engine.config.kv_layout import KVKind
from quire.engine.config.kv_store_config import FILE_SHARE
from quire.engine.kv_store.arena import Arena
from quire.engine.kv_store.checksum import checksum
from quire.engine.kv_store.disk import FILE_BYTES, DiskTier
from quire.engine.kv_store.entries import JOB_BYTES, Lane, StoreEntries, Submit, run_now
from quire.engine.kv_store.index import Entry, EntryState, Index
from quire.engine.kv_store.loads import OpenCore, StoreLoads
from quire.engine.kv_store.peers import PeerTier
from quire.engine.kv_store.rank_server import RankServer
from quire.engine.kv_store.tier_events import TierEvents
from quire.engine.protocol.kv_ranks import KVRank, RankPlace
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
WRITE_SECONDS = 5.0
"""Time after which entries are written, even if they are fewer."""
_MAX_REFUSED = 4096
"""Links that are remembered because there was no room for their entries."""
_CHOICE = 4
"""Files' worth of the oldest entries among which those of one chain are found."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _StoreClear:
    """A `ClearKV` that has not been answered."""

    core: OpenCore
    call_id: int
    num_entries: int
    """In memory alone."""
    began: float


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
        arena = Arena(memory_bytes, [kind.size for kind in kinds], on_piece)
        self._events = TierEvents(len(kinds), self._has_entry, self._has_block, send)
        shares = [kind.size / memory_bytes for kind in kinds]
        index = Index([kind.window is not None for kind in kinds], self._on_removed, shares, doubling)
        self.entries = StoreEntries(kinds, arena, index, submit)
        self.arena, self.index = arena, index
        self._stats = KVStoreStats(memory_capacity=memory_bytes)
        self._loads = StoreLoads(kinds, self.entries, self, self._events, self._stats, send)
        self.disk: DiskTier | None = None
        self.disk_error = ""
        """Why there is no disk tier, although there should be one."""
        self.ranks: RankServer | None = None
        """Where ranks on other hosts reach the arena; None: nowhere."""
        self.peers: PeerTier | None = None
        self.sent_peer_bytes = 0
        self._reads_peers_at = 0.0
        """Peers have nothing before this time."""
        self._least_asked = 1
        """Blocks that must be missing before peers are asked."""
        self._cores: dict[int, OpenCore] = {}
        """By replica."""
        self._clients: dict[bytes, OpenCore] = {}
        self._refused: dict[bytes, None] = {}
        """Links of the last blocks for whose entries of all tokens there was no room."""
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

    @property
    def memory(self) -> memoryview:
        """The arena's bytes."""
        return self.arena.memory

    @property
    def path(self) -> str:
        return self.arena.path

    @property
    def _opened(self) -> KVStoreOpened:
        return KVStoreOpened(self.arena.path, self.arena.size, "" if self.ranks is None else self.ranks.address)

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
                self.save(entry)

    def use_peers(self, peers: PeerTier, least: int) -> None:
        """Begin to use the stores of other hosts, for chains of which this one lacks `least` blocks or more."""
        self.peers, self._least_asked = peers, least

    def handle(self, client: bytes, message: ToStore) -> None:
        """Handle a message of a client."""
        self.index.advance()
        if isinstance(message, OpenKVStore):
            return self._open(client, message)
        if (core := self._clients.get(client)) is None:
            return self._send(client, self._opened)
        match message:
            case LookUpKV():
                self._look_up(core, message)
            case LoadKV():
                self._loads.begin(core, message)
            case SettleKV(call_id, gives_up):
                if (load := core.loads.get(call_id)) is not None:
                    self._loads.settle(load, gives_up=gives_up)
            case ReleaseKV(call_id, numbers):
                if (load := core.loads.get(call_id)) is not None:
                    self._loads.release(load, numbers)
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
            self._loads.release(load, [])
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
        stats.evicted_memory_entries, stats.disk_error = self.entries.num_evicted, self.disk_error
        if disk is not None:
            stats.disk_bytes, stats.disk_capacity, stats.disk_entries = disk.used_bytes, disk.capacity, disk.num_entries
            stats.written_disk_bytes, stats.evicted_disk_entries = disk.written_bytes, disk.evicted_entries
            stats.failed_disk, stats.disk_error = disk.failed, disk.error
        if self.peers is not None:
            up, stats.peers, stats.failed_peers = self.peers.stats()
            stats.peers_up = up if self.usable_peers is not None else []
            stats.sent_peer_bytes = self.sent_peer_bytes
        if self.ranks is not None:
            stats.copied_rank_bytes = self.ranks.copied_bytes
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
            core = self._cores[message.replica] = OpenCore(message.replica, message.incarnation, client)
        self._clients.pop(core.client, None)
        self._clients[client], core.client = core, client
        if message.has_events:
            self._events.follow(core.replica, client)
        self._send(client, self._opened)

    def _look_up(self, core: OpenCore, message: LookUpKV) -> None:
        links, peers = message.links, self.usable_peers
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

    @property
    def usable_peers(self) -> PeerTier | None:
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
                elif entry is None and self.is_on_disk(link, kind):  # one that is being written cannot be read now
                    found[at] = DISK
                elif entry is None and elsewhere is not None and elsewhere[kind][at]:
                    found[at] = PEER
            if not all(tiers[kind][at] for kind in self._all_tokens):
                break
        return [bytes(each) for each in tiers]

    def locate(self, kind: int, offset: int) -> tuple[memoryview, bytes]:
        """Return the bytes and the checksum of an entry that is loaded for somebody."""
        return self.arena.view(kind, offset), self.entries.at[offset].checksum

    def of_ranks(self, sender: KVRank, place: RankPlace, *, writes: bool) -> memoryview | None:
        """Return the bytes of an entry that a rank may write or read now. None: it may not, or it has made another
        connection since."""
        core, entry = self._cores.get(sender.replica), self.entries.at.get(place.offset)
        if place.arena != self.path or core is None or core.incarnation != sender.incarnation:
            return None
        if entry is None or entry.kind != place.kind:
            return None
        is_loaded = entry.state is EntryState.READY and entry.pins > 0
        if not (core.grants.get(place.offset) is entry if writes else is_loaded):
            return None
        if sender.number < core.connections.get(sender.rank, 0):
            return None
        core.connections[sender.rank] = sender.number
        return self.arena.view(place.kind, place.offset)

    # --- storing ------------------------------------------------------------------------------------------------------

    def _grant(self, core: OpenCore, message: OfferKV) -> None:
        granted = GrantedKV([], [])
        for number, key in enumerate(message.entries):
            if (entry := self.index.get(key.link, key.kind)) is not None:
                self.index.use(entry)
                continue
            parent = message.parents[number] if message.parents else b""
            # Of a chain for whose middle there is no room, the end has no use.
            before, keeps_all = (parent, True) if self._kinds[key.kind].window is None else (key.link, False)
            entry = None if before in self._refused else self.make(key, parent, EntryState.GRANTED)
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

    def _store(self, core: OpenCore, message: StoredKV) -> None:
        for offset in message.abandoned:
            if (entry := core.grants.pop(offset, None)) is not None:
                self._abandon(entry)
        granted = [core.grants.pop(offset) for offset in message.offsets if offset in core.grants]
        for entry in granted:
            entry.state = EntryState.COMING
            self._loads.wait_for(entry)
        self.entries.keep(granted)
        for batch in self.entries.batches(granted, JOB_BYTES):
            self.entries.begin(Lane.SUM, batch, partial(_sums, self.entries.views(batch)), partial(self._summed, batch))
        for entry in granted:
            self.entries.unpin(entry)

    def _abandon(self, entry: Entry) -> None:
        """End a grant whose entry has not been written."""
        if entry.is_known:
            self.entries.forget(entry)
        self.entries.unpin(entry)
        self._loads.lose(entry)

    def _summed(self, entries: list[Entry], sums: list[bytes]) -> None:
        for entry, found in zip(entries, sums, strict=True):
            entry.checksum, entry.state = found, EntryState.READY
            self._events.note(MEMORY, entry.link, entry.kind)
            self._stats.stored_bytes += self._kinds[entry.kind].size
            self.save(entry)
        self._loads.take(entries)
        self.write()

    def make(self, key: KVEntry, parent: bytes, state: EntryState) -> Entry | None:
        """Find a place for an entry; see `StoreEntries.make`."""
        is_readable = self.disk is not None and not self.disk.error
        is_on_disk = (lambda entry: self.is_on_disk(*entry.key)) if is_readable else None
        return self.entries.make(key, parent, state, is_on_disk)

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
        entries, views, sums = (
            [KVEntry(*entry.key) for entry in batch],
            self.entries.views(batch),
            [e.checksum for e in batch],
        )
        if self._write_bandwidth:
            self._next_write = now + sum(map(len, views)) / self._write_bandwidth
        self._is_writing = True
        self.entries.keep(batch)
        self.entries.begin(
            Lane.WRITE, batch, partial(disk.write, entries, views, sums), partial(self._written, disk, batch)
        )

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
        return next(self.entries.batches([entry for chain in chains.values() for entry in chain], self._file_bytes))

    def save(self, entry: Entry) -> None:
        """Have an entry written, unless it is on disk."""
        if self.is_on_disk(*entry.key):
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

    def is_on_disk(self, link: bytes, kind: int) -> bool:
        return self.disk is not None and not self._clearing and KVEntry(link, kind) in self.disk

    def _on_removed(self, entry: Entry) -> None:
        """Memory has forgotten an entry."""
        self._events.note(MEMORY, entry.link, entry.kind)
        self._drop_unwritten(entry)

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

    def _clear(self, core: OpenCore, call_id: int) -> None:
        # By then the other stores of the server are cleared, or the call has failed: nothing comes back from them.
        self._reads_peers_at = self._clock() + CLEAR_SECONDS
        entries = list(self.index)
        count = sum(not self.is_on_disk(*entry.key) for entry in entries)
        for entry in entries:
            self.entries.forget(entry)
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

    # --- tests and the end --------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the invariants, between two messages."""
        pins: Counter[Entry] = Counter()
        for replica, core in self._cores.items():
            assert core.replica == replica
            assert self._clients[core.client] is core
            pins.update(core.grants.values())
            for offset, entry in core.grants.items():
                assert entry.offset == offset
                assert entry.state is EntryState.GRANTED
            assert all(load.call_id == call_id for call_id, load in core.loads.items())
            for load in core.loads.values():
                pins.update(load.held.values())
        assert len(self._clients) == len(self._cores)
        self.entries.check_integrity(pins)
        self._loads.check_integrity([load for core in self._cores.values() for load in core.loads.values()])
        granted = {entry for core in self._cores.values() for entry in core.grants.values()}
        assert granted == {entry for entry in self.entries.at.values() if entry.state is EntryState.GRANTED}
        assert set(self._unwritten) <= {entry for entry in self.index if entry.state is EntryState.READY}
        assert self._unwritten_bytes == sum(self._kinds[entry.kind].size for entry in self._unwritten)

    def close(self) -> None:
        """Give the arena back."""
        self.arena.close()


def _sums(views: list[memoryview]) -> list[bytes]:
    return [checksum(view) for view in views]
