"""Rows that continue where the step in flight ends, which the workers know first."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.config.engine_config import SpeculativeConfig
from quire.engine.protocol.scheduler_output import CachedRequestData, SchedulerOutput
from quire.engine.scheduler.drafts_in_flight import DraftsInFlight
from quire.engine.scheduler.model_drafts import ModelSpeculationManager
from quire.engine.scheduler.scheduler import Scheduler
from tests.fakes.configs import Windows, engine_config
from tests.fakes.drafts import Always, Mixed
from tests.fakes.model import FAILURE, next_token
from tests.unit.engine.scheduler.test_model_drafts import GUESSES, MOST, mixed
from tests.unit.engine.scheduler.test_scheduler import Engine, continuation, tightened
from tests.unit.engine.scheduler.test_speculation import REPEATING, request


def engine(
    guess: Callable[[list[int]], int] = mixed, windows: Windows = (None,), most: int = MOST, **config: Any
) -> Engine:
    running = Engine(engine_config(windows=windows, **{"depth": 2, "num_blocks": 1200, **config}))
    running.scheduler.speculation = Always(most, 4 * (most + 1))
    running.model.guess = guess
    return running


def chained(running: Engine) -> list[SchedulerOutput]:
    """The plans with chained rows, which have no others."""
    plans = [plan for plan in running.model.plans if any(row.is_chained for row in plan.scheduled)]
    for plan in plans:
        assert all(row.is_chained for row in plan.scheduled)
        assert not plan.decodes
        assert not plan.new
    return plans


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("windows", [(None,), (None, 9, 9), (6,)])
def test_most_steps_are_planned_ahead(windows: Windows, guess: str) -> None:
    """But the first, and the last before the length limit, which may be nearer than a row's end."""
    running = engine(GUESSES[guess], windows)
    for name in range(3):
        running.add(str(name), [name, 2, 3], max_tokens=60)
    running.run()
    for name in range(3):
        assert running.tokens(str(name)) == continuation([name, 2, 3], 60)
    steps = [plan for plan in running.model.plans if plan.num_rows]
    stats = running.scheduler.snapshot()
    assert len(chained(running)) > len(steps) / 2
    if guess == "right":  # the prompts' step, 11 of five tokens in each row, and the last four tokens, planned later
        assert (len(steps), len(chained(running))) == (1 + 11 + 1, 11)
    assert stats.num_draft_tokens > stats.num_drafts > 30
    assert (stats.num_accepted_tokens > 0) == (guess != "wrong")


def test_plans_do_not_contain_what_the_workers_know() -> None:
    running = engine(next_token)
    running.add("a", [1, 2, 3], max_tokens=40)
    running.run()
    first = chained(running)[0].scheduled[0]
    assert first == CachedRequestData(0, 1 + MOST, [], first.new_block_ids, is_chained=True)
    behind = running.model.plans[chained(running)[-1].step + 1].scheduled[0]
    assert len(behind.new_token_ids) == 1 + MOST
    assert behind.num_accepted == MOST


@pytest.mark.parametrize("at", range(1, 14))
def test_what_follows_a_stop_token_is_discarded(at: int) -> None:
    """At every place of a row, also while the next row is in flight."""
    prompt = [5, 6, 7]
    stop = continuation(prompt, 40)[at]
    expected = [*itertools.takewhile(lambda token: token != stop, continuation(prompt, 40)), stop]
    running = engine(next_token)
    running.add("a", prompt, max_tokens=40, stop_token_ids=[stop])
    running.add("b", [1], max_tokens=40)
    running.run()
    assert (running.tokens("a"), running.ends("a")) == (expected, ["stop"])
    assert running.tokens("b") == continuation([1], 40)
    assert chained(running)
    running.add("c", [*prompt, *expected], max_tokens=3)  # finds no block that is not written
    running.run()
    assert running.tokens("c") == continuation([*prompt, *expected], 3)


@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("length", range(1, 24))
def test_no_row_reaches_beyond_the_length_limit(most: int, length: int) -> None:
    """The fake model and `check_integrity` hold the scheduler to it."""
    running = engine(next_token, most=most, max_model_len=20)
    running.add("a", [1, 2], max_tokens=length)
    running.add("b", [3], max_tokens=40)
    running.run()
    assert running.tokens("a") == continuation([1, 2], min(length, 18))
    assert running.tokens("b") == continuation([3], 19)


@pytest.mark.parametrize("seed", range(4))
def test_scarce_blocks_end_chains_and_preempt_nobody_for_them(seed: int) -> None:
    running, plain = (engine(max_num_batched_tokens=32, max_model_len=76, num_blocks=24 + seed) for _ in range(2))
    plain.scheduler.speculation = None
    for each in (running, plain):
        for name in range(3):
            each.add(str(name), [name] * 8, max_tokens=34)
        each.run()
        for name in range(3):
            assert each.tokens(str(name)) == continuation([name] * 8, 34)
    assert running.scheduler.stats.preemptions <= plain.scheduler.stats.preemptions
    assert chained(running)


