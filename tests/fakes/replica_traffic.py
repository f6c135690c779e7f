"""Simulated traffic on simulated replicas, which may hang, be slow, die, join and drain, for the router's tests and
benchmark. Time is virtual.

A replica computes a step in 1 ms and 20 µs for each token, times its slowness; it has chunked prefill, a limit of
running requests, and a prefix cache with eviction. Clients ask again as soon as they are answered. Requests move away
from silent replicas as `EngineClient` lets them.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.engine.config.engine_config import CacheConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import EngineStats
from quire.server.client.router import Router
from quire.server.client.silence import MOVE_STREAMS_SECONDS, SILENT_SECONDS

BLOCK = 16
STEP_SECONDS, TOKEN_SECONDS = 0.001, 20e-6
NEVER = float("inf")
BEGIN, END = 1.0, 5.0
"""The time in which results are measured."""
_TICK_SECONDS = 0.25
_MAX_TOKENS = 512
_MAX_RUNNING = 64
_DRAIN_SECONDS = 1.0

Prompts = Callable[[random.Random, int], list[int]]
"""Returns the next prompt of the client with this number."""
Course = list[tuple[float, float]]
"""The slowness of a replica over time: pairs of a time and the factor from then on; `NEVER`: it hangs."""


@dataclass(eq=False)
class Query:
    """A request of a client."""

    name: str
    prompt: list[int]
    num_output: int
    arrived: float
    client: int
    replica: int = -1
    num_done: int = 0
    """Output tokens delivered."""
    num_left: int = 0
    """Tokens to compute before the next token."""
    scheduled: float = NEVER
    """Time at which its replica first computed something for it."""


@dataclass(eq=False)
class Replica:
    number: int
    num_blocks: int
    course: Course
    queue: list[Query] = field(default_factory=list)
    """Running requests, then waiting ones."""
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    state: str = "up"
    life: int = 0
    """Number of its restarts; a step of an earlier life has no end."""
    is_busy: bool = False
    num_tokens: int = 0
    """Tokens computed."""

    def slowness(self, now: float) -> float:
        return next(factor for start, factor in reversed(self.course) if start <= now)

    def heard_at(self, now: float) -> float:
        """The last time until now at which it did not hang."""
        at = now
        for start, factor in reversed(self.course):
            if start <= now:
                if factor < NEVER:
                    break
                at = start
        return at

    def ends_at(self, now: float, seconds: float) -> float:
        """When work of so many seconds, which begins now, is done."""
        edges = [start for start, _ in self.course if start > now] + [NEVER]
        for edge in edges:
            factor = self.slowness(now)
            if now + seconds * factor <= edge:
                return now + seconds * factor
            seconds -= (edge - now) / factor
            now = edge
        return NEVER

    def num_cached(self, tokens: list[int]) -> int:
        """Tokens of a prompt that need not be computed."""
        count = 0
        for digest in _chain(tokens):
            if digest not in self.cached:
                break
            count += BLOCK
        return min(count, len(tokens) - 1)

    def remember(self, tokens: list[int]) -> None:
        for digest in reversed(_chain(tokens)):
            self.cached[digest] = None
            self.cached.move_to_end(digest)
        while len(self.cached) > self.num_blocks:
            self.cached.popitem(last=False)


def _chain(tokens: list[int]) -> list[int]:
    digests: list[int] = []
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        digests.append(hash((digests[-1] if digests else 0, *tokens[end - BLOCK : end])))
    return digests


@dataclass
class Outcome:
    """The results of the traffic."""

    replicas: list[Replica]
    end: float
    finished: list[tuple[float, Query]] = field(default_factory=list)
    """Requests with the times at which they ended."""
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0

    @property
    def throughput(self) -> float:
        """Answers per second."""
        return sum(at >= BEGIN for at, _ in self.finished) / (self.end - BEGIN)

    @property
    def p99(self) -> float:
        """99 % of the requests took at most so many seconds from arrival to end, or so far."""
        ended = [at - query.arrived for at, query in self.finished if query.arrived >= BEGIN]
        open_ = [self.end - query.arrived for replica in self.replicas for query in replica.queue]
        found = sorted(ended + open_)
        return found[int(0.99 * (len(found) - 1))]

    @property
    def pause(self) -> float:
        """The longest time without any answer, in seconds."""
        times = [BEGIN, *(at for at, _ in self.finished if at >= BEGIN), self.end]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    @property
    def last_share(self) -> float:
        """The part of the answers that came from the last replica."""
        answers = [query for _, query in self.finished if query.arrived >= BEGIN]
        return sum(query.replica == len(self.replicas) - 1 for query in answers) / len(answers)

    @property
    def hits(self) -> float:
        """The part of the prompt tokens that was cached."""
        return self.num_hit_tokens / self.num_prompt_tokens


class Traffic:
    """The simulation. `router` is the class of the router; None: an oracle, which knows all present state and how
    long outputs will be, and sends each request where it will end first."""

    def __init__(
        self,
        courses: list[Course],
        prompts: Prompts,
        *,
        clients: int,
        router: Callable[..., Router] | None = Router,
        notices_silence: bool = True,
        end: float = END,
        num_blocks: int = 2000,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.replicas = [Replica(number, num_blocks, course) for number, course in enumerate(courses)]
        self.outcome = Outcome(self.replicas, end)
        self._prompts, self._num_clients = prompts, clients
        self._is_oracle, self._notices_silence = router is None, notices_silence
        cache = CacheConfig(block_size=BLOCK, num_blocks=num_blocks, dtype="float32", enable_prefix_caching=True)
        self.router = (router or Router)(
            range(len(courses)), cache=cache, max_num_seqs=_MAX_RUNNING, clock=lambda: self.now
        )
        self._stats = {replica.number: EngineStats(kv_blocks=num_blocks) for replica in self.replicas}
        self._ticks = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._names = itertools.count()
        self._waiting: list[Query] = []
        """Requests without a replica."""

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._ticks), event))

    def run(self) -> Outcome:
        """Run until the end."""
        for client in range(self._num_clients):
            self.at(self.rng.uniform(0, 0.1), lambda client=client: self._ask(client))  # type: ignore[misc]
        self.at(_TICK_SECONDS, self._tick)
        while self._events[0][0] < self.outcome.end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.outcome

    def die(self, number: int, *, restart: float) -> None:
        """Let a replica die, and start again after this many seconds."""
        replica = self.replicas[number]
        replica.state, replica.life, replica.is_busy = "dead", replica.life + 1, False
        lost, replica.queue = replica.queue, []
        replica.cached.clear()
        for query in lost:
            self._place(query)
        self.router.on_replica_dead(number)
        self.at(self.now + restart, lambda: self._join(replica))

    def drain(self, number: int) -> None:
        """Send a replica no more requests, and move its own after a while."""
        replica = self.replicas[number]
        replica.state = "draining"

        def move() -> None:
            for query in [*replica.queue]:
                replica.queue.remove(query)
                self._place(query)

        self.at(self.now + _DRAIN_SECONDS, move)

    def _join(self, replica: Replica) -> None:
        replica.state = "up"
        self._stats[replica.number] = EngineStats(kv_blocks=replica.num_blocks)
        self.router.on_replica_ready(replica.number)
        waiting, self._waiting = self._waiting, []
        for query in waiting:
            self._place(query)

    def join(self, number: int) -> None:
        """Let a replica join that was not there."""
        self._join(self.replicas[number])

    def _ask(self, client: int) -> None:
        prompt = self._prompts(self.rng, client)
        query = Query(str(next(self._names)), prompt, self.rng.randrange(8, 64), self.now, client)
        self.outcome.num_prompt_tokens += len(prompt)
        self._place(query)
        self.outcome.num_hit_tokens += len(prompt) - query.num_left

    def _place(self, query: Query) -> None:
        """Send a request to a replica, after its tokens so far."""
        self.router.on_finished(query.name, [])
        up = [replica for replica in self.replicas if replica.state == "up"]
        live = [replica for replica in up if not self._is_silent(replica)] or up
        if not live:
            return self._waiting.append(query)
        tokens = query.prompt + [7] * query.num_done
        if self._is_oracle:
            chosen = min(live, key=lambda replica: self._seconds_at(replica, tokens, query))
        else:
            params = SamplingParams(max_tokens=query.num_output)
            request = EngineCoreRequest(
                0, query.name, query.prompt, params, output_token_ids=tokens[len(query.prompt) :]
            )
            chosen = self.replicas[self.router.place(request, {each.number: self._stats[each.number] for each in live})]
        query.replica, query.num_left = chosen.number, len(tokens) - chosen.num_cached(tokens)
        query.scheduled = NEVER
        chosen.queue.append(query)
        if not chosen.is_busy:
            self._begin(chosen)

    def _seconds_at(self, replica: Replica, tokens: list[int], query: Query) -> float:
        """The estimate of one that knows everything about the present, and how long outputs will be."""
        own = len(tokens) - replica.num_cached(tokens)
        ahead = sum(each.num_left for each in replica.queue)
        decodes = sum(min(each.num_output - each.num_done, query.num_output) for each in replica.queue)
        seconds = STEP_SECONDS * query.num_output + TOKEN_SECONDS * (own + ahead + decodes + query.num_output)
        return seconds * replica.slowness(self.now)

    def _is_silent(self, replica: Replica, seconds: float = SILENT_SECONDS) -> bool:
        return self._notices_silence and self.now - replica.heard_at(self.now) > seconds

    def _tick(self) -> None:
        """Move requests of silent replicas, as `EngineClient` does."""
        others = any(each.state == "up" and not self._is_silent(each) for each in self.replicas)
        for replica in self.replicas:
            if others and replica.state == "up" and self._is_silent(replica):
                for query in [*replica.queue]:
                    if not query.num_done or self._is_silent(replica, MOVE_STREAMS_SECONDS):
                        replica.queue.remove(query)
                        self._place(query)
        self.at(self.now + _TICK_SECONDS, self._tick)

    def _begin(self, replica: Replica) -> None:
        """Begin a step: a token of each request whose prompt is computed, and as much of the others as fits."""
        rows: list[tuple[Query, int]] = []
        left = _MAX_TOKENS
        for query in replica.queue[:_MAX_RUNNING]:
            count = min(left, max(1, query.num_left))
            if not count:
                break
            rows.append((query, count))
            query.scheduled = min(query.scheduled, self.now)
            left -= count
        replica.is_busy = bool(rows)
        if not rows:
            return
        num_tokens = _MAX_TOKENS - left
        replica.num_tokens += num_tokens
        ends, life = replica.ends_at(self.now, STEP_SECONDS + TOKEN_SECONDS * num_tokens), replica.life
        if ends < NEVER:
            self.at(ends, lambda: self._end(replica, rows) if replica.life == life else None)

    def _end(self, replica: Replica, rows: list[tuple[Query, int]]) -> None:
        self.router.on_output(replica.number)
        for query, count in rows:
            if query.replica != replica.number or query not in replica.queue:
                continue  # it has moved
            query.num_left = max(0, query.num_left - count)
            if query.num_left:
                continue
            query.num_done += 1
            if query.num_done == 1:
                replica.remember(query.prompt)
            self.router.on_first_token(query.name, self.now - query.scheduled)
            if query.num_done >= query.num_output:
                replica.queue.remove(query)
                replica.remember(query.prompt + [7] * query.num_done)
                self.router.on_finished(query.name, [7] * query.num_done)
                self.outcome.finished.append((self.now, query))
                self.at(self.now, lambda client=query.client: self._ask(client))  # type: ignore[misc]
        running = min(len(replica.queue), _MAX_RUNNING)
        self._stats[replica.number] = EngineStats(
            kv_blocks=replica.num_blocks, running=running, waiting=len(replica.queue) - running
        )
        self._begin(replica)


def fresh(length: int) -> Prompts:
    """Prompts that share nothing."""
    return lambda rng, client: rng.choices(range(1000), k=length)


def mixed() -> Prompts:
    """Short prompts, and a long one in ten."""
    return lambda rng, client: rng.choices(range(1000), k=4000 if rng.random() < 0.1 else 16)


def shared(length: int, groups: int = 1) -> Prompts:
    """Prompts that begin with one of a few prefixes."""
    heads = [random.Random(group).choices(range(1000), k=length) for group in range(groups)]
    return lambda rng, client: rng.choice(heads) + rng.choices(range(1000), k=rng.randrange(16, 64))


def conversations(turns: int = 6) -> Prompts:
    """Prompts that continue the client's last one, and begin anew after some turns."""
    so_far: dict[int, tuple[int, list[int]]] = {}

    def prompt(rng: random.Random, client: int) -> list[int]:
        turn, before = so_far.get(client, (0, []))
        added = rng.choices(range(1000), k=96)
        tokens = added if turn % turns == 0 else [*before, *added]
        so_far[client] = turn + 1, tokens
        return tokens

    return prompt


