"""KV from the store and to it: what is loaded, for whom, what is stored, and what a store cannot do wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig, KVStoreConfig, LoraConfig, SpeculativeConfig
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.kv_store import (
    DISK,
    MEMORY,
    PEER,
    FoundKV,
    FromStore,
    GrantedKV,
    KVCopied,
    KVEntry,
    KVStoreOpened,
    KVStoreStats,
    LoadedKV,
    LoadKV,
    LookUpKV,
    OfferKV,
    ReleaseKV,
    ToStore,
)
from quire.engine.scheduler import (
    kv_cache_manager,
    kv_connection,
    kv_copies_in_flight,
    kv_load_choice,
    kv_loads,
    kv_stores,
    kv_transfers,
)
from tests.fakes.configs import Windows, engine_config
from tests.fakes.drafts import Always
from tests.fakes.kv_router import KVRouter
from tests.fakes.kv_transfers import SIZE, FakeCopies, FakeStore, layout
from tests.fakes.model import FAILURE
from tests.unit.engine.scheduler.test_adapters import EngineWithAdapters, adapted, adapter
from tests.unit.engine.scheduler.test_kv_events import plain, take, with_events
from tests.unit.engine.scheduler.test_model_drafts import MOST, mixed
from tests.unit.engine.scheduler.test_scheduler import AHEAD, WINDOWS, Engine, continuation, tightened


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A turn takes 10 ms. Recurrent states are kept often, and small caches hold enough for copies."""
    clock = Clock()
    monkeypatch.setattr(kv_cache_manager, "STATE_INTERVAL", 8)
    monkeypatch.setattr(kv_stores, "_HELD_SHARE", 2)
    for module in (kv_connection, kv_loads, kv_copies_in_flight, kv_stores, kv_transfers):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(kv_transfers, "kv_layout", lambda config: layout(config.cache.groups))
    return clock


class EngineWithStore(Engine):
    """Messages arrive, and copies end, when `arrives` says so."""

    def __init__(self, config: EngineConfig, clock: Clock, num_entries: int = 4096) -> None:
        config = replace(config, kv_store=KVStoreConfig(memory_bytes=1 << 20, min_tokens=8))
        super().__init__(config)
        kinds = layout(config.cache.groups).kinds
        self.clock, self.store, self.core = clock, FakeStore(len(kinds), num_entries), 0
        self.copies = FakeCopies(self.model, self.store, kinds, config.parallel.world_size)
        self.sent: list[ToStore] = []
        self.replies: list[FromStore] = []
        self.arrives: Callable[[], bool] = lambda: True
        self.is_silent = False
        self.transfers = self.scheduler.kv_transfers
        self.transfers.connect(self.sent.append, 0, 1)
        execute = self.model.execute

        def with_copies(plan: Any) -> Any:
            if plan.kv_copies is None:
                return execute(plan)
            self.copies.begin(plan.kv_copies)
            result = execute(plan)
            self.copies.begin_step(plan.kv_copies, has_failed=bool(result.failure))
            return result

        self.model.execute = with_copies  # type: ignore[method-assign]
        for _ in range(3):
            self.turn()

    def turn(self) -> bool:
        self.clock.now += 0.01
        self.replies += [KVStoreStats()] * (not self.is_silent)
        self.exchange()
        while self.copies.pending and self.arrives():
            for answer in self.copies.end(random.Random(len(self.model.plans)).randrange(len(self.copies.pending))):
                self.transfers.on_copied(answer)
            self.scheduler.check_integrity()
        ran = super().turn()
        return ran or self.transfers.is_busy or bool(self.sent)

    def exchange(self) -> None:
        while self.sent and self.arrives():
            self.replies += self.store.handle(self.sent.pop(0), self.core)
        self.replies += self.store.take_came(self.transfers.loads._loads)
        while self.replies and self.arrives():
            self.transfers.on_message(self.replies.pop(0))
            self.scheduler.check_integrity()

    def rest(self) -> None:
        """Turn until nothing is under way."""
        while self.turn():
            pass

    def ask(self, request_id: str, prompt: list[int], count: int = 4, **more: Any) -> list[int]:
        """Serve one request alone; returns its tokens."""
        self.add(request_id, prompt, max_tokens=count, **more)
        while self.scheduler.requests:
            self.turn()
        if not self.is_silent:
            self.rest()
        assert self.tokens(request_id) == continuation(prompt, count)
        return self.tokens(request_id)

    def announced(self) -> set[tuple[str, int, int]]:
        """What routers should know: medium, group, and number in events."""
        kv, store, kinds = self.scheduler.kv, self.store, self.copies.kinds
        assert kv.listener is not None
        device = {("GPU", group, block.number) for block, group in kv.listener._announced.values()}
        return device | {
            ({MEMORY: "CPU", DISK: "STORAGE"}[tier], group, store.described[link][0])
            for tier, kind, link in store.tiers
            for group in kinds[kind].groups
        }

    def received(self, kind: type[ToStore]) -> list[Any]:
        return [each for each in self.store.received if isinstance(each, kind)]


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=length)


