"""A draft model that is behind catches up where that pays."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.engine.config.engine_config import SpeculativeConfig
from quire.engine.protocol.scheduler_output import CATCH_UP_TOKENS, CachedRequestData, SchedulerOutput
from quire.engine.scheduler.catch_up import CatchUp
from quire.engine.scheduler.model_drafts import ModelSpeculationManager
from quire.engine.scheduler.request import Request
from tests.fakes.configs import engine_config
from tests.fakes.drafts import FreeSteps, Mixed
from tests.unit.engine.scheduler.test_scheduler import Engine, continuation
from tests.unit.engine.scheduler.test_speculation import request


def late(lag: int, left: int) -> Request:
    """A decode of distinct tokens, of whose known ones the model lacks `lag` before the newest."""
    made = request([*range(lag + 1)])
    made.num_computed_tokens, made.max_tokens = lag + 1, lag + 1 + left
    return made


class Costly(FreeSteps):
    """A token with which a model catches up takes a part of the time of a step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def catch_up(self, num_rows: int) -> float:
        return self.seconds


def depth(requests: list[Request], seconds: float) -> int | None:
    made = Mixed()
    made.times = Costly(seconds)
    return made.num_drafts(requests, len(requests), has_prompts=False)


def test_a_model_is_behind_by_the_tokens_that_it_has_not_seen() -> None:
    """In the order of rows, as many in a step as the workers compute."""
    books, rows = CatchUp(1 << 30), [late(100, 50), late(0, 50), late(300, 50), late(500, 50)]
    assert books.behind(rows) == [(100, 0), (0, 0), (300, 1), (500, 3)]
    assert CatchUp(64).behind(rows) == [(64, 0), (0, 0), (64, 0), (64, 0)]
    assert CatchUp(0).behind(rows) == [(0, 0)] * 4


