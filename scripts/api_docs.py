"""docs/reference/api.md from the application's OpenAPI document; `scripts/docs` writes it.

Remarks are the docstrings of routes, of the fields of request bodies, and of their classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from markdown_table import code, table
from starlette.routing import Route

from quire.server.app import create_app
from quire.server.http.state import ServedModel
from quire.server.serving.frontend import Frontend

INTRODUCTION = """# HTTP API

This page lists every route and every parameter. `scripts/docs` generates it from the code, and a test fails if it is
out of date.

A parameter without a remark has the same meaning as in the API that defines the route (OpenAI's, Anthropic's). A remark
says what Quire adds or does differently.

A parameter that would change the answer and is not supported is rejected with an error that names it, and so is an
unknown parameter. What cannot change the answer is accepted and ignored: hints such as `service_tier`, labels such as
`metadata`, and unknown fields inside messages, their parts and tools. The log names each ignored field once. With
`--strict-parameters` the server rejects hints and unknown fields in messages, too. A `null` is the same as leaving the
parameter out. Values of the wrong type are rejected: numbers are not converted to strings, nor strings to numbers.
16.0 is an integer.
"""
_LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "like {}",
}
_EXTRA_FIELDS = {
    "label": "Accepted, without effect on the answer",
    "hint": "Accepted and ignored",
    "rejected": "Not supported. Rejected by name, except with a value shown in parentheses, which has no effect",
}
"""The remark on fields that nothing reads, by their kind (`quire.server.http.request_model.ExtraField`)."""
_LIMITS_OF_64_BITS = (-(2**63), 2**63)
"""Omitted from remarks, because every integer has them."""

Schema = dict[str, Any]


def render() -> str:
    """The page as Markdown."""
    app = create_app(ServedModel(cast(Frontend, None), ("",)))  # no route is called
    document = app.openapi()
    schemas: dict[str, Schema] = document.get("components", {}).get("schemas", {})
    operations: list[tuple[str, Schema]] = [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    plain = [route.path for route in app.routes if isinstance(route, Route) and not route.include_in_schema]
    parts = [INTRODUCTION, "## Routes\n", table(("route", ""), [(_route(r, o), _text(o)) for r, o in operations])]
    parts.append(f"{', '.join(map(code, plain))}: the OpenAPI document and pages that show it.\n")
    shown: list[str] = []
    for route, operation in operations:
        parts += _operation(route, operation, schemas, shown)
    if shown:
        parts.append("## Objects\n")
    for name in shown:  # grows during iteration: objects may contain other objects
        parts += [f"### {name}\n", *_object(schemas[name], shown)]
    return "\n".join(parts)


def _operation(route: str, operation: Schema, schemas: dict[str, Schema], shown: list[str]) -> Iterator[str]:
    parameters = operation.get("parameters", [])
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if not parameters and body is None:
        return
    yield f"## {route}\n"
    if parameters:
        rows = (_row(p["name"], p["schema"] | p, p.get("required", False), shown, p["in"]) for p in parameters)
        yield table(("parameter", "type", "default", ""), rows)
    if body is None:
        return
    names = [option["$ref"].rpartition("/")[2] for option in body.get("anyOf", [body]) if "$ref" in option]
    for name in names:
        yield from _object(schemas[name], shown)
    if not names:
        yield f"The body: {_type(body, shown)}.\n"


def _object(schema: Schema, shown: list[str]) -> Iterator[str]:
    yield _text(schema) + "\n"
    required = schema.get("required", ())
    properties = sorted(schema.get("properties", {}).items(), key=lambda named: named[0] not in required)
    rows = (_row(name, field, name in required, shown) for name, field in properties)
    yield table(("parameter", "type", "default", ""), rows)
    for kind, remark in _EXTRA_FIELDS.items():
        if fields := schema.get(f"x-{kind}"):
            named = (
                code(name) + (f" ({' or '.join(code(json.dumps(value)) for value in values)})" if values else "")
                for name, values in fields.items()
            )
            yield f"{remark}: {', '.join(named)}.\n"
    if schema.get("x-ignores-unknown"):
        yield "Other fields are ignored, too.\n"


def _row(name: str, field: Schema, required: bool, shown: list[str], place: str = "body") -> tuple[str, ...]:
    default = "required" if required else ""
    if field.get("default") is not None:
        default = code(json.dumps(field["default"]))
    where = {"path": "In the path. ", "query": "In the query. ", "header": "A header. "}.get(place, "")
    return code(name), _type(field, shown), default, where + _text(field)


def _type(field: Schema, shown: list[str]) -> str:
    """The type of a field, without null. Appends objects that have fields of their own to `shown`."""
    match field:
        case {"$ref": str(reference)}:
            name = reference.rpartition("/")[2]
            if name not in shown:
                shown.append(name)
            return f"[{name}](#{name.lower()})"
        case {"anyOf": options} | {"oneOf": options}:
            return " or ".join(_type(option, shown) for option in options if option != {"type": "null"})
        case {"enum": values}:
            return " or ".join(code(json.dumps(value)) for value in values)
        case {"const": value}:
            return code(json.dumps(value))
        case {"type": "array", "items": items}:
            said = f"array of ({_type(items, shown)})" if "anyOf" in items else f"array of {_type(items, shown)}"
        case {"type": "object", "additionalProperties": dict(values)} if values:
            said = f"object of {_type(values, shown)}"
        case {"type": str(said)}:
            pass
        case _:
            return "anything"
    limits = [
        text.format(code(field[key]) if key == "pattern" else f"{field[key]:g}")
        for key, text in _LIMITS.items()
        if key in field and field[key] not in _LIMITS_OF_64_BITS
    ]
    return ", ".join([said, *limits])


def _route(route: str, operation: Schema) -> str:
    has_section = "parameters" in operation or "requestBody" in operation
    anchor = "".join(c for c in route.lower().replace(" ", "-") if c.isalnum() or c in "-_")
    return f"[{code(route)}](#{anchor})" if has_section else code(route)


def _text(schema: Schema) -> str:
    return " ".join(schema.get("description", "").split())
