"""Structured outputs are refused by the keyword's name before anything runs, or enforced completely."""

from __future__ import annotations

import asyncio
import errno
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types.shared_params import ResponseFormatJSONSchema

from quire import SamplingParams, StructuredOutputs
from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.scheduler.grammar import GrammarCompiler, GrammarError
from quire.server.client.request_record import RECORD, HttpRequestRecord
from quire.server.llm import AsyncLLM
from quire.server.text import json_schema, patterns, structured_outputs
from quire.server.text.structured_outputs import StructuredOutputCheck
from tests.fakes.api_server import Server, run_server
from tests.fakes.configs import TINY, engine_config
from tests.fakes.documented_schemas import DOCUMENTED_SCHEMAS
from tests.fakes.tokenizers import byte_level

OBJECT: dict[str, Any] = {"type": "object"}


@pytest.fixture(scope="module")
def checker(model_folder: Path) -> Iterator[StructuredOutputCheck]:
    config = engine_config(tokenizer=model_folder, architecture=replace(TINY, vocab_size=320), eos=(2,))
    check = StructuredOutputCheck(config.model)
    yield check
    check.close()


def schema_of(checker: StructuredOutputCheck, schema: Any) -> dict[str, Any]:
    """The schema as it is enforced."""
    resolved = checker.resolve(StructuredOutputs(json=schema)).json
    assert isinstance(resolved, dict)
    del resolved["x-guidance"]
    return resolved


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    return schema


UNSUPPORTED: list[tuple[Any, str]] = [
    *(
        ({keyword: value}, keyword)
        for keyword, value in {
            "not": {"multipleOf": 2},
            "uniqueItems": True,
            "$dynamicRef": "#a",
            "$recursiveRef": "#",
            "divisibleBy": 3,
            "disallow": "null",
            "extends": {},
            "x-guidance": {"lenient": True},
        }.items()
    ),
    ({"$defs": {"A": {"not": {"multipleOf": 2}}}, "items": {"$ref": "#/$defs/A"}}, "not (at /$defs/A)"),
    ({"properties": {"a/b": {"anyOf": [{}, {"uniqueItems": True}]}}}, "uniqueItems (at /properties/a/b/anyOf/1) is "),
    ({"oneOf": [{"type": "string", "pattern": r"(a)\1"}, {"type": "null"}]}, "pattern (at /oneOf/0)"),
    ({"type": "string", "format": "regex"}, "format"),
    ({"type": "string", "format": "uri-reference"}, "format"),
    ({"format": ["date"]}, "format"),
    ({"$ref": "https://example.com/schema"}, "$ref"),
    ({"$ref": "#anchor"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "$ref"),
    ({"$ref": 5}, "$ref"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"const": 2**53 + 1}, "const"),
    ({"const": {"a": [10**400]}}, "const"),
    ({"const": 2**70}, "const"),
    ({"type": "integer", "minimum": -(2**70)}, "minimum"),
    ({"type": "string", "maxLength": 2**70}, "maxLength"),
    ({"enum": ["a", {"b": 2**60 + 1}]}, "enum"),
    ({"type": "integer", "maximum": 2**53 + 1}, "maximum"),
    ({"type": "integer", "minimum": 1e18}, "minimum"),
    ({"type": "number", "multipleOf": 0}, "multipleOf"),
    ({"const": "a\x00"}, "const"),
    ({"properties": {"\ud83d": {}}}, "properties"),
    ({"type": "string", "pattern": r"^(?:(?!a)\p{L})*$"}, "pattern"),
    ({"type": "string", "pattern": "(?=.*a.{13}$)(?:a|b.{13})c"}, "pattern"),
    ({"type": "string", "not": {"pattern": r"^\pL"}}, "pattern (at /not"),
    ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
    ({"type": "string", "pattern": "x[[a]y]"}, "the schema's pattern (at /) has an unclear ]"),
    ({"type": "string", "pattern": 5}, "pattern"),
    ({"properties": {"a": {"pattern": r"\p{Nowhere}", "type": "string"}}}, "pattern (at /properties/a)"),
    ({**OBJECT, "patternProperties": {r"\Aa": {}}}, "patternProperties"),
    ({**OBJECT, "patternProperties": {r"\d": {}, **{f"[0-{at}]": {} for at in range(3, 10)}}}, "patternProperties"),
    ({**OBJECT, "patternProperties": {f"{at}$": {} for at in (1, 2, 3, 4, 5, 6, "[0-9]")}}, "patternProperties"),
    ({**OBJECT, "minProperties": 2}, "minProperties"),
    ({"allOf": [{"items": {"type": "integer"}, "contains": {"multipleOf": at}} for at in range(2, 9)]}, "contains"),
    ({"prefixItems": [{}], "additionalItems": False}, "prefixItems"),
    ({"prefixItems": [{}], "items": [{}]}, "prefixItems"),
]
UNSATISFIABLE: list[tuple[Any, str]] = [
    (False, "anyOf"),
    ({"not": {}}, "not (at /)"),
    ({"type": "number", "not": {"type": "integer"}}, "/not/"),
    ({"type": "integer", "oneOf": [{"minimum": 1}, {"minimum": 1}]}, "oneOf"),
    ({"enum": []}, "enum"),
    ({"anyOf": []}, "anyOf"),
    ({"type": []}, "type"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, "pattern"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
    ({"type": "integer", "minimum": 0.1, "maximum": 0.9}, "minimum"),
    ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "minimum"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "type (at /allOf/0)"),
    ({"const": "a", "enum": ["b"]}, "const"),
    ({**OBJECT, "properties": {"a": False}, "required": ["a"]}, "required"),
    ({**OBJECT, "required": ["a"], "additionalProperties": False}, "required"),
    ({**OBJECT, "properties": {"deep": {"type": "string", "format": "date", "minLength": 99}}, "required": ["deep"]},
     "format (at /properties/deep)"),
    ({"$ref": "#"}, "$ref"),
    ({**OBJECT, "properties": {"next": {"$ref": "#"}}, "required": ["next"]}, "$ref"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "$ref"),
]  # fmt: skip
MALFORMED: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ("[1]", "object"),
    ({"properties": 5}, "properties"),
    ({"properties": {"a": 5}}, "/properties/a"),
    ({"allOf": {}}, "allOf"),
    ({"items": 3}, "/items"),
    ({"type": "text"}, "type"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"type": "integer", "minimum": "3"}, "minimum"),
    (nested(json_schema.MAX_SCHEMA_DEPTH + 1), "deep"),
    ({"const": "x" * json_schema.MAX_SCHEMA_BYTES}, "bytes"),
    (" " * (json_schema.MAX_SCHEMA_BYTES + 1), "characters"),
]


