"""Chooses the replica that will answer a request first. Pure bookkeeping, without I/O; the clock is given.

The unit of cost is a token to compute before the request's own first token. The cost at a replica is its slowness times
the sum of

      the request's tokens that are not cached there
    + of the cached ones, as many as the replica has recently been sent above its share (`FAIR_SHARE`)
    + `ADAPTER_TOKENS` if the replica was not recently sent a request with the same adapter
    + prompt tokens of requests that were sent there and have no token yet
    + `DECODE_TOKENS` for each other request there
    + the length of an output for each request that must finish before this one can start

A decode costs more than the token that it adds to a step: it reads its context and the weights, and it will continue.
When `max_num_seqs` requests are running, one finishes per output length of computed tokens. A replica without room for
the request in its KV cache comes after all replicas with room, since others must finish there or be preempted, and no
number of tokens expresses when. The second term is for a prefix that all requests share: as long as one replica answers
all of them at once, nothing else would bring the prefix to another. It takes no more than the advantage of the cache,
so that it never sends a request to a replica that is busier than that. Among equal replicas, the one that was recently
sent the fewest tokens is chosen.

Slowness is the time that a replica takes for a token to compute, relative to the fastest replica. It is measured for
each request, from when the replica first scheduled it until its first token. A replica that has sent nothing since its
oldest request without a token was sent, or for some time, is at least as slow as that shows: one that hangs becomes
slower by the moment. Without new measurements slowness is gradually forgotten, so that a replica that has recovered is
tried again.

The cache contents are estimated from the requests sent: the hash chains of prompts (and of outputs, after they finish),
most recently used first, as many blocks as the replica has; another salt makes another chain, and so does another
adapter from the first block on that it changes. The current load is known for this process's requests, and comes from
the replica's newest stats for other processes' requests.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.config.engine_config import CacheConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.stats import EngineStats

DECODE_TOKENS = 32
"""Tokens by which a running request delays the prompt of another."""
ADAPTER_TOKENS = 64
"""Tokens that take as long as getting an adapter onto a device."""
FAIR_SHARE = 1.25
"""Factor for a replica's share of the recently sent tokens, by its speed, that it may get because of its cache."""
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


class _Chain(NamedTuple):
    """What a chain of hashes depends on, besides the tokens."""

    salt: bytes
    adapter: bytes
    """Its digest; empty: there is none."""
    adapter_start: int
    """The first token that the adapter changes."""


@dataclass(slots=True)
class _PlacedRequest:
    """An unfinished request of this process."""

    replica: int
    prompt: list[int]
    chain: _Chain
    hashes: list[int]
    pending: int
    """Tokens to compute before its next token; 0 once that has arrived."""
    blocks: int
    """KV blocks that it will allocate until then."""
    placed_at: float
    ahead: int
    """Tokens to compute at the replica before its first token, as known when it was placed."""


