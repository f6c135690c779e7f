"""What a KV store has in memory, and what it forgets first.

The blocks of all chains are a tree: a block's node is below that of the block before it. A block is of no use without
those before it, so of the entries that keep all tokens the ends of chains are forgotten first: the least recently used
leaf of the tree, with all of its entries. The node before it becomes a leaf as old as this one, and is the next one,
unless another chain goes on from it: so chains are forgotten as a whole, from the end, and what several have in common
last.

Ages are compared in *turnovers*: how often the memory has been filled since. A block deep in a chain is more costly to
compute than one at its beginning, as it attends to all before it, and takes as many bytes; so it counts as younger, by
a turnover for each time that its own cost is more (GreedyDual, Young 1994, with cost per byte as the credit).

An entry of a window, or a state, is of use for chains that go on near it: it is also forgotten by its own age, within a
chain whose other entries stay.

If no end of a chain can be forgotten, because all belongs to one that goes on, entries are that the disk has, those
used longest ago first: so the disk may have more of a chain than memory.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

Key = tuple[bytes, int]
"""Link and kind."""


class EntryState(Enum):
    """Of an entry's bytes."""

    GRANTED = auto()
    """Ranks write them."""
    COMING = auto()
    """They are being summed or read from disk."""
    READY = auto()


@dataclass(eq=False, slots=True)
class Entry:
    """An entry in the arena."""

    link: bytes
    kind: int
    state: EntryState
    offset: int = -1
    checksum: bytes = b""
    """Of its bytes, when it is ready."""
    pins: int = 0
    """Loads, grants and jobs that use its place, which stays theirs also when the entry has been forgotten."""
    is_known: bool = False
    """Whether it is in the index."""
    used: int = 0
    """When it was stored or loaded."""

    @property
    def key(self) -> Key:
        return self.link, self.kind


