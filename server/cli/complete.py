"""`quire complete`: interactive text completion by a running server."""

from __future__ import annotations

import argparse
import contextlib

from quire.server.cli.remote import RemoteOptions, RemoteServer
from quire.server.cli.terminal import Screen, ask_and_answer
from quire.server.config import flags

HELP = "type a line to complete it; Ctrl-C stops an answer, Ctrl-D quits"


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    flags.add_flags(parser, RemoteOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Complete lines until the input ends; returns 0."""
    options = flags.collect(parsed, RemoteOptions)
    screen = Screen()
    with RemoteServer(options) as remote:

        def answer(prompt: str) -> None:
            try:
                with contextlib.closing(remote.stream("/v1/completions", {"prompt": prompt})) as choices:
                    for choice in choices:
                        screen.show(choice.get("text") or "")
            except KeyboardInterrupt:
                pass
            finally:
                screen.end()

        if options.quick is not None:
            answer(options.quick)
        else:
            screen.aside(f"{remote.model}: {HELP}\n")
            ask_and_answer(answer, "> ")
    return 0
