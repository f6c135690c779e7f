"""Requests with pictures and adapters that change the tower, the decoder or both, through the core: each has the tokens
of its merged checkpoint, whatever the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.executor.base import StepFuture
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.encoder_cache import EncoderCacheManager
from quire.engine.scheduler.token_budget import TowerTime
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.lora import SETTINGS, merged, write_lora
from tests.fakes.media_prompts import MediaPrompt, Picture, generate, media_prompt, write_media_model
from tests.fakes.model_logits import configure

COUNT = 24
PARAMS = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
PICTURE, OTHER, CLIP = Picture((1, 8, 6)), Picture((1, 4, 4), seed=2), Picture((2, 6, 4), "video")
PROMPTS: list[tuple[int, list[int | Picture]]] = [
    (0, [5, PICTURE, 30]),
    (1, [PICTURE, 2, OTHER, 4]),
    (2, [9]),
    (3, [2, CLIP, 3, PICTURE, 2]),
    (0, [5, PICTURE, 3]),  # the first one's start
]
"""Seeds of the text, and parts."""


class Case(NamedTuple):
    folder: Path
    prompts: list[MediaPrompt]
    adapters: list[AdapterRef | None]
    """None: the base."""
    expected: list[list[list[int]]]
    """transformers' answers of each adapter to all prompts."""


@pytest.fixture(scope="module", params=["Qwen3-VL", pytest.param("Gemma 3", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Adapters of everything, of the tower, with DoRA, of the decoder, and with a projector of its own."""
    folder = tmp_path_factory.mktemp("model")
    is_gemma = request.param == "Gemma 3"
    base = write_media_model(request.param, folder / "base", **{"sliding_window": 24} if is_gemma else {})
    model = configure(folder / "base").model
    needed = checkpoint_tensors(model.architecture, has_head=True).items()
    names = [name for name, tensor in needed if len(tensor.shape) > 1 and name.endswith(".weight")]
    decoder = [name for name in names if "language_model" in name and "proj" in name]
    tower = [name for name in names if "language_model" not in name and not name.startswith("lm_head")]
    tower = [name for name in tower if "pos" not in name]
    kinds: list[tuple[list[str], dict[str, Any]]] = [
        (decoder + tower, SETTINGS),
        (tower, SETTINGS | {"use_dora": True, "lora_bias": True}),
        (decoder, SETTINGS | {"r": 6}),
    ]
    adapters = [
        write_lora(folder / str(seed), model, own, seed, settings=settings, size=0.15)
        for seed, (own, settings) in enumerate(kinds)
    ]
    projector = {name: tensor.shape for name, tensor in needed if ".merger." in name or "multi_modal_projector" in name}
    adapters.append(write_lora(folder / "whole", model, decoder[::2], 4, others=projector))
    models = [base]
    for number, each in enumerate(adapters):
        whole = merged(model, each, folder / f"merged {number}")
        models.append(type(base).from_pretrained(whole, dtype=torch.float32).train(False))
    prompts = [
        media_prompt(base, [part for part in parts if part != CLIP or not is_gemma], folder, seed)
        for seed, parts in PROMPTS
    ]
    expected = [[generate(each, prompt, COUNT) for prompt in prompts] for each in models]
    assert len({str(answers[:2]) for answers in expected}) == len(expected)
    return Case(folder / "base", prompts, [None, *adapters], expected)


def check(case: Case, ranks: Ranks, **settings: Any) -> None:
    """Serve all pairs of adapters and prompts at once."""
    requests = [(adapter, prompt) for prompt in range(len(case.prompts)) for adapter in range(len(case.adapters))]
    found = ranks.tokens(
        [(case.prompts[prompt].token_ids, PARAMS) for _, prompt in requests],
        media=[case.prompts[prompt].items for _, prompt in requests],
        adapters=[case.adapters[adapter] for adapter, _ in requests],
        **settings,
    )
    assert found == [case.expected[adapter][prompt] for adapter, prompt in requests]


@pytest.mark.parametrize(
    ("tp", "pp", "mode"),
    [(1, 1, "weights"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1, "weights"), (2, 2, "data")))],
)
def test_answers_are_those_of_merged_checkpoints(
    case: Case, tp: int, pp: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with fewer slots than adapters, chunks, cached prefixes, preemption, and pictures that are encoded in parts.
    The adapter of the decoder shares the base's features."""
    options = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 32, "max_num_seqs": 16, "max_model_len": 160}
    layout = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "mm_encoder_tp_mode": mode}
    config = configure(case.folder, block_size=4, **options, **layout)
    assert config.lora is not None
    with Ranks(replace(config, lora=replace(config.lora, num_slots=2))) as ranks:
        plans, submit = list[SchedulerOutput](), ranks.executor.submit

        def record(plan: SchedulerOutput, limit: float) -> StepFuture:
            plans.append(plan)
            return submit(plan, limit)

        monkeypatch.setattr(ranks.executor, "submit", record)
        check(case, ranks, max_num_batched_tokens=200)
        media = [plan.media for plan in plans if plan.media is not None]
        encoded = [item.digest for plan in media for item in plan.encoded]
        pictures = {item.digest for prompt in case.prompts for item in prompt.items}
        assert pictures < {*encoded}
        assert len({*encoded}) == 4 * len(pictures)
        check(case, ranks, max_num_batched_tokens=17, enable_prefix_caching=False)
        check(case, ranks, max_num_batched_tokens=40, max_num_seqs=1)
        assert ranks.stats.prefix_hit_tokens > 0
        check(case, ranks, max_num_batched_tokens=40, num_blocks=60 * len(config.cache.groups))
        assert ranks.stats.preemptions > 0
        plans.clear()
        begin, no_time = EncoderCacheManager.start, TowerTime(0.0, lambda work: 1.0)
        monkeypatch.setattr(EncoderCacheManager, "start", lambda self, within: begin(self, no_time))  # one step a plan
        check(case, ranks, max_num_batched_tokens=60, max_num_seqs=4, dynamic_chunking=True, itl_target=1e-3)
        parts = [plan.media for plan in plans if plan.media is not None and plan.media.num_steps is not None]
        assert any(plan.adapter_slots for plan in parts)