PROMPTS: dict[str, Callable[[], Prompts]] = {
    "short": lambda: fresh(64),
    "mixed lengths": mixed,
    "one prefix": lambda: shared(320),
    "32 prefixes": lambda: shared(320, 32),
    "conversations": conversations,
}

# What happens to the last replica, at 1 s unless another time is given: its course, and an event.
COURSES: dict[str, Course] = {
    "healthy": [(0.0, 1.0)],
    "hangs": [(0.0, 1.0), (1.0, NEVER)],
    "2 times slower": [(0.0, 1.0), (1.0, 2.0)],
    "5 times slower": [(0.0, 1.0), (1.0, 5.0)],
    "20 times slower": [(0.0, 1.0), (1.0, 20.0)],
    "recovers after 2 s": [(0.0, 1.0), (1.0, 20.0), (3.0, 1.0)],
    "hangs for 2 s": [(0.0, 1.0), (1.0, NEVER), (3.0, 1.0)],
    "joins": [(0.0, 1.0)],
    "drains": [(0.0, 1.0)],
    "dies and returns": [(0.0, 1.0)],
}


def simulate(course: str, prompts: str, replicas: int, *, clients: int = 8, seed: int = 0, **options: Any) -> Outcome:
    """Run one of `COURSES` with so many clients for each replica; see `Traffic` for the options."""
    courses = [COURSES["healthy"]] * (replicas - 1) + [COURSES[course]]
    traffic = Traffic(courses, PROMPTS[prompts](), clients=clients * replicas, seed=seed, **options)
    last = replicas - 1
    match course:
        case "joins":
            traffic.replicas[last].state = "starting"
            traffic.at(BEGIN, lambda: traffic.join(last))
        case "drains":
            traffic.at(BEGIN, lambda: traffic.drain(last))
        case "dies and returns":
            traffic.at(BEGIN, lambda: traffic.die(last, restart=2.0))
    return traffic.run()
