"""JSON schemas that are served: every keyword that is enforced, alone and together; bounded, so that chance ends it."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_BIT: Schema = {"type": "boolean"}
_DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
_WORD: Schema = {"type": "string", "pattern": "^[a-z]{1,5}$"}
_TEXT: Schema = {"type": "string", "maxLength": 6}


def _object(required: list[str] | None = None, /, more: Any = False, **properties: Any) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": more}


def _list(items: Any, least: int = 0, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def _text(**more: Any) -> Schema:
    return {"type": "string", **more}


def _pattern(pattern: str, most: int = 12) -> Schema:
    return _text(pattern=pattern, maxLength=most)


_LITERALS: list[Schema] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": ["boolean", "null"]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    {"type": ["string", "integer"], "maxLength": 3, "minimum": -5, "maximum": 5},
    {"const": None},
    {"const": True},
    {"const": 0},
    {"const": -17},
    {"const": 2.5},
    {"const": 1e20},
    {"const": 1e-7},
    {"const": 2**53},
    {"const": ""},
    {"const": 'a"b\\c/d\n\t\r\b\f'},
    {"const": "é 中文 😀 \u2028 \u00a0"},
    {"const": []},
    {"const": {}},
    {"const": {"b": [1, {"a": None}], "a": "x"}},
    {"enum": ["red", "green", "blue"]},
    {"enum": ["a", "ab", "abc", "abcd"]},
    {"enum": [1, 10, 100, 1000]},
    {"enum": [1, "1", True, None, 1.5, [1], {"one": 1}]},
    {"enum": ["ü", "ß", "日本", "😀😁", "\ufeff"]},
    {"type": "string", "enum": ["x", 5, None]},
    {"type": "integer", "enum": [1, 2.5, 3.0]},
    {"enum": ["a", "b"], "const": "b"},
]

_STRINGS: list[Schema] = [
    _text(maxLength=0),
    _text(maxLength=4),
    _text(minLength=3, maxLength=3),
    _text(minLength=2, maxLength=9),
    _pattern("^[a-c]{2,4}$"),
    _pattern("b"),
    _pattern("^ab", 5),
    _pattern("yz$", 5),
    _pattern("^a|b$", 5),
    _pattern("^(foo|bar)(-(foo|bar)){0,2}$"),
    _pattern(r"^\d{3}-\d{4}$"),
    _pattern(r"^\D{3}$"),
    _pattern(r"^\w+$", 5),
    _pattern(r"^\s\S\s$"),
    _pattern(r"^[\w.-]{1,4}@[\w-]{1,4}\.com$", 20),
    _pattern("^[^a-z]{3}$"),
    _pattern("^.{2}$"),
    _pattern(r"^\$[0-9]+\.[0-9]{2}$"),
    _pattern(r"^[\[\]\\&]{2}$"),
    _pattern("^é{1,2}[α-ω]{2}[一-龥]$"),
    _pattern(r"^\u00e9\x41\/\-$"),
    _pattern("^a*b+c?$", 6),
    _pattern("^(a(b(c)?)?)?$"),
    _pattern("^$"),
    _pattern("^[A-Z][a-z]{2,4}$") | {"minLength": 4},
    {"pattern": "^x$", "type": ["string", "null"]},
    _text(format="date"),
    _text(format="time", maxLength=14),
    _text(format="date-time", maxLength=25),
    _text(format="duration", maxLength=8),
    _text(format="email", maxLength=12),
    _text(format="hostname", maxLength=10),
    _text(format="ipv4"),
    _text(format="ipv6"),
    _text(format="uuid"),
    _text(format="uri", maxLength=16),
    _text(format="date", pattern="-02-"),
    _text(format="date", pattern="^2024-02-29$"),
    {"type": ["string", "null"], "format": "date-time", "maxLength": 20},
    {"format": "ipv4", "type": ["string", "boolean"]},
]

_NUMBERS: list[Schema] = [
    _DIGIT,
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "minimum": 98, "maximum": 1203},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    {"type": "integer", "minimum": -1000, "exclusiveMaximum": -990},
    {"type": "integer", "minimum": 0.5, "maximum": 2.5},
    {"type": "integer", "minimum": 2**53 - 2, "maximum": 2**53},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "integer", "multipleOf": 5, "exclusiveMinimum": 0, "maximum": 20},
    {"type": "integer", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    {"type": "integer", "minimum": 0},
    {"type": "integer", "maximum": 0},
    {"type": "integer"},
    {"type": "number"},
    {"type": "number", "minimum": 0},
    {"type": "number", "minimum": 0.1, "maximum": 0.35},
    {"type": "number", "exclusiveMinimum": -2.5, "exclusiveMaximum": 1e3},
    {"type": "number", "minimum": -0.001, "maximum": 0.001},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1},
    {"type": "number", "multipleOf": 2.5, "minimum": -10, "maximum": 10},
    {"type": "number", "minimum": 3, "maximum": 3},
    {"type": "number", "multipleOf": 0.25},
    {"minimum": 5, "maximum": 7, "type": ["number", "null"]},
    {"minimum": 4, "exclusiveMinimum": True, "type": "integer", "maximum": 6},
]

_ARRAYS: list[Schema] = [
    _list(_BIT, most=0),
    _list(_BIT),
    _list(_DIGIT, least=2),
    _list(_TEXT, least=3),
    _list({"enum": ["a", "b"]}, least=1, most=6),
    _list(_list(_DIGIT, most=2), most=2),
    _list(_object(a=_DIGIT), least=1, most=2),
    _list({"anyOf": [_DIGIT, _WORD, {"type": "null"}]}, least=2, most=4),
    {"type": "array", "prefixItems": [_DIGIT, _WORD], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [_DIGIT, _WORD], "items": False},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 4},
    {"type": "array", "prefixItems": [_BIT], "items": _list(_BIT, most=1), "minItems": 3, "maxItems": 3},
    {"type": "array", "items": [_DIGIT, _WORD], "additionalItems": False, "minItems": 2},
    {"type": "array", "items": [_DIGIT], "additionalItems": _WORD, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": _BIT, "additionalItems": {"const": 3}, "maxItems": 2},
    {"type": "array", "items": _BIT, "uniqueItems": False, "maxItems": 2},
    {"type": ["array", "null"], "items": {"const": "x"}, "maxItems": 2},
    {"type": "array", "maxItems": 2, "items": {}} | {"items": {"type": ["null", "boolean"]}},
]

_OBJECTS: list[Schema] = [
    {"type": "object", "maxProperties": 0},
    _object(),
    _object(a=_BIT),
    _object([], a=_BIT, b=_DIGIT),
    _object(["b"], a=_BIT, b=_DIGIT, c=_WORD),
    _object(name=_TEXT, age=_DIGIT, tags=_list(_WORD)),
    _object(z=_BIT, a=_BIT, m=_BIT),
    _object(**{'quoted "key"': _BIT, "back\\slash": _DIGIT, "line\nfeed": _BIT, "": _BIT}),
    _object(**{"ключ": _BIT, "鍵": _DIGIT, "🔑": _WORD, "a b": _BIT, "$ref": _BIT, "type": _DIGIT}),
    _object(outer=_object(inner=_object(core=_DIGIT))),
    _object([], maybe=_object([], perhaps=_BIT)),
    _object(a={"type": "null"}, b={"const": {"x": 1}}),
    {"type": "object", "properties": {"a": _BIT}, "additionalProperties": False},
    {"properties": {"a": _BIT}, "required": ["a"], "additionalProperties": False, "type": ["object", "null"]},
    {"type": "object", "additionalProperties": _DIGIT, "maxProperties": 2},
    {"type": "object", "additionalProperties": _BIT, "minProperties": 1, "maxProperties": 1},
    {
        "type": "object",
        "properties": {"a": _BIT},
        "required": ["a"],
        "additionalProperties": _DIGIT,
        "maxProperties": 2,
    },
    {**_object(["a"], more=_DIGIT, a=_BIT), "minProperties": 2, "maxProperties": 3},
    {**_object([], a=_BIT, b=_BIT), "minProperties": 1},
    {**_object([], a=_BIT, b=_BIT), "maxProperties": 1},
    {
        "type": "object",
        "required": ["b", "a"],
        "properties": {"a": _BIT},
        "additionalProperties": _DIGIT,
        "maxProperties": 2,
    },
    {"type": "object", "patternProperties": {"^x-[a-z]$": _DIGIT}, "additionalProperties": False, "maxProperties": 2},
    {
        "type": "object",
        "patternProperties": {"^x[0-9]$": _DIGIT, "^y[0-9]$": _WORD},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    {"type": "object", "patternProperties": {"^[a-f]+$": _BIT}, "additionalProperties": _DIGIT, "maxProperties": 2},
    {
        "type": "object",
        "properties": {"ab": {"minimum": 5, "maximum": 9}},
        "required": ["ab"],
        "patternProperties": {"^a": {"type": "integer"}},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    {"additionalProperties": False, "properties": {"late": _DIGIT}, "type": "object", "required": ["late"]},
]

_COMBINED: list[Schema] = [
    {"anyOf": [_DIGIT, _WORD]},
    {"anyOf": [{"type": "null"}, _object(a=_BIT), _list(_BIT)]},
    {"anyOf": [{"const": 1}, {"const": 2}, {"const": "three"}]},
    {"anyOf": [{"minimum": 3}, {"maximum": -3}], "type": "integer", "multipleOf": 3},
    {"anyOf": [_object(kind={"const": "a"}, x=_DIGIT), _object(kind={"const": "b"}, y=_WORD)]},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], **_object([], a=_BIT, b=_DIGIT)},
    {
        "type": "object",
        "anyOf": [
            {"properties": {"a": _DIGIT}, "required": ["a"]},
            {"properties": {"b": {"const": 2}}, "required": ["b"]},
        ],
        "maxProperties": 1,
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    {"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "null"}]},
    {"oneOf": [_DIGIT, _BIT]},
    {"oneOf": [_object(t={"const": "A"}, v=_BIT), _object(t={"const": "B"}, v=_DIGIT)]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}], "minimum": 4, "maximum": 6, "maxLength": 2},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6, "minimum": 0, "maximum": 100}]},
    {"allOf": [_text(pattern="^a"), {"pattern": "z$"}, {"maxLength": 5}]},
    {
        "allOf": [{"properties": {"a": _DIGIT}, "required": ["a"]}, {"properties": {"a": {"maximum": 3}}}],
        "type": "object",
        "maxProperties": 1,
    },
    {
        "allOf": [{"properties": {"a": _BIT}}, {"properties": {"b": _DIGIT}}, {"required": ["a", "b"]}],
        "type": "object",
        "maxProperties": 2,
    },
    {"allOf": [_list(_DIGIT, most=4), {"minItems": 2}, {"items": {"multipleOf": 3}}]},
    {"allOf": [{"prefixItems": [_DIGIT]}, {"items": {"maximum": 4}}], "type": "array", "minItems": 1, "maxItems": 1},
    {"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["b", "c", "d"]}]},
    {"allOf": [{"anyOf": [_DIGIT, _WORD]}, {"anyOf": [{"minimum": 5}, {"type": "string"}]}]},
    {"allOf": [], "type": "boolean"},
    {
        "allOf": [
            {"type": "object", "additionalProperties": {"type": "integer"}},
            {"additionalProperties": {"minimum": 5, "maximum": 6}},
        ],
        "maxProperties": 2,
    },
    {"anyOf": [{"allOf": [_text(maxLength=3), {"minLength": 2}]}, {"oneOf": [_BIT, {"type": "null"}]}]},
    {"type": "array", "maxItems": 3, "allOf": [{"items": {"anyOf": [_DIGIT, _BIT]}}, {"minItems": 1}]},
]

_REFERENCES: list[Schema] = [
    {"$ref": "#/$defs/a", "$defs": {"a": _DIGIT}},
    {"$ref": "#/definitions/a", "definitions": {"a": _WORD}},
    {"$ref": "#/$defs/a~1b~0c%20d", "$defs": {"a/b~c d": {"const": 1}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer", "maximum": 9}}, "minimum": 5},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": _BIT}},
    _object(x={"$ref": "#/properties/y"}, y=_DIGIT),
    _object(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"}) | {"$defs": {"p": _object(n=_DIGIT)}},
    _list({"$ref": "#/$defs/e"}) | {"$defs": {"e": {"enum": ["k", "l"]}}},
    {
        "$ref": "#/$defs/list",
        "$defs": {"list": {"anyOf": [{"type": "null"}, _object(v=_BIT, next={"$ref": "#/$defs/list"})]}},
    },
    _object(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    {"anyOf": [_DIGIT, {"type": "array", "prefixItems": [{"$ref": "#"}], "items": False}]},
    {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": _object(["v"], v=_DIGIT, left={"$ref": "#/$defs/tree"}, right={"$ref": "#/$defs/tree"})},
    },
    {
        "$ref": "#/$defs/expr",
        "$defs": {
            "expr": {"anyOf": [_DIGIT, {"$ref": "#/$defs/sum"}]},
            "sum": _object(op={"enum": ["+", "-"]}, args=_list({"$ref": "#/$defs/expr"}, 1, 2)),
        },
    },
    {
        "allOf": [{"$ref": "#/$defs/base"}],
        "$defs": {"base": {"type": "object", "properties": {"id": _DIGIT}, "required": ["id"]}},
        "maxProperties": 1,
    },
    {
        "$id": "https://example.com/s.json",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": "#/$defs/d",
        "$defs": {"d": {"const": "d"}},
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"n": {"type": "integer", "minimum": 1, "maximum": 3}},
        **_object(n={"$ref": "#/definitions/n"}),
    },
    {"$schema": "http://json-schema.org/draft-04/schema#", "id": "x", "type": "integer", "const": 4},
]

_REAL: list[Schema] = [
    {
        "title": "Weather",
        "description": "what to look up",
        **_object(
            city={**_WORD, "description": "the city", "examples": ["Oslo"]}, unit={"enum": ["celsius", "fahrenheit"]}
        ),
    },
    _object(steps=_list(_object(explanation=_TEXT, output=_TEXT), 1, 2), final_answer=_TEXT),
    _object(
        ui=_object(
            type={"enum": ["div", "button"]},
            label=_TEXT,
            children=_list({"$ref": "#/properties/ui"}, 0, 1),
            attributes=_list(_object(name=_WORD, value=_TEXT), 0, 1),
        )
    ),
    _object(
        id=_text(format="uuid"),
        created=_text(format="date-time", maxLength=20),
        email={"anyOf": [_text(format="email", maxLength=10), {"type": "null"}], "default": None},
    ),
    _object(
        ["items", "total"],
        items=_list(_object(sku=_pattern("^[A-Z]{3}-[0-9]{3}$"), count=_DIGIT), 1, 2),
        total={"type": "number", "minimum": 0, "multipleOf": 0.01, "maximum": 100},
        note={"type": ["string", "null"], "maxLength": 4},
    ),
    {
        "$defs": {
            "Color": {"enum": ["RED", "GREEN"], "title": "Color", "type": "string"},
            "Point": {
                "properties": {"x": _DIGIT, "y": _DIGIT},
                "required": ["x", "y"],
                "title": "Point",
                "type": "object",
                "maxProperties": 2,
            },
        },
        **_object(color={"$ref": "#/$defs/Color"}, path=_list({"$ref": "#/$defs/Point"}, 0, 2)),
    },
    _object(
        answer={
            "anyOf": [
                _object(kind={"const": "text"}, text=_TEXT),
                _object(kind={"const": "call"}, name=_WORD, arguments=_object(n=_DIGIT)),
            ],
            "discriminator": {"propertyName": "kind"},
        }
    ),
    _object(**{f"field_{n}": [_BIT, _DIGIT, _WORD, {"type": "null"}][n % 4] for n in range(16)}),
    _object(matrix=_list(_list({"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.5}, 2, 2), 2, 2)),
    _object(
        tuple={"type": "array", "prefixItems": [_WORD, _DIGIT, {"type": "null"}], "items": False, "minItems": 3},
        map={
            "type": "object",
            "patternProperties": {"^k[0-9]$": _BIT},
            "additionalProperties": False,
            "maxProperties": 2,
        },
    ),
]

SETS: list[Schema] = [
    _list(_text(), 1, 4, uniqueItems=True),
    _list(_list({"type": "integer"}, 2, 3, uniqueItems=True), 1, 2),
    {"type": "object", "additionalProperties": _list(_TEXT, 2, 3, uniqueItems=True), "maxProperties": 2}
    | {"propertyNames": {"enum": ["a", "b"]}},
    {"anyOf": [_list({"enum": [*range(12)]}, 9, 12, uniqueItems=True), {"type": "null"}]},
    _object(tags=_list({"$ref": "#/$defs/tag"}, 3, 3, uniqueItems=True))
    | {"$defs": {"tag": {"type": ["boolean", "null", "integer"], "minimum": 0, "maximum": 3}}},
]
"""Arrays whose items differ, as the engine checks beside the grammar."""
SCHEMAS = _LITERALS + _STRINGS + _NUMBERS + _ARRAYS + _OBJECTS + _COMBINED + _REFERENCES + _REAL + SETS
