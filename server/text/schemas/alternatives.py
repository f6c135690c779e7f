"""`oneOf`, `if` and the dependencies of properties, as alternatives."""

from __future__ import annotations

from typing import Any

from quire.server.text.schemas.common import MAX_ALTERNATIVES, Resolve, Schema, check_number, listed, mapping, strings
from quire.server.text.schemas.disjoint import overlaps

_MAX_OVERLAPPING = 16
"""Alternatives of a `oneOf` of which each excludes the others by their negation."""


def one_of(schema: Schema, resolve: Resolve) -> list[Any]:
    """Alternatives that exclude each other are `anyOf`; each of the others excludes those that it overlaps."""
    options = listed(schema["oneOf"])
    others = {key: value for key, value in schema.items() if key != "oneOf"}
    overlapping = overlaps(options, others, resolve)
    if len(overlapping) > _MAX_OVERLAPPING:
        raise ValueError("has many alternatives of which several may match at once; use anyOf")
    return [
        {
            "anyOf": [
                {"allOf": [option, *({"not": options[other]} for other in sorted(overlapping[at]))]}
                if at in overlapping
                else option
                for at, option in enumerate(options)
            ]
        }
    ]


def conditional(schema: Schema, resolve: Resolve) -> list[Any]:
    """`if` with `then`, or its negation with `else`."""
    condition = schema["if"]
    return [
        {
            "anyOf": [
                {"allOf": [condition, schema.get("then", True)]},
                {"allOf": [{"not": condition}, schema.get("else", True)]},
            ]
        }
    ]


def dependent_required(schema: Schema, resolve: Resolve) -> list[Any]:
    """Without the property, or with all that it requires."""
    return [
        _depending(schema, name, {"required": needed})
        for name, each in mapping(schema["dependentRequired"]).items()
        if (needed := [other for other in strings(each) if other not in (name, *schema.get("required", ()))])
    ]


def dependent_schemas(schema: Schema, resolve: Resolve) -> list[Any]:
    """Without the property, or with its schema."""
    needed = mapping(schema["dependentSchemas"])
    check_number(2 ** min(len(needed), MAX_ALTERNATIVES))
    return [_depending(schema, name, each) for name, each in needed.items() if each is not True and each != {}]


def _depending(schema: Schema, name: str, needed: Any) -> Any:
    if name in schema.get("required", ()):
        return {"anyOf": [needed, {"type": ["null", "boolean", "number", "string", "array"]}]}
    return {
        "anyOf": [
            {"properties": {name: False}},
            {"allOf": [{"type": "object", "required": [name]}, needed]},
        ]
    }
