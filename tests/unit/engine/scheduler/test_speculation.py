"""Drafts change the number of steps, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig, SpeculativeConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, SchedulerOutput
from quire.engine.scheduler.ngram import RECENT_MATCH, RecentTexts, TokenLookup
from quire.engine.scheduler.request import Request, ShareQueue
from quire.engine.scheduler.speculation import SpeculationManager, StepTimes
from tests.fakes.configs import Windows, engine_config
from tests.fakes.drafts import FreeSteps, Guess, Guesser
from tests.fakes.model import FAILURE, next_token
from tests.unit.engine.scheduler.test_scheduler import AHEAD, Engine, continuation, tightened

MOST = 4
GUESSES: dict[str, Guess] = {
    "right": lambda tokens, rng: next_token(tokens),
    "wrong": lambda tokens, rng: (next_token(tokens) + 1) % 97,
    "mixed": lambda tokens, rng: next_token(tokens) if rng.random() < 0.7 else rng.randrange(97),
}


def engine(config: EngineConfig, guess: Guess) -> Engine:
    started = Engine(config)
    state_block_size = config.cache.block_size if any(group.is_state for group in config.cache.groups) else None
    started.scheduler.speculation = Guesser(guess, MOST, state_block_size=state_block_size)
    return started


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize(
    ("windows", "tight"),
    [
        ((None,), False),
        ((None,), True),
        ((None, 9, 9), True),
        ((6,), False),
        ((None, "state", "state"), True),
        (("state",), False),
    ],
)
@pytest.mark.parametrize(("stages", "depth"), AHEAD)
def test_output_does_not_depend_on_drafts(stages: int, depth: int, windows: Windows, tight: bool, guess: str) -> None:
    """With aborts, stop tokens, preemption, prefix hits, and every block that is read checked by the fake model."""
    config = engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=32, num_blocks=500)
    running = engine(tightened(config) if tight else config, GUESSES[guess])
    check_disturbed(running, random.Random(depth), is_wrong=guess == "wrong")


def check_disturbed(running: Engine, rng: random.Random, *, is_wrong: bool) -> None:
    """Run many requests, of which some are aborted, with drafts that are wrong or often right; check the outputs."""
    prompts: dict[str, list[int]] = {}

    def disturb(turn: int) -> None:
        if turn < 100 and turn % 5 == 0:
            prompt = [rng.randrange(5) for _ in range(rng.randrange(1, 60))]
            prompts[str(turn)] = prompt
            running.add(str(turn), prompt, max_tokens=40, stop_token_ids=[rng.randrange(97) for _ in range(turn % 4)])
            if rng.random() < 0.2:
                running.abort(str(rng.randrange(turn + 1) // 5 * 5))

    running.run(disturb, at_least=100)
    for request_id in running.outputs:
        assert len(running.ends(request_id)) == 1
        tokens = running.tokens(request_id)
        assert tokens == continuation(prompts[request_id], len(tokens))
    stats = running.scheduler.snapshot()
    assert stats.num_drafts > 10
    assert stats.generated_tokens == sum(len(running.tokens(request_id)) for request_id in running.outputs)
    assert stats.num_accepted_tokens == sum(stats.accepted_per_position)
    if is_wrong:
        assert stats.num_accepted_tokens == 0
    else:
        assert stats.num_accepted_tokens > stats.num_draft_tokens // 5


@pytest.mark.parametrize("windows", [(None,), (None, 99, 99, 99)])
@pytest.mark.parametrize("seed", range(6))
def test_a_full_cache_has_fewer_drafts_and_no_wrong_block(windows: Windows, seed: int) -> None:
    """Rejected drafts leave blocks, which are counted once; decodes of several groups keep the blocks that they
    need."""
    config = engine_config(windows=windows, block_size=2, num_blocks=2000, max_num_batched_tokens=96, max_model_len=64)
    least = config.cache.max_blocks(64, 96)
    config = replace(config, cache=replace(config.cache, num_blocks=least + 2 * len(windows) * seed))
    running = Engine(config)
    running.scheduler.speculation = Guesser(GUESSES["mixed"], 16, 64, varies=True)
    rng = random.Random(seed)
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 12))] for _ in range(12)]
    for number, prompt in enumerate(prompts):
        running.add(str(number), prompt, max_tokens=40)
    running.run()
    for number, prompt in enumerate(prompts):
        assert running.tokens(str(number)) == continuation(prompt, 40)
    assert running.scheduler.stats.num_drafts


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
@pytest.mark.parametrize(("guess", "steps"), [("right", 1 + 8), ("wrong", 41)])
def test_steps_are_counted_exactly(stages: int, depth: int, guess: str, steps: int) -> None:
    """A prompt's step gives the first of 41 tokens. Right guesses make each later step worth five."""
    running = engine(engine_config(stages=stages, depth=depth), GUESSES[guess])
    running.add("a", [1, 2, 3], max_tokens=41)
    running.run()
    assert running.tokens("a") == continuation([1, 2, 3], 41)
    rows = [plan for plan in running.model.plans if plan.num_rows]
    assert len(rows) == steps
    stats = running.scheduler.snapshot()
    assert stats.accepted_per_position[: MOST + 1] == [8 if guess == "right" else 0] * MOST + [0]


