"""Greedy float32 answers about pictures and videos equal transformers', in every layout and situation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.drafts import Always, Guesser
from tests.fakes.media_prompts import MediaPrompt, Picture, generate, media_prompt, write_media_model
from tests.fakes.sentence import write_modules

COUNT = 64
PICTURE, OTHER, CLIP = Picture((1, 8, 6)), Picture((1, 8, 6), seed=1), Picture((2, 6, 4), "video")
LAYOUTS: list[tuple[int, list[int | Picture]]] = [
    (0, [5, PICTURE, 30]),
    (0, [5, PICTURE, 3]),  # the first one's start, which ends in the picture
    (0, [5, OTHER, 3]),  # the same tokens
    (1, [9]),
    (2, [PICTURE, 2, Picture((1, 4, 4), seed=2), 4]),
    (3, [2, CLIP, 3, PICTURE, 2]),
]
"""Seeds of the text, and parts."""
WITHOUT_VIDEOS = ("GLM-4.1V", "Gemma 3")
"""In transformers, a prompt for GLM-4.1V cannot have both pictures and videos."""
SLOW = pytest.mark.slow


class Case(NamedTuple):
    prompts: list[MediaPrompt]
    expected: list[list[int]]
    ranks: Ranks


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family, tp, partition = request.param
    folder = tmp_path_factory.mktemp("model")
    text = {"sliding_window": 24} if family == "Gemma 3" else {}
    model = write_media_model(family, folder, **text)
    layouts = [
        (seed, [part for part in parts if family not in WITHOUT_VIDEOS or part != CLIP]) for seed, parts in LAYOUTS
    ]
    prompts = [media_prompt(model, parts, folder, seed) for seed, parts in layouts]
    config = resolve(
        EngineOptions(
            model=str(folder),
            device="cpu",
            dtype="float32",
            tensor_parallel_size=tp,
            pipeline_parallel_size=1 if partition is None else 2,
            pipeline_layer_partition=partition,
            block_size=4,
            max_model_len=160,
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 22,
        )
    )
    with Ranks(config) as ranks:
        yield Case(prompts, [generate(model, prompt, COUNT) for prompt in prompts], ranks)


def layouts() -> list[Any]:
    found = []
    for family in ("Qwen3-VL", "Qwen2-VL", "Qwen2.5-VL", "Qwen3.5", "GLM-4.1V", "Gemma 3"):
        for tp, partition in ((1, None), (2, None), (1, "2,2"), (2, "2,2")):
            is_default = family == "Qwen3-VL" and (tp, partition) == (1, None)
            name = f"{family}-tp{tp}-pp{partition or 1}"
            found.append(pytest.param((family, tp, partition), id=name, marks=[] if is_default else [SLOW]))
    return found


@pytest.mark.parametrize("case", layouts(), indirect=True)
@pytest.mark.parametrize("situation", ["whole", "in chunks", "cached", "preempted", "guessed"])
def test_answers_are_those_of_transformers(case: Case, situation: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    requests = [(prompt.token_ids, params) for prompt in case.prompts]
    options: dict[str, Any] = {"max_num_batched_tokens": 200, "enable_prefix_caching": False}
    whole_runs = case.ranks.config.model.architecture.media.is_bidirectional  # type: ignore[union-attr]
    match situation:
        case "in chunks":
            options["max_num_batched_tokens"] = 17 if whole_runs else 7
        case "cached":
            options |= {"enable_prefix_caching": True, "max_num_seqs": 1}
        case "preempted":
            options |= {"max_num_batched_tokens": 40, "num_blocks": 60 * len(case.ranks.config.cache.groups)}
        case "guessed":
            texts = [prompt.token_ids + answer for prompt, answer in zip(case.prompts, case.expected, strict=True)]

            def guess(known: list[int], rng: random.Random) -> int:
                right = [text[len(known)] for text in texts if text[: len(known)] == known and len(text) > len(known)]
                return rng.choice(right) if right and rng.random() < 0.7 else rng.randrange(100)

            options["speculation"] = Guesser(guess, 3, 32)
    found = case.ranks.tokens(requests, media=[prompt.items for prompt in case.prompts], **options)
    assert found == case.expected
    stats = case.ranks.stats
    assert (stats.preemptions > 0) == (situation == "preempted")
    has_states = any(layer.state is not None for layer in case.ranks.config.model.architecture.layers)
    if situation == "cached" and not has_states:  # states are kept at longer distances
        shared = (len(case.prompts[1].token_ids) - 1) // 4 * 4  # up to the picture's last token
        assert stats.prefix_hit_tokens == shared + 4  # and the text before the third one's
        assert stats.encoder_cache_hits >= 2
    if situation == "guessed":
        assert stats.num_accepted_tokens > 100


def test_a_draft_model_that_sees_no_pictures(tmp_path: Path) -> None:
    """The same model without its tower: its guesses about text are right, and no other answer is changed."""
    model = write_media_model("Qwen3-VL", tmp_path)
    prompts = [media_prompt(model, parts, None, seed) for seed, parts in LAYOUTS]
    options = EngineOptions(
        model=str(tmp_path),
        device="cpu",
        dtype="float32",
        max_model_len=160,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 22,
        speculative_config={"model": str(tmp_path)},
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with Ranks(resolve(options)) as ranks:
        requests = [(prompt.token_ids, params) for prompt in prompts]
        found = ranks.tokens(requests, media=[prompt.items for prompt in prompts], speculation=Always(3, 32))
        assert found == [generate(model, prompt, 24) for prompt in prompts]
        assert 0 < ranks.stats.num_accepted_tokens < ranks.stats.num_draft_tokens


@pytest.mark.parametrize("budget", [200, 7])
def test_vectors_of_pictures_are_those_of_transformers(tmp_path: Path, budget: int) -> None:
    """Steps of a pooling model may end inside pictures, too."""
    model = write_media_model("Qwen3-VL", tmp_path)
    prompts = [media_prompt(model, parts, None, seed) for seed, parts in LAYOUTS]
    config = resolve(EngineOptions(model=str(write_modules(tmp_path, "mean", {})), device="cpu", dtype="float32"))
    with Ranks(config) as ranks:
        requests = [(prompt.token_ids, SamplingParams()) for prompt in prompts]
        outputs = ranks.run(requests, media=[prompt.items for prompt in prompts], max_num_batched_tokens=budget)
    for prompt, (output,) in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            states = model.model(torch.tensor([prompt.token_ids]), **prompt.inputs).last_hidden_state[0]
        assert output.vector is not None
        found = torch.from_numpy(np.frombuffer(output.vector, np.float32).copy())
        torch.testing.assert_close(found, states.mean(dim=0), rtol=1e-4, atol=1e-4)
