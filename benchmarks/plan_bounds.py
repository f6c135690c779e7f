"""The bounds of `quire plan` beside published rates: the reason for the constants in engine/config/achieved.py.

    .venv/bin/python -m benchmarks.plan_bounds

prints the table in docs/guides/parallelism.md. All rates are without speculative decoding.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.engine.config.layouts import layouts
from quire.engine.config.machine import NETWORK_GIGABYTES, describe
from quire.engine.config.options import EngineOptions
from tests.fakes import published

_VLLM = "https://buildkite.com/vllm/performance-benchmark/builds/9515"
_QWEN = "https://github.com/QwenLM/Qwen3/blob/main/docs/source/getting_started/speed_benchmark.md"
_GPUSTACK = "https://github.com/gpustack/gpustack/blob/main/docs/performance-lab/qwen3-8b/h100-latency.md"
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "exclude_modules": ["*self_attn*", "*mlp.gate", "lm_head"],
}


@dataclass(frozen=True)
class Row:
    """A published rate."""

    model: str
    """Folder of `tests.fakes.published_configs`."""
    gpus: str
    tokens_per_second: float
    """Of all requests together."""
    engine: str
    source: str
    weights: str = "bfloat16"
    requests: int = 1
    context: int = 1024
    """Tokens of context, on average."""
    nodes: int = 1
    layout: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None
    """In place of the model's own `quantization_config`."""


ROWS = (
    Row(
        "Llama-3.2-1B-Instruct", "H100", 678, "vLLM, SGLang", context=128,
        source="https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles",
    ),  # half of the memory's bandwidth, "at most"
    Row("Qwen3-8B", "H100", 568, "SGLang 0.5.3", requests=4, context=340, source=_GPUSTACK),  # median ITL 7.04 ms
    Row(
        "Qwen3-8B", "H100", 742, "SGLang 0.5.3", requests=4, context=340, source=_GPUSTACK,
        weights="fp8", quantization=_FP8,
    ),  # median ITL 5.39 ms
    Row("Meta-Llama-3-8B", "H200", 1229, "vLLM", requests=8, context=96, source=_VLLM),  # 128 tokens in 833.4 ms
    Row(
        "Mixtral-8x7B-v0.1", "2xH200", 534, "vLLM", requests=8, context=96, source=_VLLM,
        layout={"tensor_parallel_size": 2},
    ),  # 128 tokens in 1,917.4 ms
    Row(
        "Meta-Llama-3.1-70B", "4xH200", 493, "vLLM", requests=8, context=96, source=_VLLM,
        layout={"tensor_parallel_size": 4},
    ),  # 128 tokens in 2,077.5 ms
    Row(
        "Llama-3.1-70B-Instruct-FP8", "2xH100", 53.8, "NIM 1.8", context=5250, weights="fp8",
        source="https://docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance.html",
        layout={"tensor_parallel_size": 2},
    ),  # ITL 18.58 ms
    Row("Qwen3-30B-A3B", "H20", 137, "SGLang 0.4.6", source=_QWEN),
    Row(
        "Qwen3-235B-A22B", "8xH20", 74.5, "SGLang 0.4.6", source=_QWEN, layout={"tensor_parallel_size": 8},
    ),
    Row(
        "gpt-oss-120b", "A100-80G", 90, "vLLM", weights="mxfp4",
        source="https://github.com/vllm-project/vllm/issues/22331",
    ),
    Row(
        "DeepSeek-R1", "8xB200", 149, "TensorRT-LLM", context=2048, weights="nvfp4", quantization=_NVFP4,
        source="https://nvidia.github.io/TensorRT-LLM/blogs/tech_blog/"
        "blog1_Pushing_Latency_Boundaries_Optimizing_DeepSeek-R1_Performance_on_NVIDIA_B200_GPUs.html",
        layout={"tensor_parallel_size": 8, "enable_expert_parallel": True},
    ),  # 111 without MTP where it was 253 with it; later 340 with it
    Row(
        "DeepSeek-R1", "8xH100", 43.2, "SGLang", context=192, nodes=2, weights="fp8",
        source="https://github.com/tenstorrent/tt-inference-server/issues/356",
        layout={"tensor_parallel_size": 16},
    ),
)  # fmt: skip


def bound(row: Row) -> float:
    """Return the bound of `quire plan` on a row's tokens per second."""
    degrees = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    given = {**degrees, "enable_expert_parallel": False, **row.layout}
    machine = describe(row.gpus, row.nodes, NETWORK_GIGABYTES)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(published.FOLDER / row.model, folder, dirs_exist_ok=True)
        if row.quantization is not None:
            config = published.config(row.model) | {"quantization_config": row.quantization}
            Path(folder, "config.json").write_text(json.dumps(config))
        options = EngineOptions(model=folder, max_num_seqs=row.requests, max_model_len=8192, **given)
        [layout], refused = layouts(options, machine, given=given, input_len=row.context)
    assert not refused
    assert layout.estimate.rows == row.requests
    return layout.estimate.tokens_per_second


def main() -> None:
    """Print the table."""
    print("| model | GPUs | requests | published | engine | bound | published / bound |")
    print("|---|---|---:|---:|---|---:|---:|")
    shares = []
    for row in ROWS:
        most = bound(row)
        shares.append(row.tokens_per_second / most)
        gpus = f"{row.nodes} × {row.gpus.replace('x', ' × ')}" if row.nodes > 1 else row.gpus.replace("x", " × ")
        print(
            f"| {row.model} ({row.weights}) | {gpus} | {row.requests} | {row.tokens_per_second:,.4g} | "
            f"[{row.engine}]({row.source}) | {most:,.4g} | {shares[-1]:.0%} |"
        )
    shares.sort()
    median = shares[len(shares) // 2]
    print(f"\nPublished rates are {shares[0]:.0%} to {shares[-1]:.0%} of the bounds, {median:.0%} in the median.")


if __name__ == "__main__":
    main()
