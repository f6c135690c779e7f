"""The tools and items of the Responses API that clients such as Codex use, with a model that repeats messages."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.large_bodies import LARGE_BODY
from quire.server.openai import responses_input
from quire.server.openai.responses_input import listed, referred_id, shortened, shortenings
from quire.server.openai.responses_request import ResponsesRequest
from quire.server.text.inputs import ChatInput
from tests.fakes import fake_core
from tests.fakes.api_server import Server, run_server
from tests.unit.server.openai.test_chat import CITY, talking  # noqa: F401
from tests.unit.server.openai.test_completions import refused
from tests.unit.server.openai.test_responses import events_of, like, telling  # noqa: F401

WEATHER: Any = {
    "type": "namespace",
    "name": "mcp__weather",
    "description": "Weather.",
    "tools": [{"type": "function", "name": "get", "description": "Get it.", "parameters": CITY, "strict": False}],
}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Patch."}
GRAMMAR: Any = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" LF "b"\n%import common.LF'}
REGEX: Any = {"type": "grammar", "syntax": "regex", "definition": "[a-c]+|x"}
SEARCH: Any = {"type": "tool_search", "execution": "client"}
SHELLS: Any = [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}, SEARCH]


@pytest.fixture
async def server(talking: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:  # noqa: F811
    monkeypatch.setattr(fake_core, "MAX_MODEL_LEN", 1024)
    async with run_server(replace(talking, model=replace(talking.model, max_model_len=1024))) as running:
        yield running


def written(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def items(server: Server, said: str, **fields: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """The output of a whole response, and the events of the same response in a stream."""
    body = {"input": said, **fields}
    whole = await server.http.post("/v1/responses", json=body)
    assert whole.status_code == 200, whole.text
    streamed = await server.http.post("/v1/responses", json={**body, "stream": True})
    events = events_of(streamed.text)
    assert like(events[-1]["response"]) == like(whole.json())
    return Response.model_validate(whole.json()).output, events


def named(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == f"response.{kind}"]


def functions(*tools: Any, said: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    """The functions that tools become."""
    return [tool["function"] for tool in ResponsesRequest(input=said, tools=[*tools], **fields).read().chat.tools]


async def test_calls_come_back_with_their_namespace(server: Server) -> None:
    (call,), events = await items(server, written("mcp__weather__get", a=1), tools=[WEATHER])
    assert (call.type, call.namespace, call.name) == ("function_call", "mcp__weather", "get")
    assert json.loads(call.arguments) == {"a": 1}
    (done,) = named(events, "function_call_arguments.done")
    assert (done["name"], done["item_id"][:3]) == ("get", "fc_")


async def test_custom_tools_have_text(server: Server) -> None:
    text = 'a "b"\n\\ é 😀'
    (call,), events = await items(server, written("apply_patch", input=text), tools=[PATCH])
    assert (call.type, call.name, call.input, call.namespace) == ("custom_tool_call", "apply_patch", text, None)
    assert call.id is not None
    assert call.id.startswith("ctc_")
    deltas = named(events, "custom_tool_call_input.delta")
    assert len(deltas) > 1
    assert "".join(delta["delta"] for delta in deltas) == text
    (done,) = named(events, "custom_tool_call_input.done")
    (added,) = named(events, "output_item.added")
    assert (done["input"], added["item"]["input"]) == (text, "")
    assert not named(events, "function_call_arguments.delta")


@pytest.mark.parametrize(
    ("name", "arguments", "fields"),
    [
        ("local_shell", {"command": ["ls"], "timeout_ms": 5}, {"action": ["ls"]}),
        ("shell", {"commands": ["ls", "pwd"]}, {"action": ["ls", "pwd"]}),
        ("apply_patch", {"type": "create_file", "path": "a", "diff": "+b"}, {"operation": "a"}),
        ("tool_search", {"query": "x"}, {"arguments": {"query": "x"}}),
    ],
)
async def test_tools_that_clients_run(
    server: Server, name: str, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    (call,), events = await items(server, written(name, **arguments), tools=SHELLS, tool_choice="required")
    assert (call.type, call.status) == (f"{name}_call", "completed")
    match call.type:
        case "local_shell_call":
            assert (call.action.command, call.action.timeout_ms, call.action.env) == (["ls"], 5, {})
        case "shell_call":
            assert call.action.commands == ["ls", "pwd"]
        case "apply_patch_call":
            assert (call.operation.type, call.operation.path, call.operation.diff) == ("create_file", "a", "+b")
        case "tool_search_call":
            assert (call.execution, call.arguments) == ("client", {"query": "x"})
    assert len(events) == 5  # created, in progress, added, done, completed


async def test_a_call_that_is_cut_off_is_incomplete(server: Server) -> None:
    said = written("local_shell", command=["ls", "-l"])
    length = len(server.tokenizer.encode(said[: said.index('-l"]')], add_special_tokens=False))
    (call,), _ = await items(server, said, tools=SHELLS, max_output_tokens=length)
    assert (call.status, call.action.command) == ("incomplete", ["ls", ""])


def test_names_of_functions() -> None:
    long = {**WEATHER, "name": "n" * 60}
    one, other = (
        functions({**long, "tools": [{"type": "function", "name": name}]})[0]["name"] for name in ("aaaa", "b")
    )
    assert one != other
    assert (len(one), len(other)) == (64, 63)
    assert one == functions({**long, "tools": [{"type": "function", "name": "aaaa"}]})[0]["name"]
    own = {"type": "function", "name": "mcp__weather__get"}
    first, second = functions(WEATHER, own)
    assert (first["name"][:18], second["name"]) == ("mcp__weather__get_", "mcp__weather__get")
    assert first["description"] == "Weather.\nGet it."
    strange = {**WEATHER, "name": "a b__", "tools": [PATCH, {**PATCH, "name": "x/y"}]}
    assert [each["name"] for each in functions(strange)] == ["a_b__apply_patch", "a_b__x_y"]
    assert functions({**SEARCH, "parameters": CITY}) == [
        {"name": "tool_search", "description": functions(SEARCH)[0]["description"], "parameters": CITY}
    ]


def test_grammars_are_enforced_and_shown() -> None:
    (lark,) = functions({**PATCH, "format": GRAMMAR})
    assert GRAMMAR["definition"] in lark["parameters"]["properties"]["input"]["description"]
    (regex,) = functions({**PATCH, "format": REGEX})
    assert regex["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-c]+|x)$"
    for definition, pattern in (("(?i)yes", "(?i)^(?:yes)$"), ("(?s)(?i:a).", "(?s)^(?:(?i:a).)$")):
        (flagged,) = functions({**PATCH, "format": {**REGEX, "definition": definition}})
        assert flagged["parameters"]["properties"]["input"]["pattern"] == pattern
    assert (lark["strict"], regex["strict"], "strict" in functions(PATCH)[0]) == (True, True, False)
    use = ResponsesRequest(input="", tools=[{**PATCH, "format": GRAMMAR}]).read().chat.tool_use
    assert use is not None
    assert use.needs_grammar
    assert use.tools[0].grammar is not None
    assert use.tools[0].grammar.definition == GRAMMAR["definition"]


async def test_the_format_of_a_custom_tool_has_no_fallback(
    talking: EngineConfig,  # noqa: F811
) -> None:
    async with run_server(talking, structured_outputs_fallback="warn") as lenient:
        tools = [{**PATCH, "format": {**REGEX, "definition": r"(a)\1"}}]
        error = await refused(lenient, "responses", {"input": "hi", "tools": tools})
        assert error["param"] == "tools[0].format.definition"


@pytest.mark.parametrize("is_large", [False, True])
async def test_a_grammar_reaches_the_engine(server: Server, monkeypatch: pytest.MonkeyPatch, is_large: bool) -> None:
    sent: Any = []
    submit = server.frontend.client._send
    monkeypatch.setattr(server.frontend.client, "_send", lambda *args: sent.append(args[0]) or submit(*args))
    filler = {"x": " " * LARGE_BODY * is_large}
    tools = [{**PATCH, "format": GRAMMAR}]
    (call,), _ = await items(server, written("apply_patch", input="a\nb"), tools=tools, client_metadata=filler)
    assert call.input == "a\nb"
    outputs = sent[0].params.structured_outputs
    assert outputs is not None
    assert "%lark" in outputs.grammar


def test_choices() -> None:
    tools = [WEATHER, PATCH, *SHELLS[:1]]
    for choice, name, is_required in (
        ({"type": "function", "name": "get", "namespace": "mcp__weather"}, "mcp__weather__get", True),
        ({"type": "function", "name": "get"}, "mcp__weather__get", True),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch", True),
        ({"type": "local_shell"}, "local_shell", True),
        (_allowed({"type": "namespace", "name": "mcp__weather"}, {"type": "web_search"}), "mcp__weather__get", False),
    ):
        use = ResponsesRequest(input="", tools=tools, tool_choice=choice).read().chat.tool_use
        assert use is not None
        assert ([tool.name for tool in use.tools], use.required) == ([name], is_required)
    for wrong in (
        {"type": "function", "name": "apply_patch"},
        {"type": "function", "name": "get", "namespace": "x"},
        {"type": "shell"},
        {"type": "web_search"},
        _allowed({"type": "web_search"}),
        _allowed(5),
    ):
        with pytest.raises(InvalidParameter) as error:
            ResponsesRequest(input="", tools=tools, tool_choice=wrong).read()
        assert error.value.param == "tool_choice"


def _allowed(*tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "auto", "tools": [*tools]}


def test_what_another_server_would_do_is_ignored() -> None:
    hosted: list[Any] = [
        {"type": kind} for kind in ("web_search_2025_08_26", "code_interpreter", "mcp", "tool_search", "new_one")
    ]
    hosted.append({"type": "shell", "environment": {"type": "container_auto"}})
    history: list[Any] = [{"type": kind, "id": "x"} for kind in ("web_search_call", "compaction", "mcp_list_tools")]
    history.append({"type": "tool_search_call", "execution": "server", "arguments": {}})
    read = ResponsesRequest(input=[*history, {"role": "user", "content": "a"}], tools=hosted).read()
    assert (read.chat.tools, read.chat.messages) == ([], [{"role": "user", "content": "a"}])
    assert {"tools[4].type=new_one", "tools[5].type=shell", "input[0].type=web_search_call"} < read.ignored
    assert "input[3].type=tool_search_call" in read.ignored


def test_items_of_tools_become_messages() -> None:
    def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "function",
            "id": "c",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }

    item: dict[str, Any]
    for item, name, arguments in (
        (
            {"type": "function_call", "namespace": "mcp__weather", "name": "get", "arguments": "{}"},
            "mcp__weather__get",
            {},
        ),
        ({"type": "custom_tool_call", "name": "apply_patch", "input": "é"}, "apply_patch", {"input": "é"}),
        (
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["a"], "env": {}, "timeout_ms": 5}},
            "local_shell",
            {"command": ["a"], "timeout_ms": 5},
        ),
        ({"type": "shell_call", "action": {"commands": ["a"], "timeout_ms": None}}, "shell", {"commands": ["a"]}),
        ({"type": "tool_search_call", "arguments": {"query": "a"}}, "tool_search", {"query": "a"}),
    ):
        (message,) = ResponsesRequest(input=[{**item, "call_id": "c"}], tools=[WEATHER]).read().chat.messages
        assert message == {"role": "assistant", "tool_calls": [call(name, arguments)]}
    for item, text in (
        ({"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "ok"}]}, "ok"),
        ({"type": "local_shell_call_output", "output": "{}"}, "{}"),
        ({"type": "shell_call_output", "output": [{"stdout": "é"}]}, '[{"stdout": "é"}]'),
        ({"type": "apply_patch_call_output", "status": "completed"}, "completed"),
    ):
        (message,) = ResponsesRequest(input=[{**item, "call_id": "c"}]).read().chat.messages
        assert message == {"role": "tool", "tool_call_id": "c", "content": text}
    (message,) = (
        ResponsesRequest(input=[{"type": "local_shell_call_output", "id": "c", "output": ""}]).read().chat.messages
    )
    assert message["tool_call_id"] == "c"
    mcp = {"type": "mcp_call", "id": "c", "server_label": "w", "name": "f", "arguments": "{}", "output": "5"}
    said, answer = ResponsesRequest(input=[mcp]).read().chat.messages
    assert (said["tool_calls"], answer["content"]) == ([call("w__f", {})], "5")


def test_tools_that_the_input_loads() -> None:
    found = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [WEATHER]}
    more = {"type": "additional_tools", "role": "developer", "tools": [WEATHER, PATCH]}
    names = [each["name"] for each in functions(SEARCH, said=[found, more])]
    assert names == ["tool_search", "mcp__weather__get", "apply_patch"]


def test_loaded_tools_outlive_a_turn() -> None:
    found = {"type": "tool_search_output", "call_id": "c", "tools": [WEATHER]}
    call: dict[str, Any] = {
        "type": "function_call",
        "call_id": "d",
        "namespace": "mcp__weather",
        "name": "get",
        "arguments": "{}",
    }
    request = ResponsesRequest(input="a", previous_response_id="resp_x", tools=[SEARCH])
    request._stored = {"resp_x": [found, call]}
    chat = request.read().chat
    assert [tool["function"]["name"] for tool in chat.tools] == ["tool_search", "mcp__weather__get"]
    assert chat.messages[1]["tool_calls"][0]["function"]["name"] == "mcp__weather__get"
    assert chat.messages[2] == {"role": "user", "content": "a"}


async def test_input_items(server: Server) -> None:
    client = server.openai
    first = await client.responses.create(model="echo", input="one", instructions="be")
    said: Any = [{"role": "user", "content": f"say {at}"} for at in range(3)]
    second = await client.responses.create(model="echo", input=said, previous_response_id=first.id)
    found = [item async for item in client.responses.input_items.list(second.id, limit=2)]
    texts = [item.to_dict()["content"][0]["text"] for item in found]  # type: ignore[index]
    assert texts == ["say 2", "say 1", "say 0", "one", "one"]
    assert [item.role for item in found if item.type == "message"] == ["user", "user", "user", "assistant", "user"]
    assert len({item.id for item in found}) == 5
    page = (await server.http.get(f"/v1/responses/{second.id}/input_items", params={"order": "asc", "limit": 1})).json()
    ResponseItemList.model_validate(page)
    assert (page["first_id"], page["has_more"], page["data"][0]["content"][0]["text"]) == (found[-1].id, True, "one")
    with pytest.raises(openai.BadRequestError, match="no input item x"):
        await client.responses.input_items.list(second.id, after="x")
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list("resp_x")
    assert (await server.http.get(f"/v1/responses/{second.id}/input_items", params={"limit": 0})).status_code == 400


async def test_large_input_items_are_listed_elsewhere(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    said: Any = [{"role": "user", "content": f"{at}" + "x" * LARGE_BODY * (at == 0)} for at in range(3)]
    made = await server.openai.responses.create(model="echo", input=said)
    may_list, is_listing, list_item = threading.Event(), asyncio.Event(), responses_input.listed
    loop = asyncio.get_running_loop()

    def wait(item: dict[str, Any]) -> dict[str, Any]:
        loop.call_soon_threadsafe(is_listing.set)
        assert may_list.wait(timeout=10)
        return list_item(item)

    monkeypatch.setattr(responses_input, "listed", wait)
    path = f"/v1/responses/{made.id}/input_items"
    listing = asyncio.create_task(server.http.get(path, params={"limit": 2}))
    await is_listing.wait()
    assert (await server.http.get("/v1/models")).status_code == 200
    assert not listing.done()
    assert server.state.bodies.num_bytes > LARGE_BODY
    may_list.set()
    page = (await listing).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["2", "1"]
    assert page["has_more"]
    last = (await server.http.get(path, params={"after": page["last_id"]})).json()
    assert ([item["id"] for item in last["data"]], last["has_more"]) == ([last["first_id"]], False)
    error = (await server.http.get(path, params={"after": "x"})).json()["error"]
    assert (error["param"], "no input item x" in error["message"]) == ("after", True)
    assert server.state.bodies.num_bytes == 0


@pytest.mark.parametrize("is_large", [False, True])
async def test_references_to_items(telling: Server, is_large: bool) -> None:  # noqa: F811
    client = telling.openai
    first = await client.responses.create(model="echo", input="one")
    filler: Any = {"extra_body": {"client_metadata": {"x": " " * LARGE_BODY * is_large}}}
    listed = await client.responses.input_items.list(first.id)
    said: Any = [
        {"type": "item_reference", "id": listed.data[0].id},
        {"type": None, "id": first.output[0].id},
        {"type": None, "role": "user", "content": "b"},
    ]
    assert (await client.responses.create(model="echo", input=said, **filler)).output_text == "u:one;a:u:one;;u:b;"
    chained = await client.responses.create(model="echo", input="c", previous_response_id=first.id, **filler)
    assert chained.output_text == "u:one;a:u:one;;u:c;"
    for missing, param in (
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": "x", "previous_response_id": "resp_x"}, "previous_response_id"),
    ):
        error = await refused(telling, "responses", {**missing, **filler["extra_body"]}, 404)
        assert (error["code"], error["param"]) == ("response_not_found", param)


def test_null_is_no_field_of_an_item() -> None:
    part = {"type": "output_text", "text": "a"}
    given = {"type": None, "role": "assistant", "status": None, "id": "x", "content": [{**part, "annotations": None}]}
    assert listed(given) == {
        **given,
        "type": "message",
        "status": "completed",
        "content": [{**part, "annotations": []}],
    }
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert listed({**call, "status": None}) == {**call, "status": "completed"}
    assert referred_id({"type": None, "id": "x", "role": None}) == referred_id({"id": "x"}) == "x"
    assert referred_id(given) is None
    assert referred_id({**call, "id": "x"}) is None


async def test_large_stored_items_are_processed_as_large_bodies(
    telling: Server,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = {"type": "compaction", "id": "large", "encrypted_content": "x" * LARGE_BODY}
    user = {"role": "user", "content": "a"}
    first = (await telling.http.post("/v1/responses", json={"input": [user, large]})).json()["id"]
    listed = await telling.http.get(f"/v1/responses/{first}/input_items", params={"order": "asc"})
    reference = {"type": "item_reference", "id": listed.json()["data"][0]["id"]}
    sizes = []
    process = telling.state.bodies.process

    async def counting(process_large: Any, body: Any, stored: bytes | None = None) -> Any:
        sizes.append(0 if stored is None else len(stored))
        assert telling.state.bodies.num_bytes == sizes[-1]
        return await process(process_large, body, stored)

    monkeypatch.setattr(telling.state.bodies, "process", counting)
    for fields, text in (
        ({"input": [reference, {"role": "user", "content": "b"}]}, "u:a;u:b;"),
        ({"input": "c", "previous_response_id": first}, "u:a;a:u:a;;u:c;"),
    ):
        made = await telling.http.post("/v1/responses", json=fields)
        assert made.json()["output"][0]["content"][0]["text"] == text
        counted = (await telling.http.post("/v1/responses/input_tokens", json=fields)).json()["input_tokens"]
        assert counted == made.json()["usage"]["input_tokens"]
    error = await refused(telling, "responses", {"input": [reference, reference]})
    assert error["param"] == "input[1].id"
    assert len(sizes) == 5
    assert min(sizes) > LARGE_BODY
    assert telling.state.bodies.num_bytes == 0


def test_an_item_is_referred_to_once() -> None:
    request = ResponsesRequest(input=[{"type": "item_reference", "id": "msg_x"}] * 2)
    request._stored = {"resp_x": [{"role": "user", "content": "a", "id": "msg_x"}]}
    with pytest.raises(InvalidParameter, match="already part of the input") as error:
        request.read()
    assert error.value.param == "input[1].id"


async def test_several_requests_continue_one_response(telling: Server) -> None:  # noqa: F811
    client = telling.openai
    first = await client.responses.create(model="echo", input="a")

    async def go_on(number: int) -> Any:
        said: Any = {"model": "echo", "input": f"b{number}", "previous_response_id": first.id}
        if number % 2:
            return (await client.responses.create(**said)).output_text
        streamed = await telling.http.post("/v1/responses", json={**said, "stream": True})
        return Response.model_validate(events_of(streamed.text)[-1]["response"]).output_text

    assert await asyncio.gather(*map(go_on, range(8))) == [f"u:a;a:u:a;;u:b{n};" for n in range(8)]


async def test_input_tokens_are_counted(server: Server) -> None:
    client = server.openai
    said: Any = [{"role": "user", "content": "hello world"}]
    made = await client.responses.create(model="echo", input=said, instructions="be", tools=[WEATHER])
    assert made.usage is not None
    counted = await client.responses.input_tokens.count(model="echo", input=said, instructions="be", tools=[WEATHER])
    assert (counted.input_tokens, counted.object) == (made.usage.input_tokens, "response.input_tokens")
    longer = await client.responses.input_tokens.count(model="echo", input="hello " * 9999)
    assert longer.input_tokens > 9999
    again = await client.responses.input_tokens.count(model="echo", previous_response_id=made.id, input=said)
    followed = await client.responses.create(model="echo", input=said, previous_response_id=made.id)
    assert followed.usage is not None
    assert again.input_tokens == followed.usage.input_tokens
    assert (await refused(server, "responses/input_tokens", {"input": "a", "conversation": "x"}))[
        "param"
    ] == "conversation"


@pytest.mark.parametrize("is_large", [False, True])
async def test_the_oldest_turns_are_truncated(telling: Server, is_large: bool) -> None:  # noqa: F811
    client = telling.openai
    turns: Any = [{"role": "user", "content": f"{n:03} " + "hello world " * 4} for n in range(40)]
    filler: Any = {"extra_body": {"client_metadata": {"x": " " * LARGE_BODY * is_large}}}
    kept: Any = {"role": "developer", "content": "be"}
    with pytest.raises(openai.BadRequestError) as error:
        await client.responses.create(model="echo", input=[kept, *turns], **filler)
    assert error.value.code == "context_length_exceeded"
    request: Any = {"input": [kept, *turns], "truncation": "auto", "max_output_tokens": 50, **filler}
    made = await client.responses.create(model="echo", **request)
    assert made.truncation == "auto"
    assert made.usage is not None
    fewer = await client.responses.input_tokens.count(model="echo", input=[kept, *turns[-1:]])
    one = fewer.input_tokens - (await client.responses.input_tokens.count(model="echo", input=[kept])).input_tokens
    length = telling.frontend.config.model.max_model_len
    assert length - 50 - one < made.usage.input_tokens <= length - 50
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="echo", input="hello " * 999, truncation="auto")


def test_what_truncation_leaves() -> None:
    def ways(messages: list[dict[str, Any]]) -> list[Any]:
        return [shortened(ChatInput(messages=messages), way).messages for way in shortenings(messages)]

    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    call, result = {"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "t"}
    messages: list[dict[str, Any]] = [system, user, call, result, user, call, result, call, result, result]
    assert ways(messages) == [
        [system, user, call, result, call, result, result],
        [system, user, call, result, result],
    ]
    assert shortenings([system, user]) == []
    assert ways([call, result, call]) == [[call]]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [WEATHER, {**WEATHER, "tools": [PATCH, {"type": "shell"}]}]}, "tools[1].tools[1].type"),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    ({"tools": [PATCH, PATCH]}, "tools[1]"),
    ({"tools": [PATCH, {"type": "function", "name": PATCH["name"]}]}, "tools"),
    ({"tools": [{"type": "shell"}, {"type": "shell"}]}, "tools[1]"),
    ({"tools": [{**WEATHER, "tools": WEATHER["tools"] * 2}]}, "tools[0].tools[1]"),
    ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format.definition"),
    ({"tools": [{**PATCH, "format": {**GRAMMAR, "definition": "start: x"}}]}, "tools[0].format.definition"),
    ({"tools": [{**PATCH, "format": {**GRAMMAR, "definition": "start: /.*x/"}}]}, "tools[0].format.definition"),
    ({"tools": [{**PATCH, "format": {**GRAMMAR, "syntax": "gbnf"}}]}, "tools[0].format.syntax"),
    ({"tools": [{**PATCH, "format": {**REGEX, "definition": "("}}]}, "tools[0].format.definition"),
    ({"tools": [{**PATCH, "format": {**REGEX, "definition": "a)|(?:b"}}]}, "tools[0].format.definition"),
    ({"tools": [{**PATCH, "format": {**REGEX, "definition": "(" * 100 + ")" * 100}}]}, "tools[0].format.definition"),
    ({"tools": [{**PATCH, "format": {**REGEX, "type": "text"}}]}, "tools[0].format.syntax"),
    ({"tools": [{**PATCH, "format": {"type": "text", "definition": "a"}}]}, "tools[0].format.definition"),
    ({"tools": [{**PATCH, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x"}]}, "input[0].input"),
    ({"input": [{"type": "local_shell_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"truncation": "some"}, "truncation"),
]  # fmt: skip


async def test_what_is_wrong_is_named(server: Server) -> None:
    for fields, param in WRONG:
        assert (await refused(server, "responses", {"input": "hi", **fields}))["param"] == param, fields
