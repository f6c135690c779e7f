"""Attention on one CPU core with each type of KV cache: decodes and a chunk of a prompt.

.venv/bin/python benchmarks/kv_attention.py [--turns 5] [--model NAME]

Times are CPU time, minima over turns in which all types run, one after another. The cost of writing is that of a token:
its keys and values, and for int4 its share of its block's codes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire import kernels

CPU = torch.device("cpu")
MODELS = {"Qwen2.5-0.5B": (14, 2, 64), "Qwen3-0.6B": (16, 8, 128), "Llama 3.1 8B": (32, 8, 128)}
"""Query heads, KV heads and features of a head, in a layer."""
TYPES = {"bfloat16": 16, "int8": 16, "fp8": 16, "int4": 16, "int4, blocks of 32": 32}
"""Type of the cache → tokens of a block."""
STEPS = {
    "32 decodes, context 300": (32, 300, 1),
    "8 decodes, context 4,000": (8, 4000, 1),
    "1 decode, context 32,000": (1, 32000, 1),
    "chunk of 256, context 4,000": (1, 3744, 256),
}
"""Requests, tokens computed before, and tokens of each in the step."""


def step(
    sizes: tuple[int, int, int], name: str, block: int, requests: int, before: int, count: int
) -> Callable[[], Any]:
    """A function that computes attention of a step in one layer."""
    heads, kv_heads, size = sizes
    width = -(-(before + count) // block)
    dtype = kernels.kv_cache_dtype(name.partition(",")[0])
    cache = kernels.allocate_kv_cache(1, requests * width, kv_heads, block, size, dtype, CPU)[0]
    table = torch.randperm(requests * width).view(requests, width)
    for slots in torch.split(torch.arange(requests * width * block), 1 << 12):
        write(sizes, cache, slots, block)
    query = torch.randn(requests * count, heads, size).bfloat16()
    ends, starts = torch.full((requests,), before + count), torch.arange(requests + 1) * count
    batch = query, cache, table, ends, starts, size**-0.5
    if dtype != kernels.kv_cache_dtype("int4"):
        return lambda: kernels.paged_attention(*batch)
    first = before // block
    recent = torch.randn(2, requests * (width - first), kv_heads, block, size).bfloat16()
    positions = torch.arange(before, before + count) - first * block
    own = (torch.arange(requests)[:, None] * (width - first) * block + positions).flatten()
    return lambda: kernels.int4_attention(*batch, recent, own)


def write(sizes: tuple[int, int, int], cache: Tensor, slots: Tensor, block: int) -> None:
    """Write random keys and values."""
    heads, kv_heads, size = sizes
    key, value = torch.randn(2, len(slots), kv_heads, size).bfloat16()
    given = torch.empty(len(slots), heads, size).bfloat16(), key, value, torch.empty(len(slots), 0)
    if cache.dtype != kernels.kv_cache_dtype("int4"):
        kernels.rotary_write_kv(*given, cache, slots)
        return
    recent = torch.empty(2, -(-len(slots) // block), kv_heads, block, size).bfloat16()
    own = torch.arange(len(slots))
    kernels.rotary_write_kv(*given, recent, own)
    kernels.quantize_kv(recent, cache, own, slots)


def writing(sizes: tuple[int, int, int], name: str, block: int, turns: int) -> float:
    """Seconds for a token in one layer."""
    slots, dtype = torch.arange(256), kernels.kv_cache_dtype(name.partition(",")[0])
    cache = kernels.allocate_kv_cache(1, len(slots) // block, sizes[1], block, sizes[2], dtype, CPU)[0]
    return min(seconds(lambda: write(sizes, cache, slots, block)) for _ in range(turns + 1)) / len(slots)


def seconds(work: Callable[[], Any]) -> float:
    """Of CPU time."""
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, action="append")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kernels.prepare(CPU)()
    print("| µs in a layer | step |", " | ".join(TYPES), "|")
    print("|---|---|" + "---|" * len(TYPES))
    for model in args.model or MODELS:
        for label, sizes in STEPS.items():
            works = [step(MODELS[model], name, block, *sizes) for name, block in TYPES.items()]
            turns = [[seconds(work) for work in works] for _ in range(args.turns + 1)]
            best = [min(times) * 1e6 for times in zip(*turns, strict=True)]
            print(f"| {model} | {label} |", " | ".join(f"{each:,.0f}" for each in best), "|", flush=True)
        costs = [writing(MODELS[model], name, block, args.turns) for name, block in TYPES.items()]
        print(f"| {model} | writing a token |", " | ".join(f"{each * 1e6:.2f}" for each in costs), "|", flush=True)


if __name__ == "__main__":
    main()
