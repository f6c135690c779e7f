"""Models that transformers builds: the same tokens as by transformers itself, in every layout that they have a plan for."""

from __future__ import annotations

import json
import logging
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.engine.architecture import BuiltArchitecture
from quire.engine.errors import ConfigError
from quire.engine.families import FAMILIES, by_transformers
from quire.engine.messages import SamplingParams
from quire.engine.models.by_transformers import describe
from quire.engine.models.loading import load
from quire.engine.parallel import Parallel
from quire.engine.resolve import Sizes
from tests.e2e.harness import Ranks
from tests.fakes.ranks import on_ranks
from tests.fakes.threads import ThreadExecutor
from tests.models import families, others
from tests.models.common import CPU, configure, logits
from tests.models.test_families import STEPS, continuations


@pytest.fixture
def own_process() -> None:
    """For tests that ask a process of its own, as users do."""


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Spares each description the imports of a process of its own."""
    if "own_process" not in request.fixturenames:
        monkeypatch.setattr(by_transformers, "describe", describe.describe)


def prompts() -> list[list[int]]:
    """Two unlike ones, and two that begin alike."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 130) for _ in range(40)]
    unlike = [[rng.randrange(3, 130) for _ in range(length)] for length in (1, 33)]
    return [*unlike, [*shared, 5, 6], [*shared, 7, 8, 9]]


def served(folder: Path, **options: Any) -> list[list[int]]:
    """Greedy tokens, with chunked prefill and prefix hits."""
    config = configure(folder, max_model_len=256, **options)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        tokens = ranks.tokens([(prompt, params) for prompt in prompts()], max_num_batched_tokens=16)
        assert ranks.stats.prefix_hit_tokens >= 32
        return tokens


@pytest.mark.parametrize("case", others.CASES)
def test_greedy_tokens_are_those_of_transformers_in_every_layout(case: str, tmp_path: Path) -> None:
    model = others.write(case, tmp_path)
    expected = continuations(model, prompts())
    for tp, pp in others.CASES[case].layouts:
        assert served(tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp) == expected


@pytest.mark.parametrize("case", others.CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = others.write(case, tmp_path)
    tokens = torch.randint(0, 131, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    for tp, pp in others.CASES[case].layouts:
        config = configure(tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=256)
        for result in on_ranks(tp, partial(logits, config, tokens)):
            assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_enough_architectures_have_no_mapping_of_ours() -> None:
    cases = others.CASES.values()
    assert len({case.architecture for case in cases if (2, 1) in case.layouts} - FAMILIES.keys()) >= 10


@pytest.mark.parametrize("case", ["Llama", "Gemma 2", "Phi-3, longrope", "Qwen3 MoE", "GPT-NeoX", "Mistral, windows"])
def test_both_implementations_give_the_same_tokens(case: str, tmp_path: Path) -> None:
    families.write(case, tmp_path)
    for tp in (1, 2):
        ours, theirs = (served(tmp_path, tensor_parallel_size=tp, model_impl=impl) for impl in ("quire", "transformers"))
        assert ours == theirs


@pytest.mark.usefixtures("own_process")
def test_what_has_no_mapping_goes_to_transformers_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    others.write("OLMo", tmp_path)
    config = configure(tmp_path)
    assert isinstance(config.model.architecture, BuiltArchitecture)
    assert "OlmoForCausalLM has no implementation of Quire's own; transformers' serves it" in caplog.text
    with pytest.raises(ConfigError, match="OlmoForCausalLM is not served; served are: "):
        configure(tmp_path, model_impl="quire")
