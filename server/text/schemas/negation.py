"""The negation of a schema: alternatives, each of which violates one of its keywords.

The negation of a subschema stays `{"not": …}`; it is rewritten where it stands. There is no grammar for numbers that
are not integral; they are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from quire.server.text.patterns import Generated, joint
from quire.server.text.schemas.common import (
    TYPES,
    Resolve,
    Schema,
    canonical,
    check_number,
    count,
    listed,
    mapping,
    strings,
    subsets,
    type_of,
    types_of,
)
from quire.server.text.schemas.formats import is_known, superset
from quire.server.text.schemas.normal import normalized

_UNKNOWN = {
    *("multipleOf", "patternProperties", "uniqueItems", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef"),
}
_MAX_PAIRED = 8
"""Alternatives of a negated `oneOf`, of which two may match."""
_MAX_PLACE = 8
"""Items beyond `prefixItems` of which one may violate `items`."""
_MAX_LENGTH = 200
_MAX_CHARACTERS = 4096
"""Characters of the texts that a string must not be."""


def negated(schema: Any, resolve: Resolve, depth: int = 0) -> list[Any]:
    """Return alternatives that together are the negation of a schema. Raises ValueError if there is no grammar."""
    resolve.step()
    if isinstance(schema, bool):
        return [] if schema else [True]
    if depth > 16:
        raise ValueError("negates a reference that refers to itself")
    schema = normalized(mapping(schema))
    found: list[Any] = []
    resolve.step(len(schema) // 10)
    for keyword, value in schema.items():
        if keyword in _UNKNOWN:
            raise ValueError(f"excludes {keyword}, for whose opposite there is no grammar")
        if keyword == "$ref":
            found += negated(resolve(value), resolve, depth + 1)
        elif keyword in _NEGATIONS:
            found += _NEGATIONS[keyword](schema, resolve)
    check_number(len(found))
    return found


def _type(schema: Schema, resolve: Resolve) -> list[Any]:
    value = schema["type"]
    names = set(value if isinstance(value, list) else [value])
    others = [name for name in TYPES if name not in names and (name != "number" or "integer" not in names)]
    return [{"type": others}] if others else []


def _values(schema: Schema, resolve: Resolve) -> list[Any]:
    """Return what has none of the values of `const` or `enum`, whichever is there."""
    given = listed(schema.get("enum", [schema.get("const")]))
    resolve.step(len(given))
    values = {canonical(each): each for each in given}
    resolve.step(sum(map(len, values)) // 25)
    by_type: dict[str, list[Any]] = {}
    for each in values.values():
        by_type.setdefault(type_of(each), []).append(each)
    numbers = sorted([*by_type.get("integer", ()), *by_type.get("number", ())])
    absent = [name for name in TYPES if name not in by_type and (name != "number" or not numbers)]
    found: list[Any] = [{"type": absent}] if absent else []
    if len(by_type.get("boolean", ())) == 1:
        found.append({"const": not by_type["boolean"][0]})
    if numbers:
        found.append({"type": "number", "exclusiveMaximum": numbers[0]})
        found += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in itertools.pairwise(numbers)
        ]
        found.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if "string" in by_type:
        found.append({"type": "string", "pattern": Generated(f"^{_other_than(by_type['string'])}$")})
    for name, spelled in (("array", _constant_array), ("object", _constant_object)):
        if name in by_type:
            found.append({"type": name, "allOf": [{"not": spelled(each)} for each in by_type[name]]})
    return found


def _constant_array(value: list[Any]) -> Schema:
    items = [{"const": each} for each in value]
    return {"prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _constant_object(value: dict[str, Any]) -> Schema:
    properties = {name: {"const": each} for name, each in value.items()}
    return {"properties": properties, "required": [*properties], "additionalProperties": False}


def _other_than(texts: Sequence[str]) -> str:
    """Return a pattern of all texts but these, by their common beginnings."""
    if sum(map(len, texts)) > _MAX_CHARACTERS or max(map(len, texts)) > _MAX_LENGTH:
        raise ValueError(f"excludes texts of more than {_MAX_LENGTH} characters, or {_MAX_CHARACTERS} together")
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        letters = sorted(each for each in node if each)
        options = [rf"{_other_letter(letters)}[\s\S]*"]
        options += [f"{_letter(each)}{pattern(node[each])}" for each in letters]
        return f"(?:{'|'.join(options)}){'' if '' in node else '?'}"

    return pattern(tree)


def _other_letter(letters: list[str]) -> str:
    r"""Return a pattern of one character that is none of these. Control characters that JSON cannot write without
    numeric escapes are left out, as a class with most of them would also match quotation marks in llguidance.
    """
    if not letters:
        return r"[\s\S]"
    excluded = "".join(_letter(each) for each in letters if each >= " ")
    controls = "".join(_letter(each) for each in "\b\t\n\f\r" if each not in letters)
    return f"(?:[^{excluded}\\u0000-\\u001f]{'|[' + controls + ']' if controls else ''})"


def _letter(character: str) -> str:
    return rf"\u{ord(character):04x}" if ord(character) < 2**16 else character


def _limit(keyword: str, opposite: str, kind: str, step: int) -> Callable[[Schema, Resolve], list[Any]]:
    def negate(schema: Schema, resolve: Resolve) -> list[Any]:
        if not step:
            return [{"type": kind, opposite: schema[keyword]}]
        limit = count(schema[keyword]) + step
        return [{"type": kind, opposite: limit}] if limit >= 0 else []

    return negate


def _pattern(schema: Schema, resolve: Resolve) -> list[Any]:
    if not isinstance(schema["pattern"], str):
        raise ValueError("excludes a pattern that is not a string")
    return [{"type": "string", "pattern": joint((), [schema["pattern"]])}]


def _format(schema: Schema, resolve: Resolve) -> list[Any]:
    """Loses some strings that look like a hostname or a URI, but are none."""
    if not is_known(schema["format"]):
        return []
    if (pattern := superset(schema["format"])) is None:
        raise ValueError("excludes format, for whose opposite there is no grammar")
    return [{"type": "string", "pattern": joint((), [pattern])}]


def _required(schema: Schema, resolve: Resolve) -> list[Any]:
    return [{"type": "object", "properties": {name: False}} for name in strings(schema["required"])]


def _properties(schema: Schema, resolve: Resolve) -> list[Any]:
    return [
        {"type": "object", "required": [name], "properties": {name: {"not": each}}}
        for name, each in mapping(schema["properties"]).items()
        if each is not True and each != {}
    ]


def _additional_properties(schema: Schema, resolve: Resolve) -> list[Any]:
    if schema["additionalProperties"] in (True, {}):
        return []
    if schema["additionalProperties"] is not False:
        raise ValueError("excludes additionalProperties with a schema, for whose opposite there is no grammar")
    return _another_name([*mapping(schema.get("properties", {}))])


def _another_name(names: list[str]) -> list[Any]:
    """Return objects with a property that has none of these names."""
    chosen_sets = [chosen for size in range(len(names) + 1) for chosen in subsets(names, size)]
    check_number(len(chosen_sets))
    return [
        {
            "type": "object",
            "required": list(chosen),
            "properties": {name: False for name in names if name not in chosen},
            "minProperties": len(chosen) + 1,
        }
        for chosen in chosen_sets
    ]


def _property_names(schema: Schema, resolve: Resolve) -> list[Any]:
    names = schema["propertyNames"]
    if isinstance(names, dict) and names.keys() - {"type"} in ({"enum"}, {"const"}) and "string" in types_of(names):
        allowed = listed(names.get("enum", [names.get("const")]))
        return _another_name([each for each in allowed if isinstance(each, str)])
    if names is False:
        return [{"type": "object", "minProperties": 1}]
    raise ValueError("excludes propertyNames, for whose opposite there is no grammar")


def _prefix_items(schema: Schema, resolve: Resolve) -> list[Any]:
    return [
        {"type": "array", "minItems": at + 1, "prefixItems": [*[True] * at, {"not": each}]}
        for at, each in enumerate(listed(schema["prefixItems"]))
        if each is not True and each != {}
    ]


def _items(schema: Schema, resolve: Resolve) -> list[Any]:
    size, items = len(schema.get("prefixItems", ())), schema["items"]
    if items in (True, {}):
        return []
    if items is False:
        return [{"type": "array", "minItems": size + 1}]
    return [
        {"type": "array", "minItems": at + 1, "prefixItems": [*[True] * at, {"not": items}]}
        for at in range(size, size + _MAX_PLACE)
    ]


def _contains(schema: Schema, resolve: Resolve) -> list[Any]:
    wanted = schema["contains"]
    least = 1 if schema.get("minContains") is None else count(schema["minContains"])
    found: list[Any] = []
    if least == 1:
        found.append({"type": "array", "items": {"not": wanted}})
    elif least:
        found.append({"type": "array", "contains": wanted, "minContains": 0, "maxContains": least - 1})
    if schema.get("maxContains") is not None:
        found.append({"type": "array", "contains": wanted, "minContains": count(schema["maxContains"]) + 1})
    return found


def _any_of(schema: Schema, resolve: Resolve) -> list[Any]:
    """Negate all alternatives; at once, if all are constants, or each is about the same one property."""
    options = listed(schema["anyOf"])
    if options and all(isinstance(each, dict) for each in options):
        if all(each.keys() in ({"const"}, {"enum"}) for each in options):
            values = [value for each in options for value in listed(each.get("enum", [each.get("const")]))]
            return _values({"enum": values}, resolve)
        first = {key: value for key, value in options[0].items() if key != "properties"}
        same = all({**each, "properties": None} == {**first, "properties": None} for each in options)
        properties = [each.get("properties") for each in options]
        if same and all(isinstance(each, dict) and len(each) == 1 for each in properties):
            name = next(iter(properties[0]))
            if all(name in each for each in properties):
                return negated({**first, "properties": {name: {"anyOf": [each[name] for each in properties]}}}, resolve)
    return [{"allOf": [{"not": each} for each in options]}]


def _one_of(schema: Schema, resolve: Resolve) -> list[Any]:
    options = listed(schema["oneOf"])
    if len(options) > _MAX_PAIRED:
        raise ValueError(f"excludes oneOf with more than {_MAX_PAIRED} alternatives")
    none = {"allOf": [{"not": each} for each in options]}
    return [none, *({"allOf": list(pair)} for pair in itertools.combinations(options, 2))]


def _conditional(schema: Schema, resolve: Resolve) -> list[Any]:
    condition = schema["if"]
    found: list[Any] = []
    if schema.get("then") is not None:
        found.append({"allOf": [condition, {"not": schema["then"]}]})
    if schema.get("else") is not None:
        found.append({"allOf": [{"not": condition}, {"not": schema["else"]}]})
    return found


def _dependent_required(schema: Schema, resolve: Resolve) -> list[Any]:
    return [
        {"type": "object", "required": [name], "properties": {other: False}}
        for name, others in mapping(schema["dependentRequired"]).items()
        for other in strings(others)
        if other != name
    ]


def _dependent_schemas(schema: Schema, resolve: Resolve) -> list[Any]:
    return [
        {"allOf": [{"type": "object", "required": [name]}, {"not": each}]}
        for name, each in mapping(schema["dependentSchemas"]).items()
    ]


_NEGATIONS: dict[str, Callable[[Schema, Resolve], list[Any]]] = {
    "type": _type,
    "const": lambda schema, resolve: _values({"const": schema["const"]}, resolve),
    "enum": lambda schema, resolve: _values({"enum": schema["enum"]}, resolve),
    "minimum": _limit("minimum", "exclusiveMaximum", "number", 0),
    "exclusiveMinimum": _limit("exclusiveMinimum", "maximum", "number", 0),
    "maximum": _limit("maximum", "exclusiveMinimum", "number", 0),
    "exclusiveMaximum": _limit("exclusiveMaximum", "minimum", "number", 0),
    "minLength": _limit("minLength", "maxLength", "string", -1),
    "maxLength": _limit("maxLength", "minLength", "string", 1),
    "pattern": _pattern,
    "format": _format,
    "minItems": _limit("minItems", "maxItems", "array", -1),
    "maxItems": _limit("maxItems", "minItems", "array", 1),
    "minProperties": _limit("minProperties", "maxProperties", "object", -1),
    "maxProperties": _limit("maxProperties", "minProperties", "object", 1),
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional_properties,
    "propertyNames": _property_names,
    "prefixItems": _prefix_items,
    "items": _items,
    "contains": _contains,
    "not": lambda schema, resolve: [schema["not"]],
    "allOf": lambda schema, resolve: [{"not": each} for each in listed(schema["allOf"])],
    "anyOf": _any_of,
    "oneOf": _one_of,
    "if": _conditional,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
}
"""By keyword: alternatives that violate it; values of other types never do."""
