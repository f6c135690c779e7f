"""Adapters of requests: which ones the workers read, keep and have in slots, and who waits for whom."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from quire.engine.config.engine_config import EngineConfig, LoraConfig, SpeculativeConfig
from quire.engine.protocol.adapters import NO_SLOT, AdapterPlan, AdapterPrepared, AdapterRef
from quire.engine.protocol.scheduler_output import SchedulerOutput
from tests.fakes.configs import Windows, engine_config
from tests.fakes.drafts import Always
from tests.fakes.model import FAILURE, UNPLACED, next_token, with_adapter
from tests.unit.engine.scheduler.test_model_drafts import MOST, mixed
from tests.unit.engine.scheduler.test_scheduler import AHEAD, WINDOWS, Engine, continuation, tightened


def adapter(name: int, size: int = 1, path: str = "a") -> AdapterRef:
    """One of `size` bytes, in the host's memory and on the device."""
    return AdapterRef(bytes([name, size]) * 16, (path,))


def adapted(prompt: list[int], given: AdapterRef, count: int, start: int = 0) -> list[int]:
    return continuation(with_adapter(prompt, given.digest, start), count)


def configured(slots: int = 2, capacity: int = 2, host_bytes: int = 8, **changes: Any) -> EngineConfig:
    lora = LoraConfig(num_slots=slots, device_bytes=capacity, host_bytes=host_bytes)
    return replace(engine_config(**changes), lora=lora)


