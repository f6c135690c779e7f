"""The entries of a KV store: their places in memory, who uses them, the jobs on them, and their way to disk."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

from quire.engine.config.kv_layout import KVKind
from quire.engine.config.kv_store_config import FILE_SHARE
from quire.engine.kv_store.arena import Arena
from quire.engine.kv_store.disk import FILE_BYTES, DiskTier
from quire.engine.kv_store.index import Entry, EntryState, Index
from quire.engine.protocol.kv_store import KVEntry

WRITE_SECONDS = 5.0
"""Time after which entries are written, even if they are fewer."""
_CHOICE = 4
"""Files' worth of the oldest entries among which those of one chain are found."""
JOB_BYTES = 8 * 2**20
"""Maximum bytes that one job reads or checksums, except for a single entry, so that a long load is answered in
parts."""

logger = logging.getLogger(__name__)


class Lane(Enum):
    """Jobs of one lane do not wait for jobs of another."""

    SUM = auto()
    READ = auto()
    """Several threads read from disk."""
    WRITE = auto()
    """One thread writes to disk."""


class Submit(Protocol):
    """Runs a job elsewhere, then calls `done` with its result in the thread of the store."""

    def __call__(self, lane: Lane, job: Callable[[], Any], done: Callable[[Any], None], /) -> None: ...


