"""Mixed requests on a device whose memory is almost full must not run out of memory."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shapes import write_config, write_pair_tokenizer

from gpu.lab import Lab
from gpu.records import Check, Note, Record
from quire import LLM, SamplingParams
from quire.engine.config import devices

_SHARE = 0.95
_VOCABULARY = 300
"""The vocabulary of the prompts."""


def check(lab: Lab) -> Iterator[Record]:
    """Run mixed requests at once with 5 % of the device's memory left; any error ends the part."""
    count, longest = (60, 400) if lab.tiny else (2000 if lab.quick else 10_000, 8000)
    requests = mixed(count, longest)
    begun = time.perf_counter()
    with LLM(**_options(lab, longest)) as llm:
        yield Note(f"LLM loaded in {time.perf_counter() - begun:.1f} s")
        begun = time.perf_counter()
        results = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
        seconds = time.perf_counter() - begun
        free = devices.free_gpu_memory()[0] if lab.device == "cuda" else None
    outputs = [result.outputs[0] for result in results]
    wrong = [
        number
        for number, (output, (_, params)) in enumerate(zip(outputs, requests, strict=True))
        if output.finish_reason != "length" or len(output.token_ids) != params.max_tokens
    ]
    taken, given = sum(len(prompt) for prompt, _ in requests), sum(len(output.token_ids) for output in outputs)
    detail = f"{taken:,} tokens in, {given:,} out in {seconds:.1f} s"
    detail += "" if free is None else f"; {free / 2**20:,.0f} MiB of the device were free in the end"
    detail += f"; {len(wrong)} ended early, the first is number {wrong[0]}" if wrong else ""
    yield Check(
        f"{count:,} mixed requests of up to {longest:,} tokens in {_SHARE:.0%} of the memory", not wrong, detail
    )


def _options(lab: Lab, longest: int) -> dict[str, Any]:
    """Few layers make blocks small, so that the cache has many and all of them are used."""
    folder = lab.scratch / "memory"
    folder.mkdir(exist_ok=True)
    shape = replace(lab.shape, layers=2, positions=2 * longest)
    write_config(shape, folder)
    write_pair_tokenizer(folder, shape.vocabulary)
    options = {"model": str(folder), "load_format": "dummy", "device": lab.device, "dtype": lab.dtype}
    if lab.tiny:
        return {**options, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 16}
    return {**options, "gpu_memory_utilization": _SHARE, "max_num_seqs": 1024, "max_num_batched_tokens": 8192}


def mixed(count: int, longest: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to `longest` tokens, as many short as long, some with common prefixes and costly parameters."""
    rng = random.Random(0)
    shared = rng.choices(range(_VOCABULARY), k=longest // 4)
    requests = []
    for number in range(count):
        prompt = rng.choices(range(_VOCABULARY), k=int(longest ** rng.random()))
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
