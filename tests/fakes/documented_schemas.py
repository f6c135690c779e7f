"""JSON Schemas in the style of what libraries write: pydantic's own, and those of zod and OpenAPI, written by hand."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

from pydantic import (
    AnyUrl,
    AwareDatetime,
    Base64Str,
    BaseModel,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    FilePath,
    FutureDatetime,
    HttpUrl,
    IPvAnyAddress,
    Json,
    JsonValue,
    NonNegativeInt,
    PastDate,
    PaymentCardNumber,
    PositiveFloat,
    PostgresDsn,
    RootModel,
    SecretStr,
    StringConstraints,
    Tag,
    TypeAdapter,
    UrlConstraints,
    WithJsonSchema,
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


TYPES: list[Any] = [
    *(bool, int, float, str, bytes, complex, Decimal, datetime, date, time, timedelta, UUID, Path, deque[int]),
    *(IPv4Address, IPv4Network, IPv6Address, IPv6Network, IPvAnyAddress, AnyUrl, HttpUrl, PostgresDsn, ByteSize),
    *(
        SecretStr,
        Base64Str,
        PastDate,
        FutureDatetime,
        AwareDatetime,
        FilePath,
        PaymentCardNumber,
        JsonValue,
        Color,
        Level,
    ),
    *(
        Counter[str],
        Sequence[int],
        Iterable[int],
        Mapping[str, int],
        dict[UUID, int],
        dict[date, int],
        dict[Level, str],
    ),
    *(dict[float, str], dict[bool, int], dict[tuple[int, int], str], tuple[()], dict[str, dict[str, list[Point]]]),
    Annotated[Decimal, Field(max_digits=5, decimal_places=2)],
    Annotated[int, Field(gt=1, lt=10, multiple_of=3)],
    Annotated[float, Field(gt=1.5, le=10.25, allow_inf_nan=False)],
    Annotated[AnyUrl, UrlConstraints(max_length=50, allowed_schemes=["https"])],
    Annotated[dict[str, int], Field(min_length=1, max_length=3)],
    dict[Annotated[str, StringConstraints(pattern=r"^\w+@\w+$", min_length=3, max_length=20)], int],
    Annotated[int | str, Field(union_mode="left_to_right")],
    Annotated[int, WithJsonSchema({"type": "integer", "examples": [1]})],
    Literal[1, "a", True, None],
]
"""Types of fields. pydantic writes two that are refused: `re.Pattern` (the format regex), and dictionaries of arbitrary
keys with at least two items, since a grammar does not remember the keys.
"""
MODES: tuple[Literal["validation", "serialization"], ...] = ("validation", "serialization")
PYDANTIC: list[tuple[str, Any]] = [
    *((each.__name__, each) for each in (Owner, Nested, Dessert, Strict, Allowed, Tree, Everything)),
    *((str(each), each) for each in TYPES),
    ("RootModel", RootModel[list[Color]]),
    ("union", Cat | Dog | int | None),
    ("union of closed ones", Annotated[Cat | Dog, Field(discriminator="pet_type")]),
    ("dict of unions", dict[Literal["a", "b"], Annotated[Cat | Dog, Field(discriminator="pet_type")]]),
]

ZOD_PATTERNS: dict[str, str] = {
    "email": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)"
        "+[A-Za-z]{2,}$"
    ),
    "email of zod 4.0": (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za"
        "-z]{2,}$"
    ),
    "email of RFC 5322": (
        r'^(([^<>()\[\]\\.,;:\s@"]+(\.[^<>()\[\]\\.,;:\s@"]+)*)|(".+"))@((\[[0-9]{1,3}\.[0-9]{1,3}'
        r"\.[0-9]{1,3}\.[0-9]{1,3}])|(([a-zA-Z\-0-9]+\.)+[a-zA-Z]{2,}))$"
    ),
    "email in Unicode": r'^[^\s@"]{1,64}@[^\s@]{1,255}$',
    "uuid": (
        "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{1"
        "2}|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
    ),
    "hostname": (
        r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[-0-9a-"
        r"zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
    ),
    "emoji": (
        r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])[\p{Extended_Pictogra"
        r"phic}\p{Emoji_Component}]+$"
    ),
    "base64": "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
    "base64url": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2,3})?$",
    "nanoid": "^[a-zA-Z0-9_-]{21}$",
    "ulid": "^[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}$",
    "ipv6": (
        "^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,7}:|([0-9a-fA-F]{1,4}:){1"
        ",6}:[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,5}(:[0-9a-fA-F]{1,4}){1,2}|([0-9a-fA-F]{1,4}:"
        "){1,4}(:[0-9a-fA-F]{1,4}){1,3}|([0-9a-fA-F]{1,4}:){1,3}(:[0-9a-fA-F]{1,4}){1,4}|([0-9a-f"
        "A-F]{1,4}:){1,2}(:[0-9a-fA-F]{1,4}){1,5}|[0-9a-fA-F]{1,4}:((:[0-9a-fA-F]{1,4}){1,6})|:(("
        ":[0-9a-fA-F]{1,4}){1,7}|:))$"
    ),
    "mac": "^(?:[0-9A-F]{2}:){5}[0-9A-F]{2}$|^(?:[0-9a-f]{2}:){5}[0-9a-f]{2}$",
    "cidrv4": (
        r"^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-"
        r"9]|[1-9][0-9]|[0-9])\/([0-9]|[1-2][0-9]|3[0-2])$"
    ),
    "cidrv6": (
        "^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,7}:|([0-9a-fA-F]{1,4}:){1"
        ",6}:[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,5}(:[0-9a-fA-F]{1,4}){1,2}|([0-9a-fA-F]{1,4}:"
        "){1,4}(:[0-9a-fA-F]{1,4}){1,3}|([0-9a-fA-F]{1,4}:){1,3}(:[0-9a-fA-F]{1,4}){1,4}|([0-9a-f"
        "A-F]{1,4}:){1,2}(:[0-9a-fA-F]{1,4}){1,5}|[0-9a-fA-F]{1,4}:((:[0-9a-fA-F]{1,4}){1,6})|:(("
        r":[0-9a-fA-F]{1,4}){1,7}|:))\/(12[0-8]|1[01][0-9]|[1-9]?[0-9])$"
    ),
    "e164": r"^\+[1-9]\d{6,14}$",
    "date": (
        r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{"
        r"4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:0"
        r"2)-(?:0[1-9]|1\d|2[0-8])))$"
    ),
    "time": r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$",
    "datetime": (
        r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{"
        r"4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:0"
        r"2)-(?:0[1-9]|1\d|2[0-8])))T(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z|([+-](?:[0"
        r"1]\d|2[0-3]):[0-5]\d)))$"
    ),
    "local datetime": (
        r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{"
        r"4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:0"
        r"2)-(?:0[1-9]|1\d|2[0-8])))T(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z)|(?:[01]\d"
        r"|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?)$"
    ),
    "duration": (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)"
        "?)?)$"
    ),
    "sha512": "^[0-9a-fA-F]{128}$",
    "uppercase": "^[^a-z]*$",
    "template literal": r"^-?\d+(?:\.\d+)?(px|em)$",
}
"""The patterns that zod 4 writes for its kinds of strings."""

ZOD: dict[str, Any] = {
    **{name: {"type": "string", "pattern": pattern} for name, pattern in ZOD_PATTERNS.items()},
    "bounded email": {"type": "string", "format": "email", "pattern": ZOD_PATTERNS["email"], "maxLength": 30},
    "starts and includes": {"type": "string", "allOf": [{"pattern": r"^a\.b.*"}, {"pattern": "c"}], "minLength": 4},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    "float64": {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    "JSON": {
        "anyOf": [
            *({"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}),
            {"type": "array", "items": {"$ref": "#"}},
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"$ref": "#"}},
        ]
    },
    "record of emails": {
        "type": "object",
        "propertyNames": {"type": "string", "format": "email", "pattern": ZOD_PATTERNS["email"]},
        "additionalProperties": {"type": "string"},
    },
    "record of UUIDs": {
        "type": "object",
        "propertyNames": {"type": "string", "format": "uuid", "pattern": ZOD_PATTERNS["uuid"]},
        "additionalProperties": {"type": "string"},
    },
    "record of numbers": {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": r"^-?\d+(?:\.\d+)?$"},
        "additionalProperties": {},
    },
    "loose record": {"type": "object", "patternProperties": {"^a+$": {"type": "number"}}},
    "exclusive objects": {
        "oneOf": [
            {
                "type": "object",
                "properties": {name: {"type": "string"}},
                "required": [name],
                "additionalProperties": False,
            }
            for name in ("a", "b")
        ]
    },
    "optional tuple": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "number"}],
        "items": False,
        "minItems": 1,
        "maxItems": 2,
    },
    "literals": {"enum": [1, "b", True, None]},
    "file": {"type": "string", "format": "binary", "contentEncoding": "binary", "contentMediaType": "image/png"},
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
    "formats of types": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "format": "int64", "readOnly": True},
            "price": {"type": "number", "format": "double", "exclusiveMinimum": 0, "multipleOf": 0.01},
            "password": {"type": "string", "format": "password", "writeOnly": True, "minLength": 6},
            "picture": {"type": "string", "format": "byte"},
            "ssn": {"type": "string", "pattern": r"^\d{3}-\d{2}-\d{4}$"},
        },
        "xml": {"name": "item"},
        "externalDocs": {"url": "https://example.com"},
        "example": {"id": 1},
    },
    "dictionary": {
        "type": "object",
        "properties": {"default": {"type": "string"}},
        "required": ["default"],
        "additionalProperties": {"$ref": "#/$defs/Message"},
        "$defs": {
            "Message": {
                "type": "object",
                "properties": {"code": {"type": "integer"}, "text": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
            }
        },
    },
    "any of pets": {
        "anyOf": [{"$ref": "#/$defs/PetByAge"}, {"$ref": "#/$defs/PetByType"}],
        "$defs": {
            "PetByAge": {
                "type": "object",
                "properties": {"age": {"type": "integer"}, "nickname": {"type": "string"}},
                "required": ["age"],
            },
            "PetByType": {
                "type": "object",
                "properties": {"pet_type": {"enum": ["Cat", "Dog"]}, "hunts": {"type": "boolean"}},
                "required": ["pet_type"],
            },
        },
    },
    "one of pets without a discriminator": {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "$defs": {
            "Dog": {
                "type": "object",
                "properties": {"bark": {"type": "boolean"}, "breed": {"enum": ["Dingo", "Husky"]}},
            },
            "Cat": {"type": "object", "properties": {"hunts": {"type": "boolean"}, "age": {"type": "integer"}}},
        },
    },
    "not an integer": {"type": "object", "properties": {"pet_type": {"not": {"type": "integer"}}}},
    "one of formats": {"type": "string", "oneOf": [{"format": "ipv4"}, {"format": "ipv6"}, {"format": "hostname"}]},
    "names with a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": ["class"]}},
        "patternProperties": {"^S_": {"type": "string"}, "^I_": {"type": "integer"}},
    },
    "domain": {"type": "string", "pattern": r"^(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*$"},
    "not a pattern": {"type": "string", "not": {"pattern": "^(?:admin|root)"}, "maxLength": 20},
    "at least one": {
        "allOf": [{"$ref": "#/$defs/base"}],
        "minProperties": 1,
        "$defs": {"base": {"type": "object", "properties": {"name": {"type": "string"}, "tag": {"type": "string"}}}},
    },
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
