"""Quire's packed matmuls compared with reading their weights and with torch's and oneDNN's, for Qwen2.5-0.5B's sizes.

.venv/bin/python benchmarks/matmul.py --threads 1 [--only int8] [--rows 1 32] [--head] [--json]
QUIRE_CPU_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \\
    .venv/bin/python benchmarks/matmul.py

All alternate; times are minima over the rounds (with one thread, of its CPU time), for one layer, or for the output
head. Each round uses several copies of the layer, so that weights are read from memory as in a model. The floor of few
rows is the time in which torch's sum reads the same packed weights.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quire import kernels
from quire.kernels import isa, linear, packed_state
from quire.kernels.quantized import VALUES

LAYERS = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
"""Output and input features."""
HEAD = ((151936, 896),)
SQUARE = ((4096, 4096),)
COPIES = 6


class TorchInt4:
    """torch's matmul of bfloat16 by 4-bit weights in groups of 128."""

    def __init__(self, weight: Tensor) -> None:
        numbers = torch.randint(0, 16, weight.shape, dtype=torch.int32)
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 2)
        self._scales = torch.rand(weight.shape[1] // 128, len(weight), 2, dtype=torch.bfloat16)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self._weight, 128, self._scales)
        return out


Product = Callable[[Tensor, Tensor | None], Tensor]
KINDS: dict[str, tuple[torch.dtype, kernels.Quantization | None, Callable[[Tensor], Product]]] = {
    "float32": (torch.float32, None, linear.OneDNNLinear),
    # With AVX2 only, oneDNN does not support bfloat16.
    "bfloat16": (torch.bfloat16, None, linear.OneDNNLinear if isa.has("avx512f") else linear.PlainLinear),
    "float16": (torch.float16, None, linear.PlainLinear),
    "int8": (torch.float32, "int8", linear.Int8OneDNNLinear),
    "int4": (torch.float32, "int4", TorchInt4),
}
"""Type of x, quantization, and the product to compare with."""
CODED = {"int4 codes": "int4", "nf4 codes": "nf4", "int8 codes": "int8", "fp8 codes": "fp8"}
"""Kinds of weights in few bits, in groups of GROUP, which are compared with the product of bfloat16."""
GROUP = 128


def random_codes(values: str, outs: int, ins: int) -> kernels.QuantizedWeight:
    codes = torch.randint(0, min(120, len(VALUES[values])), (outs, ins), dtype=torch.uint8)
    return kernels.QuantizedWeight(values, torch.float32, codes, torch.rand(outs, ins // GROUP))


def bfloat16_product(product: kernels.PackedLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    return product(x.bfloat16(), bias)


def compare(
    kind: str, shapes: tuple[tuple[int, int], ...], copies: int, rows_of: list[int], turns: int
) -> Iterator[dict[str, Any]]:
    ours: Sequence[kernels.PackedLinear]
    theirs: Sequence[Product]
    if kind in CODED:
        dtype = torch.float32
        weights = [torch.empty(shape, dtype=torch.uint8) for shape in shapes * copies]
        ours = [kernels.pack_linear(random_codes(CODED[kind], *weight.shape)) for weight in weights]
        halves = [kernels.pack_linear(torch.randn(weight.shape).bfloat16()) for weight in weights]
        theirs = [functools.partial(bfloat16_product, product) for product in halves]
    else:
        dtype, quantization, pack = KINDS[kind]
        weights = [torch.randn(shape).to(dtype) for shape in shapes * copies]
        ours = [kernels.pack_linear(weight, quantization) for weight in weights]
        theirs = [pack(weight) for weight in weights]
    reads = [part.flatten().view(torch.float32).sum for product in ours for part in packed_state.tensors_of(product)]
    operations = 2 * sum(weight.numel() for weight in weights) / copies
    moved = sum(part.nbytes for product in ours for part in packed_state.tensors_of(product)) / copies
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for rows in rows_of:
        inputs = [torch.randn(rows, columns).to(dtype) for _, columns in shapes * copies]
        rivals: tuple[Sequence[Callable[..., object]], ...] = (ours, theirs, reads)
        best = [float("inf")] * len(rivals)
        for _ in range(turns):
            for which, calls in enumerate(rivals):
                arguments: Any = [(x, None) for x in inputs] if calls is not reads else [()] * len(reads)
                begun = clock()
                for call, each in zip(calls, arguments, strict=True):
                    call(*each)
                best[which] = min(best[which], (clock() - begun) / copies)
        yield {
            "kind": kind,
            "rows": rows,
            "ms": best[0] * 1e3,
            "gb_per_s": moved / best[0] / 1e9,
            "g_per_s": operations * rows / best[0] / 1e9,
            "read_ms": best[2] * 1e3,
            "other": "bfloat16" if kind in CODED else type(theirs[0]).__name__,
            "other_ms": best[1] * 1e3,
            "time_ratio": best[0] / best[1],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--only", choices=[*KINDS, *CODED], nargs="+", default=[*KINDS, *CODED])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--square", action="store_true", help="4096 x 4096 instead of a layer")
    parser.add_argument("--head", action="store_true", help="the output head instead of a layer")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    kernels.prepare("cpu")()
    torch.set_num_threads(arguments.threads)
    if not arguments.json:
        print(f"QUIRE_CPU_ISA {isa.chosen().name}, {arguments.threads} threads", flush=True)
    results = []
    for kind in arguments.only:
        shapes, copies = (HEAD, 1) if arguments.head else (SQUARE, COPIES) if arguments.square else (LAYERS, COPIES)
        for result in compare(kind, shapes, copies, arguments.rows, arguments.turns):
            results.append(result)
            if not arguments.json:
                figures = f"{result['ms']:8.3f} ms, {result['gb_per_s']:5.1f} GB/s, {result['g_per_s']:4.0f} G/s"
                read = f"{result['ms'] / result['read_ms']:5.2f} x reading"
                other = f"{result['other']} {result['other_ms']:8.3f} ms, {result['time_ratio']:.2f} of its time"
                print(f"{kind:11}{result['rows']:4} rows: {figures}, {read}; {other}", flush=True)
    if arguments.json:
        print(json.dumps({"isa": isa.chosen().name, "results": results}, indent=2))


if __name__ == "__main__":
    main()
