"""`quire bench`: measure a server over HTTP, or the engine without one. One file for each subcommand.

Nothing here is imported before it is needed: `quire serve` starts no slower for it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

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
    benches = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK", parser_class=_Late)
    for name, text in _SUBCOMMANDS.items():
        benches.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", module=name)


class _Late(argparse.ArgumentParser):
    """Imports its subcommand's module, and has its flags from there, once it has something to parse."""

    def __init__(self, *, module: str, **keywords: Any) -> None:
        super().__init__(**keywords, usage=f"quire bench {module} [flags]", allow_abbrev=False)
        self._module = module
        self._is_filled = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's."""
        if not self._is_filled:
            self._is_filled = True
            importlib.import_module(f"{__name__}.{self._module}").fill(self)
        return super().parse_known_args(args, namespace)
