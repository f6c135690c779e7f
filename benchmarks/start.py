"""The time from `quire serve` to the first answer, by phases, with and without packed weights on disk.

.venv/bin/python benchmarks/start.py --base ../quire-before
.venv/bin/python benchmarks/start.py --base ../quire-before --models demo --rounds 3 --first

Each round starts every model once in each way, in turns: the checkout `--base`, with its own .venv, if one is given;
this checkout without a packed cache (`cold`: it packs the weights, and writes them); and again with it (`warm`). With
`--first`, each checkout also starts with no kernels compiled, as after its installation (`first`, `base first`).
Processor time is the sum over all processes of the server until the first answer. Files come from the page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import shapes

from quire.server.cli.bench import startup

_ROOT = Path(__file__).parents[1]
_MODELS: dict[str, tuple[str, ...]] = {
    "demo": (),
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}
"""Flags of the bundled model, and of Qwen2.5-0.5B's shape in each precision."""
_SETTLE_SECONDS = 0.3
"""Pause between starts: the system frees the memory of the last one meanwhile."""


@dataclass(frozen=True)
class Start:
    """Seconds to the first token: by the clock, of the processors, and of the phases that the server logs."""

    wall: float
    processor: float
    phases: dict[str, float]


def start(checkout: Path, arguments: tuple[str, ...], caches: dict[str, str], *, keeps: bool) -> Start:
    """Start a server, ask for one token, and stop it, when the packed weights are on disk if it `keeps` them.

    `caches` are the variables that name its caches.

    Raises `RuntimeError` with its output if it does not start.
    """
    begun = time.perf_counter()
    command = [str(checkout / ".venv/bin/quire"), "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
    environment = os.environ | caches
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stderr is not None
        lines: list[str] = []
        phases: dict[str, float] = {}
        try:
            for line in server.stderr:
                lines.append(line)
                if found := startup.READY_LINE.search(line):
                    phases = startup.read_phases(found[1], found[2])
                elif found := startup.SERVING_LINE.search(line):
                    served = time.perf_counter()
                    record = asyncio.run(startup.ask(found[1]))
                    answered = record.arrivals[0]
                    spent = sum(map(_processor_seconds, _family(server.pid)))
                    phases[startup.FIRST_TOKEN] = answered - served
                    while keeps and not list(Path(caches["QUIRE_PACKED_CACHE"]).glob("*.safetensors")):
                        time.sleep(_SETTLE_SECONDS)
                    return Start(answered - begun, spent, phases)
            raise RuntimeError("".join(lines))
        finally:
            server.terminate()
            server.communicate()


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "float32", "int8"], choices=_MODELS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--base", type=Path, help="another checkout of Quire, to compare with")
    parser.add_argument("--first", action="store_true", help="start with no kernels compiled, too")
    parser.add_argument("--cache", type=Path, help="folder of the checkpoint (default: ~/.cache/quire-compare)")
    options = parser.parse_args()
    checkpoints = (options.cache or Path.home() / ".cache" / "quire-compare").absolute()
    print(f"{_processor()}, {os.cpu_count()} cores; QUIRE_CPU_ISA={os.environ.get('QUIRE_CPU_ISA', 'native')}")
    for model in options.models:
        folder = [] if model == "demo" else [str(shapes.make_checkpoint(shapes.SHAPES["qwen2.5-0.5b"], checkpoints))]
        starts: dict[str, list[Start]] = {}
        for number in range(options.rounds + 1):
            with tempfile.TemporaryDirectory() as folder_of_round:
                caches = Path(folder_of_round)
                ways = {"base": options.base.absolute()} if options.base is not None else {}
                ways |= {"cold": _ROOT, "warm": _ROOT}
                if options.first:
                    ways |= {"first": _ROOT} | ({"base first": ways["base"]} if "base" in ways else {})
                for way, checkout in ways.items():
                    variables = {"QUIRE_PACKED_CACHE": str(caches / "packed")}
                    if way.endswith("first"):
                        names = {"QUIRE_PACKED_CACHE": "packed", "QUIRE_KERNEL_CACHE": "kernels"}
                        variables = {name: str(caches / way / each) for name, each in names.items()}
                    keeps = checkout == _ROOT and model != "demo"
                    found = start(checkout, (*folder, *_MODELS[model]), variables, keeps=keeps)
                    time.sleep(_SETTLE_SECONDS)
                    if number:  # the first round fills the page cache
                        starts.setdefault(way, []).append(found)
        print(f"\n{model}: {' '.join(_MODELS[model]) or 'no flags'}")
        print(_table(starts), flush=True)


def _table(starts: dict[str, list[Start]]) -> str:
    """Medians of each way, and minima and ratios of the totals."""
    names = dict.fromkeys(name for found in starts.values() for each in found for name in each.phases)
    lines = [f"{'seconds (median)':<24}" + "".join(f"{way:>12}" for way in starts)]
    for name in names:
        medians = [statistics.median(each.phases.get(name, 0.0) for each in found) for found in starts.values()]
        lines.append(f"{name:<24}" + "".join(f"{median:12.2f}" for median in medians))
    for name in ("wall", "processor"):
        seconds = {way: [float(getattr(each, name)) for each in found] for way, found in starts.items()}
        for text, pick in (("median", statistics.median), ("least", min)):
            lines.append(f"{f'{name}, {text}':<24}" + "".join(f"{pick(values):12.2f}" for values in seconds.values()))
        if "base" in seconds:
            ratios = [statistics.median(map(float.__truediv__, of, seconds["base"])) for of in seconds.values()]
            lines.append(f"{f'{name}, of base':<24}" + "".join(f"{ratio:12.2f}" for ratio in ratios))
    return "\n".join(lines)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
