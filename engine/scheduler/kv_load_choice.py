"""Chooses the entries to load for a request from the KV store: those that load faster than they compute.

If a load takes about as long as computing, the request does both: it computes the prefix from its beginning while the
store brings it from its end, until they meet. If both are equally fast, that takes half the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
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
"""Seconds that a load takes in addition to the time for its bytes, until some have been measured."""
_RATE_DECAY = 0.8
"""Factor by which each later measurement reduces the weight of a load."""
_DOUBT = 0.97
"""Factor by which the expected duration shrinks each time that a tier is passed over as too slow, so that it is tried
again at some time."""
_CLEARLY = 0.9
"""A request computes beside its load only if that is expected to take at most this part of the time of either alone,
because it costs other requests as much as any prompt."""


class Rates:
    """How fast tiers are, learned from the durations of loads: the latency from small loads, and the time per byte from
    large ones."""

    def __init__(self) -> None:
        self._latency = dict(_FIRST_LATENCY)
        """Seconds by tier."""
        self._sums = {tier: (float(_FIRST_BYTES), _FIRST_BYTES / rate) for tier, rate in _FIRST_RATES.items()}
        """By tier: bytes, and the seconds that they have taken in addition to the latency."""

    def seconds(self, work: Mapping[int, int]) -> float:
        """Return the expected seconds of a load, given its bytes by tier."""
        return sum(self._latency[tier] + self._transfer(tier, count) for tier, count in work.items())

    def _transfer(self, tier: int, count: int) -> float:
        """Seconds in addition to the latency."""
        total, spent = self._sums[tier]
        return count * spent / total

    def learn(self, work: Mapping[int, int], seconds: float) -> None:
        """Learn from a load. The time that is not explained by its faster tiers is attributed to the slowest one."""
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
        """Expect a little less time of tiers that were passed over as too slow."""
        for tier in work:
            total, spent = self._sums[tier]
            self._latency[tier], self._sums[tier] = self._latency[tier] * _DOUBT, (total, spent * _DOUBT)


class Found(NamedTuple):
    """The answer to a look-up."""

    start: int
    """Number of the first link in the question."""
    tiers: Sequence[bytes]

    def of_kind(self, kind: int, length: int) -> bytes:
        """Return the tier of this kind's entry for each of the first `length` links."""
        unknown = bytes([NO_TIER])
        return (unknown * self.start + self.tiers[kind]).ljust(length, unknown)[:length]


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """A load of a prefix."""

    request: Request
    length: int
    """Blocks of each group in the prefix, if nothing fails."""
    num_cached: int
    """Blocks of each group that the prefix cache had."""
    limit: float
    """Seconds after which it is late: by then, computing would have been much faster."""
    entries: list[KVEntry] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    """For each entry, the indexes of its blocks in `blocks`."""
    tiers: list[int] = field(default_factory=list)
    """The tier of each entry."""
    work: Counter[int] = field(default_factory=Counter)
    """Bytes by tier."""
    slowest_turn: float = 0.0
    """Seconds of the longest turn since it began: answers are processed, and copies begun, between steps."""
    call_id: int = 0
    arena: str = ""
    ahead: Counter[int] = field(default_factory=Counter)
    """Bytes by tier that earlier loads still had to bring when it was chosen."""
    left: Counter[int] = field(default_factory=Counter)
    """Bytes by tier that have neither been copied yet nor failed."""
    num_pages: int = 0
    """Pages of everything that it brings, and the further pages that its request needs to start."""
    blocks: list[int] = field(default_factory=list)
    """In the order of `Request.block_ids`. Blocks that are being copied belong to the copies. Empty: it gave them
    up."""
    began: float = 0.0
    unanswered: set[int] = field(default_factory=set)
    """Numbers of the entries that the store has not brought."""
    num_copying: int = 0
    has_failed: bool = False
    """Something did not arrive, or not in time."""
    has_ended: bool = False
    is_released: bool = False
    """The store has been told that nobody reads its entries any more."""
    waits: bool = False
    """Another replica is still computing and storing its entries, so it may take as long as that."""
    is_awaited: bool = False
    """Its running request gets no rows until ranks have copied what has arrived."""
    is_beside: bool = False
    """Its request meanwhile computes the prefix from its beginning. Its entries are in the order of their use: from the
    end, but first those that the prefix cache might not keep when they are computed."""
    num_come: int = 0
    """With `is_beside`: how many of its first entries are in the prefix cache."""
    num_brought: int = 0
    """How many of its first entries the store has answered."""
    followers: list[Request] = field(default_factory=list)
    """Requests that wait for some of its entries."""


