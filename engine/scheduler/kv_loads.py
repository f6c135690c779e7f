"""Loads from the KV store: look-ups, loads, and the requests that wait for them.

When a waiting request's turn comes and the prefix cache lacks a good part of its tokens, the core asks the store which
entries it has of the rest. If loading them is predicted to be faster than computing, it allocates blocks, the store
brings the entries into its arena, the ranks copy them beside the steps, and each is published in the prefix cache. The
request then starts by the ordinary prefix match. Until then it is in no queue, so others may start before it; but only
as many requests leave the queue as will soon find a place in the batch. A request whose entries are being loaded for
another one waits for that load.

A load that is late, or fails in part, ends, and what has arrived is used. A load has all its blocks from the beginning,
so that loads never wait for each other, and keeps them until its request starts. The newest load gives them up when
running requests need them, or when nothing else runs and another request is first; its request is then looked up again.
Loads for requests that have not arrived yet get at most a part of the cache, and give way to all others.

If it is clearly faster, a request computes *beside* its load (`PrefixLoad.is_beside`): it starts at once, as if nothing
were loaded, while entries arrive from the end of the prefix. When it has computed everything that has not arrived, it
starts again, after both parts, by the ordinary prefix match. If an entry after that place is lost, the load begins
again in front of it. If the load ends for another reason, the request just continues.

A store that does not answer costs a request at most `_ANSWER_SECONDS`, and later requests nothing: it is not asked
again until it has sent something. Nor is it asked while a rank cannot copy (`CopiesInFlight.are_failing`).
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.kv_store import (
    DISK,
    MEMORY,
    PEER,
    FoundKV,
    KVCopy,
    KVEntry,
    LoadedKV,
    LoadKV,
    LookUpKV,
    ReleaseKV,
    SettleKV,
)
from quire.engine.protocol.stats import EngineStats
from quire.engine.scheduler.kv_cache_manager import FREED
from quire.engine.scheduler.kv_connection import KVStoreConnection
from quire.engine.scheduler.kv_copies_in_flight import CopiesInFlight, CopyInFlight
from quire.engine.scheduler.kv_load_choice import Found, LoadChoice, PrefixLoad
from quire.engine.scheduler.plans_in_flight import PlansInFlight
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_blocks import RequestBlocks
from quire.engine.scheduler.running_requests import RunningRequests
from quire.engine.scheduler.token_budget import TokenBudget

_ANSWER_SECONDS = 0.5
"""Time within which a look-up is answered; otherwise the request computes everything."""
_MORE_WAITING = 4
"""Requests that may wait for the store in addition to one for each place in the batch."""
_MAX_HASHED = 1 << 15
"""Maximum tokens hashed for the look-ups of one plan, which takes some milliseconds. A single request may exceed it."""
_EXPECTED_SHARE = 2
"""Loads for requests that have not arrived yet take at most one in this many pages. A single one may exceed it."""
_MAX_REFUSED = 3
"""After this many loads for which there was no memory, a request computes instead of being looked up again."""


class _LookUp(NamedTuple):
    """A question to the store."""

    request: Request
    start: int
    """Number of the first link in the question."""
    deadline: float
    """When the answer is late (`time.monotonic`)."""
    blocks: list[int]
    """Blocks of the prefix before it, which are kept in the cache."""


@dataclass(slots=True, eq=False)
class LoadCopy(CopyInFlight):
    """A copy to the device."""

    load: PrefixLoad = field(kw_only=True)
    places: Sequence[int] = ()
    """Indexes of its blocks in `PrefixLoad.blocks`."""
    number: int = 0
    """Index of the entry in `PrefixLoad.entries`."""

    @property
    def returns(self) -> bool:
        return self.load.has_ended


class KVLoads:
    """Owns the requests that wait for the KV store, and the blocks that are loaded for them."""

    def __init__(
        self,
        config: EngineConfig,
        connection: KVStoreConnection,
        copies: CopiesInFlight,
        blocks: RequestBlocks,
        in_flight: PlansInFlight,
        running: RunningRequests,
        token_budget: TokenBudget,
        stats: EngineStats,
    ) -> None:
        self._store, self._copies, self._in_flight, self._stats = connection, copies, in_flight, stats
        self._running, self._token_budget = running, token_budget
        self._is_chunked = config.scheduler.enable_chunked_prefill
        self._blocks, self._kv, self._kinds = blocks, blocks.kv, connection.kinds
        self._row_tokens = config.scheduler.max_num_batched_tokens
        self._max_expected = config.cache.num_blocks // config.cache.blocks_per_page // _EXPECTED_SHARE
        self._min_tokens = 0 if config.kv_store is None else config.kv_store.min_tokens
        self._choice = LoadChoice(self._kv, self._kinds, token_budget, self._min_tokens)
        self._max_turns = config.scheduler.depth + 2
        """Turns of the loop that a load takes even if store and ranks take no time."""
        self._polled_at, self._polled_steps = -math.inf, (0, 0)
        """Time of the last poll, and how many plans had been made and results had arrived."""
        self._waiting: dict[Request, None] = {}
        """All requests that are in no queue because they wait for the store."""
        self._startable: dict[Request, None] = {}
        """Those of them that may be queued."""
        self._asked: dict[int, _LookUp] = {}
        """By call."""
        self._reserved: dict[Request, int] = {}
        """Pages that requests will need to start, in addition to those already held for them."""
        self._refused: Counter[Request] = Counter()
        """How often there was no memory for a request's load, or the load had to give it up."""
        self._short: tuple[Request, int] | None = None
        """The last request that did not find enough memory, and the pages that were free for it then."""
        self._num_hashed = 0
        """Tokens that have been hashed for look-ups since the last `poll`."""
        self._settled: set[Request] = set()
        """Requests that are not looked up (again): they start with what the prefix cache has."""
        self._loaded: dict[Request, PrefixLoad] = {}
        """Ended loads of requests that have not started, the oldest first."""
        self._beside: dict[Request, PrefixLoad] = {}
        """Loads whose requests compute beside them, and so are queued or run. A load that ended while its request runs
        has no blocks, and stays here until the next plan (`take_met`)."""
        self._loads: dict[int, PrefixLoad] = {}
        """Loads that have not ended, by call, the oldest first."""
        self._loading: dict[KVEntry, PrefixLoad] = {}
        """Their entries, except those of loads that wait for another replica to compute them."""
        self._expected: dict[Request, None] = {}
        """Requests that have not arrived yet (`expect`)."""

    # --- requests ---------------------------------------------------------------------------------------------

    def take(self, request: Request, num_places: int) -> bool | None:
        """Whether the next request to admit must leave the queue and wait for the store until `take_startable` returns
        it. None: it must wait in the queue, because enough other requests for the `num_places` free places wait for the
        store, or this plan has hashed enough tokens."""
        if not self._store.is_open or self._store.is_late or request in self._settled or request in self._beside:
            return False
        if self._copies.are_failing:
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
        # Asking before there is memory to start is useless: the answer may change until then. A loaded state takes a
        # page in addition to the request's own.
        needed = kv.max_pages_needed(len(request.token_ids), self._row_tokens, cached) + len(kv.scarce)
        while not kv.can_allocate(needed + self.num_reserved(request), cached_blocks=kv.without_freed(cached)):
            if not self.make_way(request, only_expected=True):
                self._short = request, num_free
                return False
        self._reserved[request] = needed
        # With windows, entries before the end of what is cached may be needed, too.
        start = 0 if kv.windows else len(cached) // stride
        call_id, held = self._store.number(), kv.without_freed(cached)
        kv.touch(held)
        self._asked[call_id] = _LookUp(request, start, time.monotonic() + _ANSWER_SECONDS, held)
        # If the request was handed over, the other replica may still be storing its last entries.
        core_request = request.core_request
        was_handed_over = request.is_resumed and not core_request.hands_over
        self._store.send(LookUpKV(call_id, hashes[start * stride :: stride], was_handed_over, core_request.kv_peer))
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

    def take_met(self) -> list[Request]:
        """Return the running requests that have met their loads: they must stop running and `rejoin`. Others whose
        loads have ended, or have little left to bring, continue without them."""
        met = list[Request]()
        for request, load in [*self._beside.items()] if self._beside else ():
            if request.slot is None:
                if load.has_ended:  # it has been preempted since
                    self.rejoin(request)
                continue
            num_left = load.length * self._kv.block_size - request.num_computed_tokens
            if has_met := num_left >= self._min_tokens and self._choice.has_met(load):
                load.num_cached = request.num_computed_tokens // self._kv.block_size
                met.append(request)
            elif load.has_ended:
                self._stats.kv_failed_load_tokens += max(0, num_left)
            if not load.has_ended and (has_met or num_left < self._min_tokens):
                load.unanswered.clear()  # it does not fail, but brings less
                self._end(load)
            if load.has_ended and not has_met:
                del self._beside[request]
        return met

    def rejoin(self, request: Request) -> None:
        """Hold the prefix that a request of `take_met` and its load have produced until the request starts again."""
        kv, load = self._kv, self._beside.pop(request)
        found = kv.match(request.hashes[: load.length * kv.num_groups])
        load.blocks, self._loaded[request] = [*kv.without_freed(found)], load
        kv.touch(load.blocks)
        self._settled.add(request)
        self._reserved[request] = max(0, kv.max_pages_needed(len(request.token_ids), self._row_tokens, found))

    def row_tokens(self, request: Request) -> int:
        """Return the maximum tokens of a request's next row."""
        return sys.maxsize if (load := self._beside.get(request)) is None else self._choice.row_tokens(load)

    def awaits_copies(self, request: Request) -> bool:
        """Whether a running request gets no row until the ranks have copied the rest of its load. This lasts no longer
        than computing the rest would take."""
        if (load := self._beside.get(request)) is None or load.has_ended or not self._choice.awaits_copies(load):
            return False
        if not load.is_awaited:
            load.is_awaited = True
            load.limit = min(load.limit, time.monotonic() - load.began + self._choice.rest_seconds(load))
        return True

    def num_reserved(self, request: Request) -> int:
        """Free pages reserved for other requests, which wait for the store or have blocks from it."""
        return sum(self._reserved.values()) - self._reserved.get(request, 0) if self._reserved else 0

    @property
    def waiting(self) -> Collection[Request]:
        """The requests that are in no queue because of the store, the oldest first."""
        return self._waiting

    def is_waiting(self, request: Request) -> bool:
        """Whether a request is in no queue because of the store."""
        return request in self._waiting

    def start(self, request: Request, length: int) -> PrefixLoad | None:
        """Note that a request starts, with `length` cached blocks of each group; returns its load."""
        self._forget(request)
        size, num_prompt = self._kv.block_size, request.num_prompt_tokens
        if (load := self._loaded.pop(request, None)) is None:
            return None
        self._give_up(load)
        self._stats.kv_failed_load_tokens += max(0, load.length - max(load.num_cached, length)) * size
        is_first = request.num_cached_tokens is None
        if not is_first and (not load.is_beside or request.preempted_after):
            return load  # its tokens were counted when it first started
        counts, slowest = Counter[int](), dict[int, int]()
        for own, tier in zip(load.places, load.tiers, strict=True):
            index = own[0] // self._kv.num_groups
            slowest[index] = max(tier, slowest.get(index, MEMORY))
        for index in range(load.num_cached, min(load.length, length)):
            counts[slowest.get(index, MEMORY)] += min(max(0, num_prompt - index * size), size)
        if not request.is_resumed:
            self._stats.kv_loaded_memory_tokens += counts[MEMORY]
            self._stats.kv_loaded_disk_tokens += counts[DISK]
            self._stats.kv_loaded_peer_tokens += counts[PEER]
        request.num_loaded_tokens = counts[MEMORY], counts[DISK], counts[PEER]
        if request.num_cached_tokens is not None:
            request.num_cached_tokens += counts.total()
            self._stats.prefix_hit_tokens += 0 if request.is_resumed else counts.total()
        return load

    def finish(self, request: Request) -> None:
        """Remove a request that has ended and does not run."""
        self._forget(request)
        if (load := self._loaded.pop(request, None)) is not None:
            self._give_up(load)
        is_beside = self._beside.pop(request, None) is not None
        if is_beside or request in self._waiting or request in self._expected:
            self._waiting.pop(request, None)
            self._expected.pop(request, None)
            self._startable.pop(request, None)
            for call_id in [call_id for call_id, asked in self._asked.items() if asked.request is request]:
                self._answered(call_id)
            for load in [load for load in self._loads.values() if load.request is request]:
                self._end(load)

    def expect(self, request: Request) -> None:
        """Load the prompt that another replica is computing, as that replica stores it, if there is memory. The request
        arrives later (`arrive`), or never (`finish`)."""
        self._expected[request] = None
        if self._store.is_open and not self._copies.are_failing:
            hashes = self._blocks.reusable_hashes(request)
            if (load := self._choice.expected(request, hashes)) is not None:
                self._send(load, hashes)

    def arrive(self, expected: Request, request: Request) -> bool:
        """Give a request the blocks that were loaded for it while it was `expected`; returns whether it must wait for
        the rest."""
        hashes = self._blocks.reusable_hashes(request)
        load = self._loaded.get(expected) or next((e for e in self._loads.values() if e.request is expected), None)
        length = 0 if load is None else load.length * self._kv.num_groups
        if load is None or hashes[:length] != expected.hashes[:length]:
            self.finish(expected)
            return False
        del self._expected[expected]
        self._loaded.pop(expected, None)
        if expected in self._reserved:
            self._reserved[request] = self._reserved[expected]
        self._forget(expected)
        load.request = request
        if load.has_ended:
            self._loaded[request] = load
            self._settled.add(request)
            return False
        load.began, load.limit, self._waiting[request] = time.monotonic(), self._choice.limit(load), None
        self._store.send(SettleKV(load.call_id))
        return True

    def on_found(self, message: FoundKV) -> None:
        """Process the answer to a look-up."""
        if (asked := self._asked.get(message.call_id)) is not None:
            if len(message.tiers) == len(self._kinds):
                self._begin(asked.request, Found(asked.start, message.tiers))
            else:
                self._let_start(asked.request, is_settled=True)
            self._answered(message.call_id)

    def _answered(self, call_id: int) -> None:
        """Forget a look-up."""
        self._kv.free(self._asked.pop(call_id).blocks)

    def _give_up_waiting(self, call_id: int) -> None:
        """Let the request start whose look-up got no answer."""
        self._let_start(self._asked[call_id].request, is_settled=True)
        self._answered(call_id)

    def _forget(self, request: Request) -> None:
        self._reserved.pop(request, None)
        self._refused.pop(request, None)
        self._settled.discard(request)
        if self._short is not None and self._short[0] is request:
            self._short = None

    def _let_start(self, request: Request, *, is_settled: bool) -> None:
        """Let a waiting request be queued. `is_settled`: it is not looked up again, and starts with what the prefix
        cache has then."""
        if request in self._waiting:
            self._startable[request] = None
            if request not in self._loaded and request not in self._beside:
                self._reserved.pop(request, None)
            if is_settled:
                self._settled.add(request)

    # --- loads ------------------------------------------------------------------------------------------------

    def _begin(self, request: Request, found: Found) -> None:
        """Begin the best load for a waiting request; if none is worth it, let the request start."""
        hashes = self._blocks.reusable_hashes(request)
        ahead = sum((load.left for load in self._loads.values() if not load.waits), Counter[int]())
        load = self._choice.choose(
            request, hashes, found, ahead, self._busy, may_compute=self._may_compute(request, hashes)
        )
        if load is None:
            return self._let_start(request, is_settled=True)
        if (other := next((self._loading[each] for each in load.entries if each in self._loading), None)) is not None:
            self._reserved.pop(request, None)
            return other.followers.append(request)
        if not self._send(load, hashes):
            self._refused[request] += 1
            self._let_start(request, is_settled=self._refused[request] >= _MAX_REFUSED)
        elif load.is_beside:
            self._beside[request] = load
            self._let_start(request, is_settled=True)

    @property
    def _queued_beside(self) -> list[PrefixLoad]:
        """The loads of queued requests that will compute beside them."""
        return [load for request, load in self._beside.items() if request.slot is None]

    @property
    def _busy(self) -> float:
        """Predicted seconds of the prompts that run, or that will be computed beside their loads."""
        prompts = [(each, each.num_computed_tokens) for each in self._running.prefilling]
        prompts += [(load.request, load.num_cached * self._kv.block_size) for load in self._queued_beside]
        prompt_seconds = self._token_budget.prompt_seconds
        return sum(prompt_seconds(start, len(request.token_ids)) or 0.0 for request, start in prompts)

    def _may_compute(self, request: Request, hashes: list[bytes]) -> bool:
        """Whether a waiting request can compute beside its load: there is a place in the batch, and memory for both; it
        need not wait for anything else; and no other replica is storing its prompt."""
        kv, cached = self._kv, self._kv.match(hashes)
        is_stored_now = request.is_resumed and not request.core_request.hands_over
        if not self._is_chunked or is_stored_now or len(self._running.free_slots) <= len(self._queued_beside):
            return False
        if request.media_end > kv.num_tokens_in(len(cached)):
            return False
        needed = 2 * self._reserved[request] + self.num_reserved(request)
        return kv.can_allocate(needed, cached_blocks=kv.without_freed(cached))

    def _send(self, load: PrefixLoad, hashes: list[bytes]) -> bool:
        """Begin a load, if there is memory for it; returns whether there is."""
        kv, request = self._kv, load.request
        missing = sorted(chain.from_iterable(load.places))
        load.blocks = [FREED] * (load.length * kv.num_groups)
        cached = sorted({*kv.visible_places(load.length)}.difference(missing))
        held = [kv.cached_block(hashes[place]) for place in cached]
        needed = max(0, kv.max_pages_needed(len(request.token_ids), self._row_tokens, load.blocks))
        if load.is_beside:
            needed = self._reserved.get(request, 0)
        load.num_pages = kv.pages_for_places(missing) + needed
        if load.waits and self._num_expected and self._num_expected + load.num_pages > self._max_expected:
            return False
        if not kv.can_allocate(load.num_pages + self.num_reserved(request), cached_blocks=held):
            return False
        if request.slot is None:  # a running one has its pages
            self._reserved[request] = needed
        kv.touch(held)
        for place, block in zip(cached, held, strict=True):
            load.blocks[place] = block
        kv.allocate_places(load.blocks, missing)
        load.call_id, load.arena = self._store.number(), self._store.arena
        load.began = math.inf if load.waits else time.monotonic()
        load.unanswered, load.left = {*range(len(load.entries))}, load.work.copy()
        self._loads[load.call_id] = load
        self._loading |= {} if load.waits else dict.fromkeys(load.entries, load)
        stride = kv.num_groups
        parents = [hashes[(at - 1) * stride] if (at := own[0] // stride) else b"" for own in load.places]
        peer = request.core_request.kv_peer if load.waits else ""
        self._store.send(LoadKV(load.call_id, load.entries, parents, load.waits, peer))
        return True

    def on_loaded(self, message: LoadedKV) -> None:
        """Have the ranks copy the entries that the store has brought."""
        if (load := self._loads.get(message.call_id)) is None:
            return
        for number, offset in zip(message.numbers, message.offsets, strict=False):
            if number not in load.unanswered:
                continue
            load.unanswered.discard(number)
            entry, places = load.entries[number], load.places[number]
            if not self._store.has_place(entry.kind, offset):
                load.has_failed = True
                load.left[load.tiers[number]] -= self._kinds[entry.kind].size
                continue
            copy = KVCopy(self._store.number(), entry.kind, offset, [load.blocks[place] for place in places])
            for place in places:
                load.blocks[place] = FREED
            load.num_copying += 1
            self._copies.by_number[copy.number] = LoadCopy(
                copy, load.arena, self._copies.ranks, load=load, places=places, number=number
            )
            self._copies.plan.loads.append(copy)
        failed = load.unanswered.intersection(message.failed)
        load.unanswered -= failed
        for number in failed:
            load.left[load.tiers[number]] -= self._kinds[load.entries[number].kind].size
        load.has_failed |= bool(failed)
        if load.is_beside and failed:
            self._shorten(load, self._choice.length_without(load, failed))
        self._check_end(load)

    def _shorten(self, load: PrefixLoad, length: int) -> None:
        """Limit a load whose request computes beside it to the first `length` blocks of each group: later blocks are of
        no use."""
        if length == load.length:
            return
        rest, request = self._choice.shortened(load, length), load.request
        self._end(load)
        if rest is not None and self._send(rest, request.hashes):
            if self._loaded.pop(request, None) is not None:
                self._give_up(load)
            self._beside[request] = rest
            self._stats.kv_failed_load_tokens += (load.length - length) * self._kv.block_size

    def on_copied(self, ended: Collection[LoadCopy]) -> None:
        """Take the blocks of copies that all ranks have answered, and release the entries."""
        read = defaultdict[PrefixLoad, list[int]](list)
        for copy in ended:
            self._finish_copy(copy, has_failed=copy.has_failed)
            read[copy.load].append(copy.number)
        for load, numbers in read.items():
            if not load.is_released and load.arena == self._store.arena:
                self._store.send(ReleaseKV(load.call_id, numbers))

    def _finish_copy(self, copy: LoadCopy, *, has_failed: bool) -> None:
        """Take the blocks of a copy that no rank reads or writes any more."""
        del self._copies.by_number[copy.planned.number]
        blocks, load = copy.planned.blocks, copy.load
        load.num_copying -= 1
        load.left[load.tiers[copy.number]] -= self._kinds[copy.planned.kind].size
        load.has_failed |= has_failed
        if not has_failed:
            for place, block in zip(copy.places, blocks, strict=True):
                self._blocks.publish_loaded(load.request, place, block)
        if has_failed or load.has_ended:
            self._kv.free(blocks)
        else:
            for place, block in zip(copy.places, blocks, strict=True):
                load.blocks[place] = block
        self._check_end(load)

    def _deadline(self, load: PrefixLoad) -> float:
        """When a load is late (`time.monotonic`)."""
        return load.began + load.limit + self._max_turns * load.slowest_turn

    def _check_end(self, load: PrefixLoad) -> None:
        """End a load of which everything has arrived or failed; release entries that no rank reads any more."""
        if not load.has_ended and not load.unanswered and not load.num_copying:
            self._end(load)
        elif load.has_ended and not load.num_copying and not load.is_released and load.arena == self._store.arena:
            load.is_released = True
            self._store.send(ReleaseKV(load.call_id))

    def _end(self, load: PrefixLoad) -> None:
        """End a load with what has arrived. Copies in flight keep their blocks until the ranks have answered."""
        load.has_ended = True
        load.has_failed |= bool(load.unanswered)
        # The part that arrived says how fast the tiers are, even if the request needs no more.
        work = Counter[int]() if load.has_failed or load.waits else load.work - load.left
        del self._loads[load.call_id]
        for entry in load.entries if not load.waits else ():
            del self._loading[entry]
        planned, self._copies.plan.loads = self._copies.plan.loads, []
        for each in planned:
            copy = self._copies.by_number[each.number]
            if isinstance(copy, LoadCopy) and copy.load is load:
                self._finish_copy(copy, has_failed=True)
            else:
                self._copies.plan.loads.append(each)
        kv, request = self._kv, load.request
        hashes = request.hashes[: load.length * kv.num_groups]
        seconds = max(0.0, time.monotonic() - load.began)
        self._stats.kv_loads += 1
        self._stats.kv_load_seconds += seconds
        if work:
            self._choice.rates.learn(work + load.ahead, seconds)
        found = {*kv.match(hashes)}
        kv.free([block for block in load.blocks if block >= 0 and block not in found])
        load.blocks = [block for block in load.blocks if block in found]
        if is_queued := request in self._beside and request.slot is None:
            del self._beside[request]
            self._settled.add(request)
        if is_queued or request in self._waiting or request in self._expected:
            self._loaded[request] = load
            self._let_start(request, is_settled=True)
        else:
            self._give_up(load)
        for follower in load.followers:
            self._let_start(follower, is_settled=load.has_failed)
        self._check_end(load)

    def make_room(self, num_pages: int) -> None:
        """Free blocks of the newest loads until this many pages are free, if that helps: running requests need them.
        A load whose blocks are all being copied has nothing to give now."""
        for load in [*reversed(self._loads.values())]:
            if self._kv.num_free >= num_pages:
                return
            if all(block == FREED for block in load.blocks):
                continue
            self._end(load)
            if load.request.slot is None:  # a running one goes on, see `take_met`
                self._let_go(load.request)
        while self._kv.num_free < num_pages and self.make_way(None):
            pass

    def make_way(self, first: Request | None, *, only_expected: bool = False) -> bool:
        """Free the blocks of the newest load for a request that has not arrived yet. If there is none, and unless
        `only_expected`, free those of the newest load that has ended; the load of the request that is to start `first`
        comes last. Returns whether there was one."""
        load = next((load for load in reversed(self._loads.values()) if load.request in self._expected), None)
        if load is not None:
            self._end(load)
        requests = [request for request in self._loaded if request in self._expected]
        if not requests and not only_expected:
            requests = sorted(self._loaded, key=lambda request: request is not first)
        if requests:
            self._let_go(requests[-1])
        return bool(requests)

    @property
    def _num_expected(self) -> int:
        """Pages of loads for requests that have not arrived yet."""
        loads = chain(self._loads.values(), self._loaded.values())
        return sum(load.num_pages for load in loads if load.request in self._expected)

    def close(self) -> None:
        """End all look-ups and loads: there is no store."""
        for call_id in [*self._asked]:
            self._give_up_waiting(call_id)
        for load in [*self._loads.values()]:
            self._end(load)

    def reset(self) -> None:
        """Forget all loads, in progress and ended."""
        for load in [*self._loads.values()]:
            self._end(load)
        for load in self._loaded.values():
            self._give_up(load)
        self._beside.clear()

    def _let_go(self, request: Request) -> None:
        """Free the blocks that were loaded for a request. If it runs, it continues without them; otherwise it is looked
        up again, unless this has happened too often."""
        if (load := self._loaded.pop(request, None)) is not None:
            self._give_up(load)
        self._beside.pop(request, None)
        self._reserved.pop(request, None)
        self._refused[request] += 1
        if self._refused[request] < _MAX_REFUSED:
            self._settled.discard(request)

    def _give_up(self, load: PrefixLoad) -> None:
        self._kv.free([block for block in load.blocks if block >= 0])
        load.blocks = []

    # --- time -------------------------------------------------------------------------------------------------

    def begin_turn(self, now: float) -> None:
        """Begin a turn of the loop, in which a bounded number of tokens is hashed."""
        self._num_hashed, steps = 0, (self._in_flight.next_step, self._in_flight.last_finished)
        for load in self._loads.values() if steps != self._polled_steps else ():
            load.slowest_turn = max(load.slowest_turn, now - max(load.began, self._polled_at))
        self._polled_at, self._polled_steps = now, steps

    def end_late(self, now: float) -> None:
        """End look-ups and loads that take too long."""
        for call_id in [call_id for call_id, asked in self._asked.items() if asked.deadline <= now]:
            self._store.is_late = True
            self._give_up_waiting(call_id)
        for load in [*self._loads.values()] if self._loads else ():
            if self._deadline(load) <= now:
                self._end(load)

    @property
    def due(self) -> float:
        """When the next look-up or load would be late (`time.monotonic`)."""
        asked = (asked.deadline for asked in self._asked.values())
        return min(chain(asked, map(self._deadline, self._loads.values())), default=math.inf)

    @property
    def num_waiting(self) -> int:
        """Requests that are in no queue because they wait for the store."""
        return len(self._waiting)

    @property
    def has_startable(self) -> bool:
        """Whether requests may be in the queue again."""
        return bool(self._startable)

    @property
    def are_under_way(self) -> bool:
        """Whether there are look-ups or loads that have not ended."""
        return bool(self._loads or self._asked)

    def block_lists(self) -> Iterator[list[int]]:
        """The blocks of look-ups and loads."""
        yield from (asked.blocks for asked in self._asked.values())
        for load in (*self._loads.values(), *self._loaded.values()):
            yield [block for block in load.blocks if block >= 0]

    def check_integrity(self, requests: Collection[Request]) -> Collection[Request]:
        """Assert the invariants between two plans; returns the requests that are in no queue."""
        assert self._waiting.keys() <= {*requests}
        assert self._startable.keys() <= self._waiting.keys()
        assert {*self._refused, *self._settled, *self._loaded, *self._beside} <= {*requests, *self._expected}
        served = self._waiting.keys() | self._expected.keys() | self._beside.keys()
        assert self._reserved.keys() <= served | self._loaded.keys()
        assert self._expected.keys().isdisjoint(requests)
        assert all(load.request in served for load in self._loads.values())
        for request, load in self._beside.items():
            assert load.request is request
            assert (load.call_id in self._loads) != load.has_ended
        followers = {request for load in self._loads.values() for request in load.followers}
        for request in self._waiting:
            is_asked = any(asked.request is request for asked in self._asked.values())
            is_loading = request not in self._beside and any(e.request is request for e in self._loads.values())
            assert is_asked + is_loading + (request in followers) + (request in self._startable) == 1
        loads = [load for load in self._loads.values() if not load.waits]
        assert self._loading.keys() == {entry for load in loads for entry in load.entries}
        copies = [copy for copy in self._copies.by_number.values() if isinstance(copy, LoadCopy)]
        loading = Counter(copy.load for copy in copies)
        for load in self._loads.values():
            assert load.unanswered or load.num_copying
            assert load.num_copying == loading[load]
            assert len(load.blocks) == load.length * self._kv.num_groups
        for copy in copies:
            assert not any(map(self._kv.is_cached, copy.planned.blocks)), "a block is found before it is loaded"
        return self._waiting
