"""Requests that compute a prefix from its beginning while the store brings it from its end."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.kv_store import DISK, MEMORY, NO_TIER, FromStore, LoadedKV, LoadKV, ReleaseKV, ToStore
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.scheduler import kv_copies_in_flight, kv_load_choice
from quire.engine.scheduler.kv_load_choice import Found, LoadChoice, PrefixLoad
from quire.engine.scheduler.scheduler import Scheduler
from tests.fakes.configs import Windows, engine_config
from tests.fakes.kv_transfers import SIZE, layout
from tests.fakes.model import FAILURE
from tests.unit.engine.scheduler.test_kv_transfers import Clock, EngineWithStore, clock, text
from tests.unit.engine.scheduler.test_scheduler import AHEAD, WINDOWS, continuation

__all__ = ["clock"]

TOKEN = 0.002
"""Seconds for which a token is computed."""


class TimedEngine(EngineWithStore):
    """Steps take their time for each token, and the store brings one entry after the other."""

    def __init__(self, config: EngineConfig, clock: Clock, entry_seconds: float, expected: float | None = None) -> None:
        """A load is expected to take `expected` seconds for each entry; None: what it does."""
        self.coming, self.entry_seconds, self.next_at, self.num_met = deque[LoadedKV](), entry_seconds, 0.0, 0
        self.mixes_order = False
        super().__init__(config, clock)
        expected = entry_seconds if expected is None else expected
        loads, handle, execute = self.transfers.loads, self.store.handle, self.model.execute
        loads._choice.rates.seconds = lambda work: sum(work.values()) / SIZE * expected  # type: ignore[method-assign]
        self.scheduler.token_budget.prompt_seconds = lambda start, end: (end - start) * TOKEN  # type: ignore[method-assign]

        def slowly(message: ToStore, core: int = 0) -> list[FromStore]:
            answers = handle(message, core)
            if isinstance(message, LoadKV) and not self.coming:
                self.next_at = clock.now + self.entry_seconds
            for each in [*answers] if self.mixes_order else answers[::-1]:
                if isinstance(each, LoadedKV):
                    pairs = zip(each.numbers, each.offsets, strict=True)
                    self.coming += [LoadedKV(each.call_id, [number], [offset], []) for number, offset in pairs]
                    answers[answers.index(each)] = LoadedKV(each.call_id, [], [], each.failed)
            if isinstance(message, ReleaseKV) and not message.numbers:
                self.coming = deque(each for each in self.coming if each.call_id != message.call_id)
            return answers

        def timed(plan: Any) -> Any:
            clock.now += TOKEN * plan.num_tokens
            return execute(plan)

        take_met = loads.take_met

        def counting() -> list[Any]:
            self.num_met += len(met := take_met())
            return met

        self.store.handle = slowly  # type: ignore[method-assign]
        self.model.execute = timed  # type: ignore[method-assign]
        loads.take_met = counting  # type: ignore[method-assign]

    def turn(self) -> bool:
        while self.coming and self.next_at <= self.clock.now:
            self.replies.append(self.coming.popleft())
            self.next_at += self.entry_seconds
        return super().turn() or bool(self.coming)

    def exchange(self) -> None:
        super().exchange()
        super().exchange()  # the store has answers long before a step ends

    def seconds(self, request_id: str, prompt: list[int]) -> float:
        """Return the time to the first token of a request alone, of which the device has nothing."""
        self.scheduler.kv.unpublish_all()
        begin = self.clock.now
        self.add(request_id, prompt, max_tokens=1)
        while self.scheduler.requests:
            self.turn()
        seconds = self.clock.now - begin
        self.rest()
        assert self.tokens(request_id) == continuation(prompt, 1)
        assert self.scheduler.kv.num_free == self.scheduler.kv.num_blocks // self.blocks_per_page
        assert not self.store.loading
        return seconds


def long(**changes: Any) -> EngineConfig:
    return engine_config(
        **{"num_blocks": 600, "max_num_batched_tokens": 128, "max_model_len": 1100, "max_num_seqs": 4, **changes}
    )


@pytest.mark.parametrize(("slower", "depth"), [(1.0, 1), (1.0, 2), (0.5, 1), (3.0, 1)])
def test_both_ends_meet(clock: Clock, slower: float, depth: int) -> None:
    """The time of a load and a computation, of which neither waits for the other."""
    engine, prompt = TimedEngine(long(depth=depth), clock, 4 * TOKEN * slower), text(1021)
    computed = engine.seconds("computed", prompt)
    num_tokens = sum(plan.num_tokens for plan in engine.model.plans)
    both = engine.seconds("both", prompt)
    num_tokens = sum(plan.num_tokens for plan in engine.model.plans) - num_tokens
    loaded = computed * slower
    assert both < 1.15 * computed * loaded / (computed + loaded)
    assert engine.num_met == 1
    output, stats = engine.outputs["both"][-1], engine.scheduler.snapshot()
    num_loaded = output.num_loaded_tokens[0]
    assert output.num_cached_tokens == num_loaded == stats.kv_loaded_memory_tokens == stats.prefix_hit_tokens
    assert stats.kv_failed_load_tokens == 0
    assert 1021 - num_loaded <= num_tokens < 1021 - num_loaded + 16 * depth, "little is computed that is also loaded"


@pytest.mark.parametrize("real", [0.25, 5.0])
def test_a_wrong_prediction_costs_little(clock: Clock, real: float) -> None:
    """The store is much faster, or slower, than expected."""
    engine, prompt = TimedEngine(long(), clock, 4 * TOKEN * real, 4 * TOKEN), text(1021)
    computed = engine.seconds("computed", prompt)
    assert engine.seconds("both", prompt) < 0.9 * computed * min(1.0, real) + 128 * TOKEN
    assert engine.num_met == 1


def test_the_rate_is_learned_from_what_has_come(clock: Clock) -> None:
    """Though no load is ever complete."""
    engine, prompt = TimedEngine(long(), clock, 4 * TOKEN), text(1021)
    rates = engine.transfers.loads._choice.rates
    learned = list[tuple[int, float]]()
    rates.learn = lambda work, seconds: learned.append((work[MEMORY], seconds))  # type: ignore[method-assign]
    for number in range(2):
        engine.seconds(str(number), prompt)
    ((came, seconds),) = learned
    assert 100 < came / SIZE < 160
    assert came / SIZE * engine.entry_seconds == pytest.approx(seconds, rel=0.1)


def test_a_load_that_brings_nothing_is_given_up(clock: Clock) -> None:
    """Its request computes all, and waits for nothing."""
    engine, prompt = TimedEngine(long(), clock, 4 * TOKEN), text(1021)
    computed = engine.seconds("computed", prompt)
    engine.store.loses = lambda entry: True
    assert engine.seconds("lost", prompt) == pytest.approx(computed, rel=0.1)
    stats = engine.scheduler.snapshot()
    assert (stats.kv_loads, engine.num_met) == (1, 0)
    assert stats.kv_failed_load_tokens > 500
    engine.entry_seconds = 1e6
    engine.store.loses = lambda entry: False
    assert engine.seconds("late", prompt) == pytest.approx(computed, rel=0.1)
    assert (stats.kv_loads, engine.num_met) == (2, 0)
    assert not engine.scheduler.kv_loads._beside


@pytest.mark.parametrize(("index", "loaded"), [(254, 1021), (128, 512), (3, 1021)])
def test_a_lost_entry_costs_what_is_behind_it(clock: Clock, index: int, loaded: int) -> None:
    """Of the `loaded` tokens before it, the others come; one that would have been computed costs nothing."""
    engine, prompt = TimedEngine(long(), clock, 2 * TOKEN), text(1021)
    computed = engine.seconds("computed", prompt)
    lost = sorted(engine.store.entries, key=engine.store.entries.__getitem__)[index]
    engine.store.loses = lambda entry: entry == lost
    expected = computed * (1021 - loaded) / 1021 + computed * loaded / 1021 / 3
    assert engine.seconds("both", prompt) < expected + 2 * 128 * TOKEN
    assert engine.num_met == 1
    assert engine.outputs["both"][-1].num_loaded_tokens[0] > 0.4 * loaded


def test_a_load_that_begins_again_may_bring_nothing(clock: Clock) -> None:
    """Its request goes on, and leaves nothing to others that nobody needs."""
    engine, prompt = TimedEngine(long(), clock, 4 * TOKEN), text(1021)
    engine.seconds("before", prompt)
    engine.scheduler.kv.unpublish_all()
    engine.entry_seconds = 1e6
    engine.add("a", prompt, max_tokens=5)
    while not (load := next(iter(engine.transfers.loads._beside.values()), None)) or load.request.slot is None:
        engine.turn()
    engine.replies.append(LoadedKV(load.call_id, [], [], [0]))
    while not engine.outputs["a"]:
        engine.turn()
    assert len(engine.received(LoadKV)) == 2
    assert engine.scheduler.requests
    engine.scheduler.check_integrity()
    engine.rest()
    assert engine.tokens("a") == continuation(prompt, 5)


def test_copies_are_not_awaited_for_long(clock: Clock) -> None:
    """If all has come, but is not copied, a request waits as long as it would compute the rest, and then does so."""
    engine, prompt = TimedEngine(long(), clock, TOKEN / 100, 4 * TOKEN), text(1021)
    computed = engine.seconds("computed", prompt)
    begin, hung = engine.copies.begin, list[Any]()

    def hang(plan: Any) -> None:
        begin(plan)
        hung.extend(engine.copies.pending)
        engine.copies.pending.clear()

    engine.copies.begin = hang  # type: ignore[method-assign]
    engine.scheduler.kv.unpublish_all()
    began = clock.now
    engine.add("slow", prompt, max_tokens=1)
    while engine.scheduler.requests:
        engine.turn()
    assert 1.5 * computed < clock.now - began < 2.5 * computed
    assert engine.tokens("slow") == continuation(prompt, 1)
    engine.copies.begin = begin  # type: ignore[method-assign]
    engine.copies.pending += hung
    engine.rest()
    assert not engine.store.loading
    assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_blocks


def test_a_load_makes_room_for_running_requests(clock: Clock) -> None:
    """The request that computes beside it goes on without, and what does not come is counted."""
    engine, prompt = TimedEngine(long(), clock, 4 * TOKEN), text(1021)
    engine.seconds("before", prompt)
    engine.scheduler.kv.unpublish_all()
    engine.add("a", prompt, max_tokens=1)
    for _ in range(3):
        engine.turn()
    loads = engine.transfers.loads
    (load,) = loads._beside.values()
    loads.make_room(engine.scheduler.kv.num_free + 1)
    assert load.has_ended
    assert not loads._refused
    engine.rest()
    assert engine.tokens("a") == continuation(prompt, 1)
    assert engine.scheduler.snapshot().kv_failed_load_tokens > 500
    assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_blocks


@pytest.mark.parametrize(("priority", "first"), [(1, "met"), (-1, "other")])
def test_who_has_met_is_first_among_its_equals(clock: Clock, priority: int, first: str) -> None:
    """It gives its slot back, and takes it again unless somebody else's turn has come."""
    engine, prompt = TimedEngine(long(max_num_seqs=1, policy="priority"), clock, 4 * TOKEN), text(1021)
    engine.seconds("before", prompt)
    engine.scheduler.kv.unpublish_all()
    engine.add("met", prompt, max_tokens=2)
    for _ in range(4):
        engine.turn()
    engine.add("other", text(7, 1), max_tokens=2, priority=priority)
    order = list[str]()
    while engine.scheduler.requests:
        engine.turn()
        order += [each for each in engine.outputs if each not in ("before", *order) and engine.tokens(each)]
    engine.rest()
    assert engine.num_met == 1
    assert order[0] == first
    assert engine.tokens("met") == continuation(prompt, 2)
    assert engine.tokens("other") == continuation(text(7, 1), 2)
    assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_blocks