@pytest.mark.parametrize(("schema", "named"), [*UNSUPPORTED, *UNSATISFIABLE, *MALFORMED])
def test_what_cannot_be_enforced_is_refused_by_name(checker: StructuredOutputCheck, schema: Any, named: str) -> None:
    if isinstance(schema, bool):
        schema = json.dumps(schema)
    with pytest.raises(InvalidParameter) as error:
        checker.resolve(StructuredOutputs(json=schema), "response_format")
    assert error.value.param == "response_format"
    assert str(error.value).startswith("response_format: ")
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("outputs", "named"),
    [
        ({"regex": "(?=a)"}, "look-around"),
        ({"regex": "["}, "character class"),
        ({"regex": "a" * (patterns.MAX_REGEX_LENGTH + 1)}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a"] * (structured_outputs.MAX_CHOICES + 1)}, "choices"),
        ({"choice": ["\ud83d"]}, "surrogates"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "start: start"}, "first token"),
        ({"grammar": "start: <|nowhere|>"}, "special token"),
        ({"grammar": "x" * (json_schema.MAX_SCHEMA_BYTES + 1)}, "grammar"),
        ({"grammar": 'start: "a" %json {"uniqueItems": true}'}, "uniqueItems"),
        (
            {
                "grammar": f"start: mark_1 %json {json.dumps({'items': {'type': 'string'}, 'uniqueItems': True})}\n"
                'mark_1[capture="__LIST_APPEND:json_1"]: /()/'
            },
            "uniqueItems",
        ),
        ({"grammar": "start: %json {"}, "%json"),
        ({"grammar": 'start: a\na[temperature=0.5]: "a"'}, "temperature"),
        ({"grammar": 'start: a\na[capture, stop="b"]: /.*/'}, "stop"),
    ],
)
def test_so_are_bad_grammars(checker: StructuredOutputCheck, outputs: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParameter, match=r"^structured_outputs: ") as error:
        checker.resolve(StructuredOutputs(**outputs))
    assert named in str(error.value)


