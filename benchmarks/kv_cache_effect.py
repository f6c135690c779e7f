"""The gain of a second tensor-parallel rank when weights leave little memory for KV: more blocks and throughput.

.venv/bin/python benchmarks/kv_cache_effect.py --plot docs/pictures/kv_cache_effect.svg

Every worker has the same memory (--budget-mib) for weights, workspace and KV cache, like a GPU. With half of the
weights, many more blocks fit, so more requests run at once; a step costs about the same, as it reads the same weights.
The engines of both layouts are started in turn, with all processor cores, and run the same requests, submitted at once.
Weights are random; the answers of both layouts are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.engine.config.memory_plan import MemoryPlan, format_bytes
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from quire.server.cli.bench import plot

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LAYOUTS = (1, 2)
WEIGHTS, WORKSPACE, KV_CACHE, MEASURED = "#3d6f8e", "#b9b9b9", "#e3a857", "#3d6f8e"


@dataclass(frozen=True)
class Room:
    """The parts of a worker's budget, in bytes, and the resulting blocks and complete requests."""

    tensor_parallel_size: int
    weights: int
    workspace: int
    kv_cache: int
    blocks: int
    requests: float


def room_for(options: EngineOptions, budget: int, length: int) -> tuple[EngineOptions, Room]:
    """The options with the KV cache that fits `budget` bytes per worker besides weights and workspace.

    `length` is the prompt and output length of a request. Concurrency is limited to the requests that fit, so that none
    is preempted. Raises `ConfigError` if not even one fits.
    """
    sizes = MemoryPlan.of(resolve(options))
    left = budget - max(sizes.weights) - sizes.workspace
    if left <= 0:
        raise ConfigError(
            f"--budget-mib: weights {format_bytes(max(sizes.weights))} and workspace {format_bytes(sizes.workspace)} "
            f"of a worker of {options.tensor_parallel_size} leave nothing of {format_bytes(budget)}"
        )
    asked = replace(options, kv_cache_memory_bytes=left)
    config = resolve(asked)
    cache, row = config.cache, config.scheduler.max_num_batched_tokens
    requests = cache.num_blocks / cache.max_blocks(length, row)
    fitting = replace(asked, max_num_seqs=min(options.max_num_seqs, int(requests)))
    weights, tp = max(sizes.weights), options.tensor_parallel_size
    return fitting, Room(tp, weights, sizes.workspace, left, cache.num_blocks, requests)


def measure(options: EngineOptions, prompts: list[list[int]], num_output: int) -> tuple[float, list[list[int]]]:
    """Seconds for all prompts at once, and their answers, after startup and warm-up."""
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    with LLM(**asdict(options)) as llm:
        llm.generate([[3] * len(prompts[0])], params, use_tqdm=False)
        begun = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begun, [result.outputs[0].token_ids for result in results]


def draw(file: str, rooms: Sequence[Room], rates: Sequence[float], gains: Sequence[float]) -> None:
    """Plot worker memory, blocks and throughput of the layouts."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [f"TP {room.tensor_parallel_size}" for room in rooms]
    with matplotlib.rc_context(plot.STYLE):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        memory, blocks, speed = figure.subplots(1, 3)
        bottom = [0.0] * len(rooms)
        for label, color, values in (
            ("weights", WEIGHTS, [room.weights for room in rooms]),
            ("workspace", WORKSPACE, [room.workspace for room in rooms]),
            ("KV cache", KV_CACHE, [room.kv_cache for room in rooms]),
        ):
            sizes = [value / 2**20 for value in values]
            memory.bar(names, sizes, 0.6, bottom, color=color, label=label)
            bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
        memory.set(title="Memory of each worker, MiB", ylim=(0, 1.35 * max(bottom)))
        memory.legend(loc="upper center", ncols=3, fontsize=8, handlelength=1, columnspacing=1)
        more = [room.blocks / rooms[0].blocks for room in rooms]
        for axes, title, numbers, times, color in (
            (blocks, "Blocks of KV cache", [float(room.blocks) for room in rooms], more, KV_CACHE),
            (speed, "Output tokens a second", rates, gains, MEASURED),
        ):
            bars = axes.bar(names, numbers, 0.6, color=color)
            axes.bar_label(bars, [f"{n:,.0f}\n{x:.1f} ×" for n, x in zip(numbers, times, strict=True)], padding=2)
            axes.set(title=title, ylim=(0, 1.3 * max(numbers)))
        for axes in (memory, blocks, speed):
            axes.grid(axis="x", visible=False)
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.endswith(".svg") else None)


def table(rooms: Sequence[Room], rates: Sequence[float], gains: Sequence[float]) -> str:
    """The results as Markdown; `gains` are relative to the first layout."""
    lines = [
        "| | weights | workspace | KV cache | blocks | × | requests that fit | output tokens/s | × |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for room, rate, gain in zip(rooms, rates, gains, strict=True):
        sizes = " | ".join(format_bytes(size) for size in (room.weights, room.workspace, room.kv_cache))
        blocks = f"{room.blocks:,} | {room.blocks / rooms[0].blocks:.1f} | {room.requests:.1f}"
        lines.append(f"| TP {room.tensor_parallel_size} | {sizes} | {blocks} | {rate:.1f} | {gain:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-mib", type=int, default=163, help="memory per worker")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=176)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each measuring all layouts in turn")
    parser.add_argument("--plot", metavar="FILE", help="write a plot (.svg, .png)")
    options = parser.parse_args()
    if options.plot:
        plot.check(options.plot)
    # Spinning threads lose most on a busy machine, and a single rank has more of them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    length = options.input_len + options.output_len
    engine: dict[str, Any] = {
        "tokenizer": str(DEMO_MODEL),
        "load_format": "dummy",
        "device": "cpu",
        "dtype": options.dtype,
        "max_model_len": length,
        "max_num_seqs": options.requests,
        "max_num_batched_tokens": 128,
        "spec_method": "none",
        "enable_prefix_caching": False,
    }
    prompts = [
        [(31 * row + 7 * place) % 4000 + 5 for place in range(options.input_len)] for row in range(options.requests)
    ]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": options.layers}))
        layouts = [
            room_for(EngineOptions(model=name, tensor_parallel_size=tp, **engine), options.budget_mib << 20, length)
            for tp in LAYOUTS
        ]
        print(
            f"{format_bytes(options.budget_mib << 20)} for each worker; {options.requests} requests of {length} tokens",
            flush=True,
        )
        rates: list[list[float]] = [[] for _ in LAYOUTS]
        answers: list[list[list[int]]] = []
        for turn in range(options.rounds):
            for (asked, room), found in zip(layouts, rates, strict=True):
                seconds, tokens = measure(asked, prompts, options.output_len)
                found.append(options.requests * options.output_len / seconds)
                answers.append(tokens)
                print(f"round {turn + 1}, TP {room.tensor_parallel_size}: {found[-1]:.1f} tokens/s", file=sys.stderr)
    rooms, medians = [room for _, room in layouts], [statistics.median(found) for found in rates]
    gains = [statistics.median(a / b for a, b in zip(found, rates[0], strict=True)) for found in rates]
    print(table(rooms, medians, gains))
    alike = sum(len({tuple(tokens[row]) for tokens in answers}) == 1 for row in range(options.requests))
    print(f"{alike} of {options.requests} answers are identical in all rounds of both layouts")
    if options.plot:
        draw(options.plot, rooms, medians, gains)


if __name__ == "__main__":
    main()