def test_prompts_that_come_together_load(clock: Clock) -> None:
    """One computes beside its load; the others would have to wait for it."""
    engine = TimedEngine(long(num_blocks=2400), clock, TOKEN)
    prompts = [text(1021, seed) for seed in range(4)]
    for number, prompt in enumerate(prompts):
        engine.seconds(str(number), prompt)
    engine.scheduler.kv.unpublish_all()
    begin, num_plans = clock.now, len(engine.model.plans)
    for number, prompt in enumerate(prompts):
        engine.add(f"again {number}", prompt, max_tokens=1)
    engine.rest()
    assert clock.now - begin < 1.1 * len(prompts) * 255 * TOKEN
    assert sum(plan.num_tokens for plan in engine.model.plans[num_plans:]) < 400


@pytest.mark.parametrize("slower", [3.0, 6.0])
def test_a_load_is_not_late_before_it_is_expected(slower: float) -> None:
    """It is chosen because running prompts are computed first."""
    load = chosen(slower=slower, busy=20.0)
    assert load is not None
    assert not load.is_beside
    assert load.limit > 2 * 1000 * TOKEN * slower


@pytest.mark.parametrize("turns", range(1, 10, 2))
def test_aborts_of_both_ends(clock: Clock, turns: int) -> None:
    engine, prompt = TimedEngine(long(max_num_batched_tokens=32), clock, 4 * TOKEN), text(400)
    engine.seconds("before", prompt)
    engine.scheduler.kv.unpublish_all()
    for request_id in "ab":
        engine.add(request_id, prompt, max_tokens=5)
    for _ in range(turns):
        engine.turn()
    engine.abort("a")
    engine.scheduler.check_integrity()
    engine.rest()
    assert engine.tokens("b") == continuation(prompt, 5)
    assert not engine.store.loading
    assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_blocks


