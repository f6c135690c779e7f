"""Chooses the replica that is expected to answer a request first. Pure bookkeeping, without I/O; the clock is passed
in.

Cost is measured in tokens to compute before the request's own first token. The cost at a replica is its slowness times
the sum of

      the request's tokens that are not cached there; tokens that only the KV store has count in part
    + as many of its cached tokens as the replica was recently sent above its share (`FAIR_SHARE`)
    + `ADAPTER_TOKENS`, if the replica was not recently sent a request with the same adapter
    + prompt tokens of requests that were sent there and have no token yet
    + `DECODE_TOKENS` for each other request there
    + the length of an output for each request that must finish before this one can start

A decode costs more than the token that it adds to a step: it reads its context and the weights, and it will continue.
When `max_num_seqs` requests are running, one finishes per output length of computed tokens. A replica without room for
the request in its KV cache comes after all replicas with room: other requests must finish there or be preempted, and no
number of tokens says when. The second term is for a prefix that all requests share: as long as one replica can answer
them all, nothing else would bring the prefix to another replica. It is at most the advantage of the cache, so it never
sends a request to a replica that is busier than that. Among equal replicas, the one that was recently sent the fewest
tokens is chosen.

Slowness is the time that a replica takes per computed token, relative to the fastest replica. It is measured for each
request, from when the replica first schedules it until its first token. A replica that has sent nothing since its
oldest request without a token was sent, or for some time, is at least as slow as this silence shows, so a replica that
hangs becomes slower all the time. Without new measurements, slowness is gradually forgotten, so a replica that has
recovered is tried again.

With roles, the router first chooses among the replicas that are not *prefill*, if there are any. It then considers the
prefill replicas that use the same KV store as this decode replica, or a store that this one reads. The best of them
computes the prompt if the full blocks that are not cached at the decode replica have at least as many tokens as the
store keeps (`KVStoreConfig.min_tokens`), and if the request loses no more by it than other requests gain:

      cost at the prefill replica             <= cost at the decode replica
      + pause                                    + slowness * tokens not computed there * requests there
      + lost part * cost at the decode replica   + slowness * `DECODE_TOKENS`

The right side gains because each prompt token that a replica computes delays all other requests there. The lost part is
KV that does not arrive and is computed at the decode replica in the end, after everything that was sent there before.
The last term is for a request that has ended at the prefill replica since its newest stats, so that equal prompts to
idle replicas are computed in the same place. The prefill replica must have room, unless the decode replica has none
either, and both stores must have room for the prompt beside the prompts that were handed over and have not had a step
yet. So when prefill replicas are overloaded, or decode replicas are full, decode replicas compute prompts, too.

On one host, there is no pause, and nothing is lost. Between two hosts, the pause is the time from the first token to
the second, above `_USUAL_PAUSE`, in tokens of the fastest replica, and the lost part is the part of the KV that does
not arrive. Both are measured for each pair of stores. Without a measurement, and increasingly as it gets old, the
router assumes that nothing is lost, and that the pause is the time in which the KV that is not cached arrives at
`_PEER_BANDWIDTH`, less the time in which it is computed, because both overlap. Only one request at a time relies on
this assumption: while one is in flight between two stores, only the measurement counts, however old, and if there is
none, no other request goes there. Among equal replicas, those of the same host come first.

The contents of caches come from `PrefixCaches`, which estimates them from the requests sent, or knows them from KV
events. The current load is known for this process's requests; for other processes' requests, it comes from the
replica's newest stats.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine.config.engine_config import CacheConfig, KVStoreConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.stats import EngineStats
from quire.engine.protocol.supervision import ReplicaRole
from quire.server.client.prefix_caches import PrefixCaches

DECODE_TOKENS = 32
"""Tokens by which a running request delays the prompt of another."""
ADAPTER_TOKENS = 64
"""Tokens that take as long as getting an adapter onto a device."""
FAIR_SHARE = 1.25
"""Factor by which a replica may exceed its share of the recently sent tokens, by speed, because of its cache."""
_DECAY_REQUESTS = 64
"""Requests per replica after which the weight of sent tokens decays to about a third."""
_FIRST_GUESS = 128.0
"""Assumed tokens of an output, and of a prompt sent by another process, before any was seen."""
_AVERAGE_WEIGHT = 0.05
"""Weight of the newest value in a moving average."""
_KEPT = 0.8
"""Weight of earlier measurements after each new one."""
_STEP_TOKENS = 64
"""Tokens that a step's fixed time is worth."""
_USUAL_SLOWNESS = 1.5
"""Replicas whose measured times differ by less than this factor are equally fast."""
_HALF_LIFE_SECONDS = 10.0
"""Time in which a measurement loses half its weight; without new ones, the logarithm of the slowness is halved."""
_LINK_HALF_LIFE_SECONDS = 60.0
"""The same for pauses between hosts."""
_USUAL_PAUSE = 0.1
"""Seconds before the second token that do not count."""
_MOST_UNEXPECTED = 3
"""A pause counts as at most this many times the expected pause, plus `_USUAL_PAUSE`: a single long one says little."""
_PEER_BANDWIDTH = 128 << 20
"""Assumed bytes per second from the store of another host, until some have been measured."""
_FIRST_PACE = 0.0002
"""Assumed seconds per token of the fastest replica, until some have been measured."""
_LINK_SECONDS = 3600.0
"""Time after which a measurement between hosts is forgotten."""
_PAUSE_TOKENS = 1024
"""Number of tokens whose KV takes as long as the fixed part of a pause."""


