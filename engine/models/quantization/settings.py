"""What the readers of settings share: keys that are refused, values that are supported, and names of modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from functools import cache
from typing import Any

from quire.engine.protocol.errors import ConfigError

WHERE = "quantization_config"


def refuse_unknown(settings: object, known: Iterable[str], where: str = WHERE) -> None:
    """Raise `ConfigError` for a key that is not known and not off, since it may change what tensors stand for, and for
    settings that are no object."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where} must be an object, got {settings!r}")
    accepted = {*known, "quant_method"}
    for key, value in settings.items():
        if key not in accepted and value:
            raise ConfigError(
                f"{where}: {key} is not supported, got {value!r}; supported: {', '.join(sorted(accepted))}"
            )


def check_neutral(settings: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], where: str = WHERE) -> None:
    """Raise `ConfigError` for one of the keys if it is on and has not one of its neutral values."""
    for key, values in neutral.items():
        if (value := settings.get(key)) and value not in values:
            raise ConfigError(f"{where}: {key} {value} is not supported; use a checkpoint that was made without it")


def choose(
    settings: Mapping[str, Any], key: str, supported: Sequence[Any], where: str = WHERE, default: Any = None
) -> Any:
    """The value of a key. Raises `ConfigError` unless it is one of those `supported`."""
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
    """The regular expressions of those patterns that are `re:…`."""
    return tuple(each[3:] for each in patterns if each.startswith("re:"))


def check_expression(expression: str, where: str) -> None:
    """Raise `ConfigError` if it is no regular expression."""
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigError(f"{where} has an invalid expression, {expression}: {error}") from None


def is_skipped(module: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern of `modules_to_not_convert` matches, by transformers' rules: it names the module, one that
    contains it, or the end of its name; or it is a regular expression that matches one of the first two."""
    for pattern in patterns:
        try:
            expression = re.compile(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))")
        except re.error:
            expression = re.compile(rf"{re.escape(pattern)}(?=\.|$)")
        if expression.match(module) or module.endswith(pattern):
            return True
    return False


def is_excluded(module: str, wildcards: Iterable[str]) -> bool:
    """Whether a shell-style wildcard matches the module or one that contains it. A star at the end of a name stands for
    what the module contains: model.layers.1* is not model.layers.10."""
    return bool(wildcards) and _excluded(tuple(wildcards)).match(module) is not None


@cache
def _excluded(wildcards: tuple[str, ...]) -> re.Pattern[str]:
    paths = [wildcard.rstrip("*") if re.search(r"[^.*]\*$", wildcard) else wildcard for wildcard in wildcards]
    return re.compile("|".join(translate(each) for path in paths for each in (path, f"{path}.*")))


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names the module, or one that contains it; `re:…` is a regular expression, matched from the
    start as compressed-tensors does."""
    return any(
        re.match(each[3:], module) if each.startswith("re:") else f"{module}.".startswith(f"{each}.")
        for each in patterns
    )
