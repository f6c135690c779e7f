"""Subcommands whose modules are imported on first use, so that they do not slow down the others."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from quire.engine.process import log
from quire.engine.protocol.errors import ConfigError
from quire.server.config.help import HelpAction, HelpFormatter


class LazyParser(argparse.ArgumentParser):
    """Imports its subcommand's module and adds the module's flags (`fill`) when it has something to parse."""

    def __init__(self, *, module: str | None = None, takes_vllm_flags: bool = False, **keywords: Any) -> None:
        """With `takes_vllm_flags`, vLLM's flags are converted; `notes` of the result names the flags without effect."""
        super().__init__(**{"formatter_class": HelpFormatter} | keywords | {"add_help": False})
        if keywords.get("add_help", True):
            self.add_argument("-h", "--help", action=HelpAction)
        self._module = module
        self.arguments: Sequence[str] | None = None
        """The arguments to parse, as they were given."""
        self._takes_vllm_flags = takes_vllm_flags

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """See argparse."""
        self.arguments = args
        self.fill()
        notes: list[str] | None = None
        if self._takes_vllm_flags and args is not None:
            from quire.server.config import vllm

            try:
                args, notes = vllm.translate(args, self._option_string_actions)
            except ConfigError as error:
                self.error(str(error))
        parsed, others = super().parse_known_args(args, namespace)
        if others:  # an error of this command, not of `quire`
            self.error("; ".join((f"unrecognized arguments: {' '.join(others)}", *self._advice(others))))
        if notes is not None:
            parsed.notes = notes
        return parsed, others

    def error(self, message: str) -> NoReturn:
        """Print the error in the format of the log, as far as that is known already, and exit."""
        with contextlib.suppress(ConfigError, argparse.ArgumentError):
            early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
            early.add_argument("--log-format", "--log_format")
            early.add_argument("--config")
            given, _ = early.parse_known_args(self.arguments)
            configure_log(given.log_format, given.config)
        if not log.is_json():
            super().error(message)
        log.print_error(f"{self.prog}: {message}")
        self.exit(2)

    def fill(self) -> None:
        """Add the flags of the subcommand's module, unless they have been added."""
        if self._module is not None:
            module, self._module = self._module, None
            importlib.import_module(module).fill(self)

    def _advice(self, arguments: Sequence[str]) -> Iterator[str]:
        flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        found = {flag: self.nearest(flag) for flag in flags}
        yield from (f"{flag}: did you mean {near}?" for flag, near in found.items() if near is not None)
        if self._takes_vllm_flags and None in found.values():
            yield "docs/reference/vllm.md lists the flags of vLLM that are accepted"

    def nearest(self, flag: str) -> str | None:
        """Return the flag whose name is most like this unknown one's; None if none is."""
        known = [*self._option_string_actions]
        if self._takes_vllm_flags:
            from quire.server.config import vllm

            known += [name for name, of_vllm in vllm.flags().items() if of_vllm.verdict != "refused"]
        return next(iter(difflib.get_close_matches(flag, known, n=1, cutoff=0.8)), None)


def configure_log(log_format: Any, config: str | None) -> None:
    """Set the format of the log for errors in the options: the one given, or else the one in the file `config`, if it
    can be read. Raises `ConfigError`.
    """
    if log_format is None and config is not None:
        import yaml  # slow to import

        with contextlib.suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
            content = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
            if isinstance(content, dict):
                log_format = content.get("log-format", content.get("log_format"))
    log.configure(log_format if log_format in ("text", "json") else None, None)


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
