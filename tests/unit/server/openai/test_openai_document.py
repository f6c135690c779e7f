"""Answers and stream events against OpenAI's OpenAPI document: names, types, and fields that are absent rather than
null."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire.engine.config.engine_config import EngineConfig
from tests.fakes.api_server import Server, run_server
from tests.unit.server.openai.test_chat import CALL, F, says, talking  # noqa: F401

SCHEMAS = json.loads((Path(__file__).parents[3] / "fakes" / "openai_schemas.json").read_text())
EVENTS = {
    "response.created": "ResponseCreatedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.failed": "ResponseFailedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
}
ONE: Any = {"type": "function", "name": "f", "parameters": F["function"]["parameters"]}
TOOLS: dict[str, list[Any]] = {"chat/completions": [F], "responses": [ONE]}


@pytest.fixture
async def server(talking: EngineConfig) -> AsyncIterator[Server]:  # noqa: F811
    async with run_server(talking) as running:
        yield running


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMAS["$defs"]})


def check(name: str, value: Any) -> None:
    error = jsonschema.exceptions.best_match(validator(name).iter_errors(value))
    assert error is None, f"{name}: {error.json_path}: {error.message}"


async def whole(server: Server, route: str, name: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await server.http.post(f"/v1/{route}", json=body)
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    check(name, found)
    return found


async def events(server: Server, route: str, **body: Any) -> list[dict[str, Any]]:
    response = await server.http.post(f"/v1/{route}", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_null_where_the_document_has_none_is_found() -> None:
    """The facts and the check, which otherwise could pass anything."""
    with pytest.raises(AssertionError, match="system_fingerprint"):
        check("CreateCompletionResponse", {"id": "", "object": "text_completion", "created": 1, "model": "",
                                           "choices": [], "system_fingerprint": None})  # fmt: skip
    with pytest.raises(AssertionError, match="'param' is a required"):
        check("ErrorResponse", {"error": {"type": "", "message": "", "code": None}})


USAGE: Any = {"stream_options": {"include_usage": True}}
CHATS: list[dict[str, Any]] = [
    {"messages": says("hello world"), "n": 2},
    {"messages": says("hi"), "logprobs": True, "top_logprobs": 2, "max_tokens": 3},
    {"messages": says(f"<think>hm</think>So: {CALL}"), "tools": TOOLS["chat/completions"]},
    {"messages": says("hi"), "return_token_ids": True, "service_tier": "auto", "metadata": {"a": "b"}, "user": "u"},
]


@pytest.mark.parametrize("body", CHATS)
async def test_chat(server: Server, body: dict[str, Any]) -> None:
    found = await whole(server, "chat/completions", "CreateChatCompletionResponse", **body)
    assert {"prompt_logprobs", "prompt_token_ids"} <= found.keys()  # vLLM's, null unless requested
    assert all("token_ids" in choice and "reasoning" in choice["message"] for choice in found["choices"])
    for chunk in await events(server, "chat/completions", **body, **USAGE):
        check("CreateChatCompletionStreamResponse", chunk)


async def test_completions(server: Server) -> None:
    bodies: list[Any] = [{"prompt": ["a", "b"], "n": 2}, {"prompt": "hello", "logprobs": 2}]
    for body in [*bodies, {"prompt": "a", "echo": True}]:
        found = await whole(server, "completions", "CreateCompletionResponse", **body)
        names = {"prompt_logprobs", "prompt_token_ids", "token_ids"}
        assert all(names <= choice.keys() for choice in found["choices"])
        *chunks, last = await events(server, "completions", **body, **USAGE)
        for chunk in chunks:
            for choice in chunk["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"  # OpenAI's chunks have null, too
            check("CreateCompletionResponse", chunk)
            assert "usage" not in chunk
        check("CreateCompletionResponse", last)
        assert last["usage"]


RESPONSES: list[dict[str, Any]] = [
    {"input": "hello world"},
    {"input": "hello world", "top_logprobs": 2},
    {"input": "hello world", "max_output_tokens": 2, "user": "u", "metadata": {"a": "b"}, "temperature": 0.5},
    {"input": f"<think>hm</think>So: {CALL}", "tools": TOOLS["responses"], "tool_choice": "auto"},
    {"input": "hi", "text": {"format": {"type": "json_object"}, "verbosity": "low"}, "instructions": "be kind",
     "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "auto", "service_tier": "auto",
     "max_tool_calls": 2, "prompt_cache_key": "k", "safety_identifier": "s", "store": False},
    {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "ask"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
     ], "tools": [*TOOLS["responses"], {"type": "web_search"}]},
    {"input": "x", "tools": TOOLS["responses"], "tool_choice": {"type": "function", "name": "f"}},
]  # fmt: skip


@pytest.mark.parametrize("body", RESPONSES)
async def test_responses(server: Server, body: dict[str, Any]) -> None:
    found = await whole(server, "responses", "Response", **body)
    if body.get("store") is not False:
        check("Response", (await server.http.get(f"/v1/responses/{found['id']}")).json())
    for event in await events(server, "responses", **body):
        check(EVENTS[event["type"]], event)


async def test_a_failed_response(server: Server) -> None:
    kinds = []
    for event in await events(server, "responses", input="x<fail>"):
        check(EVENTS[event["type"]], event)
        kinds.append(event["type"])
    assert kinds[-1] == "response.failed"


async def test_models_and_errors(server: Server) -> None:
    listed = (await server.http.get("/v1/models")).json()
    check("ListModelsResponse", listed)
    assert [(model["id"], model["root"], model["parent"]) for model in listed["data"]] == [
        ("echo", "echo", None),
        ("alias", "echo", None),
    ]
    check("Model", (await server.http.get("/v1/models/echo")).json())
    for route in ("chat/completions", "completions", "responses", "embeddings"):
        await whole(server, route, "ErrorResponse", 400, no_such_field=1)
        given = {"messages": says("x")} if "chat" in route else {"input": "x", "prompt": "x"}
        await whole(server, route, "ErrorResponse", 404, model="gpt-9", **given)
