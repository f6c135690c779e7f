"""Schemas match the same values before and after rewriting, as an independent validator sees it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from quire.server.text import json_schema, patterns
from quire.server.text.json_schema import checked_schema
from quire.server.text.schemas.common import MAX_REWRITTEN_BYTES

Schema = dict[str, Any]
_ENUM: Schema = {"enum": ["a", "b"]}


def _kind(kind: str) -> Schema:
    return {"properties": {"a": {"const": kind}}, "required": ["a"]}


_SCALARS: list[Any] = [None, True, False, 0, 1, 2, 2.5, -3, "", "a", "b", "ab", "abc", 'a"', "\n", "é"]
_ARRAYS: list[Any] = [
    *([], [1], ["a"], [1, 1], [1, 2], ["a", "b"], ["b", "a"], ["a", "a"], [None, 1], [1, 2, 1], [2, 2, 2, 1], [[1], 1]),
    *(["x", "x", 5, 5, 5], [5, "x", 5], [True, False], [{"a": 1}, {"a": 2}], [1] * 9, [*range(20)]),
]
_OBJECTS: list[Any] = [
    *({}, {"a": 1}, {"a": "x"}, {"a": "y"}, {"a": "z"}, {"b": 1}, {"c": None}, {"a": 1, "b": 2}, {"a": "x", "b": 1}),
    *({"a": "y", "c": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3, "d": 4}, {"abcd": 1}, {"a": {"a": "x"}}),
    *({"a": "x", "d": 1}, {"b": 1, "c": 2}, {"a": None, "d": []}, {"d": 1}, {"d": 1, "e": 2}, {"b": {"b": {"b": 1}}}),
]
VALUES = [*_SCALARS, *_ARRAYS, *_OBJECTS]

SAME: list[Schema] = [
    # alternatives that exclude each other
    {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": ["null", "boolean"]}]},
    {"type": "object", "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
     "$defs": {"x": _kind("x"), "y": _kind("y")}},
    {"type": "object", "required": ["a"], "oneOf": [{"properties": {"a": {"const": kind}}} for kind in "xyz"]},
    {"oneOf": [{"enum": [1, "a"]}, {"enum": [2, None]}]},
    {"oneOf": [{"type": "integer", "maximum": 1}, {"type": "integer", "exclusiveMinimum": 1}]},
    {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}]},
    {"oneOf": [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}]},
    {"type": "object", "oneOf": [{"additionalProperties": False, "properties": {"a": {}}}, {"required": ["b"]}]},
    # alternatives that overlap
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
    {"type": "object", "oneOf": [{"required": ["a", "b"]}, {"required": ["a", "c"]}]},
    {"type": "string", "oneOf": [{"minLength": 1}, {"maxLength": 2}]},
    {"oneOf": [True, {"type": "null"}]},
    # negations
    {"not": {"type": "string"}},
    {"not": {"enum": [1, "a", "ab", True, None, [1, 2], {"a": 1}]}},
    {"not": {"enum": ['a"', "\n", ""]}, "type": "string"},
    {"not": {"const": {"a": 1, "b": 2}}, "type": "object"},
    {"not": {"not": {"type": "array"}}},
    {"not": {"allOf": [{"minimum": 1}, {"maximum": 1}]}, "type": ["number", "string"]},
    {"not": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "array", "minItems": 2}, {"required": ["a"]}]}},
    {"not": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "type": "object"},
    {"not": {"required": ["a", "b"]}},
    {"not": {"type": "integer", "format": "int32"}, "type": ["integer", "string"]},
    {"not": {"properties": {"a": {"type": "integer"}}}},
    {"not": {"additionalProperties": False, "properties": {"a": {}, "b": {}}}, "type": "object"},
    {"not": {"items": {"type": "integer"}}, "maxItems": 3},
    {"not": {"prefixItems": [{"const": 1}, {"const": 2}]}},
    {"not": {"contains": {"const": 1}}},
    {"not": {"contains": {"const": 5}, "minContains": 2, "maxContains": 2}, "type": "array", "maxItems": 5},
    {"not": {"if": {"type": "object"}, "then": {"required": ["a"]}, "else": {"type": "string"}}},
    {"not": {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"b": {"required": ["c"]}}}},
    {"not": {"propertyNames": _ENUM}},
    {"not": {"$ref": "#/$defs/short"}, "$defs": {"short": {"type": "string", "maxLength": 1}}},
    {"type": "string", "not": {"pattern": "^a|b$"}},
    {"type": ["string", "object"], "oneOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"type": "string", "maxLength": 0}]},
    {"oneOf": [{"type": "string", "pattern": "^a*$"}, {"type": "string", "pattern": "^b+$"}, {"const": "é"}]},
    # conditions
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"if": {"type": "string", "pattern": "b"}, "then": {"maxLength": 1}, "else": {"type": ["null", "string"]}},
    {"if": {"type": "string"}, "else": {"type": "object"}},
    {"type": "object", "if": {"properties": {"a": {"anyOf": [{}, {"const": 1}]}}}, "then": {"required": ["b"]}},
    {"type": "object", "if": _kind("x"), "then": {"required": ["b"]}, "else": {"properties": {"b": False}}},
    {
        "type": "object",
        "allOf": [{"if": _kind(kind), "then": {"required": [name]}} for kind, name in zip("xyz", "bcd", strict=True)],
    },
    {
        "type": "object",
        "required": ["a"],
        "allOf": [
            {"if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["b"]},
             "else": {"properties": {"d": False}}},
            {"if": {"properties": {"a": {"const": "y"}}}, "then": {"required": ["c"]}},
        ],
    },
    {"dependentRequired": {"a": ["b", "c"], "d": ["a"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}, "b": {"properties": {"c": {"type": "null"}}}}},
    # names and numbers of properties
    {"propertyNames": _ENUM, "additionalProperties": {"type": "integer"}},
    {"propertyNames": {"anyOf": [{"const": "a"}, {"$ref": "#/$defs/n"}]}, "$defs": {"n": {"enum": ["b", "c"]}}},
    {"propertyNames": _ENUM, "properties": {"a": {"type": "integer"}, "c": {}}, "maxProperties": 1},
    {"propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": {"type": "integer"}},
    {"propertyNames": {"minLength": 2, "maxLength": 4}},
    {"propertyNames": {"maxLength": 1.0, "format": "unknown"}},
    {"propertyNames": {"not": {"enum": ["a", "b"]}}},
    {"propertyNames": False},
    {"propertyNames": {"anyOf": [{"pattern": "^[ac]$"}, {"minLength": 4}], "not": {"pattern": "c"}}},
    {"propertyNames": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}, {"const": "c"}]}},
    {"propertyNames": {"if": {"pattern": "a"}, "then": {"maxLength": 1}, "else": {"enum": ["b", "c", 1]}}},
    {"propertyNames": {"allOf": [{"$ref": "#/$defs/n"}, {"maxLength": 1}]}, "$defs": {"n": {"pattern": "[abd]"}}},
    {"propertyNames": {"maxLength": 1}, "patternProperties": {"a": {"type": "integer"}, "b": True},
     "properties": {"abcd": True, "c": {"type": "null"}}, "additionalProperties": {"type": ["array", "integer"]}},
    {"propertyNames": {"not": {"pattern": "c"}}, "patternProperties": {"[bc]": {"type": "integer"}}},
    {"patternProperties": {"[ab]": {"type": "integer"}, "[bc]": {"maximum": 1}, "^d$": False}},
    {"allOf": [{"$ref": "#/$defs/x"}], "minProperties": 2, "$defs": {"x": {"properties": {"a": True, "b": {}}}},
     "additionalProperties": {"type": "null"}, "type": "object", "properties": {"a": {}, "b": {}, "c": {}}},
    {"$ref": "#/$defs/x", "minProperties": 1, "maxProperties": 1,
     "$defs": {"x": {"properties": {"a": True, "b": {}}, "additionalProperties": False}}},
    # alternatives and other places that no value matches
    {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}, {"$ref": "#/$defs/z"}, {"type": "null"}],
     "properties": {"a": {"$ref": "#/$defs/y"}}, "$defs": {
         "x": {"not": {}}, "y": {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/x"}}},
         "z": {"type": "string", "minLength": 3, "maxLength": 2}}},
    {"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "minProperties": 2},
    {"properties": {"a": {}, "b": {}, "c": {}}, "required": ["a"], "maxProperties": 2},
    {"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "minProperties": 1.0,
     "maxProperties": 2.0},
    {"properties": {"a": {}, "b": {}}, "minProperties": 1},
    # items
    {"contains": {"type": "integer"}, "maxItems": 9},
    {"contains": {"const": 5}, "minContains": 2, "type": "array"},
    {"contains": {"const": 1}, "maxContains": 1, "type": ["array", "null"]},
    {"contains": {"const": 1}, "minContains": 0, "maxContains": 2},
    {"contains": {}, "minContains": 2},
    {"items": _ENUM, "uniqueItems": True},
    {"items": {"enum": [1, 2, "a"]}, "uniqueItems": True, "minItems": 1, "maxItems": 2},
    {"prefixItems": [{"type": "boolean"}, {"type": "boolean"}], "items": False, "uniqueItems": True},
    {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "uniqueItems": True},
    # what nothing has evaluated
    {"allOf": [{"properties": {"a": True}}], "properties": {"b": True}, "unevaluatedProperties": False},
    {
        "anyOf": [_kind("x"), {"properties": {"b": True}, "required": ["b"]}],
        "unevaluatedProperties": {"type": "null"},
    },
    {"oneOf": [{**_kind("x"), "allOf": [{"properties": {"b": {}}}]}, _kind("y")], "unevaluatedProperties": False},
    {"if": _kind("x"), "then": {"properties": {"b": True}}, "else": {"patternProperties": {"^[cd]$": True}},
     "unevaluatedProperties": False},
    {"dependentSchemas": {"a": {"properties": {"a": True, "b": True}}}, "unevaluatedProperties": False},
    {"$ref": "#/$defs/base", "unevaluatedProperties": False, "$defs": {"base": {"properties": {"a": True, "b": True}}}},
    {"allOf": [{"unevaluatedProperties": True}], "unevaluatedProperties": False},
    {"if": {"properties": {"a": True}}, "unevaluatedProperties": False},
    {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    {"anyOf": [{"prefixItems": [True, {"const": 1}]}, {"items": {"type": "string"}}], "unevaluatedItems": False},
    {"prefixItems": [True], "contains": {"const": 5}, "unevaluatedItems": {"type": "string"}},
    # references
    {"$id": "https://example.com/root", "properties": {"a": {"$ref": "#name"}, "b": {"$ref": "other"}},
     "$defs": {"x": {"$anchor": "name", "type": "string"}, "y": {"$id": "other", "type": "integer"}}},
    {"properties": {"b": {"$dynamicRef": "#node"}}, "$dynamicAnchor": "node", "type": ["object", "integer"]},
    {"properties": {"b": {"$ref": "#/$defs/x/$defs/y~1z"}},
     "$defs": {"x": {"$id": "urn:x", "$defs": {"y/z": {"$ref": "#h"}, "h": {"$anchor": "h", "type": "integer"}}}}},
    {"$id": "urn:root", "$defs": {"y": {"$id": "urn:y", "$ref": "urn:root#/components/x"}},
     "components": {"x": {"required": ["a"]}}, "properties": {"a": {"$ref": "urn:y"}}},
    # spellings
    {"maxLength": 2.0, "maxItems": 1.0},
    {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"], "b": {"maxProperties": 2}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}], "additionalItems": False},
    {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True},
]  # fmt: skip
LOSSY: list[tuple[Schema, list[Any]]] = [
    ({"not": {"type": "integer"}}, [2.5]),
    ({"contains": {"const": 19}}, [[*range(20)]]),
    ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, [{"d": 1, "e": 2}]),
]


@pytest.mark.parametrize(("schema", "lost"), [*((schema, []) for schema in SAME), *LOSSY])
def test_the_same_values_match(schema: Schema, lost: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # The validator reads patterns as Python's.
    monkeypatch.setattr(patterns, "rewritten", lambda pattern, step: pattern)
    monkeypatch.setattr(patterns, "conjunction", lambda pattern, step: [pattern])
    before, after = validator_for(schema)(schema), Draft202012Validator(checked_schema(schema))
    matching = [value for value in VALUES if before.is_valid(value) and value not in lost]
    assert [value for value in VALUES if after.is_valid(value)] == matching
    assert matching
    assert all(before.is_valid(value) for value in lost)


@pytest.mark.parametrize(
    ("schema", "keyword", "why"),
    [
        ({"oneOf": [{"type": "string", "multipleOf": 2}, {"minLength": 1}]}, "oneOf", "use anyOf"),
        ({"oneOf": [{"minLength": at} for at in range(20)]}, "oneOf", "use anyOf"),
        ({"oneOf": [{"type": "string", "pattern": str(at)} for at in range(100)]}, "oneOf", "tell them apart"),
        ({"not": {"pattern": r"\p{L}"}}, "pattern", "Unicode property"),
        ({"not": {"pattern": 5}}, "not", "not a string"),
        ({"not": {"format": "regex"}}, "not", "excludes format"),
        ({"not": {"propertyNames": {"type": ["string", "null"]}}}, "not", "excludes propertyNames"),
        ({"not": {"additionalProperties": {"type": "null"}}}, "not", "excludes additionalProperties"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"not": {"$ref": "#/$defs/n"}}}}, "$ref", "itself"),
        (
            {"not": {"$ref": "#/$defs/n"}, "$defs": {"n": {"properties": {"a": {"$ref": "#/$defs/n"}}}}},
            "not",
            "endless",
        ),
        ({"items": {"type": "string"}, "uniqueItems": "yes"}, "uniqueItems", "true or false"),
        ({"minProperties": 2}, "minProperties", "repeat"),
        ({"properties": {str(at): {} for at in range(30)}, "maxProperties": 9}, "maxProperties", "alternatives"),
        ({"propertyNames": {"allOf": [{"pattern": r"\pL"}, {"minLength": 1}]}}, "propertyNames", "Unicode property"),
        ({"properties": {"a": {"propertyNames": {"format": "uri"}}}}, "propertyNames (at /properties/a)", "format"),
        ({"unevaluatedProperties": False, "anyOf": [{"required": [str(at)]} for at in range(20)]},
         "unevaluatedProperties", "alternatives"),
        ({"contains": {"multipleOf": 2}, "maxContains": 1}, "contains", "excludes multipleOf"),
        ({"dependentRequired": {"a": 5}}, "dependentRequired", "list of strings"),
        ({"$id": "urn:root", "components": {"x": {"type": "integer"}},
          "properties": {"a": {"$id": "urn:inner", "components": {"x": {"type": "string"}}, "$ref": "#/components/x"}}},
         "$ref (at /properties/a)", "points into"),
        ({"$ref": "#/properties/a/components/x", "components": {"y": {}},
          "properties": {"a": {"$id": "urn:inner", "components": {"y": False, "x": {"$ref": "#/components/y"}}}}},
         "$ref", "points into"),
        ({"properties": {"a": {"$id": "x" * 3000}}}, "$id", "characters"),
        ({"$dynamicRef": "#a", "$defs": {at: {"$id": at, "$dynamicAnchor": "a"} for at in "xy"}}, "$dynamicRef", "not"),
    ],
)  # fmt: skip
def test_what_has_no_grammar_is_refused_by_name(schema: Schema, keyword: str, why: str) -> None:
    with pytest.raises(ValueError, match="cannot be enforced") as error:
        checked_schema(schema)
    assert f"the schema's {keyword}" in str(error.value) or f"/{keyword}/" in str(error.value)
    assert why in str(error.value)


@pytest.mark.parametrize("items", [{"type": "string"}, {"enum": [*range(9)]}, {"type": ["integer", "null"]}])
def test_the_engine_keeps_many_items_apart(items: Schema) -> None:
    schema = {"type": "array", "items": items, "uniqueItems": True}
    checked = checked_schema(schema)
    assert {key: checked[key] for key in schema} == schema
    dropped: list[str] = []
    assert "uniqueItems" not in checked_schema(schema, dropped, keeps_unique_items=False)
    assert "few values" in dropped[0]


def test_what_is_left_out_is_named() -> None:
    dropped: list[str] = []
    schema = {"properties": {"a": {"not": {"multipleOf": 2}, "type": "string"}}, "uniqueItems": True, "type": "object"}
    checked = checked_schema({**schema, "format": "regex", "items": {"$recursiveRef": "#"}}, dropped)
    assert checked["properties"]["a"] == {"type": "string"}
    assert len(dropped) == 3
    assert all(
        name in str(dropped) for name in ("not (at /properties/a)", "format (at /)", "$recursiveRef (at /items)")
    )


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date-time", "2024-02-29T10:00:00Z", "2024-02-29"),
        ("uuid", "00000000-0000-0000-0000-00000000000A", "00000000-0000-0000-0000-00000000000g"),
    ],
)
def test_names_may_have_a_format(format: str, good: str, bad: str) -> None:
    checked = checked_schema({"propertyNames": {"format": format}, "additionalProperties": {"type": "integer"}})
    after = Draft202012Validator(checked)
    assert after.is_valid({good: 1})
    assert not any(after.is_valid(each) for each in ({bad: 1}, {good: "x"}))


def test_patterns_of_names_are_left_out_with_a_warning() -> None:
    dropped: list[str] = []
    schema = {
        "patternProperties": {r"(a)\1": {}, "^c$": {}},
        "properties": {"d": {"propertyNames": {"pattern": r"(a)\1"}}},
    }
    checked = checked_schema(schema, dropped)
    assert (checked["patternProperties"], checked["properties"]) == ({"^c$": {}}, {"d": {}})
    assert [each.partition(")")[0] for each in dropped] == [
        "the schema's patternProperties (at /",
        "the schema's propertyNames (at /properties/d",
    ]


def test_a_schema_does_not_explode() -> None:
    deep: Any = {"type": "string"}
    for at in range(6):
        deep = {"oneOf": [{"required": [f"a{at}"]}, {"properties": {"b": deep}}, {"maxItems": at, "not": deep}]}
    with pytest.raises(ValueError, match="too many alternatives"):
        checked_schema(deep)
    assert json_schema.MAX_ADDED_SCHEMAS < 10_000


_LONG = "." * patterns.MAX_REGEX_LENGTH
_CASES = [{"if": _kind(str(at)), "then": {"maxProperties": 9}} for at in range(250)]


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {str(at): {"$ref": "#z"} for at in range(500)},
          "$defs": {"x" * 100_000: {"$anchor": "z", "type": "null"}}}, None),
        ({"dependentRequired": {f"p{at}": ["a"] for at in range(3000)}, "required": [str(at) for at in range(10_000)]},
         "dependentRequired (at /)"),
        ({"items": {"pattern": "(?i)[" + "!-\uffff" * 1000 + "]"}}, None),
        ({"pattern": f"{_LONG}."}, "pattern (at /)"),
        ({"oneOf": [{"properties": {"a": {"$ref": "#/$defs/e"}}, "required": ["a"]}] * 20,
          "$defs": {"e": {"enum": [f"value {at}" for at in range(5000)]}}}, "oneOf (at /)"),
        ({"oneOf": [{"properties": {"a": {"enum": [*range(at, 90_000, 90)]}}, "required": ["a"]} for at in range(16)]},
         "not (at /oneOf/"),
        ({"unevaluatedProperties": False,
          "anyOf": [*({"required": [str(at)]} for at in range(7)),
                    {"required": ["h"], "properties": {"x": {"pattern": _LONG}}}]}, "pattern (at /anyOf/"),
        ({"type": "object", "allOf": [{**_CASES[0], "else": {"enum": [*range(10_000)]}}, *_CASES[1:]]}, "allOf (at /)"),
        ({"prefixItems": [{"enum": [*range(250)]}], "items": {"enum": [*range(9000)]}, "uniqueItems": True},
         "uniqueItems (at /)"),
        ({"unevaluatedProperties": False, "anyOf": [{"properties": {f"{n}{at}": {} for at in range(900)}}
                                                    for n in range(8)]}, "unevaluatedProperties (at /)"),
    ],
    ids=["anchors", "depending", "case", "pattern", "same", "constants", "unevaluated", "else", "items", "names"],
)  # fmt: skip
def test_work_is_limited(schema: Schema, keyword: str | None) -> None:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1

    patterns.rewritten("(?i)a")  # reads the table of cases, once
    problem: str | None = None
    checked: Schema = {}
    profile = sys.getprofile()
    sys.setprofile(count)
    try:
        checked = checked_schema(schema)
    except ValueError as error:
        problem = str(error)
    finally:
        sys.setprofile(profile)
    assert (problem is None) == (keyword is None), problem
    assert keyword is None or f"the schema's {keyword}" in (problem or "")
    assert calls < 1_000_000
    assert len(json.dumps(checked)) < 2 * MAX_REWRITTEN_BYTES