def small(**changes: Any) -> EngineConfig:
    """Room for little more than one request of 60 tokens."""
    return engine_config(**{"num_blocks": 20, "max_num_batched_tokens": 32, **changes})


@pytest.mark.parametrize(
    ("stages", "depth", "windows", "fails"),
    [(*ahead, WINDOWS[(2 * i + j) % 7], ahead[0] == 1 and j == 1) for i, ahead in enumerate(AHEAD) for j in (0, 1)],
)
def test_answers_do_not_depend_on_the_store(
    clock: Clock, stages: int, depth: int, windows: Windows, fails: bool
) -> None:
    """Late and lost entries, failed copies, a store that is too small and starts again; preemptions, aborts, resets,
    shares and, on one stage, failed steps. With two plans in flight on one stage, rows with the drafts of a model are
    chained.
    """
    config = engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=32)
    config = replace(config, scheduler=replace(config.scheduler, speculative=SpeculativeConfig()))
    page, least = config.cache.blocks_per_page, config.cache.max_blocks(config.model.max_model_len, 32)
    config = replace(config, cache=replace(config.cache, num_blocks=least + 12 * page))
    engine, rng = EngineWithStore(with_events(config), clock, 80 * len(windows)), random.Random(depth + 10 * fails)
    engine.arrives = lambda: rng.random() < 0.8
    engine.store.loses = lambda entry: rng.random() < 0.02
    engine.store.tier = lambda entry: MEMORY + entry.link[0] % 2
    engine.copies.fails = lambda: rng.random() < 0.02
    if (stages, depth) == (1, 2):
        engine.scheduler.speculation, engine.model.guess = Always(MOST, 4 * (MOST + 1)), mixed
    if fails:
        engine.model.fails = lambda plan: plan.num_rows > 0 and rng.random() < 0.03
    texts = [text(60, seed) for seed in range(4)]
    given: dict[str, list[int]] = {}

    def disturb(turn: int) -> None:
        if turn < 400 and turn % 4 < 2:
            given[str(turn)] = rng.choice(texts)[: rng.randrange(1, 61)] + text(rng.randrange(4), turn)
            engine.add(
                str(turn), given[str(turn)], share=bytes([turn % 2]), max_tokens=rng.randrange(1, 16), priority=turn % 2
            )
            if rng.random() < 0.2:
                engine.abort(str(rng.randrange(turn + 1)))
        if turn < 400 and turn % 40 == 39:
            engine.transfers.reset()
            engine.scheduler.kv.unpublish_all()
        if turn == 200:
            engine.store.restart("second")

    engine.run(disturb, at_least=400)
    engine.arrives = lambda: True
    engine.rest()
    for request_id, prompt in given.items():
        (end,), tokens = engine.ends(request_id), engine.tokens(request_id)
        assert tokens == continuation(prompt, 16)[: len(tokens)]
        assert end in (("length", "abort", "error") if fails else ("length", "abort"))
        assert end != "error" or engine.outputs[request_id][-1].error == FAILURE
    stats = engine.scheduler.snapshot()
    assert stats.kv_loaded_memory_tokens + stats.kv_loaded_disk_tokens > 0
    assert stats.kv_failed_load_tokens > 0
    assert stats.preemptions > 0 or windows != (None,)
    assert not engine.store.granted
    assert not engine.store.loading
    with closing(KVRouter()) as router:
        for event in plain(take(engine)):
            router.apply(event)
        assert set(router.blocks) == engine.announced()
        assert {medium for medium, _, _ in router.blocks} == {"GPU", "CPU", "STORAGE"}


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(("stages", "depth"), [(1, 1), (1, 2), (2, 2)])
def test_what_has_left_the_device_is_loaded(clock: Clock, stages: int, depth: int, windows: Windows) -> None:
    """Turns of conversations that take turns, in a cache for one of them."""
    config = engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=32)
    engine = EngineWithStore(tightened(config), clock)
    engine.store.tier = lambda entry: (DISK, PEER, MEMORY, MEMORY)[entry.link[0] % 4]
    texts = [text(30, seed) for seed in range(4)]
    for turn in range(3):
        for number in range(4):
            before, request_id = len(texts[number]), f"{turn}.{number}"
            texts[number] += engine.ask(request_id, texts[number], 8) + text(5, turn)
            output = engine.outputs[request_id][-1]
            if turn == 2:
                cached, memory, disk, peer = output.num_cached_tokens, *output.num_loaded_tokens
                assert cached == (before - 6) // 4 * 4  # of the answer, the last token was not computed
                assert (memory > 10 and disk > 0 and peer > 0) or windows == (6,)  # for which there is room
                assert memory + disk + peer >= cached - 8 or windows == (6,)
    assert engine.scheduler.snapshot().kv_failed_load_tokens == 0


