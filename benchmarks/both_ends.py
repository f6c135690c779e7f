"""Time to the first token of prompts that a slow tier has: computed, loaded, and from both ends at once.

    .venv/bin/python benchmarks/both_ends.py --bandwidth 50

The first server computes each prompt and keeps its KV; the second one reads it from there, at `--bandwidth` MiB/s at
most. `computed`: prompts that only the second one has seen, in turns with the others. `both`: those of the first one,
and the tokens of them that were loaded. `load`: the time of loading all at this bandwidth. In the first rounds, which
do not count, the second server does not know yet how slow the link is. The model has random weights and much KV, as
large models have: a store fetches 8 MiB at a time.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from shapes import Shape, make_checkpoint

from quire.engine.core.launch import reserve_ports, socket_port

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.e2e.serving import Server, serve

_SHAPE = Shape("Much KV", "qwen2", 12, 1024, 16, 16, 64, 256, 1e4)
_BYTES = 4
"""Of a number in the KV cache."""
_LEARNING = 3
"""Rounds that do not count."""


def ask(server: Server, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the only token of an answer, and the tokens of the prompt that were loaded."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600)
    seconds = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    details: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
    return seconds, details.get("cached_tokens_details", {}).get("peer", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=3072)
    parser.add_argument("--bandwidth", type=float, default=50.0, help="MiB/s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quire-compare")
    options = parser.parse_args()
    shape, rng = _SHAPE, random.Random(0)
    model = str(make_checkpoint(shape, options.cache))
    blocks = options.length // 16
    load = blocks * 16 * shape.kv_numbers * _BYTES / options.bandwidth / 2**20
    reserved = reserve_ports("127.0.0.1", 1)
    port = str(socket_port(reserved[0]))
    flags = ("--model", model, "--device", "cpu", "--dtype", "float32", "--max-model-len", str(options.length + 64))
    sizes = (
        "--kv-cache-memory-bytes",
        str(5 * options.length * shape.kv_numbers * _BYTES),
        "--kv-offloading-size",
        "4",
    )
    reads = ("--kv-peers", f"127.0.0.1:{port}")
    sends = ("--kv-peer-port", port, "--kv-peer-bandwidth", str(options.bandwidth))
    env = os.environ | {"QUIRE_HOST_IP": "127.0.0.1"}
    times: dict[str, list[float]] = {"computed": [], "both": []}
    with serve(*flags, *sizes, *sends, env=env) as first, serve(*flags, *sizes, *reads, env=env) as second:
        while not second.metrics("kv_store_peers_up"):
            time.sleep(0.1)
        for number in range(-_LEARNING, options.rounds):
            prompts = [rng.choices(range(300, shape.vocabulary), k=options.length) for _ in times]
            stored = first.metrics("kv_store_entries", tier="memory")
            ask(first, prompts[1])
            while first.metrics("kv_store_entries", tier="memory") < stored + blocks:
                time.sleep(0.1)
            (computed, _), (both, num_loaded) = (ask(second, prompt) for prompt in prompts)
            failed = second.metrics("kv_recomputed_tokens_total")
            print(f"computed {computed:.2f} s, both {both:.2f} s, {num_loaded} loaded, {failed:.0f} failed", flush=True)
            if number >= 0:
                times["computed"].append(computed)
                times["both"].append(both)
    reserved[0].close()
    medians = {name: statistics.median(each) for name, each in times.items()}
    print(f"median: computed {medians['computed']:.2f} s, load {load:.2f} s, both {medians['both']:.2f} s")


if __name__ == "__main__":
    main()
