"""Reads command lines and environment variables that were written for `vllm serve`; `vllm_flags` is the table."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any, Literal

from quire.engine.protocol.errors import ConfigError
from quire.server.config import vllm_flags


@dataclass(frozen=True)
class Flag:
    """A flag of vLLM that Quire does not have, and its conversion."""

    names: tuple[str, ...]
    """The first one is the usual one."""
    values: Literal["", "=", "?", "+"]
    """As in `vllm_flags`; "": on or off."""
    verdict: Literal["renamed", "parts", "ignored", "refused"]
    text: str
    """Its equivalent, the reason why it has no effect, or its replacement."""
    convert: Callable[[list[str]], list[str]] | None = None
    harmless: tuple[str, ...] = ()
    """Values of a refused flag that change nothing."""


@cache
def flags() -> dict[str, Flag]:
    """The flags of the table by each of their names."""
    found = [_flag(spec, "renamed", text, convert) for spec, (text, convert) in vllm_flags.RENAMED.items()]
    for spec, (own, _, _) in vllm_flags.PARTS.items():
        found.append(_flag(spec, "parts", ", ".join(f"`{key}`: `{flag}`" for key, flag in own.items())))
    for specs, verdict in ((vllm_flags.IGNORED, "ignored"), (vllm_flags.REFUSED, "refused")):
        found += [_flag(spec, verdict, text) for text, line in specs.items() for spec in line.split()]
    return {name: flag for flag in found for name in flag.names}


def _flag(spec: str, verdict: Any, text: str, convert: Callable[[list[str]], list[str]] | None = None) -> Flag:
    match = re.fullmatch(r"([\w|-]+)([=?+]?)(.*)", spec)
    assert match is not None
    values: Any = match[2]
    return Flag(
        names=tuple(match[1].split("|")),
        values=values,
        verdict=verdict,
        text=text,
        convert=convert,
        harmless=tuple(filter(None, match[3].split(","))),
    )


def translate(arguments: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Convert vLLM's flags to Quire's; returns the new arguments, and a note for each flag without effect.

    `own` are the names of Quire's flags, which are left as they are, except for values of vLLM's. Raises `ConfigError`
    for a flag that is not supported.
    """
    known, left, result, notes = flags(), _plain(arguments), list[str](), dict[str, str]()
    while left:
        name, equals, text = (argument := left.pop(0)).partition("=")
        is_off = name.startswith("--no-") and name not in known
        flag = known.get(f"--{name[5:]}" if is_off else name) if name.startswith("-") and name not in own else None
        if flag is None:
            if name in vllm_flags.LISTS and (text := text or "".join(left[:1])).startswith("["):
                left = left if equals else left[1:]
                result += [name, *_list(name, text)]
                continue
            if name == "--cuda-graph-sizes" and (sizes := list(takewhile(str.isdecimal, left))) and not equals:
                del left[: len(sizes)]
                argument = f"{name}={','.join(sizes)}"
            if name in vllm_flags.SAME and (equals or (left and _is_value(left[0]))):
                value = text if equals else left.pop(0)
                argument = f"{name}={(converted := vllm_flags.SAME[name][1](value))}"
                if {value, value.upper()} & vllm_flags.REPLACED.get(name, {}).keys():
                    notes[name] = f"{name} {value}: Quire uses {converted} instead"
            result.append(argument)
            continue
        if equals:
            values = [text]
        else:
            count = {"": 0, "=": 1, "?": 1, "+": len(left)}[flag.values]
            values = list(takewhile(_is_value, left[:count]))
            del left[: len(values)]
        if not values and flag.values in ("=", "+"):
            raise ConfigError(f"argument {name}: expected a value")
        if flag.verdict == "ignored":
            notes[flag.names[0]] = f"{flag.names[0]} has no effect: {flag.text}"
        elif is_off:
            continue
        elif flag.verdict == "refused":
            if not set(values) <= set(flag.harmless) or flag.values == "":
                raise ConfigError(f"argument {name}: {flag.text}")
        elif name == "--model":
            result[:0] = values  # behind a flag with several values it would be one of them
        elif flag.verdict == "parts":
            left[:0], unused = _parts(flag, values[0])
            notes |= unused
        elif flag.convert is not None:
            arguments = _converted(flag, flag.convert, values)
            given = {each.partition("=")[0] for each in (*result, *left)}
            if name == vllm_flags.KV_TRANSFER and (twice := given.intersection(arguments[::2])):
                raise ConfigError(
                    f"argument {name} is the same as {' and '.join(arguments[::2])}; omit it, or {min(twice)}"
                )
            left[:0] = arguments
    return result, list(notes.values())


def _converted(flag: Flag, convert: Callable[[list[str]], list[str]], values: list[str]) -> list[str]:
    try:
        return _plain(convert(values))
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"argument {flag.names[0]}: {' '.join(values)}: expected a value for {flag.text}") from None


