"""The scheduler with structured outputs: held back until their token came back, and everything else as ever."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.engine.scheduler import structured_output
from quire.engine.scheduler.grammar import GrammarError
from quire.engine.scheduler.request import Request, ShareQueue
from quire.engine.scheduler.unique_items import UniqueItems
from tests.fakes.configs import TINY, Windows, engine_config
from tests.fakes.tokenizers import byte_level, write_model
from tests.unit.engine.scheduler.test_scheduler import AHEAD, Engine, continuation, tightened

EOS = 2
TOKENIZER = byte_level()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return engine_config(
        tokenizer=folder, architecture=replace(TINY, vocab_size=320), **{"eos": (EOS,), "max_model_len": 160, **options}
    )


def text(tokens: list[int]) -> str:
    decoded: str = TOKENIZER.decode(tokens, skip_special_tokens=True)
    return decoded


def asked(max_tokens: int = 100, **outputs: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputs(**outputs), "max_tokens": max_tokens}


CHOICES = ["the first of three", "the second", "the third, and so on"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bc"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def mixed(index: int) -> dict[str, Any]:
    match index % 4:
        case 0:
            return asked(json=SCHEMA)
        case 1:
            return asked(choice=CHOICES)
        case 2:
            return asked(regex="[a-d]{3,9}!")
    return {"max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts, and the answer to each with the parameters of `mixed` if nothing runs beside it."""
    rng = random.Random(16)
    prompts = [[rng.randrange(60, 97) for _ in range(rng.randrange(1, 40))] for _ in range(40)]
    answers = []
    for index, prompt in enumerate(prompts):
        engine = Engine(config_of(folder))
        engine.add("x", prompt, **mixed(index))
        engine.run()
        answers.append(engine.tokens("x"))
    return list(zip(prompts, answers, strict=True))


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
@pytest.mark.parametrize(
    ("budget", "tight", "windows"),
    [*itertools.product([16, 64], [True, False], [(None,)]), (16, True, (7, None)), (64, False, (7, None))],
)
def test_output_does_not_depend_on_the_batch(
    folder: Path,
    alone: list[tuple[list[int], list[int]]],
    stages: int,
    depth: int,
    budget: int,
    tight: bool,
    windows: Windows,
) -> None:
    config = config_of(
        folder, stages=stages, depth=depth, max_num_batched_tokens=budget, windows=windows, num_blocks=800
    )
    engine = Engine(tightened(config) if tight else config)

    def arrive(turn: int) -> None:
        if turn < len(alone):
            engine.add(str(turn), alone[turn][0], **mixed(turn))

    engine.run(arrive, at_least=40)
    for index, (prompt, answer) in enumerate(alone):
        tokens = engine.tokens(str(index))
        assert tokens == answer
        assert engine.ends(str(index)) == ["length" if index % 4 == 3 else "stop"]
        match index % 4:
            case 0:
                assert json.loads(text(tokens)).keys() == {"name", "count"}
            case 1:
                assert text(tokens) in CHOICES
            case 3:
                assert tokens == continuation(prompt, 20)
    stats = engine.scheduler.snapshot()
    assert (stats.preemptions > 0) == tight
    assert stats.generated_tokens == sum(len(engine.tokens(str(index))) for index in range(40))


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
@pytest.mark.parametrize(
    "params", [asked(json=SCHEMA), asked(choice=CHOICES), asked(regex="[a-d]{3,9}!"), asked(json=SCHEMA, max_tokens=12)]
)
def test_a_grammar_continues_after_the_output_of_another_replica(
    folder: Path, stages: int, depth: int, params: dict[str, Any]
) -> None:
    """Cut at every position, in the middle of forced tokens, too."""
    prompt = list(range(60, 90))
    whole = Engine(config_of(folder))
    whole.add("x", prompt, **params)
    whole.run()
    output = whole.tokens("x")
    engine = Engine(config_of(folder, stages=stages, depth=depth))
    for cut in range(len(output)):
        engine.add(str(cut), prompt, reported=output[:cut], **params)
    engine.run()
    for cut in range(len(output)):
        assert engine.tokens(str(cut)) == output[cut:]
        assert engine.ends(str(cut)) == whole.ends("x")


