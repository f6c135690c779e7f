"""Models with sparse attention where the context is much longer than the selection, and their layouts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire.engine.architecture.families import from_hf_config
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.worker.kv_caches import allocate_caches
from tests.fakes.checkpoints import generate
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.families import CASES, SIZES, write
from tests.fakes.model_logits import CPU, configure
from tests.fakes.threads import ThreadExecutor

STEPS = 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tp", "pp"),
    [
        ("DeepSeek V3.2", 1, 1),
        ("GLM-5, shared selection", 2, 2),
        ("MiniMax-M3", 2, 2),
        ("GLM-5.3", 2, 2),
        ("Qwen4-Exp", 2, 2),
    ],
)
def test_a_long_context(case: str, tp: int, pp: int, tmp_path: Path) -> None:
    """The tokens equal transformers', however the prompt is divided, after a prefix hit and after preemption."""
    settings: dict[str, Any] = {"max_position_embeddings": 8192, "index_topk": 256, "index_n_heads": 8}
    if case == "MiniMax-M3":
        sparse = CASES[case][1]["sparse_attention_config"]
        settings = {
            "max_position_embeddings": 8192,
            "sparse_attention_config": sparse | {"sparse_block_size": 32, "sparse_topk_blocks": 8},
        }
    elif case == "Qwen4-Exp":
        settings = {"max_position_embeddings": 8192, "indexer_budget": 256}
    elif "text_config" in CASES[case][1]:
        settings = {"text_config": CASES[case][1]["text_config"] | settings}
    write(case, tmp_path, **settings)
    rng = random.Random(0)
    long = [rng.randrange(3, 130) for _ in range(4000)]
    prompts = [long, [*long[:3000], 7, 8, 9]]
    expected = generate(tmp_path, prompts, STEPS)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    config = configure(
        tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=4096, max_num_batched_tokens=700
    )
    with Ranks(config, ThreadExecutor(config)) as ranks:
        assert ranks.tokens([(prompt, params) for prompt in prompts], max_num_batched_tokens=700) == expected
        has_states = any(layer.state is not None for layer in config.model.architecture.layers)
        assert ranks.stats.prefix_hit_tokens >= (2048 if has_states else 2900)  # states are kept every 1024 tokens


def write_config(folder: Path, case: str, **changes: Any) -> None:
    architecture, differences = CASES[case]
    config = SIZES | differences | {"architectures": [architecture]} | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_the_plan_counts_what_is_allocated(tmp_path: Path) -> None:
    """Layers that share a selection keep no keys of an indexer."""
    write_config(tmp_path, "GLM-5, shared selection")
    for dtype in ("auto", "int8"):
        config = configure(tmp_path, load_format="dummy", kv_cache_dtype=dtype)
        caches = allocate_caches(config, 0, CPU)
        assert [cache.keys is not None for cache in caches] == [True, True, False, True]
        parts = [part for cache in caches for part in (cache.memory, cache.keys) if part is not None]
        assert len({part.data_ptr() for part in parts}) == 7
        size = sum(part[0, 0].nbytes for part in parts)
        assert size == MemoryPlan.of(config).kv_block[0]


def test_the_plan_counts_the_keys_of_groups(tmp_path: Path) -> None:
    """A token has its key and its gates, in float32."""
    write_config(tmp_path, "GLM-5.3")
    config = configure(tmp_path, load_format="dummy")
    caches = allocate_caches(config, 0, CPU)
    assert [cache.keys is not None for cache in caches] == [False, True, False, True]
    rows = [part[0, 0] for cache in caches for part in (cache.memory, cache.keys) if part is not None]
    assert {row.shape[-1] for row in rows} == {16, 24}
    assert sum(row.nbytes for row in rows) == MemoryPlan.of(config).kv_block[0]


