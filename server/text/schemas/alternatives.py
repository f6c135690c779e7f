"""`oneOf`, `if` and the dependencies of properties, as alternatives."""

from __future__ import annotations

from typing import Any

from quire.server.text.schemas.common import MAX_ALTERNATIVES, Resolve, Schema, check_number, listed, mapping, strings
from quire.server.text.schemas.disjoint import overlaps
from quire.server.text.schemas.negation import negated

_MAX_OVERLAPPING = 16
"""Alternatives of a `oneOf` of which each excludes the others by their negation."""
_ANNOTATIONS = ("$comment", "title", "description")


def one_of(schema: Schema, resolve: Resolve) -> list[Any]:
    """Alternatives that exclude each other are `anyOf`; each of the others excludes those that it overlaps."""
    options = listed(schema["oneOf"])
    others = {key: value for key, value in schema.items() if key != "oneOf"}
    overlapping = overlaps(options, others, resolve)
    if len(overlapping) > _MAX_OVERLAPPING:
        raise ValueError("has many alternatives of which several may match at once; use anyOf")
    for at in overlapping:
        try:
            negated(options[at], resolve)
        except ValueError as error:
            raise ValueError(f"has several alternatives that may match at once, and one {error}; use anyOf") from None
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
    return [_cases([schema], resolve)]


def conditionals(schema: Schema, resolve: Resolve) -> list[Any] | None:
    """Conditions in `allOf` that exclude each other have one alternative each, and one more where none holds; None if
    there are none of this kind.
    """
    cases: list[Schema] = []
    others: list[Any] = []
    for part in listed(schema["allOf"]):
        is_case = isinstance(part, dict) and "if" in part and part.keys() <= {"if", "then", "else", *_ANNOTATIONS}
        (cases if is_case else others).append(part)
    siblings = {key: value for key, value in schema.items() if key != "allOf"}
    if len(cases) < 2 or overlaps([case["if"] for case in cases], siblings, resolve):
        return None
    return [*others, _cases(cases, resolve)]


def _cases(cases: list[Schema], resolve: Resolve) -> Schema:
    """Return alternatives for conditions that exclude each other."""
    resolve.step(len(cases) * (1 + sum("else" in case for case in cases)) // 25)
    conditions = [case["if"] for case in cases]
    return {
        "anyOf": [
            *(
                {
                    "allOf": [
                        case["if"],
                        case.get("then", True),
                        *(other["else"] for other in cases if other is not case and "else" in other),
                    ]
                }
                for case in cases
            ),
            {
                "allOf": [
                    {"not": {"anyOf": conditions} if len(conditions) > 1 else conditions[0]},
                    *(case["else"] for case in cases if "else" in case),
                ]
            },
        ]
    }


def dependent_required(schema: Schema, resolve: Resolve) -> list[Any]:
    """Without the property, or with all that it requires."""
    required = {*strings(schema.get("required", []))}
    return [
        _depending(name, {"required": needed}, is_required=name in required)
        for name, each in mapping(schema["dependentRequired"]).items()
        if (needed := [other for other in strings(each) if other != name and other not in required])
    ]


def dependent_schemas(schema: Schema, resolve: Resolve) -> list[Any]:
    """Without the property, or with its schema."""
    needed = mapping(schema["dependentSchemas"])
    check_number(2 ** min(len(needed), MAX_ALTERNATIVES))
    required = {*strings(schema.get("required", []))}
    return [
        _depending(name, each, is_required=name in required)
        for name, each in needed.items()
        if each is not True and each != {}
    ]


def _depending(name: str, needed: Any, *, is_required: bool) -> Any:
    if is_required:
        return {"anyOf": [needed, {"type": ["null", "boolean", "number", "string", "array"]}]}
    return {
        "anyOf": [
            {"properties": {name: False}},
            {"allOf": [{"type": "object", "required": [name]}, needed]},
        ]
    }