class EngineWithAdapters(Engine):
    """The workers answer before the next turn, unless `answers` says that they do not yet."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.ranks = range(config.parallel.world_size)
        self.pending: list[AdapterPrepared] = []
        self.answers: Callable[[], bool] = lambda: True
        self.errors: dict[bytes, str] = {}

    def turn(self) -> bool:
        for given in self.model.asked:
            size, error = given.digest[1], self.errors.get(given.digest, "")
            is_of_tower = given.digest in self.model.tower_adapters
            self.pending += [
                AdapterPrepared(given.digest, rank, size, size, error, changes_tower=is_of_tower and not rank)
                for rank in self.ranks
            ]
        self.model.asked.clear()
        while self.pending and self.answers():
            self.answer(self.pending.pop(0))
        return super().turn() or bool(self.pending)

    def answer(self, answer: AdapterPrepared) -> str | None:
        error, ended = self.scheduler.on_adapter(answer)
        for request, output in ended:
            self.outputs[request.request_id].append(output)
        self.scheduler.check_integrity()
        return error

    def start(self, request_id: str, given: AdapterRef | None, max_tokens: int = 20, **more: Any) -> None:
        """Add a request of one token, and let it run or wait."""
        self.add(request_id, [3], adapter=given, max_tokens=max_tokens, **more)
        for _ in range(4):
            self.turn()

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    @property
    def plans(self) -> list[AdapterPlan]:
        return [plan.adapters for plan in self.model.plans if plan.adapters is not None]

    @property
    def asked(self) -> list[int]:
        """The names of the adapters that the workers were asked to read."""
        return [ref.digest[0] for plan in self.plans for ref in plan.prepared]

    @property
    def assigned(self) -> list[tuple[int, int]]:
        """Slots, and the names of the adapters that they got."""
        return [(slot, digest[0]) for plan in self.plans for slot, digest in plan.assigned]


@pytest.mark.parametrize(
    ("stages", "depth", "windows", "fails"),
    [(*ahead, WINDOWS[(2 * i + j) % 7], ahead[0] == 1 and j == 1) for i, ahead in enumerate(AHEAD) for j in (0, 1)],
)
def test_answers_do_not_depend_on_who_else_has_which_adapter(
    stages: int, depth: int, windows: Windows, fails: bool
) -> None:
    """Many adapters for few slots and little memory; preemptions, aborts, shares and, on one stage, failures. With two
    plans in flight on one stage, rows with the drafts of a model are chained."""
    config = configured(3, 6, 9, stages=stages, depth=depth, windows=windows, max_num_batched_tokens=32)
    config = replace(config, scheduler=replace(config.scheduler, speculative=SpeculativeConfig()))
    engine, rng = EngineWithAdapters(tightened(config)), random.Random(depth + 10 * fails)
    engine.answers = lambda: rng.random() < 0.4
    if is_chained := (stages, depth) == (1, 2):
        engine.scheduler.speculation, engine.model.guess = Always(MOST, 4 * (MOST + 1)), mixed
    if fails:
        engine.model.fails = lambda plan: plan.num_rows > 0 and rng.random() < 0.04
    if stages == 1:
        engine.model.has_room = lambda digest: rng.random() < 0.9
    known = [adapter(name, 1 + name % 5) for name in range(9)]
    engine.errors = {known[8].digest: "no such tensor"}
    texts = [[rng.randrange(5) for _ in range(60)] for _ in range(2)]
    given: dict[str, tuple[list[int], AdapterRef | None, int]] = {}

    def disturb(turn: int) -> None:
        if turn < 80:
            prompt = rng.choice(texts)[: rng.randrange(1, 60)]
            chosen = rng.choice([None, *known])
            start = rng.choice([0, rng.randrange(len(prompt))]) if chosen is not None else 0
            given[str(turn)] = prompt, chosen, start
            share, count = bytes([turn % 2]), rng.randrange(1, 16)
            engine.add(str(turn), prompt, adapter=chosen, adapter_start=start, share=share, max_tokens=count)
            engine.scheduler.adapters.pin_all(turn % 2, (each.digest for each in known[turn % 8 : turn % 8 + turn % 4]))
            if rng.random() < 0.2:
                engine.abort(str(rng.randrange(turn + 1)))

    engine.run(disturb, at_least=80)
    ends = dict[str, int]()
    for request_id, (prompt, chosen, start) in given.items():
        (end,), tokens = engine.ends(request_id), engine.tokens(request_id)
        whole = continuation(prompt, 16) if chosen is None else adapted(prompt, chosen, 16, start)
        assert tokens == whole[: len(tokens)]
        ends[end] = ends.get(end, 0) + 1
        last = engine.outputs[request_id][-1]
        if end == "error":
            assert (last.error, last.is_invalid) in ((FAILURE, False), (UNPLACED, False), ("no such tensor", True))
    assert ends["length"] > 25
    assert ends["error"] > 2
    assert is_chained == any(row.is_chained for plan in engine.model.plans for row in plan.scheduled)
    assert engine.scheduler.snapshot().adapter_swaps > 10
    assert engine.scheduler.stats.prefix_hit_tokens > 0
    assert engine.scheduler.stats.preemptions > 0 or windows != (None,)


def test_the_least_recently_used_slot_is_taken_and_none_of_a_running_request() -> None:
    engine = EngineWithAdapters(configured())
    engine.start("long", adapter(1), max_tokens=100)
    for name in (2, 3, 2, 1):
        engine.start(str(name), adapter(name), max_tokens=2)
    assert engine.assigned == [(0, 1), (1, 2), (1, 3), (1, 2)]
    engine.abort("long")
    engine.start("2 again", adapter(2), max_tokens=2)
    engine.start("3", adapter(3), max_tokens=2)
    engine.start("2 once more", adapter(2), max_tokens=2)
    engine.start("1", adapter(1), max_tokens=2)
    assert engine.assigned[4:] == [(0, 3), (0, 1)]
    assert [plan.freed for plan in engine.plans if plan.freed] == [[1], [1], [0], [0]]
    assert engine.scheduler.snapshot().adapters_on_device == 2
    assert engine.scheduler.stats.adapters_prepared == 3


def test_what_is_too_large_beside_others_takes_the_room_of_several() -> None:
    engine = EngineWithAdapters(configured(slots=8, capacity=5))
    for name, size in ((1, 2), (2, 2), (3, 1), (4, 4)):
        engine.start(str(name), adapter(name, size), max_tokens=2)
    assert engine.assigned == [(0, 1), (1, 2), (2, 3), (0, 4)]
    assert [plan.freed for plan in engine.plans if plan.freed] == [[0, 1]]


def test_the_hosts_memory_keeps_what_was_used_last_and_what_requests_have() -> None:
    engine = EngineWithAdapters(configured(capacity=9, host_bytes=5))
    engine.start("long", adapter(1, 3), max_tokens=100)
    for name in (2, 3, 2, 4):
        engine.start(str(name), adapter(name), max_tokens=2)
    dropped = [digest[0] for plan in engine.plans for digest in plan.dropped]
    assert dropped == [3]  # and its slot is free
    assert engine.assigned == [(0, 1), (1, 2), (1, 3), (1, 2), (1, 4)]
    engine.start("3", adapter(3), max_tokens=2)
    assert engine.asked == [1, 2, 3, 4, 3]
    assert engine.scheduler.adapters.prepare(adapter(4)) == ("", True)  # which somebody will use
    engine.start("2", adapter(2), max_tokens=2)
    assert [digest[0] for plan in engine.plans for digest in plan.dropped] == [3, 2, 3]


def test_pinned_adapters_stay_in_the_hosts_memory() -> None:
    """As many as it has room for, in order; also those that are read later. Others come and go beside them."""
    engine = EngineWithAdapters(configured(capacity=9, host_bytes=6))
    manager = engine.scheduler.adapters
    manager.pin_all(0, [adapter(1, 3).digest, adapter(2, 2).digest, adapter(3, 2).digest])
    for name, size in ((1, 3), (2, 2), (3, 2), (4, 1), (5, 1)):
        engine.start(str(name), adapter(name, size), max_tokens=2)
    assert [digest[0] for plan in engine.plans for digest in plan.dropped] == [3, 4]
    assert manager.pin(adapter(5).digest) == ("", True)
    error, is_invalid = manager.pin(adapter(3, 2).digest)
    assert ("6 B of adapters in the host's memory, of which 6 B are pinned" in error, is_invalid) == (True, True)
    assert manager.pin(adapter(6, 2).digest)[1] is False  # nobody knows it any more
    engine.start("6", adapter(6), max_tokens=2)  # dropped when it has ended
    manager.pin_all(0, [adapter(1, 3).digest, adapter(5).digest])
    engine.start("7", adapter(7, 2), max_tokens=2)
    assert [digest[0] for plan in engine.plans for digest in plan.dropped] == [3, 4, 6, 2]
    assert sorted(digest[0] for digest in engine.model.adapters) == [1, 5, 7]


def test_an_adapter_stays_pinned_until_no_process_needs_it_so() -> None:
    """Processes learn of a change at different times. One that is to be pinned is kept even if requests use all of the
    memory that pinned ones leave."""
    engine = EngineWithAdapters(configured(capacity=9, host_bytes=4))
    manager = engine.scheduler.adapters
    engine.add("runs", [1], adapter=adapter(7, 2), max_tokens=30)
    while "runs" not in engine.running:
        engine.turn()
    for client, (name, size) in enumerate(((1, 2), (2, 1))):
        manager.pin_all(client, [adapter(name, size).digest])
        assert manager.prepare(adapter(name, size)) is None
        for _ in range(3):
            engine.turn()
        assert manager.pin(adapter(name, size).digest) == ("", True)
    manager.pin_all(0, [])
    manager.pin_all(0, [adapter(2).digest])
    engine.run()
    manager.pin_all(1, [])
    engine.start("3", adapter(3, 3), max_tokens=2)
    assert sorted(digest[0] for digest in engine.model.adapters) == [2, 3]


def test_a_request_whose_adapter_is_read_delays_nobody() -> None:
    engine = EngineWithAdapters(configured(max_num_seqs=4))
    engine.answers = lambda: False
    engine.start("slow", adapter(1))
    assert engine.model.plans[0].adapters == AdapterPlan(prepared=[adapter(1)])
    assert engine.model.plans[0].num_rows == 0
    assert not engine.scheduler.has_work  # the core sleeps
    engine.start("base", None, max_tokens=2)
    assert engine.ends("base") == ["length"]
    assert engine.running == []
    assert engine.scheduler.snapshot().waiting == 1
    engine.answers = lambda: True
    engine.run()
    assert engine.tokens("slow") == adapted([3], adapter(1), 20)


def test_few_adapters_are_read_at_a_time_and_none_while_enough_wait_for_slots() -> None:
    engine = EngineWithAdapters(configured(slots=1, capacity=1, host_bytes=2))
    engine.answers = lambda: False
    for name in range(1, 7):
        engine.start(str(name), adapter(name))
    assert engine.asked == [1, 2]
    engine.abort("3")  # nobody has asked for it yet
    engine.answers = lambda: True
    engine.start("base", None, max_tokens=2)
    assert engine.running == ["1"]
    assert engine.asked == [1, 2, 4, 5]
    engine.run()
    assert engine.asked == [1, 2, 4, 5, 6]
    assert [engine.ends(str(name)) for name in range(1, 7)] == [["length"]] * 2 + [["abort"]] + [["length"]] * 3


def test_the_paths_of_the_last_request_are_read() -> None:
    engine = EngineWithAdapters(configured(max_num_seqs=9))
    engine.answers = lambda: False
    for path in ("old", "new"):
        for name in (1, 2, 3):
            engine.start(f"{name}{path}", adapter(name, path=path))
    engine.answers = lambda: True
    engine.run()
    assert [ref.paths for plan in engine.plans for ref in plan.prepared] == [("old",), ("old",), ("new",)]


def test_who_waits_for_a_slot_lets_others_pass_but_not_forever() -> None:
    """Requests with the adapters that run keep coming; the one that waits gets the place of the one that started
    least recently, when its requests have ended."""
    engine = EngineWithAdapters(configured())
    engine.start("first 1", adapter(1), max_tokens=30)
    engine.start("first 2", adapter(2), max_tokens=60)
    engine.start("waits", adapter(3), max_tokens=4)
    assert engine.running == ["first 1", "first 2"]
    order = list[str]()
    for number in range(12):
        for name in (0, 1, 2):
            engine.start(f"{name}.{number}", adapter(name) if name else None, max_tokens=9)
            order += [each for each in engine.running if each not in order]
    assert "0.0" in order[:3]
    assert order.index("2.0") < order.index("waits") < order.index("1.0")
    assert engine.ends("first 2") == ["length"] or order.index("waits") < order.index("2.8")
    engine.run()
    assert engine.tokens("waits") == adapted([3], adapter(3), 4)
    assert len(engine.assigned) <= 5


def test_an_adapter_that_waits_for_much_room_is_not_overtaken_by_small_ones() -> None:
    engine = EngineWithAdapters(configured(slots=4, capacity=2))
    engine.start("1", adapter(1), max_tokens=30)
    engine.start("2", adapter(2), max_tokens=50)
    engine.start("large", adapter(3, size=2), max_tokens=2)
    engine.start("small", adapter(4), max_tokens=2)
    engine.run()
    assert [name for _, name in engine.assigned] == [1, 2, 3, 4]


def test_a_preempted_request_gives_up_its_slot_and_gets_one_again() -> None:
    config = configured(slots=1, capacity=1, block_size=4, num_blocks=12, max_num_seqs=2, max_model_len=44)
    engine = EngineWithAdapters(config)
    engine.add("base", [5] * 8, max_tokens=30)
    engine.add("adapted", [6] * 8, max_tokens=30, adapter=adapter(1))
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    assert engine.tokens("adapted") == adapted([6] * 8, adapter(1), 30)
    assert engine.tokens("base") == continuation([5] * 8, 30)


@pytest.mark.parametrize("state", ["in line", "asked", "read", "half read", "ready", "waits for a slot", "runs"])
def test_an_abort_leaves_nothing_behind(state: str) -> None:
    engine = EngineWithAdapters(configured(slots=1, capacity=1))
    engine.ranks = range(2) if state == "half read" else engine.ranks
    engine.scheduler.adapters._world_size = len(engine.ranks)
    engine.answers = lambda: False
    before = {"in line": (7, 8), "waits for a slot": (7,)}.get(state, ())
    for name in before:
        engine.add(str(name), [3], adapter=adapter(name), max_tokens=30)
    if state == "waits for a slot":
        engine.answers = lambda: True
        engine.turn()
        engine.turn()
    engine.add("a", [3], adapter=adapter(1), max_tokens=30)
    if state not in ("in line", "asked"):
        engine.turn()
        engine.turn()
    if state == "half read":
        assert engine.answer(engine.pending.pop(0)) is None
    if state == "ready":
        engine.answer(engine.pending.pop(0))
    if state in ("waits for a slot", "runs"):
        engine.answers = lambda: True
        engine.turn()
        engine.turn()
    assert engine.running == {"runs": ["a"], "waits for a slot": ["7"]}.get(state, [])
    engine.abort("a")
    for name in before:
        engine.abort(str(name))
    engine.scheduler.check_integrity()
    engine.answers = lambda: True  # late ones, too
    engine.run()
    assert engine.ends("a") == ["abort"]
    assert engine.asked.count(1) == (state != "in line")
    kept = [digest[0] for digest in engine.model.adapters]  # what is being read, too: a client may ask again
    assert kept == {"in line": [7, 8], "waits for a slot": [7, 1]}.get(state, [1])
    engine.start("again", adapter(1), max_tokens=2)
    assert engine.tokens("again") == adapted([3], adapter(1), 2)


def test_a_reading_that_has_begun_is_for_the_next_request_if_the_first_has_gone() -> None:
    """Also when the workers have answered, and the core has yet to know."""
    engine = EngineWithAdapters(configured())
    engine.answers = lambda: False
    for request_id in ("a", "b"):
        engine.start(request_id, adapter(1))
        engine.abort(request_id)
    engine.turn()
    engine.answer(engine.pending.pop(0))
    engine.start("c", adapter(1), max_tokens=3)
    assert engine.tokens("c") == adapted([3], adapter(1), 3)
    assert engine.asked == [1]
    assert not any(plan.dropped for plan in engine.plans)


@pytest.mark.parametrize(("stages", "is_invalid"), [(1, True), (2, True), (2, False)])
def test_an_adapter_that_a_worker_cannot_use_ends_its_requests_alone(stages: int, is_invalid: bool) -> None:
    engine = EngineWithAdapters(configured(stages=stages))
    engine.answers = lambda: False
    for name in ("a", "b"):
        engine.start(name, adapter(1))
    engine.start("other", adapter(2))
    failed = [engine.pending.pop(0) for _ in engine.ranks][-1]
    failed.error, failed.is_invalid = "model.bin is a pickle", is_invalid
    assert engine.answer(failed) == "model.bin is a pickle"
    for name in ("a", "b"):
        (output,) = engine.outputs[name]
        assert (output.finish_reason, output.error, output.is_invalid) == ("error", failed.error, is_invalid)
    if stages == 2:  # until all have answered
        engine.add("early", [3], adapter=adapter(1))
        (output,) = engine.outputs["early"]
        assert (output.error, output.is_invalid) == (failed.error, is_invalid)
        assert engine.answer(AdapterPrepared(adapter(1).digest, 0, 1, 1)) is None
    engine.answers = lambda: True
    engine.start("again", adapter(1), max_tokens=3)
    engine.run()
    assert engine.tokens("again") == adapted([3], adapter(1), 3)
    assert engine.tokens("other") == adapted([3], adapter(2), 20)


@pytest.mark.parametrize(("depth", "fails"), [(2, False), (3, False), (2, True)])
def test_an_adapter_that_finds_no_room_on_a_device_ends_its_requests_alone(depth: int, fails: bool) -> None:
    """Also if the step is skipped or fails otherwise. What it has computed is not in the cache, not even that of a
    request which was aborted before its result arrived."""
    engine = EngineWithAdapters(configured(slots=1, capacity=1, depth=depth, num_blocks=100))
    prompt = [*range(9)]
    for name in (1, 2):
        engine.scheduler.adapters.prepare(adapter(name))
    engine.start("base", None, max_tokens=30)
    engine.model.has_room = lambda digest: digest != adapter(1).digest or len(engine.assigned) > 1
    engine.model.fails = lambda plan: fails and plan.places_adapters and len(engine.assigned) == 1
    for request_id in "abc":
        engine.add(request_id, prompt, adapter=adapter(1))
    engine.add("other", [3], adapter=adapter(2))
    while not engine.assigned:
        engine.turn()
    engine.abort("b")
    engine.run()
    assert [engine.ends(each) for each in "abc"] == ([["error"], ["abort"], ["error"]])
    (output,) = engine.outputs["a"]
    assert (output.error, output.is_invalid, output.token_ids) == (UNPLACED, False, [])
    assert engine.ends("base") == ["error" if fails else "length"]
    assert engine.tokens("other") == adapted([3], adapter(2), 16)
    assert cached(engine, "again", prompt, adapter=adapter(1)) == 0
    assert engine.tokens("again") == adapted(prompt, adapter(1), 2)
    assert [name for _, name in engine.assigned] == [1, 2, 1]
    assert engine.asked == [1, 2]


@pytest.mark.parametrize(
    ("given", "start", "has_adapters", "reason"),
    [
        (adapter(1), 0, False, "adapters are not supported here; start the server with --enable-lora"),
        (AdapterRef(b"short", ("a",)), 0, True, "the adapter has no digest of 32 bytes, or no path"),
        (AdapterRef(b"1" * 32, ()), 0, True, "the adapter has no digest of 32 bytes, or no path"),
        (adapter(1), 1, True, "the adapter starts at token 1, which is not in the prompt"),
        (
            adapter(1, size=3),
            0,
            True,
            "the adapter needs 3 B on each device, where 2 B are reserved; use a higher --max",
        ),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(
    given: AdapterRef, start: int, has_adapters: bool, reason: str
) -> None:
    config = configured()
    engine = EngineWithAdapters(config if has_adapters else replace(config, lora=None))
    engine.start("a", given, adapter_start=start)
    (output,) = engine.outputs["a"]
    assert output.finish_reason == "error"
    assert output.is_invalid
    assert (output.error or "").startswith(reason)
    engine.run()
    assert not engine.model.adapters


def cached(engine: EngineWithAdapters, request_id: str, prompt: list[int], **given: Any) -> int:
    engine.add(request_id, prompt, max_tokens=2, **given)
    engine.run()
    return engine.outputs[request_id][0].num_cached_tokens


def test_prefixes_are_shared_up_to_the_token_that_an_adapter_changes() -> None:
    engine, prompt = EngineWithAdapters(configured(num_blocks=1000)), [*range(40)]
    one, other = adapter(1), adapter(2)
    assert cached(engine, "base", prompt) == 0
    assert cached(engine, "1", prompt, adapter=one) == 0
    assert cached(engine, "2", prompt, adapter=other) == 0
    assert cached(engine, "base again", prompt) == 36  # all full blocks but the one of the last token
    assert cached(engine, "1 again", prompt, adapter=one) == 36
    assert cached(engine, "1 elsewhere", prompt, adapter=adapter(1, path="b")) == 36
    assert cached(engine, "other weights", prompt, adapter=adapter(1, size=2)) == 0
    assert cached(engine, "late", prompt, adapter=one, adapter_start=21) == 20  # the base's
    assert cached(engine, "late again", prompt, adapter=one, adapter_start=21) == 36
    assert cached(engine, "later", prompt, adapter=one, adapter_start=22) == 20
    assert cached(engine, "at a boundary", prompt, adapter=one, adapter_start=24) == 24
    assert cached(engine, "of another", prompt, adapter=other, adapter_start=21) == 20
    assert cached(engine, "salted", prompt, adapter=one, cache_salt=b"salt") == 0


def test_prompts_whose_tokens_all_see_each_other_share_nothing_across_adapters() -> None:
    engine, prompt = EngineWithAdapters(configured(num_blocks=1000)), [*range(40)]
    engine.scheduler.blocks._media = Mock(is_one_run=lambda media: True)
    assert cached(engine, "base", prompt) == 0
    assert cached(engine, "late", prompt, adapter=adapter(1), adapter_start=21) == 0
    assert cached(engine, "later", prompt, adapter=adapter(1), adapter_start=22) == 0
    assert cached(engine, "late again", prompt, adapter=adapter(1), adapter_start=21) == 36
    assert cached(engine, "of another", prompt, adapter=adapter(2), adapter_start=21) == 0


def test_plans_say_which_slot_a_request_has() -> None:
    engine = EngineWithAdapters(configured())
    engine.start("base", None)
    engine.start("one", adapter(1))
    engine.add("two", [3, 4, 5], adapter=adapter(2), adapter_start=1)
    engine.run()
    new = [new for plan in engine.model.plans for new in plan.new]
    assert [(each.adapter_slot, each.adapter_start) for each in new] == [(NO_SLOT, 0), (0, 0), (1, 1)]
    assert next_token(with_adapter([3, 4, 5], adapter(2).digest, 1)) == engine.tokens("two")[0]


def test_the_time_of_steps_that_copy_adapters_predicts_nothing() -> None:
    config = configured()
    engine = EngineWithAdapters(replace(config, scheduler=replace(config.scheduler, dynamic_chunking=True)))
    budget, known = engine.scheduler.token_budget, dict[int, bool]()

    def note(plan: SchedulerOutput) -> bool:
        if plan.num_rows:
            known[plan.step] = plan.step in budget._loads
        return False

    engine.model.fails = note
    engine.add("a", [3], adapter=adapter(1), max_tokens=3)
    engine.run()
    (copies,) = [plan.step for plan in engine.model.plans if plan.adapters is not None and plan.adapters.assigned]
    assert [step for step, is_known in known.items() if not is_known] == [copies]
    assert len(known) == 3
