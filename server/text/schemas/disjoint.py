"""Decides whether no value can match two schemas, from their types, constants, bounds and required properties."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.server.text import patterns
from quire.server.text.schemas.common import Resolve, Schema, canonical, type_of
from quire.server.text.schemas.formats import superset
from quire.server.text.schemas.normal import normalized

_ATOMS = {
    **{name: frozenset((name,)) for name in ("null", "boolean", "integer", "string", "array", "object")},
    "number": frozenset(("integer", "number")),
}
"""Disjoint sets of values by `type`; "number" stands for the numbers that are not integral."""
_ALL = frozenset(_ATOMS)
_MAX_DEPTH = 12
_MAX_COMPARED = 90
"""Alternatives that are compared in pairs."""
_MAX_LENGTH = 200
"""Lengths that are compared with patterns."""
_MAX_ITEMS = 8
"""Items of two arrays that are compared."""

_Range = tuple[float, float]


@dataclass
class _Facts:
    """What is known about all values of a schema."""

    types: frozenset[str] = _ALL
    values: dict[str, Any] | None = None
    """By canonical text; None if they are not enumerated."""
    number: _Range = (-math.inf, math.inf)
    length: _Range = (0, math.inf)
    patterns: frozenset[str] = frozenset()
    """Patterns that strings match, also those of formats."""
    size: _Range = (0, math.inf)
    """The number of an array's items."""
    required: frozenset[str] = frozenset()
    objects: list[Schema] = field(default_factory=list)
    """Schemas that all hold, for the properties of objects."""
    arrays: list[Schema] = field(default_factory=list)


def overlaps(options: Sequence[Any], siblings: Schema, resolve: Resolve) -> dict[int, set[int]]:
    """Return which alternatives, by their numbers, may match together with which others, for values that match
    `siblings` as well. Raises ValueError if that takes too long.
    """
    comparison = _Comparison(resolve)
    facts = [comparison.facts([option, siblings]) for option in options]
    found: dict[int, set[int]] = {}
    if not comparison.is_partition(facts):
        if len(facts) > _MAX_COMPARED:
            raise ValueError("has too many alternatives, and no constants tell them apart")
        for (one, left), (other, right) in itertools.combinations(enumerate(facts), 2):
            if not comparison.are_disjoint(left, right):
                found.setdefault(one, set()).add(other)
                found.setdefault(other, set()).add(one)
    return found


def are_disjoint(one: Any, other: Any, resolve: Resolve) -> bool:
    """Return whether no value matches both schemas; False if that is not certain."""
    comparison = _Comparison(resolve)
    return comparison.are_disjoint(comparison.facts([one]), comparison.facts([other]))


def is_empty(schema: Any, resolve: Resolve) -> bool:
    """Return whether no value matches a schema; False if that is not certain."""
    facts = _Comparison(resolve).facts([schema])
    ranges = {"string": facts.length, "array": facts.size, "integer": facts.number, "number": facts.number}
    bounds = {name: ranges.get(name, (0, 0)) for name in facts.types}
    types = {name for name, (low, high) in bounds.items() if low <= high}
    return not types or (types == {"string"} and not _some_text_matches(facts, resolve))


def _some_text_matches(facts: _Facts, resolve: Resolve) -> bool:
    least, most = facts.length
    if not facts.patterns or (least, most) == (0, math.inf) or least > _MAX_LENGTH:
        return True
    length = rf"^[\s\S]{{{least},{most if most <= _MAX_LENGTH else ''}}}$"
    try:
        return patterns.matches_any(patterns.joint([*sorted(facts.patterns), length]), resolve.step)
    except ValueError:
        return True


def finite_values(schema: Any, resolve: Resolve) -> list[Any] | None:
    """Return the values of a schema if its `const`, `enum` or types enumerate them, among them possibly others that do
    not match; None if they are not enumerated.
    """
    facts = _Comparison(resolve).facts([schema])
    if facts.values is not None:
        return list(facts.values.values())
    if facts.types <= {"null", "boolean"}:
        return [*([None] if "null" in facts.types else []), *([False, True] if "boolean" in facts.types else [])]
    return None


