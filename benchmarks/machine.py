"""What this machine can do at most: memory bandwidth and matmul rates, and the floors that follow from them.

.venv/bin/python benchmarks/machine.py --threads 2
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import Shape

WEIGHT_BYTES = {"f32": 4, "16-bit": 2, "int8": 1}
_SIZE = 4096
"""Rows and columns of the matrices that are multiplied: far larger than the caches in float32."""
_FEW = 32
_GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Measured limits. Bytes and operations per second; a multiplication and an addition are two operations."""

    cpu: str
    threads: int
    copy: float
    """Bytes read plus bytes written."""
    read: float
    large: dict[str, float]
    """Precision (f32, 16-bit, int8) → matmul rate at thousands of rows."""
    few: dict[str, float]
    """The same at 32 rows, as in a decode step of 32 requests, where the weights come from memory too."""

    @property
    def bandwidth(self) -> float:
        """The best that memory gave, however it was asked: a floor must not lie above what can be done."""
        return max(self.copy, self.read)

    def rate(self, precision: str) -> float:
        """The fastest matmul that may serve `precision`: 16-bit weights may be widened and multiplied in float32."""
        names = ("16-bit", "f32") if precision == "16-bit" else (precision,)
        return max(max(self.large.get(name, 0.0), self.few.get(name, 0.0)) for name in names)


