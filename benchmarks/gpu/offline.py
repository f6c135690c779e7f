"""Throughput without HTTP, with the `LLM` class; and transformers' continuous batching with the same requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from gpu.lab import Lab
from gpu.records import Note, Record, Row
from quire import LLM, SamplingParams

_SHORT, _LONGER = 8, 40
"""Output tokens of the warm-up requests, from which the time of the measured ones is estimated."""
_SHARE = 0.9
"""The share of the remaining time that the measured requests may take."""


def measure(lab: Lab) -> Iterator[Record]:
    """Output tokens per second of as many requests as there is time for, submitted at once."""
    count, prompt, output = lab.sizes.offline
    streams = lab.sizes.streams
    begun = time.perf_counter()
    with LLM(**lab.engine_options(lab.model_folder())) as llm:
        yield Note(f"LLM loaded in {time.perf_counter() - begun:.1f} s")
        _generate(llm, lab.prompts(streams, prompt, seed=0), _SHORT)  # compiles the remaining kernels
        warm = lab.prompts(streams, prompt, seed=1)
        short = _generate(llm, warm, _SHORT)
        longer = _generate(llm, warm, _LONGER)  # whose prompts are in the prefix cache
        expected = short + longer / _LONGER * (output - _SHORT)
        chosen = fitting(count, streams, expected, lab.seconds_left)
        prompts = lab.prompts(chosen, prompt, seed=2)
        seconds = _generate(llm, prompts, output)
    rounds = -(-chosen // streams)
    share = chosen / (rounds * streams)  # some streams are empty in the last round
    best = lab.floor(lambda floor: share * floor.throughput(streams, prompt, output))
    formula = f"{chosen} requests of {prompt} in, {output} out in {seconds:.1f} s"
    formula += "" if chosen == count else f" (of {count}: no time for more)"
    formula += f"; floor: {rounds} × (one prefill of {streams}, then their decode steps)"
    yield Row("offline", chosen * output / seconds, best, formula)
    yield Note(f"so many requests are sent over HTTP, too: {chosen}", {"requests": chosen})


def fitting(count: int, streams: int, expected: float, left: float) -> int:
    """The number of `count` requests that fit in `left` seconds, if one request per stream takes `expected` seconds."""
    return max(streams, min(count, int(_SHARE * left / max(expected, 1e-3)) * streams))


def _generate(llm: LLM, prompts: list[list[int]], output: int) -> float:
    """Seconds until all have `output` tokens."""
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    begun = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    assert all(len(result.outputs[0].token_ids) == output for result in results)
    return seconds


def transformers(lab: Lab) -> Iterator[Record]:
    """transformers' `generate_batch` on one round of the same requests, which has no tail; sampled like ours."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    _, prompt, output = lab.sizes.offline
    streams = lab.sizes.streams
    folder = lab.model_folder()
    auto: Any = AutoModelForCausalLM
    with torch.device(lab.device):
        config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
        model = auto.from_config(config, dtype=getattr(torch, lab.dtype), attn_implementation="sdpa").eval()
    wanted: Any = GenerationConfig
    asked = wanted(max_new_tokens=output, do_sample=True, eos_token_id=-1, pad_token_id=0)
    batching: Any = ContinuousBatchingConfig
    how = batching(num_blocks=64, max_batch_tokens=64) if lab.tiny else batching(max_memory_percent=0.7)
    inputs = lab.prompts(streams, prompt, seed=3)

    results = model.generate_batch(inputs, generation_config=asked, continuous_batching_config=how)
    reported = sum(len(result.generated_tokens) for result in results.values())
    assert reported == streams * output, f"{reported} tokens instead of {streams * output}"
    lives = [result.lifespan for result in results.values()]
    seconds = max(end for _, end in lives) - min(begin for begin, _ in lives)  # without its setup time
    theirs = reported / seconds
    ours = lab.values.get("offline")
    formula = f"{streams} requests of {prompt} in, {output} out in {seconds:.1f} s: {theirs:,.0f} tok/s"
    if ours is None:
        raise RuntimeError(f"there is no offline figure to hold {theirs:,.0f} tok/s against")
    yield Row("transformers", ours / theirs, None, formula)
