"""`quire bench`: benchmarks of a server over HTTP, or of the engine alone. One file for each subcommand.

Imports are lazy, so that `quire serve` starts no slower.
"""

from __future__ import annotations

import argparse

from quire.server.config import lazy

_SUBCOMMANDS = {
    "serve": "benchmark an OpenAI-compatible server",
    "throughput": "measure the throughput of the engine, without a server",
    "latency": "measure the latency of a batch",
    "startup": "measure the time from `quire serve` to the first token",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "bench", help="benchmark a server, or the engine alone", description="Benchmark a server, or the engine alone."
    )
    benches = parser.add_subparsers(
        title="benchmarks", required=True, metavar="BENCHMARK", parser_class=lazy.LazyParser
    )
    for name, text in _SUBCOMMANDS.items():
        lazy.add_parser(benches, f"bench {name}", f"{__name__}.{name}", text)
