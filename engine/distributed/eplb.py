"""Which rank has which experts, so that the busiest rank has as little to do as may be. Pure; no torch.

As in DeepSeek's EPLB (github.com/deepseek-ai/EPLB), copies go to the experts with the most work for each of their
copies, and then ranks are evened out. Ours starts from what the ranks have, since moving an expert costs too: a place
changes hands only where that takes work off the busiest rank. All ranks that are told the same load come to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Table = tuple[tuple[int, ...], ...]
"""The experts of each rank, as `ExpertPlacement.experts`: by their numbers in the model, place by place."""

MAX_IMBALANCE = 0.05
"""So much more than the mean, as a share of it, a rank may have to do."""
MIN_GAIN = 0.02
"""What a new placement takes off the busiest rank at least, or nothing moves."""


def rank_loads(load: Sequence[float], placement: Sequence[Sequence[int]]) -> list[float]:
    """What each rank has to do, if an expert's `load` is shared evenly by its copies."""
    counts = _count(len(load), placement)
    return [sum(load[expert] / counts[expert] for expert in experts) for experts in placement]


def rebalance(load: Sequence[float], now: Table) -> Table:
    """The placement for experts of such a `load`; `now` where no other is clearly better."""
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
    """How many copies each expert is to have, no more than there are ranks."""
    counts = [1] * len(load)
    for _ in range(sum(map(len, now)) - len(load)):
        more = [expert for expert, count in enumerate(counts) if count < len(now)]
        counts[max(more, key=lambda expert: (load[expert] / counts[expert], -expert))] += 1
    return counts


class _Draft:
    """A placement that is made better, a place at a time. Of choices that are equal the first is taken."""

    def __init__(self, load: Sequence[float], now: Table) -> None:
        self.placement = [list(experts) for experts in now]
        self._load = load
        self._counts = _count(len(load), now)

    def assign_copies(self, targets: Sequence[int]) -> None:
        """Give places of experts that have more copies than wanted to those that have fewer, where that can be."""
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
        """Let the busiest rank change an expert for another's, as long as it has too much and that helps."""
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
    """Where an expert lies: a place of a rank, or beside them (`place` None), where there is room for one."""

    rank: int
    place: int | None


@dataclass(frozen=True)
class ExpertMove:
    """An expert is copied from one spot to another, which is overwritten."""

    source: ExpertSlot
    target: ExpertSlot


def moves(now: Table, then: Table) -> list[ExpertMove]:
    """What makes `then` of `now`, one after the other.

    Nothing is overwritten before all that need it have it. Where places change their experts in a ring, one of them is
    laid beside first; no rank has more than one beside it at a time.
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
        """Then what it came from may be filled, if nobody else needs it."""
        while True:
            source = sources.pop(target)
            ordered.append(ExpertMove(source, target))
            readers[source].remove(target)
            if readers[source] or source not in sources:
                return
            target = source

    for target in [target for target in sources if not readers.get(target)]:
        fill(target)
    while sources:  # rings only: each spot has one reader
        first = next(iter(sources))
        (reader,) = readers.pop(first)
        spare = ExpertSlot(first.rank, None)
        ordered.append(ExpertMove(first, spare))
        sources[reader], readers[spare], readers[first] = spare, [reader], []
        fill(first)
    return ordered


def rounds(steps: Sequence[ExpertMove]) -> list[list[ExpertMove]]:
    """The same moves, as many at once as can be: in a round each rank sends one expert and receives one at most.

    What is laid beside goes first in its round; then all are read, and only then are places overwritten.
    """
    result: list[list[ExpertMove]] = []
    senders, receivers = set[int](), set[int]()
    written, read = set[ExpertSlot](), set[ExpertSlot]()
    for move in steps:
        source, target = move.source, move.target
        fills_spare = target.place is None
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
