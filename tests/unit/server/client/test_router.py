"""The replicas of requests, with real schedulers and real prefix caches, whose steps take a made-up time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec import structs

from quire.engine.config.engine_config import CacheConfig, KVStoreConfig
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import EngineStats
from quire.engine.scheduler.scheduler import Scheduler
from quire.server.client.router import ReplicaPlace, Router
from tests.fakes.configs import engine_config
from tests.fakes.replica_traffic import COURSES, simulate

BLOCK = 16
CACHE = CacheConfig(block_size=BLOCK, num_blocks=2000, dtype="float32", enable_prefix_caching=True)


def asked(request_id: str, prompt: list[int], salt: bytes = b"", max_tokens: int = 16) -> EngineCoreRequest:
    return EngineCoreRequest(0, request_id, prompt, SamplingParams(max_tokens=max_tokens), cache_salt=salt)


def seeing(request_id: str, prompt: list[int], picture: bytes) -> EngineCoreRequest:
    """The prompt has a picture in its second half."""
    item = MediaItem(picture.ljust(16), "image", len(prompt) // 2, 8, (MediaRun(0, 8),))
    return structs.replace(asked(request_id, prompt), media=[item])


def idle(count: int) -> dict[int, EngineStats]:
    return {number: EngineStats(kv_blocks=CACHE.num_blocks) for number in range(count)}


@dataclass
class Engine:
    """A replica: 1 ms for each step and 20 µs for each token of it."""

    scheduler: Scheduler
    requests: int = 0
    tokens: int = 0
    """Number of tokens that it has computed."""
    is_busy: bool = False
    under_way: tuple[SchedulerOutput, ModelRunnerOutput] | None = None

    def begin(self) -> float | None:
        """Begin a step; returns its seconds."""
        plan = self.scheduler.schedule()
        self.is_busy = plan is not None
        if plan is None:
            return None
        rows = self.scheduler.in_flight.rows[plan.step]
        sampled = [7 if row.num_computed_tokens >= len(row.token_ids) else -1 for row in rows]
        self.under_way = plan, ModelRunnerOutput(plan.step, sampled)
        self.tokens += plan.num_tokens
        return 0.001 + 20e-6 * plan.num_tokens


@dataclass
class Traffic:
    """The results of the traffic."""

    engines: list[Engine]
    prefixes: int = 0
    """Tokens of the shared prefixes of all requests."""
    first_tokens: list[float] = field(default_factory=list)

    @property
    def hits(self) -> float:
        """The part of all tokens of shared prefixes that was in the cache of the replica that they were sent to."""
        return sum(engine.scheduler.stats.prefix_hit_tokens for engine in self.engines) / self.prefixes

    def uneven(self, loads: list[int]) -> float:
        return max(loads) * len(loads) / sum(loads)

    @property
    def imbalance(self) -> float:
        """The busiest replica's load over an even one: of requests, or of computed tokens."""
        requests, tokens = [e.requests for e in self.engines], [e.tokens for e in self.engines]
        return max(self.uneven(requests), self.uneven(tokens))