@pytest.mark.parametrize("turn", range(2, 9))
def test_aborted_while_two_rows_are_in_flight(turn: int) -> None:
    running = engine()
    for name in "abc":
        running.add(name, [ord(name)], max_tokens=40)
    running.run(lambda number: running.abort("b") if number == turn else None)
    assert running.ends("b") == ["abort"]
    assert running.tokens("b") == continuation([ord("b")], len(running.tokens("b")))
    for name in "ac":
        assert running.tokens(name) == continuation([ord(name)], 40)
    assert len(chained(running)) > 8


@pytest.mark.parametrize("step", range(1, 8))
def test_a_failed_step_takes_those_chained_to_it_along(step: int) -> None:
    running = engine()
    running.model.fails = lambda plan: plan.step == step
    for name in "ab":
        running.add(name, [ord(name)], max_tokens=40)
    running.run(lambda turn: running.add("c", [9], max_tokens=40) if turn == 12 else None, at_least=13)
    for name in "ab":
        assert running.ends(name) == ["error"]
        assert running.outputs[name][-1].error == FAILURE
        assert running.tokens(name) == continuation([ord(name)], len(running.tokens(name)))
    assert running.tokens("c") == continuation([9], 40)


def test_where_drafts_could_not_be_made_the_chained_row_has_none() -> None:
    running = engine(next_token)
    running.model.drafts_fit = lambda plan: plan.step % 3 > 0
    running.add("a", [1, 2, 3], max_tokens=60)
    running.run()
    assert running.tokens("a") == continuation([1, 2, 3], 60)
    stats = running.scheduler.snapshot()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 30  # drafts that were not made are not counted
    assert len(chained(running)) > 8


def test_a_prompt_is_not_delayed_by_a_chain() -> None:
    running = engine(max_num_seqs=4)
    running.add("a", [1], max_tokens=60)
    running.run(lambda turn: running.add("b", [2] * 9, max_tokens=20) if turn == 6 else None)
    assert running.tokens("a") == continuation([1], 60)
    assert running.tokens("b") == continuation([2] * 9, 20)
    (admitted,) = (plan.step for plan in running.model.plans if plan.new and plan.step)
    assert admitted == 6
    assert chained(running)[0].step < admitted < chained(running)[-1].step


def test_a_waiting_request_is_admitted_once_there_is_room() -> None:
    running = engine(num_blocks=24, max_model_len=80, max_num_batched_tokens=32)
    running.add("a", [1] * 4, max_tokens=20)
    running.add("b", [2] * 60, max_tokens=10)
    running.run()
    assert running.tokens("b") == continuation([2] * 60, 10)


def test_nothing_is_chained_where_the_core_must_know_more() -> None:
    """A grammar and a recurrent state need the sampled tokens, and several stages are in flight anyway; with a single
    plan in flight there is nothing to chain to; a draft model on one rank of two tells the others nothing."""
    cases: list[dict[str, Any]] = [{"depth": 1}, {"stages": 2}, {"windows": (None, "state", "state")}]
    for config in cases:
        running = Engine(engine_config(**{"depth": 2, "num_blocks": 1200, **config}))
        running.scheduler.speculation, running.model.guess = Always(MOST, 16, 4 if "windows" in config else None), mixed
        running.add("a", [1], max_tokens=30)
        running.run()
        assert running.scheduler.snapshot().num_drafts
        assert not chained(running)
    running = engine()
    running.scheduler.draft_steps.all_ranks_draft = False
    running.add("a", [1], max_tokens=30)
    running.run()
    assert not chained(running)


@pytest.mark.parametrize("seed", range(12))
def test_output_does_not_depend_on_what_happens_meanwhile(seed: int) -> None:
    """Requests come, end at their limit or at a stop token, are aborted and preempted, steps fail, and drafts are not
    made."""
    rng, prompts = random.Random(seed), dict[str, list[int]]()
    kinds: list[Windows] = [(None,), (None, 9, 9), (6,), (None, 4, 30, 2)]
    windows = rng.choice(kinds)
    config: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": rng.choice([2, 4, 8]), "max_model_len": 90}
    running = engine(rng.choice([*GUESSES.values()]), windows, rng.choice([1, 3, 5]), **config)
    if seed % 3 == 0:
        running = Engine(tightened(engine_config(windows=windows, depth=2, num_blocks=1200, **config)))
        running.scheduler.speculation, running.model.guess = Always(3, 16, varies=True), mixed
    fails = rng.choice([0.0, 0.0, 0.02])
    running.model.fails = lambda plan: rng.random() < fails
    running.model.drafts_fit = lambda plan: rng.random() > 0.1

    def disturb(turn: int) -> None:
        if turn < 80 and rng.random() < 0.15:
            name = str(turn)
            prompts[name] = [rng.randrange(5) for _ in range(rng.randrange(1, 40))]
            stops = [rng.randrange(97) for _ in range(rng.randrange(3))]
            running.add(name, prompts[name], rng.randrange(3), max_tokens=rng.randrange(1, 50), stop_token_ids=stops)
        if prompts and rng.random() < 0.02:
            running.abort(rng.choice([*prompts]))

    running.run(disturb, at_least=80)
    assert len(chained(running)) > 4
    for name, prompt in prompts.items():
        assert len(running.ends(name)) == 1
        assert running.tokens(name) == continuation(prompt, len(running.tokens(name)))


