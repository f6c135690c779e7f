"""Requests whose prompt one replica computes, and that another one continues."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig, LoraConfig
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.kv_store import LoadKV, LookUpKV
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler import kv_loads
from tests.fakes.configs import Windows, engine_config
from tests.unit.engine.scheduler.test_adapters import adapted, adapter
from tests.unit.engine.scheduler.test_kv_transfers import Clock, EngineWithBoth, EngineWithStore, clock, small, text
from tests.unit.engine.scheduler.test_media import Prompt, digest, with_media
from tests.unit.engine.scheduler.test_scheduler import WINDOWS, Engine, continuation
from tests.unit.engine.scheduler.test_structured_output import config_of, folder

__all__ = ["clock", "folder"]


class Pair:
    """A replica for prompts and one for decodes, with one KV store, whose turns alternate."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock,
        decode: EngineConfig | None = None,
        kind: type[EngineWithStore] = EngineWithStore,
    ) -> None:
        self.prefill, self.decode = kind(config, clock), kind(decode or config, clock)
        self.join(self.decode)
        self.prompts: dict[str, tuple[EngineWithStore, list[int], dict[str, Any]]] = {}
        """By request that a replica for prompts has."""

    def join(self, engine: EngineWithStore) -> EngineWithStore:
        """Let another replica use the store, which it has opened."""
        engine.store = engine.copies.store = self.prefill.store
        engine.core = len(engine.store.opened)
        engine.store.opened.add(engine.core)
        engine.store.received.clear()
        engine.transfers._store._last_number = engine.core << 20  # the store knows calls by their numbers alone
        engine.model.numbers = self.prefill.model.numbers  # of tokens with their histories
        return engine

    def add(
        self,
        request_id: str,
        prompt: list[int],
        *,
        is_expected: bool = True,
        adapter: AdapterRef | None = None,
        **params: Any,
    ) -> None:
        """Let one replica compute the prompt while the other expects the request."""
        self.prompts[request_id] = self.prefill, prompt, {"adapter": adapter, **params}
        if is_expected:
            request = EngineCoreRequest(0, request_id, prompt, SamplingParams(**params), is_expected=True)
            request.adapter = adapter
            self.decode.scheduler.expect(request)
        self.decode.outputs[request_id] = []
        self.prefill.add(request_id, prompt, hands_over=True, adapter=adapter, **params)

    def turn(self) -> bool:
        ran = [engine.turn() for engine in (self.prefill, self.decode)]
        for request_id, (prefill, prompt, params) in [*self.prompts.items()]:
            if self.ended(request_id):
                del self.prompts[request_id]
                if prefill.outputs[request_id][-1].is_handed_over:
                    tokens = prefill.tokens(request_id)
                    self.decode.add(request_id, prompt, reported=tokens, **params)
                else:
                    self.decode.abort(request_id)
        return any(ran) or bool(self.prompts)

    def ended(self, request_id: str) -> bool:
        """Whether the replica for prompts has sent its last output."""
        prefill, *_ = self.prompts.get(request_id, (self.prefill,))
        outputs = prefill.outputs[request_id]
        return bool(outputs) and (outputs[-1].is_handed_over or outputs[-1].finish_reason is not None)

    def run(self) -> None:
        while self.turn():
            pass
        for engine in (self.prefill, self.decode):
            assert not engine.scheduler.requests
            assert not engine.scheduler.expected
            page = engine.blocks_per_page
            assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_blocks // page
        assert not self.prefill.store.loading
        assert not self.prefill.store.expected

    def tokens(self, request_id: str) -> list[int]:
        return self.prefill.tokens(request_id) + self.decode.tokens(request_id)


