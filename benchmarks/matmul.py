"""Quire's packed matmuls compared with oneDNN's, by number of rows, for the layers of Qwen2.5-0.5B.

.venv/bin/python benchmarks/matmul.py --threads 1 [--only int8] [--json]
QUIRE_CPU_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 .venv/bin/python benchmarks/matmul.py

Without AVX-512, oneDNN does not support bfloat16, and Quire's is compared with tiles widened to float32; oneDNN's int8
then has 7-bit weights, Quire's 8-bit ones.

Both alternate; times are minima over the rounds (with one thread, of its CPU time). Each run uses several copies of the
layers, so that weights are read from memory as in a model.
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
from quire.kernels import isa, linear

LAYERS = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
"""Output and input features."""
COPIES = 6
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
KINDS: dict[
    str, tuple[torch.dtype, Callable[[Tensor], kernels.PackedLinear], Callable[[Tensor], kernels.PackedLinear]]
] = {
    "float32": (torch.float32, linear.TiledLinear, linear.OneDNNLinear),
    "bfloat16": (
        torch.bfloat16,
        linear.TiledLinear,
        linear.OneDNNLinear if isa.has("avx512f") else linear.WidenedLinear,
    ),
    "int8": (torch.float32, linear.Int8Linear, linear.Int8OneDNNLinear),
}


def compare(kind: str, turns: int) -> Iterator[dict[str, Any]]:
    dtype, *packs = KINDS[kind]
    weights = [torch.randn(shape, dtype=dtype) for shape in LAYERS * COPIES]
    ours, theirs = ([pack(weight) for weight in weights] for pack in packs)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for rows in ROWS:
        inputs = [torch.randn(rows, columns).to(dtype) for _, columns in LAYERS * COPIES]
        best = [float("inf")] * 2
        for _ in range(turns):
            for which, products in enumerate((ours, theirs)):
                begun = clock()
                for product, x in zip(products, inputs, strict=True):
                    product(x, None)
                best[which] = min(best[which], clock() - begun)
        operations = 2 * rows * sum(weight.numel() for weight in weights)
        rates = [operations / seconds / 1e9 for seconds in best]
        yield {
            "kind": kind,
            "other": type(theirs[0]).__name__,
            "rows": rows,
            "g_per_s": rates[0],
            "other_g_per_s": rates[1],
            "time_ratio": best[0] / best[1],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=[*KINDS])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    kernels.prepare("cpu")()
    torch.set_num_threads(arguments.threads)
    results = []
    for kind in arguments.only:
        for result in compare(kind, arguments.turns):
            results.append(result)
            if not arguments.json:
                rates = f"{result['g_per_s']:6.0f} G/s, {result['other']} {result['other_g_per_s']:6.0f} G/s"
                print(f"{kind:9} {result['rows']:4} rows: {rates}; {result['time_ratio']:.2f} of its time")
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
