"""Ranks that divide the tokens of a step give the tokens of a single rank: for each kind of attention, in chunks, in
few blocks, with prefix hits, drafts, adapters, pictures and the KV store, on ranks in threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.scheduler.token_budget import TokenBudget
from quire.engine.worker.drafter import Drafts
from quire.engine.worker.encoder_cache import EncoderCache
from quire.engine.worker.model_runner import ModelRunner
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.core_with_ranks import LocalStore, Ranks
from tests.fakes.drafts import Always, Guesser
from tests.fakes.families import write
from tests.fakes.lora import write_lora
from tests.fakes.media_prompts import Picture, media_prompt, write_media_model
from tests.fakes.model_logits import configure
from tests.fakes.threads import ThreadExecutor
from tests.integration.engine.core.test_draft_heads import CASES
from tests.integration.engine.core.test_draft_heads import configured as heads_configured
from tests.integration.engine.core.test_kv_tiers import configured, requests, scarce


def divided(folder: Path, shares: int, tp: int = 1, pp: int = 1, **options: Any) -> EngineConfig:
    degrees = {
        "prefill_context_parallel_size": shares,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
    }
    return configure(folder, **{"max_model_len": 256, "max_num_seqs": 8} | degrees | options)


@pytest.mark.parametrize(
    ("family", "shares", "tp", "pp", "options"),
    [
        ("Qwen3", 3, 1, 1, {"kv_cache_dtype": "int8"}),
        ("DeepSeek V2", 2, 2, 2, {}),  # MLA, a mixture of experts
        ("gpt-oss", 2, 1, 1, {}),  # windows, sinks, a mixture of experts
        ("Qwen3-Next", 2, 2, 1, {}),  # recurrent states beside attention
        pytest.param("Zamba2", 3, 1, 1, {}, marks=pytest.mark.slow),  # states behind a shared block
        pytest.param("Falcon-H1", 2, 1, 2, {}, marks=pytest.mark.slow),  # states and attention in one layer
        pytest.param("Kimi Linear", 2, 1, 1, {}, marks=pytest.mark.slow),  # states and latent attention
        pytest.param("DeepSeek V3.2", 2, 1, 1, {}, marks=pytest.mark.slow),  # attention to selected rows
        pytest.param("Llama 4", 2, 1, 1, {}, marks=pytest.mark.slow),  # chunked attention
        pytest.param("Gemma 3n", 2, 1, 1, {}, marks=pytest.mark.slow),  # layers that share keys and values
        pytest.param("Gemma", 4, 1, 2, {"block_size": 4}, marks=pytest.mark.slow),
        pytest.param("Falcon, one KV head", 3, 2, 1, {"kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
        pytest.param("BLOOM", 2, 1, 1, {}, marks=pytest.mark.slow),  # a bias by distance
    ],
)
def test_tokens_are_those_of_one_rank(
    family: str, shares: int, tp: int, pp: int, options: dict[str, Any], tmp_path: Path
) -> None:
    write(family, tmp_path)
    single, config = divided(tmp_path, 1, **options), divided(tmp_path, shares, tp, pp, **options)
    asked = requests()
    with Ranks(single, ThreadExecutor(single)) as ranks:
        expected = ranks.tokens(asked)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        assert ranks.tokens(asked) == expected
        assert ranks.tokens(asked, max_num_batched_tokens=16) == expected
        assert ranks.stats.prefix_hit_tokens > 50
        assert ranks.tokens(asked, num_blocks=scarce(config)) == expected
        wrong = Guesser(lambda known, rng: rng.randrange(3, 100), 3, 64, config.cache.block_size)
        assert ranks.tokens(asked, speculation=wrong, max_num_batched_tokens=24) == expected


@pytest.mark.parametrize(
    ("case", "tp", "pp", "depth"),
    [
        ("EAGLE-3", 2, 1, 2),
        pytest.param("MTP, DeepSeek V3", 1, 2, 1, marks=pytest.mark.slow),
        pytest.param("MTP, DeepSeek V3.2", 1, 1, 2, marks=pytest.mark.slow),
        pytest.param("MTP, MiMo-V2-Flash", 1, 1, 1, marks=pytest.mark.slow),  # several heads
    ],
)
def test_each_rank_has_a_head(case: str, tp: int, pp: int, depth: int, tmp_path: Path) -> None:
    """Also in steps that run ahead. Drafts are right on all ranks: those of wrong tokens would not be accepted."""
    CASES[case][1](tmp_path)
    single, config = (
        heads_configured(tmp_path, case, *grid, prefill_context_parallel_size=shares, max_model_len=256)
        for grid, shares in (((1, 1), 1), ((tp, pp), 2))
    )
    asked, found = requests(), []
    for each in (single, config):
        with Ranks(each, ThreadExecutor(each)) as ranks:
            expected = ranks.tokens(asked, speculative=None)
            assert ranks.tokens(asked, speculation=Always(3, 64), depth=depth, max_num_batched_tokens=24) == expected
            found.append((expected, ranks.stats.num_draft_tokens > 20))
    assert found[0] == found[1] == (expected, True)


@pytest.mark.parametrize(("tp", "draft_tp"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_each_rank_has_a_draft_model(tp: int, draft_tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It guesses what the model does, so that all drafts are accepted, if its KV is complete. The first rank's drafts
    are those of all, so that their caches stay the same."""
    write("Qwen3", tmp_path)
    runners, initialize = list[ModelRunner](), ModelRunner._initialize_kv_caches

    def round_differently(self: ModelRunner, config: EngineConfig) -> None:
        initialize(self, config)
        runners.append(self)
        if self._pcp.rank and self._drafter is not None:
            draft = self._drafter.draft

            def others(*given: Any) -> Drafts | None:
                made = draft(*given)
                return made and replace(made, tokens=(made.tokens + 1) % 90)

            monkeypatch.setattr(self._drafter, "draft", others)

    monkeypatch.setattr(ModelRunner, "_initialize_kv_caches", round_differently)
    drafter = {"model": str(tmp_path), "num_speculative_tokens": 4, "draft_tensor_parallel_size": draft_tp}
    config = divided(tmp_path, 2, tp, speculative_config=drafter)
    asked = requests()
    with Ranks(config, ThreadExecutor(config)) as ranks:
        expected = ranks.tokens(asked, speculative=None)
        for settings in ({}, {"max_num_batched_tokens": 16}, {"max_num_seqs": 1, "depth": 2}):
            assert ranks.tokens(asked, speculation=Always(4, 64), **settings) == expected
            assert ranks.stats.num_accepted_tokens == ranks.stats.num_draft_tokens > 0
            for first, second in zip(runners[:tp], runners[tp:], strict=True):
                for shape, memory in first._kv_caches.memory.items():
                    written = (each.view(torch.float32) for each in (memory, second._kv_caches.memory[shape]))
                    torch.testing.assert_close(*written)


