"""Drafts that the workers make change the number of steps, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

import pytest

from quire.engine.config.engine_config import SpeculativeConfig
from quire.engine.protocol.scheduler_output import CachedRequestData, SchedulerOutput
from quire.engine.scheduler.model_drafts import ModelSpeculationManager
from quire.engine.scheduler.ngram import TokenLookup
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.speculation import SpeculationManager
from tests.fakes.configs import Windows, engine_config
from tests.fakes.drafts import Always, FreeSteps, Mixed
from tests.fakes.model import FAILURE, next_token
from tests.unit.engine.scheduler.test_scheduler import AHEAD, Engine, continuation, tightened
from tests.unit.engine.scheduler.test_speculation import REPEATING, check_disturbed, request

MOST = 4


def wrong(tokens: list[int]) -> int:
    return (next_token(tokens) + 1) % 97


def mixed(tokens: list[int]) -> int:
    return next_token(tokens) if sum(tokens) % 3 else 0


GUESSES = {"right": next_token, "wrong": wrong, "mixed": mixed}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("varies", [False, True], ids=["always", "varies"])
@pytest.mark.parametrize(
    ("windows", "tight"),
    [((None,), False), ((None,), True), ((None, 9, 9), True), ((6,), False), ((None, "state", "state"), False)],
)
@pytest.mark.parametrize(("stages", "depth"), AHEAD)
def test_output_does_not_depend_on_drafts(
    stages: int, depth: int, windows: Windows, tight: bool, varies: bool, guess: str
) -> None:
    """With aborts, stop tokens, preemption, prefix hits, and every block that is read or drafted into checked by the
    fake model."""
    config = engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=32, num_blocks=500)
    running = Engine(tightened(config) if tight else config)
    states = config.cache.block_size if "state" in windows else None
    running.scheduler.speculation = Always(MOST, 16, states, varies=varies)
    running.model.guess = GUESSES[guess]
    check_disturbed(running, random.Random(depth), is_wrong=guess == "wrong")


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
@pytest.mark.parametrize(("guess", "steps"), [("right", 1 + 8), ("wrong", 41)])
def test_steps_are_counted_exactly(stages: int, depth: int, guess: str, steps: int) -> None:
    """A prompt's step gives the first of 41 tokens, and drafts. Right guesses make each later step worth five."""
    running = Engine(engine_config(stages=stages, depth=depth))
    running.scheduler.speculation, running.model.guess = Always(MOST), GUESSES[guess]
    running.add("a", [1, 2, 3], max_tokens=41)
    running.run()
    assert running.tokens("a") == continuation([1, 2, 3], 41)
    assert len([plan for plan in running.model.plans if plan.num_rows]) == steps
    stats = running.scheduler.snapshot()
    assert stats.accepted_per_position[: MOST + 1] == [8 if guess == "right" else 0] * MOST + [0]


@pytest.mark.parametrize("seed", range(4))
def test_drafts_never_preempt(seed: int) -> None:
    config = engine_config(num_blocks=20 + seed, max_num_batched_tokens=32, max_model_len=76)
    plain, drafting = Engine(config), Engine(config)
    drafting.scheduler.speculation, drafting.model.guess = Always(16, 32), wrong
    for running in (plain, drafting):
        for number in range(2):
            running.add(str(number), [number] * 8, max_tokens=30)
        running.run()
        assert running.tokens("1") == continuation([1] * 8, 30)
    assert drafting.scheduler.stats.preemptions == plain.scheduler.stats.preemptions == 0
    assert drafting.scheduler.stats.num_drafts


def test_prompts_come_first() -> None:
    """No drafts are made that the next plan cannot use, but the drafter follows the prompt."""
    running = Engine(engine_config(max_num_batched_tokens=16))
    running.scheduler.speculation = Always()
    running.add("a", [1], max_tokens=60)
    running.turn()
    running.add("b", [2] * 60, max_tokens=2)
    running.run()
    prompts = [plan for plan in running.model.plans if any(row.num_tokens > 5 for row in plan.scheduled)]
    assert [plan.num_drafts for plan in prompts] == [0] * (len(prompts) - 1) + [4]
    assert running.scheduler.snapshot().num_accepted_tokens


def test_a_failed_step_takes_its_drafts_along() -> None:
    running = Engine(engine_config(depth=2))
    running.scheduler.speculation, running.model.guess = Always(), mixed
    failing = {6, 11}
    running.model.fails = lambda plan: plan.step in failing
    for number in range(6):
        running.add(str(number), [number, 2, 3], max_tokens=20)
    running.run()
    assert ["error"] in [running.ends(str(number)) for number in range(6)]
    for number in range(6):
        tokens = running.tokens(str(number))
        assert tokens == continuation([number, 2, 3], len(tokens))
        assert running.ends(str(number)) == (["length"] if len(tokens) == 20 else ["error"])
        if len(tokens) < 20:
            assert running.outputs[str(number)][-1].error == FAILURE


