"""Fused experts compared with one call per expert, for a layer like Qwen3-30B-A3B's, by number of tokens.

.venv/bin/python benchmarks/experts.py --threads 1 [--only int8] [--experts 64] [--hidden 1024] [--size 384] [--json]

Both alternate; times are minima over the rounds (with one thread, of its CPU time). Each run uses several copies of the
layer and several selections of experts, so that weights are read from memory as in a model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quire import kernels
from quire.kernels import linear
from quire.kernels.experts import ExpertByExpert, TiledExperts

COPIES = 4
TOKENS = (1, 8, 32, 512)
KINDS: dict[str, tuple[torch.dtype, kernels.Quantization | None, Callable[[Tensor], kernels.PackedLinear]]] = {
    "float32": (torch.float32, None, linear.TiledLinear),
    "bfloat16": (torch.bfloat16, None, linear.TiledLinear),
    "float16": (torch.float16, None, linear.TiledLinear),
    "int8": (torch.float32, "int8", linear.Int8Linear),
    "int4": (torch.float32, "int4", linear.Int4Linear),
}


def copies(
    kind: str, num_experts: int, hidden: int, size: int
) -> Iterator[tuple[kernels.PackedExperts, kernels.PackedExperts]]:
    """Layers, each fused and as a loop."""
    dtype, quantization, pack = KINDS[kind]
    for _ in range(COPIES):
        gate_up, down = torch.randn(num_experts, 2 * size, hidden), torch.randn(num_experts, hidden, size)
        gate_up, down = gate_up.to(dtype), down.to(dtype)
        loop = ExpertByExpert([*map(pack, gate_up)], [*map(pack, down)], "silu", None, None, gated=True)
        fused = TiledExperts(gate_up, down, "silu", None, None, True, quantization)
        yield fused, loop


def compare(kind: str, num_experts: int, hidden: int, size: int, top_k: int, turns: int) -> Iterator[dict[str, Any]]:
    layers = list(copies(kind, num_experts, hidden, size))
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    expert_bytes = sum(part.nbytes for part in layers[0][0].state(0))
    for tokens in TOKENS:
        inputs = [
            (
                torch.randn(tokens, hidden).to(KINDS[kind][0]),
                *kernels.route(torch.randn(tokens, num_experts), top_k, "softmax"),
            )
            for _ in layers
        ]
        best = [float("inf")] * 2
        for _ in range(turns):
            for which in range(2):
                begun = clock()
                for layer, arguments in zip(layers, inputs, strict=True):
                    layer[which](*arguments)
                best[which] = min(best[which], clock() - begun)
        read = sum(len(torch.unique(ids)) for _, _, ids in inputs) * expert_bytes
        yield {
            "kind": kind,
            "tokens": tokens,
            "fused_us": best[0] / COPIES * 1e6,
            "loop_us": best[1] / COPIES * 1e6,
            "time_ratio": best[0] / best[1],
            "weights_gb_per_s": read / best[0] / 1e9,
            "g_per_s": 6 * tokens * top_k * size * hidden * COPIES / best[0] / 1e9,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=[*KINDS])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    kernels.prepare("cpu")()
    torch.set_num_threads(arguments.threads)
    results = []
    for kind in arguments.only:
        sizes = (arguments.experts, arguments.hidden, arguments.size, arguments.top_k)
        for result in compare(kind, *sizes, arguments.turns):
            results.append(result)
            if not arguments.json:
                rates = f"{result['weights_gb_per_s']:5.1f} GB/s, {result['g_per_s']:4.0f} G/s"
                times = f"{result['fused_us']:7.0f} µs, loop {result['loop_us']:7.0f} µs; {result['time_ratio']:.2f}"
                print(f"{kind:9} {result['tokens']:4} tokens: {times} of its time; {rates}")
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