@pytest.mark.parametrize("given", [{}, {"json": {}, "regex": "a"}, {"json_object": False}])
def test_exactly_one_kind_is_asked_for(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="exactly one"):
        StructuredOutputs(**given)


def test_annotations_go_and_constraints_stay(checker: StructuredOutputCheck) -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/me",
        "title": "T",
        "description": "d",
        "x-order": 1,
        "propertyOrdering": ["a"],
        "strict": True,
        "minlength": 3,
        "$vocabulary": {},
        "$dynamicAnchor": "a",
        **OBJECT,
        "properties": {"b": {"$ref": "#/definitions/B~1~0%20"}, "a": {"const": 1, "default": 2**70, "format": "int32"}},
        "required": ["a"],
        "uniqueItems": False,
        "definitions": {"B/~ ": {"type": "integer", "examples": [1]}, "unused": {"not": {}}},
    }
    found = schema_of(checker, json.dumps(schema))
    ((name, target),) = found["$defs"].items()
    assert target == {"type": "integer"}
    properties = {"b": {"$ref": f"#/$defs/{name}"}, "a": {"const": 1}}
    assert found == {**OBJECT, "properties": properties, "required": ["a"], "$defs": {name: target}}
    assert [*found["properties"]] == ["b", "a"]
    assert schema_of(checker, "true") == {}


@pytest.mark.parametrize(
    "vacuous",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": True, "unevaluatedProperties": True, "unevaluatedItems": {}},
        {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
        {"contains": {"type": "null"}, "minContains": 0},
        {"minContains": 2, "maxContains": 3},
        {"if": {"type": "null"}},
        {"then": {"type": "null"}, "else": False},
        {"not": False, "uniqueItems": False},
        dict.fromkeys(("not", "contains", "format", "pattern", "required", "description", "$ref", "items", "$defs")),
    ],
)
def test_constraints_that_allow_everything_are_ignored(checker: StructuredOutputCheck, vacuous: Any) -> None:
    assert schema_of(checker, {"properties": {"a": {"const": None, **vacuous}}}) == {
        "properties": {"a": {"const": None}}
    }


@pytest.mark.parametrize("schema", [{"type": "string", "pattern": r"(a)\1"}, {"type": "text"}, {"enum": []}])
def test_errors_do_not_show_the_servers_own_grammar(checker: StructuredOutputCheck, schema: Any) -> None:
    """The grammar of tools contains their schemas."""
    grammar = f'start: head args "done"\nhead: "x"\nargs: %json {json.dumps(schema)}\n'
    with pytest.raises(InvalidParameter) as error:
        checker.resolve(StructuredOutputs(grammar=grammar), "tools")
    assert not any(part in str(error.value) for part in ("args", "start:", "%json", " | ", "x-guidance"))
    assert len(str(error.value)) > len("tools: ")


def test_recursion_that_ends_is_allowed(checker: StructuredOutputCheck) -> None:
    node = {**OBJECT, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}
    assert schema_of(checker, node)["properties"]["next"]["anyOf"][0] == {"$ref": "#"}
    schema_of(checker, {"type": "array", "items": {"$ref": "#"}})
    schema_of(checker, {"properties": {"a": {"$ref": "#"}}, "required": ["a"]})  # a number will do