@pytest.mark.parametrize("windows", [(None,), (None, "state", "state")])
@pytest.mark.parametrize("guess", GUESSES)
def test_rejected_drafts_are_not_among_the_tokens_of_steps(guess: str, windows: Windows) -> None:
    """Each token counts once, but the last one, which is not computed, and with recurrent states the drafts before it,
    which are not computed again."""
    running = engine(engine_config(windows=windows, num_blocks=1200), GUESSES[guess])
    for name in range(3):
        running.add(str(name), [name, 2, 3], max_tokens=41)
    running.run()
    *steps, total = running.scheduler.stats.iteration_tokens
    last = sum(running.outputs[str(name)][-1].num_accepted_tokens for name in range(3))
    assert total == 3 * (3 + 40) - (last if "state" in windows else 0)
    assert sum(steps) == len([plan for plan in running.model.plans if plan.num_rows])


def test_plans_say_what_counted() -> None:
    running = engine(engine_config(stages=2, depth=2), GUESSES["right"])
    running.add("a", [1, 2, 3], max_tokens=10)
    running.run()
    expected = continuation([1, 2, 3], 10)
    first, second = (row for plan in running.model.plans[1:] for row in plan.scheduled)
    assert (first.num_tokens, first.new_token_ids, first.draft_token_ids) == (5, expected[:1], expected[1:5])
    assert (second.num_accepted, second.new_token_ids) == (4, expected[1:6])
    assert second.draft_token_ids == expected[6:9]  # with the one that is sampled after them, the last


def test_a_failed_step_takes_its_drafts_along() -> None:
    running = engine(engine_config(depth=2), GUESSES["mixed"])
    failing = {6, 11}
    running.model.fails = lambda plan: plan.step in failing
    for number in range(6):
        running.add(str(number), [number, 2, 3], max_tokens=20)
    running.run()
    ended = [running.ends(str(number)) for number in range(6)]
    assert {end for ends in ended for end in ends} <= {"length", "error"}
    assert ["error"] in ended
    for number in range(6):
        tokens = running.tokens(str(number))
        assert tokens == continuation([number, 2, 3], len(tokens))
        if ended[number] == ["error"]:
            assert running.outputs[str(number)][-1].error == FAILURE


def test_prompts_come_first() -> None:
    """A step with prompts has no time to spare."""
    running = engine(engine_config(max_num_batched_tokens=16), GUESSES["right"])
    running.add("a", [1], max_tokens=60)
    running.turn()
    running.add("b", [2] * 60, max_tokens=2)
    running.run()
    for plan in running.model.plans:
        if any(row.num_tokens > 1 + len(row.draft_token_ids) for row in plan.scheduled):
            assert not any(row.draft_token_ids for row in plan.scheduled)
    assert running.scheduler.snapshot().num_drafts


def test_drafts_never_preempt() -> None:
    config = engine_config(num_blocks=20, max_num_batched_tokens=32, max_model_len=76)
    plain, drafting = Engine(config), engine(config, GUESSES["wrong"])
    for running in (plain, drafting):
        for number in range(2):
            running.add(str(number), [number] * 8, max_tokens=30)
        running.run()
    assert drafting.scheduler.stats.preemptions == plain.scheduler.stats.preemptions == 0


def lookup(tokens: list[int], minimum: int = 2, corpus: Sequence[int] = ()) -> TokenLookup:
    made = TokenLookup(minimum, corpus)
    made.extend(tokens)
    return made


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 3, [3, 4, 5]),
        ([1, 2, 3, 4, 5, 1, 2], 9, [3, 4, 5, 1, 2, 3, 4, 5, 1]),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, [9]),  # the longest match
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the last of several
        ([7, 7, 7], 4, [7, 7, 7, 7]),
        ([1, 2, 3, 4], 4, []),
        ([1, 5, 2, 1], 4, []),  # one token is not enough
        ([3], 4, []),
        ([1, 2, 3, 4, 5, 1, 2], 0, []),
    ],
)
def test_a_text_goes_on_as_before(tokens: list[int], count: int, expected: list[int]) -> None:
    assert lookup(tokens).propose(count) == expected