def test_output_that_its_grammar_does_not_allow_is_an_error(folder: Path) -> None:
    engine = Engine(config_of(folder))
    engine.add("x", [60], reported=[70, 71], **asked(choice=CHOICES))
    assert engine.ends("x") == ["error"]
    assert not engine.turn()


def steps_of(engine: Engine) -> list[int]:
    """The tokens that each plan computes."""
    return [plan.num_tokens for plan in engine.model.plans]


def test_forced_tokens_are_computed_in_one_row_and_never_sampled(folder: Path) -> None:
    engine = Engine(config_of(folder))
    engine.add("x", [70, 71, 72], **asked(choice=CHOICES))
    engine.run()
    output = engine.tokens("x")
    assert text(output) in CHOICES
    common = len(TOKENIZER.encode("the ").ids)
    first, *later = steps_of(engine)
    assert first == 3 + common - 1 or first == 3 + common  # the last may begin otherwise
    assert len(engine.model.plans) < len(output) / 2
    assert sum(len(o.token_ids) for o in engine.outputs["x"]) == len(output)
    reported = engine.outputs["x"]
    assert len(reported) == 1 + len(later)


def test_what_is_forced_throughout_needs_no_step(folder: Path) -> None:
    engine = Engine(config_of(folder))
    engine.add("x", [70], **asked(choice=["only this"]))
    assert not engine.turn()
    assert text(engine.tokens("x")) == "only this"
    assert engine.ends("x") == ["stop"]


def test_where_only_the_end_is_allowed_it_is_sampled(folder: Path) -> None:
    engine = Engine(config_of(folder))
    cases: dict[str, dict[str, Any]] = {"plain": {}, "early": {"min_tokens": 5}, "ignored": {"ignore_eos": True}}
    for name, changes in cases.items():
        engine.add(name, [70], **asked(grammar='start: ""'), **changes)
    engine.run()
    for name in ("plain", "early", "ignored"):
        assert engine.tokens(name) == [EOS]
        assert engine.ends(name) == ["stop"]


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
@pytest.mark.parametrize("limit", [1, 2, 5, 9])
def test_the_longest_output_ends_it_forced_or_not(folder: Path, stages: int, depth: int, limit: int) -> None:
    engine = Engine(config_of(folder, stages=stages, depth=depth))
    engine.add("x", [70], **{**asked(choice=["abcdefghijklmno"]), "max_tokens": limit})
    engine.add("y", [70], **{**asked(regex="[a-z]{50}"), "max_tokens": limit})
    engine.run()
    for request in "xy":
        assert len(engine.tokens(request)) == limit
        assert engine.ends(request) == ["length"]
    assert "abcdefghijklmno".startswith(text(engine.tokens("x")))


def test_an_output_that_is_complete_with_its_last_token_is_not_too_long(folder: Path) -> None:
    engine = Engine(config_of(folder))
    engine.add("x", [70], **{**asked(regex="[a-c]{4}"), "max_tokens": 4})
    engine.run()
    assert engine.ends("x") == ["stop"]


def test_a_stop_token_that_is_forced_ends_it(folder: Path) -> None:
    engine = Engine(config_of(folder))
    c = TOKENIZER.token_to_id("c")
    engine.add("x", [70], **asked(choice=["abcdef"]), stop_token_ids=[c])
    engine.run()
    assert text(engine.tokens("x")) == "abc"
    (*_, last) = engine.outputs["x"]
    assert (last.finish_reason, last.stop_token_id) == ("stop", c)


@pytest.mark.parametrize(
    "changes",
    [{"logprobs": 0}, {"prompt_logprobs": 0}, {"bad_word_ids": [[5, 6]]}, {"allowed_token_ids": [*range(320)]}],
)
def test_nothing_is_forced_where_others_have_a_say(folder: Path, changes: dict[str, Any]) -> None:
    engine = Engine(config_of(folder))
    engine.add("x", [70], **asked(choice=["abcdef"]), **changes)
    engine.run()
    assert text(engine.tokens("x")) == "abcdef"
    assert steps_of(engine) == [1] * len(engine.tokens("x"))


