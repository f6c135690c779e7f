"""Speculation changes no token: in every layout, with every sampling parameter, preempted or not."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from quire.engine.config.engine_config import SpeculativeConfig
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.scheduler.ngram import TokenLookup
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.drafts import Guess, Guesser
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

    def drafters(self) -> dict[str, Guesser]:
        return {
            "right": self.guesser(self.right, 5),
            "mixed": self.guesser(self.mixed, 3),
            "wrong": self.guesser(self.wrong, 7),
            "ngram": self.guesser(repeated, 4),
        }

    def guesser(self, guess: Guess, most: int) -> Guesser:
        cache = self.ranks.config.cache
        return Guesser(guess, most, 64, cache.block_size if any(group.is_state for group in cache.groups) else None)


def repeated(known: list[int], rng: random.Random) -> int:
    """What followed the last token before."""
    lookup = TokenLookup(1)
    lookup.extend(known)
    return (lookup.propose(1) or [0])[0]


MODELS = {
    **{("demo", tp, pp): [] for tp in (1, 2) for pp in (1, 2)},
    ("Qwen3-Next", 1, 1): [],
    ("Mamba", 1, 2): [pytest.mark.slow],
    ("Falcon-H1", 2, 1): [pytest.mark.slow],
    ("Kimi Linear", 2, 2): [pytest.mark.slow],
    ("LFM2-MoE", 1, 1): [pytest.mark.slow],
    ("Gemma 3", 2, 2): [pytest.mark.slow],
}
"""Name (see `tests.fakes.families`), TP and PP: full attention, recurrent states beside it or alone, and windows."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(key, marks=marks, id="{}-tp{}-pp{}".format(*key)) for key, marks in MODELS.items()],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, tp, pp = request.param
    model = DEMO_MODEL if name == "demo" else tmp_path_factory.mktemp("model")
    if name != "demo":
        write(name, model)
    options = EngineOptions(
        model=str(model),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=64,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
    )
    with Ranks(resolve(options)) as loaded:
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


@pytest.mark.parametrize("drafter", ["right", "mixed", "wrong", "ngram"])
@pytest.mark.parametrize("preempted", [False, True], ids=["calm", "preempted"])
def test_tokens_are_those_without_speculation(case: Case, drafter: str, preempted: bool) -> None:
    speculation = case.drafters()[drafter]
    depth = max(2, case.ranks.config.parallel.pipeline_parallel_size)
    cache = case.ranks.config.cache
    is_state_only, has_large_pages = all(group.is_state for group in cache.groups), cache.blocks_per_page > 2
    few = 72 if is_state_only else 36
    found = case.ranks.run(
        REQUESTS, speculation=speculation, depth=depth, num_blocks=few if preempted else None, max_num_seqs=64
    )
    check(found, case.expected)
    stats = case.ranks.stats
    # A state has one size, and the largest pages have room for these answers: such requests need no more memory later.
    assert (stats.preemptions > 0) == (preempted and not is_state_only and not has_large_pages)
    assert stats.num_drafts > 0
    assert drafter == "ngram" or (stats.num_accepted_tokens > 0) == (drafter != "wrong")


def test_right_drafts_save_steps(case: Case) -> None:
    """A prompt's step, and then one for each six tokens, exactly; recurrent states end them with the block."""
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
