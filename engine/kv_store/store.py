"""The KV store of a host: handles the messages of engine cores (`quire.engine.protocol.kv_store`).

One thread calls everything here. Slow work (checksums, reads, writes) runs elsewhere as jobs, whose results come back
to this thread.

An entry is granted to a core, whose ranks write it. Then its checksum is computed, and it is ready. The checksum is
verified each time before a core gets the entry's offset, so that nothing is ever read that was not stored. An entry in
use (by a core or a job) keeps its place, even after it has been evicted. Entries are written to disk some seconds after
they came, those of one chain together, and are read from there into a place in memory. Entries that this host lacks are
fetched from the stores of others (`PeerTier`), which read from this one as if they were cores (`PeerServer`).

Its entries, with their way to disk, are in `StoreEntries`, and the loads, with the peers, in `StoreLoads`.

Invariants (`check_integrity`): the places in use are those of the entries in the index and of forgotten ones that are
still in use; an entry's pins are the loads, grants and jobs that have it.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from quire.engine.config.kv_layout import KVKind
from quire.engine.kv_store.arena import Arena
from quire.engine.kv_store.checksum import checksum
from quire.engine.kv_store.disk import DiskTier
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
_MAX_REFUSED = 4096
"""Links that are remembered because there was no room for their entries."""


@dataclass(eq=False)
class _StoreClear:
    """A `ClearKV` that has not been answered."""

    core: OpenCore
    call_id: int
    num_entries: int
    """Entries that only memory had."""
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
        self._kinds, self._send, self._clock = kinds, send, clock
        self._all_tokens = [number for number, kind in enumerate(kinds) if kind.window is None]
        arena = Arena(memory_bytes, [kind.size for kind in kinds], on_piece)
        self._events = TierEvents(len(kinds), self._has_entry, self._has_block, send)
        shares = [kind.size / memory_bytes for kind in kinds]
        index = Index([kind.window is not None for kind in kinds], self._on_removed, shares, doubling)
        self.entries = StoreEntries(kinds, arena, index, submit, clock)
        self.arena, self.index = arena, index
        self._stats = KVStoreStats(memory_capacity=memory_bytes)
        self._loads = StoreLoads(kinds, self.entries, self._events, self._stats, send, clock)
        self.disk_error = ""
        """Why there is no disk tier, although there should be one."""
        self.ranks: RankServer | None = None
        """Where ranks on other hosts reach the arena; None: nowhere."""
        self.sent_peer_bytes = 0
        self._least_asked = 1
        """Blocks that must be missing before peers are asked."""
        self._cores: dict[int, OpenCore] = {}
        """By replica."""
        self._clients: dict[bytes, OpenCore] = {}
        self._refused: dict[bytes, None] = {}
        """Links of the last blocks for whose entries of all tokens there was no room."""
        self._unanswered: dict[_StoreClear, None] = {}
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

    def use_disk(self, disk: DiskTier, bandwidth: float = 0.0) -> None:
        """Begin to use a disk tier, and write so many bytes per second to it at most; 0: no limit."""
        self.entries.use_disk(disk, bandwidth, clears=self._clears_disk)

    def use_peers(self, peers: PeerTier, least: int) -> None:
        """Begin to use the stores of other hosts, for chains of which this one lacks `least` blocks or more."""
        self._loads.peers, self._least_asked = peers, least

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
        """End the grants and loads of a core: all its ranks have ended."""
        if (core := self._cores.pop(replica, None)) is None:
            return
        self._clients.pop(core.client, None)
        self._events.forget(replica)
        for load in [*core.loads.values()]:
            self._loads.release(load, [])
        for entry in core.grants.values():
            self._abandon(entry)

    def lose_replica(self, replica: int) -> None:
        """Let nobody wait for entries that a core should have stored: it has ended. Its ranks may not have, so the
        granted places stay theirs until they have."""
        if (core := self._cores.get(replica)) is not None:
            for entry in core.grants.values():
                entry.pins += 1
                self._abandon(entry)

    def tick(self) -> None:
        """Tell the cores the state of the store, and write entries that have waited; called about once a second."""
        self.entries.write()
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
        return self._events.tell(deque() if self.entries.disk is None else self.entries.disk.changed)

    def stats(self) -> KVStoreStats:
        """Return a copy of gauges and counters."""
        stats, disk, peers = self._stats, self.entries.disk, self._loads.peers
        stats.memory_bytes, stats.memory_entries = self.arena.used_bytes, self.index.num_entries
        stats.evicted_memory_entries, stats.disk_error = self.entries.num_evicted, self.disk_error
        if disk is not None:
            stats.disk_bytes, stats.disk_capacity, stats.disk_entries = disk.used_bytes, disk.capacity, disk.num_entries
            stats.written_disk_bytes, stats.evicted_disk_entries = disk.written_bytes, disk.evicted_entries
            stats.failed_disk, stats.disk_error = disk.failed, disk.error
        if peers is not None:
            up, stats.peers, stats.failed_peers = peers.stats()
            stats.peers_up = up if self._loads.usable_peers is not None else []
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
        links, peers = message.links, self._loads.usable_peers
        tiers = self.find(links, counts_granted=message.counts_granted)
        in_memory = [
            KVEntry(link, kind)
            for kind, found in enumerate(tiers)
            for link, tier in zip(links, found, strict=True)
            if tier == MEMORY
        ]
        for entry in in_memory:
            self.index.touch(entry.link)
        if self.entries.disk is not None:
            self.entries.disk.use(in_memory)  # so that the files of what is used in memory do not look old
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

    def find(
        self, links: Sequence[bytes], elsewhere: Sequence[bytes] | None = None, *, counts_granted: bool = False
    ) -> list[bytes]:
        """Return where the entries of a chain are, as `FoundKV.tiers`. `elsewhere`: which entries peers have: by kind,
        a byte for each link. `counts_granted`: see `LookUpKV`. This does not count as a use."""
        tiers = [bytearray(len(links)) for _ in self._kinds]
        for at, link in enumerate(links):
            entries = self.index.entries(link)
            for kind, found in enumerate(tiers):
                entry = entries.get(kind)
                if entry is not None and (counts_granted or entry.state is not EntryState.GRANTED):
                    found[at] = MEMORY
                elif entry is None and self.entries.is_on_disk(link, kind):  # what is being written cannot be read
                    found[at] = DISK
                elif entry is None and elsewhere is not None and elsewhere[kind][at]:
                    found[at] = PEER
            if not all(tiers[kind][at] for kind in self._all_tokens):
                break
        return [bytes(each) for each in tiers]

    def locate(self, kind: int, offset: int) -> tuple[memoryview, bytes]:
        """Return the bytes and the checksum of a loaded entry."""
        return self.arena.view(kind, offset), self.entries.at[offset].checksum

    def of_ranks(self, sender: KVRank, place: RankPlace, *, writes: bool) -> memoryview | None:
        """Return the bytes of an entry, if the rank may write or read it now. None: it may not, or it has made another
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
            # If there is no room for the middle of a chain, its end is useless.
            before, keeps_all = (parent, True) if self._kinds[key.kind].window is None else (key.link, False)
            entry = None if before in self._refused else self.entries.make(key, parent, EntryState.GRANTED)
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
        """End a grant whose entry was not written."""
        if entry.is_known:
            self.entries.forget(entry)
        self.entries.unpin(entry)
        self._loads.lose(entry)

    def _summed(self, entries: list[Entry], sums: list[bytes]) -> None:
        for entry, found in zip(entries, sums, strict=True):
            entry.checksum, entry.state = found, EntryState.READY
            self._events.note(MEMORY, entry.link, entry.kind)
            self._stats.stored_bytes += self._kinds[entry.kind].size
            self.entries.save(entry)
        self._loads.take(entries)
        self.entries.write()

    # --- what tiers have ----------------------------------------------------------------------------------------------

    def _on_removed(self, entry: Entry) -> None:
        """Memory has forgotten an entry."""
        self._events.note(MEMORY, entry.link, entry.kind)
        self.entries.drop_unwritten(entry)

    def _has_entry(self, tier: int, link: bytes, kind: int) -> bool:
        """Whether a tier has an entry, for KV events."""
        if tier == DISK:
            return self.entries.is_kept_on_disk(link, kind)
        entry = self.index.get(link, kind)
        return entry is not None and entry.state is EntryState.READY

    def _has_block(self, link: bytes) -> bool:
        """Whether some tier has an entry of a block, or will have it."""
        disk = self.entries.disk
        return bool(self.index.entries(link)) or any(
            disk is not None and disk.holds(KVEntry(link, kind)) for kind in range(len(self._kinds))
        )

    def _clear(self, core: OpenCore, call_id: int) -> None:
        # By then the other stores of the server are cleared, or the call has failed: nothing comes back from them.
        self._loads.reads_peers_at = self._clock() + CLEAR_SECONDS
        entries = list(self.index)
        count = sum(not self.entries.is_on_disk(*entry.key) for entry in entries)
        for entry in entries:
            self.entries.forget(entry)
        clear = _StoreClear(core, call_id, count, self._clock())
        self._unanswered[clear] = None
        if self.entries.disk is not None:
            return self.entries.clear_disk(self.entries.disk, partial(self._cleared, clear))
        self._clears_disk = bool(self.disk_error)
        self._cleared(clear, 0, self.disk_error)

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

    def close(self) -> None:
        """Give the arena back."""
        self.arena.close()


def _sums(views: list[memoryview]) -> list[bytes]:
    return [checksum(view) for view in views]
