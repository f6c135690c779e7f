"""`quire bench latency`: the time of one batch of fixed size, repeated."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from quire.engine.config.options import EngineOptions, flag
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.cli.bench import dataset, offline, report
from quire.server.cli.bench.dataset import DatasetOptions
from quire.server.config import flags

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """The options of a run, with the names of `vllm bench latency`."""

    input_len: int = flag(32, "tokens of each prompt", is_common=True)
    output_len: int = flag(128, "tokens of each output", is_common=True)
    batch_size: int = flag(8, "requests in the batch", is_common=True)
    num_iters_warmup: int = flag(10, "number of warm-up batches")
    num_iters: int = flag(30, "number of measured batches", is_common=True)
    output_json: str | None = flag(None, "write the results to a JSON file", metavar="FILE")
    disable_tqdm: bool = flag(False, "do not show a progress bar")


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand. The prefix cache is off by default, as the same batch is repeated."""
    flags.add_flags(parser, LatencyOptions)
    offline.add_engine_flags(parser)
    parser.set_defaults(run=run, parser=parser, enable_prefix_caching=False)


def run(parsed: argparse.Namespace) -> int:
    """Run the benchmark; returns 0."""
    options = flags.collect(parsed, LatencyOptions)
    engine = flags.collect(parsed, EngineOptions)
    if options.num_iters < 1 or options.num_iters_warmup < 0:
        raise ConfigError("--num-iters must be at least 1, --num-iters-warmup at least 0")
    if options.batch_size < 1:
        raise ConfigError(f"--batch-size {options.batch_size}: must be at least 1")
    wanted = DatasetOptions(
        num_prompts=options.batch_size, random_input_len=options.input_len, random_output_len=options.output_len
    )
    wanted.check()
    if options.output_json is not None:
        report.check_writable(options.output_json, "--output-json")
    params = SamplingParams(max_tokens=options.output_len, ignore_eos=True)
    with offline.running(engine) as (llm, config):
        offline.check_lengths(config, options.input_len + options.output_len)
        batch = dataset.token_samples(wanted, config.model.architecture.vocab_size, engine.seed)
        prompts = [sample.prompt for sample in batch]

        def once() -> float:
            begun = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - begun

        counts = (("warming up", options.num_iters_warmup), ("batches", options.num_iters))
        seconds: list[float] = []
        for what, count in counts:
            seconds = [once() for _ in tqdm(range(count), what, disable=options.disable_tqdm)]
    result = figures(seconds)
    print(
        f"{options.batch_size} × ({options.input_len} tokens in, {options.output_len} out), {options.num_iters} times"
    )
    print(f"mean {result['avg_latency']:.3f} s, standard deviation {result['std_latency']:.3f} s")
    print(", ".join(f"p{name} {value:.3f} s" for name, value in result["percentiles"].items()))
    if options.output_json is not None:
        report.write_json(options.output_json, result)
    return 0


def figures(seconds: Sequence[float]) -> dict[str, Any]:
    """The results, with the names of `vllm bench latency`'s JSON."""
    return {
        "avg_latency": float(np.mean(seconds)),
        "std_latency": float(np.std(seconds)),
        "latencies": list(seconds),
        "percentiles": {str(p): float(np.percentile(seconds, p)) for p in PERCENTILES},
    }