@dataclass(frozen=True)
class Floor:
    """The least seconds that a shape's steps take on a machine, each the larger of two bounds.

    Bytes over bandwidth: every weight once a step, and the KV cache of every decoding request once, both in the bytes
    of the precision. Operations over matmul rate: two for each weight and token, the head's weights only for tokens
    that are followed by a sampled one, and four for each pair of tokens, head and channel in attention.
    """

    machine: Machine
    shape: Shape
    precision: str

    def step(self, tokens: int, sampled: int, context: int, attended: int) -> float:
        """Seconds of a step over `tokens` tokens; `context` cached tokens are read, `attended` pairs of tokens met."""
        shape, width = self.shape, WEIGHT_BYTES[self.precision]
        moved = width * (shape.layer_weights + shape.head_weights + context * shape.kv_numbers)
        operations = 2 * (tokens * shape.layer_weights + sampled * shape.head_weights)
        operations += shape.attention_operations(attended)
        return max(moved / self.machine.bandwidth, operations / self.machine.rate(self.precision))

    def prefill(self, tokens: int, requests: int = 1) -> float:
        """Seconds until `requests` prompts of `tokens` tokens each have their first token, all in one step."""
        return self.step(requests * tokens, requests, 0, requests * tokens * (tokens + 1) // 2)

    def decode(self, context: int, requests: int = 1) -> float:
        """Seconds of one decode step of `requests` requests with `context` tokens each."""
        return self.step(requests, requests, requests * context, requests * context)

    def throughput(self, requests: int, prompt: int, output: int) -> float:
        """Output tokens per second of `requests` at once: one prefill, then a decode step for each further token."""
        steps = sum(self.decode(prompt + done, requests) for done in range(1, output))
        return requests * output / (self.prefill(prompt, requests) + steps)


def measure(threads: int, seconds: float = 0.5) -> Machine:
    """`Machine`, measured in a process of its own, so that nothing of it stays in memory."""
    command = [sys.executable, __file__, "--threads", str(threads), "--seconds", str(seconds), "--json"]
    return Machine(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def best(machines: list[Machine]) -> Machine:
    """The best of several measurements, figure by figure: other programs can only slow a machine down."""

    def table(name: str) -> dict[str, float]:
        tables = [getattr(machine, name) for machine in machines]
        return {key: max(found[key] for found in tables if key in found) for found in tables for key in found}

    return dataclasses.replace(
        machines[0],
        copy=max(machine.copy for machine in machines),
        read=max(machine.read for machine in machines),
        large=table("large"),
        few=table("few"),
    )


def _fastest(work: Callable[[], object], seconds: float) -> float:
    """The shortest of the runs that fit into `seconds`, at least three, after one that is not counted."""
    work()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def _measure(threads: int, seconds: float) -> Machine:
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(threads)
    source = torch.ones(_GIB // 4)
    target = torch.zeros_like(source)
    size = source.numel() * 4
    matrix = source.view(-1, 8192)
    vector = torch.ones(8192)
    copy = 2 * size / _fastest(functools.partial(target.copy_, source), seconds)
    reads = [source.sum, functools.partial(torch.mv, matrix, vector)]
    read = max(size / _fastest(work, seconds) for work in reads)
    del source, target, matrix, reads
    rates: dict[int, dict[str, float]] = {}
    for rows in (_SIZE, _FEW):
        rates[rows] = {}
        for precision, candidates in _matmuls(torch, rows).items():
            for work in candidates:
                try:
                    rate = 2 * rows * _SIZE * _SIZE / _fastest(work, seconds)
                except (RuntimeError, AttributeError, NotImplementedError):  # not on this CPU or in this torch
                    continue
                rates[rows][precision] = max(rates[rows].get(precision, 0.0), rate)
    return Machine(_cpu(), threads, copy, read, rates[_SIZE], rates[_FEW])


def _matmuls(torch: Any, rows: int) -> dict[str, list[Callable[[], object]]]:
    """The ways that torch has to multiply `rows` rows with a matrix that stays."""
    halves, mkldnn, onednn = torch.bfloat16, torch.ops.mkldnn, torch.ops.onednn
    x, w = torch.randn(rows, _SIZE), torch.randn(_SIZE, _SIZE)
    linear = torch.nn.functional.linear
    x16, w16 = x.to(halves), w.to(halves)
    x8 = torch.randint(0, 255, (rows, _SIZE), dtype=torch.uint8)
    w8 = torch.randint(-127, 127, (_SIZE, _SIZE), dtype=torch.int8)
    scales, zeros = torch.ones(_SIZE), torch.zeros(_SIZE, dtype=torch.int32)
    packed: dict[str, Any] = {}

    def prepacked(key: str, value: Any, weight: Any) -> object:
        if key not in packed:
            packed[key] = mkldnn._reorder_linear_weight(weight, rows)
        return mkldnn._linear_pointwise(value, packed[key], None, "none", [], "")

    def quantized() -> object:
        if "int8" not in packed:
            packed["int8"] = onednn.qlinear_prepack(w8, None)
        return onednn.qlinear_pointwise(
            x8, 1.0, 128, packed["int8"], scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return {
        "f32": [lambda: linear(x, w), lambda: prepacked("f32", x, w)],
        "16-bit": [lambda: linear(x16, w16), lambda: prepacked("16-bit", x16, w16)],
        "int8": [quantized],
    }


def _cpu() -> str:
    """The CPU's name and those of its abilities that matrices care for."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    name = re.search(r"model name\s*: (.*)", text)
    flags = set(re.findall(r"\b(avx2|avx512f|avx512_vnni|avx512_bf16|avx_vnni|amx_int8|amx_bf16)\b", text))
    return f"{name[1] if name else platform.processor()} ({', '.join(sorted(flags)) or 'no wide vectors'})"


def describe(machine: Machine) -> list[str]:
    """One line a figure."""
    lines = [f"{machine.cpu}, {machine.threads} threads"]
    lines.append(f"memory: copy {machine.copy / 1e9:.1f} GB/s (read + written), read {machine.read / 1e9:.1f} GB/s")
    for precision, rate in machine.large.items():
        few = machine.few.get(precision, 0.0)
        lines.append(f"matmul {precision}: {rate / 1e9:.0f} G operations/s large, {few / 1e9:.0f} at {_FEW} rows")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    machine = _measure(options.threads, options.seconds)
    print(json.dumps(dataclasses.asdict(machine)) if options.json else "\n".join(describe(machine)))


if __name__ == "__main__":
    main()
