"""Command-line flags from dataclass fields, and the same flags from a YAML file."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from quire.engine.protocol.errors import ConfigError

T = TypeVar("T")


def add_flags(group: argparse._ArgumentGroup, options: type) -> None:
    """Add a flag for every field made by `options.flag`. Flags that are not given are absent from the namespace."""
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        if "help" not in field.metadata:
            continue
        names = [name for name in (field.metadata["short"], f"--{field.name.replace('_', '-')}") if name]
        text: str = field.metadata["help"].replace("%", "%%")
        if field.default is not None and "(default" not in text:
            text += f" (default: {_show(field.default)})"
        group.add_argument(
            *names,
            dest=field.name,
            default=argparse.SUPPRESS,
            help=text,
            **_kind(hints[field.name], field.metadata["metavar"]),
        )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the positional MODEL argument."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="model folder or Hugging Face repository (default: the bundled demo model)",
    )


def _show(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def _kind(hint: Any, metavar: str | None) -> dict[str, Any]:
    """Return argparse's keyword arguments for a field's type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        hint = members[0]
        if len(members) > 1:
            return {"type": _or_word(hint, typing.get_args(members[1])), "metavar": metavar or "N"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "metavar": metavar}
    return {"type": hint, "metavar": metavar or {int: "N", float: "X"}.get(hint, "TEXT")}


def _or_word(kind: type, words: tuple[str, ...]) -> Callable[[str], Any]:
    """Return an argparse type that accepts one of the words as a string, or a value of `kind`."""

    def convert(text: str) -> Any:
        return text if text in words else kind(text)

    convert.__name__ = f"{kind.__name__} or {'/'.join(words)}"  # argparse reports "invalid … value"
    return convert


def collect(parsed: argparse.Namespace, options: type[T]) -> T:
    """Build the dataclass from the parsed command line."""
    names = {field.name for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(parsed).items() if name in names}
    return options(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})


def read_config(path: str, known: Sequence[type]) -> list[str]:
    """Convert a YAML file to command-line arguments. The keys are flags without the leading dashes.

    Raises `ConfigError` for an unreadable file, and for an unknown key, which it names.
    """
    import yaml  # slow to import

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot read the file: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: cannot read the file: nested too deeply") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"--config {path}: expected a mapping of flags, such as `tensor-parallel-size: 2`")
    names = {field.name for options in known for field in dataclasses.fields(options)}
    given = {}
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise ConfigError(f"--config {path}: unknown flag {key}")
        given[name] = value
    return to_arguments(given)


def to_arguments(given: Mapping[str, Any]) -> list[str]:
    """Convert options by name to a command line. None values are skipped."""
    arguments: list[str] = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if name == "model":
            arguments.insert(0, str(value))
        elif isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            arguments += [f"--{flag}", *map(str, value)]
        elif value is not None:
            arguments.append(f"--{flag}={value}")
    return arguments