@dataclass(slots=True)
class _ReplicaLoad:
    """The requests that this process has sent to a replica."""

    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Hashes of blocks, in order of last use."""
    adapters: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Digests of the adapters on its device, in order of last use."""
    capacity: int = 0
    """KV blocks of the replica; 0: not known yet."""
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

    @property
    def pace(self) -> float:
        """Seconds per token; 0: not known."""
        return self.seconds / self.tokens if self.tokens else 0.0


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
    ) -> None:
        """Without `cache` there are no cached prefixes. A replica's device has room for `num_adapters`. `first` rotates
        the order of equal replicas, so that the processes differ. `clock` returns the time in seconds.
        """
        self._clock = clock
        self._loads = {number: _ReplicaLoad() for number in replicas}
        self._first = first
        self._placed: dict[str, _PlacedRequest] = {}
        self._max_num_seqs, self._num_adapters = max_num_seqs, num_adapters
        self._block_size = cache.block_size if cache else 0
        self._num_groups = len(cache.groups) if cache else 1
        self._num_blocks = cache.num_blocks if cache else 0
        self._has_prefix_cache = cache is not None and cache.enable_prefix_caching
        self._output = self._prompt = _FIRST_GUESS
        """Average tokens of an output, and of a prompt to compute."""

    def place(self, submit: EngineCoreRequest, stats: Mapping[int, EngineStats]) -> int:
        """Choose a replica for a request, given the replicas' newest stats, and record the request as sent."""
        prompt = submit.prompt_token_ids
        if submit.media:  # the tokens of all images are the same
            prompt = prompt.copy()
            for item in submit.media:
                prompt[item.offset] = int.from_bytes(item.digest)
        tokens = prompt + submit.output_token_ids
        hashes: list[int] = []
        digest = b"" if submit.adapter is None else submit.adapter.digest
        chain = _Chain(submit.cache_salt, digest, submit.adapter_start)
        if self._has_prefix_cache:
            self._extend_hashes(hashes, tokens, chain)
        spares = submit.params.prompt_logprobs is None or bool(submit.output_token_ids)
        uncached_at = {number: self._num_uncached(number, len(tokens), hashes if spares else []) for number in stats}
        now = self._clock()
        slowness = self._slowness(list(stats), now)
        excess = self._excess(slowness)
        costs = {
            number: slowness[number]
            * (
                min(len(tokens), uncached + excess[number])
                + ADAPTER_TOKENS * (bool(digest) and digest not in self._loads[number].adapters)
                + self._num_queued(number, stats[number])
            )
            for number, uncached in uncached_at.items()
        }
        chosen = min(
            stats,
            key=lambda number: (
                not self._has_room(number, uncached_at[number], stats[number]),
                costs[number],
                self._loads[number].sent * slowness[number],
                (number - self._first) % len(self._loads),
            ),
        )
        uncached, load = uncached_at[chosen], self._loads[chosen]
        placed = _PlacedRequest(
            replica=chosen,
            prompt=prompt,
            chain=chain,
            hashes=hashes,
            pending=uncached,
            blocks=self._num_new_blocks(uncached),
            placed_at=now,
            ahead=load.pending + uncached,
        )
        self._placed[submit.request_id] = load.waiting[submit.request_id] = placed
        load.open += 1
        load.pending += placed.pending
        load.blocks += placed.blocks
        for each in self._loads.values():
            each.sent *= 1 - 1 / (_DECAY_REQUESTS * len(self._loads))
        load.sent += uncached + self._output
        self._prompt += (uncached - self._prompt) * _AVERAGE_WEIGHT
        load.capacity = stats[chosen].kv_blocks or load.capacity
        self._record_cached(load, hashes)
        if digest:
            load.adapters[digest] = None
            load.adapters.move_to_end(digest)
            while len(load.adapters) > self._num_adapters:
                load.adapters.popitem(last=False)
        return chosen

    def on_output(self, replica: int) -> None:
        """Record that an output of a replica has arrived."""
        if (load := self._loads.get(replica)) is not None:
            load.output_at = self._clock()

    def on_first_token(self, request_id: str, seconds: float) -> None:
        """Record that a request's first token, or its only output, has arrived, which its replica has computed in so
        many seconds; 0: not known.
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
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        self._stop_waiting(request_id, placed)
        load = self._loads[placed.replica]
        load.open -= 1
        if output:
            self._output += (len(output) - self._output) * _AVERAGE_WEIGHT
        if self._has_prefix_cache and output:
            # The KV of the last token is not computed.
            self._extend_hashes(placed.hashes, (placed.prompt + output)[:-1], placed.chain)
            self._record_cached(load, placed.hashes)

    def _stop_waiting(self, request_id: str, placed: _PlacedRequest) -> int | None:
        """Record that a request does not wait for its first token any more; returns the tokens that were computed for
        that, and None if it did not wait.
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
            load.cached.clear()
            load.adapters.clear()
            load.seconds = load.tokens = 0.0

    def on_reset(self) -> None:
        """Record that all replicas have forgotten their prefix caches."""
        for load in self._loads.values():
            load.cached.clear()

    def on_replica_ready(self, replica: int) -> None:
        """Record that a replica, which may be new, is up. It gets no more than its equal share."""
        self._loads.setdefault(replica, _ReplicaLoad())
        self._loads[replica].sent = max(load.sent for load in self._loads.values())

    def on_replica_removed(self, replica: int) -> None:
        """Forget a replica. Its requests, if any, were sent elsewhere or wait."""
        self._loads.pop(replica, None)
        self._placed = {i: placed for i, placed in self._placed.items() if placed.replica != replica}

    def _num_uncached(self, replica: int, length: int, hashes: list[int]) -> int:
        """Tokens of a request to compute at a replica: at least the last one, whose logits are needed."""
        cached, known = 0, self._loads[replica].cached
        for digest in hashes:
            if digest not in known:
                break
            cached += self._block_size
        return max(1, length - cached)

    def _num_queued(self, replica: int, stats: EngineStats) -> float:
        """Tokens to compute at a replica before it starts a new request."""
        load = self._loads[replica]
        others = max(0, stats.running + stats.waiting - load.open)
        there = load.open + others
        must_end = max(0, there + 1 - self._max_num_seqs)
        waiting = min(others, stats.waiting)
        return load.pending + waiting * self._prompt + there * DECODE_TOKENS + must_end * self._output

    def _slowness(self, replicas: Sequence[int], now: float) -> dict[int, float]:
        """How many times longer than the fastest of these replicas each one takes for a token of cost, at least 1."""
        loads = {number: self._loads[number] for number in replicas}
        fastest = min((load.pace for load in loads.values() if load.pace), default=0.0)
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

    def _excess(self, slowness: Mapping[int, float]) -> dict[int, float]:
        """Tokens recently sent to each replica above its share."""
        sent = sum(self._loads[number].sent for number in slowness)
        speed = sum(1 / each for each in slowness.values())
        return {
            number: max(0.0, self._loads[number].sent - FAIR_SHARE * sent / (each * speed))
            for number, each in slowness.items()
        }

    def _has_room(self, replica: int, uncached: int, stats: EngineStats) -> bool:
        total = stats.kv_blocks or self._num_blocks
        if not total:
            return True
        return stats.kv_blocks_used + self._loads[replica].blocks + self._num_new_blocks(uncached) <= total

    def _extend_hashes(self, hashes: list[int], tokens: list[int], chain: _Chain) -> None:
        """Append the missing hashes of a chain: one for each full block, over its tokens and all tokens before it."""
        size = self._block_size
        while (end := (len(hashes) + 1) * size) <= len(tokens):
            adapter = chain.adapter if end > chain.adapter_start else b""
            hashes.append(hash((hashes[-1] if hashes else chain.salt, adapter, *tokens[end - size : end])))

    def _num_new_blocks(self, tokens: int) -> int:
        """KV blocks for this number of additional tokens."""
        return -(-tokens // self._block_size) * self._num_groups if self._block_size else 0

    def _record_cached(self, load: _ReplicaLoad, hashes: list[int]) -> None:
        """Record these blocks as cached, the first of the chain most recently; evict the least recently used."""
        for digest in reversed(hashes):
            load.cached[digest] = None
            load.cached.move_to_end(digest)
        total = load.capacity or self._num_blocks
        while total and len(load.cached) > max(1, total // self._num_groups):
            load.cached.popitem(last=False)