def plan(num_tokens: int, num_drafts: int, drafts: int = 0) -> SchedulerOutput:
    """A plan of one row."""
    row = CachedRequestData(0, num_tokens, [], [], [0] * drafts)
    return SchedulerOutput(0, [], [], [row], num_drafts=num_drafts or None)


@pytest.mark.parametrize("windows", [(None,), (None, 9, 9), (None, "state", "state")])
@pytest.mark.parametrize(("stages", "depth"), AHEAD)
def test_output_does_not_depend_on_which_drafts_are_used(stages: int, depth: int, windows: Windows) -> None:
    """Prompts of five distinct tokens have wrong n-grams, and answers that are repeated have right ones."""
    config = engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=32, num_blocks=500)
    running = Engine(tightened(config))
    states = config.cache.block_size if "state" in windows else None
    running.scheduler.speculation, running.model.guess = Mixed(MOST, 16, states), next_token
    check_disturbed(running, random.Random(depth), is_wrong=False)
    assert any(plan.num_drafts for plan in running.model.plans)


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
@pytest.mark.parametrize(("stages", "depth"), AHEAD)
def test_a_text_that_is_predicted_needs_no_drafts_of_a_model(stages: int, depth: int, method: str) -> None:
    """It takes as many steps as with n-grams alone. A model that is always wrong is asked once, before the prediction
    has proved right; a head only follows the answer."""
    predicted, steps = continuation([1, 2, 3], 60), []
    for speculation in (SpeculationManager(SpeculativeConfig(), 64), Mixed(method=method)):
        running = Engine(engine_config(max_num_seqs=40, stages=stages, depth=depth))
        running.scheduler.speculation, running.model.guess = speculation, wrong
        speculation.times = FreeSteps()
        running.add("a", [1, 2, 3], max_tokens=60, predicted_token_ids=predicted)
        running.run()
        assert running.tokens("a") == predicted
        steps.append([plan.num_tokens for plan in running.model.plans if plan.num_rows])
        assert running.scheduler.stats.num_accepted_tokens == 60 - len(steps[-1])
    assert steps[0] == steps[1]
    assert len(steps[0]) <= 7
    asked = [plan.num_drafts for plan in running.model.plans if plan.num_rows]
    assert asked == [4, *[0 if method == "mtp" else None] * (len(asked) - 1)]


def test_wrong_ngrams_give_way_to_a_model_that_is_right() -> None:
    """One step for a prediction that is wrong after its first token, and one without drafts, in which the model makes
    the next ones."""
    running = Engine(engine_config(max_num_seqs=40))
    running.scheduler.speculation = Mixed()
    running.add("a", [1, 2, 3], max_tokens=41, predicted_token_ids=[next_token([1, 2, 3]), *[98] * 60])
    running.run()
    assert running.tokens("a") == continuation([1, 2, 3], 41)
    tokens = [plan.num_tokens for plan in running.model.plans if plan.num_rows]
    assert tokens == [3, 17, 1, *[5] * 7, 3]
    assert running.scheduler.stats.accepted_per_position[:5] == [8, 8, 7, 7, 0]


def test_each_request_has_its_own_drafts() -> None:
    """The model is asked for the one whose text is new, and its drafts do not replace a longer copy."""
    running = Engine(engine_config(max_num_seqs=40))
    running.scheduler.speculation = Mixed()
    running.add("copied", [1, 2, 3], max_tokens=60, predicted_token_ids=continuation([1, 2, 3], 60))
    running.add("new", [4, 5, 6], max_tokens=60)
    running.run()
    for name, prompt in (("copied", [1, 2, 3]), ("new", [4, 5, 6])):
        assert running.tokens(name) == continuation(prompt, 60)
    steps = [[len(row.draft_token_ids) for row in plan.scheduled] for plan in running.model.plans if plan.num_rows]
    assert [sorted(counts) for counts in steps[1:4]] == [[4, 16]] * 3
    assert len(steps) == 1 + 12


