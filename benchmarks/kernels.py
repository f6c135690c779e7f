"""CPU kernels compared with the reference at the sizes of Qwen2.5-0.5B, and of DeepSeek-V4-Flash for its own
operations; attention also with the machine's floor.

.venv/bin/python benchmarks/kernels.py --threads 2 [--only attention] [--json]

Times are minima over repeats, and with one thread its CPU time, so that on a shared machine they exclude waiting.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quire import kernels
from quire.kernels import reference

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, BLOCK = 14, 2, 64, 896, 4864, 16
CPU = torch.device("cpu")
GROUPS = "attention", "elementwise", "deepseek_v4", "sampling"


@dataclass(frozen=True)
class Machine:
    copy_gb_s: float
    read_gb_s: float
    f32_gflop_s: float


@dataclass(frozen=True)
class Result:
    name: str
    us: float
    reference_us: float
    floor_us: float | None = None
    """The larger of bytes / read bandwidth and operations / matmul rate."""


def fastest(work: Callable[[], Any], seconds: float) -> float:
    """Seconds of the fastest run within the time limit, of at least three."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begun = clock()
        work()
        times.append(clock() - begun)
    return min(times)


def measure(seconds: float) -> Machine:
    source, target = torch.ones(1 << 25), torch.ones(1 << 25)
    square = torch.randn(1536, 1536)
    return Machine(
        copy_gb_s=2 * source.nbytes / fastest(lambda: target.copy_(source), seconds) / 1e9,
        read_gb_s=source.nbytes / fastest(source.sum, seconds) / 1e9,
        f32_gflop_s=2 * len(square) ** 3 / fastest(lambda: square @ square, seconds) / 1e9,
    )


