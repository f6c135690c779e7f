"""Linear layers of a decoder layer with adapters compared with the same layers without.

.venv/bin/python benchmarks/low_rank.py --threads 1 [--dtype bfloat16] [--model qwen3-1.7b] [--rank 16]
    [--targets qv] [--quantization none] [--json]

A layer's four linear layers with int8 weights: for 32 rows without an adapter (of 32 that are loaded; once the host
knows this, once only the operations do, as in a captured step that is for rows with adapters, too), with the same one,
or each with its own; and for one row and a prompt of 512 rows with one. All alternate; times are minima over the
rounds (with one thread, of its CPU time). Each round uses several copies of the layer, so that weights and adapters are
read from memory as in a model. `share` is the speed that remains of that without adapters. Rank rows are read by
torch's sum, for comparison.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire import kernels
from quire.kernels import AdapterRows, LowRankPool, isa

COPIES = 6
SLOTS = 32
SIZES = {"qwen2.5-0.5b": (896, 896, 128, 4864), "qwen3-1.7b": (2048, 2048, 1024, 6144)}
"""Features of the residual stream, queries, keys (as many as values) and of the feed-forward layer, by model."""
CASES = (
    ("none", 32, 0, False),
    ("none, captured", 32, 0, True),
    ("one", 32, 1, True),
    ("8", 32, 8, True),
    ("32", 32, 32, True),
    ("one, prompt", 512, 1, True),
    ("one, alone", 1, 1, True),
)
"""Name, rows, the number of adapters that these have, and whether the host believes that they may have any."""


@dataclass
class Layer:
    """The linear layers of a decoder layer and their adapters."""

    sizes: tuple[int, int, int, int]
    qkv: kernels.PackedLinear
    output: kernels.PackedLinear
    gate_up: kernels.PackedLinear
    down: kernels.PackedLinear
    pools: list[LowRankPool]
    """In this order."""
    dtype: torch.dtype

    @property
    def products(self) -> tuple[kernels.PackedLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def inputs(self, rows: int) -> list[Tensor]:
        hidden, queries, _, inner = self.sizes
        return [torch.randn(rows, size).to(self.dtype) for size in (hidden, queries, hidden, inner)]

    def base(self, inputs: list[Tensor]) -> None:
        for product, given in zip(self.products, inputs, strict=True):
            product(given, None)

    def adapted(self, inputs: list[Tensor], rows: AdapterRows) -> None:
        for product, given, pool in zip(self.products, inputs, self.pools, strict=True):
            product.with_low_rank(given, None, pool, rows) if len(pool.a) else product(given, None)

    def rank_rows(self, num_adapters: int) -> Iterator[Tensor]:
        """What the first adapters' rank rows have, as contiguous tensors."""
        for pool in self.pools:
            number = len(pool.a) * num_adapters // SLOTS
            yield pool.a[:number]
            yield pool.b[:number]


def make_layer(args: argparse.Namespace) -> Layer:
    (hidden, queries, kv, inner), dtype = SIZES[args.model], getattr(torch, args.dtype)
    quantization = None if args.quantization == "none" else args.quantization

    def weight(outs: int, ins: int) -> Tensor:
        return torch.randn(outs, ins).to(dtype)

    pools = []
    every = ((hidden, (queries, kv, kv)), (queries, (hidden,)), (hidden, (inner, inner)), (inner, (hidden,)))
    for number, (ins, widths) in enumerate(every):
        parts = [part for part in range(len(widths)) if args.targets == "all" or (number == 0 and part != 1)]
        rows = SLOTS * args.rank * len(parts)
        pool = LowRankPool.allocate(
            SLOTS, rows, ins, widths, getattr(torch, args.pool or args.dtype), torch.device("cpu"), args.rank
        )
        for slot in range(SLOTS):
            changes = [
                (torch.randn(args.rank, ins), torch.randn(width, args.rank)) if part in parts else None
                for part, width in enumerate(widths)
            ]
            pool.assign(slot, slot * args.rank * len(parts), changes)
        pools.append(pool)
    return Layer(
        SIZES[args.model],
        kernels.pack_linear(weight(queries + 2 * kv, hidden), quantization),
        kernels.pack_linear(weight(hidden, queries), quantization),
        kernels.pack_gated(weight(2 * inner, hidden), "silu", quantization),
        kernels.pack_linear(weight(hidden, inner), quantization),
        pools,
        dtype,
    )


def compare(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    layers = [make_layer(args) for _ in range(COPIES)]
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for name, count, num_adapters, may_have in CASES:
        inputs = layers[0].inputs(count)
        slots = torch.arange(count) % num_adapters if num_adapters else torch.full((count,), -1)
        rows = AdapterRows.of(slots, SLOTS, may_have)
        parts = [part for layer in layers for part in layer.rank_rows(num_adapters) if len(part)]
        rivals: list[list[Callable[[], object]]] = [
            [partial(layer.base, inputs) for layer in layers],
            [partial(layer.adapted, inputs, rows) for layer in layers],
            [part.sum for part in parts],
        ]
        best = [float("inf")] * len(rivals)
        for _ in range(args.turns):
            for which, calls in enumerate(rivals):
                begun = clock()
                for call in calls:
                    call()
                best[which] = min(best[which], (clock() - begun) / COPIES)
        yield {
            "adapters": name,
            "rows": count,
            "base_ms": best[0] * 1e3,
            "adapted_ms": best[1] * 1e3,
            "share": best[0] / best[1],
            "rank_rows_mb": sum(part.nbytes for part in parts) / COPIES / 1e6,
            "floor_ms": best[2] * 1e3,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--model", choices=[*SIZES], default="qwen2.5-0.5b", help="whose layer has these sizes")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of activations")
    parser.add_argument("--pool", choices=["float32", "bfloat16", "float16"], help="type of adapters, if it is another")
    parser.add_argument("--quantization", choices=["int8", "int4", "none"], default="int8")
    parser.add_argument("--targets", choices=["all", "qv"], default="all", help="the linear layers that are changed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kernels.prepare("cpu")()
    torch.set_num_threads(args.threads)
    if not args.json:
        print(f"QUIRE_CPU_ISA {isa.chosen().name}, {args.threads} threads, {args.dtype}", flush=True)
    results = []
    for result in compare(args):
        results.append(result)
        if not args.json:
            floor = f"{result['rank_rows_mb']:6.2f} MB of rank rows, read in {result['floor_ms']:.3f} ms"
            times = (
                f"{result['base_ms']:8.3f} ms without, {result['adapted_ms']:8.3f} ms with, share {result['share']:.3f}"
            )
            print(f"{result['adapters']:15}{result['rows']:4} rows: {times}; {floor}", flush=True)
    if args.json:
        print(json.dumps({"isa": isa.chosen().name, "results": results}, indent=2))


if __name__ == "__main__":
    main()
