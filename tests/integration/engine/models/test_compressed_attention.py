"""Models whose layers attend to a window and to compressed entries (DeepSeek V4)."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import kernels
from quire.engine.architecture import attention_spec
from quire.engine.architecture.attention_spec import CompressedAttentionSpec
from quire.engine.architecture.families import from_hf_config
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.compressed import CompressedAttention
from quire.engine.layers.kv_cache import CompressedCache
from quire.engine.layers.linear import Linear
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.worker.kv_caches import allocate_caches
from tests.fakes import quantized_checkpoints
from tests.fakes.checkpoints import generate
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.drafts import Guesser
from tests.fakes.families import CASES, SIZES, write, write_model
from tests.fakes.model_logits import CPU, configure, logits
from tests.fakes.ranks import on_ranks
from tests.fakes.threads import ThreadExecutor

STEPS = 24
ARCHITECTURE, CHANGES = CASES["DeepSeek V4"]


def greedy(prompts: list[list[int]], count: int = STEPS) -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)) for prompt in prompts]


def write_config(folder: Path, **changes: Any) -> None:
    config = SIZES | CHANGES | {"architectures": [ARCHITECTURE]} | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
def test_a_long_context(tmp_path: Path) -> None:
    """The tokens equal transformers', however the prompt is divided, and after a prefix hit. On ranks and stages:
    `test_long_context` has one rank."""
    settings = {"max_position_embeddings": 8192, "index_topk": 64, "sliding_window": 128, "initializer_range": 0.1}
    write("DeepSeek V4, rates as published", tmp_path, **settings)
    rng = random.Random(0)
    long = [rng.randrange(3, 130) for _ in range(3000)]
    prompts = [long, [*long[:2200], 7, 8, 9]]
    expected = generate(tmp_path, prompts, STEPS)
    config = configure(
        tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2, max_model_len=4096, max_num_batched_tokens=700
    )
    with Ranks(config, ThreadExecutor(config)) as ranks:
        assert ranks.tokens(greedy(prompts), max_num_batched_tokens=700) == expected
        assert ranks.stats.prefix_hit_tokens >= 2048


@pytest.mark.slow
def test_tokens_do_not_depend_on_preemption_nor_on_drafts(tmp_path: Path) -> None:
    write("DeepSeek V4", tmp_path)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 130) for _ in range(length)] for length in (3, 17, 40, 61, 90, 30, 18, 7)]
    config = configure(tmp_path, max_model_len=128, max_num_seqs=8, block_size=4)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        expected = ranks.tokens(greedy(prompts), max_num_batched_tokens=16)
        tight = config.cache.max_blocks(128, 5) + config.cache.blocks_per_page
        assert tight < config.cache.num_blocks
        assert ranks.tokens(greedy(prompts), max_num_batched_tokens=5, num_blocks=tight) == expected
        assert ranks.stats.preemptions > 0
        texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]

        def mostly_right(known: list[int], rng: random.Random) -> int:
            following = [text[len(known)] for text in texts if text[: len(known)] == known and len(text) > len(known)]
            return following[0] if following and rng.random() < 0.7 else rng.randrange(100)

        drafted = ranks.tokens(greedy(prompts), max_num_batched_tokens=64, speculation=Guesser(mostly_right, 5, 64))
        assert drafted == expected
        assert 0 < ranks.stats.num_accepted_tokens < ranks.stats.num_draft_tokens


@pytest.mark.parametrize("guess", ["garbage", "right"])
def test_steps_are_counted_whatever_drafts_are(guess: str, tmp_path: Path) -> None:
    """Rejected drafts leave nothing behind: no inputs of compressors, entries or keys."""
    write("DeepSeek V4", tmp_path)
    prompt = [*range(20, 51)]
    config = configure(tmp_path, max_model_len=128, max_num_seqs=2, block_size=8)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        (expected,) = ranks.tokens(greedy([prompt], 40), speculative=None)
        text: list[int] = [*prompt, *expected, 0, 0, 0, 0, 0]

        def drafted(known: list[int], rng: random.Random) -> int:
            return (text[len(known)] + (rng.randrange(1, 131) if guess == "garbage" else 0)) % 131

        assert ranks.tokens(greedy([prompt], 40), speculation=Guesser(drafted, 5, 16)) == [expected]
        drafts, accepted = ranks.stats.num_draft_tokens, ranks.stats.num_accepted_tokens
        # Each step gives its accepted drafts and one token; the prompt's gives the first one.
        rest = 40 - 1
        steps = rest if guess == "garbage" else -(-rest // 6)
        assert ranks.stats.num_drafts == steps - (guess == "garbage")
        assert accepted == (0 if guess == "garbage" else rest - steps)
        assert drafts >= accepted


def test_the_plan_counts_what_is_allocated(tmp_path: Path) -> None:
    """A layer's tokens and entries are in one plane, and the keys of indexers in others."""
    write_config(tmp_path)
    config = configure(tmp_path, load_format="dummy")
    caches = [each.compressed for each in allocate_caches(config, 0, CPU)]
    assert all(cache is not None for cache in caches)
    assert [cache.keys is not None for cache in caches if cache] == [False, True, False, True]
    parts = [part for cache in caches if cache for part in (cache.memory, cache.keys) if part is not None]
    assert len({part.data_ptr() for part in parts}) == 6
    assert sum(part[0, 0].nbytes for part in parts) == MemoryPlan.of(config).kv_block[0]
    windows, entries = sorted(config.cache.groups, key=lambda group: group.window is None)
    assert (windows.fills_pages, windows.window) == (True, 14)
    assert (entries.fills_pages, entries.window) == (False, None)
    for cache, layer in zip(caches, config.model.architecture.layers, strict=True):
        assert cache is not None
        assert isinstance(layer.attention, CompressedAttentionSpec)
        assert (cache.inputs is None) == (layer.attention.compressor is None)
        if cache.inputs is not None:  # they follow the rows of a page's tokens, and end within it
            page = config.cache.blocks_per_page * cache.memory[0, 0].numel()
            assert cache.inputs.stride(1) == cache.memory.stride(1)
            first = (cache.inputs.data_ptr() - cache.memory.data_ptr()) // cache.memory.element_size()
            assert first == config.cache.block_size * layer.attention.head_dim
            assert first + cache.inputs[0, 0].numel() <= page


