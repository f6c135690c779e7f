"""Fair sharing: the effect of one client's requests on other clients' requests."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.engine.protocol.scheduler_output import SchedulerOutput
from tests.fakes.configs import Windows, engine_config
from tests.unit.engine.scheduler.test_scheduler import (
    AHEAD,
    Engine,
    continuation,
    tightened,
)

FLOOD, SECOND = b"flood", b"second"


def flood(engine: Engine, count: int = 500, *, prompt: int = 3, output: int = 80, share: bytes = FLOOD) -> None:
    for index in range(count):
        engine.add(f"{share.decode()}-{index}", [index % 97] * prompt, max_tokens=output, ignore_eos=True, share=share)


def turns_until_first_token(engine: Engine, request_id: str) -> int:
    turns = 0
    while not engine.tokens(request_id):
        assert engine.turn()
        turns += 1
    return turns


def running(engine: Engine) -> Counter[bytes]:
    return Counter(request.share.key for request in engine.scheduler.running)


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
def test_a_second_client_does_not_wait_for_a_flood(stages: int, depth: int) -> None:
    engine = Engine(engine_config(stages=stages, depth=depth, num_blocks=1200))
    flood(engine)
    for _ in range(10):
        engine.turn()
    engine.add("one of the flood", [5, 6, 7], max_tokens=4, share=FLOOD)
    engine.add("new", [5, 6, 7], max_tokens=4, share=SECOND)
    assert turns_until_first_token(engine, "new") <= 2 * depth + 1
    while not engine.ends("new"):
        engine.turn()
    assert engine.tokens("new") == continuation([5, 6, 7], 4)
    assert not engine.tokens("one of the flood")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_second_client_does_not_wait_for_blocks(depth: int) -> None:
    """Few requests fill the KV cache; the second client's request is not preempted for them."""
    engine = Engine(tightened(engine_config(depth=depth, max_num_batched_tokens=32)))
    flood(engine, 50, prompt=20, output=100)
    for _ in range(60):
        engine.turn()
    assert len(engine.scheduler.running) < 16
    engine.add("new", [5] * 10, max_tokens=20, share=SECOND)
    preemptions = engine.scheduler.stats.preemptions
    assert turns_until_first_token(engine, "new") <= 2 * depth + 2
    assert engine.scheduler.stats.preemptions > preemptions
    (new,) = (request for request in engine.scheduler.running if request.share.key == SECOND)
    while engine.scheduler.requests.get("new") is not None:
        assert new.slot is not None
        engine.turn()
    assert engine.tokens("new") == continuation([5] * 10, 20)


def test_a_second_client_does_not_wait_for_long_prompts() -> None:
    """Its prompt is scheduled before the rest of a long prompt, and before later prompts that fit into the budget."""
    engine = Engine(engine_config(max_num_batched_tokens=16, num_blocks=1200))
    flood(engine, prompt=120, output=2)
    for _ in range(3):
        engine.turn()
    engine.add("new", [5] * 10, max_tokens=4, share=SECOND)
    assert turns_until_first_token(engine, "new") == 1


def test_places_are_shared_by_weight() -> None:
    engine = Engine(engine_config(num_blocks=300))
    flood(engine, 16, output=40)
    for index in range(48):
        engine.add(f"heavy-{index}", [index % 97], max_tokens=40, ignore_eos=True, share=b"heavy", weight=3.0)
    for _ in range(20):
        engine.turn()
    preemptions = engine.scheduler.stats.preemptions
    for _ in range(100):
        engine.turn()
        assert running(engine) in ({}, {FLOOD: 4, b"heavy": 12})  # all end in the same step
    assert engine.scheduler.stats.preemptions == preemptions  # shared already: nothing is preempted again
    engine.run()


def test_prompt_tokens_are_shared_by_weight() -> None:
    """Two prompts fill a step, and their requests end with it: there are places for all."""
    engine = Engine(engine_config(max_num_batched_tokens=16, num_blocks=1200))
    flood(engine, 80, prompt=8, output=1)
    for index in range(80):
        engine.add(f"heavy-{index}", [96, index] * 4, max_tokens=1, ignore_eos=True, share=b"heavy", weight=3.0)
    for _ in range(20):
        engine.turn()
    ended = Counter(name for name in ("flood", "heavy") for index in range(80) if engine.ends(f"{name}-{index}"))
    assert 36 <= ended.total() <= 40
    assert abs(ended["heavy"] - 3 * ended["flood"]) <= 4
    engine.run()


def test_places_that_others_leave_free_are_used() -> None:
    engine = Engine(engine_config(num_blocks=500))
    flood(engine, 20)
    engine.add("one", [1], max_tokens=100, share=SECOND)
    for _ in range(20):
        engine.turn()
    assert running(engine) == {FLOOD: 15, SECOND: 1}
    engine.run()


@pytest.mark.parametrize("is_tight", [False, True])
def test_neither_of_two_floods_starves(is_tight: bool) -> None:
    config = engine_config(max_num_batched_tokens=32, num_blocks=1200)
    engine = Engine(tightened(config) if is_tight else config)
    flood(engine, 60, output=30)
    for _ in range(10):
        engine.turn()
    flood(engine, 60, output=30, share=SECOND)
    for _ in range(100):
        engine.turn()
    finished = Counter(request_id.split("-")[0] for request_id in engine.outputs if engine.ends(request_id))
    assert min(finished["flood"], finished["second"]) > 0.6 * max(finished.values())
    engine.run()