def test_a_lookup_moves_along_as_if_it_searched() -> None:
    """Token by token or all at once, for a text that repeats itself with changes."""
    rng = random.Random(0)
    text = [rng.randrange(50) for _ in range(300)]
    text += [token if rng.random() < 0.9 else rng.randrange(50) for token in text] * 2
    moving = TokenLookup(2)
    hits = total = 0
    for end in range(100, len(text)):
        moving.extend(text[:end])
        proposed = moving.propose(1)
        assert bool(proposed) >= bool(lookup(text[:end]).propose(1))
        hits, total = hits + (proposed == text[end : end + 1]), total + bool(proposed)
    assert hits > 0.75 * total > 300


def test_a_lookup_learns_how_far_to_trust_matches() -> None:
    """Pairs that recur and are always followed by something new lose its trust; repeated text gains it."""
    made, text = TokenLookup(2), [1, 2]
    for new in range(10, 40):
        text += [new, 1, 2]
        made.extend(text)
        made.propose(1)
    assert made.chances(1)[0] < 0.2
    repeated = TokenLookup(2)
    for end in range(1, 100):
        repeated.extend([number % 9 for number in range(end)])
        repeated.propose(1)
    assert repeated.chances(1)[0] > 0.9


def test_a_corpus_is_expected_from_its_start_and_not_beyond() -> None:
    made = lookup([50, 51, 52], corpus=[1, 2, 3])
    assert made.propose(5) == [1, 2, 3]
    made.extend([50, 51, 52, 1, 9, 2])
    assert made.propose(5) == []
    made.extend([50, 51, 52, 1, 9, 2, 1, 2])
    assert made.propose(5) == [3]


def request(tokens: list[int], **params: Any) -> Request:
    core_request = EngineCoreRequest(0, "", tokens, SamplingParams(**params))
    return Request(
        core_request=core_request,
        client=0,
        request_id="",
        order=(0, 0),
        token_ids=tokens,
        max_tokens=1000,
        stops=frozenset(),
        share=ShareQueue(b"", 1.0),
    )


