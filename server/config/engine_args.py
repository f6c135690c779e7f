"""`EngineArgs`: the options of an engine, as in programs for vLLM. `LLM` and `AsyncLLM` take theirs as this class."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError
from quire.server.config import flags, vllm
from quire.server.config.lazy import LazyParser
from quire.server.config.server_options import MediaOptions, ServerOptions

T = TypeVar("T", bound=argparse.ArgumentParser)

logger = logging.getLogger(__name__)

_OFFLINE = (
    *("chat_template", "default_chat_template_kwargs", "tool_call_parser", "reasoning_parser"),
    *(field.name for field in dataclasses.fields(MediaOptions)),
    *("torch_profiler_dir", "log_level"),
)
"""The options of a server that programs have, too."""
_OF_THE_SERVER = ("served_model_name",)
"""Fields of vLLM's class that only servers read."""
_FIELDS = tuple(field.name for field in dataclasses.fields(EngineOptions))


class EngineArgs:
    """The options of `LLM` by keyword, with the names and values of Quire or of vLLM.

    An option of vLLM's without effect is logged. Its attributes are the fields of
    `quire.engine.config.options.EngineOptions`, and `chat_template`, `default_chat_template_kwargs`,
    `tool_call_parser`, `reasoning_parser`, `torch_profiler_dir`, `log_level`, and those of
    `quire.server.config.server_options.MediaOptions`; they can be changed. vLLM's environment variables are defaults.
    Raises `ConfigError` for options that are not supported.
    """

    def __init__(self, model: str = EngineOptions.model, **options: Any) -> None:
        parser = _parser()
        given = {name: value for name, value in options.items() if name not in _OF_THE_SERVER}
        parsed = parser.parse_args(flags.to_arguments({"model": model, **given}))
        device = getattr(parsed, "device", EngineOptions.device)
        from_environment, notes = vllm.read_environment(parser, lambda: flags.runs_on_cpu(device))
        for note in (*notes, *parsed.notes):
            logger.warning("%s", note)
        self._collect({"log_level": "warning"} | from_environment | vars(parsed))

    def _collect(self, found: Mapping[str, Any]) -> None:
        parsed = argparse.Namespace(**found)
        vars(self).update(vars(flags.collect(parsed, EngineOptions)))
        server = flags.collect(parsed, ServerOptions)
        vars(self).update((name, getattr(server, name)) for name in _OFFLINE)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @property
    def options(self) -> EngineOptions:
        """A copy of the attributes that are options of the engine."""
        return EngineOptions(**{name: getattr(self, name) for name in _FIELDS})

    @property
    def server_options(self) -> ServerOptions:
        """A copy of the attributes that are options of a server, too."""
        return ServerOptions(**{name: getattr(self, name) for name in _OFFLINE})

    def replaced(self, **options: Any) -> EngineArgs:
        """Return a copy with other values of these options, unless they are None. Raises `ConfigError`."""
        parsed, made = _parser().parse_args(flags.to_arguments(options)), copy.copy(self)
        for note in parsed.notes:
            logger.warning("%s", note)
        made._collect(vars(self) | vars(parsed))
        return made

    @staticmethod
    def add_cli_args(parser: T) -> T:
        """Add `--model` and Quire's engine flags to a program's own command line; returns `parser`."""
        parser.add_argument("--model", default=EngineOptions.model, help="model folder or Hugging Face repository")
        flags.add_flags(parser, EngineOptions)
        parser.set_defaults(**{name: getattr(EngineOptions, name) for name in _FIELDS})
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Make the options of a command line with the flags of `EngineArgs.add_cli_args`, which may have others, too.

        Raises `ConfigError`.
        """
        return cls(**{name: value for name, value in vars(args).items() if name in _FIELDS})


AsyncEngineArgs = EngineArgs
"""vLLM's name for the same options of an asyncio program."""


class _Parser(LazyParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> _Parser:
    parser = _Parser(takes_vllm_flags=True, add_help=False, allow_abbrev=False)
    flags.add_model(parser)
    flags.add_flags(parser, EngineOptions)
    flags.add_hidden_flags(parser, ServerOptions, _OFFLINE)
    return parser
