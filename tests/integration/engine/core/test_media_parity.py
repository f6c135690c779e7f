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
from quire.engine.executor.base import StepFuture
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.drafts import Always, Guesser
from tests.fakes.media_prompts import MediaPrompt, Picture, generate, media_prompt, write_media_model
from tests.fakes.quantized_checkpoints import quantize
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
WITHOUT_VIDEOS = ("GLM-4.1V", "Gemma 3", "PaliGemma 2")
"""In transformers, a prompt for GLM-4.1V cannot have both pictures and videos."""
SLOW = pytest.mark.slow
PARAMS = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
SITUATIONS = ("whole", "in chunks", "cached", "preempted", "guessed")


class Layout(NamedTuple):
    family: str
    tp: int = 1
    partition: str | None = None
    weights: str = ""
    """Of the decoder: int8 when it is loaded, or fp8 in the checkpoint."""
    spreads_experts: bool = False
    divides_items: bool = False


class Case(NamedTuple):
    prompts: list[MediaPrompt]
    expected: list[list[int]]
    ranks: Ranks


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    layout: Layout = request.param
    family, tp, partition, weights, spreads_experts, divides_items = layout
    folder = tmp_path_factory.mktemp("model")
    windows = {"Gemma 3": 24, "PaliGemma 2": 60}
    text = {"sliding_window": windows[family]} if family in windows else {}
    model = write_media_model(family, folder, **text)
    if weights == "fp8":
        quantize(folder, "fp8", skipped="visual")
        model = type(model).from_pretrained(folder / "whole", dtype=torch.float32).train(False)
    layouts = [
        (seed, [part for part in parts if family not in WITHOUT_VIDEOS or part != CLIP]) for seed, parts in LAYOUTS
    ]
    if family == "PaliGemma 2":  # blocks of a joined prompt depend on all of it, so only a whole one can be found again
        layouts.append(layouts[1])
    prompts = [media_prompt(model, parts, folder, seed) for seed, parts in layouts]
    config = resolve(
        EngineOptions(
            model=str(folder),
            device="cpu",
            dtype="float32",
            tensor_parallel_size=tp,
            pipeline_parallel_size=1 if partition is None else 2,
            pipeline_layer_partition=partition,
            enable_expert_parallel=spreads_experts,
            mm_encoder_tp_mode="data" if divides_items else "weights",
            quantization="int8" if weights == "int8" else None,
            block_size=4,
            max_model_len=160,
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 22,
        )
    )
    with Ranks(config) as ranks:
        if weights == "int8":  # inputs of layers are rounded, too, as transformers' are not
            alone = {"enable_prefix_caching": False, "max_num_seqs": 1, "max_num_batched_tokens": 200}
            requests = [(prompt.token_ids, PARAMS) for prompt in prompts]
            expected = ranks.tokens(requests, media=[prompt.items for prompt in prompts], **alone)
        else:
            expected = [generate(model, prompt, COUNT) for prompt in prompts]
        yield Case(prompts, expected, ranks)


def cases() -> list[Any]:
    """Every layout of each family in every situation, and what else changes how layers compute in some."""
    found: list[tuple[Layout, tuple[str, ...]]] = []
    for family in ("Qwen3-VL", "Qwen2-VL", "Qwen2.5-VL", "Qwen3.5", "GLM-4.1V", "Gemma 3", "PaliGemma 2"):
        for tp, partition in ((1, None), (2, None), (1, "2,2"), (2, "2,2")):
            found.append((Layout(family, tp, partition), SITUATIONS))
    found += [
        (Layout("ERNIE 4.5 VL", 2, "2,2"), SITUATIONS),
        (Layout("ERNIE 4.5 VL", 2, spreads_experts=True), ("in chunks", "moved")),
        (Layout("Qwen3-VL MoE", 2, spreads_experts=True), ("whole", "cached", "preempted")),
        (Layout("Qwen3-VL", 2, "2,2", divides_items=True), ("whole", "in chunks")),
        (Layout("Qwen3-VL", 2, divides_items=True), ("beside decodes",)),
        (Layout("Qwen3-VL", 2, weights="fp8"), ("whole", "preempted", "moved")),
        (Layout("Qwen2.5-VL", 1, "2,2", weights="fp8"), ("in chunks", "cached")),
        (Layout("Qwen3-VL", 1, "2,2", weights="int8"), ("whole", "cached", "moved")),
        (Layout("Gemma 3", 2, weights="int8"), ("in chunks", "preempted")),
        (Layout("Qwen3.5", 2, "2,2"), ("moved",)),
        (Layout("Gemma 3"), ("moved",)),
        (Layout("PaliGemma 2"), ("moved",)),
        (Layout("Qwen3-VL"), ("moved",)),
    ]
    return [
        pytest.param(
            layout,
            situation,
            id="-".join(str(each) for each in (*layout, situation) if each),
            marks=[] if layout == Layout("Qwen3-VL") else [SLOW],
        )
        for layout, situations in found
        for situation in situations
    ]


