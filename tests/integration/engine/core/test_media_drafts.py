"""A draft model, which sees no images, changes no answer about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.media_prompts import generate, media_prompt, write_media_model
from tests.integration.engine.core.test_media_parity import COUNT, LAYOUTS


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_answers_with_a_draft_model_are_those_of_transformers(stages: int, tmp_path: Path) -> None:
    model = write_media_model("Qwen3-VL", tmp_path)
    prompts = [media_prompt(model, parts, tmp_path, seed) for seed, parts in LAYOUTS]
    config = resolve(
        EngineOptions(
            model=str(tmp_path),
            device="cpu",
            dtype="float32",
            block_size=4,
            max_model_len=160,
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 23,
            pipeline_parallel_size=stages,
            pipeline_layer_partition="2,2" if stages == 2 else None,
            spec_model=str(tmp_path),
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with Ranks(config) as ranks:
        found = ranks.tokens(
            [(prompt.token_ids, params) for prompt in prompts],
            media=[prompt.items for prompt in prompts],
            max_num_batched_tokens=60,
        )
        assert found == [generate(model, prompt, COUNT) for prompt in prompts]
        assert ranks.stats.num_accepted_tokens > 0