def refs(count: int) -> dict[str, dict[str, Any]]:
    """Schemas with so many references: in a row, the last first; of one name; all to one place; all from one place."""
    to = [{"$ref": f"#/$defs/d{at}"} for at in range(count)]
    chain = {f"d{at}": {**OBJECT, "properties": {"a": to[at - 1]}, "required": ["a"]} for at in range(1, count)}
    namesakes = {str(at): {"$defs": {"same": {"const": at}}} for at in range(count)}
    by_name = {str(at): {"$ref": f"#/$defs/{at}/$defs/same"} for at in range(count)}
    place = {**OBJECT, "properties": {str(at): {"const": at} for at in range(count)}}
    spelled = [{"$ref": f"#/$defs/many/anyOf/{'0' * at}1"} for at in range(count // 10)]
    return {
        "chain": {"$defs": {**chain, "d0": {"type": "null"}}, **to[-1]},
        "namesakes": {"$defs": namesakes, **OBJECT, "properties": by_name},
        "spellings": {"$defs": {"many": {"anyOf": [True, place]}}, "anyOf": spelled},
        "required": {
            "$defs": {f"d{at}": {"const": at} for at in range(count)},
            **OBJECT,
            "properties": {str(at): to[at] for at in range(count)},
            "required": [str(at) for at in range(count)],
        },
    }


@pytest.mark.parametrize("kind", refs(10))
def test_references_cost_no_more_each_where_there_are_many(kind: str) -> None:
    def calls(count: int) -> int:
        """Number of function calls while so many references are checked."""
        seen = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        schema = refs(count)[kind]
        earlier = sys.getprofile()
        sys.setprofile(note)
        try:
            checked = json_schema.checked_schema(schema)
        finally:
            sys.setprofile(earlier)
        assert len(json.dumps(checked)) < 3 * len(json.dumps(schema)) + 200
        return seen

    assert calls(2000) < 5 * calls(500)


def accepts(checker: StructuredOutputCheck, schema: Any, text: str) -> bool:
    """Whether the grammar allows this whole text, and its end."""
    grammars = GrammarCompiler(checker.model)
    grammar = grammars.compile(checker.resolve(StructuredOutputs(json=schema)))
    try:
        grammar.advance(byte_level().encode(text, add_special_tokens=False).ids)
    except GrammarError:
        return False
    (mask,) = grammars.masks([grammar])
    return bool(mask[0] & 1 << 2)


A_INTEGER: dict[str, Any] = {**OBJECT, "properties": {"a": {"type": "integer"}}}
DATE = {"type": "string", "format": "date"}
KIND_A: dict[str, Any] = {
    **OBJECT,
    "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}},
    "required": ["kind"],
}
KIND_B: dict[str, Any] = {**KIND_A, "properties": {"kind": {"const": "b"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            A_INTEGER,
            ['{"a": 1}', "{}", '{"b": "x"}', '{\n  "a": 1\n}'],
            ['{"a": "x"}', '{"\\u0061": "x"}', '{"b": 1, "a": 1}'],
        ),
        ({**A_INTEGER, "additionalProperties": False}, ['{"a":1}'], ['{"b":1}', '{"a":1,"a":2}']),
        ({**A_INTEGER, "required": ["a"], "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"type": "string"}, ['"é\\n\\"😀"'], ['"\\ud83d"', '"\\u0061"', '"\n"']),
        ({"type": "string", "maxLength": 2}, ['"é😀"', '"\\n\\n"'], ['"abc"']),
        (
            {"type": "array", "items": {"type": "null"}},
            ["[null , null]", "[\n" + " " * 32 + "]"],
            ["[  ]", "[\n\n]", "[\n" + " " * 33 + "]"],
        ),
        (
            DATE,
            ['"2024-02-29"', '"2000-02-29"', '"1900-02-28"', '"9999-12-31"', '"0001-01-01"'],
            [
                '"2023-02-29"',
                '"1900-02-29"',
                '"2100-02-29"',
                '"0000-01-01"',
                '"2023-04-31"',
                '"2023-13-01"',
                '"23-01-01"',
            ],
        ),
        ({**DATE, "maxLength": 10, "pattern": "^2"}, ['"2024-02-29"'], ['"1999-01-01"']),
        (
            {"type": "string", "format": "date-time"},
            ['"2024-02-29T23:59:59Z"', '"2024-01-01T00:00:00.25-23:59"'],
            ['"2023-02-29T00:00:00Z"', '"2024-01-01T24:00:00Z"', '"2024-01-01T00:00:60Z"', '"2024-01-01T00:00:00"'],
        ),
        ({"type": "string", "format": "time"}, ['"00:00:00Z"'], ['"00:00Z"', '"25:00:00Z"']),
        ({"type": "string", "pattern": "b$|^a"}, ['"ax"', '"xb"'], ['"xa"', '"bx"']),
        *(
            ({"type": "string", "pattern": f"^{one}{{3,6}}$"}, ['"abc"'], [r'"\"\"\""', r'"\"abc"', '"ab"'])
            for one in ('[^"]', r'[^"\\]', r'[^\\/:*?"<>|]', """[^'";\\\\]""", r'[^"\n]', r"[\x00-\x1fa-z]")
        ),
        ({"allOf": [{"type": "string", "pattern": '^[^"]*$'}, {"pattern": "a"}]}, ['"a"'], [r'"a\""', '"b"']),
        (
            {
                **OBJECT,
                "patternProperties": {r"^[^\\]$": {"type": "null"}},
                "additionalProperties": {"type": "integer"},
            },
            [r'{"\"":null}', r'{"\\":1}', '{"a":null}'],
            [r'{"\\":null}', r'{"\"":1}', '{"a":1}'],
        ),
        (
            {"type": "string", "pattern": r"^\p{Lu}\P{L}[^\p{L}1]$"},
            ['"É12"', r'"A\"-"'],
            ['"é12"', '"Éa2"', '"É1b"', '"É11"'],
        ),
        ({"type": "string", "pattern": "^(?<stop>a)b$"}, ['"ab"'], ['"a"', '"abb"']),
        ({"type": "string", "pattern": "^[]|a$"}, ['"a"'], ['""', '"]"']),
        ({"type": "number", "multipleOf": 0.1}, ["0.3", "-7"], ["0.35"]),
        ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, ["3.25", "3.001"], ["3", "3.0", "3.5"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.01"], ["-0", "0", "0.1"]),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.1"], ["0", "-0"]),
        ({"type": "number", "minimum": 2, "exclusiveMinimum": True}, ["2.5", "3"], ["2", "2.0"]),
        ({"const": 2**53}, [str(2**53)], [str(2**53 - 1)]),
        (
            {"prefixItems": [{"const": 1}], "type": "array", "$schema": "http://json-schema.org/draft-07/schema#"},
            ["[1,2]"],
            ["[2]"],
        ),
        ({"const": 1, "$schema": "http://json-schema.org/draft-04/schema#"}, ["1"], ["2"]),
        (
            {
                "allOf": [
                    {**OBJECT, "patternProperties": {"^a": {"type": "integer"}}},
                    {"additionalProperties": {"minimum": 5, "type": "number"}},
                ]
            },
            ['{"a":6}', '{"b":5.5}'],
            ['{"a":4}', '{"a":5.5}', '{"b":"x"}'],
        ),
        (
            {**OBJECT, "properties": {"ab": {"minimum": 5}}, "patternProperties": {"^a": {"type": "integer"}}},
            ['{"ab":6}'],
            ['{"ab":4}', '{"ab":5.5}'],
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": KIND_A, "b": KIND_B}},
            ['{"kind":"a","x":1}', '{"kind":"b"}'],
            ['{"kind":"b","x":1}', '{"kind":"c"}', "{}"],
        ),
        ({**OBJECT, "propertyNames": {"enum": ["a", "b"]}}, ['{"a":1,"b":2}', "{}"], ['{"c":1}', '{"a":1,"a":2}']),
        ({**OBJECT, "propertyNames": {"maxLength": 2}}, ['{"ab":1}', '{"é😀":1}'], ['{"abc":1}']),
        (
            {"type": "string", "not": {"enum": ["a", "ab", 'c"']}},
            ['""', '"b"', '"abc"', '"c"'],
            ['"a"', '"ab"', '"c\\""'],
        ),
        ({"type": "integer", "not": {"enum": [1, 3]}}, ["0", "2", "4"], ["1", "3"]),
        (
            {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5},
            ["1.2", "1.0001", "1.49"],
            ["1", "1.0", "1.5", "1.6", "0.9"],
        ),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.2", "-1.5"], ["-1", "-1.0"]),
        ({"type": "number", "not": {"enum": [1, 1.5]}}, ["1.2", "0", "2.5"], ["1", "1.5"]),
        (
            {**OBJECT, "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "minProperties": 2},
            ['{"a":1,"c":2}', '{"a":1,"b":1,"c":2}'],
            ['{"a":1}', '{"a":1,"a":2}'],
        ),
        (
            {**OBJECT, "dependentRequired": {"a": ["b"]}},
            ['{"a":1,"b":2}', '{"b":1}', '{"c":1}'],
            ['{"a":1}', '{"a":1,"c":1}'],
        ),
        ({"type": "array", "contains": {"const": 5}, "maxContains": 2}, ["[1,5]", "[5,5,7]"], ["[]", "[1]", "[5,5,5]"]),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, ["[]", '["b","a"]'], ['["a","a"]']),
        (
            {"type": "string", "pattern": r"^(?=[^\\]*\p{Lu})(?!É|.*--)[\p{L}\-]{2,3}(?<!-)$"},
            ['"aB"', '"éÉx"', '"x-É"'],
            ['"ab"', '"Éa"', '"B--"', '"aB-"', '"B"', '"aBcd"'],
        ),
        (
            {"type": "string", "pattern": r"^(?:(?!\\|\")[\s\S])*\"$"},
            [r'"\""', r'"\n\""'],
            [r'"\"\""', r'"\\\""', '"a"'],
        ),
        (
            {**OBJECT, "patternProperties": {r"^(?!_)\w+$": {"type": "null"}}, "additionalProperties": {"const": 1}},
            ['{"a":null,"_a":1,"-":1}'],
            ['{"a":1}', '{"_a":null}'],
        ),
        (
            {**OBJECT, "patternProperties": {"^a": {"minimum": 1}, "b$": {"type": "integer"}}},
            ['{"ab":1,"a":1.5,"b":-1,"c":"d"}'],
            ['{"ab":1.5}', '{"ab":-1}', '{"a":-1}', '{"b":1.5}'],
        ),
        (
            {
                **OBJECT,
                "patternProperties": {"^[ab]$": {"type": "null"}},
                "additionalProperties": False,
                "maxProperties": 1,
            },
            ['{"b":null}', "{}"],
            ['{"c":1}', '{"a":1}', '{"a":null,"b":null}'],
        ),
        (
            {**OBJECT, "patternProperties": {r"^\w+@\w+$": {"type": "null"}}, "propertyNames": {"maxLength": 5}},
            ['{"ab@cd":null}'],
            ['{"ab@cde":null}', '{"a@b":1}'],
        ),
        ({"type": "string", "not": {"format": "date"}}, ['"2023-02-29"', '""'], ['"2024-02-29"']),
        ({"type": "string", "not": {"format": "email"}}, ['"a@"', '"@a"'], ['"a@b"', '"a.b@[1.2.3.4]"']),
        ({"type": "string", "oneOf": [{"format": "ipv4"}, {"format": "ipv6"}]}, ['"1.2.3.4"', '"::1"'], ['"1.2.3"']),
        ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, ["-1.5", "1" + "0" * 18], ["4" + "0" * 38]),
        (
            {
                "anyOf": [{"$ref": "#/$defs/no"}, {"type": "null"}],
                "$defs": {"no": {"pattern": "^a$", "minLength": 2, "type": "string"}},
            },
            ["null"],
            ['"a"', '"aa"'],
        ),
        (
            {"allOf": [KIND_A], "properties": {"y": {}}, "unevaluatedProperties": False},
            ['{"y":1,"kind":"a"}', '{"kind":"a","x":1}'],
            ['{"kind":"a","z":1}'],
        ),
    ],
)
def test_what_is_enforced(checker: StructuredOutputCheck, schema: Any, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(checker, schema, text), text
    for text in bad:
        assert not accepts(checker, schema, text), text


@pytest.mark.parametrize(("name", "schema"), DOCUMENTED_SCHEMAS)
def test_what_libraries_write_is_enforced(checker: StructuredOutputCheck, name: str, schema: Any) -> None:
    assert checker.resolve(StructuredOutputs(json=schema)).json, name


async def test_unsupported_keywords_pass_with_a_warning_if_asked_for(
    checker: StructuredOutputCheck, caplog: pytest.LogCaptureFixture
) -> None:
    check = StructuredOutputCheck(checker.model, "warn")
    schema = {"type": "string", "pattern": r"(a)\1", "not": {"multipleOf": 2}, "maxLength": 3, "format": "regex"}
    token = RECORD.set(record := HttpRequestRecord())
    try:
        for _ in range(2):  # also if the answer is known
            found = (await check.resolve_in_thread(StructuredOutputs(json={"items": schema}), "response_format")).json
            assert isinstance(found, dict)
            assert found["items"] == {"type": "string", "maxLength": 3}
        check.resolve(StructuredOutputs(grammar=f"start: %json {json.dumps({'uniqueItems': True})}"))
        assert len(record.warnings) == 2 * 3 + 1
        for each, keyword in zip(record.warnings, ("not", "pattern", "format"), strict=False):
            assert each.startswith(f"response_format: the schema's {keyword} (at /items)")
        for bad in ({"type": "string", "minLength": 3, "maxLength": 2}, {"$ref": "#/nowhere"}):
            with pytest.raises(InvalidParameter):
                check.resolve(StructuredOutputs(json=bad))
    finally:
        RECORD.reset(token)
        check.close()
    with caplog.at_level("WARNING"):
        check.resolve(StructuredOutputs(json={"items": schema}))
    assert "not enforced: structured_outputs: the schema's not (at /items)" in caplog.text


@pytest.mark.usefixtures("core_mode")
async def test_warnings_are_in_a_header(config: EngineConfig) -> None:
    async with run_server(config, structured_outputs_fallback="warn") as server:
        for stream in (False, True):
            for schema, warning in (
                ({"type": "array", "uniqueItems": True}, "uniqueItems (at /)"),
                ({"const": "é"}, None),
            ):
                body = {"prompt": "x", "stream": stream, "structured_outputs": {"json": schema}}
                response = await server.http.post("/v1/completions", json=body, timeout=120)
                assert response.status_code == 200, response.text
                header = response.headers.get("X-Quire-Warning")
                assert header is None if warning is None else f"structured_outputs: the schema's {warning}" in header


COSTLY = {"allOf": [{"type": "string", "pattern": f"[{c}x].{{8}}[{c}y]"} for c in "abcdefghijklmnopqrstuvwxyz"]}
"""Takes minutes, and nothing in llguidance stops it."""


async def test_what_takes_long_to_compile_is_refused_and_holds_up_nobody(
    checker: StructuredOutputCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_outputs, "COMPILE_SECONDS", 0.3)
    check = StructuredOutputCheck(checker.model)
    check.resolve(StructuredOutputs(json={"const": 0}))
    check._compiler._seconds = 1000.0  # until the test ends them
    costly = [
        asyncio.create_task(check.resolve_in_thread(StructuredOutputs(json={**COSTLY, "title": str(at)})))
        for at in range(check._waiting._max_workers - 1)
    ]
    while not len(check._waiting._threads) >= len(costly):
        await asyncio.sleep(0)
    assert (await check.resolve_in_thread(StructuredOutputs(regex="a+"))).regex == "a+"
    with pytest.raises(InvalidParameter, match="uniqueItems"):
        await check.resolve_in_thread(StructuredOutputs(json={"uniqueItems": True}))
    assert await asyncio.to_thread(int, "5") == 5  # where long prompts are encoded
    assert not any(task.done() for task in costly)
    check._compiler.close()
    for task in costly:
        with pytest.raises(InvalidParameter, match=r"takes more than 0\.3 s to compile.*simplify it: .*allOf"):
            await task
    monkeypatch.setattr(check._compiler, "ask", None)  # known by now
    with pytest.raises(InvalidParameter, match="to compile"):
        check.resolve(StructuredOutputs(json={**COSTLY, "title": "0"}))
    monkeypatch.undo()
    check.close()


async def test_what_is_known_does_not_wait_and_what_is_asked_twice_is_compiled_once(
    checker: StructuredOutputCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = StructuredOutputCheck(checker.model)
    threads = check._waiting._max_workers
    assert 2 <= threads <= structured_outputs.MAX_COMPILING
    known = await check.resolve_in_thread(StructuredOutputs(regex="a+"))
    go, asked = threading.Event(), []

    def ask(question: bytes) -> bytes:
        asked.append(question)
        assert go.wait(60)
        return b""

    monkeypatch.setattr(check._compiler, "ask", ask)

    def resolve(regex: str) -> asyncio.Task[StructuredOutputs]:
        return asyncio.create_task(check.resolve_in_thread(StructuredOutputs(regex=regex)))

    slow = [resolve(f"b{at % threads}") for at in range(3 * threads)]
    queued, given_up = resolve("c"), resolve("d")
    while len(asked) < threads:
        await asyncio.sleep(0)
    assert (
        await asyncio.wait_for(check.resolve_in_thread(StructuredOutputs(regex="a+"), "response_format"), 60) is known
    )
    assert not any(task.done() for task in slow)
    for task in (slow[0], given_up):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    go.set()
    assert [(await task).regex for task in slow[1 : threads + 1]] == [
        f"b{at % threads}" for at in range(1, threads + 1)
    ]
    assert (await queued).regex == "c"
    await asyncio.gather(*slow[1:])
    assert len(asked) == threads + 1
    assert not check._jobs
    check.close()


async def test_without_a_process_that_compiles_the_answer_is_503(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("quire.server.text.sandbox.subprocess.Popen", fails)
    for body in ({"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}}):
        response = await server.http.post("/v1/completions", json={"prompt": "x", **body})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "engine_unavailable"), error
        assert "Resource temporarily unavailable" in error["message"]


def test_what_has_passed_is_not_compiled_again(checker: StructuredOutputCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = StructuredOutputs(json={"type": "integer", "description": "once"})
    first = checker.resolve(outputs)
    monkeypatch.setattr(structured_outputs, "checked_schema", None)
    assert checker.resolve(outputs, "response_format") is first


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    *(
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            "response_format",
        )
        for schema in ({"const": "\ud800"}, {"description": "\ud83d cut"}, {"type": "string", "pattern": "\ud800"})
    ),
    *(
        ({"structured_outputs": half}, "structured_outputs")
        for half in (
            {"regex": "\ud800"},
            {"choice": ["a", "\ud800"]},
            {"grammar": 'start: "\ud800"'},
            {"json": '"\ud800"'},
        )
    ),
    ({"stop": ["a", "\ud800"]}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"bad_words": ["\ud800"]}, "bad_words"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_names_the_parameter(server: Server, stream: bool) -> None:
    for body, param in BAD_REQUESTS:
        for route, prompt in (
            ("completions", {"prompt": "x"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            content = json.dumps({**prompt, **body, "stream": stream})
            response = await server.http.post(
                f"/v1/{route}", content=content, headers={"Content-Type": "application/json"}
            )
            error = response.json()["error"]
            assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert not server.frontend.client._running


async def test_the_engine_gets_what_was_asked_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    submit = server.frontend.client.submit

    def spy(requests: Any, *args: Any) -> Any:
        seen.extend(params for _, _, params in requests)
        return submit(requests, *args)

    monkeypatch.setattr(server.frontend.client, "submit", spy)
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "description": "gone"}
    response_format: ResponseFormatJSONSchema = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }
    await server.openai.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "x"}], response_format=response_format, n=2
    )
    x, spaced = (server.tokenizer.encode(text, add_special_tokens=False) for text in ("xy", " xy"))
    await server.openai.completions.create(
        model="echo",
        prompt="x",
        extra_body={
            "structured_outputs": {"choice": ["a"]},
            "allowed_token_ids": [5, 6],
            "bad_words": ["xy ", "h"],
        },
    )
    first, second, third = seen
    assert first.structured_outputs == second.structured_outputs
    assert isinstance(enforced := msgspec.structs.asdict(first)["structured_outputs"].json, dict)
    assert enforced["properties"] == schema["properties"]
    assert "description" not in enforced
    assert third.structured_outputs == StructuredOutputs(choice=["a"])
    assert third.allowed_token_ids == [5, 6]
    assert third.bad_words == []
    assert x in third.bad_word_ids
    assert len(spaced) != len(x) or spaced in third.bad_word_ids
    h, space_h = (server.tokenizer.encode(text, add_special_tokens=False) for text in ("h", " h"))
    assert [ids for ids in third.bad_word_ids if ids in (h, space_h)] == [h, space_h][: 1 + (len(space_h) == 1)]


async def test_the_client_library_sends_what_is_understood(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as error:
        await server.openai.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": "x"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "array", "uniqueItems": True}},
            },
        )
    assert error.value.param == "response_format"


async def test_python_callers_get_the_same_refusals(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with AsyncLLM(str(config.model.path), load_format="dummy", device="cpu") as llm:
        params = SamplingParams(structured_outputs=StructuredOutputs(json={"not": {"multipleOf": 2}}))
        with pytest.raises(InvalidParameter, match="not"):
            await anext(llm.generate("x", params))
