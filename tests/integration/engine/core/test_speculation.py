"""Speculation changes no token: in every layout, with every sampling parameter, preempted or not.

The ranks have the target itself as their draft model, which runs where the core asks for its drafts.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
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
    """Ranks, and their answers without speculation."""

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
    """The token that followed the last one at an earlier place."""
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


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Case]]:
    """A layout's ranks, which stay for all tests: of the demo model, or of a family with another model as its draft
    model, which is wrong nearly always."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def loaded(tp: int, pp: int, family: str | None = None) -> Case:
            if family is None:
                config = configured(tp, pp, model=str(DEMO_MODEL), draft_tensor_parallel_size=1 if pp > 1 else tp)
            else:
                target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
                write(family, target)
                write("Qwen3", drafter)
                config = configured(tp, pp, target, model=str(drafter))
            return Case(stack.enter_context(Ranks(config)))

        yield loaded


@pytest.fixture
def case(request: pytest.FixtureRequest, load: Callable[..., Case]) -> Case:
    return load(*request.param)


def layouts(*grids: tuple[int, int]) -> pytest.MarkDecorator:
    """Tensor and pipeline parallel sizes."""
    return pytest.mark.parametrize("case", grids, indirect=True, ids="tp{0[0]}-pp{0[1]}".format)


FAMILIES = {
    "Qwen3-Next": (1, 1),
    "Mamba": (1, 2),
    "Kimi Linear": (2, 2),
    "Gemma 3": (2, 2),
}
"""Name (see `tests.fakes.families`), TP and PP: with recurrent states, beside full attention or alone, or windows."""


def families() -> list[Any]:
    return [
        pytest.param((*grid, name), id=f"{name}-tp{grid[0]}-pp{grid[1]}", marks=[] if at == 0 else [pytest.mark.slow])
        for at, (name, grid) in enumerate(FAMILIES.items())
    ]


def check(found: list[list[EngineCoreOutput]], expected: list[list[EngineCoreOutput]]) -> None:
    for (_, params), outputs, exact in zip(REQUESTS, found, expected, strict=True):
        assert tokens(outputs) == tokens(exact)
        assert outputs[-1].finish_reason == exact[-1].finish_reason
        rows, exact_rows = logprobs(outputs), logprobs(exact)
        assert len(rows) == len(exact_rows) == (0 if params.logprobs is None else len(tokens(exact)))
        for row, exact_row in zip(rows, exact_rows, strict=True):
            assert row.logprob == pytest.approx(exact_row.logprob, abs=1e-4)
            assert row.top_logprobs == pytest.approx(exact_row.top_logprobs, abs=1e-4)


DRAFTERS = ("right", "mixed", "wrong", "ngram", "model", "varying model", "ngram and model")
BOTH = (("mixed", True), ("model", False), ("varying model", True), ("ngram and model", False))
"""Drafts of the core and of the ranks, with and without preemption: the cases that another layout may change."""
DEMO_CASES = [((1, 1), drafter, preempted) for drafter in DRAFTERS for preempted in (False, True)] + [
    (grid, *drafts) for grid in ((2, 1), (1, 2), (2, 2)) for drafts in BOTH
]


@pytest.mark.parametrize(
    ("case", "drafter", "preempted"),
    DEMO_CASES,
    indirect=["case"],
    ids=[
        f"tp{grid[0]}-pp{grid[1]}-{drafter}-{'preempted' if preempted else 'calm'}"
        for grid, drafter, preempted in DEMO_CASES
    ],
)
def test_tokens_are_those_without_speculation(case: Case, drafter: str, preempted: bool) -> None:
    check_drafts(case, drafter, preempted)


@pytest.mark.parametrize("case", families(), indirect=True)
@pytest.mark.parametrize(
    ("drafter", "preempted"), [*BOTH, ("right", True), ("wrong", False)], ids=lambda value: str(value).lower()
)
def test_tokens_of_families_are_those_without_speculation(case: Case, drafter: str, preempted: bool) -> None:
    check_drafts(case, drafter, preempted)


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


