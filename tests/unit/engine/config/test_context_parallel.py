"""Which models' ranks can divide the tokens of KV blocks, what that saves, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.config import devices
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.floors import estimate
from quire.engine.config.machine import describe
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from tests.fakes.published import FOLDER


@pytest.fixture(autouse=True)
def _large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_host_memory", lambda: 1 << 44)


def configured(name: str, tp: int, context: int, **options: Any) -> EngineConfig:
    plain: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 32}
    options = plain | options
    options |= {"tensor_parallel_size": tp, "decode_context_parallel_size": context}
    return resolve(EngineOptions(model=str(FOLDER / name), device="cpu", **options))


@pytest.mark.parametrize(
    ("name", "tp", "context", "options"),
    [
        ("Qwen3-235B-A22B", 8, 2, {}),
        ("DeepSeek-V2-Lite", 8, 8, {"kv_cache_dtype": "int8"}),
        ("Qwen3-Next-80B-A3B-Instruct", 16, 4, {}),
        ("Mistral-7B-v0.1", 16, 2, {"max_model_len": 4096}),  # no window hides any key
    ],
)
def test_the_same_memory_has_as_many_times_the_tokens(
    name: str, tp: int, context: int, options: dict[str, Any]
) -> None:
    whole, divided = configured(name, tp, 1, **options), configured(name, tp, context, **options)
    assert divided.cache.num_blocks // context in range(whole.cache.num_blocks - 64, whole.cache.num_blocks + 1)
    assert MemoryPlan.of(whole).kv_block == tuple(context * size for size in MemoryPlan.of(divided).kv_block)
    assert MemoryPlan.of(divided).workspace > MemoryPlan.of(whole).workspace
    assert f"divided by {context})" in plan_text(divided)


def test_a_rank_reads_its_own_part_of_selected_rows() -> None:
    """The rows of longer contexts take no time off a step of sparse attention."""
    config, machine = configured("DeepSeek-V3.2", 8, 8, max_model_len=65536), describe("8xH200", 1, 50.0)
    short, long = (estimate(config, machine, length).decode_one.parts["bandwidth"] for length in (1 << 12, 1 << 16))
    assert short < long < 1.1 * short


@pytest.mark.parametrize(
    ("name", "tp", "context", "options", "text"),
    [
        ("Qwen3-235B-A22B", 8, 3, {}, "must divide the 8 ranks of a stage"),
        ("Qwen3-235B-A22B", 8, 2, {"block_size": 15}, "must divide the 15 tokens of a block"),
        ("Qwen3-235B-A22B", 8, 4, {}, "with 4 KV heads on 8 ranks .*, 2 ranks have the same one"),
        ("Qwen3-235B-A22B", 4, 2, {}, "with 4 KV heads on 4 ranks .*, no two ranks have the same one"),
        ("MiniMax-M3", 8, 2, {}, "sparse attention over KV heads is not supported"),
        ("DeepSeek-V4-Flash", 8, 8, {}, "compressed attention is not supported"),
        ("gpt-oss-20b", 16, 2, {}, "a sliding window is not supported"),
        ("Llama-4-Scout-17B-16E-Instruct", 8, 2, {}, "chunked attention is not supported"),
        ("falcon-rw-1b", 32, 2, {}, "a bias by the distance of keys is not supported"),
        ("mamba-130m-hf", 2, 2, {}, "it caches no keys and values"),
        ("bge-m3", 2, 2, {}, "it caches no keys and values"),
    ],
)
def test_what_is_not_supported_is_refused(name: str, tp: int, context: int, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"--decode-context-parallel-size {context} .*{text}"):
        configured(name, tp, context, **options)


def test_ranks_with_the_same_weights_need_less_memory_for_a_step() -> None:
    whole, divided = (
        configured("Qwen3-235B-A22B", 4, 1, prefill_context_parallel_size=shares, max_num_batched_tokens=8192)
        for shares in (1, 2)
    )
    assert divided.parallel.world_size == 8
    assert MemoryPlan.of(divided).weights == MemoryPlan.of(whole).weights
    assert MemoryPlan.of(divided).kv_block == MemoryPlan.of(whole).kv_block
    assert MemoryPlan.of(divided).workspace < MemoryPlan.of(whole).workspace
    assert divided.has_layout_of(divided)
    assert not divided.has_layout_of(whole)
    text = plan_text(divided)
    assert "tensor parallel 4 × prefill context parallel 2 × pipeline parallel 1 = 8 ranks" in text
    assert "stage 0 (ranks 0-7)" in text
    nodes = {"nnodes": 2, "master_addr": "10.0.0.1", "cluster_token": "x" * 16}
    across = plan_text(configured("Qwen3-235B-A22B", 4, 1, prefill_context_parallel_size=2, **nodes))
    assert "tensor parallel inside a host over shared memory; prefill context parallel across hosts" in across


def test_each_rank_computes_all_tokens_in_recurrent_layers() -> None:
    """So less of a hybrid's prompt is divided, and more is sent: inputs, and sums of the results of `-tp`."""
    machine, ratios, sent = describe("8xH100", 1, 50.0), list[float](), list[float]()
    for name in ("Qwen3-8B", "Nemotron-H-8B-Base-8K"):
        options = {"max_model_len": 8192, "max_num_batched_tokens": 8192}
        configs = [configured(name, 2, 1, prefill_context_parallel_size=shares, **options) for shares in (1, 4)]
        whole, divided = (estimate(config, machine, 4096).ttft.parts for config in configs)
        ratios.append(whole["compute"] / divided["compute"])
        sent.append(divided["communication"] / whole["communication"])
    assert 3.5 < ratios[0] < 4
    assert 1.5 < ratios[1] < 2.5
    assert sent[0] < 0.6 < sent[1]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("Qwen3-235B-A22B", {"tensor_parallel_size": 8, "decode_context_parallel_size": 2}, "context-parallel-size 2;"),
        ("Qwen3-235B-A22B", {"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ("Qwen3-235B-A22B", {"distributed_executor_backend": "ray"}, "--distributed-executor-backend ray"),
        ("Qwen3-235B-A22B", {"kv_cache_dtype": "int4"}, "--kv-cache-dtype int4"),
        ("gemma-3-4b-it", {}, "image tokens that attend to later ones .*--language-model-only"),
        ("mamba-130m-hf", {}, "it has no attention"),
        ("DeepSeek-V4-Flash", {}, "compressed attention is not supported"),
        ("MiniMax-M3", {"language_model_only": True}, "an indexer of blocks or groups of tokens is not supported"),
        ("bge-m3", {}, "it is an embedding model"),
    ],
)
def test_which_steps_cannot_be_divided(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"--prefill-context-parallel-size 2 .*{text}"):
        resolve(
            EngineOptions(
                model=str(FOLDER / name),
                device="cpu",
                load_format="dummy",
                kv_cache_memory_bytes=1 << 32,
                **{"prefill_context_parallel_size": 2} | options,
            )
        )