def manager(seconds: Callable[[int], float], rows: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> SpeculationManager:
    """It has measured steps of `seconds(tokens)`."""
    made = SpeculationManager(SpeculativeConfig(num_speculative_tokens=16), 64)
    for _ in range(4):
        for tokens in rows:
            made.times.learn("plain", tokens, seconds(tokens))
        for tokens in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
            made.times.learn("checks", tokens, seconds(tokens))
    return made


REPEATING = [*range(40), *range(20)]


def test_free_verification_gets_all_drafts() -> None:
    copying = request(REPEATING)
    assert manager(lambda tokens: 1.0).draft([copying]) == {copying: [*range(20, 36)]}


def test_verification_in_proportion_gets_none() -> None:
    assert manager(lambda tokens: float(tokens)).draft([request(REPEATING)]) == {}


def test_depth_falls_with_the_batch() -> None:
    """Up to 16 tokens take as long as one: they are shared by the batch, until none is left."""
    made = manager(lambda tokens: max(1.0, tokens / 16))
    drafted = [
        sum(len(drafts) for drafts in made.draft([request(REPEATING) for _ in range(rows)]).values())
        for rows in (1, 4, 8, 16, 32)
    ]
    assert drafted[:3] == [15, 12, 8]
    assert drafted[3:] == [0, 0]


def test_with_recurrent_states_drafts_end_with_a_block_and_count_twice() -> None:
    """Tokens that are computed again take part of the eight that take as long as one."""
    made, copying = manager(lambda tokens: max(1.0, tokens / 8)), request(REPEATING)
    copying.num_computed_tokens = 59
    assert len(made.draft([copying])[copying]) == 7
    made.state_block_size = 16  # of which the 60 tokens leave four
    assert made.draft([copying]) == {copying: [*range(20, 24)]}
    made.state_block_size = 64
    assert made.draft([copying]) == {copying: [*range(20, 24)]}


def test_models_with_recurrent_states_run_ahead_where_drafts_do_not_pay() -> None:
    """Also while the newest tokens are in flight, of which none is pending."""
    made, copying = manager(lambda tokens: 1.0 + 0.5 * (tokens - 1)), [request(REPEATING) for _ in range(4)]
    made.state_block_size = 64
    for each in copying:
        each.num_computed_tokens = 60
    assert made.draft(copying) == {}


def test_requests_that_repeat_themselves_get_the_drafts() -> None:
    copying, random_text = request(REPEATING), request([*range(60)])
    made = manager(lambda tokens: max(1.0, tokens / 8))
    assert made.draft([random_text, copying]) == {copying: [*range(20, 26)]}


def test_unknown_times_are_tried_and_forgotten_ones_again() -> None:
    """But never without knowing the time of a step without drafts."""
    made, copying = SpeculationManager(SpeculativeConfig(num_speculative_tokens=7), 64), request(REPEATING)
    assert made.draft([copying]) == {}
    for _ in range(4):
        made.times.learn("plain", 1, 9.0)
    made.times.learn("checks", 8, 99.0)
    assert len(made.draft([copying])[copying]) == 7  # first steps do not count
    made.times.learn("checks", 8, 99.0)
    assert made.draft([copying]) == {}
    for _ in range(600):
        made.times.learn("plain", 1, 1.0)
    assert len(made.draft([copying])[copying]) == 7


def test_an_outlier_does_not_end_speculation() -> None:
    times = StepTimes()
    for _ in range(5):
        times.learn("plain", 1, 1.0)
        times.learn("checks", 8, 1.1)
    times.learn("checks", 8, 100.0)
    assert times.relative("checks", 1, [8])[0] < 2.0


def test_steps_with_prompts_are_not_measured() -> None:
    made = manager(lambda tokens: 1.0)
    made.on_result(SchedulerOutput(0, [], [], [], [0]), 10.0)
    made.on_result(SchedulerOutput(1, [], [], [CachedRequestData(0, 40, [], [])]), 90.0)
    made.on_result(SchedulerOutput(2, [], [], [CachedRequestData(0, 8, [], [], [1] * 7)]), 91.0)
    assert made.times.relative("checks", 1, [8, 64]) == [1.0, 1.0]


def test_bad_guesses_that_cost_end_soon() -> None:
    """Random text of few distinct tokens, whose every pair has occurred before."""
    made, rng = SpeculationManager(SpeculativeConfig(), 64), random.Random(0)
    text = request([rng.randrange(5) for _ in range(100)])
    drafted = 0
    for _ in range(400):
        drafts = made.draft([text]).get(text, [])
        made.times.learn("checks" if drafts else "plain", 1 + len(drafts), 1.0 + len(drafts))
        drafted += bool(drafts)
        text.token_ids.append(rng.randrange(5))
    assert drafted < 20


def test_rows_of_others_count() -> None:
    made, copying = manager(lambda tokens: max(1.0, tokens / 8)), request(REPEATING)
    assert len(made.draft([copying], num_others=3)[copying]) == 4
    assert made.draft([copying], num_others=40) == {}


def test_no_more_tokens_are_sampled_than_memory_is_reserved_for() -> None:
    made = SpeculationManager(SpeculativeConfig(num_speculative_tokens=16), 20)
    for _ in range(4):
        made.times.learn("plain", 4, 1.0)
    drafts = made.draft([request(REPEATING) for _ in range(4)])
    assert sum(map(len, drafts.values())) == 16


def test_a_prediction_becomes_drafts() -> None:
    """From the first token on, before anything has been generated."""
    predicted = request([7, 8, 9], predicted_token_ids=[1, 2, 3, 4])
    assert manager(lambda tokens: 1.0).draft([predicted]) == {predicted: [1, 2, 3, 4]}
    started = request([7, 8, 9], predicted_token_ids=[1, 2, 3, 4])
    started.token_ids = [7, 8, 9, 1]  # of which the first three are the prompt
    assert manager(lambda tokens: 1.0).draft([started]) == {started: [2, 3, 4]}


def test_what_was_guessed_after_the_end_does_not_count() -> None:
    stop = continuation([1, 2, 3], 3)[2]
    running = engine(engine_config(), GUESSES["right"])
    running.add("a", [1, 2, 3], max_tokens=40, stop_token_ids=[stop])
    running.run()
    assert running.tokens("a") == continuation([1, 2, 3], 3)
    assert running.outputs["a"][-1].num_accepted_tokens == running.scheduler.stats.num_accepted_tokens == 2


def test_a_recent_answer_is_found_by_its_tokens_and_its_salt() -> None:
    rng = random.Random(0)
    texts, recent = [[rng.randrange(9999) for _ in range(50)] for _ in range(3)], RecentTexts(128)
    for number, text in enumerate(texts):
        recent.add(text, bytes(number % 2))
    for number in (1, 2):  # the first two are the older ones
        text, salt = texts[number], bytes(number % 2)
        for end in range(RECENT_MATCH, 50):
            found = recent.find(text[end - RECENT_MATCH : end], salt)
            assert found is not None
            tokens, place = found
            assert tokens[place : place + 50 - end].tolist() == text[end:]
            assert tokens[place + 50 - end] < 0
        assert recent.find(text[-RECENT_MATCH:], salt) is None  # nothing follows
        assert recent.find(text[:RECENT_MATCH], bytes(7)) is None


def test_old_answers_are_forgotten() -> None:
    recent = RecentTexts(100)
    for number in range(6):
        recent.add([number, 1, 2, 3, *range(100, 140)], b"")
    known = [recent.find([number, 1, 2, 3], b"") is not None for number in range(6)]
    assert known == [False] * 2 + [True] * 4
    recent.add([9, 9, 9], b"")
    recent.add(list(range(1000)), b"")
    assert recent.find([899, 900, 901, 902], b"") is None
    assert recent.find([996, 997, 998], b"") is None
    found = recent.find([940, 941, 942, 943], b"")
    assert found is not None
    assert found[0][found[1]] == 944


def test_a_request_repeats_a_recent_answer_until_it_differs() -> None:
    """And its own text, if that repeats itself."""
    recent = RecentTexts()
    recent.add([1, 2, 3, 4, *range(20, 40)], b"")
    other = TokenLookup(2, (), recent, b"salt")
    other.extend([7, 1, 2, 3, 4])
    assert other.propose(3) == []
    made, text = TokenLookup(2, (), recent), [7, 1, 2, 3, 4]
    made.extend(text)
    assert made.propose(3) == [20, 21, 22]
    for token in (20, 21, 5, 23):
        text.append(token)
        made.extend(text)
        assert made.propose(2) == [token + 1, token + 2] if token > 5 else True
    text += [8, 7, 1, 2, 3]
    made.extend(text)
    assert made.propose(2) == [4, 20]
    ended = TokenLookup(2, (), recent)
    ended.extend([*range(30, 38)])
    assert ended.propose(8) == [38, 39]
    for token in (38, 39, 1, 1, 1, 1):
        ended.extend([*range(30, 38), token])
    assert TokenLookup(2, (), recent).propose(3) == []


def test_all_requests_learn_how_far_to_trust_recent_answers() -> None:
    recent = RecentTexts()
    recent.add([1, 2, 3, 4, 5], b"")
    for new in range(10, 40):
        made = TokenLookup(2, (), recent)
        made.extend([1, 2, 3, 4])
        assert made.propose(1) == [5]
        made.extend([1, 2, 3, 4, new])
    made = TokenLookup(2, (), recent)
    made.extend([1, 2, 3, 4])
    made.propose(1)
    assert made.chances(1)[0] < 0.1


def test_the_answers_of_finished_requests_become_drafts() -> None:
    """Only answers with the same salt. The output is the same."""
    steps = []
    for salts in ([b"", b""], [b"", b"salt"]):
        running = Engine(engine_config(max_num_seqs=40))
        speculation = running.scheduler.speculation = SpeculationManager(SpeculativeConfig(), 64)
        speculation.times = FreeSteps()
        for name, salt in zip("ab", salts, strict=True):
            before = len(running.model.plans)
            running.add(name, [11, 12, 13, 14, 15], max_tokens=60, cache_salt=salt)
            running.run()
            assert running.tokens(name) == continuation([11, 12, 13, 14, 15], 60)
            steps.append(len(running.model.plans) - before)
    assert steps[1] < 0.5 * steps[0]
    assert steps[3] == steps[2] == steps[0]


def test_workers_do_not_get_predictions() -> None:
    running = engine(engine_config(), GUESSES["right"])
    running.add("a", [1, 2, 3], max_tokens=4, predicted_token_ids=[5, 6])
    running.run()
    assert running.model.plans[0].new[0].params.predicted_token_ids == []


def test_outputs_say_what_counted() -> None:
    running = engine(engine_config(), GUESSES["mixed"])
    running.add("a", [1, 2, 3], max_tokens=40)
    running.run()
    outputs, stats = running.outputs["a"], running.scheduler.snapshot()
    assert sum(output.num_accepted_tokens for output in outputs) == stats.num_accepted_tokens > 0
    rejected = sum(output.num_rejected_tokens for output in outputs)
    assert rejected == stats.num_draft_tokens - stats.num_accepted_tokens > 0