@pytest.mark.parametrize("case", ["GLM-5.3", "Qwen4-Exp"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 is not supported for {}"),
        ({"block_size": 6}, "--block-size 6 is not a multiple of the 4 tokens that {}"),
    ],
)
def test_caches_that_cannot_have_groups_are_refused(
    settings: dict[str, Any], message: str, case: str, tmp_path: Path
) -> None:
    write_config(tmp_path, case)
    message = message.format(CASES[case][0])
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path, load_format="dummy", **settings)


def test_the_plan_counts_the_keys_of_blocks(tmp_path: Path) -> None:
    """Only layers with sparse attention have keys, beside the same keys and values as the others."""
    write_config(tmp_path, "MiniMax-M3")
    config = configure(tmp_path, load_format="dummy", tensor_parallel_size=2)
    caches = allocate_caches(config, 0, CPU)
    assert [cache.keys is not None for cache in caches] == [False, True, True, True]
    size = sum(part[0, 0].nbytes for cache in caches for part in (cache.keys,) if part is not None)
    size += sum(2 * cache.memory[0, 0].nbytes for cache in caches if cache.memory is not None)
    assert size == MemoryPlan.of(config).kv_block[0]


def test_stages_start_with_layers_that_select(tmp_path: Path) -> None:
    kinds = ["full", "full", "shared", "full", "shared", "shared", "shared", "full"]
    write_config(tmp_path, "GLM-5", num_hidden_layers=8, indexer_types=kinds)
    for stages, starts in ((1, [0]), (2, [0, 3]), (3, [0, 3, 7]), (4, [0, 1, 3, 7])):
        parallel = configure(tmp_path, load_format="dummy", pipeline_parallel_size=stages).parallel
        assert [stage.start for stage in parallel.stages] == starts
        assert parallel.stages[-1].stop == 8
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 5: a stage cannot start .* layers 0, 1, 3, 7"):
        configure(tmp_path, load_format="dummy", pipeline_parallel_size=5)
    with pytest.raises(ConfigError, match=r"--pipeline-layer-partition 4,4: a stage cannot start"):
        configure(tmp_path, load_format="dummy", pipeline_parallel_size=2, pipeline_layer_partition="4,4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": None}, "sparse attention .index_topk. needs q_lora_rank"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, "the first layer cannot share"),
        ({"indexer_types": ["full"]}, "full or shared for each of the 4 layers"),
        ({"index_topk_pattern": "FSXF"}, "full or shared for each of the 4 layers"),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than the 8 rotary features"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types .* for each of the 4 layers"),
    ],
)
def test_what_is_not_possible_is_refused(changes: dict[str, Any], message: str) -> None:
    architecture, differences = CASES["GLM-5"]
    with pytest.raises(ConfigError, match=message):
        from_hf_config(SIZES | differences | {"architectures": [architecture]} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_local_block": 0}, "0 local blocks among 4 of 6 tokens are not supported"),
        ({"sparse_local_block": 5}, "5 local blocks among 4 of 6 tokens are not supported"),
        ({"sparse_num_index_heads": 1}, "index_n_heads 1 is not supported; supported: 2"),
        ({"sparse_index_dim": 6}, "index_head_dim 6 is less than the 8 rotary features"),
        ({"sparse_init_block": 1}, "sparse_init_block 1 is not supported"),
        ({"sparse_score_type": "mean"}, "sparse_score_type 'mean' is not supported"),
        ({"use_sparse_attention": False}, "use_sparse_attention False is not supported"),
        ({"sparse_disable_index_value": [0, 1, 1, 0]}, "values of the indexer are not supported"),
        ({"sparse_attention_freq": [0, 1]}, "must be those of the 4 layers"),
    ],
)
def test_blocks_that_are_not_possible_are_refused(changes: dict[str, Any], message: str) -> None:
    architecture, differences = CASES["MiniMax-M3"]
    sparse = differences["sparse_attention_config"] | changes
    config = SIZES | differences | {"architectures": [architecture], "sparse_attention_config": sparse}
    with pytest.raises(ConfigError, match=message):
        from_hf_config(config)