def test_a_minimum_length_holds_where_the_grammar_can_go_on(folder: Path) -> None:
    for minimum in (0, 12):
        engine = Engine(config_of(folder))
        engine.add("x", [70], **asked(regex="[ab]*"), min_tokens=minimum)
        engine.add("y", [70], **asked(regex="[ab]{3}"), min_tokens=minimum)
        engine.run()
        assert engine.ends("x")[0] in ("stop", "length")
        assert len(engine.tokens("x")) >= minimum
        assert len(text(engine.tokens("y"))) == 3
        assert engine.ends("y") == ["stop"]


def test_ignoring_the_end_of_sequence_goes_on_while_the_grammar_does(folder: Path) -> None:
    engine = Engine(config_of(folder))
    engine.add("x", [70], **asked(regex="[ab]*"), ignore_eos=True)
    engine.add("y", [70], **asked(grammar='start: "a" <|im_end|> "b"'), ignore_eos=True)
    engine.run()
    assert engine.ends("x") == ["length"]
    assert EOS not in engine.tokens("x")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"allowed_token_ids": [5]}, "after 0 tokens"),
        ({"bad_word_ids": [[TOKENIZER.token_to_id(c)] for c in "ab"]}, "after 0 tokens"),
        (
            {"bad_word_ids": [[TOKENIZER.token_to_id(c), TOKENIZER.token_to_id(d)] for c in "ab" for d in "ab"]},
            "after 1 tokens",
        ),
    ],
)
@pytest.mark.parametrize(("stages", "depth"), AHEAD)
def test_a_dead_end_is_an_error_of_that_request_alone(
    folder: Path, changes: dict[str, Any], where: str, stages: int, depth: int
) -> None:
    engine = Engine(config_of(folder, stages=stages, depth=depth))
    engine.add("other", [71, 72], max_tokens=20, ignore_eos=True)
    engine.add("x", [70], **asked(regex="[ab]{9}"), **changes)
    engine.run()
    assert engine.ends("x") == ["error"]
    error = engine.outputs["x"][-1].error
    assert error is not None
    assert "allows no token" in error
    assert where in error
    assert engine.tokens("other") == continuation([71, 72], 20)


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
def test_random_aborts_lose_nothing(folder: Path, stages: int, depth: int) -> None:
    engine = Engine(config_of(folder, stages=stages, depth=depth, num_blocks=60, max_num_batched_tokens=32))
    rng = random.Random(depth)

    def disturb(turn: int) -> None:
        if turn < 60:
            kind = asked(json=SCHEMA) if turn % 2 else {"max_tokens": 20}
            engine.add(str(turn), [rng.randrange(60, 97) for _ in range(rng.randrange(1, 50))], **kind)
        engine.abort(str(rng.randrange(80)))

    engine.run(disturb, at_least=60)
    assert all(len(engine.ends(str(turn))) == 1 for turn in range(60))


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
@pytest.mark.parametrize("tight", [True, False])
def test_grammars_without_time_for_all_change_no_output(
    folder: Path,
    alone: list[tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    depth: int,
    tight: bool,
) -> None:
    """One grammar in an iteration; the others wait with a token that has arrived, are aborted, and fill the cache."""
    monkeypatch.setattr(structured_output, "_BUDGET_SECONDS", 0.0)
    config = config_of(folder, stages=stages, depth=depth, max_num_batched_tokens=64, num_blocks=800)
    engine = Engine(tightened(config) if tight else config)
    rng, manager, waited = random.Random(depth), engine.scheduler.structured_output, 0
    aborted: set[str] = set()

    def disturb(turn: int) -> None:
        nonlocal waited
        if turn < len(alone):
            engine.add(str(turn), alone[turn][0], **mixed(turn))
        waited = max(waited, len(manager._arrived))
        if turn % 9 == 8 and manager._arrived:
            victim = rng.choice([*manager._arrived]).request_id
            aborted.add(victim)
            engine.abort(victim)

    engine.run(disturb, at_least=40)
    assert waited > 1
    assert 0 < len(aborted) < 30
    for index, (_, answer) in enumerate(alone):
        tokens = engine.tokens(str(index))
        assert tokens == (answer[: len(tokens)] if str(index) in aborted else answer)
        assert len(engine.ends(str(index))) == 1
    if tight:
        assert engine.scheduler.stats.preemptions


_TAGS = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True, "maxItems": 2}},
    "required": ["a"],
    "additionalProperties": False,
}
_JSON = f"%json {json.dumps(_TAGS)}"
_OTHER = _JSON.replace("maxItems", "minItems")
_MARK_1 = 'mark_1[capture="__LIST_APPEND:json_1"]: NOTHING\nNOTHING: /()/'