@pytest.mark.parametrize(
    ("stages", "depth", "is_expected", "windows"),
    [
        (*settings, windows)
        for number, windows in enumerate(WINDOWS)
        for settings in (((1, 1, True), (2, 2, True))[number % 2], (1, 2, False))
    ],
)
def test_another_replica_continues(clock: Clock, stages: int, depth: int, is_expected: bool, windows: Windows) -> None:
    """With the KV of the first one: it computes no more than a block, and the first token, which it has been told."""
    first = engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=16)
    pair = Pair(first, clock, engine_config(windows=windows, max_num_batched_tokens=32))
    for number in range(3):
        pair.add(str(number), text(50, number), is_expected=is_expected, max_tokens=9)
    pair.run()
    for number in range(3):
        assert pair.tokens(str(number)) == continuation(text(50, number), 9)
        (handed,), output = pair.prefill.outputs[str(number)], pair.decode.outputs[str(number)][0]
        assert (handed.is_handed_over, handed.finish_reason, len(handed.token_ids)) == (True, None, 1)
        assert output.num_cached_tokens >= 44
        assert output.num_loaded_tokens[0] == output.num_cached_tokens
    assert pair.prefill.scheduler.stats.generated_tokens == 3
    first_stats, then = pair.prefill.scheduler.stats, pair.decode.scheduler.stats
    assert (first_stats.prompt_tokens, first_stats.prefix_queried_tokens) == (150, 150), "each prompt counts once"
    assert (then.prompt_tokens, then.prefix_queried_tokens, then.prefix_hit_tokens) == (0, 0, 0)
    assert then.kv_loaded_memory_tokens == 0, "those would be more than all hits"


def test_what_is_granted_before_a_prompt_is_computed_is_stored_beside_its_steps(clock: Clock) -> None:
    """All of it, as requests wait for the store first; except for scored prompts, which are not looked up."""
    engine = EngineWithStore(engine_config(max_num_batched_tokens=16, max_num_seqs=1), clock)
    engine.add("first", text(48), hands_over=True, max_tokens=5)
    engine.add("next", text(48, 1), hands_over=True, max_tokens=5, prompt_logprobs=0)
    engine.rest()
    plans = [plan for plan in engine.model.plans if plan.num_rows]
    stored = [0 if plan.kv_copies is None else len(plan.kv_copies.step_stores) for plan in plans]
    assert stored == [0, 4, 4, 4, 4, 4]
    assert len(engine.store.entries) == 24


def test_a_replica_whose_request_waits_does_not_keep_others_from_storing(clock: Clock) -> None:
    """Another replica computes the same beginning meanwhile; nor does such a request wait for itself."""
    config = small(num_blocks=60, max_num_batched_tokens=8)
    pair, same = Pair(config, clock), text(40)
    other = pair.join(EngineWithStore(config, clock))
    other.add("first", text(96, 1), max_tokens=1)
    for _ in range(3):
        other.turn()
    waiting = same + text(16, 2)
    other.add("waits", waiting, reported=continuation(waiting, 1), hands_over=True, max_tokens=5)
    for _ in range(2):
        other.turn()
    pair.add("a", same + text(20, 3), max_tokens=5)
    while not pair.ended("a"):
        pair.turn()
    handed_over = clock.now
    while not pair.decode.outputs["a"]:
        pair.turn()
    assert clock.now - handed_over < 0.1
    assert pair.decode.outputs["a"][0].num_cached_tokens >= 56
    pair.run()
    other.store.entries.clear()
    began = clock.now
    other.rest()
    assert clock.now - began < 0.5
    assert not other.store.granted


def test_what_ends_with_its_first_token_is_not_handed_over(clock: Clock) -> None:
    pair = Pair(small(num_blocks=60), clock)
    pair.add("long enough", text(40), max_tokens=1)
    stop = continuation(text(40, 1), 1)
    pair.add("stops", text(40, 1), max_tokens=9, stop_token_ids=stop)
    pair.run()
    assert pair.prefill.ends("long enough") == ["length"]
    assert pair.prefill.ends("stops") == ["stop"]
    assert pair.decode.ends("stops") == ["abort"]
    assert not pair.decode.scheduler.stats.generated_tokens


def test_a_grammar_continues_elsewhere(clock: Clock, folder: Path) -> None:
    """And what it forces is there and here what it forces in one place."""
    config = config_of(folder, num_blocks=60)
    pair, whole = Pair(config, clock), Engine(config)
    params: dict[str, Any] = {"structured_outputs": StructuredOutputs(regex="first [ab]{4,9}"), "max_tokens": 12}
    whole.add("a", text(40), **params)
    whole.run()
    pair.add("a", text(40), **params)
    pair.run()
    assert pair.tokens("a") == whole.tokens("a")
    assert pair.prefill.outputs["a"][-1].is_handed_over
    assert len(pair.decode.tokens("a")) > 3


