"""`propertyNames`, `minProperties` and `maxProperties`.

A grammar does not remember the names of additional properties, so one name may come twice. Only properties with a name
in the schema, and the first additional one, count for `minProperties`.
"""

from __future__ import annotations

import itertools
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
from quire.server.text.schemas.normal import normalized
from quire.server.text.schemas.strings import pattern_of

_MAX_PATTERNS = 6
"""Patterns of names that may overlap."""
_MAX_TEXTS, _MAX_CHOSEN_TEXTS = 16, 4
"""Names of a pattern that become properties, and those among which `minProperties` and `maxProperties` choose."""
_MAX_EXACT = 1024
"""Characters of a pattern that llguidance compares with another in time."""
_ANNOTATIONS = {"$comment", "title", "description", "default", "examples"}


def rewritten_names(pattern: str, resolve: Resolve) -> str:
    """Return a pattern of names for llguidance; raises ValueError as `patterns.rewritten` does."""
    return resolve.once([pattern], "names", lambda: patterns.rewritten(pattern, resolve.step))


def with_restricted_names(schema: Schema, resolve: Resolve) -> Schema:
    """Return a schema whose `propertyNames` are `properties`, if they are enumerated, or restrict its
    `patternProperties`, if it has any.
    """
    names = _finite_names(schema["propertyNames"], resolve)
    if schema.get("patternProperties"):
        return schema if names is not None else _with_restricted_patterns(schema, resolve)
    if names is None:
        return schema
    given, rest = mapping(schema.get("properties", {})), schema.get("additionalProperties", True)
    allowed = {*names}
    properties = {name: each if name in allowed else False for name, each in given.items()}
    properties |= {name: rest for name in names if name not in given}
    schema = {key: value for key, value in schema.items() if key not in ("properties", "propertyNames")}
    return {**schema, "properties": properties, "additionalProperties": False}


def _with_restricted_patterns(schema: Schema, resolve: Resolve) -> Schema:
    """Loses names that match no pattern, unless `additionalProperties` is about them, if the patterns are large."""
    allowed = pattern_of(schema["propertyNames"], resolve)
    given, rest = mapping(schema["patternProperties"]), schema.get("additionalProperties", True)
    named = mapping(schema.get("properties", {}))
    properties = {
        name: each
        if patterns.matches_any(patterns.joint([allowed, patterns.constants([name])]), resolve.step)
        else False
        for name, each in named.items()
    }
    by_pattern = {patterns.joint([allowed, pattern]): each for pattern, each in given.items()}
    is_small = all(len(rewritten_names(pattern, resolve)) <= _MAX_EXACT for pattern in by_pattern)
    if rest is not False and (is_small or "additionalProperties" in schema):
        by_pattern[patterns.joint([allowed], [*given, patterns.constants(named)])] = rest
    found = {key: value for key, value in schema.items() if key != "propertyNames"}
    if named:
        found["properties"] = properties
    return {**found, "patternProperties": by_pattern, "additionalProperties": False}


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
    matching: list[str] = []
    parts = _parts(schema["propertyNames"], resolve, matching)
    if matching:
        pattern = matching[0] if len(matching) == 1 else patterns.joint(matching)
        rewritten_names(pattern, resolve)  # may raise an error, which is about this keyword
        parts.append({"patternProperties": {pattern: True}, "additionalProperties": False})
    return for_type(schema, "object", [{"allOf": parts}])


def _parts(names: Any, resolve: Resolve, matching: list[str], depth: int = 0) -> list[Any]:
    """Return what objects satisfy if their properties have such names, and append patterns that the names match."""
    if depth > 8:
        raise ValueError("refers to itself")
    resolve.step()
    if isinstance(names, bool):
        return [] if names else [{"maxProperties": 0}]
    parts: list[Any] = []
    conditions: Schema = {}
    names = normalized(mapping(names))
    for keyword, value in names.items():
        match keyword:
            case "$ref":
                parts += _parts(resolve(value), resolve, matching, depth + 1)
            case "allOf":
                for each in listed(value):
                    parts += _parts(each, resolve, matching, depth + 1)
            case "type":
                if "string" not in (value if isinstance(value, list) else [value]):
                    parts.append({"maxProperties": 0})
            case "const" | "enum":
                allowed = [each for each in ([value] if keyword == "const" else listed(value)) if isinstance(each, str)]
                parts.append({"properties": dict.fromkeys(allowed, True), "additionalProperties": False})
            case "not" if isinstance(value, dict) and len(value) == 1 and value.keys() <= {"const", "enum"}:
                found = listed(value.get("enum", [value.get("const")]))
                parts.append({"properties": {each: False for each in found if isinstance(each, str)}})
            case "minLength" | "maxLength":
                least, most = count(names.get("minLength", 0)), names.get("maxLength")
                lengths = rf"^[\s\S]{{{least},{'' if most is None else count(most)}}}$"
                matching += [] if lengths in matching else [lengths]
            case "if" | "then" | "else":
                conditions |= {key: names[key] for key in ("if", "then", "else") if key in names}
            case "pattern":
                rewritten_names(value, resolve)
                matching.append(value)
            case _:
                conditions[keyword] = value
    pattern = pattern_of(conditions, resolve)
    if pattern != "^":
        rewritten_names(pattern, resolve)
        matching.append(pattern)
    return parts