def _parts(flag: Flag, text: str) -> tuple[list[str], dict[str, str]]:
    """Convert a flag with a JSON object: returns flags of Quire, and notes on keys without effect."""
    own, ignored, reason = next(parts for spec, parts in vllm_flags.PARTS.items() if flag.names[0] in spec)
    (name, *_), arguments, notes = flag.names, list[str](), dict[str, str]()
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ConfigError(f"argument {name}: {text}: expected a JSON object")
    unused = {key: only for key, _, only in (word.partition("=") for word in ignored.split())}
    for key, value in config.items():
        if only := unused.get(key):
            if value not in (None, "", only):
                raise ConfigError(f"argument {name}: {key} {value} is not supported; use {only}")
        elif key in unused:
            notes[f"{name}.{key}"] = f"{name}.{key} has no effect: {reason}"
        elif key not in own and value:
            raise ConfigError(f"argument {name}: {key} is not supported; omit it")
        elif key in own and value not in (None, ""):
            arguments += [own[key], str(value)]
    return arguments, notes


def _list(name: str, text: str) -> list[str]:
    try:
        return [str(value) for value in json.loads(text)]
    except ValueError:
        raise ConfigError(f"argument {name}: {text}: expected a JSON list") from None


def _is_value(text: str) -> bool:
    return re.match(r"-\D", text) is None


def _plain(arguments: Sequence[str]) -> list[str]:
    """Resolve the forms that vLLM allows: underscores in names, `-O3`, `-qfp8`, and JSON by keys (`--flag.key`).

    The JSON stands at the end, as a flag with one value.
    """
    result: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if argument.startswith("--") or re.match(r"-[a-z]+\.", argument):
            name, equals, text = argument.partition("=")
            name, dot, keys = name.partition(".")
            name = name.replace("_", "-")
            if dot:
                if not equals and not left:
                    raise ConfigError(f"argument {argument}: expected a value")
                try:
                    _insert(nested.setdefault(name, {}), keys, text if equals else left.pop(0))
                except (TypeError, AttributeError):
                    raise ConfigError(f"argument {argument}: {name} has another kind of value there") from None
            else:
                result.append(f"{name}{equals}{text}")
        elif match := re.fullmatch(r"-O(\.\w+)?=?(.*)", argument):
            if (match[1] or not match[2]) and "=" not in argument and left and _is_value(left[0]):
                left.pop(0)
            result.append("--optimization-level=")
        elif match := re.fullmatch(r"(-[nqr])=?(.+)", argument):
            result.append(f"{match[1]}={match[2]}")
        else:
            result.append(argument)
    return [*result, *(text for name, value in nested.items() for text in (name, json.dumps(value)))]


def _insert(config: dict[str, Any], keys: str, text: str) -> None:
    """Set `a.b.c` in nested objects; `a+` appends to a list."""
    *path, last = keys.removesuffix("+").split(".")
    for key in path:
        config = config.setdefault(key, {})
    if keys.endswith("+"):
        config.setdefault(last, []).extend(map(_value, text.split(",")))
    else:
        config[last] = _value(text)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_environment(
    parser: argparse.ArgumentParser, runs_on_cpu: Callable[[], bool]
) -> tuple[dict[str, Any], list[str]]:
    """Read vLLM's variables: set Quire's own, and return the equivalent values of `parser` for the others, and notes on
    all.

    Raises `ConfigError` for a variable that is not supported, or has an invalid value.
    """
    found, unused, notes = dict[str, Any](), list[str](), list[str]()
    refused = {spec.partition("=")[0]: (spec, text) for spec, text in vllm_flags.VARIABLES_REFUSED.items()}
    for name, value in sorted(os.environ.items()):
        if not name.startswith("VLLM_") or not (value or name == "VLLM_API_KEY"):  # an empty key is an error
            continue
        if name.startswith("VLLM_CPU_") and not runs_on_cpu():
            unused.append(name)
        elif own := vllm_flags.VARIABLES.get(name):
            os.environ[own] = os.environ.get(own) or value
        elif name in vllm_flags.VARIABLES_OF_FLAGS:
            if argument := _flag_of_variable(name, value, parser):
                found |= _parsed(parser, argument, f"environment variable {name}={value}")
                notes.append(f"environment variable {name}={value} is the default of {argument.partition('=')[0]}")
        elif name in refused:
            spec, text = refused[name]
            if value.lower() not in (spec.partition("=")[2] or "0,false").split(","):
                raise ConfigError(f"environment variable {name}={value}: {text}")
        else:
            unused.append(name)
    if unused:
        notes.append(f"environment variables of vLLM have no effect: {', '.join(unused)}")
    return found, notes


def _flag_of_variable(name: str, value: str, parser: argparse.ArgumentParser) -> str:
    """Empty if the value is the default, or the parser does not have the flag."""
    flag, convert = vllm_flags.VARIABLES_OF_FLAGS[name]
    try:
        converted = convert(value)
    except (ValueError, OverflowError):
        raise ConfigError(f"environment variable {name}={value}: expected a value for {flag}") from None
    return f"{flag}={converted}" if converted and flag in parser._option_string_actions else ""


def _parsed(parser: argparse.ArgumentParser, argument: str, source: str) -> dict[str, Any]:
    """The values of an argument, without the parser's defaults; errors name its source instead of the flag."""
    dest, namespace = parser._option_string_actions[argument.partition("=")[0]].dest, argparse.Namespace()
    was, parser.exit_on_error = parser.exit_on_error, False
    try:
        parser.parse_known_args([argument], namespace)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{source}: {error.message}") from None
    finally:
        parser.exit_on_error = was
    return {dest: getattr(namespace, dest)}