@pytest.mark.parametrize(("case", "situation"), cases(), indirect=["case"])
def test_answers_are_those_of_transformers(case: Case, situation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`beside decodes`: items are encoded in parts. `moved`: a replica has given some of the tokens, and another one
    goes on."""
    requests = [(prompt.token_ids, PARAMS) for prompt in case.prompts]
    options: dict[str, Any] = {"max_num_batched_tokens": 200, "enable_prefix_caching": False}
    told: list[list[int]] = [[] for _ in requests]
    spec = case.ranks.config.model.architecture.media
    assert spec is not None
    match situation:
        case "in chunks":
            options["max_num_batched_tokens"] = 52 if spec.joins_prompt else 17 if spec.is_bidirectional else 7
        case "cached":
            options |= {"enable_prefix_caching": True, "max_num_seqs": 1}
        case "preempted":
            budget = 52 if spec.joins_prompt else 40
            options |= {"max_num_batched_tokens": budget, "num_blocks": 60 * len(case.ranks.config.cache.groups)}
        case "guessed":
            texts = [prompt.token_ids + answer for prompt, answer in zip(case.prompts, case.expected, strict=True)]

            def guess(known: list[int], rng: random.Random) -> int:
                right = [text[len(known)] for text in texts if text[: len(known)] == known and len(text) > len(known)]
                return rng.choice(right) if right and rng.random() < 0.7 else rng.randrange(100)

            options["speculation"] = Guesser(guess, 3, 32)
        case "beside decodes":
            options |= {"max_num_batched_tokens": 60, "max_num_seqs": 2, "dynamic_chunking": True, "itl_target": 1e-3}
        case "moved":
            options |= {"max_num_batched_tokens": 60, "enable_prefix_caching": True}
            told = [expected[: 1 + 11 * number] for number, expected in enumerate(case.expected)]
            options["reported"] = told
    plans, submit = list[SchedulerOutput](), case.ranks.executor.submit

    def record(plan: SchedulerOutput, limit: float) -> StepFuture:
        plans.append(plan)
        return submit(plan, limit)

    monkeypatch.setattr(case.ranks.executor, "submit", record)
    found = case.ranks.tokens(requests, media=[prompt.items for prompt in case.prompts], **options)
    assert found == [expected[len(known) :] for expected, known in zip(case.expected, told, strict=True)]
    stats = case.ranks.stats
    assert (stats.preemptions > 0) == (situation == "preempted")
    has_states = any(layer.state is not None for layer in case.ranks.config.model.architecture.layers)
    if situation == "cached" and spec.joins_prompt:
        assert stats.prefix_hit_tokens == (len(case.prompts[1].token_ids) - 1) // 4 * 4  # the repeated prompt's
        assert stats.encoder_cache_hits >= 2
    elif situation == "cached" and not has_states:  # states are kept at longer distances
        shared = (len(case.prompts[1].token_ids) - 1) // 4 * 4  # up to the picture's last token
        assert stats.prefix_hit_tokens == shared + 4  # and the text before the third one's
        assert stats.encoder_cache_hits >= 2
    parts = [plan for plan in plans if plan.media is not None and plan.media.num_steps is not None]
    assert bool(parts) == (situation == "beside decodes")
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