@dataclass(eq=False, slots=True)
class _ChainBlock:
    link: bytes
    parent: bytes
    used: int
    """When its entries, or those of a node below it, were stored, loaded or looked up."""
    used_at: float
    """The same, in turnovers."""
    depth: int = 0
    """Blocks before it, as far as memory has them."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """By kind."""
    queued: tuple[float, int] | None = None
    """The rank with which it is in the queue of leaves."""


class Index:
    """The entries in memory.

    Invariants (`check_integrity`): a node has entries; each leaf is in the queue of leaves; entries of windows are in
    the order of their use.
    """

    def __init__(
        self,
        has_window: list[bool],
        on_removed: Callable[[Entry], None] = lambda entry: None,
        shares: Sequence[float] = (),
        doubling: float = math.inf,
    ) -> None:
        """Whether each kind has a window, and which part of the memory an entry of it takes. `on_removed` is called for
        each entry that is forgotten. A block with `doubling` blocks before it costs twice as much to compute as one
        without any."""
        self._on_removed = on_removed
        self._has_window, self._shares, self._doubling = has_window, shares or [0.0] * len(has_window), doubling
        self._on_disk: OrderedDict[Entry, None] = OrderedDict()
        """Entries that have been seen on disk; those first that were used or written longest ago."""
        self._nodes: dict[bytes, _ChainBlock] = {}
        self._children: Counter[bytes] = Counter()
        """Nodes below each link, which may have no node itself."""
        self._leaves: list[tuple[tuple[float, int], bytes]] = []
        """A heap by rank; also of links that have no node, are no leaves, or have been used since."""
        self._windows: OrderedDict[Entry, None] = OrderedDict()
        """Entries of kinds with a window, the least recently used first."""
        self._now, self._turnovers = 0, 0.0
        self.num_entries = 0

    def __iter__(self) -> Iterator[Entry]:
        return (entry for node in self._nodes.values() for entry in node.entries.values())

    def advance(self) -> None:
        """Let what is used from now on be younger than what has been used so far."""
        self._now += 1

    def get(self, link: bytes, kind: int) -> Entry | None:
        node = self._nodes.get(link)
        return None if node is None else node.entries.get(kind)

    def entries(self, link: bytes) -> dict[int, Entry]:
        """Return the entries of a block, by kind."""
        node = self._nodes.get(link)
        return {} if node is None else node.entries

    def add(self, entry: Entry, parent: bytes) -> None:
        """Add an entry of a block that comes after `parent`, which is empty if it is the first or not known."""
        node = self._nodes.get(entry.link)
        if node is None:
            before = self._nodes.get(parent)
            depth = 0 if before is None else before.depth + 1
            node = self._nodes[entry.link] = _ChainBlock(entry.link, b"", self._now, self._turnovers, depth)
            self._queue(node)
        if parent and not node.parent:
            node.parent = parent
            self._children[parent] += 1
        assert entry.kind not in node.entries
        node.entries[entry.kind] = entry
        entry.is_known = True
        self.num_entries += 1
        self._turnovers += self._shares[entry.kind]
        self.use(entry)

    def use(self, entry: Entry) -> None:
        """Note that an entry is used."""
        self.touch(entry.link)
        entry.used = self._now
        if self._has_window[entry.kind]:
            self._windows[entry] = None
            self._windows.move_to_end(entry)
        if entry in self._on_disk:
            self._on_disk.move_to_end(entry)

    def keep_on_disk(self, entry: Entry) -> None:
        """Note that an entry is on disk."""
        if entry.is_known:
            self._on_disk[entry] = None
            self._on_disk.move_to_end(entry)

    def touch(self, link: bytes) -> None:
        """Note that a block is looked up."""
        if (node := self._nodes.get(link)) is not None:
            node.used, node.used_at = self._now, self._turnovers

    def remove(self, entry: Entry) -> None:
        """Forget an entry."""
        node = self._nodes[entry.link]
        del node.entries[entry.kind]
        entry.is_known = False
        self._on_removed(entry)
        self.num_entries -= 1
        self._windows.pop(entry, None)
        self._on_disk.pop(entry, None)
        if node.entries:
            return
        del self._nodes[node.link]
        if not node.parent:
            return
        self._children[node.parent] -= 1
        if not self._children[node.parent]:
            del self._children[node.parent]
        if (parent := self._nodes.get(node.parent)) is not None:
            parent.used, parent.used_at = max(parent.used, node.used), max(parent.used_at, node.used_at)
            self._queue(parent)

    def parent(self, link: bytes) -> bytes:
        """Return the link before that of a block in memory; empty: it is the first, or not known."""
        return self._nodes[link].parent

    def evict(self, spared: bytes, is_on_disk: Callable[[Entry], bool] | None = None) -> list[Entry]:
        """Forget the entries that are worth least and that nobody uses, but not those of block `spared`; returns them.
        Empty: there are no more. `is_on_disk` says whether an entry that has been there still is; None: it
        cannot be read at present.
        """
        leaf = self._oldest_leaf(spared)
        lone = next((each for each in self._windows if not each.pins and each.link != spared), None)
        if lone is not None and (leaf is None or lone.used < leaf.used):
            evicted = [lone]
        else:
            evicted = [] if leaf is None else [each for each in leaf.entries.values() if not each.pins]
        if not evicted and is_on_disk is not None:
            gone = []
            for each in self._on_disk:
                if not is_on_disk(each):
                    gone.append(each)
                elif not each.pins and each.link != spared:
                    evicted = [each]
                    break
            for each in gone:
                del self._on_disk[each]
        for each in evicted:
            self.remove(each)
        return evicted

    def _oldest_leaf(self, spared: bytes) -> _ChainBlock | None:
        """The least recently used leaf with an entry that nobody uses."""
        found, in_use = None, []
        while self._leaves:
            rank, link = self._leaves[0]
            node = self._nodes.get(link)
            if node is None or node.queued != rank:
                heapq.heappop(self._leaves)
            elif self._children[link] or self._rank(node) != rank:
                heapq.heappop(self._leaves)
                node.queued = None
                self._queue(node)
            elif link == spared or all(each.pins for each in node.entries.values()):
                in_use.append(heapq.heappop(self._leaves))
            else:
                found = node
                break
        for each in in_use:
            heapq.heappush(self._leaves, each)
        return found

    def _rank(self, node: _ChainBlock) -> tuple[float, int]:
        """Leaves with lower ranks are forgotten first."""
        return node.used_at + node.depth / self._doubling, node.used

    def _queue(self, node: _ChainBlock) -> None:
        if node.queued is None and not self._children[node.link]:
            node.queued = self._rank(node)
            heapq.heappush(self._leaves, (node.queued, node.link))

    def check_integrity(self) -> None:
        assert self.num_entries == sum(1 for _ in self)
        children = Counter(node.parent for node in self._nodes.values() if node.parent)
        assert +self._children == children
        queued = set(self._leaves)
        for link, node in self._nodes.items():
            assert node.entries
            assert node.link == link
            assert node.queued is not None or children[link]
            assert node.queued is None or (node.queued, link) in queued
            assert all(entry.is_known and entry.key == (link, kind) for kind, entry in node.entries.items())
        assert set(self._windows) == {entry for entry in self if self._has_window[entry.kind]}
        assert set(self._on_disk) <= set(self)
        ages = [entry.used for entry in self._windows]
        assert ages == sorted(ages)