def run(
    groups: Iterator[int],
    *,
    replicas: int,
    count: int = 800,
    rate: float = 60.0,
    prefix: int = 320,
    num_blocks: int = 2000,
    processes: int = 1,
    seed: int = 0,
) -> Traffic:
    """`count` requests, `rate` a second for each replica, each of one of the `groups` that share a prefix."""
    rng = random.Random(seed)
    config = engine_config(
        block_size=BLOCK, num_blocks=num_blocks, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096
    )
    engines = [Engine(Scheduler(config)) for _ in range(replicas)]
    now = 0.0
    cache = replace(CACHE, num_blocks=num_blocks)
    routers = [
        Router(range(replicas), cache=cache, max_num_seqs=64, first=index, clock=lambda: now)
        for index in range(processes)
    ]
    traffic = Traffic(engines)
    reported: dict[int, EngineStats] = {number: EngineStats(kv_blocks=num_blocks) for number in range(replicas)}
    arrivals: dict[str, float] = {}
    shared: dict[int, list[int]] = {}
    outputs: dict[str, list[int]] = {}
    ticks = itertools.count()
    events: list[tuple[float, int, int]] = [(0.0, next(ticks), -1)]
    """Time, order, and the engine whose step ends; -1: a request arrives."""
    sent = 0

    def go_on(engine: Engine, now: float) -> None:
        if (seconds := engine.begin()) is not None:
            heapq.heappush(events, (now + seconds, next(ticks), engines.index(engine)))

    while events:
        now, _, number = heapq.heappop(events)
        if number < 0:
            group = next(groups)
            head = shared.setdefault(group, rng.choices(range(1000), k=prefix))
            prompt = head + rng.choices(range(1000), k=rng.randrange(16, 64))
            submit = asked(str(sent), prompt, max_tokens=rng.randrange(8, 64))
            chosen = routers[sent % processes].place(submit, reported)
            assert engines[chosen].scheduler.add(submit) is None
            engines[chosen].requests += 1
            traffic.prefixes += prefix
            arrivals[submit.request_id], outputs[submit.request_id] = now, []
            if not engines[chosen].is_busy:
                go_on(engines[chosen], now)
            sent += 1
            if sent < count:
                heapq.heappush(events, (now + rng.expovariate(rate * replicas), next(ticks), -1))
            continue
        engine = engines[number]
        assert engine.under_way is not None
        for news in engine.scheduler.update(*engine.under_way).values():
            on_finished = [output.request_id for output in news.outputs if output.finish_reason]
            for request_id in [output.request_id for output in news.outputs] + news.request_ids:
                router = routers[int(request_id) % processes]
                if not outputs[request_id]:
                    traffic.first_tokens.append(now - arrivals[request_id])
                    router.on_first_token(request_id, 0.0)
                outputs[request_id].append(7)
            for request_id in on_finished:
                routers[int(request_id) % processes].on_finished(request_id, outputs.pop(request_id))
        reported[number] = structs.replace(engine.scheduler.snapshot())
        go_on(engine, now)
    assert not any(engine.scheduler.requests for engine in engines)
    for router in routers:
        assert not router._placed
        assert all((load.open, load.pending, load.blocks) == (0, 0, 0) for load in router._loads.values())
    return traffic


def even(groups: int, seed: int = 0) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.randrange(groups)


def zipf(groups: int, seed: int = 0) -> Iterator[int]:
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(groups)]
    while True:
        yield from rng.choices(range(groups), weights, k=100)


@pytest.mark.parametrize("rate", [3.0, 60.0], ids=["calm", "busy"])
@pytest.mark.parametrize("replicas", [2, 8])
@pytest.mark.parametrize("groups", [even, zipf])
def test_requests_find_their_prefix_and_the_load_stays_even(
    groups: Callable[[int], Iterator[int]], replicas: int, rate: float
) -> None:
    """The first request of each group, which cannot find anything, counts as well."""
    traffic = run(groups(32), replicas=replicas, rate=rate)
    assert traffic.hits > 0.9
    assert traffic.imbalance < 1.5


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_need_not_know_of_one_another(processes: int) -> None:
    traffic = run(zipf(16), replicas=2, processes=processes)
    assert traffic.hits > 0.9
    assert traffic.imbalance < 1.5


