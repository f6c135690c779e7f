"""A device whose memory is as good as full, and requests of every kind: nobody runs out of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.fakes.tokenizers import write_model

H100_SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 16_384,
}
"""Llama 3.1 8B's, but for most of its layers: a block takes little, so that the cache has many and all are used."""


def model(folder: Path, **shape: Any) -> str:
    config = json.loads((write_model(folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | shape))
    return str(folder)


def mixed(count: int, longest: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts from a token to `longest`, as many short as long ones; some begin alike; all that costs memory."""
    rng = random.Random(0)
    shared = [rng.randrange(300) for _ in range(longest // 4)]
    requests = []
    for number in range(count):
        prompt = [rng.randrange(300) for _ in range(int(longest ** rng.random()))]
        if number % 5 == 0:
            prompt = (shared + prompt)[:longest]
        kind: dict[str, Any] = [
            {"temperature": 0.0},
            {"top_p": 0.9, "top_k": 40},
            {"logprobs": 5, "repetition_penalty": 1.1},
            {"presence_penalty": 0.5, "frequency_penalty": 0.5, "min_p": 0.05},
            {"prompt_logprobs": 3} if number % 16 == 0 else {"logit_bias": {5: 2.0}},
        ][number % 5]
        limit = int(max(1, longest // 16) ** rng.random())
        requests.append((prompt, SamplingParams(max_tokens=limit, ignore_eos=True, seed=number, **kind)))
    return requests


def serve(folder: str, requests: list[tuple[list[int], SamplingParams]], **options: Any) -> None:
    """An error of any request comes out of it."""
    with LLM(folder, load_format="dummy", **options) as llm:
        results = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    for result, (_, params) in zip(results, requests, strict=True):
        assert result.outputs[0].finish_reason == "length"
        assert len(result.outputs[0].token_ids) == params.max_tokens


def test_requests_of_every_kind(tmp_path: Path) -> None:
    """The same as below, with little of everything."""
    folder = model(tmp_path, vocab_size=1000, max_position_embeddings=512)
    serve(folder, mixed(60, 400), device="cpu", kv_cache_memory_bytes=1 << 20, max_num_seqs=16)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible")
def test_ten_thousand_requests_where_five_percent_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # of the other tests; the engine's process is to compile
    folder = model(tmp_path, **H100_SHAPE)
    options = {
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.95,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
    }
    serve(folder, mixed(10_000, 8000), device="cuda", **options)
