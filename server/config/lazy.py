"""Subcommands whose modules are imported on first use, so that they do not slow down the others."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from quire.engine.protocol.errors import ConfigError


class LazyParser(argparse.ArgumentParser):
    """Imports its subcommand's module and adds the module's flags (`fill`) when it has something to parse."""

    def __init__(self, *, module: str | None = None, takes_vllm_flags: bool = False, **keywords: Any) -> None:
        """With `takes_vllm_flags`, vLLM's flags are converted; `notes` of the result names the flags without effect."""
        super().__init__(**keywords)
        self._module = module
        self._takes_vllm_flags = takes_vllm_flags

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """See argparse."""
        if self._module is not None:
            module, self._module = self._module, None
            importlib.import_module(module).fill(self)
        if not self._takes_vllm_flags or args is None:
            return super().parse_known_args(args, namespace)
        from quire.server.config import vllm

        try:
            args, notes = vllm.translate(args, self._option_string_actions)
        except ConfigError as error:
            self.error(str(error))
        parsed, others = super().parse_known_args(args, namespace)
        if others:
            message = "docs/reference/vllm.md lists the flags of vLLM that are accepted"
            self.error(f"unrecognized arguments: {' '.join(others)}; {message}")
        parsed.notes = notes
        return parsed, others


def add_parser(
    commands: argparse._SubParsersAction[Any],
    name: str,
    module: str,
    text: str,
    usage: str = "[flags]",
    *,
    takes_vllm_flags: bool = False,
) -> None:
    """Register a subcommand. `name` includes its parent commands, `text` describes it."""
    commands.add_parser(
        name.split()[-1],
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        usage=f"quire {name} {usage}",
        allow_abbrev=False,
        module=module,
        takes_vllm_flags=takes_vllm_flags,
    )
