"""`contains` and `uniqueItems`: each place of the items that they are about is an alternative."""

from __future__ import annotations

import itertools
import math
from typing import Any

from quire.server.text.schemas.common import (
    MAX_ALTERNATIVES,
    Resolve,
    Schema,
    Shared,
    canonical,
    count,
    for_type,
    listed,
    types_of,
)
from quire.server.text.schemas.disjoint import are_disjoint, finite_values

_MAX_PLACE = 16
"""Items at the beginning of a list among which `contains` must be satisfied, if the list has no maximum."""
_MAX_MATCHES = 32
"""Limit of `minContains` and `maxContains`."""
_MAX_CHOICES = 128
"""Choices of places."""


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
    if max(least, most or 0) > _MAX_MATCHES:
        raise ValueError(f"is only supported with minContains and maxContains up to {_MAX_MATCHES}")
    numbers = [least] if most is None else range(least, most + 1)
    places = max(numbers[-1], _MAX_PLACE if end is None else min(count(end), _MAX_PLACE))
    while places > numbers[-1] and sum(math.comb(places, number) for number in numbers) > _MAX_CHOICES:
        places -= 1
    other: Any = True if most is None else {"$ref": Shared({"not": wanted})}
    wanted = {"$ref": Shared(wanted)}
    choices: list[Any] = []
    for number in numbers:
        for chosen in itertools.combinations(range(places), number):
            size = chosen[-1] + 1 if chosen else 0
            first = {"prefixItems": [wanted if at in chosen else other for at in range(size)], "minItems": size}
            choices.append({**(first if size else {}), **({} if most is None else {"items": other})})
    return for_type(schema, "array", choices)


def unique_items(schema: Schema, resolve: Resolve) -> list[Any] | None:
    """List each sequence of different items, if there are few; nothing if they differ anyway. Otherwise the keyword
    stays, for `quire.engine.scheduler.unique_items`.
    """
    if schema["uniqueItems"] is not True:
        raise ValueError("must be true or false")
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
        return None
    least = count(schema.get("minItems", 0))
    level: list[list[Any]] = [[]]
    choices: list[list[Any]] = []
    while level:
        size = len(level[0])
        options = [] if size == end else values[size] if size < len(values) else tail
        resolve.step(len(level) * len(options or ()) * size)
        longer = [
            [*items, each]
            for items in level
            for each in options or ()
            if all(canonical(each) != canonical(other) for other in items)
        ]
        if len(longer) > MAX_ALTERNATIVES:
            return None
        choices += level if not longer else [items for items in level if not _begins_one(items, longer)]
        level = longer
    choices = [items for items in choices if len(items) >= least]
    if len(choices) > MAX_ALTERNATIVES:
        return None
    return for_type(schema, "array", [_constant_items(items, least) for items in choices])


def _begins_one(items: list[Any], longer: list[list[Any]]) -> bool:
    return any(each[:-1] == items for each in longer)


def _constant_items(items: list[Any], least: int) -> Schema:
    """Return the lists of at least so many of these items, from the first on."""
    return {"prefixItems": [{"const": each} for each in items], "minItems": least, "maxItems": len(items)}