def test_counts_of_a_request_are_exact_once_nothing_is_in_flight() -> None:
    """Against a model of the books: rows of drafts of which any number may count or not be made."""
    rng = random.Random(0)
    for _ in range(200):
        books, one = DraftsInFlight(), request([1, 2, 3])
        one.num_computed_tokens = 3  # a row without drafts is in flight
        exact, rows = 3, [0]
        for _ in range(rng.randrange(1, 20)):
            count = rng.randrange(4)
            books.add(one, count)
            one.num_computed_tokens += 1 + count
            books.check_integrity(2)
            made, accepted = rng.randrange(5), rng.randint(0, rows[0])
            drafts, missing = books.on_result(one, made)
            assert drafts == rows[0]
            one.token_ids += [7] * (1 + accepted)
            one.num_computed_tokens -= drafts - accepted + missing
            exact += 1 + accepted
            rows = [min(count, made)]
            assert books.num_drafts(one) == rows[0]
            assert (one in books) == (rows[0] > 0)
            books.check_integrity(1)
        assert len(one.token_ids) == exact
        assert one.num_computed_tokens == exact + rows[0]


def test_steps_are_measured_as_results_follow_each_other() -> None:
    """A chained row counts as one with drafts, and takes the time since the result before."""
    manager, now = ModelSpeculationManager(SpeculativeConfig(num_speculative_tokens=3), 64), 0.0
    for step in range(12):
        plain = SchedulerOutput(step, [], [], [], [0])
        manager.on_result(plain, now := now + 1.0)
    for step in range(12):
        row = CachedRequestData(0, 4, [], [], is_chained=True)
        manager.on_result(SchedulerOutput(step, [], [], [row], num_drafts=3), now := now + 1.5)
    assert manager.times.relative("makes", 1, [4]) == [1.5]
    assert not row.has_prompt_tokens


def test_short_answers_are_not_chained() -> None:
    """If every fourth row ends its request, as many rows would be wasted."""
    manager = ModelSpeculationManager(SpeculativeConfig(num_speculative_tokens=3), 64)
    assert manager.may_chain([], 3)
    for row in range(100):
        manager.on_verified(is_stop=row % 4 == 0)
    assert not manager.may_chain([], 3)
    for row in range(300):
        manager.on_verified(is_stop=row % 50 == 0)
    assert manager.may_chain([], 3)


def test_what_n_grams_know_better_is_not_chained() -> None:
    """They need the text that the step in flight samples."""
    made = Mixed(3)
    copying, new = request(REPEATING), request([*range(40)])
    assert made.may_chain([new], 3)
    assert not made.may_chain([new, copying], 3)


def test_ranks_on_cpus_wait_for_each_other_and_so_for_no_plan() -> None:
    for tp, may_chain in ((1, True), (2, False)):
        config = engine_config(depth=2)
        speculative = replace(SpeculativeConfig(num_speculative_tokens=3), model=config.model)
        config = replace(
            config,
            scheduler=replace(config.scheduler, speculative=speculative),
            parallel=replace(config.parallel, tensor_parallel_size=tp),
        )
        manager = Scheduler(config).speculation
        assert isinstance(manager, ModelSpeculationManager)
        assert manager.may_chain([], 3) == may_chain


class Thrifty(Always):
    """Chains rows only while that pays."""

    may_chain = ModelSpeculationManager.may_chain


def test_a_scheduler_learns_that_answers_are_short() -> None:
    running = engine(next_token)
    running.scheduler.speculation = Thrifty(MOST, 64)
    for name in range(30):
        running.add(str(name), [name], max_tokens=40, stop_token_ids=[continuation([name], 14)[12]])
        running.run()
        assert running.tokens(str(name))[-1] == continuation([name], 14)[12]
    in_vain = [plan.step for plan in chained(running)]
    assert in_vain
    assert in_vain[-1] < len(running.model.plans) / 2