@pytest.mark.parametrize("family", ["Qwen2-VL", pytest.param("Qwen3-VL", marks=pytest.mark.slow)])
def test_pictures_are_divided(family: str, tmp_path: Path) -> None:
    """Also features for several layers. Shares begin and end in pictures."""
    model = write_media_model(family, tmp_path)
    layouts: list[list[int | Picture]] = [[5, Picture((1, 8, 6)), 30], [9], [2, Picture((1, 12, 12), seed=1), 3]]
    prompts = [media_prompt(model, parts, tmp_path, seed) for seed, parts in enumerate(layouts)]
    asked = [(each.token_ids, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)) for each in prompts]
    items, answers = [each.items for each in prompts], []
    for shares, pp in ((1, 1), (3, 1), (2, 2)):
        config = divided(tmp_path, shares, pp=pp)
        with Ranks(config, ThreadExecutor(config)) as ranks:
            answers += [ranks.tokens(asked, media=items), ranks.tokens(asked, media=items, max_num_batched_tokens=24)]
    assert answers == answers[:1] * 6


@pytest.mark.parametrize("family", ["Qwen3-Next", "Qwen3"])
def test_only_steps_with_prompts_are_divided(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of accepted drafts, which models with recurrent states compute again."""
    write(family, tmp_path)
    config, prompt = divided(tmp_path, 2), [5, 6, 7] * 5
    asked = [(prompt, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))]
    sizes, share = list[int](), Batch.share

    def record(self: Batch, parallel: Parallel) -> Batch:
        sizes.append(len(self.token_ids))
        return share(self, parallel)

    monkeypatch.setattr(Batch, "share", record)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        (expected,) = ranks.tokens(asked)
        known = prompt + expected + [3] * 4
        right = Guesser(lambda tokens, rng: known[len(tokens)], 3, 64, config.cache.block_size)
        assert ranks.tokens(asked, speculation=right) == [expected]
        assert ranks.stats.num_accepted_tokens > 10
    assert sizes == [len(prompt)] * 4


def test_a_picture_that_one_rank_cannot_encode_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: nothing is kept of what the other rank has computed."""
    model = write_media_model("Qwen2-VL", tmp_path)
    prompt = media_prompt(model, [5, Picture((1, 12, 12)), 3], tmp_path)
    asked = [(prompt.token_ids, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))]
    single, config = divided(tmp_path, 1), divided(tmp_path, 2)
    with Ranks(single, ThreadExecutor(single)) as ranks:
        expected = ranks.tokens(asked, media=[prompt.items])
    encode = EncoderCache._encode

    def fail_on_last(self: EncoderCache, *given: Any) -> None:
        if self._pcp.rank == 1:
            raise torch.OutOfMemoryError
        encode(self, *given)

    with Ranks(config, ThreadExecutor(config)) as ranks:
        with monkeypatch.context() as context:
            context.setattr(EncoderCache, "_encode", fail_on_last)
            (outputs,) = ranks.run(asked, media=[prompt.items])
        assert [each.finish_reason for each in outputs] == ["error"]
        assert ranks.tokens(asked, media=[prompt.items]) == expected


