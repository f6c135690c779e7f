"""Placements of experts: even, legal, steady, and reached by moves that lose nothing."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.distributed.eplb import (
    MAX_IMBALANCE,
    MIN_GAIN,
    ExpertMove,
    ExpertSlot,
    Table,
    moves,
    rank_loads,
    rebalance,
    rounds,
)


def imbalance(loads: list[float]) -> float:
    """The busiest rank's share over the mean: 1 is even, and the number of ranks is the worst."""
    return max(loads) * len(loads) / sum(loads)


def placed(ranks: int, each: int, num_experts: int, rng: random.Random) -> Table:
    """Any placement of all experts, copies included."""
    places: list[list[int]] = [[] for _ in range(ranks)]
    copies = [*range(num_experts)]
    rng.shuffle(copies)
    for expert in copies:
        min(places, key=len).append(expert)
    for experts in places:
        others = [expert for expert in range(num_experts) if expert not in experts]
        experts += rng.sample(others, each - len(experts))
    return tuple(map(tuple, places))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Table]:
    ranks, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    least = -(-num_experts // ranks)
    each = draw(st.integers(least, min(least + 3, num_experts)))
    load = draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    return load, placed(ranks, each, num_experts, random.Random(draw(st.integers(0, 99))))


def is_legal(locations: Table, now: Table, num_experts: int) -> bool:
    return (
        {len(experts) for experts in locations} == {len(now[0])}
        and len(locations) == len(now)
        and all(len(set(experts)) == len(experts) for experts in locations)
        and set(itertools.chain(*locations)) == set(range(num_experts))
    )


@given(cases())
def test_every_expert_has_a_place_and_no_rank_has_more_to_do_than_before(case: tuple[list[int], Table]) -> None:
    load, now = case
    then = rebalance(load, now)
    assert is_legal(then, now, len(load))
    before, after = (max(rank_loads(load, locations)) for locations in (now, then))
    assert then == now or after < (1 - MIN_GAIN) * before
    assert rebalance(load, now) == then
    assert sum(rank_loads(load, then)) == pytest.approx(sum(load))


@given(cases(), st.integers(0, 99))
def test_moves_make_one_placement_of_the_other(case: tuple[list[int], Table], seed: int) -> None:
    """Step by step on the ranks' experts, with room for one expert beside their places."""
    load, now = case
    rng = random.Random(seed)
    for then in (rebalance(load, now), placed(len(now), len(now[0]), len(load), rng)):
        locations = {
            ExpertSlot(rank, place): expert for rank, row in enumerate(now) for place, expert in enumerate(row)
        }
        steps = moves(now, then)
        for step in steps:
            locations[step.target] = locations[step.source]
        for rank, row in enumerate(then):
            assert [locations[ExpertSlot(rank, place)] for place in range(len(row))] == list(row)
        changed = sum(a != b for was, is_ in zip(now, then, strict=True) for a, b in zip(was, is_, strict=True))
        assert changed <= len(steps) <= changed + changed // 2  # a ring of two needs three
        assert all(step.source != step.target for step in steps)
        locations = {
            ExpertSlot(rank, place): expert for rank, row in enumerate(now) for place, expert in enumerate(row)
        }
        for some in rounds(steps):
            run_round(some, locations)
        for rank, row in enumerate(then):
            assert [locations[ExpertSlot(rank, place)] for place in range(len(row))] == list(row)
        assert list(itertools.chain(*rounds(steps))) == steps


def run_round(some: list[ExpertMove], locations: dict[ExpertSlot, int]) -> None:
    """As ranks do it: lay beside, read all, write all."""
    laid, sent = ([move for move in some if (move.target.index is None) == beside] for beside in (True, False))
    locations.update({move.target: locations[move.source] for move in laid})
    locations.update({move.target: locations[move.source] for move in sent})
    for ranks in ([move.source.rank for move in sent], [move.target.rank for move in sent]):
        assert len(set(ranks)) == len(ranks)


def test_ranks_that_change_experts_do_so_at_once() -> None:
    steps = moves(((0, 1), (2, 3)), ((0, 2), (1, 3)))
    assert len(steps) == 3
    assert len(rounds(steps)) == 1
    assert len(rounds(moves(((0, 1), (2, 3)), ((3, 2), (1, 0))))) == 2


def test_nothing_moves_where_it_would_bring_little() -> None:
    now: Table = ((0, 1), (2, 3))
    assert rebalance([10, 10, 10, 10], now) is now
    assert rebalance([0, 0, 0, 0], now) is now
    assert rebalance([100, 30, 2, 1], now) is not now  # 1 goes, 2 comes
    assert rebalance([51, 49, 49, 51], now) is now
    assert rebalance([1000, 11, 10, 9], now) is now  # the busy one cannot be shared
    assert moves(now, now) == []


def test_few_move_when_one_becomes_busy() -> None:
    now: Table = tuple(tuple(range(8 * rank, 8 * rank + 8)) for rank in range(4))
    load = [5.0 + 10.0 * (expert % 2) for expert in range(32)]
    load[5] = 50.0
    then = rebalance(load, now)
    assert imbalance(rank_loads(load, now)) > 1.25
    assert imbalance(rank_loads(load, then)) < 1.15
    assert sum(len(set(new) - set(old)) for old, new in zip(now, then, strict=True)) <= 6


def test_a_copy_goes_to_the_busiest() -> None:
    now: Table = ((0, 1, 2), (3, 4, 0))
    load = [10, 10, 10, 70, 10]
    then = rebalance(load, now)
    assert [3 in experts for experts in then] == [True, True]
    assert imbalance(rank_loads(load, then)) < 1.2


@pytest.mark.parametrize(("num_experts", "ranks", "copies"), [(64, 4, 0), (64, 8, 8), (128, 8, 8), (160, 16, 16)])
def test_a_skewed_load_becomes_even(num_experts: int, ranks: int, copies: int) -> None:
    rng = random.Random(7)
    load = [1e6 / (i + 1) ** 0.7 for i in range(num_experts)]
    rng.shuffle(load)
    now = placed(ranks, (num_experts + copies) // ranks, num_experts, rng)
    then = rebalance(load, now)
    assert is_legal(then, now, num_experts)
    assert imbalance(rank_loads(load, then)) < 1 + 2 * MAX_IMBALANCE < imbalance(rank_loads(load, now))
    # The next loads are much the same: few experts move, as moves gain little.
    later = [share * rng.uniform(0.95, 1.05) for share in load]
    again = rebalance(later, then)
    assert len(moves(then, again)) <= len(moves(now, then)) / 2


def test_few_ranks_are_as_even_as_the_best_of_all_placements() -> None:
    rng = random.Random(3)
    for _ in range(20):
        load = [rng.randint(1, 100) for _ in range(8)]
        now: Table = ((0, 1, 2, 3), (4, 5, 6, 7))
        best = min(
            max(sum(load[i] for i in half), sum(load) - sum(load[i] for i in half))
            for half in itertools.combinations(range(8), 4)
        )
        assert max(rank_loads(load, rebalance(load, now))) <= (1 + 2 * MAX_IMBALANCE) * best
