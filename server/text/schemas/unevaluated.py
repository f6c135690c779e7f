"""`unevaluatedProperties` and `unevaluatedItems`: a schema is closed behind what each of its branches evaluates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from quire.server.text.schemas.common import Resolve, Schema, check_number, listed, mapping
from quire.server.text.schemas.disjoint import overlaps
from quire.server.text.schemas.normal import normalized

_BRANCHING = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "allOf", "$ref")


@dataclass
class _Branch:
    """One way in which a value may match a schema."""

    conditions: list[Any] = field(default_factory=list)
    """Schemas that hold in this case."""
    names: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    all_properties: bool = False
    size: int = 0
    """Items at the beginning that are evaluated."""
    all_items: bool = False
    matching: list[Any] = field(default_factory=list)
    """Schemas of `contains`: items that match them are evaluated."""

    @property
    def size_in_memory(self) -> int:
        """The number of its parts."""
        return len(self.conditions) + len(self.names) + len(self.patterns) + len(self.matching)

    def __add__(self, other: _Branch) -> _Branch:
        return _Branch(
            self.conditions + other.conditions,
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_properties or other.all_properties,
            max(self.size, other.size),
            self.all_items or other.all_items,
            self.matching + other.matching,
        )


def properties(schema: Schema, resolve: Resolve) -> Schema:
    """Return a schema without `unevaluatedProperties`, whose branches have `additionalProperties` instead."""

    def close(branch: _Branch, rest: Any) -> Any:
        if branch.all_properties:
            return True
        closed = {"properties": dict(branch.names), "additionalProperties": rest}
        return {**closed, "patternProperties": dict(branch.patterns)} if branch.patterns else closed

    return _closed(schema, "unevaluatedProperties", close, resolve)


def items(schema: Schema, resolve: Resolve) -> Schema:
    """Return a schema without `unevaluatedItems`, whose branches have `items` instead."""

    def close(branch: _Branch, rest: Any) -> Any:
        if branch.all_items:
            return True
        rest = {"anyOf": [*branch.matching, rest]} if branch.matching else rest
        return {"prefixItems": [True] * branch.size, "items": rest} if branch.size else {"items": rest}

    return _closed(schema, "unevaluatedItems", close, resolve)


def _closed(schema: Schema, keyword: str, close: Callable[[_Branch, Any], Any], resolve: Resolve) -> Schema:
    schema = dict(schema)
    rest = schema.pop(keyword)
    branches = _branches(schema, resolve, 0)
    if len(branches) == 1:
        closed = close(branches[0], rest)
        return {**schema, "allOf": [*schema.get("allOf", ()), closed]}
    plain = {key: value for key, value in schema.items() if key not in _BRANCHING}
    return {**plain, "anyOf": [{"allOf": [*each.conditions, close(each, rest)]} for each in branches]}


def _branches(schema: Any, resolve: Resolve, depth: int) -> list[_Branch]:
    """Return the ways in which values match a schema. Their union is the schema; they may overlap."""
    if depth > 16:
        raise ValueError("has a reference beside it that refers to itself")
    resolve.step()
    if isinstance(schema, bool):
        return [_Branch([] if schema else [False])]
    given = mapping(schema)
    schema = normalized({"then": True, **given} if "if" in given else given)
    own = _Branch(
        names=dict.fromkeys(mapping(schema.get("properties", {})), True),
        patterns=dict.fromkeys(mapping(schema.get("patternProperties", {})), True),
        all_properties="additionalProperties" in given or "unevaluatedProperties" in given,
        size=len(listed(schema.get("prefixItems", []))),
        all_items="items" in schema or "unevaluatedItems" in given,
        matching=[given["contains"]] if "contains" in given else [],
    )
    is_closed = not schema.keys().isdisjoint(("unevaluatedItems", "unevaluatedProperties"))
    plain = {key: value for key, value in schema.items() if is_closed or key not in _BRANCHING}
    if depth and plain:
        own.conditions.append(plain)
    found = [own]

    def multiply(ways: Iterable[_Branch]) -> None:
        found[:] = _product(found, list(ways), resolve)

    if "$ref" in schema:
        multiply(_branches(resolve(schema["$ref"]), resolve, depth + 1))
    for each in listed(schema.get("allOf", [])):
        multiply(_branches(each, resolve, depth + 1))
    if "anyOf" in schema:
        options = listed(schema["anyOf"])
        most = len(options) if overlaps(options, {}, resolve) else 1
        check_number(2 ** min(len(options), 16) if most > 1 else len(options))
        ways = [_branches(each, resolve, depth + 1) for each in options]
        multiply(
            way
            for size in range(1, most + 1)
            for chosen in itertools.combinations(ways, size)
            for way in _all(list(chosen), resolve)
        )
    if "oneOf" in schema:
        condition = _Branch([{"oneOf": schema["oneOf"]}] if overlaps(listed(schema["oneOf"]), {}, resolve) else [])
        multiply(condition + way for each in listed(schema["oneOf"]) for way in _branches(each, resolve, depth + 1))
    if "if" in schema:
        then, otherwise = schema.get("then", True), schema.get("else", True)
        multiply(
            [
                *_all([_branches(schema["if"], resolve, depth + 1), _branches(then, resolve, depth + 1)], resolve),
                *(_Branch([{"not": schema["if"]}]) + way for way in _branches(otherwise, resolve, depth + 1)),
            ]
        )
    for name, each in mapping(schema.get("dependentSchemas", {})).items():
        present = _Branch([{"type": "object", "required": [name]}])
        multiply(
            [
                _Branch([{"properties": {name: False}}]),
                *(present + way for way in _branches(each, resolve, depth + 1)),
            ]
        )
    return found


def _all(parts: list[list[_Branch]], resolve: Resolve) -> list[_Branch]:
    """Return the ways in which all of these match."""
    found = [_Branch()]
    for ways in parts:
        found = _product(found, ways, resolve)
    return found


def _product(found: list[_Branch], ways: list[_Branch], resolve: Resolve) -> list[_Branch]:
    """Return the ways in which one of both matches."""
    check_number(len(found) * len(ways))
    size = len(ways) * sum(one.size_in_memory for one in found) + len(found) * sum(one.size_in_memory for one in ways)
    resolve.step(size // 10)
    return [one + other for one in found for other in ways]
