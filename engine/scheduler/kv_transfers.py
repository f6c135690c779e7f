"""KV outside the device: what is loaded from the KV store of the host for a request, and what is copied to it.

Plain Python, no torch: the store is another process (`quire.engine.kv_store`), the ranks copy, and this module only
does the bookkeeping. Messages and copies are in `quire.engine.protocol.kv_store`.

*Loads.* When a waiting request's turn comes, and the prefix cache lacks a good part of its tokens, the store is asked
what it has of them. If loading that is predicted to be faster than computing it, blocks are allocated, the store brings
the entries into its arena, the ranks copy them beside the steps, and each is published in the prefix cache. The request
then starts by the ordinary prefix match. Meanwhile it is in no queue, so others may start before it; but no more leave
the queue than soon find a place in the batch. A request whose entries are being loaded for another one waits for that
load. A load that is late, or partly fails, ends: what has come is used. A
load has all its blocks from the beginning, so that loads never wait for each other, and keeps them until its request
starts. The newest one gives them up when running requests need them, or when nothing else runs and another request is
first: then it is looked up again.

*Stores.* Full blocks whose step has run are offered to the store, in prefixes of at least `min_tokens` tokens. What it
grants is copied if the block is still in the prefix cache; its pages are held meanwhile, at most an eighth of all.
Recurrent states, and windows whose blocks fill pages, are offered only at places where the prefix cache keeps them for
good: those of a decode replace each other, and are offered when the request stops running. What a request finds in the
prefix cache is offered again now and then (`_KnownLinks`), as the store may have lost or refused it.

A store that does not answer costs a request `_ANSWER_SECONDS` at most, and later ones nothing: it is not asked until it
is heard of. After `_SILENCE_SECONDS` of silence, there is none until it answers again. One that was started again has
another arena: everything about the earlier one is forgotten, and copies under way end by themselves.

Invariants (`check_integrity`):
- each load and each copy has references to its blocks, and a block of a load is not in the prefix cache before all
  ranks have copied it;
- the request of a load is in no queue;
- the pages held for stores are within their limit.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.kv_layout import kv_layout
from quire.engine.protocol.kv_store import (
    DISK,
    MEMORY,
    NO_TIER,
    ClearKV,
    FoundKV,
    FromStore,
    GrantedKV,
    KVCopied,
    KVCopy,
    KVCopyPlan,
    KVEntry,
    KVStoreOpened,
    LoadedKV,
    LoadKV,
    LookUpKV,
    OfferKV,
    OpenKVStore,
    ReleaseKV,
    StoredKV,
    ToStore,
)
from quire.engine.protocol.stats import EngineStats
from quire.engine.scheduler.kv_cache_manager import FREED, block_hash
from quire.engine.scheduler.plans_in_flight import PlansInFlight
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_blocks import RequestBlocks
from quire.engine.scheduler.token_budget import TokenBudget

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 0.5
"""Time within which a look-up is answered; otherwise the request computes everything."""
_LOAD_SECONDS = 2.0
"""Minimum time after which a load is late."""
_SILENCE_SECONDS = 3.0
"""Time without a message after which the store counts as gone. It sends its stats every second."""
_MORE_WAITING = 4
"""Requests that may wait for the store in addition to one for each place in the batch."""
_MAX_HASHED = 1 << 15
"""Tokens that are hashed for the look-ups of one plan, except for a single request: some milliseconds."""
_MAX_REFUSED = 3
"""How often a request whose load finds no memory is looked up again when its turn comes; then it computes."""
_OPEN_SECONDS = 1.0
"""Interval of attempts to open the store."""
_OFFER_SECONDS = 0.1
"""Minimum interval of offers of decodes, which fill few blocks, so that their steps rarely have copies."""
_OFFER_AGAIN_SECONDS = 60.0
"""Time after which blocks that a request finds in the prefix cache are offered again: the store may have refused them
for want of room."""
_OFFERED_TOGETHER = 256
"""Maximum links of such blocks in an offer."""
_MAX_OFFERED = 1024
"""Entries offered and not copied yet."""
_MAX_BACKLOG = 4096
"""Rows whose full blocks have not been offered yet. Those of more are not offered."""
_HELD_SHARE = 8
"""Copies to the store hold at most one in this many pages."""
_FIRST_RATES = {MEMORY: (2 << 30), DISK: (256 << 20)}
"""Bytes per second of a load, until some have been measured."""
_FIRST_BYTES = 64 << 20
"""Weight of the first rates."""
_FIRST_LATENCY = {MEMORY: 0.01, DISK: 0.02}
"""Seconds that a load takes beside those for its bytes, until some have been measured."""
_RATE_DECAY = 0.8
"""Factor by which a measured load weighs less with each later one."""
_DOUBT = 0.97
"""Factor by which an expected duration shrinks each time that it is too long: a tier that was slow is tried again."""


class _Rates:
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


class _KnownLinks:
    """Links that the store has been offered lately, or has brought: they need not be offered again."""

    def __init__(self, max_links: int) -> None:
        self._new, self._old, self._max_links = set[bytes](), set[bytes](), max_links
        self._changed_at = -math.inf

    def __contains__(self, link: bytes) -> bool:
        return link in self._new or link in self._old

    def add(self, links: Iterable[bytes]) -> None:
        self._new.update(links)

    def age(self) -> None:
        """Forget links after one to two times `_OFFER_AGAIN_SECONDS`, or when there are too many."""
        now = time.monotonic()
        if len(self._new) >= self._max_links or now - self._changed_at >= _OFFER_AGAIN_SECONDS:
            self._new, self._old, self._changed_at = set(), self._new, now

    def clear(self) -> None:
        self._new.clear()
        self._old.clear()


class _Found(NamedTuple):
    """The answer to a look-up."""

    start: int
    """Number of the first link that was asked for."""
    tiers: Sequence[bytes]

    def tier(self, index: int, kind: int) -> int:
        """Where an entry is."""
        tiers, at = self.tiers[kind], index - self.start
        return tiers[at] if 0 <= at < len(tiers) else NO_TIER


class _LookUp(NamedTuple):
    """A question to the store."""

    request: Request
    start: int
    """Number of the first link that it is asked for."""
    deadline: float
    """When the answer is late (`time.monotonic`)."""
    blocks: list[int]
    """Those of the prefix before it, which are kept in the cache."""


@dataclass(slots=True, eq=False)
class _PrefixLoad:
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
    followers: list[Request] = field(default_factory=list)
    """Requests that wait for some of the same entries."""


@dataclass(slots=True, eq=False)
class _Copy:
    """An entry that the ranks copy, and the references to its blocks."""

    planned: KVCopy
    arena: str
    ranks: set[int]
    """Those that have not answered."""
    load: _PrefixLoad | None = None
    """None: it is stored."""
    places: Sequence[int] = ()
    """Of the blocks, in those of the load."""
    number: int = 0
    """Of the entry, in the load."""
    has_failed: bool = False
    step: int = -1
    """The step that it runs beside; -1: it is in no plan."""


class _Full(NamedTuple):
    """Full blocks of a request that are to be offered."""

    step: int
    """A step after which all of them are written."""
    start: int
    """Number of the first link."""
    parent: bytes
    """The link before it; empty: there is none."""
    links: list[bytes]
    num_tokens: int
    """Tokens of the text for which states stay where they are (`KVCacheManager.is_kept`)."""
    kinds: Collection[int]


class KVTransferManager:
    """Decides what is loaded from the KV store, and what is stored."""

    def __init__(
        self,
        config: EngineConfig,
        blocks: RequestBlocks,
        in_flight: PlansInFlight,
        token_budget: TokenBudget,
        stats: EngineStats,
    ) -> None:
        self._blocks, self._kv, self._in_flight, self._stats = blocks, blocks.kv, in_flight, stats
        self._token_budget, self._row_tokens = token_budget, config.scheduler.max_num_batched_tokens
        self._world_size = config.parallel.world_size
        self._kinds = () if config.kv_store is None else kv_layout(config).kinds
        self._min_tokens = 0 if config.kv_store is None else config.kv_store.min_tokens
        self._kind_of = {group: kind for kind, each in enumerate(self._kinds) for group in each.groups}
        windows = {kind: self._kv.windows.get(each.groups[0]) for kind, each in enumerate(self._kinds)}
        self._scarce = {kind: windows[kind] or 0 for kind in windows if self._kinds[kind].groups[0] in self._kv.scarce}
        """Kinds that are kept only at some places, and their windows."""
        self._max_held = config.cache.num_blocks // config.cache.blocks_per_page // _HELD_SHARE
        self._send: Callable[[ToStore], None] = lambda message: None
        self._opening: OpenKVStore | None = None
        """None: there is no store."""
        self._is_open = False
        self._arena, self._arena_size = "", 0
        self._heard_at = self._opened_at = self._offered_at = -math.inf
        """Times (`time.monotonic`) of the last message, attempt to open, and offer."""
        self._is_late = False
        """Whether a look-up was not answered in time, and nothing has been heard since."""
        self._max_turns = config.scheduler.depth + 2
        """Turns in which a load may be done, if store and ranks take no time."""
        self._polled_at, self._polled_steps = -math.inf, (0, 0)
        """Time of the last poll, and how many plans had been made and results had arrived."""
        self._rates = _Rates()
        self._last_number = 0
        """Of calls and copies."""
        self._waiting: dict[Request, None] = {}
        """All requests that are in no queue because of the store."""
        self._startable: dict[Request, None] = {}
        """Those of them that may be queued."""
        self._asked: dict[int, _LookUp] = {}
        """By call."""
        self._reserved: dict[Request, int] = {}
        """Pages that requests need beside those that are held for them, until they start."""
        self._refused: Counter[Request] = Counter()
        """How often there has been no memory for a load, or not for long enough."""
        self._short: tuple[Request, int] | None = None
        """The last request for which there was no memory, and the pages that were free for it."""
        self._num_hashed = 0
        """Tokens that have been hashed for look-ups since the last `poll`."""
        self._settled: set[Request] = set()
        """Requests that start with what the prefix cache has."""
        self._loaded: dict[Request, _PrefixLoad] = {}
        """Ended loads of requests that have not started, the oldest first."""
        self._loads: dict[int, _PrefixLoad] = {}
        """Loads that have not ended, by call, the oldest first."""
        self._loading: dict[KVEntry, _PrefixLoad] = {}
        """Their entries."""
        self._copies: dict[int, _Copy] = {}
        """Copies that some rank has not answered, by number, the oldest first."""
        self._oldest: _Copy | None = None
        """The oldest copy, if the ranks have run its step."""
        self._copied_at = [-math.inf] * self._world_size
        """By rank, when it has last answered, or when the oldest copy was to begin."""
        self._watched_at = -math.inf
        """When `hung_ranks` was last called."""
        self._plan = KVCopyPlan("")
        """Of the next plan."""
        self._is_mapped = self._unmaps = False
        """Whether ranks have an arena mapped, and whether the next plan lets them forget it."""
        self._backlog: deque[_Full] = deque()
        """What has not been offered, in the order of steps."""
        self._known = _KnownLinks(config.cache.num_blocks)
        """What is in the backlog, or has been. Empty for each new arena."""
        self._is_urgent = False
        """Whether there is more in it than the blocks of decodes."""
        self._offered: deque[int] = deque()
        """Numbers of entries in the offers that are not answered."""
        self._granted: deque[tuple[KVEntry, int]] = deque()
        """Granted entries that are not being copied yet, and their offsets."""
        self._held: Counter[int] = Counter()
        """Pages that are being copied to the store, with the number of copies."""
        if self._kinds:
            blocks.on_published, blocks.on_free = self._on_published, self._on_free

    @property
    def is_open(self) -> bool:
        """Whether there is a store that answers."""
        return self._is_open

    @property
    def arena(self) -> str:
        """The path of the store's arena, which identifies the store."""
        return self._arena

    def connect(self, send: Callable[[ToStore], None], replica: int, incarnation: int) -> None:
        """Use a store. `send` must not block."""
        self._send, self._opening = send, OpenKVStore(replica, incarnation)

    # --- requests ---------------------------------------------------------------------------------------------

    def take(self, request: Request, num_places: int) -> bool | None:
        """Whether the next request to admit must leave the queue and wait for the store, until `take_startable` returns
        it. None: it must wait in the queue, because enough others for `num_places` places wait for the store, or this
        plan has looked up enough."""
        if not self._is_open or self._is_late or request in self._settled:
            return False
        if request.num_reusable_tokens < self._min_tokens:
            return False
        kv, stride = self._kv, self._kv.num_groups
        num_free, short = kv.num_free - self.num_reserved(request), self._short
        if short is not None and short[0] is request and num_free <= short[1]:
            return False
        num_hashed = request.num_reusable_tokens - len(request.hashes) // stride * kv.block_size
        if len(self._waiting) >= num_places + _MORE_WAITING or 0 < self._num_hashed > _MAX_HASHED - num_hashed:
            return None
        hashes = self._blocks.reusable_hashes(request)
        self._num_hashed += max(0, num_hashed)
        cached = kv.match(hashes)
        if (len(hashes) - len(cached)) // stride * kv.block_size < self._min_tokens:
            return False
        # Until there is memory to start, the answer might change; a state that is loaded takes a page beside its own.
        needed = kv.max_pages_needed(len(request.token_ids), self._row_tokens, cached) + len(kv.scarce)
        if not kv.can_allocate(needed + self.num_reserved(request), cached_blocks=kv.without_freed(cached)):
            self._short = request, num_free
            return False
        self._reserved[request] = needed
        # With windows, entries before the end of what is cached may be needed, too.
        start = 0 if kv.windows else len(cached) // stride
        call_id, held = self._number(), kv.without_freed(cached)
        kv.touch(held)
        self._asked[call_id] = _LookUp(request, start, time.monotonic() + _ANSWER_SECONDS, held)
        self._send(LookUpKV(call_id, hashes[start * stride :: stride]))
        self._waiting[request] = None
        return True

    def take_startable(self) -> Collection[Request]:
        """Return the requests that may be in the queue again."""
        startable = self._startable
        if startable:
            self._startable = {}
            for request in startable:
                del self._waiting[request]
        return startable

    def num_reserved(self, request: Request) -> int:
        """Free pages that a request leaves to others, which wait for the store or have blocks from it."""
        return sum(self._reserved.values()) - self._reserved.get(request, 0) if self._reserved else 0

    def is_waiting(self, request: Request) -> bool:
        """Whether a request is in no queue because of the store."""
        return request in self._waiting

    def start(self, request: Request, length: int) -> None:
        """Note that a request starts, with `length` cached blocks of each group."""
        if not self._kinds:
            return
        self._forget(request)
        size, num_prompt = self._kv.block_size, request.num_prompt_tokens
        request.num_offered = length if length * size >= self._min_tokens else 0
        if self._is_open and request.num_offered:
            self._offer_cached(request, self._loaded.get(request), length)
        if (load := self._loaded.pop(request, None)) is None:
            return
        self._give_up(load)
        self._stats.kv_failed_load_tokens += max(0, load.length - max(load.num_cached, length)) * size
        if request.num_cached_tokens is not None:
            return  # its tokens have been counted when it started first
        counts = [0, 0]
        places = zip(load.places, load.tiers, strict=True)
        on_disk = {own[0] // self._kv.num_groups for own, tier in places if tier == DISK}
        for index in range(load.num_cached, min(load.length, length)):
            counts[index in on_disk] += min(max(0, num_prompt - index * size), size)
        self._stats.kv_loaded_memory_tokens += counts[0]
        self._stats.kv_loaded_disk_tokens += counts[1]
        request.num_loaded_tokens = counts[0], counts[1]

    def finish(self, request: Request) -> None:
        """Remove a request that has ended and does not run."""
        if not self._kinds:
            return
        self._forget(request)
        if (load := self._loaded.pop(request, None)) is not None:
            self._give_up(load)
        if request in self._waiting:
            del self._waiting[request]
            self._startable.pop(request, None)
            for call_id in [call_id for call_id, asked in self._asked.items() if asked.request is request]:
                self._answered(call_id)
            for load in [load for load in self._loads.values() if load.request is request]:
                self._end(load)

    def _forget(self, request: Request) -> None:
        self._reserved.pop(request, None)
        self._refused.pop(request, None)
        self._settled.discard(request)
        if self._short is not None and self._short[0] is request:
            self._short = None

    def _let_start(self, request: Request, *, is_settled: bool) -> None:
        """Let a waiting request be queued. `is_settled`: it starts with what the prefix cache has then."""
        if request in self._waiting:
            self._startable[request] = None
            if request not in self._loaded:
                self._reserved.pop(request, None)
            if is_settled:
                self._settled.add(request)

    # --- loads ------------------------------------------------------------------------------------------------

    def _begin(self, request: Request, found: _Found) -> None:
        """Begin the load that is worth it for a waiting request, or let the request start."""
        hashes, kv = self._blocks.reusable_hashes(request), self._kv
        if (load := self._choose(request, hashes, found)) is None:
            return self._let_start(request, is_settled=True)
        if (other := next((self._loading[each] for each in load.entries if each in self._loading), None)) is not None:
            self._reserved.pop(request, None)
            return other.followers.append(request)
        missing = sorted(chain.from_iterable(load.places))
        load.blocks = [FREED] * (load.length * kv.num_groups)
        cached = sorted({*kv.visible_places(load.length)}.difference(missing))
        held = [kv.cached_block(hashes[place]) for place in cached]
        needed = max(0, kv.max_pages_needed(len(request.token_ids), self._row_tokens, load.blocks))
        pages = kv.pages_for_places(missing) + needed + self.num_reserved(request)
        if not kv.can_allocate(pages, cached_blocks=held):
            self._refused[request] += 1
            return self._let_start(request, is_settled=self._refused[request] >= _MAX_REFUSED)
        self._reserved[request] = needed
        kv.touch(held)
        for place, block in zip(cached, held, strict=True):
            load.blocks[place] = block
        kv.allocate_places(load.blocks, missing)
        load.call_id, load.arena, load.began = self._number(), self._arena, time.monotonic()
        load.unanswered, load.left = {*range(len(load.entries))}, load.work.copy()
        self._loads[load.call_id] = load
        self._loading |= dict.fromkeys(load.entries, load)
        stride = kv.num_groups
        parents = [hashes[(at - 1) * stride] if (at := own[0] // stride) else b"" for own in load.places]
        self._send(LoadKV(load.call_id, load.entries, parents))

    def _choose(self, request: Request, hashes: list[bytes], found: _Found) -> _PrefixLoad | None:
        """Return the load that saves most time: from all tiers, or from the fastest ones. None: there is none."""
        kv, stride, size = self._kv, self._kv.num_groups, self._kv.block_size
        num_cached, cached = len(kv.match(hashes)) // stride, {each for each in hashes if kv.cached_block(each) >= 0}
        tiers = [found.tier(place // stride, self._kind_of[place % stride]) for place in range(len(hashes))]
        ahead = sum((load.left for load in self._loads.values()), Counter[int]())
        best, most = None, 0.0
        for slowest in sorted({*tiers} & _FIRST_RATES.keys(), reverse=True):
            known = {each for each, tier in zip(hashes, tiers, strict=True) if NO_TIER < tier <= slowest}
            length = kv.prefix_length(hashes, known | cached)
            if (length - num_cached) * size < self._min_tokens:
                continue
            entries, tiers_of, work = dict[KVEntry, list[int]](), list[int](), Counter[int]()
            for place in kv.visible_places(length):
                index, kind = place // stride, self._kind_of[place % stride]
                entry = KVEntry(hashes[index * stride], kind)
                if hashes[place] not in cached and entry not in entries:
                    entries[entry] = [index * stride + group for group in self._kinds[kind].groups]
                    tiers_of.append(tiers[place])
                    work[tiers[place]] += self._kinds[kind].size
            seconds = self._rates.seconds(work + ahead)
            computed = self._token_budget.prompt_seconds(num_cached * size, length * size)
            if (gain := math.inf if computed is None else computed - seconds) > most:
                limit = max(_LOAD_SECONDS, 4 * seconds if computed is None else 2 * computed)
                names, places = [*entries], [*entries.values()]
                best = _PrefixLoad(request, length, num_cached, names, places, tiers_of, work, limit, ahead=ahead)
                most = gain
            elif gain <= 0.0:
                self._rates.doubt(work)
        return best

    def _bring(self, load: _PrefixLoad, message: LoadedKV) -> None:
        """Let the ranks copy what the store has brought."""
        for number, offset in zip(message.numbers, message.offsets, strict=False):
            if number not in load.unanswered:
                continue
            load.unanswered.discard(number)
            entry, places = load.entries[number], load.places[number]
            if not 0 <= offset <= self._arena_size - self._kinds[entry.kind].size:
                load.has_failed = True
                load.left[load.tiers[number]] -= self._kinds[entry.kind].size
                continue
            copy = KVCopy(self._number(), entry.kind, offset, [load.blocks[place] for place in places])
            for place in places:
                load.blocks[place] = FREED
            load.num_copying += 1
            ranks = {*range(self._world_size)}
            self._copies[copy.number] = _Copy(copy, load.arena, ranks, load, places, number)
            self._plan.loads.append(copy)
        failed = load.unanswered.intersection(message.failed)
        load.unanswered -= failed
        for number in failed:
            load.left[load.tiers[number]] -= self._kinds[load.entries[number].kind].size
        load.has_failed |= bool(failed)
        self._check_end(load)

    def _deadline(self, load: _PrefixLoad) -> float:
        """When a load is late (`time.monotonic`)."""
        return load.began + load.limit + self._max_turns * load.slowest_turn

    def _check_end(self, load: _PrefixLoad) -> None:
        """End a load of which all has come or failed; release what no rank reads any more."""
        if not load.has_ended and not load.unanswered and not load.num_copying:
            self._end(load)
        elif load.has_ended and not load.num_copying and not load.is_released and load.arena == self._arena:
            load.is_released = True
            self._send(ReleaseKV(load.call_id))

    def _end(self, load: _PrefixLoad) -> None:
        """End a load, with what has come. Copies under way keep their blocks until the ranks have answered."""
        load.has_ended = True
        load.has_failed |= bool(load.unanswered)
        del self._loads[load.call_id]
        for entry in load.entries:
            del self._loading[entry]
        planned, self._plan.loads = self._plan.loads, []
        for copy in planned:
            if self._copies[copy.number].load is load:
                self._finish_copy(copy.number, has_failed=True)
            else:
                self._plan.loads.append(copy)
        kv, hashes = self._kv, load.request.hashes[: load.length * self._kv.num_groups]
        seconds = time.monotonic() - load.began
        self._stats.kv_loads += 1
        self._stats.kv_load_seconds += seconds
        if not load.has_failed:
            self._rates.learn(load.work + load.ahead, seconds)
        found = {*kv.match(hashes)}
        kv.free([block for block in load.blocks if block >= 0 and block not in found])
        load.blocks = [block for block in load.blocks if block in found]
        if load.request in self._waiting:
            self._loaded[load.request] = load
            self._let_start(load.request, is_settled=True)
        else:
            self._give_up(load)
        for request in load.followers:
            self._let_start(request, is_settled=load.has_failed)
        self._check_end(load)

    def make_room(self, num_pages: int) -> None:
        """Free blocks of the newest loads until so many pages are free, if that helps: running requests need them.
        A load of which everything is being copied has nothing to give now."""
        for load in [*reversed(self._loads.values())]:
            if self._kv.num_free >= num_pages:
                return
            if all(block == FREED for block in load.blocks):
                continue
            self._end(load)
            self._let_go(load.request)
        while self._kv.num_free < num_pages and self.make_way(None):
            pass

    @property
    def num_returning(self) -> int:
        """Pages that nobody has but copies, which give them back as soon as the ranks have answered."""
        copies = (copy for copy in self._copies.values() if copy.load is None or copy.load.has_ended)
        return self._kv.num_pages_only_in(chain.from_iterable(copy.planned.blocks for copy in copies))

    def make_way(self, first: Request | None) -> bool:
        """Free the blocks of the newest load that has ended, that of the request that is to start `first` after all
        others; returns whether there was one."""
        request = next((request for request in reversed(self._loaded) if request is not first), None)
        if request is None and first in self._loaded:
            request = first
        if request is not None:
            self._let_go(request)
        return request is not None

    def _let_go(self, request: Request) -> None:
        """Free the blocks that were loaded for a request. It is looked up again, unless that has happened too often."""
        self._give_up(self._loaded.pop(request))
        self._reserved.pop(request, None)
        self._refused[request] += 1
        if self._refused[request] < _MAX_REFUSED:
            self._settled.discard(request)

    def _give_up(self, load: _PrefixLoad) -> None:
        self._kv.free([block for block in load.blocks if block >= 0])
        load.blocks = []

    # --- stores -----------------------------------------------------------------------------------------------

    def _on_published(self, request: Request) -> None:
        """Take full blocks of a request into the backlog."""
        stride, start = self._kv.num_groups, request.num_offered
        end = request.num_published // stride
        if self._is_open and end * self._kv.block_size >= self._min_tokens and end > start:
            request.num_offered = end
            self._add_full(request, start, end, request.num_prompt_tokens, range(len(self._kinds)))

    def _offer_cached(self, request: Request, load: _PrefixLoad | None, length: int) -> None:
        """Take blocks of a request that were in the prefix cache into the backlog, as far as the store that there is
        now has not been offered them lately, nor has brought them. It may have been started again, or may have had no
        room for them."""
        links = request.hashes[: length * self._kv.num_groups : self._kv.num_groups]
        self._known.age()
        if load is not None:
            self._known.add(links[load.num_cached : load.length])
            del links[load.num_cached :]
        start = len(links)
        while start and links[start - 1] not in self._known:
            start -= 1
        for first in range(start, len(links), _OFFERED_TOGETHER):
            end = min(first + _OFFERED_TOGETHER, len(links))
            self._add_full(request, first, end, end * self._kv.block_size + 1, range(len(self._kinds)))

    def _on_free(self, request: Request) -> None:
        """Take the last blocks of kinds that are kept only at some places, once no later ones replace them."""
        size, end = self._kv.block_size, request.num_published // self._kv.num_groups
        if self._is_open and self._scarce and end * size >= self._min_tokens:
            start = max(0, end - 1 - max(self._scarce.values()) // size)
            self._add_full(request, start, end, len(request.token_ids), self._scarce)

    def _add_full(self, request: Request, start: int, end: int, num_tokens: int, kinds: Collection[int]) -> None:
        if len(self._backlog) < _MAX_BACKLOG:
            hashes, stride = request.hashes, self._kv.num_groups
            parent = hashes[(start - 1) * stride] if start else b""
            links = hashes[start * stride : end * stride : stride]
            step = max(request.last_step, self._in_flight.next_step - 1)  # others may write what is cached
            self._backlog.append(_Full(step, start, parent, links, num_tokens, kinds))
            if kinds is not self._scarce:
                self._known.add(links)
            self._is_urgent |= len(links) > 1 or kinds is self._scarce

    def _offer(self) -> None:
        """Offer what is in the prefix cache of the oldest entries of the backlog whose steps have run."""
        entries, parents = list[KVEntry](), list[bytes]()
        room = self._room
        while self._backlog and len(entries) < room and self._backlog[0].step <= self._in_flight.last_finished:
            full = self._backlog.popleft()
            chained = zip((full.parent, *full.links), full.links, strict=False)
            for index, (parent, link) in enumerate(chained, full.start):
                for kind in full.kinds:
                    if self._stays(kind, index, full.num_tokens) and self._device_blocks(link, kind) is not None:
                        entries.append(KVEntry(link, kind))
                        parents.append(parent)
        self._is_urgent &= bool(self._backlog)
        if entries:
            self._offered.append(len(entries))
            self._send(OfferKV(entries, parents))

    @property
    def _room(self) -> int:
        """Entries that may be offered."""
        return _MAX_OFFERED - sum(self._offered) - len(self._granted)

    def _stays(self, kind: int, index: int, num_tokens: int) -> bool:
        """Whether a block with link number `index` of a text stays in the prefix cache, and is not replaced."""
        boundary = (index + 1) * self._kv.block_size
        return kind not in self._scarce or self._kv.is_kept(self._kinds[kind].groups[0], boundary, num_tokens)

    def _device_blocks(self, link: bytes, kind: int) -> list[int] | None:
        """Return the blocks of an entry if all are in the prefix cache."""
        blocks = [self._kv.cached_block(block_hash(link, group)) for group in self._kinds[kind].groups]
        return None if FREED in blocks else blocks

    def _store(self) -> None:
        """Copy granted entries, as many as may hold pages. What has left the prefix cache is abandoned."""
        unwritten, abandoned = self._kv.unwritten if self._granted else set[int](), list[int]()
        while self._granted:
            entry, offset = self._granted[0]
            blocks = self._device_blocks(entry.link, entry.kind)
            if blocks is None or not unwritten.isdisjoint(blocks):
                abandoned.append(offset)
            else:
                pages = self._kv.pages(blocks)
                if self._held and len(self._held) + sum(page not in self._held for page in pages) > self._max_held:
                    break
                self._kv.touch(blocks)
                self._held.update(pages)
                copy = KVCopy(self._number(), entry.kind, offset, blocks)
                self._copies[copy.number] = _Copy(copy, self._arena, {*range(self._world_size)})
                self._plan.stores.append(copy)
            self._granted.popleft()
        if abandoned:
            self._send(StoredKV([], abandoned, self._arena))

    # --- messages ---------------------------------------------------------------------------------------------

    def on_message(self, message: FromStore) -> None:
        """Process a message of the store."""
        self._heard_at, self._is_late = time.monotonic(), False
        match message:
            case KVStoreOpened(path, size):
                self._on_opened(path, size)
            case FoundKV(call_id, tiers):
                if (asked := self._asked.get(call_id)) is not None:
                    if len(tiers) == len(self._kinds):
                        self._begin(asked.request, _Found(asked.start, tiers))
                    else:
                        self._let_start(asked.request, is_settled=True)
                    self._answered(call_id)
            case LoadedKV(call_id):
                if (load := self._loads.get(call_id)) is not None:
                    self._bring(load, message)
            case GrantedKV(entries, offsets):
                if self._offered:
                    self._offered.popleft()
                for entry, offset in zip(entries, offsets, strict=False):
                    is_known = 0 <= entry.kind < len(self._kinds) and bool(self._arena)
                    if is_known and 0 <= offset <= self._arena_size - self._kinds[entry.kind].size:
                        self._granted.append((entry, offset))
                self._store()

    def _answered(self, call_id: int) -> None:
        """Forget a look-up."""
        self._kv.free(self._asked.pop(call_id).blocks)

    def _on_opened(self, path: str, size: int) -> None:
        """Open the store once it says twice that it has this arena: the first time, it may not know this core."""
        if path == self._arena:
            self._is_open = True
            return
        self._arena, self._arena_size = path, size
        self._close()
        self._granted.clear()
        for copy in self._plan.stores:
            self._finish_copy(copy.number, has_failed=True)
        self._plan.stores.clear()
        self._open(time.monotonic())

    def _open(self, now: float) -> None:
        if self._opening is not None:
            self._opened_at = now
            self._send(self._opening)

    def _close(self) -> None:
        """Do without the store until it answers again. It may have ended: ranks give its memory back."""
        self._is_open, self._unmaps = False, self._is_mapped
        for call_id, asked in [*self._asked.items()]:
            self._let_start(asked.request, is_settled=True)
            self._answered(call_id)
        for load in [*self._loads.values()]:
            self._end(load)
        self._backlog.clear()
        self._known.clear()
        self._offered.clear()

    def reset(self) -> None:
        """Forget what is being loaded and stored, as the prefix cache is reset."""
        for load in [*self._loads.values()]:
            self._end(load)
        for load in self._loaded.values():
            self._give_up(load)
        for copy in self._copies.values():
            copy.has_failed = True
        if self._granted:
            self._send(StoredKV([], [offset for _, offset in self._granted], self._arena))
        self._backlog.clear()
        self._known.clear()
        self._granted.clear()

    def clear(self, call_id: int) -> None:
        """Let the store forget everything; its answer is `KVCleared`, if it gives one."""
        self._send(ClearKV(call_id))

    def on_copied(self, message: KVCopied) -> None:
        """Process a rank's answer."""
        self._copied_at[message.rank] = time.monotonic()
        stored, abandoned, read = list[int](), list[int](), defaultdict[_PrefixLoad, list[int]](list)
        for number in message.numbers:
            if (copy := self._copies.get(number)) is None:
                logger.warning("rank %d has made a copy that is not under way: %d", message.rank, number)
                continue
            copy.ranks.discard(message.rank)
            copy.has_failed |= number in message.failed
            if not copy.ranks:
                self._finish_copy(number, has_failed=copy.has_failed)
                if copy.load is None and copy.arena == self._arena:
                    (abandoned if copy.has_failed else stored).append(copy.planned.offset)
                elif copy.load is not None:
                    read[copy.load].append(copy.number)
        for load, numbers in read.items():
            if not load.is_released and load.arena == self._arena:
                self._send(ReleaseKV(load.call_id, numbers))
        if stored or abandoned:
            self._send(StoredKV(stored, abandoned, self._arena))
        self._store()

    def _finish_copy(self, number: int, *, has_failed: bool) -> None:
        """Take the blocks of a copy that no rank reads or writes any more."""
        copy = self._copies.pop(number)
        blocks, load, kv = copy.planned.blocks, copy.load, self._kv
        if load is None:
            for page in kv.pages(blocks):
                self._held[page] -= 1
                if not self._held[page]:
                    del self._held[page]
            kv.free(blocks)
            self._stats.kv_stored_blocks += 0 if has_failed else len(blocks)
            return
        load.num_copying -= 1
        load.left[load.tiers[copy.number]] -= self._kinds[copy.planned.kind].size
        load.has_failed |= has_failed
        if not has_failed:
            for place, block in zip(copy.places, blocks, strict=True):
                self._blocks.publish_loaded(load.request, place, block)
        if has_failed or load.has_ended:
            kv.free(blocks)
        else:
            for place, block in zip(copy.places, blocks, strict=True):
                load.blocks[place] = block
        self._check_end(load)

    # --- time and plans ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Do what is due; to be called before each plan, and after `seconds_left` without one."""
        self._num_hashed = 0
        if self._opening is None:
            return
        now, steps = time.monotonic(), (self._in_flight.next_step, self._in_flight.last_finished)
        for load in self._loads.values() if steps != self._polled_steps else ():
            load.slowest_turn = max(load.slowest_turn, now - max(load.began, self._polled_at))
        self._polled_at, self._polled_steps = now, steps
        if not self._is_open:
            if now - self._opened_at >= _OPEN_SECONDS:
                self._open(now)
            return
        if now - self._heard_at > _SILENCE_SECONDS:
            return self._close()
        if self._asked:
            for call_id, asked in [*self._asked.items()]:
                if asked.deadline <= now:
                    self._is_late = True
                    self._let_start(asked.request, is_settled=True)
                    self._answered(call_id)
        for load in [*self._loads.values()] if self._loads else ():
            if self._deadline(load) <= now:
                self._end(load)
        if self._backlog and (self._is_urgent or now - self._offered_at >= _OFFER_SECONDS):
            self._offered_at = now
            self._offer()

    def hung_ranks(self, seconds: float) -> list[int]:
        """Return the ranks that have ended no copy for so long, though they have run the step of the oldest one. To be
        called more often than that, after the answers that have come have been processed."""
        oldest, now = next(iter(self._copies.values()), None), time.monotonic()
        if oldest is not None and not 0 <= oldest.step <= self._in_flight.last_finished:
            oldest = None
        late, self._watched_at = now - self._watched_at > seconds / 2, now
        if oldest is not self._oldest or late:  # this process was busy, or stopped like the ranks
            self._oldest, self._copied_at = oldest, [now] * self._world_size
        if oldest is None:
            return []
        return sorted(rank for rank in oldest.ranks if now - self._copied_at[rank] > seconds)

    def seconds_left(self) -> float:
        """Seconds until something is due; infinite without a store."""
        if self._opening is None:
            return math.inf
        times = [asked.deadline for asked in self._asked.values()]
        times += [self._deadline(load) for load in self._loads.values()]
        times.append(self._heard_at + _SILENCE_SECONDS if self._is_open else self._opened_at + _OPEN_SECONDS)
        if self._backlog and self._is_open and self._room > 0:
            times.append(self._offered_at + _OFFER_SECONDS * (not self._is_urgent))
        return max(0.0, min(times) - time.monotonic())

    @property
    def has_changes(self) -> bool:
        """Whether the ranks have something to copy or to forget."""
        return bool(self._plan.loads or self._plan.stores or self._unmaps)

    @property
    def has_startable(self) -> bool:
        """Whether requests may be in the queue again."""
        return bool(self._startable)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks will be free when the store or ranks have answered, or kept free for others until then."""
        return bool(self._copies or self._loads or self._asked)

    @property
    def is_busy(self) -> bool:
        """Whether something is under way, or will be without another request."""
        return bool(self._waiting) or self.is_storing

    @property
    def is_storing(self) -> bool:
        """Whether something is to be offered or copied, or is being copied."""
        return bool(self._backlog or self._offered or self._granted or self._copies)

    def take_plan(self) -> KVCopyPlan | None:
        """Return the copies for the current plan; None: there are none."""
        if not self.has_changes:
            return None
        plan, self._plan = self._plan, KVCopyPlan("")
        for copy in (*plan.loads, *plan.stores):
            self._copies[copy.number].step = self._in_flight.next_step
        self._is_mapped, self._unmaps = bool(plan.loads or plan.stores), False
        plan.arena = self._arena if self._is_mapped else ""
        return plan

    def count(self) -> None:
        """Set the gauges."""
        self._stats.kv_loading = len(self._waiting)

    def block_lists(self) -> Iterator[list[int]]:
        """The blocks of look-ups, loads and copies."""
        yield from (asked.blocks for asked in self._asked.values())
        for load in (*self._loads.values(), *self._loaded.values()):
            yield [block for block in load.blocks if block >= 0]
        yield from (copy.planned.blocks for copy in self._copies.values())

    def check_integrity(self, requests: Collection[Request]) -> Collection[Request]:
        """Assert the invariants between two plans; returns the requests that are in no queue."""
        assert self._waiting.keys() <= {*requests}
        assert self._startable.keys() <= self._waiting.keys()
        assert {*self._refused, *self._settled, *self._loaded} <= {*requests}
        assert self._reserved.keys() <= self._waiting.keys() | self._loaded.keys()
        assert all(load.request in self._waiting for load in self._loads.values())
        followers = {request for load in self._loads.values() for request in load.followers}
        for request in self._waiting:
            is_asked = any(asked.request is request for asked in self._asked.values())
            is_loading = any(load.request is request for load in self._loads.values())
            assert is_asked + is_loading + (request in followers) + (request in self._startable) == 1
        assert self._loading.keys() == {entry for load in self._loads.values() for entry in load.entries}
        loading = Counter(copy.load for copy in self._copies.values() if copy.load is not None)
        for load in self._loads.values():
            assert load.unanswered or load.num_copying
            assert load.num_copying == loading[load]
            assert len(load.blocks) == load.length * self._kv.num_groups
        stores = [self._kv.pages(copy.planned.blocks) for copy in self._copies.values() if copy.load is None]
        assert self._held == Counter(chain.from_iterable(stores))
        assert len(self._held) <= max(self._max_held, *map(len, stores)) if stores else not self._held
        assert {copy.number for copy in (*self._plan.loads, *self._plan.stores)} <= self._copies.keys()
        for copy in self._copies.values():
            if copy.load is not None:
                assert not any(map(self._kv.is_cached, copy.planned.blocks)), "a block is found before it is loaded"
        return self._waiting

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number
