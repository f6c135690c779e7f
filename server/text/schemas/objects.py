"""`propertyNames`, `minProperties` and `maxProperties`.

A grammar does not remember the names of additional properties, so one name may come twice. Only properties with a name
in the schema, and the first additional one, count for `minProperties`.
"""

from __future__ import annotations

from typing import Any

from quire.server.text import patterns
from quire.server.text.schemas.common import (
    MAX_ALTERNATIVES,
    Resolve,
    Schema,
    count,
    for_type,
    listed,
    mapping,
    strings,
    subsets,
)
from quire.server.text.schemas.formats import NAME_PATTERNS, is_known
from quire.server.text.schemas.normal import normalized

_ANNOTATIONS = {"$comment", "title", "description", "default", "examples"}


def with_finite_names(schema: Schema, resolve: Resolve) -> Schema:
    """Return a schema whose `propertyNames` are `properties`, if they are enumerated."""
    names = _finite_names(schema["propertyNames"], resolve)
    if names is None or schema.get("patternProperties"):
        return schema
    given, rest = mapping(schema.get("properties", {})), schema.get("additionalProperties", True)
    allowed = {*names}
    properties = {name: each if name in allowed else False for name, each in given.items()}
    properties |= {name: rest for name in names if name not in given}
    schema = {key: value for key, value in schema.items() if key not in ("properties", "propertyNames")}
    return {**schema, "properties": properties, "additionalProperties": False}


def _finite_names(names: Any, resolve: Resolve, depth: int = 0) -> list[str] | None:
    """Return the names that a schema enumerates; None if it does not."""
    if not isinstance(names, dict) or depth > 8:
        return None
    match {
        key: value for key, value in names.items() if key not in _ANNOTATIONS and (key, value) != ("type", "string")
    }:
        case {"const": str(name), **rest} if not rest:
            return [name]
        case {"enum": list(values), **rest} if not rest:
            return list(dict.fromkeys(each for each in values if isinstance(each, str)))
        case {"$ref": reference, **rest} if not rest:
            return _finite_names(resolve(reference), resolve, depth + 1)
        case {"anyOf": list(options), **rest} if not rest:
            found = [_finite_names(each, resolve, depth + 1) for each in options]
            return None if None in found else list(dict.fromkeys(name for each in found for name in each or ()))
    return None


def property_names(schema: Schema, resolve: Resolve) -> list[Any]:
    """Names as `properties`, and patterns of names as `patternProperties`."""
    return for_type(schema, "object", [{"allOf": _parts(schema["propertyNames"], resolve)}])


def _parts(names: Any, resolve: Resolve, depth: int = 0) -> list[Any]:
    """Return what objects satisfy if their properties have such names."""
    if depth > 8:
        raise ValueError("refers to itself")
    resolve.step()
    if isinstance(names, bool):
        return [] if names else [{"maxProperties": 0}]
    parts: list[Any] = []
    names = normalized(mapping(names))
    for keyword, value in names.items():
        match keyword:
            case "$ref":
                parts += _parts(resolve(value), resolve, depth + 1)
            case "allOf":
                for each in listed(value):
                    parts += _parts(each, resolve, depth + 1)
            case "type":
                if "string" not in (value if isinstance(value, list) else [value]):
                    parts.append({"maxProperties": 0})
            case "const" | "enum":
                allowed = [each for each in ([value] if keyword == "const" else listed(value)) if isinstance(each, str)]
                parts.append({"properties": dict.fromkeys(allowed, True), "additionalProperties": False})
            case "pattern":
                patterns.rewritten(value, resolve.step)
                parts.append({"patternProperties": {value: True}, "additionalProperties": False})
            case "minLength" | "maxLength" if keyword == "minLength" or "minLength" not in names:
                least, most = count(names.get("minLength", 0)), names.get("maxLength")
                pattern = rf"^[\s\S]{{{least},{'' if most is None else count(most)}}}$"
                parts.append({"patternProperties": {pattern: True}, "additionalProperties": False})
            case "format" if isinstance(value, str) and value in NAME_PATTERNS:
                parts.append({"patternProperties": {NAME_PATTERNS[value]: True}, "additionalProperties": False})
            case "format" if not is_known(value):
                pass
            case "not" if isinstance(value, dict) and len(value) == 1 and "pattern" in value:
                patterns.rewritten(value["pattern"], resolve.step)
                parts.append({"patternProperties": {value["pattern"]: False}})
            case "not" if isinstance(value, dict) and len(value) == 1 and value.keys() <= {"const", "enum"}:
                found = listed(value.get("enum", [value.get("const")]))
                parts.append({"properties": {each: False for each in found if isinstance(each, str)}})
            case "anyOf" | "oneOf" | "not" | "if" | "format" | "contentSchema" | "$dynamicRef":
                raise ValueError(f"contains {keyword}, which cannot be enforced for names")
    return parts


def max_properties(schema: Schema, resolve: Resolve) -> list[Any] | None:
    """Each choice of properties that may be present, without the others; None if the keyword can stay."""
    most = count(schema["maxProperties"])
    required, optional, is_closed = _names(schema)
    if not optional:
        return None
    room = most - len(required)
    if room < 0:
        return for_type(schema, "object", [{"maxProperties": most}])
    if is_closed:
        if room >= len(optional):
            return []
        return for_type(
            schema,
            "object",
            [{"properties": dict.fromkeys(_without(optional, chosen), False)} for chosen in subsets(optional, room)],
        )
    chosen_sets = [chosen for size in range(min(room, len(optional)) + 1) for chosen in subsets(optional, size)]
    return for_type(
        schema,
        "object",
        [
            {
                "required": [*required, *chosen],
                "properties": dict.fromkeys(_without(optional, chosen), False),
                "maxProperties": most,
            }
            for chosen in chosen_sets
        ],
    )


def min_properties(schema: Schema, resolve: Resolve) -> list[Any] | None:
    """Each choice of properties that makes up the number; None if the keyword can stay.

    Loses objects that need two additional properties for the number.
    """
    least = count(schema["minProperties"])
    required, optional, is_closed = _names(schema)
    missing = least - len(required)
    if missing <= 0:
        return []
    if missing > len(optional) + (not is_closed):
        if is_closed:
            return for_type(schema, "object", [])
        raise ValueError(
            "must be at most one more than the number of named properties, since the names of others may repeat"
        )
    if not optional:
        return None
    choices: list[Any] = [{"required": list(chosen)} for chosen in subsets(optional, missing)]
    if not is_closed:
        choices += [
            {
                "required": [*required, *chosen],
                "properties": dict.fromkeys(_without(optional, chosen), False),
                "minProperties": least,
            }
            for chosen in subsets(optional, missing - 1)
        ]
    return for_type(schema, "object", choices)


def _names(schema: Schema) -> tuple[list[str], list[str], bool]:
    """Return the required and the optional names of an object, and whether there are no others."""
    required = list(dict.fromkeys(strings(schema.get("required", []))))
    properties = mapping(schema.get("properties", {}))
    present = {*required}
    optional = [name for name, each in properties.items() if name not in present and each is not False]
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if len(optional) > MAX_ALTERNATIVES:
        raise ValueError(f"has more than {MAX_ALTERNATIVES} optional properties to choose from")
    return required, optional, is_closed


def _without(names: list[str], chosen: tuple[str, ...]) -> list[str]:
    excluded = {*chosen}
    return [name for name in names if name not in excluded]
