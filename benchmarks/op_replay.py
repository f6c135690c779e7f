"""Decode steps with and without op replay (`--enforce-eager`), alternating.

.venv/bin/python benchmarks/op_replay.py

The model has random weights in the shape of Qwen2.5-0.5B with a vocabulary of 32,000; one rank with two threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tensor_parallel import BLOCK, SHAPE, Layout, decode

PRECISIONS = {
    "int8": {"dtype": "float32", "quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="requests that decode at the same time")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16, help="decode steps per round")
    options = parser.parse_args()
    print(f"{'':9} {'rows':>4} {'eager ms':>9} {'replay ms':>9} {'time':>6}   median of the ratios of the rounds")
    for precision in options.precision:
        engine = PRECISIONS[precision] | {
            "load_format": "dummy",
            "device": "cpu",
            "block_size": BLOCK,
            "max_model_len": 2048,
            "max_num_seqs": max(options.rows),
            "max_num_batched_tokens": 4096,
            "kv_cache_memory_bytes": 1 << 28,
        }
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": options.layers}))
            ways = [Layout(folder, 1, 2, engine | {"enforce_eager": is_eager}) for is_eager in (True, False)]
            for layout in ways:
                stack.callback(layout.close)
            for rows in options.rows:
                turns = [[decode(layout, rows, options.steps) * 1e3 for layout in ways] for _ in range(options.rounds)]
                eager, replayed = (statistics.median(column) for column in zip(*turns[1:], strict=True))
                time = statistics.median(after / before for before, after in turns[1:])
                print(f"{precision:9} {rows:4} {eager:9.1f} {replayed:9.1f} {time:6.2f}")


if __name__ == "__main__":
    main()