def test_adapters_are_those_of_each_token(tmp_path: Path) -> None:
    """Also of the embedding, whose rows the host looks up."""
    base = write_checkpoint("qwen3", tmp_path / "base", num_hidden_layers=4)
    options = {"enable_lora": True, "max_loras": 2, "max_model_len": 256}
    single, config = divided(base, 1, **options), divided(base, 3, 2, **options)
    arch = single.model.architecture
    names = [name for name in checkpoint_tensors(arch, has_head=True) if "_proj.weight" in name]
    embedding = "model.embed_tokens.lora_embedding"
    outer = {f"{embedding}_A": (3, arch.vocab_size), f"{embedding}_B": (arch.hidden_size, 3)}
    adapters = [
        write_lora(tmp_path / name, single.model, own, seed, size=0.15, others=others)
        for seed, (name, own, others) in enumerate((("layers", names, {}), ("embedding", names[:1], outer)))
    ]
    asked = requests()
    chosen = [adapters[0], None, adapters[1], adapters[0], adapters[1]]
    with Ranks(single, ThreadExecutor(single)) as ranks:
        plain, expected = ranks.tokens(asked), ranks.tokens(asked, adapters=chosen)
    assert [one == other for one, other in zip(plain, expected, strict=True)] == [each is None for each in chosen]
    with Ranks(config, ThreadExecutor(config)) as ranks:
        assert ranks.tokens(asked, adapters=chosen) == expected
        assert ranks.tokens(asked, adapters=chosen, max_num_batched_tokens=16) == expected


@pytest.mark.parametrize("family", ["Qwen3", pytest.param("Qwen3-Next", marks=pytest.mark.slow)])
def test_one_of_the_ranks_stores_and_all_load(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenBudget, "prompt_seconds", lambda self, start, end: None)
    write(family, tmp_path)
    asked = requests()
    single, config = (configured(tmp_path, tp, prefill_context_parallel_size=shares) for tp, shares in ((1, 1), (2, 2)))
    for writer, reader in ((single, config), (config, single)):
        store = LocalStore(writer)
        with Ranks(writer, ThreadExecutor(writer), store) as ranks:
            expected = ranks.tokens(asked)
        with Ranks(reader, ThreadExecutor(reader), store) as ranks:
            assert ranks.tokens(asked) == expected
            assert ranks.stats.kv_loaded_memory_tokens > 50
        store.close()
