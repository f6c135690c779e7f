"""The limits of this machine, memory bandwidth and matmul rates, and the floors that follow from them.

.venv/bin/python benchmarks/machine.py --threads 2
.venv/bin/python benchmarks/machine.py --threads 1 --device cuda    # for the GPU
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import Shape

WEIGHT_BYTES = {"f32": 4.0, "16-bit": 2.0, "int8": 1.0, "4-bit": 0.5, "q4_k_m": 0.5}
_SIZE = 4096
"""Rows and columns of the multiplied matrices, far larger than the caches in float32."""
_GPU_SIZES = (4096, 8192, 16384)
"""Sizes to try on a GPU, whose best size is not known."""
_FEW = 32
_GIB = 2**30
_RUNS = 10
"""Consecutive launches on a GPU, so that launch overhead does not count."""


@dataclass(frozen=True)
class Machine:
    """Measured limits. Bytes and operations per second; a multiplication and an addition are two operations."""

    cpu: str
    """The name of the processor or GPU."""
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
        """The highest measured bandwidth, since a floor must be a lower bound."""
        return max(self.copy, self.read)

    def rate(self, precision: str) -> float:
        """The fastest matmul usable for `precision`: narrow weights may be widened, and inputs be rounded to 8 bits."""
        usable = {"f32": ("f32",), "16-bit": ("16-bit", "f32"), "int8": ("int8",)}
        names = usable.get(precision, ("int8", "16-bit", "f32"))
        return max(max(self.large.get(name, 0.0), self.few.get(name, 0.0)) for name in names)


@dataclass(frozen=True)
class Floor:
    """Lower bounds in seconds of the steps of a shape on a machine, each the larger of two bounds.

    Bytes / bandwidth: every weight once per step, and the KV cache of every decoding request once, both in the bytes of
    the precision, but no weight in more than the two that the checkpoint has. Operations / matmul rate: two per weight
    and token (weights of the head only for tokens that are followed by a sampled one), and four per pair of tokens,
    head and channel in attention.
    """

    machine: Machine
    shape: Shape
    precision: str

    def step(self, tokens: int, sampled: int, context: int, attended: int) -> float:
        """Seconds of a step of `tokens` tokens that reads `context` cached tokens and attends `attended` pairs of
        tokens."""
        shape, width = self.shape, WEIGHT_BYTES[self.precision]
        moved = min(width, WEIGHT_BYTES["16-bit"]) * (shape.layer_weights + shape.head_weights)
        moved += width * context * shape.kv_numbers
        operations = 2 * (tokens * shape.layer_weights + sampled * shape.head_weights)
        operations += shape.attention_operations(attended)
        return max(moved / self.machine.bandwidth, operations / self.machine.rate(self.precision))

    def prefill(self, tokens: int, requests: int = 1) -> float:
        """Seconds of a step that prefills `requests` prompts of `tokens` tokens each."""
        return self.step(requests * tokens, requests, 0, requests * tokens * (tokens + 1) // 2)

    def decode(self, context: int, requests: int = 1) -> float:
        """Seconds of one decode step of `requests` requests with `context` tokens each."""
        return self.step(requests, requests, requests * context, requests * context)

    def throughput(self, requests: int, prompt: int, output: int) -> float:
        """Output tokens per second of `requests` at once: one prefill, then one decode step per further token."""
        steps = sum(self.decode(prompt + done, requests) for done in range(1, output))
        return requests * output / (self.prefill(prompt, requests) + steps)


def measure(threads: int, seconds: float = 0.5, device: str = "cpu", *, small: bool = False) -> Machine:
    """`IncrementalParser`, measured in a separate process, so that its memory is freed."""
    command = [sys.executable, __file__, "--threads", str(threads), "--seconds", str(seconds), "--json"]
    command += ["--device", device, *["--small"] * small]
    return Machine(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def best(machines: list[Machine]) -> Machine:
    """The best of several measurements, figure by figure, since other programs can only slow a machine down."""

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


def fastest(work: Callable[[], object], seconds: float, device: str = "cpu") -> float:
    """The time of the shortest run within `seconds` (at least three runs), after a warm-up run.

    On a GPU, runs are launched back to back and timed by its own clock, so that launches count only if they are slower.
    """
    once = functools.partial(_on_gpu, work) if device != "cpu" else functools.partial(_on_cpu, work)
    work()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        times.append(once())
    return min(times)


def _on_cpu(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _on_gpu(work: Callable[[], object]) -> float:
    torch: Any = importlib.import_module("torch")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(_RUNS):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _RUNS


def _measure(threads: int, seconds: float, device: str, size: int) -> Machine:
    """Copy and read bandwidth; `size` is the number of bytes."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(threads)
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    matrix = source.view(-1, 8192)
    vector = torch.ones(8192, device=device)
    copy = 2 * size / fastest(functools.partial(target.copy_, source), seconds, device)
    reads = [source.sum, functools.partial(torch.mv, matrix, vector)]
    read = max(size / fastest(work, seconds, device) for work in reads)
    del source, target, matrix, reads
    sides = _GPU_SIZES if device != "cpu" else (_SIZE if size == _GIB else _SIZE // 8,)
    large, few = (_rates(torch, sides, rows, seconds, device) for rows in (None, _FEW))
    name = torch.cuda.get_device_name() if device != "cpu" else cpu_name()
    return Machine(name, threads, copy, read, large, few)


def _rates(torch: Any, sides: Sequence[int], rows: int | None, seconds: float, device: str) -> dict[str, float]:
    """The best matmul rates of `rows` rows (None: the size of the matrix) by square matrices, by precision."""
    rates: dict[str, float] = {}
    for side in sides:
        count = rows or side
        for precision, candidates in _matmuls(torch, count, side, device).items():
            for work in candidates:
                try:
                    rate = 2 * count * side * side / fastest(work, seconds / len(sides), device)
                except (
                    RuntimeError,
                    AttributeError,
                    NotImplementedError,
                ):  # not supported by this machine or this torch
                    continue
                rates[precision] = max(rates.get(precision, 0.0), rate)
    return rates


def _matmuls(torch: Any, rows: int, side: int, device: str) -> dict[str, list[Callable[[], object]]]:
    """torch's implementations of multiplying `rows` rows by a constant square matrix."""
    halves, mkldnn, onednn = torch.bfloat16, torch.ops.mkldnn, torch.ops.onednn
    x, w = torch.randn(rows, side, device=device), torch.randn(side, side, device=device)
    linear = torch.nn.functional.linear
    x16, w16 = x.to(halves), w.to(halves)
    if device != "cpu":
        full = [lambda: linear(x, w)] if side == min(_GPU_SIZES) else []  # slow, and not useful for a 16-bit model
        return {"f32": full, "16-bit": [lambda: linear(x16, w16)]}
    x8 = torch.randint(0, 255, (rows, side), dtype=torch.uint8)
    w8 = torch.randint(-127, 127, (side, side), dtype=torch.int8)
    scales, zeros = torch.ones(side), torch.zeros(side, dtype=torch.int32)
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


def cpu_name() -> str:
    """The name of the CPU and its instruction sets relevant to matmuls."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    name = re.search(r"model name\s*: (.*)", text)
    flags = set(re.findall(r"\b(avx2|avx512f|avx512_vnni|avx512_bf16|avx_vnni|amx_int8|amx_bf16)\b", text))
    limit = f"; limited to {isa}" if (isa := os.environ.get("QUIRE_CPU_ISA")) else ""
    return f"{name[1] if name else platform.processor()} ({', '.join(sorted(flags)) or 'no wide vectors'}{limit})"


def provenance() -> list[str]:
    """Markdown that says how figures were measured: the command, the commit, the date and the processor."""
    cpu = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    wanted = ("Model name", "CPU(s):", "Thread(s)", "L2", "L3", "CPU family", "Model:")
    commit = ["git", "describe", "--always", "--dirty"]
    described = subprocess.run(commit, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    command = shlex.join(re.sub(r"(^|=)/.*", r"\1PATH", part) for part in sys.argv[1:])
    shown = [line for line in cpu.splitlines() if line.startswith(wanted)]
    name = Path(sys.argv[0]).name
    return ["```", f"benchmarks/{name} {command}    # {described}, {time.strftime('%Y-%m-%d')}", *shown, "```"]


def describe(machine: Machine) -> list[str]:
    """One line per figure."""
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--small", action="store_true", help="sizes that fit the caches: a smoke test")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    machine = _measure(options.threads, options.seconds, options.device, _GIB >> 6 if options.small else _GIB)
    print(json.dumps(dataclasses.asdict(machine)) if options.json else "\n".join(describe(machine)))


if __name__ == "__main__":
    main()
