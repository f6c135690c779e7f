"""Checks that the readers of settings share: refused keys, supported values, and names of modules."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import cache
from typing import Any

from quire.engine.protocol.errors import ConfigError

WHERE = "quantization_config"


def refuse_unknown(settings: object, known: Iterable[str], where: str = WHERE) -> None:
    """Raise `ConfigError` for an unknown key that is not off, since it may change the meaning of tensors, and for
    settings that are not an object."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where} must be an object, got {settings!r}")
    accepted = {*known, "quant_method"}
    for key, value in settings.items():
        if key not in accepted and value:
            raise ConfigError(
                f"{where}: {key} is not supported, got {value!r}; supported: {', '.join(sorted(accepted))}"
            )


def check_neutral(settings: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], where: str = WHERE) -> None:
    """Raise `ConfigError` for one of the keys if it is on and does not have one of its neutral values."""
    for key, values in neutral.items():
        if (value := settings.get(key)) and value not in values:
            raise ConfigError(f"{where}: {key} {value} is not supported; use a checkpoint that was made without it")


def choose(
    settings: Mapping[str, Any], key: str, supported: Sequence[Any], where: str = WHERE, default: Any = None
) -> Any:
    """The value of a key. Raises `ConfigError` unless it is one of the `supported` values."""
    value, listed = settings.get(key), ", ".join(map(str, supported))
    if value in (None, "") and (value := default) is None:
        raise ConfigError(f"{where}: {key} is missing; supported: {listed}")
    if value not in supported:
        raise ConfigError(
            f"{where}: {key} {value} is not supported; supported: {listed}. Use a checkpoint that is stored so, or the "
            "full-precision one"
        )
    return value


def names(settings: Mapping[str, Any], key: str, where: str = WHERE) -> tuple[str, ...]:
    """A list of modules' names or patterns, empty if there is none. Raises `ConfigError` if it is anything else, or a
    pattern `re:…` is no regular expression."""
    value = settings.get(key) or []
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}: {key} must be a list of modules' names, got {value!r}")
    for name in value:
        if name.startswith("re:"):
            check_expression(name[3:], f"{where}: {key}")
    return tuple(value)


def expressions(patterns: Iterable[str]) -> tuple[str, ...]:
    """The regular expressions of the patterns that are `re:…`."""
    return tuple(each[3:] for each in patterns if each.startswith("re:"))


def check_expression(expression: str, where: str) -> None:
    """Raise `ConfigError` if it is no regular expression."""
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigError(f"{where} has an invalid expression, {expression}: {error}") from None


def match_any(expressions: tuple[str, ...], text: str) -> bool:
    """Whether one of the regular expressions matches the start of a text."""
    return any(each.match(text) for each in _joined(expressions))


@cache
def _joined(expressions: tuple[str, ...]) -> list[re.Pattern[str]]:
    """One expression for all, if they can be joined: lists have hundreds, and models tens of thousands of modules."""
    if not expressions:
        return []
    if not any(re.search(r"\\\d|\(\?P|\(\?\(", each) for each in expressions):  # which refer to groups
        with contextlib.suppress(re.error):
            return [re.compile("|".join(f"(?:{each})" for each in expressions))]
    return [re.compile(each) for each in expressions]


def is_skipped(module: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern of `modules_to_not_convert` matches, by transformers' rules: it names the module, one that
    contains it, or the end of its name; or it is a regular expression that matches one of the first two."""
    patterns = tuple(patterns)
    return module.endswith(patterns) or match_any(_of_paths(patterns), module)


@cache
def _of_paths(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Expressions for the modules that patterns match, and for the modules in them."""
    found = []
    for pattern in patterns:
        expression = rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))"
        try:
            re.compile(expression)
        except re.error:
            expression = rf"{re.escape(pattern)}(?=\.|$)"
        found.append(expression)
    return tuple(found)


def is_excluded(module: str, wildcards: Iterable[str]) -> bool:
    """Whether a shell-style wildcard matches the module or one that contains it. A star at the end of a name stands for
    the modules that the module contains: model.layers.1* is not model.layers.10."""
    exact, others = _excluded(tuple(wildcards))
    return any(path in exact for path in containing(module)) or match_any(others, module)


def containing(module: str) -> Iterator[str]:
    """The module, and the modules that contain it."""
    while module:
        yield module
        module = module.rpartition(".")[0]


@cache
def _excluded(wildcards: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names, and expressions for the other wildcards."""
    paths = [wildcard.rstrip("*") if re.search(r"[^.*]\*$", wildcard) else wildcard for wildcard in wildcards]
    exact = frozenset(path for path in paths if not re.search(r"[*?\[]", path))
    return exact, tuple(translate(each) for path in paths if path not in exact for each in (path, f"{path}.*"))


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names the module, or one that contains it; `re:…` is a regular expression, matched from the
    start as compressed-tensors does."""
    names, own = _names_and_expressions(tuple(patterns))
    return any(path in names for path in containing(module)) or match_any(own, module)


@cache
def _names_and_expressions(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    return frozenset(each for each in patterns if not each.startswith("re:")), expressions(patterns)
