"""`quire bench throughput`: the throughput of the engine without HTTP, with all requests at once."""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from quire.engine.config.options import EngineOptions, flag
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.cli.bench import dataset, offline, report
from quire.server.cli.bench.dataset import DatasetOptions, Sample
from quire.server.config import flags


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """The options of a run, with the names of `vllm bench throughput`."""

    num_warmups: int = flag(0, "number of warm-up requests")
    output_json: str | None = flag(None, "write the results to a JSON file", metavar="FILE")
    disable_tqdm: bool = flag(False, "do not show a progress bar")


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    flags.add_flags(parser, ThroughputOptions)
    flags.add_flags(parser, DatasetOptions)
    offline.add_engine_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the benchmark; returns 0."""
    options = flags.collect(parsed, ThroughputOptions)
    wanted = flags.collect(parsed, DatasetOptions)
    engine = flags.collect(parsed, EngineOptions)
    wanted.check()
    if options.output_json is not None:
        report.check_writable(options.output_json, "--output-json")
    with offline.running(engine) as (llm, config):

        def draw(count: int, more: int) -> list[Sample]:
            return dataset.token_samples(
                dataclasses.replace(wanted, num_prompts=count), config.model.architecture.vocab_size, engine.seed + more
            )

        def generate(asked: list[Sample], *, use_tqdm: bool) -> int:
            params = [SamplingParams(max_tokens=sample.output_len, ignore_eos=True) for sample in asked]
            results = llm.generate([sample.prompt for sample in asked], params, use_tqdm=use_tqdm)
            return sum(len(result.outputs[0].token_ids) for result in results)

        asked = draw(wanted.num_prompts, 0)
        offline.check_lengths(config, max(sample.prompt_len + sample.output_len for sample in asked))
        generate(draw(options.num_warmups, dataset.WARMUP_SEED), use_tqdm=False)
        begun = time.perf_counter()
        num_output = generate(asked, use_tqdm=not options.disable_tqdm)
        elapsed = time.perf_counter() - begun
    num_input = sum(sample.prompt_len for sample in asked)
    result = figures(elapsed, len(asked), num_input, num_output)
    print(
        f"{result['requests_per_second']:.2f} requests/s, {result['output_tokens_per_second']:.1f} output tokens/s, "
        f"{result['tokens_per_second']:.1f} tokens/s in all"
    )
    print(f"{len(asked)} requests, {num_input:,} tokens in, {num_output:,} out, {elapsed:.2f} s")
    if options.output_json is not None:
        report.write_json(options.output_json, result)
    return 0


def figures(seconds: float, num_requests: int, num_input: int, num_output: int) -> dict[str, Any]:
    """The results, with the names of `vllm bench throughput`'s JSON; output tokens are also counted separately."""
    return {
        "elapsed_time": seconds,
        "num_requests": num_requests,
        "total_num_tokens": num_input + num_output,
        "requests_per_second": num_requests / seconds,
        "tokens_per_second": (num_input + num_output) / seconds,
        "total_output_tokens": num_output,
        "output_tokens_per_second": num_output / seconds,
    }
