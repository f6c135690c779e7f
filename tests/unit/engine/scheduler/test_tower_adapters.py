"""Images of requests with adapters that change the tower: their features are of that adapter, whatever the others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec
import pytest

from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.media import EMBEDS, MediaArray
from quire.engine.protocol.scheduler_output import SchedulerOutput
from tests.fakes.model import DAMAGED, FAILURE, UNPLACED, with_adapter, with_features
from tests.unit.engine.scheduler.test_adapters import EngineWithAdapters, adapter, configured
from tests.unit.engine.scheduler.test_media import Image, Prompt, digest, seconds, text, with_media
from tests.unit.engine.scheduler.test_scheduler import AHEAD, continuation, tightened

OF_TOWER, OF_DECODER = adapter(1), adapter(2)


def engine_of(
    *, cache: int = 60, joins: bool = False, itl_target: float = 0.0, is_tight: bool = False, **options: Any
) -> EngineWithAdapters:
    """With a target, images are encoded in parts beside decodes."""
    config = with_media(configured(**options), cache=cache, joins=joins)
    if itl_target:
        config = replace(config, scheduler=replace(config.scheduler, dynamic_chunking=True, itl_target=itl_target))
    engine = EngineWithAdapters(tightened(config) if is_tight else config)
    engine.model.tower_adapters = {each.digest for each in (OF_TOWER, adapter(3), adapter(4, 2))}
    return engine


def answer(engine: EngineWithAdapters, prompt: Prompt, given: AdapterRef | None, count: int) -> list[int]:
    items = prompt.items
    if given is not None and given.digest in engine.model.tower_adapters:
        items = [
            msgspec.structs.replace(item, digest=blake2b(item.digest, key=given.digest, digest_size=16).digest())
            for item in items
        ]
    tokens = with_features(prompt.tokens, items)
    return continuation(tokens if given is None else with_adapter(tokens, given.digest, 0), count)


@pytest.mark.parametrize(
    ("stages", "depth", "joins", "has_target", "tight"),
    [
        (*ahead, (number + has_target) % 2 == 0, has_target, number % 3 > 0)
        for number, (ahead, has_target) in enumerate(itertools.product(AHEAD, (False, True)))
    ],
)
def test_answers_do_not_depend_on_the_company(
    stages: int, depth: int, joins: bool, has_target: bool, tight: bool
) -> None:
    """More adapters than slots, of which some change the tower; an encoder cache for few images; aborts, preemption,
    failed steps, and adapters that find no room on the device."""
    engine = engine_of(
        cache=30,
        joins=joins,
        itl_target=0.04 * has_target,
        is_tight=tight,
        capacity=3,
        stages=stages,
        depth=depth,
        max_num_batched_tokens=48,
        num_blocks=600,
        policy="priority",
    )
    rng = random.Random(f"{stages} {depth} {joins} {has_target}")
    engine.answers = lambda: rng.random() < 0.5
    if stages == 1:
        engine.model.fails = lambda plan: plan.num_rows > 0 and rng.random() < 0.01
        engine.model.has_room = lambda digest: rng.random() < 0.93
    engine.model.damaged.add(digest("damaged"))
    images: list[Image] = [("a", 14), ("b", 5, 9), ("c", 3), ("d", 12), ("damaged", 10)]
    known = [None, OF_TOWER, OF_DECODER, adapter(3), adapter(4, 2)]
    given: dict[str, tuple[Prompt, AdapterRef | None]] = {}
    learned: list[SchedulerOutput] = []

    def disturb(turn: int) -> None:
        for plan in engine.model.plans[len(learned) :]:
            learned.append(plan)
            engine.scheduler.token_budget.learn(plan, seconds(engine, plan))
        if turn < 120 and turn % 2 == 0:
            parts: list[Sequence[int] | Image] = [text(rng.choice([0, 1, 5, 24]) + 1, rng.choice([0, 0, 7]))]
            for _ in range(rng.choice([0, 1, 1, 2])):
                parts += [rng.choice(images), text(rng.randrange(1, 9))]
            given[str(turn)] = prompt, chosen = Prompt(*parts), rng.choice(known)
            place, count = rng.randrange(2), rng.randrange(1, 25)
            engine.add(str(turn), prompt.tokens, place, media=prompt.items, adapter=chosen, max_tokens=count)
        if turn % 13 == 12 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))

    engine.run(disturb, at_least=130)
    ends = list[str]()
    for request_id, (prompt, chosen) in given.items():
        (end,), tokens = engine.ends(request_id), engine.tokens(request_id)
        assert tokens == answer(engine, prompt, chosen, len(tokens))
        last = engine.outputs[request_id][-1]
        assert end != "error" or last.is_invalid or last.error in (FAILURE, UNPLACED, DAMAGED)
        ends.append(end)
    assert ends.count("length") > 15
    slots = [slot for plan in learned if plan.media is not None for slot in plan.media.adapter_slots.values()]
    assert {*slots} == {0, 1}
    parts = [plan.media for plan in learned if plan.media is not None and plan.media.num_steps is not None]
    assert any(part.adapter_slots for part in parts) == has_target


def test_only_an_adapter_that_changes_the_tower_has_features_of_its_own() -> None:
    """Also images whose features a client has sent need no tower."""
    engine, prompt = engine_of(max_num_batched_tokens=64), Prompt(text(3), ("cat", 9), text(3))
    for number, given in enumerate((None, OF_DECODER, OF_TOWER, adapter(3), OF_TOWER, None)):
        engine.add(str(number), prompt.tokens, media=prompt.items, adapter=given, max_tokens=2)
        engine.run()
        assert engine.tokens(str(number)) == answer(engine, prompt, given, 2)
    plans = [plan.media for plan in engine.model.plans if plan.media is not None and plan.media.encoded]
    assert [[*plan.adapter_slots.values()] for plan in plans] == [[], [1], [0]]
    (item,) = prompt.items
    assert item.data is not None
    given_features = MediaArray(EMBEDS, "float32", (9, 32), 0)
    prompt.items[0] = msgspec.structs.replace(item, data=msgspec.structs.replace(item.data, arrays=(given_features,)))
    engine.add("features", prompt.tokens, media=prompt.items, adapter=OF_TOWER, max_tokens=2)
    assert engine.scheduler.requests["features"].core_request.media[0].digest == item.digest


def test_an_adapter_keeps_its_slot_while_an_image_is_encoded_with_it() -> None:
    """Ahead of its request, next to a decode. A request with another adapter that comes before it waits for that."""
    engine = engine_of(joins=True, itl_target=0.01, slots=1, capacity=1, policy="priority")
    engine.add("decode", text(4), max_tokens=60)
    engine.turn()
    prompt = Prompt(("cat", 40), text(3))
    engine.add("image", prompt.tokens, media=prompt.items, adapter=OF_TOWER, max_tokens=2)
    while not engine.assigned:
        engine.turn()
    assert engine.running == ["decode"]
    engine.add("other", [3], priority=-1, adapter=OF_DECODER, max_tokens=2)
    engine.run()
    assert engine.tokens("image") == answer(engine, prompt, OF_TOWER, 2)
    assert engine.tokens("other") == continuation(with_adapter([3], OF_DECODER.digest, 0), 2)
    assert engine.assigned == [(0, 1), (0, 2), (0, 1)]
    plans = engine.model.plans
    encoding = [plan.step for plan in plans if plan.media is not None and plan.media.encoded]
    freeing = [plan.step for plan in plans if plan.adapters is not None and plan.adapters.freed]
    assert len(encoding) > 2
    assert encoding[-1] < freeing[0]


@pytest.mark.parametrize("is_fast", [False, True])
def test_it_keeps_its_slot_to_the_end_of_the_plan_that_completes_the_image(is_fast: bool) -> None:
    """Whether several plans encode it, or a single one, as the tower is known to be fast. The request with the other
    adapter goes first, and comes before any of these."""
    num_plans = list[int]()
    for turns in range(9):
        engine = engine_of(joins=True, itl_target=1.0 if is_fast else 0.01, slots=1, capacity=1, policy="priority")
        learned = list[SchedulerOutput]()

        def learn(_: int, engine: EngineWithAdapters = engine, learned: list[SchedulerOutput] = learned) -> None:
            for plan in engine.model.plans[len(learned) :]:
                learned.append(plan)
                if is_fast:
                    engine.scheduler.token_budget.learn(plan, seconds(engine, plan))

        engine.add("decode", text(4), max_tokens=100)
        engine.turn()
        learn(0)
        if is_fast:
            known = Prompt(("dog", 20), text(3))
            engine.add("known", known.tokens, media=known.items, max_tokens=2)
            for turn in range(40):
                engine.turn()
                learn(turn)
        prompt = Prompt(("cat", 3), text(3))
        engine.add("image", prompt.tokens, media=prompt.items, adapter=OF_TOWER, max_tokens=2)
        for turn in range(turns):
            engine.turn()
            learn(turn)
        engine.add("other", [3], priority=-1, adapter=OF_DECODER, max_tokens=2)
        engine.run(learn)
        assert engine.tokens("image") == answer(engine, prompt, OF_TOWER, 2)
        assert engine.tokens("other") == continuation(with_adapter([3], OF_DECODER.digest, 0), 2)
        media = [plan.media for plan in learned if plan.media is not None]
        cats = {item.digest for plan in media for item in plan.encoded if item.num_features == 3}
        num_plans.append(sum(any(item.digest in cats for item in plan.encoded) for plan in media))
    assert (1 in num_plans) == is_fast


def test_an_image_without_its_adapter_is_not_kept() -> None:
    """The adapter finds no room on the device; later it does."""
    engine, prompt = engine_of(depth=2, max_num_batched_tokens=64), Prompt(text(3), ("cat", 9), text(3))
    engine.model.has_room = lambda digest: False
    for request_id in ("failed", "aborted"):
        engine.add(request_id, prompt.tokens, media=prompt.items, adapter=OF_TOWER, max_tokens=2)
    while not engine.assigned:
        engine.turn()
    engine.abort("aborted")
    engine.run()
    assert [engine.outputs[each][-1].error for each in ("failed", "aborted")] == [UNPLACED, None]
    engine.model.has_room = lambda digest: True
    engine.add("again", prompt.tokens, media=prompt.items, adapter=OF_TOWER, max_tokens=2)
    engine.run()
    assert engine.tokens("again") == answer(engine, prompt, OF_TOWER, 2)