class LoadChoice:
    """Chooses loads by comparing their expected duration with the predicted time of computing."""

    def __init__(self, kv: KVCacheManager, kinds: Sequence[KVKind], token_budget: TokenBudget, min_tokens: int) -> None:
        """Loads bring at least `min_tokens` tokens."""
        self.rates = Rates()
        self._kv, self._kinds, self._token_budget, self._min_tokens = kv, kinds, token_budget, min_tokens
        self._kind_of = {group: kind for kind, each in enumerate(kinds) for group in each.groups}

    def choose(
        self,
        request: Request,
        hashes: list[bytes],
        found: Found,
        ahead: Counter[int],
        busy: float,
        *,
        may_compute: bool,
    ) -> PrefixLoad | None:
        """Return the load that saves the most time, from all tiers or only from the fastest ones; None if no load saves
        time. Earlier loads still have to bring `ahead` bytes by tier, and running prompts take `busy` seconds.
        `may_compute`: the request may compute beside its load."""
        kv, stride, size = self._kv, self._kv.num_groups, self._kv.block_size
        num_cached, cached = len(kv.match(hashes)) // stride, {each for each in hashes if kv.cached_block(each) >= 0}
        tiers = [NO_TIER] * len(hashes)
        for group, kind in self._kind_of.items():
            tiers[group::stride] = found.of_kind(kind, len(hashes) // stride)
        best, most = None, 0.0
        for slowest in sorted({*tiers} & _FIRST_RATES.keys(), reverse=True):
            known = {each for each, tier in zip(hashes, tiers, strict=True) if NO_TIER < tier <= slowest}
            length = kv.prefix_length(hashes, known | cached)
            if (length - num_cached) * size < self._min_tokens:
                continue
            load = self._load_of(request, hashes, length, num_cached, tiers)
            seconds = self.rates.seconds(load.work + ahead)
            computed = self._token_budget.prompt_seconds(num_cached * size, length * size)
            load.limit, load.ahead = _limit(seconds, None if computed is None else busy + computed), ahead
            if computed is not None and may_compute:
                met, num_computed = self._meeting(load, ahead, busy)
                is_divided = self._min_tokens <= num_computed <= (length - num_cached) * size - self._min_tokens
                if is_divided and met < _CLEARLY * min(seconds, busy + computed):
                    load.is_beside, seconds = True, met
            if (gain := math.inf if computed is None else busy + computed - seconds) > most:
                best, most = load, gain
            elif gain <= 0.0:
                self.rates.doubt(load.work)
        if best is not None and best.is_beside:
            order = self._from_end(best)
            best.entries, best.places, best.tiers = (
                [best.entries[at] for at in order],
                [best.places[at] for at in order],
                [best.tiers[at] for at in order],
            )
        return best

    def _from_end(self, load: PrefixLoad) -> list[int]:
        """Indexes of the entries in the order that `PrefixLoad.is_beside` describes."""
        stride, scarce = self._kv.num_groups, self._kv.scarce
        order = range(len(load.places) - 1, -1, -1)
        return sorted(order, key=lambda at: load.places[at][0] % stride not in scarce) if scarce else [*order]

    def _meeting(self, load: PrefixLoad, ahead: Counter[int], busy: float) -> tuple[float, int]:
        """Return after how many seconds a request that computes beside a load is expected to meet it, and how many
        tokens it will have computed by then. Computing begins after `busy` seconds, and the load after `ahead`
        bytes."""
        kv, start, order = self._kv, load.num_cached * self._kv.block_size, self._from_end(load)
        sizes = [self._kinds[load.entries[at].kind].size for at in order]
        sums = {
            tier: [0, *accumulate(size * (load.tiers[at] == tier) for at, size in zip(order, sizes, strict=True))]
            for tier in load.work
        }

        def loaded(count: int) -> float:
            """Seconds to load the first entries."""
            return self.rates.seconds(Counter({tier: each[count] for tier, each in sums.items()}) + ahead)

        def end(count: int) -> int:
            """The token up to which the request computes if the first entries are loaded."""
            place = load.places[order[count]][0] if count < len(order) else load.num_cached * kv.num_groups - 1
            return (place // kv.num_groups + 1) * kv.block_size

        def computed(count: int) -> float:
            return busy + (self._token_budget.prompt_seconds(start, end(count)) or 0.0)

        first = sum(own[0] % kv.num_groups in kv.scarce for own in load.places)
        counts = range(first, len(order))
        count = first + bisect_left(counts, True, key=lambda each: loaded(each) >= computed(each))
        return max(loaded(count), computed(count)), end(count) - start

    def has_met(self, load: PrefixLoad) -> bool:
        """Whether a request has computed all of the prefix that its load has not brought."""
        kv, hashes = self._kv, load.request.hashes
        num_computed = load.request.num_computed_tokens // kv.block_size
        while load.num_come < len(load.places):
            own = load.places[load.num_come]
            index, group = divmod(own[0], kv.num_groups)
            if index < num_computed and group not in kv.scarce:
                return True
            if any(kv.cached_block(hashes[place]) == FREED for place in own):
                return False
            load.num_come += 1
        return True

    def row_tokens(self, load: PrefixLoad) -> int:
        """Return the maximum tokens of a request's next row beside its load: up to where they are expected to meet, so
        that little is both computed and loaded."""
        return max(self._min_tokens, self._meets_at(load) - load.request.num_computed_tokens)

    def _meets_at(self, load: PrefixLoad) -> int:
        """The tokens that a request will have computed when it meets its load."""
        start = self._num_computed(load)
        if (missing := self._num_missing(load)) <= 0:
            return start
        computed = self._token_budget.prompt_seconds(start, start + missing) or 0.0
        loaded = self.rates.seconds(load.work) * missing / self._kv.block_size / (load.length - load.num_cached)
        return start + int(missing * loaded / (computed + loaded))

    def _num_computed(self, load: PrefixLoad) -> int:
        """Tokens that need not be computed again, also while the request is still queued."""
        return max(load.request.num_computed_tokens, load.num_cached * self._kv.block_size)

    def length_without(self, load: PrefixLoad, lost: Collection[int]) -> int:
        """Return the length, in blocks of each group, of the prefix that a request and its load can still produce
        without the `lost` entries. Entries that the request is expected to compute itself do not matter."""
        stride, met = self._kv.num_groups, self._meets_at(load) // self._kv.block_size
        indices = (load.places[number][0] // stride for number in lost)
        return min((index for index in indices if index >= met), default=load.length)

    def shortened(self, load: PrefixLoad, length: int) -> PrefixLoad | None:
        """Return the rest of a load (`is_beside`) that now ends after `length` blocks of each group. None: too little
        is left, or the windows or states at that end are not part of it."""
        kv, hashes = self._kv, load.request.hashes
        end = length * kv.num_groups
        if kv.windows or length * kv.block_size - self._num_computed(load) < self._min_tokens:
            return None
        rest = PrefixLoad(load.request, length, load.num_cached, load.limit, is_beside=True)
        for entry, places, tier in zip(load.entries, load.places, load.tiers, strict=True):
            if places[0] < end and any(kv.cached_block(hashes[place]) == FREED for place in places):
                self._add(rest, entry, places, tier)
        return rest if rest.entries else None

    def awaits_copies(self, load: PrefixLoad) -> bool:
        """Whether the store has brought everything that the request has not computed, and it is only being copied."""
        return load.num_copying > 0 and not load.has_failed and self._num_missing(load) <= 0

    def _num_missing(self, load: PrefixLoad) -> int:
        """Tokens that a request has not computed and the store has not brought; entries that have failed count as
        brought."""
        while load.num_brought < len(load.places) and load.num_brought not in load.unanswered:
            load.num_brought += 1
        end = load.num_cached
        if load.num_brought < len(load.places):
            end = load.places[load.num_brought][0] // self._kv.num_groups + 1
        return end * self._kv.block_size - self._num_computed(load)

    def rest_seconds(self, load: PrefixLoad) -> float:
        """Return the seconds that a request would take to compute the rest of its load."""
        end = load.length * self._kv.block_size
        return self._token_budget.prompt_seconds(self._num_computed(load), end) or 0.0

    def limit(self, load: PrefixLoad) -> float:
        """Return the seconds after which the rest of a load is late."""
        kv, hashes = self._kv, load.request.hashes[: load.length * self._kv.num_groups]
        num_cached = kv.num_tokens_in(len(kv.match(hashes)))
        computed = self._token_budget.prompt_seconds(num_cached, load.length * kv.block_size)
        return _limit(self.rates.seconds(load.left), computed)

    def expected(self, request: Request, hashes: list[bytes]) -> PrefixLoad | None:
        """Return the load of a prompt that another replica is computing and storing; None if it is too short."""
        length, num_cached = len(hashes) // self._kv.num_groups, len(self._kv.match(hashes)) // self._kv.num_groups
        if (length - num_cached) * self._kv.block_size < self._min_tokens:
            return None
        tier = PEER if request.core_request.kv_peer else MEMORY
        load = self._load_of(request, hashes, length, num_cached, [tier] * len(hashes))
        load.waits = True
        return load

    def _load_of(
        self, request: Request, hashes: list[bytes], length: int, num_cached: int, tiers: Sequence[int]
    ) -> PrefixLoad:
        """The load of everything that the prefix cache lacks of the first `length` blocks of each group, given the
        tiers of all blocks."""
        kv, stride = self._kv, self._kv.num_groups
        load, last = PrefixLoad(request, length, num_cached, limit=_LOAD_SECONDS), dict[int, int]()
        for place in kv.visible_places(length):
            if kv.cached_block(hashes[place]) != FREED:
                continue
            index, group = divmod(place, stride)
            kind = self._kind_of[group]
            if last.get(kind) != index:
                last[kind] = index
                places = [index * stride + each for each in self._kinds[kind].groups]
                self._add(load, KVEntry(hashes[index * stride], kind), places, tiers[place])
        return load

    def _add(self, load: PrefixLoad, entry: KVEntry, places: list[int], tier: int) -> None:
        load.entries.append(entry)
        load.places.append(places)
        load.tiers.append(tier)
        load.work[tier] += self._kinds[entry.kind].size


def _limit(seconds: float, computed: float | None) -> float:
    """Seconds after which a load is late that is expected to take `seconds`, where computing would take `computed`;
    None: unknown."""
    return max(_LOAD_SECONDS, 4 * seconds if computed is None else 2 * computed)
