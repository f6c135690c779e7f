"""`quire bench serve`: send requests to a server and measure its responses as users would see them."""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import uvloop

from quire.server.cli.bench import metrics, plot, report
from quire.server.cli.bench.dataset import DatasetOptions
from quire.server.cli.bench.load import LoadClock
from quire.server.cli.bench.options import ServeOptions
from quire.server.cli.bench.run import BenchRun
from quire.server.config import flags


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    flags.add_flags(parser, ServeOptions)
    flags.add_flags(parser, DatasetOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the benchmark; returns 0 if at least one request succeeded."""
    return measure(flags.collect(parsed, ServeOptions), flags.collect(parsed, DatasetOptions), LoadClock())


def measure(options: ServeOptions, wanted: DatasetOptions, clock: LoadClock) -> int:
    """`run` with the given clock."""
    options.check()
    wanted.check()
    chosen = metrics.parse_metrics(options.percentile_metrics)
    percentiles = metrics.parse_percentiles(options.metric_percentiles)
    goodput = metrics.parse_goodput(options.goodput or ())
    if options.plot is not None:
        plot.check(options.plot)
        report.check_writable(options.plot, "--plot")
    target = _target(options)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        finished = runner.run(BenchRun(options, wanted, clock).measure())
    records = finished.records
    result = metrics.summarize(records, metrics=chosen, percentiles=percentiles, goodput=goodput)
    result["client_cpu_share"] = finished.cpu_seconds / result["duration"]
    result |= finished.drafts
    print(report.table(result, chosen, percentiles))
    for line in report.warnings(result, records):
        print(line)
    if target is not None:
        details = metrics.details(records, finished.begun) if options.save_detailed else {}
        report.write_json(target(finished.model), _setup(options, wanted, finished.model) | result | details)
    if options.plot is not None:
        title = f"{finished.model}: {len(records)} requests {options.load()}"
        plot.draw(options.plot, records, title=title)
        print(f"plotted: {options.plot}")
    return 0 if result["completed"] else 1


def _target(options: ServeOptions) -> Callable[[str], Path] | None:
    """A function from the model's name to the path of the JSON file; None if none is written. Raises `ConfigError`."""
    if not (options.save_result or options.save_detailed or options.result_filename):
        return None
    folder = Path(options.result_dir or "")
    report.check_writable(folder / (options.result_filename or "quire-bench.json"), "--result-dir, --result-filename")

    def path(model: str) -> Path:
        most = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
        name = f"{options.request_rate:g}qps{most}-{model.split('/')[-1]}-{datetime.now():%Y%m%d-%H%M%S}.json"
        return folder / (options.result_filename or name)

    return path


def _setup(options: ServeOptions, wanted: DatasetOptions, model: str) -> dict[str, Any]:
    """The setup of the benchmark, for the JSON file."""
    rate = options.request_rate
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if options.is_chat else "openai",
        "model_id": model,
        "num_prompts": wanted.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": "inf" if math.isinf(options.burstiness) else options.burstiness,
        "max_concurrency": options.max_concurrency,
        "random_input_len": wanted.mean_input_len,
        "random_output_len": wanted.mean_output_len,
        "random_range_ratio": wanted.random_range_ratio,
        "random_prefix_len": wanted.random_prefix_len,
        "seed": options.seed,
    }