class _Comparison:
    """Reads schemas as far as a comparison needs them."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve

    def is_partition(self, facts: Sequence[_Facts]) -> bool:
        """Return whether the alternatives are disjoint by their constants, or by those of a property that all require;
        in time linear in their number.
        """
        if _are_distinct(each.values for each in facts):
            return True
        if not facts or any(each.types != {"object"} for each in facts):
            return False
        common = frozenset.intersection(*(each.required for each in facts))
        return any(_are_distinct(self._property(each, name, 1).values for each in facts) for name in sorted(common))

    def are_disjoint(self, one: _Facts, other: _Facts, depth: int = 0) -> bool:
        """Return whether no value has both facts; False if that is not certain."""
        self._resolve.step()
        if one.values is not None and other.values is not None:
            self._resolve.step(min(len(one.values), len(other.values)) // 100)
            return one.values.keys().isdisjoint(other.values)
        return all(self._tells_apart(name, one, other, depth) for name in one.types & other.types)

    def facts(self, schemas: Sequence[Any], depth: int = 0) -> _Facts:
        """Return what is known about values that match all of these schemas; not to be changed."""
        return self._resolve.once(schemas, depth, lambda: self._facts(schemas, depth))

    def _facts(self, schemas: Sequence[Any], depth: int) -> _Facts:
        facts = _Facts()
        for schema in schemas:
            if schema is False:
                facts.types, facts.values = frozenset(), {}
            if isinstance(schema, dict) and depth <= _MAX_DEPTH:
                self._resolve.step(1 + len(schema) // 10)
                self._learn(facts, normalized(schema), depth)
                self._resolve.step((len(facts.values or ()) + len(facts.required) + len(facts.objects)) // 10)
        if facts.values is not None:
            facts.values = {text: each for text, each in facts.values.items() if type_of(each) in facts.types}
            facts.types &= frozenset(map(type_of, facts.values.values()))
        return facts

    def _tells_apart(self, name: str, one: _Facts, other: _Facts, depth: int) -> bool:
        """Return whether no value of this type has both facts."""
        if depth > _MAX_DEPTH:
            return False
        match name:
            case "integer" | "number":
                return _are_apart(one.number, other.number)
            case "string":
                return _are_apart(one.length, other.length) or self._is_none_matched(one, other)
            case "array":
                both = int(min(max(one.size[0], other.size[0]), _MAX_ITEMS))
                return _are_apart(one.size, other.size) or any(
                    self.are_disjoint(self._item(one, at, depth), self._item(other, at, depth), depth + 1)
                    for at in range(both)
                )
            case "object":
                self._resolve.step((len(one.required) + len(other.required)) // 10)
                return any(
                    self.are_disjoint(self._property(one, key, depth), self._property(other, key, depth), depth + 1)
                    for key in sorted(one.required | other.required)
                )
        return False

    def _is_none_matched(self, one: _Facts, other: _Facts) -> bool:
        """Return whether no string matches the patterns and is among the values of both; False if not certain."""
        if not one.patterns | other.patterns:
            return False
        values = [facts.values.values() for facts in (one, other) if facts.values is not None]
        texts = [patterns.constants(value for value in each if isinstance(value, str)) for each in values]
        try:
            joint = patterns.joint([*sorted(one.patterns | other.patterns), *texts])
            return not patterns.matches_any(joint, self._resolve.step)
        except ValueError:
            return False

    def _property(self, facts: _Facts, name: str, depth: int) -> _Facts:
        """Return what is known about a property."""
        found: list[Any] = []
        self._resolve.step(len(facts.objects) // 10)
        for each in facts.objects:
            properties = each.get("properties")
            if isinstance(properties, dict) and name in properties:
                found.append(properties[name])
            elif not each.get("patternProperties"):
                found.append(each.get("additionalProperties", True))
        return self.facts(found, depth)

    def _item(self, facts: _Facts, at: int, depth: int) -> _Facts:
        """Return what is known about the item at this place."""
        found: list[Any] = []
        self._resolve.step(len(facts.arrays) // 10)
        for each in facts.arrays:
            first = each.get("prefixItems")
            first = first if isinstance(first, list) else []
            found.append(first[at] if at < len(first) else each.get("items", True))
        return self.facts(found, depth)

    def _learn(self, facts: _Facts, schema: Schema, depth: int) -> None:
        for keyword, learn in _LEARN.items():
            if keyword in schema:
                learn(facts, schema[keyword])
        if isinstance(values := schema.get("enum"), list):
            _among(facts, self._resolve.once([values], "enum", lambda: self._by_text(values)))
        if "const" in schema:
            _among(facts, self._by_text([schema["const"]]))
        if schema.keys() & {"properties", "additionalProperties"}:
            facts.objects.append(schema)
        if schema.keys() & {"prefixItems", "items"}:
            facts.arrays.append(schema)
        if "$ref" in schema:
            _merge(facts, self.facts([self._resolve(schema["$ref"])], depth + 1))
        if isinstance(schema.get("allOf"), list):
            _merge(facts, self.facts(schema["allOf"], depth + 1))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                _merge(facts, _hull([self.facts([each], depth + 1) for each in schema[keyword]]))

    def _by_text(self, values: list[Any]) -> dict[str, Any]:
        """Return values by their canonical text."""
        self._resolve.step(len(values) // 4)
        found = {canonical(each): each for each in values}
        self._resolve.step(sum(map(len, found)) // 100)
        return found


def _are_distinct(sets: Iterable[dict[str, Any] | None]) -> bool:
    seen: set[str] = set()
    for values in sets:
        if values is None or not seen.isdisjoint(values):
            return False
        seen.update(values)
    return True


def _are_apart(left: _Range, right: _Range) -> bool:
    return left[1] < right[0] or right[1] < left[0]


def _merge(facts: _Facts, more: _Facts) -> None:
    """Add what is known from another schema that holds as well."""
    facts.types &= more.types
    if more.values is not None:
        _among(facts, more.values)
    for name in ("number", "length", "size"):
        low, high = getattr(more, name)
        _narrow(facts, name, low, high)
    facts.patterns |= more.patterns
    facts.required |= more.required
    facts.objects += more.objects
    facts.arrays += more.arrays


def _hull(facts: Sequence[_Facts]) -> _Facts:
    """Return what is known about values of which at least one of these is known."""
    types = frozenset[str]().union(*(each.types for each in facts))
    if any(each.values is None for each in facts):
        return _Facts(types)
    return _Facts(types, {text: value for each in facts for text, value in (each.values or {}).items()})


def _among(facts: _Facts, values: dict[str, Any]) -> None:
    facts.values = values if facts.values is None else {key: facts.values[key] for key in facts.values if key in values}


def _narrow(facts: _Facts, name: str, low: float, high: float) -> None:
    before = getattr(facts, name)
    setattr(facts, name, (max(before[0], low), min(before[1], high)))


def _learn_type(facts: _Facts, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if all(isinstance(name, str) and name in _ATOMS for name in names):
        facts.types &= frozenset[str]().union(*(_ATOMS[name] for name in names))


def _learn_required(facts: _Facts, value: Any) -> None:
    if isinstance(value, list):
        facts.required |= {each for each in value if isinstance(each, str)}


def _learn_pattern(facts: _Facts, value: Any) -> None:
    if isinstance(value, str):
        facts.patterns |= {value}


def _learn_format(facts: _Facts, value: Any) -> None:
    _learn_pattern(facts, superset(value))


def _learn_bound(name: str, *, is_upper: bool, is_exclusive: bool = False) -> Callable[[_Facts, Any], None]:
    def learn(facts: _Facts, value: Any) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 2**53:
            if is_exclusive:
                value = math.nextafter(value, -math.inf if is_upper else math.inf)
            _narrow(facts, name, -math.inf if is_upper else value, value if is_upper else math.inf)

    return learn


_LEARN: dict[str, Callable[[_Facts, Any], None]] = {
    "type": _learn_type,
    "required": _learn_required,
    "minimum": _learn_bound("number", is_upper=False),
    "maximum": _learn_bound("number", is_upper=True),
    "exclusiveMinimum": _learn_bound("number", is_upper=False, is_exclusive=True),
    "exclusiveMaximum": _learn_bound("number", is_upper=True, is_exclusive=True),
    "minLength": _learn_bound("length", is_upper=False),
    "maxLength": _learn_bound("length", is_upper=True),
    "pattern": _learn_pattern,
    "format": _learn_format,
    "minItems": _learn_bound("size", is_upper=False),
    "maxItems": _learn_bound("size", is_upper=True),
}