@pytest.mark.parametrize(
    ("grammar", "good"),
    [
        (f'start: y x mark_1 {_JSON}\ny: /[a-z]{{3}}/\nx[capture="foo"]: "12"\n{_MARK_1}', True),
        (f'start: y x mark_1 {_JSON}\ny: /[a-z]{{3}}/\nx[capture="__LIST_APPEND:json_7"]: "12"\n{_MARK_1}', True),
        (f'start: mark_1 "]}}}}}}" y mark_1 {_JSON}\ny: /[a-z]{{3}}/\n{_MARK_1}', True),
        (f'start: y (one | two)\ny: /[a-z]{{3}}/\none: mark_1 {_JSON}\ntwo: mark_2 {_OTHER}\n{_MARK_1}\n'
         'mark_2[capture="__LIST_APPEND:json_2"]: NOTHING', False),
    ],
)  # fmt: skip
def test_marks_of_a_grammar_that_mislead_affect_no_other_request(folder: Path, grammar: str, good: bool) -> None:
    """The server makes no such grammar."""
    engine = Engine(config_of(folder))
    engine.add("marked", [70, 71], **asked(grammar=grammar, num_marks=2))
    engine.add("other", [72, 73], **asked(json=SCHEMA))
    engine.run()
    assert engine.ends("other") == ["stop"]
    assert json.loads(text(engine.tokens("other"))).keys() == {"name", "count"}
    assert engine.ends("marked") == ["stop" if good else "error"]
    if good:
        items = json.loads("{" + text(engine.tokens("marked")).partition("{")[2])["a"]
        assert len(items) == len({*items})


