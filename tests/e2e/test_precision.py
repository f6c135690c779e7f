"""The demo model answers right at every precision that is served on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams

QUESTIONS = {
    "How do I serve a model on two nodes with 8 GPUs each?": "--tensor-parallel-size 8 --pipeline-parallel-size 2",
    "What is tensor parallelism?": "splits every layer over several devices",
    "Which flag sets the port?": "`--port` sets the HTTP port",
}


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"quantization": "int8"},
        {"quantization": "int8", "dtype": "bfloat16", "kv_cache_dtype": "int8"},
        {"quantization": "int4", "kv_cache_dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"quantization": "int8", "kv_cache_dtype": "int4", "tensor_parallel_size": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_answers_are_right(options: dict[str, Any]) -> None:
    with LLM(device="cpu", **options) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        results = llm.chat(chats, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    for result, expected in zip(results, QUESTIONS.values(), strict=True):
        assert expected in result.outputs[0].text