@pytest.mark.parametrize(
    ("stages", "depth", "windows"), [(*AHEAD[i % 5], w) for i, w in enumerate([*WINDOWS, (None, 9, 9), (None,)])]
)
def test_answers_do_not_depend_on_where_they_meet(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, stages: int, depth: int, windows: Windows
) -> None:
    """Late and lost entries, failed copies and steps, aborts, preemptions, resets, and a store that starts again."""
    config = engine_config(
        stages=stages, depth=depth, windows=windows, max_num_batched_tokens=32, policy="priority", max_num_seqs=6
    )
    num_blocks = 4 * config.cache.max_blocks(config.model.max_model_len, 32)
    config = replace(config, cache=replace(config.cache, num_blocks=num_blocks))
    monkeypatch.setattr(kv_load_choice, "_CLEARLY", 10.0)
    monkeypatch.setattr(kv_copies_in_flight, "_RETRY_SECONDS", 0.05)
    entry_seconds = 4 * TOKEN / len(layout(config.cache.groups).kinds)
    engine, rng = TimedEngine(config, clock, entry_seconds), random.Random(depth + len(windows))
    engine.arrives, engine.mixes_order = lambda: rng.random() < 0.9, True
    engine.store.loses = lambda entry: rng.random() < 0.01
    engine.store.tier = lambda entry: MEMORY + entry.link[0] % 2
    engine.copies.fails = lambda: rng.random() < 0.01
    if stages == 1:
        engine.model.fails = lambda plan: plan.num_rows > 0 and rng.random() < 0.01
    texts, given = [text(60, seed) for seed in range(4)], dict[str, list[int]]()

    def disturb(turn: int) -> None:
        if turn < 160 and turn % 4 < 2:
            given[str(turn)] = rng.choice(texts)[: rng.randrange(30, 61)] + text(rng.randrange(4), turn)
            engine.add(
                str(turn), given[str(turn)], share=bytes([turn % 2]), max_tokens=rng.randrange(1, 16), priority=turn % 3
            )
            if rng.random() < 0.2:
                engine.abort(str(rng.randrange(turn + 1)))
        if turn < 160 and turn % 20 == 19:
            engine.transfers.reset()
            engine.scheduler.kv.unpublish_all()
        if turn == 80:
            engine.store.restart("second")
            engine.coming.clear()

    engine.run(disturb, at_least=160)
    engine.arrives = lambda: True
    engine.rest()
    for request_id, prompt in given.items():
        (end,), tokens = engine.ends(request_id), engine.tokens(request_id)
        assert tokens == continuation(prompt, 16)[: len(tokens)]
        assert end in ("length", "abort", "error")
        assert end != "error" or engine.outputs[request_id][-1].error == FAILURE
        for output in engine.outputs[request_id]:
            assert sum(output.num_loaded_tokens) <= output.num_cached_tokens <= len(prompt)
    assert engine.num_met > 0 or windows == (6,), "a window alone is loaded"
    assert not engine.store.granted
    assert not engine.store.loading
    assert not engine.scheduler.kv_loads._beside


