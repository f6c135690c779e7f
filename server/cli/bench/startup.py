"""`quire bench startup`: repeated measurements of the time from the `quire serve` command to the first token.

After the first start, which is not counted, files come from the page cache; only a reboot would reliably empty it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from quire.engine.config.options import EngineOptions, flag
from quire.engine.protocol.errors import ConfigError
from quire.server.cli.bench import report
from quire.server.cli.bench.client import BenchClient
from quire.server.cli.bench.latency import PERCENTILES
from quire.server.cli.bench.load import LoadClock, SendTimes
from quire.server.cli.bench.options import COMPLETIONS
from quire.server.cli.bench.stream import RequestRecord
from quire.server.config import flags

_COMMAND = (sys.executable, "-P", "-c", "import sys; from quire.server.cli.main import main; sys.exit(main())", "serve")
READY_LINE = re.compile(r"ready ([\d.]+) s after the start \((.*)\)")
_PHASE = re.compile(r"([a-z][a-z ]*) ([\d.]+) s")
SERVING_LINE = re.compile(r"serving .* on (http://\S+)")
_QUESTION = {"prompt": "What is Quire?", "max_tokens": 1, "temperature": 0, "stream": True}

READY, FIRST_TOKEN = "ready", "first token"


@dataclass(frozen=True, kw_only=True)
class StartupOptions:
    """The number of starts, and the output."""

    num_iters_warmup: int = flag(1, "number of warm-up starts")
    num_iters: int = flag(5, "number of measured starts", is_common=True)
    output_json: str | None = flag(None, "write the results to a JSON file", metavar="FILE")
    disable_tqdm: bool = flag(False, "do not show a progress bar")


@dataclass(frozen=True)
class StartupRun:
    """One start: total seconds, and seconds of the phases that the server logs, which may overlap."""

    seconds: float
    phases: dict[str, float]


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    flags.add_model(parser)
    flags.add_flags(parser, StartupOptions)
    flags.add_flags(parser, EngineOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the benchmark; returns 0."""
    options = flags.collect(parsed, StartupOptions)
    if options.num_iters < 1 or options.num_iters_warmup < 0:
        raise ConfigError("--num-iters must be at least 1, --num-iters-warmup at least 0")
    if options.output_json is not None:
        report.check_writable(options.output_json, "--output-json")
    arguments = serve_arguments(parsed)
    for _ in range(options.num_iters_warmup):
        start_once(arguments)
    starts = [start_once(arguments) for _ in tqdm(range(options.num_iters), "starts", disable=options.disable_tqdm)]
    result = figures(starts)
    print(" ".join(["quire serve", *arguments]))
    print(table(result))
    if options.output_json is not None:
        report.write_json(options.output_json, result)
    return 0


def serve_arguments(parsed: argparse.Namespace) -> list[str]:
    """The model and engine flags that were given, as another command line."""
    names = EngineOptions.__dataclass_fields__
    return flags.to_arguments({name: value for name, value in vars(parsed).items() if name in names})


def start_once(arguments: Sequence[str]) -> StartupRun:
    """Start a server, request one token, stop it; raises `ConfigError` with the server's last output if it fails."""
    begun = time.perf_counter()
    command = [*_COMMAND, *arguments, "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        phases: dict[str, float] = {}
        line = ""
        try:
            for line in server.stderr:
                if found := READY_LINE.search(line):
                    phases = read_phases(found[1], found[2])
                elif found := SERVING_LINE.search(line):
                    served = time.perf_counter()
                    record = asyncio.run(ask(found[1]))
                    if not record.ok:
                        raise ConfigError(f"the server started but did not respond: {record.error}")
                    phases[FIRST_TOKEN] = record.arrivals[0] - served
                    return StartupRun(record.arrivals[0] - begun, phases)
            raise ConfigError(f"quire serve did not start: {line.strip().removeprefix('quire: error: ')}")
        finally:
            server.terminate()
            server.communicate()


def read_phases(ready: str, phases: str) -> dict[str, float]:
    """The phases in the server's log line, in order; `ready` is the total."""
    return {**{name: float(seconds) for name, seconds in _PHASE.findall(phases)}, READY: float(ready)}


async def ask(url: str) -> RequestRecord:
    """Request one token of a server."""
    clock = LoadClock()
    with BenchClient(url, os.environ.get("OPENAI_API_KEY"), clock) as client:
        now = clock.now()
        request = client.prepare(COMPLETIONS, msgspec.json.encode(_QUESTION))
        return await client.stream(request, SendTimes(now, now, now), 0)


def figures(starts: Sequence[StartupRun]) -> dict[str, Any]:
    """Mean, percentiles and all values of the total; median, minimum and maximum of each phase."""
    seconds = [start.seconds for start in starts]
    names = dict.fromkeys(name for start in starts for name in start.phases)
    spent = {name: [start.phases.get(name, 0.0) for start in starts] for name in names}
    return {
        "avg_startup_time": float(np.mean(seconds)),
        "startup_times": seconds,
        "startup_percentiles": {str(p): float(np.percentile(seconds, p)) for p in PERCENTILES},
        "phases": {
            name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for name, values in spent.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """The results as an aligned table."""
    seconds = result["startup_times"]
    in_all = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    lines = [f"{'seconds':<20}{'median':>8}{'least':>8}{'most':>8}"]
    for name, of in (*result["phases"].items(), ("in all", in_all)):
        lines.append(f"{name:<20}{of['median']:>8.2f}{of['min']:>8.2f}{of['max']:>8.2f}")
    return "\n".join(lines)