@pytest.mark.parametrize("depth", [1, 2])
def test_ngrams_are_looked_up_once_for_each_new_token(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matter how often a step asks: for the rows, whether to wait for drafts, and how many to make."""
    asked: list[tuple[int, int]] = []
    propose = TokenLookup.propose

    def counted(lookup: TokenLookup, count: int) -> list[int]:
        asked.append((id(lookup), lookup.num_known))
        return propose(lookup, count)

    monkeypatch.setattr(TokenLookup, "propose", counted)
    running = Engine(engine_config(max_num_seqs=40, depth=depth))
    speculation = running.scheduler.speculation = Mixed()
    looked_up: list[tuple[int, int]] = []
    look_up = speculation.look_up

    def kept(decodes: Sequence[Request], num_others: int) -> dict[Request, tuple[list[int], list[float]]]:
        looked_up.extend((id(each), len(each.token_ids)) for each in decodes)
        return look_up(decodes, num_others)

    monkeypatch.setattr(speculation, "look_up", kept)
    for name in range(2):
        running.add(str(name), [name, 2, 3], max_tokens=60)
    running.run()
    assert len(asked) == len(set(asked)) > 20
    assert len(looked_up) > 1.5 * len(asked)


def test_a_request_has_the_drafts_that_promise_more() -> None:
    """Judged by the share of right drafts of each kind."""
    made, copying = Mixed(), request(REPEATING)
    made.add_drafts({copying: [1, 2, 3, 4]})
    assert made.draft([copying]) == {copying: [*range(20, 36)]}
    assert made.num_drafts([copying], 1, has_prompts=False) is None
    new = request([*range(40)])
    assert made.num_drafts([new], 1, has_prompts=False) == 4
    made.add_drafts({new: [1, 2, 3, 4]})
    assert made.draft([new]) == {new: [1, 2, 3, 4]}


class Run:
    """One request whose steps take `seconds(tokens, drafts made)`, and of whose drafts `right` in a row are right."""

    def __init__(
        self,
        seconds: Callable[[int, int], float],
        right: Callable[[int], int],
        text: Callable[[int], int] = lambda place: place,
    ) -> None:
        """`text` is its token at each place."""
        config = SpeculativeConfig(method="draft_model", num_speculative_tokens=5)
        self.manager, self.text = ModelSpeculationManager(config, 64), text
        self.num_masked = 0
        """Rows of structured output besides."""
        self.seconds, self.right, self.request, self.now = seconds, right, request([0, 1, 2]), 0.0
        self.request.max_tokens = 1 << 30
        self.depths: list[int] = []
        self.steps = 0

    def run(self, steps: int) -> float:
        """Returns the tokens per second."""
        begin, before = self.now, len(self.request.token_ids)
        for _ in range(steps):
            self.steps += 1
            drafts = self.manager.draft([self.request], self.num_masked).get(self.request, [])
            depth = self.manager.num_drafts([self.request], 1 + self.num_masked, has_prompts=False) or 0
            self.depths.append(depth)
            self.now += self.seconds(1 + len(drafts), depth)
            following = self.following(len(drafts) + 1)
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, following, strict=False)))
            self.request.token_ids += following[: right + 1]
            made = plan(1 + len(drafts), depth, len(drafts))
            made.scheduled += [CachedRequestData(1 + row, 1, [], []) for row in range(self.num_masked)]
            made.masks = {1 + row: b"" for row in range(self.num_masked)}
            self.manager.on_result(made, self.now)
            coming = min(self.right(self.steps + 1), depth)
            if depth:
                self.manager.add_drafts({self.request: self.following(coming) + [1 << 21] * (depth - coming)})
        return (len(self.request.token_ids) - before) / (self.now - begin)

    def following(self, count: int) -> list[int]:
        length = len(self.request.token_ids)
        return [self.text(place) for place in range(length, length + count)]


def test_a_copy_is_not_delayed_by_a_model() -> None:
    """A good one that takes long, and one that is wrong."""
    for running in (
        Run(lambda tokens, drafts: 1.0 + 0.02 * tokens + 0.6 * drafts, lambda step: 5, lambda place: place % 30),
        Run(lambda tokens, drafts: 1.0 + 0.02 * tokens, lambda step: 0, lambda place: place % 30),
    ):
        running.run(100)
        assert running.run(400) > 0.95 * 17 / 1.34
        assert running.depths[-400:].count(0) >= 390


def test_a_model_is_not_delayed_by_what_looks_like_a_copy() -> None:
    """The same pair of tokens is followed by another one each time, which the model knows."""
    running = Run(
        lambda tokens, drafts: 1.0 + 0.02 * tokens + 0.05 * drafts,
        lambda step: 5,
        lambda place: place % 3 or place,
    )
    running.run(100)
    assert running.run(300) > 0.9 * 6 / 1.37


def test_good_drafts_are_used_fully() -> None:
    running = Run(lambda tokens, drafts: 1.0 + 0.02 * tokens + 0.1 * drafts, lambda step: 5)
    assert running.run(400) > 3.0
    assert running.depths[-50:].count(5) >= 45


def test_drafts_that_do_not_pay_end_soon_and_cost_next_to_nothing() -> None:
    """Wrong ones, and right ones that take longer than they save."""
    for running in (
        Run(lambda tokens, drafts: 1.0 + 0.1 * drafts, lambda step: 0),
        Run(lambda tokens, drafts: float(tokens + drafts), lambda step: 5),
    ):
        running.run(50)
        assert running.run(1000) > 0.98


@pytest.mark.parametrize("num_masked", [1, 2, 6])
def test_rows_that_have_no_drafts_do_not_hide_what_drafts_cost(num_masked: int) -> None:
    running = Run(lambda tokens, drafts: 1.0 + 0.5 * (tokens - 1 + drafts), lambda step: 1)
    running.num_masked = num_masked
    running.run(50)
    assert running.run(1000) > 0.98


def test_forced_tokens_are_not_the_time_of_a_step_with_drafts() -> None:
    """Nor are tokens that are computed again."""
    manager = ModelSpeculationManager(SpeculativeConfig(num_speculative_tokens=5), 64)
    for now in range(10):
        forced = SchedulerOutput(now, [], [], [CachedRequestData(0, 5, [1, 2, 3, 4, 5], [])])
        manager.on_result(forced, float(now))
    assert manager.times.relative("plain", 1, [5]) == manager.times.relative("plain", 5, [6]) == []


def test_a_step_has_no_more_tokens_than_its_limit_when_some_are_computed_again() -> None:
    running = Engine(engine_config(windows=(None, "state", "state"), max_num_batched_tokens=16, num_blocks=1200))
    running.scheduler.speculation = Always(4, 16, 4)
    for number in range(6):
        running.add(str(number), [number, 2, 3], max_tokens=40)
    running.run()  # the fake model checks it
    for number in range(6):
        assert running.tokens(str(number)) == continuation([number, 2, 3], 40)
    assert max(plan.num_tokens for plan in running.model.plans) > 12


def test_drafts_become_good_again() -> None:
    running = Run(lambda tokens, drafts: 1.0 + 0.05 * drafts, lambda step: 5 if step > 500 else 0)
    running.run(500)
    running.run(600)
    assert running.run(100) > 3.0


def test_depth_is_what_is_right_mostly() -> None:
    """Two of the drafts are right each time, and each takes time."""
    running = Run(lambda tokens, drafts: 1.0 + 0.1 * tokens + 0.2 * drafts, lambda step: 2)
    running.run(200)
    assert 1.5 <= sum(running.depths[-50:]) / 50 <= 3.5


def test_many_rows_have_no_drafts_and_no_drafter() -> None:
    made = ModelSpeculationManager(SpeculativeConfig(num_speculative_tokens=3), 64)
    assert made.num_drafts([request([1])], 33, has_prompts=True) is None
    assert made.num_drafts([], 2, has_prompts=True) == 0
    assert made.num_drafts([], 2, has_prompts=False) is None


def test_heads_run_in_every_step_of_few_rows() -> None:
    """They cannot catch up later."""
    made = ModelSpeculationManager(SpeculativeConfig(method="eagle3", num_speculative_tokens=3), 64)
    assert made.num_drafts([], 2, has_prompts=False) == 0
    assert made.num_drafts([], 33, has_prompts=False) is None


def test_drafts_of_other_tokens_are_not_used() -> None:
    made, one = ModelSpeculationManager(SpeculativeConfig(num_speculative_tokens=3), 64), request([1, 2])
    made.add_drafts({one: [5, 6, 7]})
    assert made.draft([one]) == {one: [5, 6, 7]}
    one.token_ids.append(5)
    assert made.draft([one]) == {}
    ending: Request = request([1, 2])
    ending.max_tokens = 5
    made.add_drafts({ending: [5, 6, 7]})
    assert made.draft([ending]) == {ending: [5, 6]}


def test_no_more_tokens_are_sampled_than_memory_is_reserved_for() -> None:
    config = engine_config(max_num_seqs=6)
    running = Engine(replace(config, scheduler=replace(config.scheduler)))
    running.scheduler.speculation = Always(16, running.scheduler.config.max_sampled_tokens)
    for number in range(6):
        running.add(str(number), [number, 2, 3], max_tokens=20)
    running.run()
    for made in running.model.plans:
        assert sum(1 + len(row.draft_token_ids) for row in made.scheduled if row.draft_token_ids) <= 17