@pytest.mark.parametrize(
    "case", [pytest.param(grid, id="tp{}-pp{}".format(*grid)) for grid in ((1, 1), (2, 2))] + families(), indirect=True
)
def test_right_drafts_save_steps(case: Case) -> None:
    """A prompt's step, and then one for each six tokens, exactly; recurrent states end drafts with the block."""
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


@layouts((1, 1))
def test_ngram_copies_what_repeats(case: Case) -> None:
    """By the real costs of this machine or not, a repeated answer is the same."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (exact,) = case.ranks.tokens([(PROMPTS[1], params)], speculative=None)
    (found,) = case.ranks.tokens([(PROMPTS[1], params)], speculative=SpeculativeConfig())
    assert found == exact


@layouts((1, 1), (2, 1), (1, 2), (2, 2))
def test_a_model_that_drafts_for_itself_is_always_right(case: Case) -> None:
    """At temperature 1, as its drafts are sampled with the noise of the same places; one after another, and several at
    once. Greedy ones are in the two tests below."""
    requests = [
        (prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=31, ignore_eos=True))
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


@layouts((1, 1), (2, 2))
def test_a_cached_prefix_has_the_drafters_keys(case: Case) -> None:
    """A prompt whose start is cached has as good drafts as one that is computed."""
    params = SamplingParams(temperature=0.0, max_tokens=31, ignore_eos=True)
    asked = [(PROMPTS[0] * 2, params), (PROMPTS[0] * 2, params)]
    first, second = case.ranks.tokens(asked, speculation=Always(4, 64), max_num_seqs=1)
    assert first == second
    assert case.ranks.stats.prefix_hit_tokens > 80
    assert case.ranks.stats.num_draft_tokens == case.ranks.stats.num_accepted_tokens


@layouts((1, 1), (1, 2))
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


@layouts((1, 1), (2, 2))
def test_a_drafter_catches_up(case: Case) -> None:
    """After steps without it, in chunks of a step."""
    requests = [(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=71, ignore_eos=True))]
    exact = case.ranks.tokens(requests, speculative=None)
    assert case.ranks.tokens(requests, speculation=Pausing(4, 64)) == exact
    stats = case.ranks.stats
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 20


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary, with random weights and sliding windows."""
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


@pytest.fixture(scope="module")
def load_random(random_model: Path) -> Iterator[Callable[[int, int], Ranks]]:
    """The demo model's ranks in a layout, with the random model as draft model."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda tp, pp: stack.enter_context(Ranks(configured(tp, pp, model=str(random_model)))))


GRIDS = [(1, 1), *[pytest.param(grid, marks=pytest.mark.slow) for grid in ((2, 1), (1, 2), (2, 2))]]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_garbage_changes_nothing(load_random: Callable[[int, int], Ranks], grid: tuple[int, int]) -> None:
    """A model with other layers, and KV cache groups of its own."""
    ranks = load_random(*grid)
    assert [group.window for group in ranks.config.cache.groups].count(24)
    expected = ranks.run(REQUESTS, speculative=None)
    for blocks in (None, 56):
        found = ranks.run(REQUESTS, speculation=Always(3, 64), depth=2, num_blocks=blocks)
        check(found, expected)
        assert ranks.stats.num_draft_tokens > 10 * ranks.stats.num_accepted_tokens
        assert (ranks.stats.preemptions > 0) == (blocks is not None)


def test_a_prediction_beside_a_model_that_is_always_wrong_saves_its_steps(
    load_random: Callable[[int, int], Ranks],
) -> None:
    """As many as it saves alone: 60 tokens take the prompt's step, three with 16 drafts and one with the rest. The
    tokens after it are drafted by the model, which has followed none of it, and catches up."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    ranks = load_random(1, 1)
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


@layouts((1, 1), (2, 2))
def test_a_drafter_is_followed_or_not_by_what_it_costs(case: Case) -> None:
    """With the real manager, regardless of this machine's times."""
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    (exact,) = case.ranks.tokens([(PROMPTS[1], params)], speculative=None)
    assert case.ranks.tokens([(PROMPTS[1], params)]) == [exact]
