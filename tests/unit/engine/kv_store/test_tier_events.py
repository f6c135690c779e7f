"""What cores are told of tiers: all of it in the end, and a slice at a time."""

from __future__ import annotations

import random
from collections import deque

from quire.engine.kv_store.tier_events import _SLICE, TierEvents
from quire.engine.protocol.kv_store import DISK, MEMORY, DescribeKV, FromStore, KVEntry, KVTiersChanged

KINDS = 2


class Tiers:
    """Entries without bytes, and cores that are told of them."""

    def __init__(self) -> None:
        self.entries: set[tuple[int, bytes, int]] = set()
        self.changed_on_disk: deque[KVEntry] = deque()
        self.known: dict[bytes, set[tuple[int, int, int]]] = {}
        """By core: tier, kind and number."""
        self.hung: set[bytes] = set()
        self.sent = self.num_looks = 0
        self.events = TierEvents(KINDS, self.has_entry, self.has_block, self.send)

    def has_entry(self, *entry: int | bytes) -> bool:
        self.num_looks += 1
        return entry in self.entries

    def has_block(self, link: bytes) -> bool:
        self.num_looks += 1
        return any((tier, link, kind) in self.entries for tier in (MEMORY, DISK) for kind in range(KINDS))

    def send(self, client: bytes, message: FromStore) -> None:
        assert isinstance(message, KVTiersChanged)
        self.sent += message.number > 0
        if client not in self.hung:
            self.events.hear(int(client), message.number)
        known = self.known.setdefault(client, set())
        if message.is_first:
            known.clear()
        known.difference_update(message.removed)
        known.update((tier, kind, number) for tier, kind, number, _ in message.stored)

    def change(self, tier: int, link: int, kind: int = 0) -> None:
        """An entry comes, or leaves."""
        self.entries ^= {(tier, b"%d" % link, kind)}
        if tier == DISK:
            self.changed_on_disk.append(KVEntry(b"%d" % link, kind))
        else:
            self.events.note(tier, b"%d" % link, kind)

    def describe(self, *links: int) -> None:
        self.events.describe(DescribeKV([b"%d" % link for link in links], [*links], [b"block"] * len(links)))

    def tell(self) -> bool:
        """Tell a slice, which takes the same time however many entries there are."""
        before = self.num_looks
        has_more = self.events.tell(self.changed_on_disk)
        assert self.num_looks - before <= _SLICE * (2 + 2 * KINDS)
        return has_more

    def tell_all(self) -> int:
        """Returns the number of slices."""
        count = 1
        while self.tell():
            count += 1
        return count

    @property
    def announced(self) -> set[tuple[int, int, int]]:
        """What the cores should know."""
        return {(tier, kind, int(link)) for tier, link, kind in self.entries}


def test_a_core_that_opens_the_store_costs_no_more_with_many_entries() -> None:
    """Nor do several, and again and again."""
    tiers, count = Tiers(), 20 * _SLICE
    tiers.describe(*range(count))
    for link in range(count):
        tiers.change(MEMORY, link)
    assert tiers.tell_all() == 1, "nobody is to be told"
    before = tiers.num_looks
    for core in (0, 1, 0, 2):
        tiers.events.follow(core, b"%d" % core)
        tiers.tell()
    assert tiers.num_looks - before <= 4 * 2 * KINDS * _SLICE
    assert tiers.tell_all() <= 22
    assert [tiers.known[b"%d" % core] for core in range(3)] == [tiers.announced] * 3
    for link in range(count):
        tiers.change(MEMORY, link)
    assert tiers.tell_all() == 20, "all cores are told together"
    assert not any(tiers.known.values())
    for _ in range(2):
        tiers.events.begin_turn()
        tiers.tell_all()
    assert not tiers.events.num_described


def test_cores_that_begin_while_entries_change_know_what_there_is() -> None:
    tiers, rng = Tiers(), random.Random(1)
    for turn in range(60):
        tiers.describe(*rng.sample(range(1500), 100))
        for _ in range(150):
            link = rng.choice([*tiers.events._described])
            tiers.change(rng.choice((MEMORY, DISK)), int(link), rng.randrange(KINDS))
        if turn % 5 == 0 and turn < 50:
            tiers.events.follow(core := rng.randrange(3), b"%d" % core)
        if turn % 3 == 0:
            tiers.events.begin_turn()
        tiers.tell()
    for core in range(3):
        tiers.events.follow(core, b"%d" % core)
        tiers.tell()
    for _ in range(3):
        tiers.events.begin_turn()
        tiers.tell_all()
    assert tiers.announced
    assert [tiers.known[b"%d" % core] for core in range(3)] == [tiers.announced] * 3
    assert tiers.events.num_described == len({link for _, link, _ in tiers.entries})


def test_a_core_that_hangs_is_not_sent_more_and_more() -> None:
    """When it goes on, it is told from the beginning."""
    tiers, count = Tiers(), 20 * _SLICE
    tiers.events.follow(0, b"0")
    tiers.describe(*range(count))
    tiers.hung.add(b"0")
    for _ in range(20):
        for link in range(count):
            tiers.change(MEMORY, link)
        tiers.tell_all()
    assert tiers.sent == 128
    tiers.change(MEMORY, 7)
    tiers.hung.clear()
    tiers.events.hear(0, 20)
    assert (tiers.tell_all(), tiers.sent) == (1, 128), "there are still many"
    tiers.events.hear(0, 112)
    tiers.tell_all()
    assert tiers.known[b"0"] == tiers.announced == {(MEMORY, 0, 7)}


def test_a_block_that_comes_back_with_another_number_leaves_nothing_behind() -> None:
    """Its adapter has two names, by which its number is computed. Before its removal is told, it is forgotten."""
    tiers, others = Tiers(), range(100, 100 + 2 * _SLICE)
    tiers.events.follow(0, b"0")
    tiers.describe(*others, 1)
    tiers.change(MEMORY, 1)
    tiers.tell_all()
    for link in others:
        for kind in range(KINDS):
            tiers.change(MEMORY, link, kind)
    tiers.change(MEMORY, 1)
    for _ in range(2):
        tiers.events.begin_turn()
    for _ in range(3):
        tiers.tell()
    assert tiers.events.num_described == len(others)
    tiers.events.describe(DescribeKV([b"1"], [2], [b"block"]))
    tiers.change(MEMORY, 1)
    tiers.tell_all()
    assert {each for each in tiers.known[b"0"] if each[2] < 100} == {(MEMORY, 0, 2)}
