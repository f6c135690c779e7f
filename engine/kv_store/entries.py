"""The entries of a KV store in memory: their places, who uses them, and the jobs on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from quire.engine.config.kv_layout import KVKind
from quire.engine.kv_store.arena import Arena
from quire.engine.kv_store.index import Entry, EntryState, Index
from quire.engine.protocol.kv_store import KVEntry

JOB_BYTES = 8 * 2**20
"""Bytes that one job reads or sums, at least one entry: a long load is answered in parts."""


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


class StoreEntries:
    """Entries that have a place in the arena: those in the index, and forgotten ones that are still in use."""

    def __init__(self, kinds: Sequence[KVKind], arena: Arena, index: Index, submit: Submit) -> None:
        self._kinds, self.arena, self.index, self._submit = kinds, arena, index, submit
        self.at: dict[int, Entry] = {}
        """By offset."""
        self.num_evicted = 0
        self._busy: Counter[Entry] = Counter()
        """Jobs on each entry."""

    def make(
        self, key: KVEntry, parent: bytes, state: EntryState, is_on_disk: Callable[[Entry], bool] | None
    ) -> Entry | None:
        """Find a place for an entry, which may be that of one on disk. None: all are in use, or have what comes before
        it in its chain."""
        entry = Entry(key.link, key.kind, state, pins=1)
        self.index.add(entry, parent)  # what comes before is no end of a chain from now on
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
        """Find an entry no more. Its place is free when nobody uses it."""
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
        """Let entries keep their places until their job ends, which may begin later."""
        for entry in entries:
            entry.pins += 1
        self._busy.update(entries)

    def begin(self, lane: Lane, entries: list[Entry], job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run a job on entries that are kept."""

        def end(result: Any) -> None:
            self._busy -= Counter(entries)
            done(result)
            for entry in entries:
                self.unpin(entry)

        self._submit(lane, job, end)

    def batches(self, entries: list[Entry], limit: int) -> Iterator[list[Entry]]:
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

    def check_integrity(self, pins: Counter[Entry]) -> None:
        """Check the invariants; `pins` are those of loads and grants."""
        self.arena.check_integrity()
        self.index.check_integrity()
        assert self.arena.used() == {(entry.kind, offset) for offset, entry in self.at.items()}
        assert all(entry.offset == offset for offset, entry in self.at.items())
        known, placed = set(self.index), set(self.at.values())
        assert known <= placed
        assert all(entry.is_known == (entry in known) for entry in placed)
        assert all(entry.pins or entry.is_known for entry in placed)
        assert pins + self._busy == {entry: entry.pins for entry in placed if entry.pins}
