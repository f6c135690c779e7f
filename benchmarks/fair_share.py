"""TTFT of one client while another one floods the server, with and without --fair-share.

.venv/bin/python benchmarks/fair_share.py [--requests 500] [--json] [further flags of quire serve]

A real `quire serve` with a random-weight model. The second client sends prompts one after another: first alone, then
while the first client has `--requests` streams open, of which `--max-num-seqs` run and the others wait. Clients are
told apart by `user`. A request that has no token after `--patience` seconds is given up, and counts as that long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chunk_size import VOCAB, write_model
from load import Address, complete
from serving import serving

from quire.engine.config.options import DEMO_MODEL

SECOND_TOKENS = 8


def body(rng: random.Random, prompt: int, output: int, user: str) -> dict[str, Any]:
    tokens = [rng.randrange(100, VOCAB) for _ in range(prompt)]
    return {"prompt": tokens, "max_tokens": output, "ignore_eos": True, "temperature": 0.0, "user": user}


async def ttfts(address: Address, options: argparse.Namespace, seed: int) -> list[float]:
    """Seconds to the first token of each of the second client's requests."""
    rng, found = random.Random(seed), []
    for _ in range(options.repeats):
        try:
            async with asyncio.timeout(options.patience):
                found.append((await complete(address, body(rng, options.prompt, SECOND_TOKENS, "second"))).ttft)
        except TimeoutError:
            found.append(options.patience)
        await asyncio.sleep(0.2)
    return found


async def measure(address: Address, options: argparse.Namespace) -> dict[str, float]:
    rng = random.Random(0)
    await ttfts(address, options, 1)  # warm-up: step times are learned
    idle = await ttfts(address, options, 2)
    bodies = [body(rng, options.flood_prompt, options.flood_output, "flood") for _ in range(options.requests)]
    flood = [asyncio.create_task(complete(address, each)) for each in bodies]
    await asyncio.sleep(options.lead)
    flooded = await ttfts(address, options, 3)
    begun, left = time.perf_counter(), sum(not each.done() for each in flood)
    for each in flood:
        each.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    assert left > options.max_num_seqs, f"only {left} streams of the flood were left; raise --requests"
    assert time.perf_counter() - begun < options.patience
    return {
        "idle_ms": statistics.median(idle) * 1e3,
        "flooded_ms": statistics.median(flooded) * 1e3,
        "flooded_worst_ms": max(flooded) * 1e3,
        "ratio": statistics.median(flooded) / statistics.median(idle),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--flood-prompt", type=int, default=32, help="tokens of each prompt of the flood")
    parser.add_argument("--flood-output", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt of the second client")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--lead", type=float, default=5.0, help="seconds from the flood to the second client")
    parser.add_argument("--patience", type=float, default=20.0)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options, further = parser.parse_known_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.hidden, options.layers)
        common = [folder, "--load-format", "dummy", "--tokenizer", str(DEMO_MODEL)]
        common += ["--max-num-seqs", str(options.max_num_seqs), *further]
        for by in ("off", "user"):
            with serving(*common, "--fair-share", by) as server:
                results[by] = asyncio.run(measure(Address(server.port), options))
    if options.json:
        json.dump(results, sys.stdout, indent=1)
        print()
        return
    names = ("idle_ms", "flooded_ms", "flooded_worst_ms", "ratio")
    print("--fair-share".ljust(14) + "".join(name.rjust(18) for name in names))
    for by, found in results.items():
        print(by.ljust(14) + "".join(f"{found[name]:18.2f}" for name in names))


if __name__ == "__main__":
    main()