def test_an_expectation_loads_while_the_prompt_is_computed(clock: Clock) -> None:
    """Before the request comes, most is there, and published; it needs no look-up then."""
    pair = Pair(small(num_blocks=60, max_num_batched_tokens=8), clock)
    pair.add("a", prompt := text(64), max_tokens=5)
    decode, loaded = pair.decode, 0
    while decode.scheduler.expected:
        assert not decode.scheduler.snapshot().waiting
        loaded = len(decode.scheduler.kv.match(next(iter(decode.scheduler.expected.values())).hashes))
        pair.turn()
    assert loaded >= 8
    pair.run()
    assert pair.tokens("a") == continuation(prompt, 5)
    assert not [each for each in pair.prefill.store.received if isinstance(each, LookUpKV)][1:], "the first replica's"
    assert [each.waits for each in pair.prefill.store.received if isinstance(each, LoadKV)] == [True]
    assert pair.decode.scheduler.stats.kv_failed_load_tokens == 0


def test_what_another_host_computes_is_expected_from_its_store(clock: Clock) -> None:
    """And counts as loaded from there."""
    pair, prompt, peer = Pair(small(num_blocks=60), clock), text(60), "10.0.0.7:29560"
    pair.prefill.ask("before", prompt, 1)
    asked = EngineCoreRequest(0, "a", prompt, SamplingParams(max_tokens=5), is_expected=True, kv_peer=peer)
    pair.decode.scheduler.expect(asked)
    for _ in range(5):
        pair.decode.turn()
    pair.decode.add("a", prompt, reported=continuation(prompt, 1), max_tokens=5, kv_peer=peer)
    pair.decode.rest()
    assert [each.peer for each in pair.prefill.store.received if isinstance(each, LoadKV)] == [peer]
    assert pair.decode.outputs["a"][0].num_loaded_tokens == (0, 0, 56)


def test_what_was_loaded_in_part_is_not_looked_up_again(clock: Clock) -> None:
    """A second load would have taken the place of the first, with its blocks."""
    pair, prompt = Pair(small(num_blocks=60), clock), text(60)
    decode, copies = pair.decode, pair.decode.copies
    pair.prefill.ask("before", prompt, 1)
    copies.fails = lambda: len(copies.pending) < 8
    decode.scheduler.expect(EngineCoreRequest(0, "a", prompt, SamplingParams(max_tokens=5), is_expected=True))
    while decode.transfers.loads._loads:
        decode.turn()
    copies.fails = lambda: False
    decode.add("a", prompt, reported=continuation(prompt, 1), max_tokens=5)
    decode.rest()
    assert continuation(prompt, 1) + decode.tokens("a") == continuation(prompt, 5)
    assert decode.scheduler.kv.num_free == decode.scheduler.kv.num_blocks


def test_a_prompt_of_whole_blocks_whose_first_token_is_lost_keeps_what_was_loaded(clock: Clock) -> None:
    """Its last block is to be computed again, as nothing else is left to compute."""
    pair, prompt = Pair(small(num_blocks=60), clock), text(64)
    pair.prefill.ask("before", prompt, 1)
    pair.decode.scheduler.expect(EngineCoreRequest(0, "a", prompt, SamplingParams(max_tokens=5), is_expected=True))
    for _ in range(5):
        pair.decode.turn()
    received = len(pair.decode.store.received)
    assert pair.decode.ask("a", prompt, 5)
    assert pair.decode.outputs["a"][0].num_loaded_tokens[0] == 60
    assert not any(isinstance(each, LoadKV | LookUpKV) for each in pair.decode.store.received[received:])


