from __future__ import annotations

import math
import random

from quire.engine.kv_store.index import Entry, EntryState, Index
from tests.fakes.kv_store import chain, parents


def add(index: Index, links: list[bytes], kind: int = 0) -> None:
    index.advance()
    for link, parent in parents(links).items():
        if index.get(link, kind) is None:
            index.add(Entry(link, kind, EntryState.READY), parent)


def evictions(index: Index, count: int) -> list[tuple[bytes, int]]:
    found = list[tuple[bytes, int]]()
    while len(found) < count and (evicted := index.evict(b"")):
        index.check_integrity()
        found += [entry.key for entry in evicted]
    return found


def test_chains_are_forgotten_from_their_ends_and_what_they_share_last() -> None:
    index = Index([False])
    old, new, other = chain(1, 2, 3, 4), chain(1, 2, 5, 6), chain(7, 8)
    for links in (old, other, new):
        for length in range(1, len(links) + 1):  # block after block, as they are computed
            add(index, links[:length])
    # `other` is older than `new`, and the shared blocks are as new as that.
    expected = [*reversed(old[2:]), *reversed(other), *reversed(new)]
    assert evictions(index, 99) == [(link, 0) for link in expected]
    assert not index.num_entries


def test_a_look_up_makes_a_chain_young() -> None:
    index = Index([False])
    first, second = chain(1, 2), chain(3, 4)
    add(index, first)
    add(index, second)
    index.advance()
    for link in first:
        index.touch(link)
    assert evictions(index, 2) == [(link, 0) for link in reversed(second)]


def test_a_chain_whose_end_was_damaged_is_as_young_as_that_end() -> None:
    index = Index([False])
    links, other = chain(1, 2), chain(3)
    add(index, links[:1])
    add(index, other)
    add(index, links)
    end = index.get(links[1], 0)
    assert end is not None
    index.remove(end)
    assert evictions(index, 2) == [(other[0], 0), (links[0], 0)]


def test_what_is_deep_in_a_chain_stays_longer() -> None:
    """By a turnover of the memory, of ten blocks, for each four before it; then the chain goes as a whole."""
    index = Index([False], shares=[0.1], doubling=4)
    deep, others = chain(*range(8)), [chain(number) for number in range(100, 120)]
    add(index, deep)
    for link in others:
        add(index, link)
    # Its end has 7 blocks before it, and goes after what came up to 17.5 blocks later.
    order = [link for link, _ in evictions(index, 99)]
    assert order[17:25] == [*reversed(deep)]


def test_less_is_computed_again_if_what_is_costly_stays() -> None:
    """The work of what is computed again, against forgetting by age alone: conversations begin one after another, most
    of them short, and each grows with every turn, after a random time."""

    def recomputed(doubling: float, seed: int) -> float:
        choose, room, work = random.Random(seed), 2000, 0.0
        index = Index([False], shares=[1 / room], doubling=doubling)
        turns = list[tuple[float, int, int]]()  # time, conversation, blocks
        for number in range(150):
            at, length = float(number), int(min(400.0, choose.lognormvariate(3.0, 1.2))) + 4
            for _ in range(choose.randrange(3, 9)):
                turns.append((at, number, length))
                at, length = at + choose.expovariate(1 / 30), length + choose.randrange(4, length // 4 + 6)
        for _, number, length in sorted(turns):
            links, found = [b"%d %d" % (number, block) for block in range(length)], 0
            index.advance()
            while found < length and index.get(links[found], 0) is not None:
                index.touch(links[found])
                found += 1
            for block in range(found, length):
                work += 1 + block / 50
                index.add(Entry(links[block], 0, EntryState.READY), links[block - 1] if block else b"")
                while index.num_entries > room:
                    assert index.evict(links[block])
        return work

    assert recomputed(50, 0) < 0.9 * recomputed(math.inf, 0)


def test_what_is_in_use_stays() -> None:
    index = Index([False])
    links = chain(1, 2, 3)
    add(index, links)
    end, middle = index.get(links[2], 0), index.get(links[1], 0)
    assert end is not None
    assert middle is not None
    end.pins = 1
    assert evictions(index, 1) == []
    end.pins = 0
    assert index.evict(links[2]) == [], "a block is forgotten for one of its own entries"
    assert evictions(index, 1) == [(links[2], 0)]


def test_states_are_forgotten_by_their_own_age() -> None:
    """One that has not been loaded for long is worth less than the end of a chain that is used; the last one of a chain
    stays as long as its block."""
    index = Index([False, True])
    links, other = chain(1, 2, 3), chain(4, 5)
    for length in (1, 2, 3):
        add(index, links[:length])
        add(index, links[:length], kind=1)
    add(index, other)
    index.advance()
    loaded = index.get(links[0], 1)
    assert loaded is not None
    index.use(loaded)
    assert evictions(index, 3) == [(links[1], 1), (links[2], 0), (links[2], 1)]


def test_links_in_any_order() -> None:
    """A block may come before the one that it follows, as when it is read from disk; and its chain may not be known."""
    index = Index([False])
    links = chain(1, 2, 3)
    for link in reversed(links):
        index.advance()
        index.add(Entry(link, 0, EntryState.READY), parents(links)[link])
        index.check_integrity()
    index.advance()
    index.add(Entry(b"alone", 0, EntryState.READY), b"")
    assert evictions(index, 99) == [(links[2], 0), (links[1], 0), (links[0], 0), (b"alone", 0)]