class ReplicaPlace(NamedTuple):
    """The role of a replica, and the KV stores that it can use."""

    role: ReplicaRole = "any"
    store: str = ""
    """The KV store that it reads and writes; replicas of one store can hand over to each other. Empty: none is up."""
    reads: frozenset[str] = frozenset()
    """The KV stores of other hosts that this one reads from."""


@dataclass(slots=True)
class _PlacedRequest:
    """An unfinished request of this process."""

    replica: int
    request: EngineCoreRequest
    hashes: list[Any]
    """Of its full blocks (`PrefixCaches.hashes`)."""
    pending: int
    """Tokens to compute before its next token; 0 once that has arrived."""
    blocks: int
    """KV blocks that it will allocate until then."""
    placed_at: float
    ahead: int
    """Tokens to compute at the replica before its first token, as known when it was placed."""
    successor: int | None = None
    """The replica on which it continues after its first token; None: it stays. It counts as open there, too."""
    later_blocks: int = 0
    """KV blocks that it will allocate there."""
    stores: tuple[str, ...] = ()
    """If it is handed over: the KV store of its prompt, and the one of its successor."""
    moves: int = 0
    """Tokens whose KV the successor lacks."""
    stored: int = 0
    """If it was handed over: tokens that these stores keep for it until its next token."""


