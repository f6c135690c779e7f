"""Command-line flags from dataclass fields, and the same flags from a YAML file."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Set
from pathlib import Path
from typing import Any, Literal, TypeVar

from quire.engine.config import devices
from quire.engine.protocol.errors import ConfigError, reason_of
from quire.server.config.lazy import LazyParser

T = TypeVar("T")


def add_flags(parser: argparse.ArgumentParser, options: type) -> None:
    """Add a flag for every field made by `options.flag`, in a group for each class that declares some. Flags that are
    not given are absent from the namespace.

    A group's title is the name of the class in lower case, without `Options`; its description is the docstring.
    """
    hints = typing.get_type_hints(options)
    for declaring in reversed(options.__mro__):
        own = inspect.get_annotations(declaring)
        if fields := [field for field in _flags(options) if field.name in own]:
            words = re.findall("[A-Z][a-z]+", re.sub(r"(Command)?Options$", "", declaring.__name__))
            group = parser.add_argument_group("-".join(words).lower(), (declaring.__doc__ or "").partition("\n")[0])
            for field in fields:
                text: str = field.metadata["help"].replace("%", "%%")
                if field.default is not None and "(default" not in text:
                    text += f" (default: {_show(field.default)})"
                _add_flag(group, field, hints[field.name], text)


def add_hidden_flags(group: argparse._ActionsContainer, options: type, names: Collection[str] | None = None) -> None:
    """Add flags that are not in the help: all, or the fields `names`. Flags that the parser already has are left as
    they are.
    """
    hints = typing.get_type_hints(options)
    for field in _flags(options):
        if (names is None or field.name in names) and _names(field)[-1] not in group._option_string_actions:
            _add_flag(group, field, hints[field.name], argparse.SUPPRESS)


def _flags(options: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(options) if "help" in field.metadata]


def _names(field: dataclasses.Field[Any]) -> list[str]:
    return [name for name in (field.metadata["short"], f"--{field.name.replace('_', '-')}") if name]


def _add_flag(group: argparse._ActionsContainer, field: dataclasses.Field[Any], hint: Any, text: str) -> None:
    kind = _kind(hint, field.metadata["metavar"])
    action = group.add_argument(*_names(field), dest=field.name, default=argparse.SUPPRESS, help=text, **kind)
    vars(action)["is_common"] = field.metadata["is_common"]


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
            words = typing.get_args(members[1])
            return {"type": _named(f"{hint.__name__} or {'/'.join(words)}", hint, words), "metavar": metavar or "N"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is Mapping:
        return {"type": _json_object, "action": _Update, "metavar": "JSON"}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "metavar": metavar}
    if hint is float and metavar is not None:  # the unit
        hint = _named(f"number ({metavar})", hint)
    return {"type": hint, "metavar": metavar or {int: "N", float: "X"}.get(hint, "TEXT")}


def _named(name: str, kind: type, words: tuple[str, ...] = ()) -> Callable[[str], Any]:
    """Return an argparse type that accepts one of the words as a string, or a value of `kind`."""

    def convert(text: str) -> Any:
        return text if text in words else kind(text)

    convert.__name__ = name  # argparse reports "invalid … value"
    return convert


def _json_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError
    return found


_json_object.__name__ = "JSON object"  # argparse reports "invalid … value"


class _Update(argparse.Action):
    """Merges the objects of a flag that is given several times, and the objects in them."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        setattr(namespace, self.dest, _merged(getattr(namespace, self.dest, {}), values))


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {**first} | {
        name: _merged(first[name], value) if isinstance(value, dict) and isinstance(first.get(name), dict) else value
        for name, value in second.items()
    }


def collect(parsed: argparse.Namespace, options: type[T]) -> T:
    """Build the dataclass from the parsed command line."""
    names = {field.name for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(parsed).items() if name in names}
    return options(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})


def runs_on_cpu(device: str) -> bool:
    """Whether --device, perhaps auto, means the CPU."""
    return device == "cpu" or (device == "auto" and devices.count_gpus() == 0)


def read_config(path: str, parser: LazyParser) -> list[str]:
    """Convert a YAML file to command-line arguments. The keys are flags of `parser`, or vLLM's, without the leading
    dashes.

    Raises `ConfigError` for an unreadable file, and for an unknown key, which it names.
    """
    import yaml  # slow to import

    from quire.server.config import vllm

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot read the file: {reason_of(error)}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: cannot read the file: nested too deeply") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"--config {path}: expected a mapping of flags, such as `tensor-parallel-size: 2`")
    known = {"--model", *parser._option_string_actions, *vllm.flags()} - {"--config", "--help"}
    for key in content or {}:
        if (flag := f"--{str(key).replace('_', '-')}".partition(".")[0]) not in known:
            near = parser.nearest(flag)
            hint = f"; did you mean {near.removeprefix('--')}?" if near is not None else ""
            raise ConfigError(f"--config {path}: unknown flag {key}{hint}")
    return to_arguments({str(key): value for key, value in (content or {}).items()})


def to_arguments(given: Mapping[str, Any]) -> list[str]:
    """Convert options by name to a command line. Underscores are dashes, except in the keys of JSON (`flag.a_key`).
    None values of flags are skipped.

    Raises `ConfigError` for values that no command line can have, such as functions.
    """
    arguments: list[str] = []
    for name, value in given.items():
        head, dot, keys = name.partition(".")
        flag = head.replace("_", "-") + dot + keys
        if name == "model":
            arguments.insert(0, str(value))
        elif dot:
            arguments.append(f"--{flag}={json.dumps(value)}")
        elif isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple | Set):
            arguments += [f"--{flag}", *map(str, value)] if value else []
        elif isinstance(value, dict):
            try:
                arguments.append(f"--{flag}={json.dumps(value)}")
            except (TypeError, ValueError) as error:
                raise ConfigError(f"argument --{flag}: expected a JSON object: {error}") from None
        elif callable(value):
            raise ConfigError(f"argument --{flag}: functions and classes are not supported; use plain values")
        elif value is not None:
            arguments.append(f"--{flag}={value}")
    return arguments
