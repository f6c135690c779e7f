"""What the rewriting of JSON Schemas shares."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Schema = dict[str, Any]
Made = TypeVar("Made")
MAX_STEPS = 100_000
"""Steps of about 10 microseconds to rewrite a schema: schemas that are read, some of them again and again, and groups
of values that are compared.
"""
MAX_REWRITTEN_BYTES = 1024 * 1024
"""Maximum size of a rewritten schema in bytes, about."""


class Budget:
    """What rewriting a schema, or several of one request, may cost."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.steps = steps
        self.bytes = MAX_REWRITTEN_BYTES

    def step(self, number: int = 1) -> None:
        """Take steps; raises ValueError if that were too many."""
        self.steps -= number
        if self.steps < 0:
            raise ValueError("has alternatives or patterns that are too complex to be compared")

    def write(self, number: int) -> None:
        """Take bytes of the rewritten schema; raises ValueError if that were too many."""
        self.bytes -= number
        if self.bytes < 0:
            raise ValueError(f"needs more than {MAX_REWRITTEN_BYTES} bytes once it is rewritten")


class Resolve:
    """Returns the schema to which a reference (text or `Shared`) points, and limits the work for one schema."""

    def __init__(self, target: Callable[[Any], Any], budget: Budget) -> None:
        """`target` raises ValueError for references that point nowhere."""
        self._target = target
        self._known: dict[Any, Any] = {}
        self._kept: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self.step = budget.step

    def __call__(self, reference: Any) -> Any:
        self.step()
        if not isinstance(reference, str | Shared):
            return self._target(reference)
        if reference not in self._known:
            self._known[reference] = self._target(reference)
        return self._known[reference]

    def once(self, objects: Sequence[Any], key: Any, make: Callable[[], Made]) -> Made:
        """Return what `make` returns for these very objects, which stay as they are, and call it only once."""
        identity = (key, *map(id, objects))
        if identity not in self._kept:
            self._kept[identity] = make(), objects  # as long as they are kept, their ids belong to them
        found: Made = self._kept[identity][0]
        return found


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

    return json.dumps(value) if isinstance(value, str) else json.dumps(plain(value), sort_keys=True)


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
