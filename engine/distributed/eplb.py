"""Expert load balancing: computes the placement that reduces the busiest rank's load. Pure functions; no torch.

As in DeepSeek's EPLB (github.com/deepseek-ai/EPLB), copies go to the experts with the most load per copy, and then the
ranks are balanced. Unlike it, this starts from the current placement, since moving experts has a cost: a place changes
only if that reduces the busiest rank's load. The result depends only on the load, so that all ranks compute the same
placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Table = tuple[tuple[int, ...], ...]
"""The experts of each rank, as in `ExpertPlacement.experts`: numbers in the model, by place."""

MAX_IMBALANCE = 0.05
"""How far a rank's load may exceed the mean, as a fraction of the mean."""
MIN_GAIN = 0.02
"""Minimum reduction of the busiest rank's load, as a fraction; otherwise nothing moves."""


def rank_loads(load: Sequence[float], placement: Sequence[Sequence[int]]) -> list[float]:
    """The load of each rank, if an expert's `load` is divided evenly among its copies."""
    counts = _count(len(load), placement)
    return [sum(load[expert] / counts[expert] for expert in experts) for experts in placement]


def rebalance(load: Sequence[float], now: Table) -> Table:
    """The placement for experts with this `load`; `now` if no other is clearly better."""
    draft = _Draft(load, now)
    draft.assign_copies(_target_copies(load, now))
    draft.balance()
    before, after = (max(rank_loads(load, placement)) for placement in (now, draft.placement))
    return tuple(map(tuple, draft.placement)) if before - after > MIN_GAIN * before else now


def _count(num_experts: int, placement: Sequence[Sequence[int]]) -> list[int]:
    counts = [0] * num_experts
    for experts in placement:
        for expert in experts:
            counts[expert] += 1
    return counts


def _target_copies(load: Sequence[float], now: Table) -> list[int]:
    """The number of copies for each expert, at most the number of ranks."""
    counts = [1] * len(load)
    for _ in range(sum(map(len, now)) - len(load)):
        more = [expert for expert, count in enumerate(counts) if count < len(now)]
        counts[max(more, key=lambda expert: (load[expert] / counts[expert], -expert))] += 1
    return counts


class _Draft:
    """A placement that is improved place by place. Ties are resolved in favour of the first choice."""

    def __init__(self, load: Sequence[float], now: Table) -> None:
        self.placement = [list(experts) for experts in now]
        self._load = load
        self._counts = _count(len(load), now)

    def assign_copies(self, targets: Sequence[int]) -> None:
        """Replace experts that have more copies than their target with experts that have fewer, where possible."""
        for expert in sorted(range(len(targets)), key=lambda expert: (-self._load[expert] / targets[expert], expert)):
            while self._counts[expert] < targets[expert]:
                done = rank_loads(self._load, self.placement)
                slots = [
                    (done[rank] - self._load[other] / self._counts[other], rank, place)
                    for rank, experts in enumerate(self.placement)
                    if expert not in experts
                    for place, other in enumerate(experts)
                    if self._counts[other] > targets[other]
                ]
                if not slots:
                    break
                _, rank, place = min(slots)
                self._counts[self.placement[rank][place]] -= 1
                self._counts[expert] += 1
                self.placement[rank][place] = expert

    def balance(self) -> None:
        """Swap experts between the busiest rank and other ranks, as long as its load is too high and a swap reduces
        it."""
        each = [share / count for share, count in zip(self._load, self._counts, strict=True)]
        done = rank_loads(self._load, self.placement)
        mean = sum(done) / len(done)
        enough, least = (1 + MAX_IMBALANCE) * mean, 1e-6 * mean
        while (most := max(done)) > enough:
            busiest = done.index(most)
            own = self.placement[busiest]
            swaps = [
                (max(most - less, done[rank] + less), rank, place, slot, less)
                for rank, other_experts in enumerate(self.placement)
                for slot, other in enumerate(other_experts)
                if other not in own
                for place, expert in enumerate(own)
                if (less := each[expert] - each[other]) > least and done[rank] + less < most - least
                if expert not in other_experts
            ]
            if not swaps:
                return
            _, rank, place, slot, less = min(swaps)
            own[place], self.placement[rank][slot] = self.placement[rank][slot], own[place]
            done[busiest] -= less
            done[rank] += less


@dataclass(frozen=True)
class ExpertSlot:
    """The location of an expert: a place of a rank, or the rank's spare slot (`place` None), which has room for one."""

    rank: int
    index: int | None


@dataclass(frozen=True)
class ExpertMove:
    """Copy an expert from one slot to another, which is overwritten."""

    source: ExpertSlot
    target: ExpertSlot


def moves(now: Table, then: Table) -> list[ExpertMove]:
    """The sequence of moves that changes `now` to `then`.

    No expert is overwritten before it has been copied to all its targets. A cycle of places is broken by copying one
    expert to the spare slot first; no rank uses more than one spare slot at a time.
    """
    slots: dict[int, list[ExpertSlot]] = {}
    for rank, experts in enumerate(now):
        for place, expert in enumerate(experts):
            slots.setdefault(expert, []).append(ExpertSlot(rank, place))
    sources: dict[ExpertSlot, ExpertSlot] = {}
    readers: dict[ExpertSlot, list[ExpertSlot]] = {}
    for rank, experts in enumerate(then):
        for place, expert in enumerate(experts):
            if now[rank][place] != expert:
                target, holders = ExpertSlot(rank, place), slots[expert]
                source = min(holders, key=lambda slot: (len(readers.get(slot, ())), slot.rank))
                sources[target] = source
                readers.setdefault(source, []).append(target)
    ordered: list[ExpertMove] = []

    def fill(target: ExpertSlot) -> None:
        """Fill the target. Then its source may be filled in turn, if no other move reads it."""
        while True:
            source = sources.pop(target)
            ordered.append(ExpertMove(source, target))
            readers[source].remove(target)
            if readers[source] or source not in sources:
                return
            target = source

    for target in [target for target in sources if not readers.get(target)]:
        fill(target)
    while sources:  # only cycles are left: each slot has one reader
        first = next(iter(sources))
        (reader,) = readers.pop(first)
        spare = ExpertSlot(first.rank, None)
        ordered.append(ExpertMove(first, spare))
        sources[reader], readers[spare], readers[first] = spare, [reader], []
        fill(first)
    return ordered


def rounds(steps: Sequence[ExpertMove]) -> list[list[ExpertMove]]:
    """Group the moves into rounds, as few as possible: in a round each rank sends and receives at most one expert.

    In each round, moves to a spare slot come first. Then all sources are read before any place is overwritten.
    """
    result: list[list[ExpertMove]] = []
    senders, receivers = set[int](), set[int]()
    written, read = set[ExpertSlot](), set[ExpertSlot]()
    for move in steps:
        source, target = move.source, move.target
        fills_spare = target.index is None
        is_taken = target in read if fills_spare else source.rank in senders or target.rank in receivers
        if not result or source in written or is_taken:
            result.append([])
            senders, receivers, written, read = set(), set(), set(), set()
        result[-1].append(move)
        if not fills_spare:
            senders.add(source.rank)
            receivers.add(target.rank)
            written.add(target)
            read.add(source)
    return result