def chosen(
    windows: Windows = (None,), slower: float = 1.0, busy: float = 0.0, *, may_compute: bool = True, tier: int = DISK
) -> PrefixLoad | None:
    """The load of 250 blocks that the store has, if that takes `slower` times the time of computing them."""
    scheduler = Scheduler(engine_config(windows=windows, max_model_len=1100))
    scheduler.token_budget.prompt_seconds = lambda start, end: (end - start) * TOKEN  # type: ignore[method-assign]
    scheduler.add(EngineCoreRequest(0, "a", text(1001), SamplingParams(max_tokens=1)))
    (request,) = scheduler.requests.values()
    hashes, kinds = scheduler.blocks.reusable_hashes(request), layout(scheduler.kv._groups).kinds
    choice = LoadChoice(scheduler.kv, kinds, scheduler.token_budget, 64)
    choice.rates.seconds = lambda work: sum(work.values()) / SIZE * 4 * TOKEN * slower  # type: ignore[method-assign]
    found = Found(0, [bytes([tier]) * 250] * len(kinds))
    return choice.choose(request, hashes, found, Counter(), busy, may_compute=may_compute)


@pytest.mark.parametrize(
    ("slower", "busy", "may_compute", "expected"),
    [
        (1.0, 0.0, True, "both"),
        (0.2, 0.0, True, "both"),
        (6.0, 0.0, True, "both"),
        (0.05, 0.0, True, "load"),  # too little is saved
        (30.0, 0.0, True, "compute"),
        (1.0, 0.0, False, "compute"),
        (0.5, 0.0, False, "load"),
        (0.5, 0.8, True, "load"),  # other prompts are computed until then
        (0.5, 0.1, True, "both"),
    ],
)
def test_both_ends_are_chosen(slower: float, busy: float, may_compute: bool, expected: str) -> None:
    load = chosen(slower=slower, busy=busy, may_compute=may_compute)
    assert (load is None) == (expected == "compute")
    assert load is None or load.is_beside == (expected == "both")


def test_entries_come_in_the_order_in_which_they_are_of_use() -> None:
    """From the end; what the prefix cache does not keep of computed tokens comes first, as it is needed in any case."""
    load = chosen()
    assert load is not None
    assert load.places == [[index] for index in range(249, -1, -1)]
    load = chosen(windows=(None, "state", "state"))
    assert load is not None
    assert load.is_beside
    assert [own[0] % 3 for own in load.places] == [1] + [0] * 250
    assert [own[0] // 3 for own in load.places] == [249, *range(249, -1, -1)]
    load = chosen(windows=(6,), slower=100.0)
    assert load is not None
    assert not load.is_beside, "a window is loaded, but all tokens are computed"
    assert NO_TIER not in load.tiers
