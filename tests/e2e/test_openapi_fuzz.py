"""Requests that the OpenAPI document allows, and others, get an answer in time, and no 5xx."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from quire.server.app import create_app
from quire.server.http.state import AppState
from quire.server.serving.frontend import Frontend
from tests.e2e.serving import Server, serve

EXAMPLES = 100
SECONDS = 20
"""No part of an answer may take longer, on a busy machine."""

Document = dict[str, Any]
DOCUMENT: Document = create_app(AppState(cast(Frontend, None), ("",))).openapi()
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


def tame() -> Document:
    """Known fields, few optional ones, and small values: many such requests get past all checks."""
    document = copy.deepcopy(DOCUMENT)
    shapes = document["components"]["schemas"]
    for shape in shapes.values():
        _tame(shape)
        if shape.get("type") == "object":
            shape |= {"additionalProperties": False, "maxProperties": len(shape.get("required", ())) + 3}
    for methods in document["paths"].values():
        for operation in methods.values():  # no choice of a replica that does not exist
            operation["parameters"] = [each for each in operation.get("parameters", ()) if each["in"] != "header"]
    message = shapes["ChatMessage"]
    message["required"].append("content")
    message["properties"] |= {"content": {"type": "string"}, "role": {"enum": ["system", "user", "assistant"]}}
    inputs, content = shapes["EmbeddingRequest"], shapes["ContentInput"]
    inputs["required"] = ["input"]
    del inputs["properties"]["messages"]
    content |= {"properties": {"text": content["properties"]["text"]}, "required": ["text"]}
    return document


def _tame(schema: Any) -> None:
    for each in schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ():
        _tame(each)
    match schema:
        case {"anyOf": [*options]}:
            schema["anyOf"] = [option for option in options if option != {"type": "null"}]
        case {"type": "integer" | "number"}:
            schema.pop("exclusiveMaximum", None)
            schema |= {"minimum": max(-1, schema.get("minimum", -1)), "maximum": 6}
        case {"type": "array"}:
            schema |= {"minItems": 1, "maxItems": 3}
        case {"type": "string"}:
            schema |= {"minLength": 1, "maxLength": schema.get("maxLength", 40)}


def whole(value: Any) -> Any:
    """1 instead of 1.0, which JSON schema takes for an integer and we refuse."""
    match value:
        case dict():
            return {key: whole(each) for key, each in value.items()}
        case list():
            return [whole(each) for each in value]
        case float() if value.is_integer():
            return int(value)
    return value


KINDS: dict[str, tuple[Callable[[], Document], GenerationMode]] = {
    "tame": (tame, GenerationMode.POSITIVE),
    "allowed": (lambda: DOCUMENT, GenerationMode.POSITIVE),
    "not allowed": (lambda: DOCUMENT, GenerationMode.NEGATIVE),
}
EMBEDDINGS = "POST /v1/embeddings"
POOLING = (EMBEDDINGS, *(f"POST /{route}" for route in ("pooling", "score", "rerank", "v2/rerank")))
"""Routes for a model that embeds."""
TAMED = ("POST /v1/chat/completions", "POST /v1/completions", EMBEDDINGS)
"""Routes whose document is precise enough for generated requests to get past all checks."""
CASES = [
    (operation, kind)
    for operation, says in OPERATIONS.items()
    for kind in KINDS
    if kind == "allowed" or (kind == "not allowed" and "requestBody" in says) or operation in TAMED
]


def send(operation: str, kind: str, url: str) -> Counter[int]:
    """Send examples of an operation; returns the number of answers by status."""
    make, mode = KINDS[kind]
    method, path = operation.split()
    wanted = schemathesis.openapi.from_dict(make())[path][method]
    seen: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(wanted.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case[Any]) -> None:
        if kind == "tame":
            case.body = whole(case.body)
        response = case.call(base_url=url, timeout=SECONDS)
        assert response.status_code < 500, f"{response.status_code} {response.text}\n{case.as_curl_command()}"
        if response.status_code >= 400 and case.method == "POST":
            assert response.json()["error"]["message"], case.as_curl_command()
        seen[response.status_code] += 1

    check()
    return seen


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--max-model-len", "256", "--trust-request-chat-template") as server:
        yield server


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[Server]:
    with serve("--max-model-len", "256", "--runner", "pooling") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "kind"), CASES)
def test_no_request_breaks_the_server(request: pytest.FixtureRequest, operation: str, kind: str) -> None:
    server: Server = request.getfixturevalue("embedding_server" if operation in POOLING else "server")
    seen = send(operation, kind, server.url)
    print(seen)
    assert kind != "tame" or seen[200] >= EXAMPLES / 4, "too few requests get past the checks"
    assert httpx.get(f"{server.url}/health").status_code == 200
