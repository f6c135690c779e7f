"""Rewrites the keywords of one schema that a grammar cannot enforce into keywords that it can.

A rewritten schema never allows a value that the original does not. It allows all others as well, up to the losses that
the functions name. Rewriting is for one level: the subschemas of a result may have any keyword, also `not`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.server.text.schemas import alternatives, arrays, objects, unevaluated
from quire.server.text.schemas.common import Resolve, Schema
from quire.server.text.schemas.negation import negated
from quire.server.text.schemas.normal import normalized

Rule = Callable[[Schema, Resolve], "list[Any] | None"]
"""Returns schemas that together replace a keyword of the schema, of which all must hold; None if it can stay."""

_REPLACED: dict[str, Callable[[Schema, Resolve], Schema]] = {
    "unevaluatedProperties": unevaluated.properties,
    "unevaluatedItems": unevaluated.items,
    "propertyNames": objects.with_restricted_names,
    "patternProperties": objects.disjoint_patterns,
}
"""Functions that return a schema with other keywords."""
_RULES: dict[str, Rule] = {
    "allOf": alternatives.conditionals,
    "oneOf": alternatives.one_of,
    "if": alternatives.conditional,
    "dependentRequired": alternatives.dependent_required,
    "dependentSchemas": alternatives.dependent_schemas,
    "contains": arrays.contains,
    "uniqueItems": arrays.unique_items,
    "propertyNames": objects.property_names,
    "maxProperties": objects.max_properties,
    "minProperties": objects.min_properties,
    "not": lambda schema, resolve: [{"anyOf": found} if (found := negated(schema["not"], resolve)) else False],
}
_WITH = {"if": ("then", "else"), "contains": ("minContains", "maxContains")}
"""Keywords that go together with another."""


def rewritten(
    schema: Schema, resolve: Resolve, drop: Callable[[str, ValueError], None]
) -> tuple[Schema, dict[str, list[Any]]]:
    """Return a schema without the keywords that a grammar cannot enforce, and what replaces them: schemas that must all
    hold as well, by keyword.

    `drop` is called with a keyword that cannot be rewritten, and the reason; if it returns, the keyword is left out.
    """
    schema = normalized(schema)
    for keyword, replace in _REPLACED.items():
        if keyword in schema:
            try:
                schema = replace(schema, resolve)
            except ValueError as error:
                drop(keyword, error)
                schema = {key: value for key, value in schema.items() if key != keyword}
    parts: dict[str, list[Any]] = {}
    for keyword, rule in _RULES.items():
        if keyword not in schema:
            continue
        try:
            found = rule(schema, resolve)
        except ValueError as error:
            drop(keyword, error)
            found = []
        if found is not None:
            gone = (keyword, *_WITH.get(keyword, ()))
            schema = {key: value for key, value in schema.items() if key not in gone}
            parts[keyword] = found
    return schema, parts
