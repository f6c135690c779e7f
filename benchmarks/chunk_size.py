"""Throughput and inter-token latency with long prompts and short decodes, by token budget: fixed and tuned.

.venv/bin/python benchmarks/chunk_size.py [--json]

There is one engine per token budget, with a random-weight model. All of them are loaded and run the same requests in
turn, so that other load on the machine affects all equally. Concurrency is constant: when a request finishes, the next
one starts. Figures are medians over the repeats, after a warm-up. ITL is the time between two outputs of a request.
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
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from quire import AsyncLLM, SamplingParams
from quire.engine.config.options import DEMO_MODEL

VOCAB = 3072  # the demo model's size, as its tokenizer is used
LENGTH = 4096


class Figures(NamedTuple):
    throughput: float
    """Prompt and output tokens per second."""
    p99_itl_ms: float
    median_itl_ms: float


def write_model(folder: Path, hidden: int, layers: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "vocab_size": VOCAB,
        "max_position_embeddings": LENGTH,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))


def requests(options: argparse.Namespace, seed: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """A random mix: one long prompt with a short answer per three short prompts with long answers."""
    rng = random.Random(seed)
    for index in range(options.requests):
        is_long = index % 4 == 1
        size = rng.randrange(options.long // 2, options.long) if is_long else rng.randrange(16, 64)
        answer = 8 if is_long else rng.randrange(options.output // 2, options.output)
        prompt = [rng.randrange(100, VOCAB) for _ in range(size)]
        yield prompt, SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)


async def serve(llm: AsyncLLM, options: argparse.Namespace, seed: int) -> Figures:
    """The requests for this seed."""
    todo = requests(options, seed)
    gaps: list[float] = []
    tokens = 0

    async def client() -> None:
        nonlocal tokens
        for prompt, params in todo:
            last = None
            async for _ in llm.generate(prompt, params):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
            tokens += len(prompt) + (params.max_tokens or 0)

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(options.concurrency)))
    seconds = time.perf_counter() - begun
    gaps.sort()
    return Figures(tokens / seconds, gaps[int(len(gaps) * 0.99)] * 1e3, gaps[len(gaps) // 2] * 1e3)


async def measure(options: argparse.Namespace, folder: str) -> dict[str, list[Figures]]:
    figures: dict[str, list[Figures]] = {size: [] for size in options.sizes}
    async with AsyncExitStack() as stack:
        engines: dict[str, AsyncLLM] = {}
        for size in options.sizes:
            engine = AsyncLLM(
                folder,
                load_format="dummy",
                tokenizer=str(DEMO_MODEL),
                dtype=options.dtype,
                device=options.device,
                enable_prefix_caching=False,
                spec_method="none",
                max_num_seqs=options.concurrency,
                kv_cache_memory_bytes=options.kv_cache_memory_bytes,
                max_num_batched_tokens=size if size == "auto" else int(size),
                itl_target_ms=options.itl_target_ms if size == "auto" else None,
            )
            engines[size] = await stack.enter_async_context(engine)
        for repeat in range(options.repeats + 1):
            order = options.sizes[repeat % len(options.sizes) :] + options.sizes[: repeat % len(options.sizes)]
            for size in order:
                found = await serve(engines[size], options, repeat)
                if repeat:
                    figures[size].append(found)
                    print(f"{size:>6}  {found.throughput:9.0f}  {found.p99_itl_ms:9.1f}", file=sys.stderr)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["512", "2048", "8192", "auto"])
    parser.add_argument("--itl-target-ms", type=float)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16, help="in each repeat")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--long", type=int, default=2000, help="tokens of the longest prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of the longest answer")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=512 << 20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.hidden, options.layers)
        runs = asyncio.run(measure(options, folder))
    found = {size: Figures(*map(statistics.median, zip(*each, strict=True))) for size, each in runs.items()}
    if options.json:
        json.dump({size: figures._asdict() for size, figures in found.items()}, sys.stdout, indent=1)
        print()
        return
    best = max(figures.throughput for figures in found.values())
    print("tokens a step   tokens/s   of the best   p99 ITL ms   median ITL ms")
    for size, figures in found.items():
        share = f"{figures.throughput / best:.0%}"
        print(f"{size:>13}{figures.throughput:11.0f}{share:>14}{figures.p99_itl_ms:13.1f}{figures.median_itl_ms:16.1f}")


if __name__ == "__main__":
    main()
