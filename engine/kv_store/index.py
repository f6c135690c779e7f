"""Which entries a KV store has in memory, and which it evicts first.

The blocks of all chains form a tree: a block's node is below the node of the block before it. A block is useless
without the blocks before it, so the least recently used leaf of the tree is evicted first, with all of its entries. The
node above then becomes a leaf of the same age, and is evicted next, unless another chain continues from it. Chains are
therefore evicted as a whole, from the end, and a beginning that several chains share goes last.

Ages are compared in *turnovers*: how often the memory has been filled since the last use. A block deep in a chain costs
more to compute than the first one, because it attends to all blocks before it, but takes as many bytes. It counts as
younger by the ratio of its additional cost to the cost of the first block, in turnovers (GreedyDual, Young 1994, with
cost per byte as the credit).

Entries of windows, and states, help only chains that continue near them. They are also evicted by their own age, while
the other entries of their chain stay.

If no leaf can be evicted, because everything belongs to a chain that is in use, entries that are also on disk are
evicted, the least recently used first. The disk may then have more of a chain than memory.
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
    """The state of an entry's bytes."""

    GRANTED = auto()
    """Ranks are writing them."""
    COMING = auto()
    """They are being checksummed, or read from disk or a peer."""
    READY = auto()


@dataclass(eq=False, slots=True)
class Entry:
    """An entry in the arena."""

    link: bytes
    kind: int
    state: EntryState
    offset: int = -1
    checksum: bytes = b""
    """The checksum of its bytes, once it is ready."""
    pins: int = 0
    """How many loads, grants and jobs use its place. They keep it even after the entry has been evicted."""
    is_known: bool = False
    """Whether it is in the index."""
    used: int = 0
    """When it was last stored or loaded."""

    @property
    def key(self) -> Key:
        return self.link, self.kind


@dataclass(eq=False, slots=True)
class _ChainBlock:
    link: bytes
    parent: bytes
    used: int
    """When its entries, or entries of a node below it, were last stored, loaded or looked up."""
    used_at: float
    """The same, in turnovers."""
    depth: int = 0
    """Blocks before it in memory."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """By kind."""
    queued: tuple[float, int] | None = None
    """Its rank in the queue of leaves; None: it is not there."""


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
        """`has_window` says for each kind whether it has a window, and `shares` which part of the memory an entry
        takes. `on_removed` is called for each entry that leaves the index. A block with `doubling` blocks before it
        costs twice as much to compute as one with none."""
        self._on_removed = on_removed
        self._has_window, self._shares, self._doubling = has_window, shares or [0.0] * len(has_window), doubling
        self._on_disk: OrderedDict[Entry, None] = OrderedDict()
        """Entries that were seen on disk, the least recently used or written first."""
        self._nodes: dict[bytes, _ChainBlock] = {}
        self._children: Counter[bytes] = Counter()
        """How many nodes are below each link, which may have no node itself."""
        self._leaves: list[tuple[tuple[float, int], bytes]] = []
        """A heap by rank. It may contain stale links: without a node, not leaves any more, or used since."""
        self._windows: OrderedDict[Entry, None] = OrderedDict()
        """Entries of kinds with a window, the least recently used first."""
        self._now, self._turnovers = 0, 0.0
        self.num_entries = 0

    def __iter__(self) -> Iterator[Entry]:
        return (entry for node in self._nodes.values() for entry in node.entries.values())

    def advance(self) -> None:
        """Make later uses younger than all uses so far."""
        self._now += 1

    def get(self, link: bytes, kind: int) -> Entry | None:
        node = self._nodes.get(link)
        return None if node is None else node.entries.get(kind)

    def entries(self, link: bytes) -> dict[int, Entry]:
        """Return the entries of a block, by kind."""
        node = self._nodes.get(link)
        return {} if node is None else node.entries

    def add(self, entry: Entry, parent: bytes) -> None:
        """Add an entry of the block after `parent`, which is empty if there is none or it is not known."""
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
        """Note that an entry was used."""
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
        """Note that a block was looked up."""
        if (node := self._nodes.get(link)) is not None:
            node.used, node.used_at = self._now, self._turnovers

    def remove(self, entry: Entry) -> None:
        """Remove an entry."""
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
        """Return the link before a block in memory; empty: the block is the first, or the link is not known."""
        return self._nodes[link].parent

    def evict(self, spared: bytes, is_on_disk: Callable[[Entry], bool] | None = None) -> list[Entry]:
        """Evict the least valuable unused entries, but none of block `spared`; returns them. Empty: there are none
        left. `is_on_disk` says whether an entry that was seen on disk is still there; None: the disk cannot be read at
        present.
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
        """The leaf with the lowest rank that has an unused entry."""
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
        """Leaves with lower ranks are evicted first."""
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