def run_now(lane: Lane, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
    """Run a job in the thread of the store."""
    done(job())


class StoreEntries:
    """Entries that have a place in the arena: those in the index, and forgotten ones that are still in use. Ready ones
    are written to the disk tier, if there is one."""

    def __init__(
        self, kinds: Sequence[KVKind], arena: Arena, index: Index, submit: Submit, clock: Callable[[], float]
    ) -> None:
        self._kinds, self.arena, self.index, self._submit, self._clock = kinds, arena, index, submit, clock
        self.at: dict[int, Entry] = {}
        """By offset."""
        self.num_evicted = 0
        self._busy: Counter[Entry] = Counter()
        """Jobs on each entry."""
        self.disk: DiskTier | None = None
        self._unwritten: dict[Entry, float] = {}
        """Ready entries that are not known to be on disk, with the time when they came."""
        self._unwritten_bytes = 0
        # Smaller tiers have smaller files: memory is written before it is needed for others, and disk evicts a part.
        self._file_bytes = min(FILE_BYTES, arena.size // FILE_SHARE)
        self._is_writing = False
        self._next_write = 0.0
        """Nothing is written before this time: after a failure, or because of the bandwidth."""
        self._write_bandwidth = 0.0
        self._clearing = 0
        """Jobs that clear the disk tier, which is as good as empty until they have ended."""

    def make(self, key: KVEntry, parent: bytes, state: EntryState) -> Entry | None:
        """Find a place for an entry, which may be that of one on disk. None: all are in use, or have what comes before
        it in its chain."""
        is_readable = self.disk is not None and not self.disk.error
        is_on_disk = (lambda entry: self.is_on_disk(*entry.key)) if is_readable else None
        entry = Entry(key.link, key.kind, state, pins=1)
        self.index.add(entry, parent)  # from now on, the block before it is not the end of a chain
        while (offset := self.arena.allocate(key.kind)) is None:
            if not self.arena.vacate(lambda offset: not self.at[offset].pins, self._move):
                evicted = self.index.evict(key.link, is_on_disk)
                if not evicted:
                    self.index.remove(entry)
                    return None
                self.num_evicted += len(evicted)
                for each in evicted:
                    self._free(each)
        self.at[offset], entry.offset, entry.pins = entry, offset, 0
        return entry

    def _move(self, old: int, new: int) -> None:
        entry = self.at[new] = self.at.pop(old)
        entry.offset = new

    def forget(self, entry: Entry) -> None:
        """Remove an entry from the index. Its place is free once nobody uses it."""
        self.index.remove(entry)
        if not entry.pins:
            self._free(entry)

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        if not entry.pins and not entry.is_known:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        del self.at[entry.offset]
        self.arena.free(entry.kind, entry.offset)

    def views(self, entries: list[Entry]) -> list[memoryview]:
        return [self.arena.view(entry.kind, entry.offset) for entry in entries]

    def keep(self, entries: list[Entry]) -> None:
        """Pin entries until their job ends; the job may begin later (`begin`)."""
        for entry in entries:
            entry.pins += 1
        self._busy.update(entries)

    def begin(self, lane: Lane, entries: list[Entry], job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run a job on entries that were pinned with `keep`."""

        def end(result: Any) -> None:
            self._busy -= Counter(entries)
            done(result)
            for entry in entries:
                self.unpin(entry)

        self._submit(lane, job, end)

    def batches(self, entries: list[Entry], limit: int) -> Iterator[list[Entry]]:
        """Divide entries into batches of at most `limit` bytes, or of one larger entry."""
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

    # --- disk ---------------------------------------------------------------------------------------------------------

    @property
    def num_unwritten(self) -> int:
        """Entries that are to be written to disk, if it can be used; those that are being written included."""
        return len(self._unwritten) + self._is_writing if self.disk is not None and not self.disk.error else 0

    def use_disk(self, disk: DiskTier, bandwidth: float, *, clears: bool) -> None:
        """Begin to use a disk tier, which may be cleared first, and write so many bytes per second to it at most; 0: no
        limit."""
        self._write_bandwidth = bandwidth
        self.disk, self._file_bytes = disk, min(self._file_bytes, disk.capacity // FILE_SHARE)
        if clears:
            self.clear_disk(disk, lambda count, error: None)
        for entry in self.index:
            if entry.state is EntryState.READY:
                self.save(entry)

    def clear_disk(self, disk: DiskTier, done: Callable[[int, str], None]) -> None:
        """Remove all files; `done` gets the number of their entries, and why some are left."""

        def removed(result: tuple[int, str]) -> None:
            self._clearing -= 1
            if result[1]:
                logger.warning("the disk tier was not cleared: %s", result[1])
            done(*result)

        self._clearing += 1
        self._submit(Lane.WRITE, disk.clear, removed)

    def seconds_left(self) -> float:
        """Seconds until `write` has a file's worth to write that waits for the bandwidth alone."""
        is_waiting = self._unwritten_bytes >= self._file_bytes and not self._is_writing and not self._clearing
        return max(0.0, self._next_write - self._clock()) if is_waiting and self.disk is not None else math.inf

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
            self.drop_unwritten(entry)
        entries, sums = [KVEntry(*entry.key) for entry in batch], [entry.checksum for entry in batch]
        views = self.views(batch)
        if self._write_bandwidth:
            self._next_write = now + sum(map(len, views)) / self._write_bandwidth
        self._is_writing = True
        self.keep(batch)
        write, written = partial(disk.write, entries, views, sums), partial(self._written, disk, batch)
        self.begin(Lane.WRITE, batch, write, written)

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
        return next(self.batches([entry for chain in chains.values() for entry in chain], self._file_bytes))

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

    def drop_unwritten(self, entry: Entry) -> None:
        """Do not write an entry, as it is being written, or memory has forgotten it."""
        if self._unwritten.pop(entry, None) is not None:
            self._unwritten_bytes -= self._kinds[entry.kind].size

    def is_on_disk(self, link: bytes, kind: int) -> bool:
        return self.disk is not None and not self._clearing and KVEntry(link, kind) in self.disk

    def is_kept_on_disk(self, link: bytes, kind: int) -> bool:
        """Whether an entry is on disk, even if the disk does not answer at present."""
        return self.disk is not None and not self._clearing and self.disk.holds(KVEntry(link, kind))

    # --- tests --------------------------------------------------------------------------------------------------------

    def check_integrity(self, pins: Counter[Entry]) -> None:
        """Check the invariants, given the pins that loads and grants hold."""
        self.arena.check_integrity()
        self.index.check_integrity()
        assert self.arena.used() == {(entry.kind, offset) for offset, entry in self.at.items()}
        assert all(entry.offset == offset for offset, entry in self.at.items())
        known, placed = set(self.index), set(self.at.values())
        assert known <= placed
        assert all(entry.is_known == (entry in known) for entry in placed)
        assert all(entry.pins or entry.is_known for entry in placed)
        assert pins + self._busy == {entry: entry.pins for entry in placed if entry.pins}
        assert set(self._unwritten) <= {entry for entry in known if entry.state is EntryState.READY}
        assert self._unwritten_bytes == sum(self._kinds[entry.kind].size for entry in self._unwritten)