@pytest.mark.parametrize(("windows", "num_blocks"), [((None,), 48), ((None, 9, 9), 160)])
def test_conversations_beside_each_other_compute_little_twice(clock: Clock, windows: Windows, num_blocks: int) -> None:
    """In a tenth of the memory that they need: what is loaded stays until its request starts, and no load is begun for
    which there is no memory in the end."""
    config = engine_config(windows=windows, num_blocks=num_blocks, max_num_batched_tokens=64, max_model_len=160)
    engine, texts, num_computed = EngineWithStore(config, clock), [text(40, seed) for seed in range(16)], 0
    for turn in range(6):
        for number, prompt in enumerate(texts):
            engine.add(f"{turn}.{number}", prompt, max_tokens=8)
        while engine.scheduler.requests:
            engine.turn()
        for number, prompt in enumerate(texts):
            tokens = engine.tokens(f"{turn}.{number}")
            assert tokens == continuation(prompt, 8)
            num_computed += len(prompt) - engine.outputs[f"{turn}.{number}"][-1].num_cached_tokens
            texts[number] = prompt + tokens + text(6, turn)
    num_new = 16 * (40 + 5 * 7)  # of an answer, the last token is computed in the next turn
    assert num_new <= num_computed < 1.7 * num_new


def forget(engine: EngineWithStore, prompt: list[int]) -> None:
    """The device forgets a text."""
    hashes: list[bytes] = []
    kv_cache_manager.extend_hashes(hashes, prompt, 4)
    engine.scheduler.kv.unpublish(hashes)


def prepared(clock: Clock, prompt: list[int], **changes: Any) -> EngineWithStore:
    """An engine whose store has a prompt's blocks, and whose device has not."""
    engine = EngineWithStore(small(**changes), clock)
    engine.ask("before", prompt, 1)
    forget(engine, prompt)
    engine.store.received.clear()
    return engine


def test_a_request_names_the_store_that_has_its_prefix(clock: Clock) -> None:
    engine = prepared(clock, prompt := text(60))
    engine.ask("a", prompt, kv_peer="10.0.0.7:29560")
    assert [each.peer for each in engine.received(LookUpKV)] == ["10.0.0.7:29560"]


def test_a_silent_store_costs_one_request_little_and_then_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = prepared(clock, prompt := text(60))
    engine.store.handle = lambda message, core=0: engine.store.received.append(message) or []  # type: ignore[method-assign,func-returns-value]
    engine.is_silent = True
    begin = clock.now
    engine.ask("late", prompt)
    assert kv_loads._ANSWER_SECONDS < clock.now - begin < kv_loads._ANSWER_SECONDS + 0.3
    for seconds in (0.0, kv_connection.SILENCE_SECONDS):
        forget(engine, prompt)
        clock.now += seconds
        engine.store.received.clear()
        begin = clock.now
        engine.ask(f"unaffected {seconds}", prompt)
        assert clock.now - begin < 0.2
        assert not engine.received(LookUpKV)
    assert engine.copies.arenas[-1] == "", "ranks keep the memory of a store that may have ended"
    assert caplog.messages == ["the KV store has been silent for 3 s; requests compute their prefixes until it answers"]
    del engine.store.handle
    engine.is_silent = False
    clock.now += 1.0
    engine.rest()
    forget(engine, prompt)
    engine.ask("found", prompt)
    assert engine.outputs["found"][-1].num_loaded_tokens == (56, 0, 0)


def test_a_rank_that_cannot_copy_costs_one_request_a_load_until_it_can(clock: Clock) -> None:
    engine = prepared(clock, prompt := text(60))
    engine.copies.fails = lambda: True
    for number in range(3):
        forget(engine, prompt)
        engine.store.received.clear()
        engine.ask(f"failed {number}", prompt)
        assert len(engine.received(LookUpKV)) == (number == 0)
        assert engine.outputs[f"failed {number}"][-1].num_loaded_tokens == (0, 0, 0)
    engine.copies.fails = lambda: False
    forget(engine, prompt)
    engine.ask("another text is stored", text(30, seed=1))
    forget(engine, prompt)
    engine.ask("found", prompt)
    assert engine.outputs["found"][-1].num_loaded_tokens == (56, 0, 0)
    engine.copies.fails = lambda: True
    forget(engine, prompt)
    engine.ask("failed", prompt)
    engine.copies.fails = lambda: False
    clock.now += kv_copies_in_flight._RETRY_SECONDS
    forget(engine, prompt)
    engine.ask("found without a store", prompt)
    assert engine.outputs["found without a store"][-1].num_loaded_tokens == (56, 0, 0)


