"""Ranks that divide the tokens of KV blocks give the tokens of a single rank: for each kind of attention, in chunks, in
few blocks, with prefix hits, drafts and the KV store, on ranks in threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.scheduler.token_budget import TokenBudget
from tests.fakes.core_with_ranks import LocalStore, Ranks
from tests.fakes.drafts import Always, Guesser
from tests.fakes.families import write
from tests.fakes.media_prompts import Picture, media_prompt, write_media_model
from tests.fakes.model_logits import configure
from tests.fakes.threads import ThreadExecutor
from tests.integration.engine.core.test_draft_heads import CASES
from tests.integration.engine.core.test_draft_heads import configured as heads_configured
from tests.integration.engine.core.test_kv_tiers import configured, requests, scarce


def divided(folder: Path, tp: int, context: int, pp: int = 1, **options: Any) -> EngineConfig:
    plain: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
    }
    return configure(folder, **plain | {"decode_context_parallel_size": context} | options)


@pytest.mark.parametrize(
    ("family", "tp", "context", "pp", "options"),
    [
        ("Qwen3", 4, 2, 1, {"kv_cache_dtype": "int8"}),
        ("DeepSeek V2", 4, 4, 1, {}),
        ("Qwen3-Next", 4, 2, 1, {}),  # recurrent states beside all tokens
        ("DeepSeek V3.2", 2, 2, 1, {}),  # attention to selected rows
        pytest.param("GLM-5.3", 4, 4, 1, {"block_size": 8}, marks=pytest.mark.slow),
        pytest.param("Gemma", 4, 2, 2, {"block_size": 4}, marks=pytest.mark.slow),
        pytest.param("Falcon, one KV head", 2, 2, 1, {"kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
        pytest.param("Falcon, one KV head", 4, 2, 1, {"block_size": 2}, marks=pytest.mark.slow),
        pytest.param("DeepSeek V3", 2, 2, 2, {"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("Kimi Linear", 2, 2, 1, {}, marks=pytest.mark.slow),
        pytest.param("PaliGemma", 4, 2, 1, {}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_rank(
    family: str, tp: int, context: int, pp: int, options: dict[str, Any], tmp_path: Path
) -> None:
    write(family, tmp_path)
    single, config = divided(tmp_path, 1, 1, **options), divided(tmp_path, tp, context, pp, **options)
    asked = requests()
    with Ranks(single, ThreadExecutor(single)) as ranks:
        expected = ranks.tokens(asked)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        assert ranks.tokens(asked) == expected
        assert ranks.tokens(asked, max_num_batched_tokens=16) == expected
        assert ranks.stats.prefix_hit_tokens > 50
        assert ranks.tokens(asked, num_blocks=scarce(config)) == expected
        wrong = Guesser(lambda known, rng: rng.randrange(3, 100), 3, 64, config.cache.block_size)
        assert ranks.tokens(asked, speculation=wrong) == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_causal_without_window", [False, True])
def test_tokens_of_pictures_attend_to_later_ones(is_causal_without_window: bool, tmp_path: Path) -> None:
    """In all layers, as in Gemma 3, or in those with a window, as in Gemma 4."""
    model = write_media_model("Gemma 3", tmp_path, sliding_window=512)
    layouts: list[list[int | Picture]] = [[5, Picture((1, 8, 6)), 30], [9]]
    prompts = [media_prompt(model, parts, tmp_path, seed) for seed, parts in enumerate(layouts)]
    asked = [(each.token_ids, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)) for each in prompts]
    answers = []
    for tp, context in ((1, 1), (4, 2)):
        config = divided(tmp_path, tp, context)
        media = config.model.architecture.media
        assert media is not None
        media = replace(media, is_causal_without_window=is_causal_without_window)
        arch = replace(config.model.architecture, media=media)
        config = replace(config, model=replace(config.model, architecture=arch))
        with Ranks(config, ThreadExecutor(config)) as ranks:
            answers.append(ranks.tokens(asked, media=[each.items for each in prompts]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("family", "layouts", "options"),
    [
        ("Qwen3", ((1, 1), (4, 2)), {"kv_cache_dtype": "int8"}),
        ("DeepSeek V2", ((1, 1), (4, 2)), {}),
        pytest.param("Qwen3-Next", ((1, 1), (4, 2)), {}, marks=pytest.mark.slow),
        pytest.param("DeepSeek V3.2", ((1, 1), (2, 2)), {}, marks=pytest.mark.slow),
        pytest.param("DeepSeek V3", ((1, 1), (4, 4)), {"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("Qwen3", ((2, 1), (4, 2)), {"kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
        pytest.param("Kimi Linear", ((2, 1), (2, 2)), {}, marks=pytest.mark.slow),
    ],
)
def test_the_store_has_whole_blocks(
    family: str,
    layouts: tuple[tuple[int, int], ...],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ranks have stored that divide tokens, others read, and the other way round."""
    monkeypatch.setattr(TokenBudget, "prompt_seconds", lambda self, start, end: None)
    write(family, tmp_path)
    asked = requests()
    single, config = (
        configured(tmp_path, tp, decode_context_parallel_size=context, **options) for tp, context in layouts
    )
    for writer, reader in ((single, config), (config, single)):
        store = LocalStore(writer)
        with Ranks(writer, ThreadExecutor(writer), store) as ranks:
            expected = ranks.tokens(asked)
        with Ranks(reader, ThreadExecutor(reader), store) as ranks:
            assert ranks.tokens(asked) == expected
            assert ranks.stats.kv_loaded_memory_tokens > 50
        store.close()


@pytest.mark.parametrize(
    ("case", "tp", "depth"),
    [
        ("EAGLE-3", 4, 2),
        pytest.param("MTP, DeepSeek V3.2", 2, 1, marks=pytest.mark.slow),
        pytest.param("MTP, Qwen3-Next", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_a_head_divides_its_tokens(case: str, tp: int, depth: int, tmp_path: Path) -> None:
    """Also in steps that run ahead."""
    CASES[case][1](tmp_path)
    config = heads_configured(tmp_path, case, tp, decode_context_parallel_size=2, max_model_len=256)
    asked = requests()
    with Ranks(config, ThreadExecutor(config)) as ranks:
        expected = ranks.tokens(asked, speculative=None)
        states = config.cache.block_size if any(group.is_state for group in config.cache.groups) else None
        always = Always(3, 64, states)
        assert ranks.tokens(asked, speculation=always, depth=depth, max_num_batched_tokens=24) == expected
        assert ranks.stats.num_draft_tokens > 20
