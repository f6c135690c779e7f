"""Speculation changes no token: in every layout, with every sampling parameter, preempted or not.

The ranks have the target itself as their draft model, which runs where the core asks for its drafts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.config.engine_config import EngineConfig, SpeculativeConfig
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.scheduler.ngram import TokenLookup
from quire.engine.scheduler.speculation import SpeculationManager
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.drafts import Always, FreeSteps, Guess, Guesser, Mixed
from tests.fakes.families import write
from tests.integration.engine.core.test_continuation import KINDS, logprobs, tokens

PROMPTS = [list(range(40, 90)), [*range(60, 80)] * 3, [100, 7]]
REQUESTS = [(prompt, params) for prompt in PROMPTS for params in KINDS.values()]


class Case:
    """Ranks, and what they answer without speculation."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.expected = ranks.run(REQUESTS, speculative=None)
        assert not ranks.stats.num_drafts
        self.texts = [prompt + tokens(outputs) for (prompt, _), outputs in zip(REQUESTS, self.expected, strict=True)]

    def following(self, known: list[int]) -> list[int]:
        """The next token of each answer that starts like this."""
        return [text[len(known)] for text in self.texts if text[: len(known)] == known and len(text) > len(known)]

    def right(self, known: list[int], rng: random.Random) -> int:
        following = self.following(known)
        return rng.choice(following) if following else 0

    def wrong(self, known: list[int], rng: random.Random) -> int:
        return rng.choice([*set(range(100)).difference(self.following(known))])

    def mixed(self, known: list[int], rng: random.Random) -> int:
        return self.right(known, rng) if rng.random() < 0.7 else rng.randrange(100)

    def drafters(self) -> dict[str, SpeculationManager]:
        return {
            "right": self.guesser(self.right, 5),
            "mixed": self.guesser(self.mixed, 3),
            "wrong": self.guesser(self.wrong, 7),
            "ngram": self.guesser(repeated, 4),
            "model": Always(3, 64, self.state_block_size),
            "varying model": Always(5, 64, self.state_block_size, varies=True),
            "ngram and model": Mixed(3, 64, self.state_block_size),
        }

    @property
    def state_block_size(self) -> int | None:
        cache = self.ranks.config.cache
        return cache.block_size if any(group.is_state for group in cache.groups) else None

    def guesser(self, guess: Guess, most: int) -> Guesser:
        return Guesser(guess, most, 64, self.state_block_size)


def repeated(known: list[int], rng: random.Random) -> int:
    """What followed the last token before."""
    lookup = TokenLookup(1)
    lookup.extend(known)
    return (lookup.propose(1) or [0])[0]


def configured(tp: int, pp: int, target: Path = DEMO_MODEL, **drafter: Any) -> EngineConfig:
    options = EngineOptions(
        model=str(target),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=64,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        speculative_config=drafter,
    )
    return resolve(options)


@pytest.fixture(scope="module", params=[(1, 1), (2, 1), (1, 2), (2, 2)], ids=lambda grid: "tp{}-pp{}".format(*grid))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    tp, pp = request.param
    with Ranks(configured(tp, pp, model=str(DEMO_MODEL), draft_tensor_parallel_size=1 if pp > 1 else tp)) as loaded:
        yield Case(loaded)


