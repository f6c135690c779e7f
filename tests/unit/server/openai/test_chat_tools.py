"""Custom tools in chat, with a model that repeats messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.chat.chat_completion_message_custom_tool_call import ChatCompletionMessageCustomToolCall

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.large_bodies import LARGE_BODY
from quire.server.openai.chat import ChatRequest
from tests.fakes import fake_core
from tests.fakes.api_server import Server, run_server
from tests.unit.server.openai.test_chat import F, says, talking  # noqa: F401

TEXT = 'a "b"\n\\ é 😀'
GRAMMAR = {"syntax": "lark", "definition": 'start: "a" LF "b"\n%import common.LF'}
REGEX = {"syntax": "regex", "definition": "[a-c]+|x"}


def custom(name: str, grammar: Any = None, **fields: Any) -> Any:
    fields |= {} if grammar is None else {"format": {"type": "grammar", "grammar": grammar}}
    return {"type": "custom", "custom": {"name": name, **fields}}


def written(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
async def server(talking: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:  # noqa: F811
    monkeypatch.setattr(fake_core, "MAX_MODEL_LEN", 1024)
    async with run_server(replace(talking, model=replace(talking.model, max_model_len=1024))) as running:
        yield running


@pytest.mark.parametrize("is_large", [False, True])
async def test_openais_client_reads_calls_and_sends_them_back(server: Server, is_large: bool) -> None:
    filler = {"metadata": {"x": " " * LARGE_BODY * is_large}}
    tools: Any = [custom("patch", description="Patch."), F]
    said: Any = says(f"{written('patch', input=TEXT)}{written('f', a=1)}")
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        whole = await create(model="echo", messages=said, tools=tools, extra_body=filler)
        assert whole.choices[0].finish_reason == "tool_calls"
        message = whole.choices[0].message
        assert message.tool_calls is not None
        call, other = message.tool_calls
        assert isinstance(call, ChatCompletionMessageCustomToolCall)
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", TEXT)
        assert other.type == "function"
        deltas: list[Any] = []
        async for chunk in await create(model="echo", messages=said, tools=tools, stream=True, extra_body=filler):
            deltas += [each.to_dict() for each in chunk.choices[0].delta.tool_calls or ()]
        first, *pieces = [each for each in deltas if each["index"] == 0]
        second, *_ = [each for each in deltas if each["index"] == 1]
        assert (first.pop("id")[:5], first.pop("index")) == ("call_", 0)
        assert first == {"type": "custom", "custom": {"name": "patch", "input": ""}}
        assert all(each.keys() == {"index", "custom"} and each["custom"]["input"] for each in pieces)
        assert "".join(each["custom"]["input"] for each in pieces) == TEXT
        assert (second["type"], second["function"]["name"]) == ("function", "f")
        again: Any = [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
        answer = await create(model="echo", messages=again, tools=tools)
    assert answer.choices[0].message.content == f"{ ({'input': TEXT}) }done"


def test_choices() -> None:
    tools = [F, custom("patch"), custom("sql", REGEX), {"type": "web_search"}]
    patch, f = custom("patch"), {"type": "function", "function": {"name": "f"}}

    def allowed(*chosen: Any) -> Any:
        return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [*chosen]}}

    for choice, names in (
        ("required", ["f", "patch", "sql"]),
        (patch, ["patch"]),
        (f, ["f"]),
        (allowed(patch, f), ["patch", "f"]),
    ):
        use = ChatRequest(messages=says("x"), tools=tools, tool_choice=choice).chat_input().tool_use
        assert use is not None
        assert (use.required, [tool.name for tool in use.tools]) == (True, names)
    for choice in (custom("f"), {"type": "function", "function": {"name": "patch"}}, allowed(custom("other"))):
        with pytest.raises(InvalidParameter, match="which is not one of the tools"):
            ChatRequest(messages=says("x"), tools=tools, tool_choice=choice).chat_input()
    for choice in ({"type": "custom"}, {"type": "custom", "name": "patch"}, allowed({"type": "custom"})):
        with pytest.raises(InvalidParameter, match=r'\{"type": "custom", "custom": '):
            ChatRequest(messages=says("x"), tools=tools, tool_choice=choice).chat_input()


@pytest.mark.parametrize(("grammar", "expected"), [(GRAMMAR, "%lark"), (REGEX, "^(?:[a-c]+|x)$")])
async def test_formats_are_enforced(
    server: Server, monkeypatch: pytest.MonkeyPatch, grammar: dict[str, str], expected: str
) -> None:
    sent: Any = []
    submit = server.frontend.client._send
    monkeypatch.setattr(server.frontend.client, "_send", lambda *args: sent.append(args[0]) or submit(*args))
    body = {"messages": says(written("patch", input="a\nb")), "tools": [custom("patch", grammar)]}
    response = await server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    outputs = sent[0].params.structured_outputs
    assert outputs is not None
    assert expected in outputs.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [custom("f", {**REGEX, "definition": r"(a)\1"})]}, "tools[0].custom.format.grammar.definition"),
        ({"tools": [custom("f", {"syntax": "lark"})]}, "tools[0].custom.format.grammar.definition"),
        ({"tools": [custom("f", {"syntax": "yacc", "definition": ""})]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [custom("f", format={"type": "grammar"})]}, "tools[0].custom.format.grammar"),
        ({"tools": [custom("f", format={"type": "text", "grammar": REGEX})]}, "tools[0].custom.format.grammar"),
        ({"tools": [custom("a b")]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [F, custom("f")]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]},
         "messages[0].tool_calls[0].custom"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    request = ChatRequest(**{"messages": says("x"), **fields})
    with pytest.raises(InvalidParameter) as caught:
        request.check_fields() or request.chat_input()
    assert caught.value.param == param