def test_a_long_rest_has_more_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the request has come, as any other load; here, of what the other replica never stores."""
    pair, prompt = Pair(small(num_blocks=60, max_num_batched_tokens=8), clock), text(62)
    pair.add("a", prompt, max_tokens=5)
    while not pair.prefill.store.granted:
        pair.turn()
    monkeypatch.setattr(pair.decode.transfers.loads._choice.rates, "seconds", lambda work: 0.01 * sum(work.values()))
    (load,) = pair.decode.transfers.loads._loads.values()
    pair.decode.add("a", prompt, reported=continuation(prompt, 1), max_tokens=5)
    seconds, began = 4 * 0.01 * sum(load.left.values()), clock.now
    while "a" in pair.decode.scheduler.requests:
        pair.decode.turn()
    assert 2.5 < seconds <= clock.now - began < seconds + 0.5
    assert continuation(prompt, 1) + pair.decode.tokens("a") == continuation(prompt, 5)


def test_the_other_replica_may_die(clock: Clock) -> None:
    """At any moment: the request comes without its first token, or with it, and what has not come is computed."""
    for turns in range(0, 12, 2):
        for tokens in (0, 1):
            pair, prompt = Pair(small(num_blocks=60, max_num_batched_tokens=8), clock), text(64)
            pair.add("a", prompt, max_tokens=5)
            for _ in range(turns):
                pair.turn()
            pair.prompts.pop("a", None)
            if "a" in pair.decode.scheduler.expected:
                pair.prefill.store.abandon([*pair.prefill.store.granted])
                known = continuation(prompt, tokens)
                begin = clock.now
                pair.decode.add("a", prompt, reported=known, max_tokens=5)
                pair.decode.rest()
                assert known + pair.decode.tokens("a") == continuation(prompt, 5)
                assert clock.now - begin < 0.5


@pytest.mark.parametrize("is_expected", [True, False])
def test_what_the_first_replica_has_and_the_store_has_lost_is_stored_again(clock: Clock, is_expected: bool) -> None:
    pair, prompt = Pair(small(num_blocks=60), clock), text(56)
    pair.prefill.ask("before", prompt, 1)
    pair.prefill.store.entries.clear()
    pair.add("a", prompt, is_expected=is_expected, max_tokens=5)
    pair.run()
    assert pair.prefill.outputs["a"][-1].num_cached_tokens == 52
    assert pair.decode.outputs["a"][0].num_loaded_tokens[0] >= 52
    assert pair.tokens("a") == continuation(prompt, 5)


def test_expectations_that_are_aborted_leave_nothing(clock: Clock) -> None:
    """At any moment. They are answered once."""
    for turns in range(9):
        pair = Pair(small(num_blocks=60, max_num_batched_tokens=8), clock)
        pair.add("a", text(64), max_tokens=5)
        for _ in range(turns):
            pair.turn()
        del pair.prompts["a"]
        assert pair.decode.scheduler.expected
        pair.decode.abort("a")
        pair.decode.abort("a")
        assert pair.decode.ends("a") == ["abort"]
        pair.prefill.abort("a")
        pair.run()


@pytest.mark.parametrize("others_run", [False, True])
def test_expectations_give_way(clock: Clock, others_run: bool) -> None:
    """To requests that are there, whether others run or not."""
    pair = Pair(small(num_blocks=60), clock, small(num_blocks=38))
    decode = pair.decode
    if others_run:
        decode.add("running", text(8, 2), max_tokens=70)
        decode.turn()
    decode.scheduler.expect(EngineCoreRequest(0, "a", text(100), SamplingParams(max_tokens=5), is_expected=True))
    assert decode.transfers.loads._loads
    decode.add("b", text(60, 1), max_tokens=5)
    begin = clock.now
    while "b" in decode.scheduler.requests:
        decode.turn()
    assert clock.now - begin < 0.2
    assert decode.tokens("b") == continuation(text(60, 1), 5)
    assert not decode.transfers.loads._loads
    decode.add("a", text(100), max_tokens=5)
    decode.rest()
    assert decode.tokens("a") == continuation(text(100), 5)


def test_expectations_take_a_part_of_the_cache(clock: Clock) -> None:
    """Except for a single one. Requests that come make room for others."""
    decode = Pair(small(num_blocks=60), clock).decode
    for number in range(4):
        request = EngineCoreRequest(0, str(number), text(46, number), SamplingParams(max_tokens=5), is_expected=True)
        decode.scheduler.expect(request)
        assert len(decode.transfers.loads._loads) == min(number + 1, 2)
    decode.add("0", text(46), max_tokens=5)
    decode.scheduler.expect(request)
    assert len(decode.transfers.loads._expected) == 3
    assert len(decode.transfers.loads._loads) == 3
    for request_id in ("1", "2", "3"):
        decode.scheduler.abort(request_id)
    decode.rest()
    assert decode.tokens("0") == continuation(text(46), 5)


def test_another_request_does_not_wait_for_what_is_expected(clock: Clock) -> None:
    """Though it begins alike; nor does its answer depend on an expectation that is another text's."""
    pair = Pair(small(num_blocks=60), clock)
    decode, prompt = pair.decode, text(40)
    decode.scheduler.expect(EngineCoreRequest(0, "a", prompt, SamplingParams(max_tokens=5), is_expected=True))
    begin = clock.now
    decode.add("b", prompt, max_tokens=5)
    while decode.scheduler.requests:
        decode.turn()
    assert clock.now - begin < kv_loads._ANSWER_SECONDS
    assert decode.tokens("b") == continuation(prompt, 5)
    decode.add("a", text(40, 1), max_tokens=5)
    decode.rest()
    assert decode.tokens("a") == continuation(text(40, 1), 5)
    assert not decode.transfers.loads._expected


