"""Keys and values in 4 bits: what a query sees depends on its position alone, whatever the company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.draft_heads import HEAD
from tests.fakes.drafts import Guesser, Recording
from tests.fakes.families import write
from tests.fakes.threads import ThreadExecutor
from tests.integration.engine.core import test_draft_heads

STEPS = 40
SLOW = [
    "Mistral, windows",
    "gpt-oss",
    "Falcon-RW, ALiBi",
    "Llama 4",
    "MiMo-V2-Flash",
    "Gemma 3",
    "Falcon-H1",
    "LFM2",
]


def configured(folder: Path, tp: int = 1, pp: int = 1, **options: Any) -> EngineConfig:
    plain: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    plain |= {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "kv_cache_dtype": "int4"} | options
    return resolve(EngineOptions(model=str(folder), **plain))


def requests(vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Of mixed lengths, greedy and sampled, two of which start alike."""
    rng = random.Random(0)
    shared = [rng.randrange(3, vocabulary) for _ in range(40)]
    prompts = [[rng.randrange(3, vocabulary) for _ in range(length)] for length in (1, 7, 33, 71)]
    prompts += [[*shared, 5, 6], [*shared, 7, 8, 9]]
    return [
        (prompt, SamplingParams(temperature=seed % 2 * 0.8, seed=seed, max_tokens=STEPS, ignore_eos=True))
        for seed, prompt in enumerate(prompts)
    ]


def check(config: EngineConfig) -> list[list[int]]:
    """Tokens are the same whole, in chunks, with prefix hits, preempted, and with drafts; returns them."""
    asked = requests(min(config.model.architecture.vocab_size, 130))
    with Ranks(config, ThreadExecutor(config)) as ranks:
        exact = ranks.tokens(asked, max_num_seqs=1, enable_prefix_caching=False)
        assert ranks.tokens(asked, max_num_batched_tokens=512) == exact
        assert ranks.tokens(asked, max_num_batched_tokens=13) == exact
        assert ranks.tokens(asked, max_num_batched_tokens=16, num_blocks=config.cache.max_blocks(112, 16)) == exact
        states = config.cache.block_size if any(group.is_state for group in config.cache.groups) else None
        assert ranks.stats.preemptions > 0 or states is not None  # whose pages have room for whole answers
        by_request = {tuple(prompt): [*prompt, *tokens] for (prompt, _), tokens in zip(asked, exact, strict=True)}

        def guess(tokens: list[int], rng: random.Random) -> int:
            whole = next(own for prompt, own in by_request.items() if tokens[: len(prompt)] == [*prompt])
            return whole[len(tokens)] if len(tokens) < len(whole) and rng.random() < 0.7 else 3

        assert ranks.tokens(asked, speculation=Guesser(guess, 5, 64, states, varies=True)) == exact
        assert 0 < ranks.stats.num_accepted_tokens < ranks.stats.num_draft_tokens
    return exact


@pytest.mark.parametrize(
    ("family", "tp", "pp"),
    [
        ("demo", 1, 1),
        ("Gemma 4, layer inputs, shared keys and values", 2, 2),
        ("Qwen3-Next", 1, 1),
        *(pytest.param(family, 1, 1, marks=pytest.mark.slow) for family in SLOW),
        *(pytest.param("demo", *grid, marks=pytest.mark.slow) for grid in ((2, 1), (1, 2), (4, 3))),
    ],
)
def test_tokens_do_not_depend_on_the_company(family: str, tp: int, pp: int, tmp_path: Path) -> None:
    """With windows, sinks, biases, shared keys and values, states, and on several ranks."""
    folder = DEMO_MODEL if family == "demo" else tmp_path
    if family != "demo":
        write(family, folder)
    check(configured(folder, tp, pp, spec_method="ngram"))


@pytest.mark.slow
def test_models_that_transformers_builds(tmp_path: Path) -> None:
    write("Llama", tmp_path)
    own, config = (configured(tmp_path, 2, model_impl=each, spec_method="ngram") for each in ("quire", "transformers"))
    assert check(config) == check(own)


@pytest.mark.parametrize("case", ["EAGLE-3", "MTP, MiMo-V2-Flash"])
def test_heads_that_draft_have_such_caches_too(case: str, tmp_path: Path) -> None:
    """They change no token, and their drafts do not depend on chunks, either."""
    method, write_both = test_draft_heads.CASES[case]
    write_both(tmp_path)
    options: dict[str, Any] = {"speculative_config": {"method": method, "num_speculative_tokens": 3}}
    if method != "mtp":
        options["speculative_config"]["model"] = str(tmp_path / HEAD)
    asked, made = (
        [(prompt, replace(params, temperature=0.0)) for prompt, params in requests(90)],
        list[dict[Any, Any]](),
    )
    config = configured(tmp_path, **options)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        exact = ranks.tokens(asked, speculative=None)
        for tokens in (512, 29):
            recording = Recording(3, 64)
            settings = {"depth": 2, "max_num_batched_tokens": tokens, "enable_prefix_caching": False}
            assert ranks.tokens(asked, speculation=recording, **settings) == exact
            made.append({tuple(known): drafts for known, drafts in recording.made})
    assert len(made[0]) > 100
    for known in made[0].keys() & made[1].keys():
        assert made[0][known] == made[1][known]