def disjoint_patterns(schema: Schema, resolve: Resolve) -> Schema:
    """Return a schema of whose `patternProperties` each name matches one at most.

    Patterns of few names become `properties`: where all names of a pattern are excluded, llguidance would begin another
    property. Their number is smaller where each choice of properties is an alternative.
    """
    given = mapping(schema["patternProperties"])
    if len(given) > _MAX_PATTERNS:
        return schema
    properties = dict(mapping(schema.get("properties", {})))
    most = _MAX_CHOSEN_TEXTS if schema.keys() & {"minProperties", "maxProperties"} else _MAX_TEXTS
    try:
        found = _disjoint(given, resolve)
        for pattern, value in [*found.items()]:
            names = patterns.texts(pattern, _MAX_TEXTS, resolve.step)
            if names is not None and (len(names) <= most or properties.keys() >= {*names}):
                del found[pattern]
                for name in names:
                    properties[name] = {"allOf": [properties[name], value]} if name in properties else value
    except ValueError:
        return schema  # what is wrong with the patterns is found later
    others = {key: value for key, value in schema.items() if key not in ("patternProperties", "properties")}
    others |= {"properties": properties} if properties or "properties" in schema else {}
    return {**others, **({"patternProperties": found} if found else {})}


def _disjoint(given: Schema, resolve: Resolve) -> Schema:
    """Return schemas by patterns of which each name matches one at most."""
    overlapping: set[str] = set()
    for pair in itertools.combinations(given, 2):
        if patterns.matches_any(patterns.joint(pair), resolve.step):
            overlapping |= {*pair}
    found = {name: each for name, each in given.items() if name not in overlapping}
    names = [name for name in given if name in overlapping]
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, size):
            pattern = patterns.joint(chosen, [name for name in names if name not in chosen])
            if patterns.matches_any(pattern, resolve.step):
                found[pattern] = given[chosen[0]] if size == 1 else {"allOf": [given[name] for name in chosen]}
    return found


def max_properties(schema: Schema, resolve: Resolve) -> list[Any] | None:
    """Each choice of properties that may be present, without the others; None if the keyword can stay."""
    most = count(schema["maxProperties"])
    required, optional, is_closed = _names(schema, resolve)
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
    required, optional, is_closed = _names(schema, resolve)
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


def _names(schema: Schema, resolve: Resolve) -> tuple[list[str], list[str], bool]:
    """Return the required and the optional names of an object, also those of `$ref` and `allOf`, and whether there are
    no others.
    """
    required: dict[str, None] = {}
    names: dict[str, None] = {}
    absent: set[str] = set()
    allowed: list[dict[str, Any]] = []
    pending: list[Any] = [schema]
    for number, each in enumerate(pending):
        if not isinstance(each, dict) or number > MAX_ALTERNATIVES:
            continue
        resolve.step()
        properties = mapping(each.get("properties", {}))
        required |= dict.fromkeys(strings(each.get("required", [])))
        names |= dict.fromkeys(properties)
        absent |= {name for name, value in properties.items() if value is False}
        if each.get("additionalProperties") is False and not each.get("patternProperties"):
            allowed.append(properties)
        pending += listed(each.get("allOf", []))
        if "$ref" in each:
            pending.append(resolve(each["$ref"]))
    optional = [
        name
        for name in names
        if name not in required and name not in absent and all(name in properties for properties in allowed)
    ]
    if len(optional) > MAX_ALTERNATIVES:
        raise ValueError(f"has more than {MAX_ALTERNATIVES} optional properties to choose from")
    return list(required), optional, bool(allowed)


def _without(names: list[str], chosen: tuple[str, ...]) -> list[str]:
    excluded = {*chosen}
    return [name for name in names if name not in excluded]