@pytest.mark.parametrize("rate", [3.0, 60.0], ids=["calm", "busy"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_prefix_that_all_ask_for_is_soon_everywhere(replicas: int, rate: float) -> None:
    traffic = run(itertools.repeat(0), replicas=replicas, rate=rate)
    assert traffic.hits > 0.99
    assert traffic.imbalance < 1.5


def test_a_cache_that_holds_a_part_of_the_groups_is_shared_out() -> None:
    """One replica's cache has room for half of the groups: together they hold all, if each has its own."""
    assert run(even(32), replicas=2, num_blocks=480).hits > 0.8
    blind = run(even(32), replicas=1, num_blocks=480)
    assert blind.hits < 0.6


# The last replica's course, the prompts, the number of replicas, clients for each, and the part of the oracle's
# throughput that is expected: pairs of these cover more in less time than a product.
TROUBLES = [
    ("healthy", "mixed lengths", 2, 8, 0.95),
    ("hangs", "short", 2, 8, 0.95),
    ("hangs", "32 prefixes", 4, 4, 0.95),
    ("hangs", "conversations", 8, 2, 0.95),
    ("hangs for 2 s", "one prefix", 2, 8, 0.9),
    ("2 times slower", "32 prefixes", 2, 8, 0.9),
    ("2 times slower", "short", 4, 4, 0.9),
    ("5 times slower", "conversations", 2, 8, 0.9),
    ("5 times slower", "mixed lengths", 4, 4, 0.9),
    ("20 times slower", "short", 2, 8, 0.9),
    ("20 times slower", "one prefix", 8, 2, 0.9),
    ("recovers after 2 s", "conversations", 2, 8, 0.9),
    ("joins", "32 prefixes", 2, 8, 0.95),
    ("drains", "short", 4, 4, 0.95),
    ("dies and returns", "one prefix", 2, 8, 0.95),
]


@pytest.mark.parametrize(("course", "prompts", "replicas", "clients", "least"), TROUBLES)
def test_a_replica_in_trouble_does_not_slow_down_the_others(
    course: str, prompts: str, replicas: int, clients: int, least: float
) -> None:
    """The oracle knows the speeds, the caches, the queues and how long outputs will be."""
    oracle = simulate(course, prompts, replicas, clients=clients, router=None)
    outcome = simulate(course, prompts, replicas, clients=clients)
    assert outcome.throughput > least * oracle.throughput
    assert outcome.p99 < (3.5 if course == "5 times slower" else 2.0) * oracle.p99
    assert outcome.pause < oracle.pause + 0.1
    if (slowness := COURSES[course][-1][1]) > 1:
        assert outcome.last_share < max(0.02, 2 / (1 + (replicas - 1) * slowness))


@pytest.mark.slow
def test_one_of_64_replicas_in_trouble() -> None:
    for course in ("hangs", "20 times slower"):
        oracle = simulate(course, "short", 64, clients=1, end=2.5, router=None)
        outcome = simulate(course, "short", 64, clients=1, end=2.5)
        assert outcome.throughput > 0.95 * oracle.throughput
        assert outcome.last_share < 0.01


def place(router: Router, request_id: str, prompt: list[int], stats: dict[int, EngineStats], **asks: Any) -> int:
    return router.place(asked(request_id, prompt, **asks), stats)


def test_equal_replicas_are_chosen_round_robin() -> None:
    router = Router(range(3), cache=CACHE, max_num_seqs=8)
    assert [place(router, str(n), [n] * 40, idle(3)) for n in range(6)] == [0, 1, 2, 0, 1, 2]
    routers = [Router(range(3), cache=CACHE, max_num_seqs=8, first=index) for index in range(3)]
    assert [place(router, "a", [1], idle(3)) for router in routers] == [0, 1, 2]


def test_a_prefix_is_known_with_its_salt_and_its_output() -> None:
    router = Router(range(2), cache=CACHE, max_num_seqs=8)
    prompt, output = list(range(100)), list(range(200, 300))
    first = place(router, "a", prompt, idle(2), salt=b"x")
    router.on_first_token("a", 0.0)
    assert place(router, "other salt", prompt, idle(2), salt=b"y") != first
    router.on_finished("other salt", [])
    router.on_finished("a", output)
    turn = [*prompt, *output, 7, 8]
    assert place(router, "b", turn, idle(2), salt=b"x") == first
    assert router._placed["b"].pending == 202 - 192
    scored = EngineCoreRequest(0, "c", turn, SamplingParams(prompt_logprobs=0), cache_salt=b"x")
    router.place(scored, idle(2))
    assert router._placed["c"].pending == 202  # its logits are needed, even if all is cached


def test_a_prefix_is_known_with_its_pictures() -> None:
    """The tokens of all pictures are the same."""
    router = Router(range(2), cache=CACHE, max_num_seqs=8)
    prompt = list(range(160))
    first = router.place(seeing("a", prompt, b"cat"), idle(2))
    router.on_first_token("a", 0.0)
    assert router.place(seeing("again", prompt, b"cat"), idle(2)) == first
    router.place(seeing("other", prompt, b"dog"), idle(2))
    router.on_first_token("again", 0.0)
    assert router._placed["other"].pending in (80, 160)  # the text before the picture is known at the first one


def test_caches_are_as_large_as_the_replicas_say() -> None:
    """An API without replicas of its own has no blocks; another host's may have more or fewer."""
    prompt = list(range(400))
    for blocks in (0, 5):
        router = Router(range(2), cache=replace(CACHE, num_blocks=blocks), max_num_seqs=64)
        assert place(router, "a", prompt, idle(2)) == 0
        router.on_finished("a", [1])
        assert place(router, "b", prompt, idle(2)) == 0
        assert router._placed["b"].pending == 1  # all is cached, and the last is computed for its logits


def test_a_replica_without_room_is_avoided() -> None:
    router = Router(range(2), cache=CACHE, max_num_seqs=64)
    prompt = list(range(400))
    assert place(router, "a", prompt, idle(2)) == 0
    router.on_finished("a", [1])
    assert place(router, "b", prompt, idle(2)) == 0
    router.on_finished("b", [1])
    full = idle(2) | {0: EngineStats(kv_blocks=2000, kv_blocks_used=2000)}
    assert place(router, "c", prompt, full) == 1
    both = {number: EngineStats(kv_blocks=2000, kv_blocks_used=2000) for number in range(2)}
    router.on_replica_dead(1)
    assert place(router, "d", prompt, both) == 0  # then it is as ever
    # Requests under way take blocks that no stats include yet.
    router = Router(range(2), cache=replace(CACHE, num_blocks=30), max_num_seqs=64)
    small = {0: EngineStats(kv_blocks=30), 1: EngineStats(kv_blocks=30, running=10)}
    assert place(router, "a", list(range(320)), small) == 0
    assert place(router, "b", list(range(500, 820)), small) == 1


def test_who_has_much_to_do_is_avoided() -> None:
    prompt = list(range(160))
    for busy in (
        EngineStats(running=9, kv_blocks=2000),
        EngineStats(running=1, waiting=4, kv_blocks=2000),
    ):
        router = Router(range(2), cache=CACHE, max_num_seqs=8)
        assert place(router, "a", prompt, idle(2)) == 0
        router.on_finished("a", [1])
        assert place(router, "b", prompt, idle(2)) == 0
        router.on_finished("b", [1])
        assert place(router, "c", prompt, {0: busy, 1: idle(1)[0]}) == 1


def test_one_that_comes_back_knows_nothing_and_is_not_flooded() -> None:
    router = Router(range(2), cache=CACHE, max_num_seqs=64)
    for number in range(100):
        place(router, str(number), [number] * 64, idle(2))
        router.on_finished(str(number), [1])
    router.on_replica_dead(0)
    router.on_replica_ready(0)
    taken = [place(router, f"new {number}", [1000 + number] * 64, idle(2)) for number in range(20)]
    assert 8 <= sum(taken) <= 12


def test_a_slow_replica_is_avoided_and_later_tried_again() -> None:
    """One request at a time: there is no queue that would bring one to it."""
    now = 0.0
    router = Router(range(2), max_num_seqs=64, clock=lambda: now)
    chosen: list[int] = []
    for number in range(100):
        chosen.append(place(router, str(number), [number] * 64, idle(2)))
        seconds = 2.0 if chosen[-1] == 1 and now < 3 else 0.1
        now += seconds
        router.on_first_token(str(number), seconds)
        router.on_finished(str(number), [1])
        now += 0.9
    assert chosen[:2] == [0, 1]
    assert 20 < chosen[2:].index(1) < 50
    assert sum(chosen[-8:]) >= 3  # it is as fast as the other


def test_a_request_that_waits_long_for_other_reasons_does_not_make_its_replica_slow() -> None:
    """Such as for its grammar: the replica has computed its first token as fast as others."""
    now = 0.0
    router = Router(range(2), max_num_seqs=64, clock=lambda: now)
    for number in range(20):
        place(router, str(number), [number] * 64, idle(2))
        now += 0.1
        router.on_first_token(str(number), 0.1)
        router.on_finished(str(number), [1])
    assert place(router, "waits", [1] * 64, idle(2)) == 0
    now += 3.0
    router.on_output(0)
    router.on_first_token("waits", 0.1)
    router.on_finished("waits", [1])
    chosen = []
    for number in range(20, 40):
        chosen.append(place(router, str(number), [number] * 64, idle(2)))
        router.on_finished(str(number), [1])
    assert 8 <= sum(chosen) <= 12


def test_what_it_remembers_is_bounded() -> None:
    router = Router(range(1), cache=replace(CACHE, num_blocks=50), max_num_seqs=64)
    stats = {0: EngineStats()}
    for number in range(100):
        place(router, str(number), [number] * 160, stats)
        router.on_finished(str(number), [1] * 100)
    assert len(router._caches._estimates[0].blocks) == 50
    assert not router._placed
    router.on_finished("unknown", [])
    router.on_first_token("unknown", 1.0)


def test_prefixes_are_those_of_the_adapter_from_its_start_on() -> None:
    def with_adapter(request_id: str, digest: int, start: int = 0) -> EngineCoreRequest:
        ref = AdapterRef(bytes([digest]), ())
        return structs.replace(asked(request_id, prompt), adapter=ref, adapter_start=start)

    prompt = list(range(8 * BLOCK))
    router = Router(range(2), cache=CACHE, num_adapters=1, max_num_seqs=8)
    assert router.place(asked("base", prompt), idle(2)) == 0
    router.on_finished("base", [])
    assert router.place(with_adapter("a", 1), idle(2)) == 1  # nothing of the base's is of use
    router.on_finished("a", [])
    assert router.place(with_adapter("a again", 1), idle(2)) == 1
    router.on_finished("a again", [])
    assert router.place(with_adapter("late", 2, start=6 * BLOCK), idle(2)) == 0  # most blocks are the base's


def test_short_prompts_go_where_their_adapter_is() -> None:
    router = Router(range(2), cache=CACHE, num_adapters=2, max_num_seqs=8)
    for number in range(6):
        request = structs.replace(asked(str(number), [1, 2]), adapter=AdapterRef(bytes([number % 2]), ()))
        assert router.place(request, idle(2)) == number % 2
        router.on_finished(str(number), [])


def test_a_prompt_is_computed_apart_if_others_gain_more_than_it_loses() -> None:
    places = {0: ReplicaPlace("prefill", "host"), 1: ReplicaPlace("decode", "host"), 2: ReplicaPlace("decode", "host")}

    def chosen(tokens: int, *open_requests: int, places: dict[int, ReplicaPlace] = places) -> tuple[int, int | None]:
        """Where a prompt is sent, and where it continues, if replicas have as many requests whose prompts are done."""
        router = Router(range(3), cache=CACHE, max_num_seqs=64)
        stats = {
            number: EngineStats(running=running, kv_blocks=2000)
            for number, running in enumerate(open_requests or (0, 0, 0))
        }
        number = router.place(asked("a", list(range(tokens))), stats, places)
        successor = router.successor("a")
        router.on_finished("a", [])
        assert not any(load.open or load.blocks for load in router._loads.values())
        return number, successor

    assert chosen(400) == (0, 1)
    assert chosen(400, 1, 0, 0) == (0, 1), "what runs may have ended"
    assert [chosen(length) for length in (255, 256)] == [(1, None), (0, 1)], "as fast to compute as to move"
    coarse = Router(range(3), cache=replace(CACHE, block_size=512), max_num_seqs=64)
    for length, replica in ((511, 1), (513, 0)):
        request = asked(str(length), [length] * length)
        assert coarse.place(request, idle(3), places) == replica, "only full blocks are stored"
    assert chosen(400, 20, 1, 0) == (2, None), "it would wait for nobody's sake"
    assert chosen(400, 20, 1, 2) == (1, None)
    assert chosen(400, 12, 1, 2) == (0, 1), "12 decodes take as long as 384 tokens"
    elsewhere, nowhere = ReplicaPlace("prefill", "other host"), ReplicaPlace("decode")
    assert chosen(400, places=places | {0: elsewhere}) == (1, None)
    assert chosen(400, places=places | {1: nowhere, 2: nowhere}) == (1, None), "the store is down"
    assert chosen(400, places={number: ReplicaPlace("prefill", "host") for number in range(3)}) == (0, None)


class TwoHosts:
    """Replica 0 is for prompts, on one host, and 1 for decodes, on the other, as slow as the first: 1 ms for a token. A
    token has 1 MiB of KV."""

    def __init__(self, *, has_speed: bool = True) -> None:
        self.places = {
            0: ReplicaPlace("prefill", "first", frozenset({"second"})),
            1: ReplicaPlace("decode", "second", frozenset({"first"})),
        }
        self.now, self.number = 100.0, 0
        self.router = Router(
            range(2),
            cache=CACHE,
            max_num_seqs=64,
            store=KVStoreConfig(memory_bytes=10_000 << 20, num_tokens=10_000),
            clock=lambda: self.now,
        )
        for _ in range(3 * has_speed):
            self.place(0, tokens=100)
            self.router.on_first_token(str(self.number), 0.164)
            self.router.on_finished(str(self.number), [])

    def place(self, running: int, tokens: int = 400) -> int:
        """Where a prompt is computed while so many requests run at the decode replica."""
        self.number += 1
        stats = {0: EngineStats(kv_blocks=2000), 1: EngineStats(running=running, kv_blocks=2000)}
        prompt = [self.number] * tokens
        return self.router.place(asked(str(self.number), prompt), stats, self.places)

    def ask(self, running: int, pause: float, recomputed: int = 16) -> int:
        """The same; the pause is so long if it is handed over."""
        number, request_id = self.place(running), str(self.number)
        self.router.on_first_token(request_id, 0.464)
        if number == 0:
            self.router.hand_over(request_id)
            self.router.on_continued(request_id, recomputed, pause)
        self.router.on_finished(request_id, [])
        self.now += 1.0
        return number


def test_a_prompt_is_computed_on_another_host_if_the_pause_is_worth_it() -> None:
    """At first the pause is assumed: 3.1 s for what takes 0.4 s to compute. Then it is measured, and an old measurement
    is forgotten."""
    two = TwoHosts()
    assert [two.ask(running, 0.05) for running in (0, 4, 8)] == [1, 1, 0]
    assert [two.ask(running, 0.05) for running in (0, 1, 0)] == [0, 0, 0]
    for _ in range(20):
        two.ask(20, 2.0)
    assert [two.ask(running, 2.0) for running in (0, 2, 6)] == [1, 1, 0]
    two.now += 600.0
    assert [two.ask(running, 0.05) for running in (4, 8)] == [1, 0]
    assert not any(load.open or load.blocks or load.waiting for load in two.router._loads.values())


def test_a_replica_that_drains_does_not_make_pauses_look_longer() -> None:
    """It would, if it was the fastest and they were counted in its tokens."""
    two = TwoHosts()
    two.router.on_replica_ready(2)
    two.router.place(asked("fast", [1] * 100), {2: EngineStats(kv_blocks=2000)})
    two.router.on_first_token("fast", 0.001)
    two.router.on_finished("fast", [])
    assert [two.ask(running, 0.05) for running in (0, 4, 8)] == [1, 1, 0], "as without it"


def test_nobody_gains_from_prompts_whose_kv_does_not_come() -> None:
    """Such as over a slow network: it is tried now and then."""
    two = TwoHosts()
    assert [two.ask(20, 1.5, recomputed=400) for _ in range(30)].count(0) in range(2, 5)
    assert [two.ask(20, 0.05) for _ in range(30)][-10:] == [0] * 10


def test_one_prompt_tries_whether_kv_comes_from_another_host() -> None:
    """Not all of a burst: what does not come is computed twice. The pause of these is short, so that only the loss of
    KV counts."""
    assert TwoHosts(has_speed=False).place(20) == 1, "3.1 s are not worth it, however fast the replicas are"
    two = TwoHosts()

    def burst() -> list[int]:
        return [two.place(20) for _ in range(8)]

    def end(*, recomputed: int) -> None:
        """Of all that were handed over."""
        for request_id, placed in [*two.router._placed.items()]:
            is_far = placed.replica == 0
            two.router.on_first_token(request_id, 0.464)
            if is_far:
                two.router.hand_over(request_id)
                two.router.on_continued(request_id, recomputed, 0.1)
            two.router.on_finished(request_id, [])

    assert burst() == [0] + [1] * 7
    end(recomputed=400)
    assert burst() == [1] * 8, "it has lost everything"
    end(recomputed=16)
    two.now += 60.0
    assert burst() == [0] + [1] * 7
    end(recomputed=16)
    for _ in range(6):
        two.ask(20, 0.1)
    two.now += 60.0
    assert burst() == [0] * 8


def test_replicas_of_the_same_host_come_first_and_only_stores_that_are_read_count() -> None:
    reads, near = frozenset({"first"}), ReplicaPlace("prefill", "second")
    router = Router(range(4), cache=CACHE, max_num_seqs=64)
    places = {
        0: ReplicaPlace("prefill", "first"),
        1: near,
        2: ReplicaPlace("decode", "second", reads),
        3: ReplicaPlace("decode", "third"),
    }

    def chosen(number: int, *running: int, used: int = 0, last: int = 2) -> int:
        stats = {
            each: EngineStats(running=count, kv_blocks=2000) for each, count in enumerate((*running, 9 * (last != 3)))
        }
        stats[1].kv_blocks_used = used
        replica = router.place(asked(str(number), [number] * 400), stats, places)
        router.on_finished(str(number), [])
        return replica

    assert [chosen(number, 0, 0, 5) for number in range(3)] == [1, 1, 1]
    assert chosen(3, 0, 20, 5) == 0, "the other has less to do"
    assert chosen(4, 0, 0, 5, used=1990) == 0, "the other has room"
    assert chosen(5, 0, 0, 50, last=3) == 3, "its store reads from no other"


def test_a_prompt_counts_where_it_is_expected_from_the_beginning() -> None:
    places = {0: ReplicaPlace("prefill", "host"), 1: ReplicaPlace("decode", "host"), 2: ReplicaPlace("decode", "host")}
    router = Router(range(3), cache=CACHE, max_num_seqs=64)
    for number in range(4):
        request = asked(str(number), [number] * 400)
        assert router.place(request, idle(3), places) == 0
        assert router.successor(str(number)) == 1 + number % 2
        router.on_first_token(str(number), 0.1)
        router.hand_over(str(number))
        assert router._placed[str(number)].pending == BLOCK
        assert router.successor(str(number)) is None
    for number in range(4):
        router.on_continued(str(number), 16, 0.05)
        router.on_finished(str(number), [1] * 20)
    turn = [3] * 400 + [1] * 20
    assert router.place(asked("turn", turn), idle(3), places) == 2, "it has the conversation"


def test_no_more_prompts_are_handed_over_than_the_store_holds() -> None:
    """Those that wait for a decode replica without room would be evicted, and computed again when it has some."""
    places = {0: ReplicaPlace("prefill", "host"), 1: ReplicaPlace("decode", "host")}
    router = Router(range(2), cache=CACHE, max_num_seqs=64, store=KVStoreConfig(memory_bytes=0, num_tokens=1000))

    def place(request_id: str) -> int:
        chosen = router.place(asked(request_id, [int(request_id)] * 400), idle(2), places)
        if chosen == 0:
            router.on_first_token(request_id, 0.1)
            router.hand_over(request_id)
        return chosen

    assert [place(str(number)) for number in range(4)] == [0, 0, 1, 1]
    router.on_first_token("0", 0.0)
    assert [place(str(number)) for number in range(4, 6)] == [0, 1]


def test_a_replica_that_does_not_find_what_was_stored_has_the_prompt_to_compute() -> None:
    places = {0: ReplicaPlace("prefill", "host"), 1: ReplicaPlace("decode", "host")}
    router = Router(range(2), cache=CACHE, max_num_seqs=64)
    pending = []
    for number in range(20):
        assert router.place(asked(str(number), [number] * 400), idle(2), places) == 0
        router.on_first_token(str(number), 0.1)
        router.hand_over(str(number))
        pending.append(router._loads[1].pending)
        router.on_continued(str(number), 400 if number < 10 else 16, 0.05)
        assert router._loads[1].pending == 0
        router.on_finished(str(number), [])
    assert (pending[0], pending[1]) == (BLOCK, 80)
    assert pending[10] > 350
    assert pending[19] < 100
