"""What the rewriting of JSON Schemas shares."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Schema = dict[str, Any]
MAX_STEPS = 100_000
"""Schemas that are read, some of them again and again, to rewrite one schema; that takes less than a second."""


class Resolve:
    """Returns the schema to which a reference (text or `Shared`) points, and limits the work for one schema."""

    def __init__(self, target: Callable[[Any], Any]) -> None:
        """`target` raises ValueError for references that point nowhere."""
        self._target = target
        self._steps = 0

    def __call__(self, reference: Any) -> Any:
        self.step()
        return self._target(reference)

    def step(self) -> None:
        """Count a schema that is read; raises ValueError if that were too many."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise ValueError("has alternatives that are too complex to be compared")


MAX_ALTERNATIVES = 256
"""Maximum number of alternatives that replace one keyword."""
TYPES = ("null", "boolean", "number", "string", "array", "object")


class Shared:
    """The value of a `$ref` to a schema that is used in several places, but has no name."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema


def types_of(schema: Schema) -> set[str]:
    """Return the names of the types that a schema's `type` allows; all without `type`."""
    named = schema.get("type", list(TYPES))
    return set(named) if isinstance(named, list) else {named}


def for_type(schema: Schema, name: str, choices: Sequence[Any]) -> list[Any]:
    """Return the schemas that hold if values of this type satisfy one of the choices, as far as `schema` allows."""
    allowed = types_of(schema)
    if name not in allowed:
        return []
    check_number(len(choices))
    others = [
        each for each in TYPES if each != name and (each in allowed or (each == "number" and "integer" in allowed))
    ]
    return [{"anyOf": [*({"type": name, **choice} for choice in choices), *([{"type": others}] if others else [])]}]


def check_number(count: int) -> None:
    """Raise ValueError if there are too many alternatives."""
    if count > MAX_ALTERNATIVES:
        raise ValueError(f"needs {count} alternatives in the grammar, more than {MAX_ALTERNATIVES}")


def subsets(names: Iterable[str], size: int) -> list[tuple[str, ...]]:
    """Return the subsets of this size; raises ValueError if there are too many."""
    found = list(itertools.islice(itertools.combinations(names, size), MAX_ALTERNATIVES + 1))
    if len(found) > MAX_ALTERNATIVES:
        raise ValueError(f"needs more than {MAX_ALTERNATIVES} alternatives in the grammar")
    return found


def canonical(value: Any) -> str:
    """Return a text that is the same for values that JSON Schema takes for equal."""

    def plain(part: Any) -> Any:
        match part:
            case dict():
                return {key: plain(each) for key, each in part.items()}
            case list():
                return [plain(each) for each in part]
            case float() if part.is_integer():
                return int(part)
        return part

    return json.dumps(plain(value), sort_keys=True)


def type_of(value: Any) -> str:
    """Return the name of a value's type, "integer" if it is integral."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def strings(value: Any) -> list[str]:
    """Return the strings of a list; raises ValueError if it is none, or contains others."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("must be a list of strings")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """Return an object; raises ValueError if it is none."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return value


def listed(value: Any) -> list[Any]:
    """Return a list; raises ValueError if it is none."""
    if not isinstance(value, list):
        raise ValueError("must be a list")
    return value


def count(value: Any) -> int:
    """Return a number of items or properties; raises ValueError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("must be a non-negative integer")
    return value
