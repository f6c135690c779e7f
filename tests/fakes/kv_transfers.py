"""A KV store and the copies of ranks, for the scheduler's tests: entries are what `FakeModel` has in blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from quire.engine.config.engine_config import KVCacheGroup
from quire.engine.config.kv_layout import KVKind, KVLayout
from quire.engine.protocol.kv_store import (
    MEMORY,
    NO_TIER,
    DescribeKV,
    FoundKV,
    FromStore,
    GrantedKV,
    KVCopied,
    KVCopy,
    KVCopyPlan,
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
from tests.fakes.model import FakeModel

SIZE = 64
"""Bytes of an entry."""
Content = list[tuple[list[int | None], int | None]]
"""For each block of an entry: its tokens, and the state in its page."""


def layout(groups: Sequence[KVCacheGroup]) -> KVLayout:
    """Groups of one kind are kept together, as `kv_layout` says; for layers that no model has."""
    kinds = dict[tuple[bool, bool, int], list[int]]()
    for number, group in enumerate(groups):
        kinds.setdefault((group.is_state, group.fills_pages, group.window or 0), []).append(number)
    return KVLayout(tuple(KVKind(tuple(kinds[kind]), SIZE) for kind in sorted(kinds)), b"")


@dataclass
class FakeStore:
    """Answers at once. It drops the oldest entries when it is full."""

    num_kinds: int
    num_entries: int = 4096
    path: str = "first"
    contents: dict[int, Content] = field(default_factory=dict)
    """By offset in the arena."""
    entries: dict[KVEntry, int] = field(default_factory=dict)
    granted: dict[int, KVEntry] = field(default_factory=dict)
    loading: dict[int, dict[int, int]] = field(default_factory=dict)
    """By call: the offsets that are read."""
    tier: Callable[[KVEntry], int] = lambda entry: MEMORY
    loses: Callable[[KVEntry], bool] = lambda entry: False
    """Whether it cannot bring an entry that it has."""
    expected: dict[int, dict[int, KVEntry]] = field(default_factory=dict)
    """By call of a load that waits: entries by number."""
    waiting: set[int] = field(default_factory=set)
    """Calls that also wait for what nobody writes."""
    came: list[LoadedKV] = field(default_factory=list)
    """Of these loads: answers to be given."""
    opened: set[int] = field(default_factory=set)
    """The cores that have opened it."""
    described: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)
    """How events name the blocks of links."""
    told: set[tuple[int, int, bytes]] | None = None
    """Tier, kind and link of the entries that the core knows of; None: it has not been told yet, or is not."""
    received: list[ToStore] = field(default_factory=list)

    def restart(self, path: str) -> None:
        """End, and start again with another arena. What the ranks write to the old one is lost."""
        self.path, self.told = path, None
        self.opened.clear()
        self.waiting.clear()
        self.came.clear()
        for each in (self.entries, self.granted, self.loading, self.expected, self.contents, self.described):
            each.clear()

    def handle(self, message: ToStore, core: int = 0) -> list[FromStore]:
        answers, is_first = self._answer(message, core), self.told is None
        if not self.has_events:
            return answers
        told, self.told = self.told or set(), self.tiers
        removed = [(tier, kind, self.described[link][0]) for tier, kind, link in told - self.told]
        stored = [(tier, kind, *self.described[link]) for tier, kind, link in sorted(self.told - told)]
        return [*answers, KVTiersChanged(stored, removed, is_first)] if stored or removed or is_first else answers

    @property
    def tiers(self) -> set[tuple[int, int, bytes]]:
        """What there is to tell."""
        return {(self.tier(entry), entry.kind, entry.link) for entry in self.entries if entry.link in self.described}

    @property
    def has_events(self) -> bool:
        """Whether the core has asked to be told."""
        return any(isinstance(each, OpenKVStore) and each.has_events for each in self.received)

    def _answer(self, message: ToStore, core: int) -> list[FromStore]:
        self.received.append(message)
        opened: list[FromStore] = [KVStoreOpened(self.path, self.num_entries * SIZE)]
        if isinstance(message, OpenKVStore):
            self.opened.add(core)
            self.told = None
            return opened
        if core not in self.opened:
            return opened
        match message:
            case DescribeKV(links, numbers, blocks):
                self.described |= dict(zip(links, zip(numbers, blocks, strict=True), strict=True))
            case LookUpKV(call_id, links, counts_granted):
                coming = {*self.granted.values()} if counts_granted else set[KVEntry]()
                tiers = [
                    bytes(MEMORY if (e := KVEntry(link, kind)) in coming else self._tier(e) for link in links)
                    for kind in range(self.num_kinds)
                ]
                return [FoundKV(call_id, tiers)]
            case LoadKV(call_id, entries, parents, waits):
                assert len(parents) == len(entries) == len({*entries})
                assert call_id not in self.loading
                here = {number for number, each in enumerate(entries) if each in self.entries and not self.loses(each)}
                offsets = [self.entries[entries[number]] for number in sorted(here)]
                self.loading[call_id] = dict(zip(sorted(here), offsets, strict=True))
                failed = [number for number in range(len(entries)) if number not in here]
                writing = [*self.granted.values()]
                expected = {number: entries[number] for number in failed if waits or entries[number] in writing}
                self.expected[call_id] = expected
                failed = [number for number in failed if number not in expected]
                self.waiting |= {call_id} if waits else set()
                half = len(offsets) // 2
                return [
                    LoadedKV(call_id, sorted(here)[half:], offsets[half:], []),
                    LoadedKV(call_id, sorted(here)[:half], offsets[:half], failed),
                ]
            case SettleKV(call_id):
                expected, writing = self.expected.get(call_id, {}), [*self.granted.values()]
                failed = [number for number, each in expected.items() if each not in writing]
                self.waiting.discard(call_id)
                for number in failed:
                    del expected[number]
                return [LoadedKV(call_id, [], [], failed)]
            case ReleaseKV(call_id, []):
                del self.loading[call_id]
                self.expected.pop(call_id, None)
            case ReleaseKV(call_id, numbers):
                for number in numbers:  # may be overwritten from now on
                    del self.loading[call_id][number]
            case OfferKV(entries, parents):
                assert len(parents) == len(entries)
                wanted = dict.fromkeys(each for each in entries if each not in self.entries)
                granted = [each for each in wanted if each not in self.granted.values() and self._allocate(each)]
                places = {entry: offset for offset, entry in self.granted.items()}
                return [GrantedKV(granted, [places[each] for each in granted])]
            case StoredKV(offsets, abandoned, self.path):
                for offset in offsets:
                    entry = self.granted.pop(offset)
                    self.entries[entry] = offset
                    for call_id, expected in self.expected.items():
                        for number in [number for number, each in expected.items() if each == entry]:
                            del expected[number]
                            self.loading[call_id][number] = offset
                            self.came.append(LoadedKV(call_id, [number], [offset], []))
                self.abandon(abandoned)
        return []

    def abandon(self, offsets: Collection[int]) -> None:
        """Nothing will be written there: the core has said so, or has died."""
        for offset in offsets:
            entry = self.granted.pop(offset)
            for call_id, expected in self.expected.items():
                failed = [number for number, each in expected.items() if each == entry]
                for number in failed if call_id not in self.waiting else ():
                    del expected[number]
                    self.came.append(LoadedKV(call_id, [], [], [number]))

    def take_came(self, calls: Collection[int]) -> list[FromStore]:
        """Return what has come since for these calls."""
        mine = [each for each in self.came if each.call_id in calls]
        self.came = [each for each in self.came if each.call_id not in calls]
        return [*mine]

    def _tier(self, entry: KVEntry) -> int:
        return self.tier(entry) if entry in self.entries else NO_TIER

    def _allocate(self, entry: KVEntry) -> bool:
        read = {offset for offsets in self.loading.values() for offset in offsets.values()}
        used = {*self.granted, *self.entries.values()} | read
        offset = next((slot * SIZE for slot in range(self.num_entries) if slot * SIZE not in used), -1)
        if offset < 0:
            victim = next((each for each, at in self.entries.items() if at not in read), None)
            if victim is None:
                return False
            offset = self.entries.pop(victim)
        self.granted[offset] = entry
        return True


@dataclass
class FakeCopies:
    """The ranks' copies. They end when the test says so: until then the blocks of loads have arbitrary content."""

    model: FakeModel
    store: FakeStore
    kinds: Sequence[KVKind]
    num_ranks: int
    fails: Callable[[], bool] = lambda: False
    pending: list[tuple[KVCopy, Content | None, str]] = field(default_factory=list)
    """Copies, what they store, and the arena."""
    arenas: list[str] = field(default_factory=list)
    """Of the plans."""

    def begin(self, plan: KVCopyPlan) -> None:
        assert bool(plan.arena) == bool(plan.loads or plan.stores or plan.step_stores)
        self.arenas.append(plan.arena)
        for copy in plan.loads:
            self._write(copy, [([None] * self.model.block_size, -1)] * len(copy.blocks))
            self.pending.append((copy, None, plan.arena))
        self.pending += [(copy, self._read(copy), plan.arena) for copy in plan.stores]

    def begin_step(self, plan: KVCopyPlan, *, has_failed: bool) -> None:
        """Begin the copies of what a step has computed, unless it has failed."""
        for copy in plan.step_stores:
            self.pending.append((copy, [] if has_failed else self._read(copy), plan.arena))

    def end(self, number: int) -> list[KVCopied]:
        """End one of the pending copies; returns what the ranks answer."""
        copy, content, arena = self.pending.pop(number)
        failed = random.Random(copy.number).randrange(self.num_ranks) if self.fails() else -1
        if arena == self.store.path and failed < 0:
            if content is None:
                self._write(copy, self.store.contents[copy.offset])
            else:
                assert not content or self._read(copy) == content, "a plan has written what was being stored"
                self.store.contents[copy.offset] = content
        elif content is None:
            failed = 0
        return [KVCopied(rank, [copy.number], [copy.number] * (rank == failed)) for rank in range(self.num_ranks)]

    def _read(self, copy: KVCopy) -> Content:
        content: Content = []
        for block, group in zip(copy.blocks, self.kinds[copy.kind].groups, strict=True):
            is_state, page = self.model.groups[group].is_state, block // self.model.blocks_per_page
            content.append((list(self.model.kv[block]), self.model.states[page] if is_state else None))
            assert is_state or None not in self.model.kv[block], "a block is stored that is not full"
        return content

    def _write(self, copy: KVCopy, content: Content) -> None:
        model = self.model
        for block, group, (tokens, state) in zip(copy.blocks, self.kinds[copy.kind].groups, content, strict=True):
            page, size = block // model.blocks_per_page, model.blocks_per_page
            model.states.pop(page, None)
            if model.groups[group].is_state:
                assert state is not None
                model.states[page] = state
            if model.groups[group].is_state or model.groups[group].fills_pages:
                for other in range(page * size, page * size + size):
                    model.kv[other] = [None] * model.block_size
            if not model.groups[group].is_state:
                model.kv[block] = list(tokens)