@pytest.mark.parametrize("name", ["advance", "restrict"])
def test_an_unexpected_error_of_a_grammar_ends_its_own_request_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = Engine(config_of(folder))
    engine.add("bad", [70, 71], **asked(json=_TAGS))
    engine.add("good", [72, 73], **asked(json=SCHEMA))

    def fail(*_: Any) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(UniqueItems, name, fail)
    engine.run()
    assert engine.ends("bad") == ["error"]
    last = engine.outputs["bad"][-1]
    assert last.error == "structured output: KeyError: 'a fault'"
    assert not last.is_invalid
    assert engine.ends("good") == ["stop"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class CostlyGrammar:
    """Takes `seconds` for a mask; fails if they are None."""

    is_complete = False

    def __init__(self, clock: Clock, seconds: float | None) -> None:
        self.clock, self.seconds = clock, seconds

    def advance(self, tokens: list[int]) -> None:
        if self.seconds is None:
            raise GrammarError("the grammar is at its end")

    def forced_tokens(self) -> list[int]:
        return []

    def mask_row(self, *_: Any) -> bytes:
        return b"mask"


class CostlyCompiler:
    """Computes masks one after the other."""

    def masks(self, grammars: list[CostlyGrammar]) -> list[bytes]:
        for grammar in grammars:
            assert grammar.seconds is not None
            grammar.clock.now += grammar.seconds
        return [b""] * len(grammars)


class Stage:
    """A manager whose grammars have costs set by the test. Each token is sampled at once after it was processed."""

    def __init__(self, costs: list[float | None]) -> None:
        self.clock = Clock()
        compiler: Any = CostlyCompiler()
        self.manager = structured_output.StructuredOutputManager(
            compiler, workers_keep_tokens=True, clock=self.clock, processor_clock=self.clock
        )
        self.requests = [self.request(at, cost) for at, cost in enumerate(costs)]
        for request in self.requests:
            self.sample(request)

    def request(self, at: int, seconds: float | None) -> Request:
        grammar: Any = CostlyGrammar(self.clock, seconds)
        core_request = EngineCoreRequest(0, str(at), [1], SamplingParams(max_tokens=None))
        return Request(
            core_request,
            0,
            str(at),
            (0, at),
            [1],
            1000,
            frozenset(),
            ShareQueue(b"", 1.0),
            grammar=grammar,
            mask=b"mask",
        )

    def sample(self, request: Request) -> None:
        request.token_ids.append(7)
        self.manager.on_scheduled(request)
        self.manager.on_sampled(request, 7, None)

    def process(self, *, is_idle: bool = False) -> list[int]:
        """The numbers of the processed requests, which get their next token."""
        outputs = self.manager.process(is_idle=is_idle)
        for request, output in outputs:
            if output.finish_reason is None:
                self.sample(request)
        return [int(request.request_id) for request, _ in outputs]


def test_what_does_not_fit_into_the_budget_comes_next() -> None:
    stage = Stage([2**-10] * 40)  # 20 fit
    assert stage.process() == [*range(32)]  # nothing is known about their costs; the time is checked after 16
    assert stage.process() == [*range(32, 40), *range(20)]  # 8 are new
    assert stage.process() == [*range(20, 40)]
    assert stage.process() == [*range(20)]


def test_cheap_requests_come_first_and_an_expensive_one_for_half_of_the_time() -> None:
    stage = Stage([0.05, 0.05, 0.001, 0.001])
    assert sorted(stage.process()) == [0, 1, 2, 3]
    for request in stage.requests:
        request.grammar_seconds = request.grammar.seconds  # type: ignore[union-attr]
    assert stage.process() == [2, 3, 0]
    assert stage.process() == [2, 3]
    stage.clock.now += 0.05
    assert stage.process() == [2, 3, 1]
    assert stage.process() == [2, 3]
    stage.clock.now += 0.1
    assert stage.process() == [2, 3, 0]


def test_an_expensive_request_does_not_wait_if_there_is_no_other_work() -> None:
    stage = Stage([0.05, 0.05])
    stage.process()
    assert [stage.process(is_idle=True) for _ in range(4)] == [[0], [1], [0], [1]]
    assert stage.process(is_idle=False) == []


def test_an_error_ends_its_own_request_alone() -> None:
    stage = Stage([0.001, None, 0.001])
    outputs = {request.request_id: output for request, output in stage.manager.process(is_idle=False)}
    assert {name: output.finish_reason for name, output in outputs.items()} == {"0": None, "1": "error", "2": None}
    assert outputs["1"].error == "structured output: the grammar is at its end"
    assert outputs["1"].is_invalid
    assert stage.manager.ready == [stage.requests[0], stage.requests[2]]


def test_an_ambiguous_grammar_ends_alone(folder: Path) -> None:
    engine = Engine(config_of(folder, max_model_len=600))
    for at in range(2):
        engine.add(str(at), [70 + at], **asked(600, grammar="start: s\ns: s s | /[a-z ]/"), ignore_eos=True)
    engine.add("plain", [71], max_tokens=200, ignore_eos=True)
    engine.run()
    assert engine.tokens("plain") == continuation([71], 200)
    for at in range(2):
        assert engine.ends(str(at)) == ["error"]
        last = engine.outputs[str(at)][-1]
        assert "structured output: the grammar is too ambiguous" in str(last.error)
        assert last.is_invalid


def test_other_requests_are_not_delayed(folder: Path) -> None:
    """Run ahead of the device, a free request has a row in every plan, a constrained one in every second."""
    engine = Engine(config_of(folder, depth=2))
    engine.add("free", [71], max_tokens=40, ignore_eos=True)
    engine.add("bound", [72], **asked(regex="[a-z]{80}"))
    engine.run()
    masked = [len(plan.masks) for plan in engine.model.plans[:40]]
    assert [plan.num_rows - len(plan.masks) for plan in engine.model.plans[:40]] == [1] * 40
    assert masked == [1, 0] * 20


def test_what_is_not_constrained_costs_a_plan_nothing(folder: Path) -> None:
    engine = Engine(config_of(folder))
    engine.add("free", [71], max_tokens=5, ignore_eos=True)
    engine.run()
    assert not any(plan.masks for plan in engine.model.plans)
