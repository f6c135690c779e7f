"""`contains` and `uniqueItems`: each place of the items that they are about is an alternative."""

from __future__ import annotations

import itertools
import math
from typing import Any

from quire.server.text.schemas.common import MAX_ALTERNATIVES, Resolve, Schema, canonical, count, for_type, listed, types_of
from quire.server.text.schemas.disjoint import are_disjoint, finite_values

_MAX_PLACE = 16
"""Items at the beginning of a list among which `contains` must be satisfied, if the list has no maximum."""


def contains(schema: Schema, resolve: Resolve) -> list[Any]:
    """Choose the places of the items that match; the others may, unless `maxContains` limits them.

    Loses lists whose matching items come later than all places that are tried.
    """
    wanted = schema["contains"]
    least = 1 if schema.get("minContains") is None else count(schema["minContains"])
    most = None if schema.get("maxContains") is None else count(schema["maxContains"])
    if wanted is True or wanted == {}:
        limits = {"minItems": least, **({} if most is None else {"maxItems": most})}
        return for_type(schema, "array", [limits])
    if most is not None and most < least:
        return for_type(schema, "array", [])
    end = schema.get("maxItems")
    choices: list[Any] = []
    for number in [least] if most is None else range(least, most + 1):
        places = _MAX_PLACE if end is None else min(count(end), _MAX_PLACE)
        while places > number and math.comb(places, number) > MAX_ALTERNATIVES // 2:
            places -= 1
        choices += [
            _with_matches(wanted, chosen, is_exact=most is not None)
            for chosen in itertools.combinations(range(places), number)
        ]
    return for_type(schema, "array", choices)


def _with_matches(wanted: Any, places: tuple[int, ...], *, is_exact: bool) -> Schema:
    """Return lists with matching items at these places, and with others elsewhere if `is_exact`."""
    other = {"not": wanted} if is_exact else True
    size = places[-1] + 1 if places else 0
    items = [wanted if at in places else other for at in range(size)]
    return {"prefixItems": items, "minItems": size, "items": other} if items else {"items": other}


def unique_items(schema: Schema, resolve: Resolve) -> list[Any]:
    """List each sequence of different items, if their values are finite; nothing if they differ anyway."""
    if "array" not in types_of(schema):
        return []
    first, rest = listed(schema.get("prefixItems", [])), schema.get("items", True)
    end = schema.get("maxItems")
    end = None if end is None else count(end)
    if rest is False:
        end = min(len(first), len(first) if end is None else end)
    if end is not None and end <= 1:
        return []
    if end is not None and end <= 16:
        items = [*first, *[rest] * (end - len(first))][:end]
        if all(are_disjoint(one, other, resolve) for one, other in itertools.combinations(items, 2)):
            return []
    values = [finite_values(each, resolve) for each in first]
    tail = None if rest is False else finite_values(rest, resolve)
    if None in values or (tail is None and rest is not False):
        raise ValueError("is only supported for items with a finite number of values, such as an enum")
    choices: list[Schema] = []
    level: list[list[Any]] = [[]]
    least = count(schema.get("minItems", 0))
    while level and (end is None or len(level[0]) <= end):
        size = len(level[0])
        if size >= least:
            choices += [_constant_items(items) for items in level]
        options = values[size] if size < len(values) else tail
        if len(choices) + len(level) * len(options or ()) > 4 * MAX_ALTERNATIVES:
            raise ValueError("needs too many alternatives: one for each order of the values")
        level = [
            [*items, each]
            for items in level
            for each in options or ()
            if canonical(each) not in map(canonical, items)
        ]
    return [{"anyOf": [*choices, {"type": ["null", "boolean", "number", "string", "object"]}]}]


def _constant_items(items: list[Any]) -> Schema:
    return {
        "type": "array",
        "prefixItems": [{"const": each} for each in items],
        "minItems": len(items),
        "maxItems": len(items),
    }