FAMILIES = {
    ("Qwen3-Next", 1, 1): [],
    ("Mamba", 1, 2): [pytest.mark.slow],
    ("Kimi Linear", 2, 2): [pytest.mark.slow],
    ("Gemma 3", 2, 2): [pytest.mark.slow],
}
"""Name (see `tests.fakes.families`), TP and PP: with recurrent states, beside full attention or alone, or windows."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(key, marks=marks, id="{}-tp{}-pp{}".format(*key)) for key, marks in FAMILIES.items()],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """With another model as draft model, which is wrong nearly always."""
    name, tp, pp = request.param
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    write(name, target)
    write("Qwen3", drafter)
    with Ranks(configured(tp, pp, target, model=str(drafter))) as loaded:
        yield Case(loaded)


def check(found: list[list[EngineCoreOutput]], expected: list[list[EngineCoreOutput]]) -> None:
    for (_, params), outputs, exact in zip(REQUESTS, found, expected, strict=True):
        assert tokens(outputs) == tokens(exact)
        assert outputs[-1].finish_reason == exact[-1].finish_reason
        rows, exact_rows = logprobs(outputs), logprobs(exact)
        assert len(rows) == len(exact_rows) == (0 if params.logprobs is None else len(tokens(exact)))
        for row, exact_row in zip(rows, exact_rows, strict=True):
            assert row.logprob == pytest.approx(exact_row.logprob, abs=1e-4)
            assert row.top_logprobs == pytest.approx(exact_row.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("drafter", ["right", "mixed", "wrong", "ngram", "model", "varying model", "ngram and model"])
@pytest.mark.parametrize("preempted", [False, True], ids=["calm", "preempted"])
def test_tokens_are_those_without_speculation(case: Case, drafter: str, preempted: bool) -> None:
    check_drafts(case, drafter, preempted)


@pytest.mark.parametrize("drafter", ["right", "mixed", "wrong", "ngram", "model", "varying model", "ngram and model"])
@pytest.mark.parametrize("preempted", [False, True], ids=["calm", "preempted"])
def test_tokens_of_families_are_those_without_speculation(family: Case, drafter: str, preempted: bool) -> None:
    check_drafts(family, drafter, preempted)


def check_drafts(case: Case, drafter: str, preempted: bool) -> None:
    speculation = case.drafters()[drafter]
    depth = max(2, case.ranks.config.parallel.pipeline_parallel_size)
    cache = case.ranks.config.cache
    is_state_only = all(group.is_state for group in cache.groups)
    few = 72 if is_state_only else 36
    found = case.ranks.run(
        REQUESTS, speculation=speculation, depth=depth, num_blocks=few if preempted else None, max_num_seqs=64
    )
    check(found, case.expected)
    stats = case.ranks.stats
    # A state has one size: requests with nothing else need no more memory later.
    assert (stats.preemptions > 0) == (preempted and not is_state_only)
    assert stats.num_drafts > 0
    if drafter in ("right", "mixed", "wrong"):
        assert (stats.num_accepted_tokens > 0) == (drafter != "wrong")


def test_right_drafts_save_steps(case: Case) -> None:
    """A prompt's step, and then one for each six tokens, exactly."""
    check_steps(case)


def test_right_drafts_of_families_save_steps(family: Case) -> None:
    """Recurrent states end drafts with the block."""
    check_steps(family)


def check_steps(case: Case) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    (exact,) = case.ranks.tokens([(PROMPTS[0], greedy)], speculative=None)
    assert len(exact) == 25
    text = PROMPTS[0] + exact
    before = case.guesser(lambda known, rng: text[len(known)], 5)
    (found,) = case.ranks.tokens([(PROMPTS[0], greedy)], speculation=before)
    assert found == exact
    counts = []
    known = len(PROMPTS[0]) + 1
    while known < len(text):
        counts.append(min(5, len(text) - known - 1, -known % before.state_block_size if before.state_block_size else 5))
        known += 1 + counts[-1]
    assert case.ranks.stats.accepted_per_position[:6] == [sum(place < count for count in counts) for place in range(6)]


