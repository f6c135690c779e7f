"""Which entries of the KV store are loaded for a request: those that come faster than they are computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.config.kv_layout import KVKind
from quire.engine.protocol.kv_store import DISK, MEMORY, NO_TIER, PEER, KVEntry
from quire.engine.scheduler.kv_cache_manager import FREED, KVCacheManager
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.token_budget import TokenBudget

_LOAD_SECONDS = 2.0
"""Minimum time after which a load is late."""
_FIRST_RATES = {MEMORY: (2 << 30), DISK: (256 << 20), PEER: (128 << 20)}
"""Bytes per second of a load, until some have been measured."""
_FIRST_BYTES = 64 << 20
"""Weight of the first rates."""
_FIRST_LATENCY = {MEMORY: 0.01, DISK: 0.02, PEER: 0.02}
"""Seconds that a load takes beside those for its bytes, until some have been measured."""
_RATE_DECAY = 0.8
"""Factor by which a measured load weighs less with each later one."""
_DOUBT = 0.97
"""Factor by which an expected duration shrinks each time that it is too long: a tier that was slow is tried again."""


class Rates:
    """How fast tiers are, from the durations of loads: a latency, learned from small loads, and a time for each byte,
    learned from large ones."""

    def __init__(self) -> None:
        self._latency = dict(_FIRST_LATENCY)
        """Seconds by tier."""
        self._sums = {tier: (float(_FIRST_BYTES), _FIRST_BYTES / rate) for tier, rate in _FIRST_RATES.items()}
        """By tier: bytes, and the seconds that they have taken beside the latency."""

    def seconds(self, work: Mapping[int, int]) -> float:
        """Return the expected duration of a load of so many bytes from each tier."""
        return sum(self._latency[tier] + self._transfer(tier, count) for tier, count in work.items())

    def _transfer(self, tier: int, count: int) -> float:
        """Seconds beside the latency."""
        total, spent = self._sums[tier]
        return count * spent / total

    def learn(self, work: Mapping[int, int], seconds: float) -> None:
        """Learn from a load; the slowest of its tiers has taken the time that was not expected of the others."""
        slowest = max(work)
        own = max(seconds / 8, seconds - self.seconds({tier: work[tier] for tier in work if tier != slowest}))
        latency, transfer = self._latency[slowest], self._transfer(slowest, work[slowest])
        if transfer < latency:
            own = max(0.0, own - transfer)
            self._latency[slowest] = _RATE_DECAY * latency + (1.0 - _RATE_DECAY) * own
        else:
            own = max(own / 8, own - latency)
            total, spent = self._sums[slowest]
            self._sums[slowest] = _RATE_DECAY * total + work[slowest], _RATE_DECAY * spent + own

    def doubt(self, work: Mapping[int, int]) -> None:
        """Expect a little less of tiers that were too slow for a load."""
        for tier in work:
            total, spent = self._sums[tier]
            self._latency[tier], self._sums[tier] = self._latency[tier] * _DOUBT, (total, spent * _DOUBT)


class Found(NamedTuple):
    """The answer to a look-up."""

    start: int
    """Number of the first link that was asked for."""
    tiers: Sequence[bytes]

    def tier(self, index: int, kind: int) -> int:
        """Where an entry is."""
        tiers, at = self.tiers[kind], index - self.start
        return tiers[at] if 0 <= at < len(tiers) else NO_TIER


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """A load of a prefix."""

    request: Request
    length: int
    """Blocks of each group in the prefix, if nothing fails."""
    num_cached: int
    """Blocks of each group that the prefix cache had."""
    entries: list[KVEntry]
    places: list[list[int]]
    """For each entry, the places of its blocks in `blocks`."""
    tiers: list[int]
    """Where each entry is."""
    work: Counter[int]
    """Bytes by tier."""
    limit: float
    """Seconds after which it is late: computing would have been much faster."""
    slowest_turn: float = 0.0
    """Seconds of the longest turn since it began: answers are processed, and copies begun, between steps."""
    call_id: int = 0
    arena: str = ""
    ahead: Counter[int] = field(default_factory=Counter)
    """Bytes that the loads before it still had to bring when it was chosen."""
    left: Counter[int] = field(default_factory=Counter)
    """Bytes by tier that have neither been copied nor failed."""
    num_pages: int = 0
    """Pages for all that it brings, and those that its request needs beside them until it starts."""
    blocks: list[int] = field(default_factory=list)
    """As `Request.block_ids`. Blocks that are being copied belong to the copies. Empty: they have been given up."""
    began: float = 0.0
    unanswered: set[int] = field(default_factory=set)
    """Numbers of the entries that the store has not brought."""
    num_copying: int = 0
    has_failed: bool = False
    """Something has not come, or not in time."""
    has_ended: bool = False
    is_released: bool = False
    """The store knows that nobody reads its entries any more."""
    waits: bool = False
    """Another replica computes and stores what it brings: it may take as long as that."""
    followers: list[Request] = field(default_factory=list)
    """Requests that wait for some of the same entries."""


class LoadChoice:
    """Chooses loads, by what earlier ones have taken and by predicted steps."""

    def __init__(self, kv: KVCacheManager, kinds: Sequence[KVKind], token_budget: TokenBudget, min_tokens: int) -> None:
        """Loads bring at least `min_tokens` tokens."""
        self.rates = Rates()
        self._kv, self._kinds, self._token_budget, self._min_tokens = kv, kinds, token_budget, min_tokens
        self._kind_of = {group: kind for kind, each in enumerate(kinds) for group in each.groups}

    def choose(self, request: Request, hashes: list[bytes], found: Found, ahead: Counter[int]) -> PrefixLoad | None:
        """Return the load that saves most time: from all tiers, or from the fastest ones. None: there is none. The
        loads before it still have to bring `ahead` bytes of each tier."""
        kv, stride, size = self._kv, self._kv.num_groups, self._kv.block_size
        num_cached, cached = len(kv.match(hashes)) // stride, {each for each in hashes if kv.cached_block(each) >= 0}
        tiers = [found.tier(place // stride, self._kind_of[place % stride]) for place in range(len(hashes))]
        best, most = None, 0.0
        for slowest in sorted({*tiers} & _FIRST_RATES.keys(), reverse=True):
            known = {each for each, tier in zip(hashes, tiers, strict=True) if NO_TIER < tier <= slowest}
            length = kv.prefix_length(hashes, known | cached)
            if (length - num_cached) * size < self._min_tokens:
                continue
            load = self._load_of(request, hashes, length, num_cached, tiers)
            seconds = self.rates.seconds(load.work + ahead)
            computed = self._token_budget.prompt_seconds(num_cached * size, length * size)
            if (gain := math.inf if computed is None else computed - seconds) > most:
                load.limit, load.ahead = _limit(seconds, computed), ahead
                best, most = load, gain
            elif gain <= 0.0:
                self.rates.doubt(load.work)
        return best

    def limit(self, load: PrefixLoad) -> float:
        """When the rest of a load is late: seconds from now."""
        kv, hashes = self._kv, load.request.hashes[: load.length * self._kv.num_groups]
        num_cached = kv.num_tokens_in(len(kv.match(hashes)))
        computed = self._token_budget.prompt_seconds(num_cached, load.length * kv.block_size)
        return _limit(self.rates.seconds(load.left), computed)

    def expected(self, request: Request, hashes: list[bytes]) -> PrefixLoad | None:
        """Return the load of the prompt that another replica computes, as it stores it. None: it is too short."""
        length, num_cached = len(hashes) // self._kv.num_groups, len(self._kv.match(hashes)) // self._kv.num_groups
        if (length - num_cached) * self._kv.block_size < self._min_tokens:
            return None
        load = self._load_of(request, hashes, length, num_cached, [MEMORY] * len(hashes))
        load.waits = True
        return load

    def _load_of(
        self, request: Request, hashes: list[bytes], length: int, num_cached: int, tiers: Sequence[int]
    ) -> PrefixLoad:
        """The load of what the prefix cache lacks of `length` blocks of each group, which is in these tiers."""
        kv, stride = self._kv, self._kv.num_groups
        entries, tiers_of, work = dict[KVEntry, list[int]](), list[int](), Counter[int]()
        for place in kv.visible_places(length):
            index, kind = place // stride, self._kind_of[place % stride]
            entry = KVEntry(hashes[index * stride], kind)
            if kv.cached_block(hashes[place]) == FREED and entry not in entries:
                entries[entry] = [index * stride + group for group in self._kinds[kind].groups]
                tiers_of.append(tiers[place])
                work[tiers[place]] += self._kinds[kind].size
        return PrefixLoad(
            request, length, num_cached, [*entries], [*entries.values()], tiers_of, work, limit=_LOAD_SECONDS
        )


def _limit(seconds: float, computed: float | None) -> float:
    """When a load is late that should take so many seconds, in place of a computation that would; None: unknown."""
    return max(_LOAD_SECONDS, 4 * seconds if computed is None else 2 * computed)