def test_a_store_that_not_all_ranks_can_reach_is_not_used(clock: Clock) -> None:
    config = small()
    parallel = replace(config.parallel, tensor_parallel_size=2, nodes=2)
    engine = EngineWithStore(replace(config, parallel=parallel), clock)
    assert not engine.transfers.is_open
    engine.ask("computed", text(40))
    assert not engine.received(LookUpKV)
    assert not engine.received(OfferKV)


def test_a_load_that_is_late_ends_with_what_has_come(clock: Clock) -> None:
    engine = prepared(clock, prompt := text(60))
    handle = engine.store.handle

    def first_half(message: ToStore, core: int = 0) -> list[FromStore]:
        return handle(message, core)[-1:]  # of a load, the first entries are in the second answer

    engine.store.handle = first_half  # type: ignore[method-assign]
    begin = clock.now
    engine.ask("late", prompt)
    assert kv_load_choice._LOAD_SECONDS < clock.now - begin < kv_load_choice._LOAD_SECONDS + 0.3
    output, stats = engine.outputs["late"][-1], engine.scheduler.snapshot()
    assert output.num_loaded_tokens == (28, 0, 0)
    assert stats.kv_failed_load_tokens == 28
    released = [number for each in engine.received(ReleaseKV) for number in each.numbers]
    assert sorted(released) == [*range(7)], "what has been copied is released before the load ends"
    assert not engine.store.loading


def test_a_load_is_late_whose_copies_do_not_end(clock: Clock) -> None:
    engine = prepared(clock, prompt := text(61), num_blocks=60)
    engine.add("late", prompt, max_tokens=3)
    while not engine.copies.pending:
        engine.turn()
    held, engine.copies.pending = engine.copies.pending, []
    while engine.scheduler.requests:
        engine.turn()
    assert engine.tokens("late") == continuation(prompt, 3)
    assert engine.outputs["late"][-1].num_cached_tokens == 0
    assert engine.scheduler.snapshot().kv_failed_load_tokens == 60
    engine.copies.pending = held
    engine.rest()
    assert not engine.store.loading


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_load_is_not_late_because_steps_are_long(clock: Clock, depth: int) -> None:
    engine = prepared(clock, prompt := text(60), num_blocks=60, depth=depth)
    engine.add("runs", text(5, 1), max_tokens=30)
    engine.turn()
    execute = engine.model.execute

    def slowly(plan: Any) -> Any:
        clock.now += 3.0 * bool(plan.num_rows)
        return execute(plan)

    engine.model.execute = slowly  # type: ignore[method-assign]
    engine.ask("a", prompt)
    assert engine.outputs["a"][-1].num_loaded_tokens == (56, 0, 0)