def test_adapters(clock: Clock) -> None:
    """More than there are slots, some of which the second replica has not read when the request comes."""
    config = replace(small(num_blocks=200), lora=LoraConfig(num_slots=2, device_bytes=2, host_bytes=3))
    pair, rng = Pair(config, clock, kind=EngineWithBoth), random.Random(0)
    assert isinstance(pair.decode, EngineWithBoth)
    pair.decode.answers = lambda: rng.random() < 0.1
    known = [adapter(name) for name in range(4)]
    for number in range(12):
        pair.add(str(number), text(48, number % 2), adapter=known[number % 4], max_tokens=5)
        pair.turn()
    pair.run()
    for number in range(12):
        assert pair.tokens(str(number)) == adapted(text(48, number % 2), known[number % 4], 5)
        assert pair.decode.outputs[str(number)][0].num_cached_tokens >= 44


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_failed_step_should_have_computed_is_not_stored(clock: Clock, depth: int) -> None:
    pair, prompt = Pair(engine_config(depth=depth, max_num_batched_tokens=16), clock), text(64)
    steps, failing = list[int](), pair.prefill.model

    def fails(plan: SchedulerOutput) -> bool:
        steps.extend([plan.step] * (plan.num_tokens > 0))
        has_copies = plan.kv_copies is not None and bool(plan.kv_copies.step_stores)
        return len(steps) == 3 and (has_copies or pytest.fail("nothing is stored beside the step"))

    failing.fails = fails
    pair.add("a", prompt, max_tokens=5)
    pair.run()
    assert pair.prefill.ends("a") == ["error"]
    assert pair.decode.ask("a", prompt) == continuation(prompt, 4)
    assert pair.decode.outputs["a"][-1].num_loaded_tokens[0] <= 32


def test_what_is_computed_of_an_image_that_cannot_be_encoded_is_not_stored(clock: Clock) -> None:
    """Nor what follows it; what is before may be."""
    engine = EngineWithStore(with_media(engine_config(max_num_batched_tokens=16, num_blocks=60, depth=2)), clock)
    prompt = Prompt(text(30), ("cat", 10), text(20, 1))
    engine.model.damaged.add(digest("cat"))
    engine.add("a", prompt.tokens, media=prompt.items, hands_over=True, max_tokens=5)
    engine.rest()
    (output,) = engine.outputs["a"]
    assert output.finish_reason == "error"
    assert len(engine.store.entries) == 30 // 4
    assert not engine.store.granted


def abort_after(engine: EngineWithStore, number: int) -> None:
    """Abort request "a" when the ranks have run its plan with this number, before the result is processed."""
    execute, plans = engine.model.execute, list[int]()

    def then_abort(plan: SchedulerOutput) -> Any:
        result = execute(plan)
        plans.extend([plan.step] * (plan.num_rows > 0))
        if len(plans) == number:
            engine.abort("a")
        return result

    engine.model.execute = then_abort  # type: ignore[method-assign]