@pytest.mark.parametrize("max_behind", [0, 40, 1 << 30])
def test_what_the_workers_compute_is_counted_as_they_do(max_behind: int) -> None:
    """Against the arithmetic of a step of theirs, with prompts, drafts and rows of any length."""
    rng, books = random.Random(0), CatchUp(max_behind)
    for step in range(300):
        rows, firsts, counts = list[tuple[Request, int]](), list[int](), list[int]()
        for _ in range(rng.randrange(1, 6)):
            begin, length, pending = rng.randrange(600), rng.choice([1, 5, 200]), rng.choice([0, 0, 30])
            row = request([0] * (begin + length + pending))
            row.num_computed_tokens = begin + length
            row.num_drafter_tokens = rng.choice([0, begin // 2, max(0, begin - 1), begin, begin + 4])
            rows.append((row, length))
            firsts.append(begin)
            counts.append(length)
        known = np.array([row.num_drafter_tokens for row, _ in rows])
        first, count = np.array(firsts), np.array(counts)
        samples = np.array([not row.num_pending_tokens for row, _ in rows])
        starts = np.maximum(np.minimum(known, first + 1), first + 1 - max_behind)
        wanted = first + count + samples - starts
        is_late = wanted > count + 1
        before = np.where(is_late, wanted, 0).cumsum() - np.where(is_late, wanted, 0)
        computed = np.where(is_late, np.minimum(wanted, np.maximum(CATCH_UP_TOKENS - before, 0)), wanted)
        books.run(step, rows)
        assert [row.num_drafter_tokens for row, _ in rows] == (starts + computed).tolist()
        assert books.in_step(step) == computed[is_late].sum() <= CATCH_UP_TOKENS
        books.finish(step)
        assert not books.in_step(step)


def test_a_row_of_a_prompt_that_lacks_one_token_is_not_late() -> None:
    """It computes no more than a row that samples, and leaves the step's capacity to late rows."""
    books, rows = CatchUp(1 << 30), [request([0] * 330) for _ in range(2)]
    for row, known in zip(rows, (0, 99), strict=True):
        row.num_computed_tokens, row.num_drafter_tokens = 300, known
    books.run(0, [(row, 200) for row in rows])
    assert [row.num_drafter_tokens for row in rows] == [256, 300]
    assert books.in_step(0) == CATCH_UP_TOKENS


def test_no_model_catches_up_for_a_request_that_ends_soon() -> None:
    """500 tokens take as long as five steps, of which the first ends without drafts. With four drafts, of which four in
    five are right after others that are, a step gives 3.36 tokens: 12 tokens take 3.6 steps, of which each is 2.4 times
    as long and gives 2.7 tokens; 11 tokens take 3.3 steps, 2.53 times as long, of 2.64 tokens."""
    assert [left for left in range(2, 30) if depth([late(500, left)], 0.01)] == [*range(12, 30)]
    assert depth([late(500, 11)], 0.0) == 4
    assert depth([late(0, 2)], 0.01) == 4


def test_what_never_catches_up_in_time_drafts_nothing() -> None:
    """No matter how little it costs: 4,000 tokens take 16 steps, and the first drafts are made after the 15th."""
    assert depth([late(4000, 10)], 0.0) is None
    assert depth([late(4000, 1000)], 0.0) == 4


def test_one_that_is_late_does_not_take_the_drafts_of_others() -> None:
    """Unless it costs more than they save: each step computes only as many tokens as fit."""
    others = [late(0, 1000) for _ in range(7)]
    assert depth([*others, late(4000, 10)], 0.01 / CATCH_UP_TOKENS) == 4
    assert depth([*others, late(4000, 10)], 0.5 / CATCH_UP_TOKENS) == 4
    assert depth([*others, late(4000, 10)], 9.0 / CATCH_UP_TOKENS) is None
    assert depth([*others, late(4000, 100_000)], 9.0 / CATCH_UP_TOKENS) == 4


def test_the_time_of_catching_up_is_measured_and_not_taken_for_that_of_drafts() -> None:
    """With a step of 100 more tokens of a draft model, at a hundredth of a step each."""
    manager = ModelSpeculationManager(SpeculativeConfig(method="draft_model", num_speculative_tokens=4), 64)
    now, step = 0.0, 0

    def run(seconds: float, num_drafts: int | None, lag: int, drafts: int = 0) -> None:
        nonlocal now, step
        now, step = now + seconds, step + 1
        if num_drafts is not None:
            manager.on_drafter_runs(step, [(late(lag, 1000), 1)])
        row = CachedRequestData(0, 1 + drafts, [], [], [0] * drafts)
        manager.on_result(SchedulerOutput(step, [], [], [row], num_drafts=num_drafts), now)

    for _ in range(10):
        run(2.0, None, 0)
        run(3.0 + 102 * 0.02, 4, 100, 4)
    assert manager.times.catch_up(1) == 0.0  # the time of making drafts is not known yet
    for _ in range(10):
        run(2.0, None, 0)
        run(3.0, 4, 0, 4)
    assert manager.times.relative("makes", 1, [5]) == pytest.approx([1.5])
    assert manager.times.catch_up(1) == 0.0
    for _ in range(10):
        run(2.0 + 102 * 0.02, 4, 100)
        run(3.0, 4, 0, 4)
    assert manager.times.relative("makes", 1, [5]) == pytest.approx([1.5])
    assert manager.times.catch_up(1) == pytest.approx(0.01)


@pytest.mark.parametrize(("length", "is_asked"), [(70, False), (600, True)])
def test_after_a_crowd_the_model_is_asked_for_a_request_that_has_much_left(length: int, is_asked: bool) -> None:
    """While 40 requests run, the model does not. One of them goes on after the others have had their 64 tokens. Of this
    one the model lacks 264 tokens, which take as long as five steps."""
    running = Engine(engine_config(max_num_seqs=40, max_num_batched_tokens=512, num_blocks=1200, max_model_len=1000))
    speculation = running.scheduler.speculation = Mixed()
    speculation.times = Costly(0.02)
    prompts = {str(number): [number, *([3, 5, 7, 11] * 50)[: 200 if not number else 3]] for number in range(40)}
    for name, prompt in prompts.items():
        running.add(name, prompt, max_tokens=length if name == "0" else 64)
    running.run()
    for name, prompt in prompts.items():
        assert running.tokens(name) == continuation(prompt, length if name == "0" else 64)
    crowded = [plan for plan in running.model.plans if plan.num_rows > 32]
    asked = [plan.num_drafts for plan in running.model.plans if plan.num_rows == 1]
    assert len(crowded) >= 60
    assert not any(plan.num_drafts for plan in crowded)
    assert any(asked) == is_asked