@pytest.mark.parametrize(
    ("tp", "settings", "message"),
    [
        (1, {"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 is not supported for DeepseekV4ForCausalLM"),
        (1, {"block_size": 6}, "--block-size 6 is not a multiple of the 4 tokens"),
        (8, {}, "does not divide this model's 4 attention heads and 4 groups of the attention's output"),
    ],
)
def test_options_that_are_not_possible_are_refused(
    tp: int, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_config(tmp_path)
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path, load_format="dummy", tensor_parallel_size=tp, **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ({"swiglu_limit": 7.0}, "swiglu_limit 7.0 is not supported"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types .* for each of 4 layers"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types .* for each of 4 layers"),
        ({"layer_types": None, "compress_ratios": [0, 4, 8, 4]}, "compress_ratios .8. are not supported"),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than the 8 rotary features"),
        ({"o_groups": 3}, "4 heads cannot be divided into o_groups 3"),
        ({"hc_mult": 0}, "hc_mult 0 must be at least 1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
    ],
)
def test_configs_that_are_not_possible_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf_config(SIZES | CHANGES | {"architectures": [ARCHITECTURE]} | changes)


def test_adapters_change_the_same_layers_whatever_the_ranks() -> None:
    """Also if a rank has one of the groups of a projection, which could then be changed by itself."""

    class Rank(Parallel):
        def __init__(self, size: int) -> None:
            self.rank, self.size = 0, size

    spec = from_hf_config(SIZES | CHANGES | {"architectures": [ARCHITECTURE]}).layers[1].attention
    assert isinstance(spec, CompressedAttentionSpec)
    found = []
    for size in (1, spec.output_groups):
        layers = CompressedAttention(spec, SIZES["hidden_size"], Rank(size)).named_modules()
        found.append([name for name, layer in layers if isinstance(layer, Linear) and layer.may_have_pool])
    assert found[0] == found[1]
    assert "group_output" not in found[0]


def test_configs_as_published_have_ratios_and_a_number_of_layers_with_tables() -> None:
    config = SIZES | CHANGES | {"architectures": [ARCHITECTURE], "compress_rates": None, "partial_rotary_factor": None}
    modern = config | {"mlp_layer_types": ["hash_moe"] + ["moe"] * 3, "qk_rope_head_dim": 8}
    published = modern | {"layer_types": None, "mlp_layer_types": None, "num_hash_layers": 1}
    assert from_hf_config(published | {"compress_ratios": [0, 4, 128, 4, 0]}) == from_hf_config(modern)


def test_weights_as_published_are_in_fp8_and_those_of_experts_in_mxfp4(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "q_lora_rank": 32, "o_lora_rank": 16, "head_dim": 32}
    stored, plain = tmp_path / "stored", tmp_path / "plain"
    write("DeepSeek V4", plain, **sizes, partial_rotary_factor=0.25)
    quantized_checkpoints.write_deepseek_v4(plain, stored)
    file = stored / "model.safetensors"
    save_file(load_file(file) | {"mtp.0.attn.wkv.weight": torch.zeros(3)}, file, {"format": "pt"})
    tokens = torch.randint(0, 131, (60,), generator=torch.Generator().manual_seed(1))
    expected = on_ranks(1, partial(logits, configure(plain, max_model_len=64), tokens))[0]
    for tp in (1, 2):
        resolved = configure(stored, max_model_len=64, tensor_parallel_size=tp)
        for found in on_ranks(tp, partial(logits, resolved, tokens)):
            assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_a_checkpoint_may_have_the_names_that_transformers_writes(tmp_path: Path) -> None:
    model = write_model(ARCHITECTURE, SIZES | CHANGES, tmp_path)
    assert "model.hc_head.hc_fn" in load_file(tmp_path / "model.safetensors")
    tokens = torch.randint(0, 131, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    (found,) = on_ranks(1, partial(logits, configure(tmp_path, max_model_len=64), tokens))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_pages_are_those_of_blocks_of_tokens() -> None:
    memory = torch.arange(12 * 2 * 15.0).view(1, 12, 1, 2, 15)  # pages of 4 blocks, with 2 rows for 8 tokens each
    cache = CompressedCache(memory, kernels.page_rows(memory, 4, 0, 8, 3), kernels.page_rows(memory, 4, 24, 8, 5))
    assert cache.inputs is not None
    for block in (0, 4, 8):
        page = memory[0, block : block + 4].flatten()
        assert torch.equal(cache.tokens[0, block, 0], page[:24].view(8, 3))
        assert torch.equal(cache.inputs[0, block, 0], page[24:64].view(8, 5))
    assert cache.rows_of(torch.tensor([4 * 8 + 3, 8 * 8])).tolist() == [4 * 2 + 3, 8 * 2]
    assert cache.entry_slots(torch.tensor([5, 5, 6]), torch.tensor([3, 7, 15])).tolist() == [10, 11, 13]
    cache = cache._replace(keys=torch.zeros(1, 12, 1, 1, 7))
    assert cache.entries_of(torch.tensor([5, 6])).tolist() == [11, 13]  # of all 8 tokens of blocks 5 and 6


def test_a_few_tokens_at_once_compute_what_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("DeepSeek V4", tmp_path)
    config, tokens = configure(tmp_path, max_model_len=256), torch.arange(3, 103)
    (expected,) = on_ranks(1, partial(logits, config, tokens))
    sizes, attend = [], kernels.sparse_attention

    def counted(query: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(query))
        return attend(query, *rest)

    monkeypatch.setattr(attention_spec, "SCORES_AT_ONCE", 500)
    monkeypatch.setattr(kernels, "sparse_attention", counted)
    (found,) = on_ranks(1, partial(logits, config, tokens))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert 1 < max(sizes) < 100