@pytest.mark.parametrize("is_image", [True, False])
@pytest.mark.parametrize("hands_over", [True, False])
def test_what_is_wrong_of_an_aborted_request_is_neither_stored_nor_found(
    clock: Clock, is_image: bool, hands_over: bool
) -> None:
    """It was aborted before the result came that says that its adapter or its image has failed."""
    for depth in (1, 2):
        for number in (1, 2, 3):
            config = with_media(engine_config(max_num_batched_tokens=16, num_blocks=60, depth=depth))
            lora = LoraConfig(num_slots=2, device_bytes=2, host_bytes=3)
            engine = EngineWithStore(config, clock) if is_image else EngineWithBoth(replace(config, lora=lora), clock)
            prompt = Prompt(text(6), ("cat", 10), text(40, 1)) if is_image else Prompt(text(48))
            if isinstance(engine, EngineWithBoth):
                engine.model.has_room = lambda digest: False
            engine.model.damaged.add(digest("cat"))
            abort_after(engine, number)
            more: dict[str, Any] = {"media": prompt.items} if is_image else {"adapter": adapter(1)}
            engine.add("a", prompt.tokens, hands_over=hands_over, max_tokens=5, **more)
            request, num_right = engine.scheduler.requests["a"], 6 // 4 if is_image else 0
            engine.rest()
            assert len(engine.store.entries) <= num_right
            assert len(engine.scheduler.kv.match(request.hashes)) <= num_right


@pytest.mark.parametrize("seed", range(6))
def test_random_hand_overs(clock: Clock, seed: int) -> None:
    """Of two replicas for prompts: messages and copies that are late or fail, steps and adapters that fail, aborts,
    preemptions, resets of prefix caches and other arenas."""
    rng = random.Random(seed)
    windows = WINDOWS[seed % len(WINDOWS)]
    config = engine_config(stages=1 + seed % 2, depth=2, windows=windows, max_num_batched_tokens=32)
    page, least = config.cache.blocks_per_page, config.cache.max_blocks(config.model.max_model_len, 32)
    config = replace(config, cache=replace(config.cache, num_blocks=least + rng.choice([4, 12]) * page))
    config = replace(config, lora=LoraConfig(num_slots=2, device_bytes=2, host_bytes=3))
    pair, texts = Pair(config, clock, kind=EngineWithBoth), [text(60, number) for number in range(4)]
    first, second = pair.prefill, pair.join(EngineWithBoth(config, clock))
    engines, given = (first, second, pair.decode), dict[str, tuple[list[int], AdapterRef | None]]()
    for engine in engines:
        engine.arrives = lambda: rng.random() < 0.8
        engine.copies.fails = lambda: rng.random() < 0.02
    for engine in (first, second):
        engine.model.has_room = lambda digest: rng.random() < 0.9
        if seed % 2 == 0:  # on one stage
            engine.model.fails = lambda plan: plan.num_rows > 0 and rng.random() < 0.03
    for turn in range(240):
        pair.prefill, other = rng.sample((first, second), 2)
        if turn % 3 == 0:
            prompt = rng.choice(texts)[: rng.randrange(1, 61)] + text(rng.randrange(6), turn)
            chosen = given[str(turn)] = prompt, rng.choice([None, None, adapter(turn % 2)])
            more: dict[str, Any] = {"adapter": chosen[1], "max_tokens": rng.randrange(1, 12)}
            other.outputs[str(turn)] = []
            pair.add(str(turn), prompt, is_expected=rng.random() < 0.7, **more)
        if rng.random() < 0.1 and pair.prompts:
            victim = rng.choice([*pair.prompts])
            del pair.prompts[victim]
            for engine in engines:
                engine.abort(victim)
        if rng.random() < 0.02:
            engine = rng.choice(engines)
            engine.transfers.reset()
            engine.scheduler.kv.unpublish_all()
        if turn % 100 == 99:
            first.store.restart(str(turn))
        other.turn()
        pair.turn()
    for engine in engines:
        engine.arrives = lambda: True
    for _ in range(3000):
        if not any([first.turn(), second.turn(), pair.turn()]):
            break
    for engine in engines:
        assert not engine.scheduler.requests
        assert not engine.scheduler.expected
        assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_blocks // page
    for left in (first.store.granted, first.store.loading, first.store.expected):
        assert not left
    for request_id, (prompt, chosen_adapter) in given.items():
        tokens = [token for engine in engines for token in engine.tokens(request_id)]
        whole = continuation(prompt, 12) if chosen_adapter is None else adapted(prompt, chosen_adapter, 12)
        assert tokens == whole[: len(tokens)]
    outputs = [each for request_id in given for each in pair.decode.outputs[request_id][:1]]
    assert sum(each.num_loaded_tokens[0] for each in outputs) > 100
