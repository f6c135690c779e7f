"""`quire bench`: measure a server over HTTP, or the engine without one. One file for each subcommand.

Nothing here is imported before it is needed: `quire serve` starts no slower for it.
"""

from __future__ import annotations

import argparse

from quire.server.cli import lazy

_SUBCOMMANDS = {
    "serve": "load an OpenAI-compatible server and measure it",
    "throughput": "tokens per second of the engine alone, all requests at once",
    "latency": "seconds that one batch takes",
    "startup": "seconds from `quire serve` to the first token, and where they go",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "bench", help="measure a server, or the engine alone", description="Measure a server, or the engine alone."
    )
    benches = parser.add_subparsers(
        title="benchmarks", required=True, metavar="BENCHMARK", parser_class=lazy.LazyParser
    )
    for name, text in _SUBCOMMANDS.items():
        lazy.add_parser(benches, f"bench {name}", f"{__name__}.{name}", text)
