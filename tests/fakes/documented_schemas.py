"""JSON Schemas in the style of what libraries write: pydantic's own, and those of zod and OpenAPI, written by hand."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    NonNegativeInt,
    PositiveFloat,
    RootModel,
    StringConstraints,
    Tag,
    TypeAdapter,
    conlist,
)
from typing_extensions import TypedDict


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    pet_type: Literal["cat"]
    meows: int


class Dog(BaseModel):
    pet_type: Literal["dog"]
    barks: float


class Lizard(BaseModel):
    pet_type: Literal["reptile", "lizard"]
    scales: bool


class Owner(BaseModel):
    pet: Cat | Dog | Lizard = Field(discriminator="pet_type")
    n: int


class BlackCat(BaseModel):
    pet_type: Literal["cat"]
    color: Literal["black"]
    black_name: str


class WhiteCat(BaseModel):
    pet_type: Literal["cat"]
    color: Literal["white"]
    white_name: str


class Nested(BaseModel):
    pet: Annotated[Annotated[BlackCat | WhiteCat, Field(discriminator="color")] | Dog, Field(discriminator="pet_type")]


class Pie(BaseModel):
    kind: Literal["apple", "pumpkin"] = "apple"
    time_to_cook: int


class Dessert(BaseModel):
    dessert: Annotated[
        Annotated[Pie, Tag("pie")] | Annotated[str, Tag("name")],
        Discriminator(lambda value: "name" if isinstance(value, str) else "pie"),
    ]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, StringConstraints(min_length=1, max_length=20, pattern="^[a-z]+$")]
    age: Annotated[int, Field(ge=0, le=150)]
    ratio: Annotated[float, Field(gt=0, lt=1, multiple_of=0.5)]
    tags: Annotated[list[str], Field(min_length=1, max_length=5)]


class Allowed(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int] = Field(init=False)
    name: str


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Point(NamedTuple):
    x: int
    y: int = 0


class User(TypedDict, total=False):
    name: str
    id: int


class Everything(BaseModel):
    when: datetime
    day: date
    at: time
    took: timedelta
    id: UUID
    address: IPv4Address
    site: AnyUrl
    price: Decimal
    amount: PositiveFloat
    count: NonNegativeInt
    color: Color = Color.RED
    level: Level
    maybe: int | None = None
    either: int | str | None
    pair: tuple[int, str]
    many: tuple[int, ...]
    triple: conlist(int, min_length=3, max_length=3)  # type: ignore[valid-type]
    mapping: dict[str, list[int]]
    by_number: dict[int, str]
    by_choice: dict[Literal["a", "b"], float]
    by_color: dict[Color, int]
    by_pattern: dict[Annotated[str, StringConstraints(pattern="^k[0-9]$")], int]
    by_length: dict[Annotated[str, StringConstraints(max_length=3)], int]
    few: Annotated[dict[Literal["x", "y", "z"], int], Field(min_length=1, max_length=2)]
    some: Annotated[dict[str, int], Field(min_length=1)]
    chosen: set[Literal["a", "b", "c"]]
    colors: frozenset[Color]
    flags: set[bool]
    text: Json[Any]
    point: Point
    user: User
    anything: Any


MODES: tuple[Literal["validation", "serialization"], ...] = ("validation", "serialization")
PYDANTIC: list[tuple[str, Any]] = [
    *((each.__name__, each) for each in (Owner, Nested, Dessert, Strict, Allowed, Tree, Everything)),
    ("RootModel", RootModel[list[Color]]),
    ("union", Cat | Dog | int | None),
    ("union of closed ones", Annotated[Cat | Dog, Field(discriminator="pet_type")]),
    ("dict of unions", dict[Literal["a", "b"], Annotated[Cat | Dog, Field(discriminator="pet_type")]]),
]

ZOD: dict[str, Any] = {
    "strict object": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "number", "exclusiveMinimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "integer": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    "record of keys": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["id", "name", "email"]},
        "additionalProperties": {"type": "string"},
        "required": ["id", "name", "email"],
    },
    "partial record": {
        "type": "object",
        "propertyNames": {"anyOf": [{"type": "string", "enum": ["id", "name"]}]},
        "additionalProperties": {"type": "number"},
    },
    "record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}},
    "record of lengths": {
        "type": "object",
        "propertyNames": {"type": "string", "minLength": 2, "maxLength": 4},
        "additionalProperties": {},
    },
    "discriminated union": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"status": {"type": "string", "const": "success"}, "data": {"type": "string"}},
                "required": ["status", "data"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"status": {"type": "string", "const": "failed"}, "error": {"type": "string"}},
                "required": ["status", "error"],
                "additionalProperties": False,
            },
        ]
    },
    "exclusive union": {"oneOf": [{"type": "string"}, {"type": "number"}]},
    "intersection": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "number"}}, "required": ["b"]},
        ]
    },
    "tuple with a rest": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "number"}],
        "items": {"type": "boolean"},
    },
    "never": {"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "string"}}, "required": ["b"]},
    "recursive": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "subcategories": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["name", "subcategories"],
        "additionalProperties": False,
    },
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/user",
        "definitions": {
            "user": {
                "type": "object",
                "properties": {"kind": {"type": "string", "const": "u"}, "tags": {"$ref": "#/definitions/tags"}},
                "required": ["kind"],
                "additionalProperties": False,
            },
            "tags": {"type": "array", "items": [{"type": "string"}], "additionalItems": {"type": "number"}},
        },
    },
}

OPENAPI: dict[str, Any] = {
    "discriminator": {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "petType", "mapping": {"cat": "#/$defs/Cat"}},
        "$defs": {
            "Pet": {"type": "object", "required": ["petType"], "properties": {"petType": {"type": "string"}}},
            "Cat": {
                "allOf": [
                    {"$ref": "#/$defs/Pet"},
                    {"type": "object", "properties": {"petType": {"const": "cat"}, "name": {"type": "string"}}},
                ]
            },
            "Dog": {
                "allOf": [
                    {"$ref": "#/$defs/Pet"},
                    {"type": "object", "properties": {"petType": {"const": "dog"}, "bark": {"type": "boolean"}}},
                ]
            },
        },
    },
    "required alternatives": {
        "type": "object",
        "properties": {"email": {"type": "string"}, "phone": {"type": "string"}, "name": {"type": "string"}},
        "oneOf": [{"required": ["email"]}, {"required": ["phone"]}],
    },
    "nullable": {"type": ["string", "null"], "format": "date-time"},
    "conditional country": {
        "type": "object",
        "properties": {"country": {"enum": ["US", "CA", "NL"]}, "postal_code": {"type": "string"}},
        "required": ["country", "postal_code"],
        "allOf": [
            {
                "if": {"properties": {"country": {"const": "US"}}, "required": ["country"]},
                "then": {"properties": {"postal_code": {"pattern": "^[0-9]{5}$"}}},
            },
            {
                "if": {"properties": {"country": {"const": "CA"}}, "required": ["country"]},
                "then": {"properties": {"postal_code": {"pattern": "^[A-Z][0-9][A-Z] [0-9][A-Z][0-9]$"}}},
            },
        ],
    },
    "else": {
        "type": "object",
        "properties": {"restaurantType": {"enum": ["fast-food", "sit-down"]}, "total": {"type": "number"}},
        "if": {"properties": {"restaurantType": {"const": "sit-down"}}, "required": ["restaurantType"]},
        "then": {"properties": {"tip": {"type": "number"}}, "required": ["tip"]},
        "else": {"properties": {"tip": False}},
    },
    "credit card": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "credit_card": {"type": "number"}},
        "required": ["name"],
        "dependentSchemas": {
            "credit_card": {"properties": {"billing_address": {"type": "string"}}, "required": ["billing_address"]}
        },
    },
    "dependent": {
        "type": "object",
        "properties": {"card": {"type": "number"}, "address": {"type": "string"}},
        "dependentRequired": {"card": ["address"]},
    },
    "extended closed object": {
        "allOf": [{"$ref": "#/$defs/address"}],
        "properties": {"type": {"enum": ["residential", "business"]}},
        "required": ["type"],
        "unevaluatedProperties": False,
        "$defs": {
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
                "required": ["street", "city"],
            }
        },
    },
    "reserved names": {"type": "string", "not": {"enum": ["admin", "root"]}},
    "contains": {"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}, "maxItems": 5},
    "bounds as floats": {"type": "string", "minLength": 1.0, "maxLength": 3.0},
    "anchor": {
        "$id": "https://example.com/customer",
        "type": "object",
        "properties": {"home": {"$ref": "#address"}, "work": {"$ref": "/address"}},
        "$defs": {
            "a": {"$anchor": "address", "type": "string"},
            "b": {
                "$id": "/address",
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/x"}},
                "$defs": {"x": True},
            },
        },
    },
}


DOCUMENTED_SCHEMAS: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"pydantic: {name} ({mode})", TypeAdapter(kind).json_schema(mode=mode))
        for name, kind in PYDANTIC
        for mode in MODES
    ),
    *((f"zod: {name}", schema) for name, schema in ZOD.items()),
    *((f"OpenAPI: {name}", schema) for name, schema in OPENAPI.items()),
]