def test_loads_of_the_same_entries_are_one(clock: Clock) -> None:
    engine = prepared(clock, prompt := text(60), num_blocks=60)
    for number in range(3):
        engine.add(str(number), [*prompt, number], max_tokens=3)
    engine.rest()
    assert [len(each.entries) for each in engine.received(LoadKV)] == [15]
    for number in range(3):
        assert engine.tokens(str(number)) == continuation([*prompt, number], 3)
    assert [engine.outputs[str(number)][-1].num_loaded_tokens for number in range(3)] == [
        (60, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
    ]


def test_running_requests_take_the_blocks_of_loads(clock: Clock) -> None:
    """Of the newest first; a load under way keeps those that ranks are copying."""
    engine = prepared(clock, prompt := text(40), num_blocks=20)
    engine.add("runs", [5, 6], max_tokens=70)
    engine.turn()
    engine.add("waits", prompt, max_tokens=3)
    while not engine.transfers.loads._loads:
        engine.turn()
    engine.arrives = lambda: False
    for _ in range(60):
        engine.turn()
    assert engine.scheduler.snapshot().kv_loads == 1
    assert engine.scheduler.stats.preemptions == 0
    engine.arrives = lambda: True
    engine.rest()
    assert engine.tokens("runs") == continuation([5, 6], 70)
    assert engine.tokens("waits") == continuation(prompt, 3)
    assert not engine.store.loading


def turn_without_copies(engine: EngineWithStore) -> None:
    """A turn in which no copy ends."""
    engine.replies.append(KVStoreStats())
    engine.exchange()
    Engine.turn(engine)


def test_nobody_is_preempted_for_what_copies_will_return(clock: Clock) -> None:
    """The blocks of a finished request are being stored, and the running ones need them."""
    engine = EngineWithStore(engine_config(num_blocks=20, max_num_batched_tokens=64), clock)
    engine.add("ended", text(40), max_tokens=1)
    for number in range(2):
        engine.add(str(number), text(10, number), max_tokens=20)
    for _ in range(60):
        turn_without_copies(engine)
    assert engine.transfers.num_returning > 0
    assert len(engine.scheduler.running) == 2
    engine.rest()
    assert engine.scheduler.stats.preemptions == 0
    for number in range(2):
        assert engine.tokens(str(number)) == continuation(text(10, number), 20)


def test_no_more_wait_for_the_store_than_soon_find_a_place(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one plan hashes a bounded number of tokens for them."""
    monkeypatch.setattr(kv_loads, "_MORE_WAITING", 2)
    engine = EngineWithStore(engine_config(num_blocks=400, max_num_batched_tokens=32, max_num_seqs=4), clock)
    engine.add("runs", text(4), max_tokens=90)
    engine.turn()
    engine.store.received.clear()
    for number in range(10):
        engine.add(str(number), text(40, number), max_tokens=3)
    monkeypatch.setattr(kv_loads, "_MAX_HASHED", 100)
    engine.arrives = lambda: False
    engine.turn()
    assert len(engine.transfers.loads._asked) == 2
    for _ in range(5):
        engine.turn()
    assert len(engine.transfers.loads._asked) == 3 + 2
    assert len(engine.tokens("runs")) > 5
    engine.arrives = lambda: True
    engine.rest()
    for number in range(10):
        assert engine.tokens(str(number)) == continuation(text(40, number), 3)
    assert len(engine.received(LookUpKV)) == 10


def test_a_request_without_room_is_not_matched_twice_a_step(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineWithStore(small(num_blocks=20), clock)
    engine.add("runs", text(20), max_tokens=40)
    while len(engine.tokens("runs")) < 20:
        engine.turn()
    engine.add("waits", prompt := text(60, 1), max_tokens=3)
    engine.turn()
    kv, num_matches = engine.scheduler.kv, 0
    match = kv.match

    def counting(hashes: list[bytes]) -> list[int]:
        nonlocal num_matches
        num_matches += 1
        return match(hashes)

    monkeypatch.setattr(kv, "match", counting)
    for _ in range(10):
        engine.turn()
    assert num_matches == 10
    engine.rest()
    assert engine.tokens("waits") == continuation(prompt, 3)
    assert engine.received(LookUpKV)


def test_a_load_with_nothing_to_give_goes_on(clock: Clock) -> None:
    """All of it is being copied when a running request needs memory."""
    engine = prepared(clock, prompt := text(40), num_blocks=20)
    engine.add("waits", prompt, max_tokens=3)
    while not engine.copies.pending:
        turn_without_copies(engine)
    engine.transfers.loads.make_room(20)
    assert engine.transfers.loads._loads
    engine.rest()
    assert engine.scheduler.stats.kv_loads == 1
    assert engine.outputs["waits"][-1].num_loaded_tokens == (36, 0, 0)


def test_what_is_computed_faster_is_not_loaded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time, the store is doubted a little more, until it is tried again."""
    engine = prepared(clock, prompt := text(60))
    budget = engine.scheduler.token_budget
    monkeypatch.setattr(budget, "prompt_seconds", lambda start, end: (end - start) * 1e-8)
    for number in range(3):
        engine.ask(f"computed {number}", prompt)
        forget(engine, prompt)
    assert not engine.received(LoadKV)
    assert engine.outputs["computed 2"][-1].num_cached_tokens == 0
    for number in range(400):
        engine.ask(f"tried {number}", prompt, 1)
        forget(engine, prompt)
        if engine.received(LoadKV):
            break
    else:
        raise AssertionError("never tried")
    monkeypatch.setattr(budget, "prompt_seconds", lambda start, end: (end - start) * 1e-2)
    engine.ask("loaded", prompt)
    assert engine.outputs["loaded"][-1].num_loaded_tokens == (56, 0, 0)


def test_small_loads_say_nothing_about_large_ones() -> None:
    """Many loads of 8 MiB that take two turns of the loop, and few of 2 GiB."""
    rates, small, large = kv_load_choice.Rates(), {MEMORY: 8 << 20}, {MEMORY: 2 << 30}
    for _ in range(30):
        rates.learn(small, 0.1)
    assert 0.09 < rates.seconds(small) < 0.11
    assert rates.seconds(large) < 1.2
    rates.learn(large, 2.1)
    for _ in range(30):
        rates.learn(small, 0.1)
    assert 0.09 < rates.seconds(small) < 0.11
    assert 1.8 < rates.seconds(large) < 2.3
    for _ in range(30):  # a slow disk, which is known from small loads alone
        rates.learn({DISK: 32 << 20}, 3.2)
    assert 2.5 < rates.seconds({DISK: 32 << 20}) < 3.5
    assert rates.seconds({DISK: 320 << 20}) > 20


def test_what_has_come_of_earlier_loads_is_not_ahead(clock: Clock) -> None:
    engine = EngineWithStore(small(num_blocks=80), clock)
    texts = [text(60, seed) for seed in range(2)]
    for number, prompt in enumerate(texts):
        engine.ask(f"before {number}", prompt, 1)
        forget(engine, prompt)
    handle = engine.store.handle
    engine.store.handle = lambda message, core=0: handle(message, core)[-1:]  # type: ignore[method-assign]
    for number, prompt in enumerate(texts):
        engine.add(str(number), prompt, max_tokens=3)
        for _ in range(6):
            engine.turn()
    _, second = engine.transfers.loads._loads.values()
    assert second.ahead == {MEMORY: 7 * SIZE}  # half of the first load
    engine.rest()


def test_short_prefixes_are_neither_stored_nor_looked_up(clock: Clock) -> None:
    engine = EngineWithStore(small(), clock)
    engine.ask("short", text(6), 1)
    engine.ask("again", text(6), 1)
    assert not engine.received(OfferKV)
    engine.ask("long", text(40), 1)
    assert len(engine.store.entries) == 10
    engine.store.received.clear()
    engine.ask("on the device", text(40), 1)
    assert not engine.received(LookUpKV)


def test_what_is_stored_is_what_was_offered(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Entries are offered once with their parents, though a request computes them twice; wrong answers of the store and
    of ranks are not believed."""
    engine = EngineWithStore(small(num_blocks=60), clock)
    engine.ask("a", text(40), 1)
    (offer, *others) = engine.received(OfferKV)
    entries, parents = offer.entries, offer.parents
    for other in others:
        entries, parents = entries + other.entries, parents + other.parents
    assert parents == [b"", *(entry.link for entry in entries[:-1])]
    wrong: list[FromStore] = [
        GrantedKV([KVEntry(b"x" * 16, 7), entries[0]], [0, 1 << 40]),
        LoadedKV(12345, [0], [0], []),
        FoundKV(12345, []),
    ]
    engine.replies += wrong
    engine.rest()
    assert not engine.copies.pending
    engine.transfers.on_copied(KVCopied(0, [1 << 40]))
    assert "a copy that is not in flight" in caplog.text


@pytest.mark.parametrize("windows", [(None,), (None, "state", "state")])
def test_a_store_that_lacks_what_the_device_has_is_offered_it(clock: Clock, windows: Windows) -> None:
    """Once in a while: it was started again, or had no room."""
    config = engine_config(windows=windows, max_num_batched_tokens=32)
    engine = EngineWithStore(config, clock)
    engine.ask("a", prompt := text(40), 1)
    num_entries = len(engine.store.entries)
    engine.ask("at once", prompt + text(8, 1), 1)
    known = {entry for offer in engine.received(OfferKV)[:-1] for entry in offer.entries}
    assert known.isdisjoint(engine.received(OfferKV)[-1].entries)
    engine.store.restart("second")
    engine.replies.append(KVStoreOpened("second", 4096 * SIZE))
    engine.rest()
    assert engine.transfers.is_open
    engine.ask("b", prompt + text(8, 2), 1)
    assert len(engine.store.entries) >= num_entries
    engine.scheduler.kv.unpublish_all()
    engine.ask("c", prompt + text(8, 2), 1)
    assert engine.outputs["c"][-1].num_loaded_tokens[0] >= 40
    engine.store.entries.clear()  # it refused what it was offered
    engine.ask("d", prompt + text(8, 2), 1)
    assert len(engine.store.entries) < num_entries / 2  # what was computed again
    for number in range(2):
        clock.now += kv_stores._OFFER_AGAIN_SECONDS
        engine.ask(str(number), prompt + text(8, 3 + number), 1)
    assert len(engine.store.entries) >= num_entries


def test_an_idle_core_stores_what_is_left(clock: Clock) -> None:
    """A plan without rows has the copies. A decode's blocks are offered together."""
    engine = EngineWithStore(small(num_blocks=60), clock)
    engine.add("a", text(10), max_tokens=40)
    while engine.scheduler.requests:
        engine.turn()
    num_plans = len(engine.model.plans)
    engine.rest()
    assert len(engine.store.entries) == 12
    left = engine.model.plans[num_plans:]
    assert left
    assert all(plan.kv_copies is not None and plan.kv_copies.stores and not plan.num_rows for plan in left)
    assert len(engine.received(OfferKV)) <= 6


def test_copies_hold_a_share_of_the_pages(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page count once."""
    monkeypatch.setattr(kv_stores, "_HELD_SHARE", 10)
    engine = EngineWithStore(engine_config(windows=(None, "state", "state"), num_blocks=90), clock)
    engine.add("a", text(37), max_tokens=1)
    most = 0
    while engine.turn():
        copied = [block for copy, *_ in engine.copies.pending for block in copy.blocks]
        pages = {block // 3 for block in copied}
        assert len(pages) <= 3
        most = max(most, len(copied))
    assert most == 5


def test_a_state_is_there_when_it_is_granted(clock: Clock) -> None:
    """Though the device has room for few, and others need it before the store answers."""
    config = engine_config(windows=(None, "state", "state"), num_blocks=90, max_num_batched_tokens=32)
    engine = EngineWithStore(config, clock)
    engine.add("a", text(37), max_tokens=1)
    while engine.scheduler.requests:
        engine.turn()
    engine.arrives = lambda: False
    for number in range(6):
        engine.add(str(number), text(30, 1 + number), max_tokens=8)
    while engine.scheduler.requests:
        engine.turn()
    engine.arrives = lambda: True
    engine.rest()
    states = [kind for kind, each in enumerate(engine.copies.kinds) if engine.model.groups[each.groups[0]].is_state]
    hashes: list[bytes] = []
    kv_cache_manager.extend_hashes(hashes, text(37), 4)
    assert all(KVEntry(hashes[8], kind) in engine.store.entries for kind in states)


@pytest.mark.parametrize("windows", [(None, "state"), (None, -9)], ids=str)
def test_a_request_that_starts_has_its_pages(clock: Clock, windows: Windows) -> None:
    """Though states that it finds in the prefix cache, and does not need, are offered to another store."""
    engine = EngineWithStore(engine_config(windows=windows, num_blocks=360, max_num_batched_tokens=32), clock)
    engine.ask("a", prompt := text(33), 1)
    engine.store.restart("second")
    engine.replies.append(KVStoreOpened("second", 4096 * SIZE))
    engine.rest()
    assert engine.transfers.is_open
    scheduler, kv = engine.scheduler, engine.scheduler.kv
    engine.add("b", prompt + text(25, 1), max_tokens=1)
    (request,) = scheduler.requests.values()
    prefix = kv.match(scheduler.blocks.reusable_hashes(request))
    num_free = kv.max_pages_needed(58, 32, prefix) + len(kv.pages(kv.without_freed(prefix)))
    kv.allocate(kv.num_free - num_free)
    assert scheduler.schedule() is not None
    assert request.num_computed_tokens > 32
    assert engine.transfers.is_storing


def test_a_reset_keeps_nothing_of_what_is_under_way(clock: Clock) -> None:
    engine = prepared(clock, prompt := text(60))
    engine.add("a", prompt, max_tokens=3)
    while not any(isinstance(copy, kv_loads.LoadCopy) for copy in engine.transfers._copies.by_number.values()):
        engine.turn()
    engine.transfers.reset()
    engine.rest()
    assert engine.outputs["a"][-1].num_cached_tokens == 0
    assert engine.tokens("a") == continuation(prompt, 3)


def test_a_rank_that_stops_copying_is_named(clock: Clock) -> None:
    """But not one that makes other copies first, or whose core was stopped, nor for copies that wait for their step."""
    engine = EngineWithStore(small(num_blocks=60), clock)
    transfers, end = engine.transfers, engine.copies.end
    silent: list[KVCopied] = []

    def stuck(number: int) -> list[KVCopied]:
        answers = end(number)
        silent.extend(answers)
        return []

    engine.copies.end = stuck  # type: ignore[method-assign]
    engine.add("a", text(40), max_tokens=1)
    while not silent:
        engine.turn()
        assert not transfers.hung_ranks(10.0)
    for _ in range(3):
        clock.now += 4.0
        engine.turn()
        assert not transfers.hung_ranks(10.0)
        transfers.on_copied(silent.pop())
    clock.now += 60.0
    assert not transfers.hung_ranks(10.0)
    for _ in range(3):
        clock.now += 4.0
        hung = transfers.hung_ranks(10.0)
    assert hung == [0]
    for answer in silent:
        transfers.on_copied(answer)
    assert not transfers.hung_ranks(10.0)


def test_routers_are_told_of_what_is_loaded(clock: Clock) -> None:
    engine, router, prompt = EngineWithStore(with_events(small()), clock), KVRouter(), text(60)

    def known() -> Counter[str]:
        for event in plain(take(engine)):
            router.apply(event)
        assert set(router.blocks) == engine.announced()
        return Counter(medium for medium, _, _ in router.blocks)

    engine.ask("before", prompt, 1)
    assert known() == {"GPU": 15, "CPU": 15}
    about = {(group, number): block for (_, group, number), block in router.blocks.items()}
    assert about == {key[1:]: block for key, block in router.blocks.items() if key[0] == "GPU"}
    forget(engine, prompt)
    assert known() == {"CPU": 15}
    engine.ask("a", prompt, 3)
    assert sum(engine.outputs["a"][-1].num_loaded_tokens) > 0
    assert known() == {"GPU": 15, "CPU": 15}
    engine.transfers.reset()
    engine.scheduler.kv.unpublish_all()
    assert known() == {"CPU": 15}, "a router keeps what the store has"
    engine.store.described.clear()  # as for what an earlier server has left on disk
    engine.store.told = None
    engine.exchange()
    engine.ask("b", prompt, 3)
    assert known() == {"GPU": 15, "CPU": 15}
    engine.is_silent = True
    engine.clock.now += 60
    engine.transfers.poll()
    engine.store.described.clear()
    assert known() == {"GPU": 15}
    router.close()


def test_routers_are_told_of_what_is_stored_for_another_replica(clock: Clock) -> None:
    """It is offered before it is computed, so before events can name it."""
    engine = EngineWithStore(with_events(small(max_num_batched_tokens=16)), clock)
    engine.add("a", text(60), hands_over=True, max_tokens=4)
    engine.rest()
    assert engine.outputs["a"][-1].is_handed_over
    with closing(KVRouter()) as router:
        for event in plain(take(engine)):
            router.apply(event)
        assert set(router.blocks) == engine.announced()
        assert Counter(medium for medium, _, _ in router.blocks) == {"GPU": 15, "CPU": 15}


def test_salts_are_texts_of_their_own(clock: Clock) -> None:
    engine = EngineWithStore(small(), clock)
    for number in range(2):
        for salt in (b"", b"a" * 16, b"b" * 16):
            engine.ask(f"{number}{salt!r}", text(60), 1, cache_salt=salt)
            assert engine.outputs[f"{number}{salt!r}"][-1].num_loaded_tokens[0] > 40 * number - 1
            assert (engine.outputs[f"{number}{salt!r}"][-1].num_cached_tokens > 0) == (number > 0)


def test_a_preempted_request_is_loaded(clock: Clock) -> None:
    engine = EngineWithStore(small(policy="priority"), clock)
    engine.add("preempted", text(20), priority=1, max_tokens=50)
    engine.add("urgent", text(20, 1), max_tokens=55)
    engine.rest()
    assert engine.scheduler.stats.preemptions == 1
    assert engine.tokens("preempted") == continuation(text(20), 50)
    (load,) = engine.received(LoadKV)
    assert len(load.entries) > 5
    assert engine.outputs["preempted"][-1].num_loaded_tokens == (0, 0, 0)  # when it started first
    stats = engine.scheduler.stats
    assert stats.kv_loads == 1
    assert stats.kv_loaded_memory_tokens <= stats.prefix_hit_tokens, "both count what was found when it started first"


def test_aborts_while_something_is_under_way(clock: Clock) -> None:
    """In each state of a load: nothing stays behind, at the store neither."""
    for turns in range(9):
        engine = prepared(clock, prompt := text(60))
        engine.add("a", prompt, max_tokens=5)
        engine.add("b", prompt, max_tokens=5)
        engine.arrives = iter([True, False] * 500).__next__
        for _ in range(turns):
            engine.turn()
        engine.abort("a")
        engine.scheduler.check_integrity()
        engine.arrives = lambda: True
        engine.rest()
        assert engine.tokens("b") == continuation(prompt, 5)
        assert not engine.store.loading
        assert not engine.store.granted
        assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_blocks


class EngineWithBoth(EngineWithStore, EngineWithAdapters):
    pass


@pytest.mark.parametrize(("stages", "depth"), [(1, 2), (2, 2)])
def test_requests_wait_for_adapters_and_for_the_store(clock: Clock, stages: int, depth: int) -> None:
    config = replace(
        engine_config(stages=stages, depth=depth, max_num_batched_tokens=32, num_blocks=60),
        lora=LoraConfig(num_slots=2, device_bytes=2, host_bytes=3),
    )
    engine, rng = EngineWithBoth(config, clock), random.Random(depth)
    engine.arrives = lambda: rng.random() < 0.7
    known, texts = [adapter(name) for name in range(5)], [text(50, seed) for seed in range(2)]
    given: dict[str, tuple[list[int], AdapterRef | None]] = {}

    def disturb(turn: int) -> None:
        if turn < 150:
            prompt, chosen = rng.choice(texts)[: rng.randrange(20, 50)], rng.choice([None, *known])
            given[str(turn)] = prompt, chosen
            engine.add(str(turn), prompt, adapter=chosen, share=bytes([turn % 3]), max_tokens=rng.randrange(1, 16))
            if rng.random() < 0.1:
                engine.abort(str(rng.randrange(turn + 1)))

    engine.run(disturb, at_least=150)
    engine.arrives = lambda: True
    engine.rest()
    for request_id, (prompt, chosen) in given.items():
        whole = continuation(prompt, 16) if chosen is None else adapted(prompt, chosen, 16)
        assert engine.tokens(request_id) == whole[: len(engine.tokens(request_id))]
        assert engine.ends(request_id)[0] in ("length", "abort")
    stats = engine.scheduler.snapshot()
    assert stats.adapter_swaps > 10
    assert stats.kv_loads > 10
    assert not engine.store.granted
    assert not engine.store.loading