def test_many_shares_take_turns() -> None:
    """With more shares than places, each gets one at a time, and none twice before all others once."""
    engine = Engine(engine_config(max_num_seqs=4))
    for share in range(12):
        flood(engine, 3, output=5, share=b"s%d" % share)
    done: list[str] = []

    def watch(turn: int) -> None:
        done.extend(request_id for request_id in engine.outputs if request_id not in done and engine.ends(request_id))

    engine.run(watch)
    watch(0)
    for begin in (0, 12, 24):
        assert len({request_id.split("-")[0] for request_id in done[begin : begin + 12]}) == 12
    assert engine.scheduler.stats.preemptions == 0


def test_priorities_count_inside_a_share() -> None:
    engine = Engine(engine_config(max_num_seqs=1, policy="priority"))
    engine.add("a", [1], 5, max_tokens=3, share=FLOOD)
    engine.add("b", [2], 5, max_tokens=3, share=FLOOD)
    engine.add("c", [3], 0, max_tokens=3, share=FLOOD)
    engine.add("d", [4], 9, max_tokens=3, share=SECOND)
    order: list[str] = []

    def watch(turn: int) -> None:
        order.extend(each for each in engine.outputs if each not in order and engine.tokens(each))

    engine.run(watch)
    watch(0)
    assert order == ["c", "d", "a", "b"]


@pytest.mark.parametrize("is_running", [False, True])
def test_idleness_gives_no_credit(is_running: bool) -> None:
    """A share that had no prompts for long, idle or decoding, gets half of the prompt tokens afterwards, not all."""
    engine = Engine(engine_config(max_num_batched_tokens=16, num_blocks=500, max_num_seqs=16, max_model_len=400))
    if is_running:
        engine.add("long", [1], max_tokens=350, ignore_eos=True, share=SECOND)
    flood(engine, 100, prompt=60, output=2)
    for _ in range(200):
        engine.turn()
    flood(engine, 40, prompt=60, output=2, share=SECOND)
    served = Counter[bytes]()
    schedule_chunk = engine.scheduler.waiting.serve

    def serve(request: object, count: int) -> None:
        served[request.share.key] += count  # type: ignore[attr-defined]
        schedule_chunk(request, count)  # type: ignore[arg-type]

    engine.scheduler.waiting.serve = serve  # type: ignore[method-assign]
    for _ in range(100):
        engine.turn()
    assert 0.4 < served[FLOOD] / served.total() < 0.6


def test_long_prompts_of_one_share_do_not_hold_up_short_ones() -> None:
    """Also if the share with the long ones has fewer requests running."""
    engine = Engine(engine_config(max_num_batched_tokens=32, num_blocks=1500, max_num_seqs=16, max_model_len=400))
    for index in range(20):
        engine.add(f"long-{index}", [index] * 300, max_tokens=3, share=SECOND)
    finished = 0
    for turn in range(100):
        engine.add(f"short-{turn}", [turn % 97] * 3, max_tokens=8, ignore_eos=True, share=FLOOD)
        engine.turn()
        finished = sum(bool(engine.ends(request_id)) for request_id in engine.outputs if request_id.startswith("short"))
    assert finished > 80
    assert any(engine.ends(f"long-{index}") for index in range(20))


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
@pytest.mark.parametrize(("windows", "is_tight"), [((None,), False), ((None,), True), ((None, 9, 9), True)])
def test_outputs_do_not_depend_on_shares(stages: int, depth: int, windows: Windows, is_tight: bool) -> None:
    """Random arrivals, weights and aborts: nothing is lost, and no token changes by a preemption."""
    config = engine_config(
        stages=stages, depth=depth, windows=windows, max_num_seqs=6, max_num_batched_tokens=32, num_blocks=300
    )
    engine = Engine(tightened(config) if is_tight else config)
    rng = random.Random(depth)
    prompts: dict[str, list[int]] = {}

    def disturb(turn: int) -> None:
        if turn < 40:
            prompts[str(turn)] = prompt = [rng.randrange(5) for _ in range(rng.randrange(1, 60))]
            share = rng.choice([b"", b"a", b"a", b"a", b"b", b"c%d" % turn])
            engine.add(str(turn), prompt, max_tokens=20, share=share, weight=rng.choice([0.5, 1.0, 4.0]))
            if rng.random() < 0.2:
                engine.abort(str(rng.randrange(turn + 1)))

    engine.run(disturb, at_least=40)
    for request_id, prompt in prompts.items():
        (end,) = engine.ends(request_id)
        tokens = engine.tokens(request_id)
        assert tokens == continuation(prompt, 20 if end == "length" else len(tokens))
    assert engine.scheduler.stats.preemptions > 0
    assert not engine.scheduler.waiting.shares


@pytest.mark.parametrize("is_tight", [False, True])
def test_one_share_is_scheduled_as_without_sharing(is_tight: bool) -> None:
    def plans(share: bytes) -> list[SchedulerOutput]:
        config = engine_config(max_num_seqs=6, max_num_batched_tokens=32, num_blocks=1200, policy="priority")
        engine = Engine(tightened(config) if is_tight else config)
        plans, rng, schedule = [], random.Random(1), engine.scheduler.schedule

        def record() -> SchedulerOutput | None:
            plan = schedule()
            if plan is not None:
                plans.append(plan)
            return plan

        engine.scheduler.schedule = record  # type: ignore[method-assign]

        def arrive(turn: int) -> None:
            if turn < 60:
                prompt = [rng.randrange(5) for _ in range(rng.randrange(1, 60))]
                engine.add(str(turn), prompt, rng.randrange(3), max_tokens=20, share=share, weight=2.0)

        engine.run(arrive, at_least=60)
        return plans

    assert plans(b"x") == plans(b"")
