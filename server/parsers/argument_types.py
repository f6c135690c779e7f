"""Arguments that are not written as JSON: their types, from the JSON schema of a function, and their conversion."""

from __future__ import annotations

import ast
import contextlib
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from quire.server.parsers.incremental import MalformedText, decoded

ANY_TYPE = frozenset({"string", "number", "boolean", "null", "object", "array"})
"""The types of JSON. An integer is a number here."""
TEXT = frozenset({"string"})
_MAX_DEPTH, _MAX_SCHEMAS = 32, 1000
"""Nesting of references and alternatives that is followed; beyond, any type is assumed."""


def type_of(value: object) -> str:
    """Return the type of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "number"
        case list():
            return "array"
    return "object"


def property_names(schema: Mapping[str, Any]) -> list[str]:
    """Return the properties that an object's schema and the schemas that it refers to name, in their order."""
    names: dict[str, None] = {}

    def note(each: Mapping[str, Any]) -> frozenset[str]:
        names.update(dict.fromkeys(_properties(each)))
        return ANY_TYPE

    _types_in(schema, schema, [_MAX_SCHEMAS], note)
    return [*names]


def property_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the types that an object's schema allows for the property `key`."""
    budget = [_MAX_SCHEMAS]

    def of_property(each: Mapping[str, Any]) -> frozenset[str]:
        properties = _properties(each)
        return types_of(properties[key] if key in properties else each.get("additionalProperties"), schema, budget)

    return _types_in(schema, schema, budget, of_property)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any], budget: list[int] | None = None) -> frozenset[str]:
    """Return the types that a schema allows by its keywords for types; its references refer to `root`.

    Schemas beyond `budget` may have any type, so that a schema that refers to itself costs little.
    """
    return _types_in(schema, root, budget or [_MAX_SCHEMAS], _own_types)


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema's keywords allow, without the keywords that refer to schemas or combine them."""
    types = ANY_TYPE
    match schema.get("type"):
        case str(name):
            types &= {_plain(name)}
        case [*names]:
            types &= {_plain(name) for name in names}
    if "const" in schema:
        types &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= {type_of(value) for value in schema["enum"]}
    return types


def _types_in(
    schema: Any,
    root: Mapping[str, Any],
    budget: list[int],
    of: Callable[[Mapping[str, Any]], frozenset[str]],
    depth: int = 0,
) -> frozenset[str]:
    """Return the types that remain when `of` is applied to this schema and to all schemas that it refers to or
    combines."""
    budget[0] -= 1
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or budget[0] < 0:
        return ANY_TYPE
    types = of(schema)
    if isinstance(schema.get("$ref"), str):
        types &= _types_in(resolved(schema["$ref"], root), root, budget, of, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            parts = (_types_in(each, root, budget, of, depth + 1) for each in schema[keyword])
            types &= frozenset[str]().union(*parts)
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types &= _types_in(each, root, budget, of, depth + 1)
    return types


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference within `root`; None if there is none."""
    target: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(part)
        elif isinstance(target, list) and part.isdecimal() and int(part) < len(target):
            target = target[int(part)]
        else:
            return None
    return target if reference.startswith("#") else None


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of an argument written as raw text, of one of these types.

    If a string is one of them, JSON of the other types is taken as it is, and everything else is a string. If not, JSON
    of any type is taken, Python's literals are converted, and only the rest is a string.
    """
    others = types - TEXT
    try:
        value = _strictly_decoded(text) if others else text
        if type_of(value) in others or "string" not in types:
            return text.strip()
    except MalformedText:
        if "string" not in types:
            with contextlib.suppress(MalformedText):
                return literal_json(text)
    return json.dumps(text, ensure_ascii=False)


def _strictly_decoded(text: str) -> object:
    """Parse JSON, without NaN, Infinity and unpaired surrogates, which Python accepts."""
    value = decoded(text)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise MalformedText from None
    return value


def literal_json(text: str) -> str:
    """Convert a value written in JSON or Python to JSON. Raises `MalformedText`."""
    try:
        value = decoded(text)
    except MalformedText:
        value = _python_value(text.strip())
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return written if is_utf8(written) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise MalformedText from None


def _python_value(text: str) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backslashes in the model's text
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise MalformedText from None


def is_utf8(text: str) -> bool:
    """Whether a text has no unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(name: object) -> str:
    return "number" if name == "integer" else str(name)
