"""The `quire` command: selects the subcommand, and reports user errors without a traceback."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from quire.engine.process import log
from quire.engine.process.version import commit, version
from quire.engine.protocol.errors import ConfigError
from quire.server.cli import bench, serve
from quire.server.config import lazy


class _Version(argparse.Action):
    """Prints the version; asking for the commit may start git, which other command lines do not need."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        built_from = f" ({found})" if (found := commit()) else ""
        print(f"quire {version()}{built_from}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code (2 for user errors)."""
    parsed = build_parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except ConfigError as error:
        for note in getattr(error, "__notes__", ()):
            log.print_text(note)
        log.print_error(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands. The parsed result has `run`, the subcommand's function."""
    parser = lazy.LazyParser(prog="quire", description="Serve language models bigger than one device.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version, with the commit, and exit")
    commands: argparse._SubParsersAction[Any] = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=lazy.LazyParser
    )
    serve.add_parser(commands)
    for name, text, usage in (
        ("plan", "print which layouts of a model fit a machine, and what they can reach", "[MODEL] [flags]"),
        (
            "run-batch",
            "process a file of requests in OpenAI's batch format",
            "-i FILE -o FILE [MODEL] [flags]",
        ),
        ("quantize", "write a model with 16-bit weights as a quantized one", "MODEL OUT [flags]"),
        ("merge", "write a model with an adapter (LoRA) merged into its weights", "BASE ADAPTER OUT [flags]"),
        ("kv", "list, verify or clear the KV that servers have stored on disk", "list|verify|clear PATH [flags]"),
        ("doctor", "check a host, or the hosts of a cluster, before serving", "[flags]"),
        ("chat", "chat with a running server", "[flags]"),
        ("complete", "complete texts with a running server", "[flags]"),
        ("profile", "record a trace of what all ranks of a running server do", "[flags]"),
        ("completion", "print a script that completes command lines in bash, zsh or fish", "SHELL"),
    ):
        module = f"quire.server.cli.{name.replace('-', '_')}"
        lazy.add_parser(commands, name, module, text, usage, takes_vllm_flags=name == "plan")
    bench.add_parser(commands)
    return parser