class Bench:
    def __init__(self, machine: Machine, seconds: float) -> None:
        self._machine, self._seconds = machine, seconds

    def compare(self, label: str, name: str, *arguments: Any, floor_s: float | None = None) -> Result:
        mine, oracle = getattr(kernels, name), getattr(reference, name)
        return Result(
            label,
            fastest(lambda: mine(*arguments), self._seconds) * 1e6,
            fastest(lambda: oracle(*arguments), self._seconds / 4) * 1e6,
            None if floor_s is None else floor_s * 1e6,
        )

    def attention(self) -> Iterator[Result]:
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            for count, context, queries in (
                (1, 300, 1),
                (1, 4000, 1),
                (32, 300, 1),
                (32, 4000, 1),
                (1, 0, 512),
                (1, 3500, 512),
            ):
                length = context + queries
                width = -(-length // BLOCK)
                cache = kernels.allocate_kv_cache(1, count * width, KV_HEADS, BLOCK, HEAD_DIM, dtype, CPU)[0]
                keys = torch.randn(2, cache[0, :, 0, :, 0].numel(), KV_HEADS, HEAD_DIM)
                reference.write_kv(keys[0], keys[1], cache, torch.arange(keys.shape[1]))
                multiplications = 2 * count * HEADS * HEAD_DIM * (context * queries + queries * (queries + 1) // 2)
                row_bytes = cache.shape[4] * cache.element_size()
                floor_s = max(
                    count * length * 2 * KV_HEADS * row_bytes / (self._machine.read_gb_s * 1e9),
                    2 * multiplications / (self._machine.f32_gflop_s * 1e9),
                )
                what = f"prefill {queries}" if queries > 1 else f"decode x{count}"
                yield self.compare(
                    f"attention {str(dtype)[6:]}, {what}, context {context}",
                    "paged_attention",
                    torch.randn(count * queries, HEADS, HEAD_DIM),
                    cache,
                    torch.randperm(count * width).view(count, width),
                    torch.full((count,), length),
                    torch.arange(count + 1) * queries,
                    HEAD_DIM**-0.5,
                    floor_s=floor_s,
                )

    def elementwise(self) -> Iterator[Result]:
        weight = torch.ones(HIDDEN)
        for tokens in (1, 32, 512):
            x, gates = torch.randn(tokens, HIDDEN), torch.randn(tokens, 2 * INTERMEDIATE)
            qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
            heads = qkv.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], dim=1)
            cache = kernels.allocate_kv_cache(1, 64, KV_HEADS, BLOCK, HEAD_DIM, torch.float32, CPU)[0]
            slots, turns = torch.randperm(64 * BLOCK)[:tokens], torch.randn(tokens, HEAD_DIM)
            yield self.compare(f"rms_norm, {tokens} tokens", "rms_norm", x, weight, 1e-6)
            yield self.compare(f"add_rms_norm, {tokens} tokens", "add_rms_norm", x, x.clone(), weight, 1e-6)
            yield self.compare(f"rotary_write_kv, {tokens} tokens", "rotary_write_kv", *heads, turns, cache, slots)
            yield self.compare(f"act_mul silu, {tokens} tokens", "act_mul", gates, "silu")

    def deepseek_v4(self) -> Iterator[Result]:
        streams, hidden, half = 4, 4096, torch.bfloat16
        function, base = torch.randn(24, streams * hidden) / 128, torch.randn(24)
        for tokens in (1, 32, 512):
            x, output = torch.randn(tokens, streams * hidden).to(half), torch.randn(tokens, hidden).to(half)
            given = x, function, base, base[:3], streams, 1e-6, 1e-6, 20
            yield self.compare(f"mhc_pre, {tokens} tokens", "mhc_pre", *given)
            weights = kernels.mhc_pre(*given)[1:]
            yield self.compare(f"mhc_post, {tokens} tokens", "mhc_post", output, x, *weights)
        for ratio, head_dim, width in ((4, 512, 1024), (4, 128, 256), (128, 512, 512)):
            inputs = torch.randn(1, 64, 1, BLOCK, 2 * width).to(half)
            entries = torch.zeros(1, 64, 1, 4, head_dim, dtype=half)
            bias, table = torch.randn(ratio, width), torch.randperm(64)[None]
            for tokens, length, what in (
                (1, 1023, "no group ends"),
                (1, 1024, "a group ends"),
                (512, 1024, "512 tokens"),
            ):
                yield self.compare(
                    f"compress_tokens, {ratio} to {head_dim}, {what}",
                    "compress_tokens",
                    inputs,
                    bias,
                    torch.ones(head_dim, dtype=half),
                    1e-6,
                    torch.randn(tokens, 64),
                    entries,
                    torch.arange(tokens),
                    table,
                    torch.tensor([length]),
                    torch.tensor([0, tokens]),
                    table,
                )

    def sampling(self) -> Iterator[Result]:
        filters: dict[str, dict[str, float]] = {
            "greedy": {"temperature": 0.0},
            "plain": {},
            "min_p 0.05": {"min_p": 0.05},
            "top_k 50": {"top_k": 50},
            "top_p 0.95": {"top_p": 0.95},
            "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
        }
        for vocab in (32_000, 151_936):
            for rows in (1, 32):
                logits = torch.randn(rows, vocab) * 3
                for label, changed in filters.items():
                    controls: dict[str, float] = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **changed}
                    columns: list[Tensor] = [
                        torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
                        for name, value in controls.items()
                    ]
                    numbers = torch.arange(rows)
                    name = f"sample, {rows} x {vocab}, {label}"
                    yield self.compare(name, "sample", logits, *columns, numbers, numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--only", choices=GROUPS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    kernels.prepare("cpu")()
    machine = measure(options.seconds)
    if not options.json:
        print(
            f"{options.threads} threads: copy {machine.copy_gb_s:.1f} GB/s, read {machine.read_gb_s:.1f} GB/s, "
            f"f32 matmul {machine.f32_gflop_s:.0f} GFLOP/s"
        )
    bench, results = Bench(machine, options.seconds), []
    for group in GROUPS:
        if options.only not in (None, group):
            continue
        for result in getattr(bench, group)():
            results.append(result)
            if not options.json:
                floor = f"{result.floor_us:10.1f} floor" if result.floor_us is not None else ""
                ratio = result.reference_us / result.us
                print(
                    f"{result.name:46}{result.us:10.1f} us{result.reference_us:12.1f} reference{ratio:8.1f}x{floor}",
                    flush=True,
                )
    if options.json:
        rows = [asdict(result) | {"ratio": result.reference_us / result.us} for result in results]
        print(json.dumps({"threads": options.threads, "machine": asdict(machine), "results": rows}))


if __name__ == "__main__":
    main()