@dataclass(slots=True)
class _ReplicaLoad:
    """The requests that this process has sent to a replica."""

    adapters: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Digests of the adapters on its device, in order of last use."""
    open: int = 0
    pending: int = 0
    blocks: int = 0
    """The sum over its unfinished requests."""
    sent: float = 0.0
    """Tokens recently sent to it, for prompts and outputs."""
    waiting: dict[str, _PlacedRequest] = field(default_factory=dict)
    """Its requests without a first token, the oldest first."""
    output_at: float = 0.0
    """Time of its last output."""
    seconds: float = 0.0
    """Times in which it has computed recent first tokens: a decaying sum."""
    tokens: float = 0.0
    """The tokens that it has computed for these; 0: nothing has been measured."""
    measured_at: float = 0.0
    recomputed: float = 0.0
    """The part of prompts handed over to it whose KV it did not find: a moving average."""

    @property
    def pace(self) -> float:
        """Seconds per token; 0: not known."""
        return self.seconds / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class _Link:
    """The losses of requests that were handed over from one store to another."""

    seconds: float = 0.0
    """A decaying sum of their pauses."""
    tokens: float = 0.0
    """The matching sum of tokens: those whose KV had to move, and `_PAUSE_TOKENS` for each request."""
    lost: float = 0.0
    """The part of the KV that did not arrive: for the last request, or half of the value before it, whichever is
    more."""
    measured_at: float = 0.0


class Router:
    """Load and caches of the replicas, as known to one API process."""

    def __init__(
        self,
        replicas: Sequence[int],
        *,
        cache: CacheConfig | None = None,
        num_adapters: int = 0,
        max_num_seqs: int = 1,
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
        caches: PrefixCaches | None = None,
        store: KVStoreConfig | None = None,
    ) -> None:
        """Without `cache`, there are no cached prefixes. `caches` knows the caches; None: they are estimated. `store`
        is the configuration of a host's KV store, if there is one. A replica's device has room for `num_adapters`.
        `first` rotates the order of equal replicas, so that API processes differ. `clock` returns the time in seconds.
        """
        self._clock = clock
        self._loads = {number: _ReplicaLoad() for number in replicas}
        self._first = first
        self._placed: dict[str, _PlacedRequest] = {}
        self._links: dict[tuple[str, ...], _Link] = {}
        """By the store of the prompt and the store of the decode."""
        self._max_num_seqs, self._num_adapters = max_num_seqs, num_adapters
        self._block_size = cache.block_size if cache else 0
        self._num_groups = len(cache.groups) if cache else 1
        self._num_blocks = cache.num_blocks if cache else 0
        self._caches = caches or PrefixCaches(cache)
        self._store = store or KVStoreConfig(memory_bytes=0)
        size = self._store.memory_bytes + self._store.disk_bytes
        self._bytes_per_token = size / self._store.num_tokens if self._store.num_tokens else 0.0
        """Bytes of KV per token; 0: not known."""
        self._output = self._prompt = _FIRST_GUESS
        """Average tokens of an output, and of a prompt to compute."""

    def place(
        self,
        submit: EngineCoreRequest,
        stats: Mapping[int, EngineStats],
        places: Mapping[int, ReplicaPlace] | None = None,
    ) -> int:
        """Choose a replica for a request, given the replicas' newest stats, and record the request as sent. Without
        `places`, all replicas have the role "any". Afterwards, `successor` says whether the request continues
        elsewhere.
        """
        length = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        digest = b"" if submit.adapter is None else submit.adapter.digest
        hashes = self._caches.hashes(submit)
        spares = submit.params.prompt_logprobs is None or bool(submit.output_token_ids)
        cached_at = {number: self._caches.num_cached(number, hashes if spares else []) for number in stats}
        missing_at = {number: max(1, length - cached) for number, cached in cached_at.items()}
        uncached_at = {
            number: max(1, length - self._caches.num_saved(number, hashes, cached)) if spares else length
            for number, cached in cached_at.items()
        }
        fastest = self._fastest(stats)
        slowness = self._slowness(list(stats), fastest, self._clock())
        prefill = {number for number in stats if places and places[number].role == "prefill"}
        groups = [each for each in (stats.keys() - prefill, prefill) if each]
        excess = {number: each for group in groups for number, each in self._excess(slowness, group).items()}
        costs = {
            number: slowness[number]
            * (
                min(length, uncached + excess[number])
                + ADAPTER_TOKENS * (bool(digest) and digest not in self._loads[number].adapters)
                + self._num_queued(number, stats[number])
            )
            for number, uncached in uncached_at.items()
        }
        room = {number: self._has_room(number, missing_at[number], stats[number]) for number in stats}

        def rank(number: int, delay: float = 0.0, *, is_far: bool = False) -> tuple[bool, float, bool, float, int]:
            sent, order = self._loads[number].sent * slowness[number], (number - self._first) % len(self._loads)
            return not room[number], costs[number] + delay, is_far, sent, order

        chosen = last = min(groups[0], key=rank)
        in_blocks = uncached_at[last] - length % max(1, self._block_size)
        stores: tuple[str, ...] = ()
        if places and last not in prefill and in_blocks >= self._store.min_tokens and (own := places[last].store):
            under_way = {each.stores for load in self._loads.values() for each in load.waiting.values()}
            losses = {
                number: self._loss(pair, uncached_at[last], fastest, is_measured=pair in under_way)
                for number in prefill
                if (pair := (places[number].store, own))[0] in {own, *places[last].reads}
            }
            delays = {
                number: max(0.0, pause - _USUAL_PAUSE) / (fastest or _FIRST_PACE) + lost * costs[last]
                for number, (pause, lost) in losses.items()
            }
            ranks = {number: rank(number, delays[number], is_far=places[number].store != own) for number in losses}
            first = min(ranks, key=ranks.__getitem__, default=last)
            stores = places[first].store, own
            if first != last and room[first] >= room[last] and self._have_space(stores, length):
                came = uncached_at[last] * (1 - losses[first][1])
                gained = came * self._num_there(last, stats[last]) + DECODE_TOKENS
                if costs[first] + delays[first] <= costs[last] + slowness[last] * gained:
                    chosen = first
        blocks = self._num_new_blocks(missing_at[chosen])
        placed = self._add(submit, chosen, hashes, uncached_at[chosen], blocks)
        self._caches.on_placed(chosen, hashes, stats[chosen].kv_blocks)
        if chosen != last and submit.params.max_tokens != len(submit.output_token_ids) + 1:
            placed.successor, placed.later_blocks = last, self._num_new_blocks(missing_at[last])
            placed.stores, placed.moves = stores, uncached_at[last]
            self._loads[last].open += 1
            self._loads[last].blocks += placed.later_blocks
        self._prompt += (placed.pending - self._prompt) * _AVERAGE_WEIGHT
        return chosen

    def _add(
        self, request: EngineCoreRequest, replica: int, hashes: list[Any], pending: int, blocks: int
    ) -> _PlacedRequest:
        """Record a request as sent to a replica, which will compute `pending` tokens and allocate `blocks` for it."""
        load = self._loads[replica]
        placed = _PlacedRequest(
            replica=replica,
            request=request,
            hashes=hashes,
            pending=pending,
            blocks=blocks,
            placed_at=self._clock(),
            ahead=load.pending + pending,
        )
        self._placed[request.request_id] = load.waiting[request.request_id] = placed
        load.open += 1
        load.pending += placed.pending
        load.blocks += placed.blocks
        for each in self._loads.values():
            each.sent *= 1 - 1 / (_DECAY_REQUESTS * len(self._loads))
        load.sent += pending + self._output
        if request.adapter is not None:
            load.adapters[request.adapter.digest] = None
            load.adapters.move_to_end(request.adapter.digest)
            while len(load.adapters) > self._num_adapters:
                load.adapters.popitem(last=False)
        return placed

    def successor(self, request_id: str) -> int | None:
        """Return the replica on which a request should continue after its first token; None: the same one."""
        return self._placed[request_id].successor

    def forget_successor(self, request_id: str) -> None:
        """Record that a request will not continue at its successor."""
        placed = self._placed.get(request_id)
        if placed is None or placed.successor is None:
            return
        if (load := self._loads.get(placed.successor)) is not None:
            load.open -= 1
            load.blocks -= placed.later_blocks
        placed.successor = None

    def hand_over(self, request_id: str) -> None:
        """Record that a request was sent to its successor. It is expected to find as much of the KV in the store as for
        earlier requests; without a measurement, all full blocks."""
        before = self._placed[request_id]
        successor = before.successor
        assert successor is not None
        self.on_finished(request_id, [])
        missing = round(self._loads[successor].recomputed * len(before.request.prompt_token_ids))
        pending = max(1, self._block_size, missing)
        placed = self._add(before.request, successor, before.hashes, pending, self._num_new_blocks(pending))
        placed.stored, placed.stores, placed.moves = len(before.request.prompt_token_ids), before.stores, before.moves
        self._caches.on_placed(successor, placed.hashes, 0)

    def on_continued(self, request_id: str, recomputed: int, seconds: float) -> None:
        """Record that the first output after a hand-over has arrived, `seconds` later, and that `recomputed` tokens of
        the prompt were computed for it. This says nothing about the speed of prompts there."""
        if (placed := self._placed.get(request_id)) is not None:
            load, now = self._loads[placed.replica], self._clock()
            part = recomputed / len(placed.request.prompt_token_ids)
            load.recomputed = load.recomputed * _KEPT + part * (1 - _KEPT)
            if placed.stored and len({*placed.stores}) > 1:
                pause, _ = self._loss(placed.stores, placed.moves, self._fastest(self._loads))
                links = {pair: each for pair, each in self._links.items() if now - each.measured_at < _LINK_SECONDS}
                self._links, link = links, links.setdefault(placed.stores, _Link())
                kept = _KEPT * 0.5 ** ((now - link.measured_at) / _LINK_HALF_LIFE_SECONDS)
                link.seconds = link.seconds * kept + min(seconds, _MOST_UNEXPECTED * pause + _USUAL_PAUSE)
                link.tokens = link.tokens * kept + placed.moves + _PAUSE_TOKENS
                link.lost = max(min(1.0, recomputed / placed.moves), link.lost / 2)
                link.measured_at = now
            self._stop_waiting(request_id, placed)

    def on_output(self, replica: int) -> None:
        """Record that an output of a replica has arrived."""
        if (load := self._loads.get(replica)) is not None:
            load.output_at = self._clock()

    def on_first_token(self, request_id: str, seconds: float) -> None:
        """Record that a request's first token, or its only output, has arrived. Its replica has computed it in
        `seconds`; 0: not known.
        """
        placed = self._placed.get(request_id)
        if placed is None or (num_tokens := self._stop_waiting(request_id, placed)) is None or not seconds:
            return
        load, now = self._loads[placed.replica], self._clock()
        kept = _KEPT * 0.5 ** ((now - load.measured_at) / _HALF_LIFE_SECONDS)
        load.seconds = load.seconds * kept + seconds
        load.tokens = load.tokens * kept + num_tokens + _STEP_TOKENS
        load.measured_at = now

    def on_finished(self, request_id: str, output: list[int]) -> None:
        """Record that a request has finished, was aborted or has left its replica. Unknown ids are ignored."""
        self.forget_successor(request_id)
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        self._stop_waiting(request_id, placed)
        load = self._loads[placed.replica]
        load.open -= 1
        if output:
            self._output += (len(output) - self._output) * _AVERAGE_WEIGHT
        self._caches.on_finished(placed.replica, placed.request, placed.hashes, output)

    def _stop_waiting(self, request_id: str, placed: _PlacedRequest) -> int | None:
        """Record that a request no longer waits for its first token; returns the tokens computed for that, or None if
        it did not wait.
        """
        load, num_tokens = self._loads[placed.replica], placed.pending
        if load.waiting.pop(request_id, None) is None:
            return None
        load.pending -= placed.pending
        load.blocks -= placed.blocks
        placed.pending = placed.blocks = 0
        return num_tokens

    def on_replica_dead(self, replica: int) -> None:
        """Record that a replica has died; its cache is lost."""
        if (load := self._loads.get(replica)) is not None:
            self._caches.forget(replica)
            load.adapters.clear()
            load.seconds = load.tokens = 0.0

    def on_reset(self, replica: int) -> None:
        """Record that a replica was told to reset its prefix cache, and has."""
        self._caches.on_reset(replica)

    def on_replica_ready(self, replica: int) -> None:
        """Record that a replica, which may be new, is up. It gets no more than its equal share."""
        self._loads.setdefault(replica, _ReplicaLoad())
        self._loads[replica].sent = max(load.sent for load in self._loads.values())

    def on_replica_removed(self, replica: int) -> None:
        """Forget a replica. Its requests, if any, were sent elsewhere or wait."""
        self._loads.pop(replica, None)
        self._caches.forget(replica)
        self._placed = {i: placed for i, placed in self._placed.items() if placed.replica != replica}

    def _fastest(self, replicas: Iterable[int]) -> float:
        """Seconds per token of the fastest one of these replicas; 0: not known."""
        return min((pace for number in replicas if (pace := self._loads[number].pace)), default=0.0)

    def _loss(
        self, stores: tuple[str, ...], tokens: int, fastest: float, *, is_measured: bool = False
    ) -> tuple[float, float]:
        """Return the loss of a request that is handed over from the first store to the second, which lacks `tokens` of
        it: the pause in seconds, and the part of these tokens that is computed again. With `is_measured`, only
        measurements count. `fastest`: seconds per token of the fastest replica."""
        if stores[0] == stores[1]:
            return 0.0, 0.0
        link = self._links.get(stores)
        if link is None and is_measured:
            return math.inf, 0.0
        pause, lost = max(0.0, self._bytes_per_token / _PEER_BANDWIDTH - (fastest or _FIRST_PACE)) * tokens, 0.0
        if link is not None:
            weight = 1.0 if is_measured else 0.5 ** ((self._clock() - link.measured_at) / _LINK_HALF_LIFE_SECONDS)
            measured = link.seconds / link.tokens * (tokens + _PAUSE_TOKENS)
            pause, lost = pause + (measured - pause) * weight, link.lost * weight
        return pause, lost

    def _have_space(self, stores: Collection[str], length: int) -> bool:
        """Whether KV stores have room for a prompt beside the prompts that were handed over and still wait."""
        waiting = [each for load in self._loads.values() for each in load.waiting.values() if each.stored]
        stored = max(sum(each.stored for each in waiting if store in each.stores) for store in stores)
        return not stored or not self._store.num_tokens or stored + length <= self._store.num_tokens

    def _num_queued(self, replica: int, stats: EngineStats) -> float:
        """Tokens to compute at a replica before it starts a new request."""
        load = self._loads[replica]
        others = max(0, stats.running + stats.waiting - load.open)
        there = self._num_there(replica, stats)
        must_end = max(0, there + 1 - self._max_num_seqs)
        waiting = min(others, stats.waiting)
        return load.pending + waiting * self._prompt + there * DECODE_TOKENS + must_end * self._output

    def _num_there(self, replica: int, stats: EngineStats) -> int:
        """Unfinished requests at a replica, and those that will continue there."""
        return max(self._loads[replica].open, stats.running + stats.waiting)

    def _slowness(self, replicas: Sequence[int], fastest: float, now: float) -> dict[int, float]:
        """How many times longer than the fastest of these replicas each one takes for a token of cost, at least 1."""
        loads = {number: self._loads[number] for number in replicas}
        slowness = dict.fromkeys(replicas, 1.0)
        if not fastest:
            return slowness
        for number, load in loads.items():
            measured = (max(load.pace, fastest) / fastest) ** 0.5 ** ((now - load.measured_at) / _HALF_LIFE_SECONDS)
            oldest = next(iter(load.waiting.values()), None)
            shown = 0.0
            if oldest is not None:
                silence = now - max(oldest.placed_at, load.output_at)
                shown = silence / (oldest.ahead + _STEP_TOKENS) / fastest
            slowness[number] = max(1.0, max(measured, shown) / _USUAL_SLOWNESS)
        return slowness

    def _excess(self, slowness: Mapping[int, float], replicas: Collection[int]) -> dict[int, float]:
        """Tokens recently sent to each of these replicas above its share of them."""
        sent = sum(self._loads[number].sent for number in replicas)
        speed = sum(1 / slowness[number] for number in replicas)
        return {
            number: max(0.0, self._loads[number].sent - FAIR_SHARE * sent / (slowness[number] * speed))
            for number in replicas
        }

    def _has_room(self, replica: int, missing: int, stats: EngineStats) -> bool:
        """Whether a replica has blocks for a request. Blocks of requests without a token count twice once the replica
        has allocated them, for the prompt or for the load of an expected request."""
        total = stats.kv_blocks or self._num_blocks
        if not total:
            return True
        return stats.kv_blocks_used + self._loads[replica].blocks + self._num_new_blocks(missing) <= total

    def _num_new_blocks(self, tokens: int) -> int:
        """KV blocks for this number of additional tokens."""
        return -(-tokens // self._block_size) * self._num_groups if self._block_size else 0