def test_ngram_copies_what_repeats(case: Case) -> None:
    """By the real costs of this machine or not, a repeated answer is the same."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (exact,) = case.ranks.tokens([(PROMPTS[1], params)], speculative=None)
    (found,) = case.ranks.tokens([(PROMPTS[1], params)], speculative=SpeculativeConfig())
    assert found == exact


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(case: Case, temperature: float) -> None:
    """Also at temperature 1, as its drafts are sampled with the noise of the same places; one after another, and
    several at once."""
    requests = [
        (prompt, SamplingParams(temperature=temperature, seed=seed, max_tokens=31, ignore_eos=True))
        for seed, prompt in enumerate(PROMPTS)
    ]
    exact = case.ranks.tokens(requests, speculative=None)
    depth = max(2, case.ranks.config.parallel.pipeline_parallel_size)
    for count in (1, len(requests)):
        found = case.ranks.tokens(requests[:count], speculation=Always(4, 64), depth=depth)
        assert found == exact[:count]
        if count == 1:  # a prompt's step, and then one for each five tokens
            assert case.ranks.stats.accepted_per_position[:5] == [6] * 4 + [0]
        assert case.ranks.stats.num_draft_tokens == case.ranks.stats.num_accepted_tokens


def test_a_cached_prefix_has_the_drafters_keys(case: Case) -> None:
    """A prompt whose start is cached has as good drafts as one that is computed."""
    params = SamplingParams(temperature=0.0, max_tokens=31, ignore_eos=True)
    asked = [(PROMPTS[0] * 2, params), (PROMPTS[0] * 2, params)]
    first, second = case.ranks.tokens(asked, speculation=Always(4, 64), max_num_seqs=1)
    assert first == second
    assert case.ranks.stats.prefix_hit_tokens > 80
    assert case.ranks.stats.num_draft_tokens == case.ranks.stats.num_accepted_tokens


def test_a_model_that_is_right_is_not_delayed_by_wrong_n_grams(case: Case) -> None:
    """A prediction whose first token only is right takes one step; the model is asked again in the next one."""
    params = SamplingParams(temperature=0.0, max_tokens=31, ignore_eos=True)
    (exact,) = case.ranks.tokens([(PROMPTS[0], params)], speculative=None)
    params.predicted_token_ids = [exact[0], *[2] * 40]
    depth = max(2, case.ranks.config.parallel.pipeline_parallel_size)
    assert case.ranks.tokens([(PROMPTS[0], params)], speculation=Mixed(4, 64), depth=depth) == [exact]
    assert case.ranks.stats.num_accepted_tokens >= 20


class Pausing(Always):
    """Makes no drafts in between."""

    def num_drafts(self, *args: Any, **options: Any) -> int | None:
        self.times_asked = getattr(self, "times_asked", 0) + 1
        return None if 3 <= self.times_asked < 30 else super().num_drafts(*args, **options)


def test_a_drafter_catches_up(case: Case) -> None:
    """After steps without it, in chunks of a step."""
    requests = [(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=71, ignore_eos=True))]
    exact = case.ranks.tokens(requests, speculative=None)
    assert case.ranks.tokens(requests, speculation=Pausing(4, 64)) == exact
    stats = case.ranks.stats
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 20


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same vocabulary, with random weights and sliding windows."""
    from transformers import MistralConfig, MistralForCausalLM

    folder = tmp_path_factory.mktemp("random")
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=3072,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=24,
        tie_word_embeddings=False,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


GRIDS = [(1, 1), *[pytest.param(grid, marks=pytest.mark.slow) for grid in ((2, 1), (1, 2), (2, 2))]]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("preempted", [False, True], ids=["calm", "preempted"])
def test_garbage_changes_nothing(random_model: Path, grid: tuple[int, int], preempted: bool) -> None:
    """A model with other layers, and KV cache groups of its own."""
    config = configured(*grid, model=str(random_model))
    assert [group.window for group in config.cache.groups].count(24)
    with Ranks(config) as ranks:
        expected = ranks.run(REQUESTS, speculative=None)
        blocks = 56 if preempted else None
        found = ranks.run(REQUESTS, speculation=Always(3, 64), depth=2, num_blocks=blocks)
        check(found, expected)
        assert ranks.stats.num_draft_tokens > 10 * ranks.stats.num_accepted_tokens
        assert (ranks.stats.preemptions > 0) == preempted


def test_a_prediction_beside_a_model_that_is_always_wrong_saves_its_steps(random_model: Path) -> None:
    """Exactly those that it saves alone: 60 tokens take the prompt's step, three with 16 drafts and one with the rest.
    What comes behind it is drafted by the model, which has followed nothing of it, and catches up."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with Ranks(configured(1, 1, model=str(random_model))) as ranks:
        (exact,) = ranks.tokens([(PROMPTS[0], params)], speculative=None)
        params.predicted_token_ids = exact
        alone = SpeculationManager(SpeculativeConfig(), 64)
        alone.times = FreeSteps()
        for speculation in (alone, Mixed(3, 64)):
            assert ranks.tokens([(PROMPTS[0], params)], speculation=speculation) == [exact]
            assert (ranks.stats.num_drafts, ranks.stats.num_accepted_tokens) == (4, 60 - 5)
        params.predicted_token_ids = exact[:30]
        assert ranks.tokens([(PROMPTS[0], params)], speculation=Mixed(3, 64)) == [exact]
        assert ranks.stats.num_accepted_tokens >= 25


def test_a_drafter_is_followed_or_not_by_what_it_costs(case: Case) -> None:
    """With the real manager, whatever this machine takes."""
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    (exact,) = case.ranks.tokens([(PROMPTS[1], params)], speculative=None)
    assert case.ranks.tokens([(PROMPTS[1], params)]) == [exact]
