"""Two ranks with one thread each compared with one rank with two threads: decode and prefill, also with gloo.

.venv/bin/python benchmarks/tensor_parallel.py --dtype float32

The model has random weights in the shape of Qwen2.5-0.5B with a vocabulary of 32,000. All layouts are loaded at once
and alternate, so that other load on the machine affects all equally.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from quire import kernels
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.distributed.cpu_communicator import CpuParallel
from quire.engine.distributed.parallel_state import connect
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker.model_runner import ModelRunner

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONTEXT, BLOCK = 64, 16
"""The initial context of each decoding request, in tokens."""


def serve(config: EngineConfig, rank: int, init_method: str, threads: int, pipe: Connection) -> None:
    """Receives plans and sends seconds, and those of its processor; a bool selects shared memory or gloo."""
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    ready = kernels.prepare("cpu")
    links = connect(config.parallel, rank, init_method, cpu)
    runner = ModelRunner(config, rank, links, cpu)
    ready()
    links.finalize()
    memory = links.tp.memory if isinstance(links.tp, CpuParallel) else None
    pipe.send(memory is not None)
    while (message := pipe.recv()) is not None:
        if isinstance(message, bool):
            assert isinstance(links.tp, CpuParallel)
            links.tp.memory = memory if message else None
            continue
        begun, worked = time.perf_counter(), time.process_time()
        runner.launch(message).result()
        pipe.send((time.perf_counter() - begun, time.process_time() - worked))
    links.close()


class Layout:
    """The ranks of one layout."""

    def __init__(self, folder: Path, ranks: int, threads: int, options: dict[str, Any]) -> None:
        options = {"tensor_parallel_size": ranks} | options
        self.config = config = resolve(EngineOptions(model=str(folder), **options))
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pipes]
        init_method = (folder / f"rendezvous-{id(self)}").as_uri()
        self._processes = [
            spawn.Process(target=serve, args=(config, rank, init_method, threads, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        ready = [pipe.recv() for pipe in self._pipes]  # of every rank
        self.shares_memory = all(ready)
        self._step = 0
        self.counts_work = False
        """Whether `seconds` are those of a rank's processor, in which waiting hardly counts."""

    def choose(self, shared: bool) -> None:
        for pipe in self._pipes:
            pipe.send(shared)

    def seconds(self, new: list[NewRequestData], scheduled: list[CachedRequestData], freed_slots: list[int]) -> float:
        """Seconds of one step, of the slowest rank."""
        for pipe in self._pipes:
            pipe.send(SchedulerOutput(self._step, freed_slots, new, scheduled))
        self._step += 1
        return float(max([pipe.recv()[self.counts_work] for pipe in self._pipes]))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def requests(rows: int, tokens: int, room: int) -> list[NewRequestData]:
    """Prompts of `tokens` tokens each, with blocks for `room` tokens."""
    blocks = -(-room // BLOCK)
    return [
        NewRequestData(
            slot=row,
            token_ids=[(7 * row + place) % 31000 + 5 for place in range(tokens)],
            num_prompt_tokens=tokens,
            num_computed_tokens=0,
            block_ids=list(range(row * blocks, (row + 1) * blocks)),
            params=SamplingParams(temperature=0.0, ignore_eos=True),
        )
        for row in range(rows)
    ]


def prefill(layout: Layout, tokens: int) -> float:
    """Seconds for one prompt."""
    spent = layout.seconds(requests(1, tokens, tokens), [CachedRequestData(0, tokens, [], [])], [])
    layout.seconds([], [], [0])
    return spent


def decode(layout: Layout, rows: int, steps: int) -> float:
    """The median seconds of a step in which each of `rows` requests decodes one token."""
    new = requests(rows, CONTEXT, CONTEXT + steps)
    layout.seconds(new, [CachedRequestData(row, CONTEXT, [], []) for row in range(rows)], [])
    spent = [layout.seconds([], [CachedRequestData(row, 1, [9], []) for row in range(rows)], []) for _ in range(steps)]
    layout.seconds([], [], list(range(rows)))
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="requests that decode at the same time")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512], help="tokens per prompt")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="decode steps per round")
    parser.add_argument("--json", action="store_true", help="medians in ms, and their ratios")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    engine = {
        "load_format": "dummy",
        "device": "cpu",
        "dtype": options.dtype,
        "block_size": BLOCK,
        "max_model_len": 2048,
        "max_num_seqs": max(options.rows),
        "max_num_batched_tokens": 4096,
        "kv_cache_memory_bytes": 1 << 28,
        "enforce_eager": True,  # op replay would keep using the all-reduce that it was recorded with
    }
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": options.layers}))
        one, two = Layout(folder, 1, 2, engine), Layout(folder, 2, 1, engine)
        stack.callback(one.close)
        stack.callback(two.close)
        if not two.shares_memory:
            raise SystemExit("the ranks do not share memory; is a C++ compiler installed?")
        rows = []
        cases = [("decode", rows) for rows in options.rows] + [("prefill", tokens) for tokens in options.prompts]
        for kind, count in cases:
            times: dict[str, list[float]] = {"tp 1": [], "gloo": [], "shared": []}
            for turn in range(options.rounds + 1):
                for way, spent in times.items():
                    layout = one if way == "tp 1" else two
                    if layout is two:
                        two.choose(way == "shared")
                    seconds = prefill(layout, count) if kind == "prefill" else decode(layout, count, options.steps)
                    if turn:
                        spent.append(seconds * 1e3)
            medians = {way: statistics.median(spent) for way, spent in times.items()}
            ratios = {
                f"{way} ratio": statistics.median(a / b for a, b in zip(times["tp 1"], times[way], strict=True))
                for way in ("gloo", "shared")
            }
            rows.append({"kind": kind, "count": count, **medians, **ratios})
    if options.json:
        return print(json.dumps(rows))
    print("ms per step; × is the speedup of two ranks over one, the median of the ratios of the rounds")
    print(f"{'':16} {'tp 1':>8} {'tp 2 gloo':>10} {'×':>5} {'tp 2 shared':>12} {'×':>5} {'tokens/s':>9}")
    for row in rows:
        rate = row["count"] / row["shared"] * 1e3
        gloo = f"{row['gloo']:10.1f} {row['gloo ratio']:5.2f}"
        shared = f"{row['shared']:12.1f} {row['shared ratio']:5.2f}"
        print(f"{row['kind']:8} {row['count']:7} {row['tp 1']:8.1f} {gloo} {shared} {rate:9.0f}")


if __name__ == "__main__":
    main()
