"""Anthropic's Messages API, with a model that repeats the last message; read by the official client's types."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tokenizers import AddedToken, Tokenizer

from quire.engine.config.engine_config import EngineConfig
from quire.server.anthropic.messages import CountTokensRequest, MessagesRequest
from quire.server.text.inputs import ChatInput
from tests.fakes.api_server import TLS, Server, run_server
from tests.unit.server.openai.test_chat import CALL, CITY, TEMPLATE, says, talking  # noqa: F401

F = {"name": "f", "description": "does", "input_schema": CITY}
G = {"name": "g", "input_schema": {"type": "object"}}


def add_thinking_tokens(config: EngineConfig) -> None:
    """Make <think> and </think> tokens, as a budget needs them."""
    path = str(Path(config.model.path) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    tokenizer.save(path)


@pytest.fixture
async def server(talking: EngineConfig) -> AsyncIterator[Server]:  # noqa: F811
    add_thinking_tokens(talking)
    async with run_server(talking) as running:
        yield running


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "max_tokens": 60, "messages": says(text), **fields}


@cache
def official(name: str) -> TypeAdapter[Any]:
    """A type of the official client, which takes a second to import: not in processes that run other files."""
    from anthropic import types

    return TypeAdapter(getattr(types, name))


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named twice and has the shape of its kind."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "error":
            official("RawMessageStreamEvent").validate_python(event)
        events.append(event)
    return events


async def send(server: Server, text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A whole message, which a stream must also produce."""
    response = await server.http.post("/v1/messages", json=body(text, **fields))
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    official("Message").validate_python(message, strict=True)
    streamed = await server.http.post("/v1/messages", json=body(text, **fields, stream=True))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    start, *parts, delta, stop = events_of(streamed.text)
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    content: list[dict[str, Any]] = []
    arguments = ""
    is_open = False
    for part in parts:
        match part:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert not is_open
                assert index == len(content)
                content.append(block)
                arguments, is_open = "", True
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind, **rest}}:
                assert is_open
                assert index == len(content) - 1
                field = str(*rest)
                assert (kind, content[-1]["type"]) in {
                    ("text_delta", "text"),
                    ("thinking_delta", "thinking"),
                    ("input_json_delta", "tool_use"),
                }
                if kind == "input_json_delta":
                    arguments += str(rest[field])
                else:
                    content[-1][field] += rest[field]
            case {"type": "content_block_stop", "index": index}:
                assert is_open
                assert index == len(content) - 1
                is_open = False
                if arguments and message["stop_reason"] == "tool_use":
                    assert content[-1]["input"] == {}
                    content[-1]["input"] = json.loads(arguments)
    assert not is_open

    def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert len({block["id"] for block in blocks if "id" in block}) == sum("id" in block for block in blocks)
        return [{key: value for key, value in block.items() if key != "id"} for block in blocks]

    if message["stop_reason"] != "max_tokens":
        assert without_ids(content) == without_ids(message["content"])
    assert delta["delta"] == {name: message[name] for name in ("stop_reason", "stop_sequence")}
    assert delta["usage"] == message["usage"]
    return message


def chat_of(request: CountTokensRequest) -> ChatInput:
    return request.chat_input(set())


async def refused(server: Server, fields: dict[str, Any], status: int = 400, path: str = "") -> dict[str, Any]:
    response = await server.http.post(f"/v1/messages{path}", json=fields)
    assert response.status_code == status, response.text
    error = response.json()
    assert error.keys() == {"type", "error"}
    assert error["type"] == "error"
    assert error["error"].keys() - {"details"} == {"type", "message"}
    reported: dict[str, Any] = error["error"]
    return reported


async def test_text(server: Server) -> None:
    message = await send(server, "hello world")
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "echo")
    assert message["content"] == [{"type": "text", "text": "hello world"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    prompt = await server.chat_ids(says("hello world"))
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (1, len(prompt) + 1)


async def test_a_message_of_nothing(server: Server) -> None:
    message = await send(server, "<|im_end|>", tools=None)
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


async def test_why_it_stops(server: Server) -> None:
    message = await send(server, "hello world", max_tokens=2)
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 2
    message = await send(server, "hello STOP world", stop_sequences=["no", "STOP"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")
    assert message["content"] == [{"type": "text", "text": "hello "}]


async def test_calls(server: Server) -> None:
    message = await send(server, CALL, tools=[F, G])
    (call,) = message["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})
    assert message["stop_reason"] == "tool_use"
    message = await send(server, f"<think>hm</think>So: {CALL}", tools=[F])
    thoughts, text, call = message["content"]
    assert thoughts == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert (text["text"], call["input"]) == ("So:", {"a": 1})
    message = await send(server, '<tool_call>{"name":"g","arguments":{}}</tool_call>' * 2, tools=[F, G])
    assert [(block["type"], block["input"]) for block in message["content"]] == [("tool_use", {})] * 2


async def test_a_call_that_is_cut_off_has_what_was_complete(server: Server) -> None:
    cut = CALL.index("1}}")
    length = len(server.tokenizer.encode(CALL[:cut], add_special_tokens=False))
    message = await send(server, CALL, tools=[F], max_tokens=length)
    assert (message["stop_reason"], message["content"][0]["input"]) == ("max_tokens", {})


async def test_tool_choice(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Any = []
    submit = server.frontend.client._send
    monkeypatch.setattr(server.frontend.client, "_send", lambda *args: sent.append(args[0]) or submit(*args))
    for kind, is_held in (("auto", False), ("any", True), ("none", False)):
        response = await server.http.post("/v1/messages", json=body(tools=[F, G], tool_choice={"type": kind}))
        assert response.status_code == 200
        assert (sent[-1].params.structured_outputs is not None) == is_held
    request = MessagesRequest.model_validate(body(tools=[F], tool_choice={"type": "tool", "name": "f"}))
    use = chat_of(request).tool_use
    assert use is not None
    assert (use.required, [tool.name for tool in use.tools]) == (True, ["f"])
    for is_disabled, max_calls in ((False, None), (True, 1)):
        choice = {"type": "auto", "disable_parallel_tool_use": is_disabled}
        use = chat_of(MessagesRequest.model_validate(body(tools=[F], tool_choice=choice))).tool_use
        assert use is not None
        assert use.max_calls == max_calls
    message = await send(server, CALL, tools=[F], tool_choice={"type": "none"})
    assert message["content"][0]["type"] == "text"


def test_a_conversation_becomes_one_of_chat() -> None:
    request = CountTokensRequest.model_validate(
        {
            "model": "m",
            "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind", "cache_control": {}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "text", "text": "let me see"},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                        {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "t2",
                            "content": [{"type": "text", "text": "two"}],
                            "is_error": True,
                        },
                        {"type": "text", "text": "go on"},
                    ],
                },
                {"role": "assistant", "content": "I"},
            ],
            "tools": [{**F, "strict": True, "cache_control": {"type": "ephemeral"}}],
        }
    )
    chat = chat_of(request)
    assert chat.messages == [
        {"role": "system", "content": "be\nkind"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [
                {"type": "function", "id": "t1", "function": {"name": "f", "arguments": {"a": 1}}},
                {"type": "function", "id": "t2", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: two"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "I"},
    ]
    assert chat.template.continue_final_message is True
    function = {"name": "f", "description": "does", "parameters": CITY, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]


async def test_documents_and_search_results_are_text(server: Server) -> None:
    result = {"type": "search_result", "source": "https://a/?b&c", "title": "A", "citations": {"enabled": False}}
    parts = {"type": "content", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]}
    shown = chat_of(
        CountTokensRequest.model_validate(
            {
                "model": "m",
                "messages": [
                    document(title='"T"', context="C", cache_control={"type": "ephemeral"}),
                    document(parts),
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [
                                    {**result, "content": [{"type": "text", "text": "four"}]},
                                    {"type": "tool_reference", "tool_name": "f"},
                                ],
                            }
                        ],
                    },
                ],
            }
        )
    ).messages
    assert [message["content"] for message in shown] == [
        '<document title=\'"T"\' context="C">\none\n</document>',
        "<document>\ntwo\nthree\n</document>",
        '<search_result source="https://a/?b&amp;c" title="A">\nfour\n</search_result>\nf',
    ]


def test_thinking_that_is_encrypted_is_ignored() -> None:
    redacted = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    request = CountTokensRequest.model_validate({"model": "m", "messages": [redacted]})
    ignored: set[str] = set()
    assert request.chat_input(ignored).messages == [{"role": "assistant", "content": ""}]
    assert ignored == {"messages[0].content[0].type=redacted_thinking"}


def test_blocks_of_anthropics_tools_are_ignored() -> None:
    used = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    content = [{"type": "compaction", "content": "Before."}, used, found, {"type": "text", "text": "Now."}]
    request = CountTokensRequest.model_validate({"model": "m", "messages": [{"role": "assistant", "content": content}]})
    ignored: set[str] = set()
    assert request.chat_input(ignored).messages == [{"role": "assistant", "content": "Before.\nNow."}]
    assert ignored == {f"messages[0].content[{at}].type={block['type']}" for at, block in ((1, used), (2, found))}


@pytest.mark.parametrize(
    ("edits", "kept"),
    [
        ([], "abc"),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], "abc"),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "all"}}], "abc"),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}], "bc"),
        ([{"type": "clear_thinking_20251015"}], "c"),
    ],
)
def test_the_thinking_of_the_last_turns_is_kept(edits: list[dict[str, Any]], kept: str) -> None:
    turns = [{"role": "assistant", "content": [{"type": "thinking", "thinking": text}]} for text in "abc"]
    fields = {"model": "m", "messages": turns, "context_management": {"edits": edits}}
    chat = chat_of(CountTokensRequest.model_validate(fields))
    assert "".join(message.get("reasoning_content", "") for message in chat.messages) == kept


def functions(*tools: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The functions that tools become, by name."""
    chat = chat_of(CountTokensRequest.model_validate({"model": "m", "messages": says("x"), "tools": [*tools]}))
    return {tool["function"]["name"]: tool["function"] for tool in chat.tools}


def test_tools_that_clients_run_become_functions() -> None:
    """Their input is that of the official client's types, or else of the documentation."""
    from anthropic.types import beta

    memory = functions({"type": "memory_20250818", "name": "memory"})["memory"]["parameters"]["properties"]
    kinds = [getattr(beta, f"BetaMemoryTool20250818{kind}Command") for kind in (
        "View", "Create", "StrReplace", "Insert", "Delete", "Rename")]  # fmt: skip
    assert {name for kind in kinds for name in kind.model_fields} == memory.keys()
    assert memory["command"]["enum"] == [kind.model_fields["command"].annotation.__args__[0] for kind in kinds]

    found = functions(
        {"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}, "strict": True},
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
    )
    old, new = (found[name]["parameters"] for name in ("str_replace_editor", "str_replace_based_edit_tool"))
    assert found["bash"]["parameters"]["properties"].keys() == {"command", "restart"}
    assert found["bash"]["strict"]
    assert all(function["description"] for function in found.values())
    assert "undo_edit" in old["properties"]["command"]["enum"]
    assert "undo_edit" not in new["properties"]["command"]["enum"]
    assert new["properties"].keys() - old["properties"].keys() == {"insert_text"}
    for schema in (old, new):
        assert schema["required"] == ["command", "path"]


async def test_tools_that_anthropic_runs_are_ignored(server: Server) -> None:
    hosted: list[dict[str, Any]] = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3, "allowed_callers": ["code_execution"]},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
    ]
    assert functions(*hosted, {**F, "defer_loading": True}).keys() == {"f"}  # nothing else would load it
    await send(server, tools=hosted, mcp_servers=[{"type": "url", "url": "https://s", "name": "s"}])
    names = {f"tools[].type={tool['type']}" for tool in hosted}
    assert server.frontend.input_processor.ignored == {*names, "mcp_servers"}


def test_a_deferred_tool_is_shown_where_it_is_loaded() -> None:
    """The tools at the start of the prompt stay the same, so that the cache has them."""
    deferred = {**F, "defer_loading": True}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "f"}]}
    loading = {"model": "m", "tools": [deferred, G], "messages": [{"role": "user", "content": [result]}]}
    for fields, shown, callable, text in (
        (loading | {"messages": says("x")}, ["g"], ["g"], "x"),
        (loading, ["g"], ["f", "g"], None),
        (loading | {"tools": [F, G]}, ["f", "g"], ["f", "g"], "f"),
        (loading | {"tools": [G]}, ["g"], ["g"], "f"),
        (loading | {"tool_choice": {"type": "tool", "name": "f"}}, ["f", "g"], ["f"], "f"),
    ):
        chat = chat_of(CountTokensRequest.model_validate(fields))
        assert [tool["function"]["name"] for tool in chat.tools] == shown
        assert chat.tool_use is not None
        assert [tool.name for tool in chat.tool_use.tools] == callable
        (message,) = chat.messages
        if text is not None:
            assert message["content"] == text
            continue
        start, function, end = message["content"].split("\n")
        assert (start, end) == ("<function>", "</function>")
        assert json.loads(function) == {"name": "f", "description": "does", "parameters": CITY}


def changed(kind: str, **tool: Any) -> dict[str, Any]:
    """A block that changes the tools."""
    return {"type": f"tool_{kind}", "tool": tool}


def named(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "name": name}


def test_tools_change_in_the_conversation() -> None:
    """The tools at the start of the prompt stay the same, and the messages show what changes."""
    deferred = {**F, "defer_loading": True}
    new = {"type": "tool_definition", "definition": {"name": "h", "input_schema": CITY}}
    bash = {"type": "tool_definition", "definition": {"type": "bash_20250124", "name": "bash"}}
    hosted = {"type": "tool_definition", "definition": {"type": "web_search_20250305", "name": "web_search"}}
    for changes, callable, shown in (
        ([changed("addition", **named("f"))], ["f", "g"], "+f"),
        ([changed("addition", **named("g"))], ["g"], ""),
        ([changed("removal", **named("g"))], [], "-g"),
        ([changed("removal", **named("f"))], ["g"], ""),
        ([changed("removal", **named("g")), changed("addition", **named("g"))], ["g"], "-g +g"),
        ([changed("addition", **new), changed("addition", **bash)], ["g", "h", "bash"], "+h +bash"),
        ([changed("addition", **new), changed("removal", **named("h"))], ["g"], "+h -h"),
        ([changed("addition", **hosted)], ["g"], ""),
        ([changed("addition", type="mcp_tool_reference", server_name="s", name="x")], ["g"], ""),
    ):
        compacted = {"type": "compaction", "content": "Before.", "tool_changes": changes}
        for turn in ({"role": "system", "content": changes}, {"role": "assistant", "content": [compacted]}):
            fields = {"model": "m", "tools": [deferred, G], "messages": [*says("x"), turn, *says("y")]}
            chat = chat_of(CountTokensRequest.model_validate(fields))
            assert [tool["function"]["name"] for tool in chat.tools] == ["g"]
            assert [tool.name for tool in (chat.tool_use.tools if chat.tool_use else ())] == callable
            text = "\n".join(message["content"] for message in chat.messages[1:-1])
            text = re.sub(r'<function>\n\{"name": "(\w+)".*\}\n</function>', r"+\1", text.removeprefix("Before."))
            assert re.sub(r"The function (\w+) is no longer available\.", r"-\1", text).split() == shown.split()


@pytest.mark.parametrize("kind", ["addition", "removal"])
def test_changes_of_hosted_tools_are_ignored(kind: str) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    definition = changed("addition", type="tool_definition", definition=hosted)
    change = changed(kind, **named("web_search"))
    for tools, changes, param in (([G, hosted], [change], "[0]"), ([G], [definition, change], "[1]")):
        turn = {"role": "system", "content": changes}
        request = CountTokensRequest.model_validate({"model": "m", "tools": tools, "messages": [*says("x"), turn]})
        ignored: set[str] = set()
        chat = request.chat_input(ignored)
        assert chat.tool_use is not None
        assert [tool.name for tool in chat.tool_use.tools] == ["g"]
        assert [message["content"] for message in chat.messages] == ["x"]
        assert f"messages[1].content{param}.tool.name=web_search" in ignored


def test_a_turn_of_the_system_may_be_for_one_answer() -> None:
    content = [{"type": "text", "text": "now"}, changed("removal", **named("g"))]
    once = {"role": "system", "clear_at": "next_user_message", "content": content}
    gone = "The function g is no longer available."
    later: list[dict[str, Any]]
    for later, shown in (([], f"now\n{gone}"), (says("y"), gone)):
        chat = chat_of(
            CountTokensRequest.model_validate({"model": "m", "tools": [G], "messages": [*says("x"), once, *later]})
        )
        assert chat.messages[1] == {"role": "system", "content": shown}


async def test_a_format_and_an_effort(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    output = {"effort": "low", "format": {"type": "json_schema", "schema": CITY}}
    assert chat_of(MessagesRequest.model_validate(body(output_config=output))).template.reasoning_effort == "low"
    sent: Any = []
    submit = server.frontend.client._send
    monkeypatch.setattr(server.frontend.client, "_send", lambda *args: sent.append(args[0]) or submit(*args))
    await send(server, output_config=output)
    await send(server, output_format=output["format"])
    for request in sent:
        assert CITY.items() <= request.params.structured_outputs.json.items()


async def test_the_clients_tool_runner(talking: EngineConfig) -> None:  # noqa: F811
    """It sends back the answer, with fields of its own. It begins with a thread, whose second request would have only
    the tool's result, and goes on without one.
    """
    import anthropic

    @anthropic.beta_async_tool
    async def f(a: int) -> str:
        """Does."""
        return f"{a} done"

    template = "{{ tools | length }} {{ messages | length }} {{ messages[-1].content }}"
    async with run_server(talking, chat_template=template, tool_call_parser="hermes") as server:
        http = anthropic.DefaultAsyncHttpxClient(verify=TLS)
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="x", max_retries=0, http_client=http
        ) as client:
            runner = client.beta.messages.tool_runner(
                model="echo", max_tokens=60, messages=says(CALL), tools=[f], betas=["context-management-2025-06-27"]
            )
            called, ended = [message async for message in runner]
    assert (called.stop_reason, ended.stop_reason) == ("tool_use", "end_turn")
    assert [block.text for block in ended.content if block.type == "text"] == ["1 3 1 done"]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_thread_is_refused_with_the_code_that_clients_know(server: Server, thread: dict[str, Any]) -> None:
    for path, text in (("", "hi"), ("/count_tokens", "hi"), ("", "x" * 2**17)):  # another process reads the last one
        error = await refused(server, body(text, thread=thread), path=path)
        assert error["type"] == "invalid_request_error"
        assert error["details"] == {"error_code": "thread_unsupported_request"}


async def test_the_final_assistant_message_is_continued(server: Server) -> None:
    message = await send(server, messages=[*says("x"), {"role": "assistant", "content": "so "}])
    assert message["content"] == [{"type": "text", "text": "so "}]


async def test_thinking(server: Server) -> None:
    message = await send(server, "hi", thinking={"type": "enabled", "budget_tokens": 1024})
    assert message["content"] == [{"type": "text", "text": "thinking True hi"}]
    message = await send(server, "hi", thinking={"type": "disabled"})
    assert message["content"] == [{"type": "text", "text": "thinking False hi"}]
    message = await send(server, "hi", thinking={"type": "adaptive"})
    assert message["content"] == [{"type": "text", "text": "hi"}]


async def test_thoughts_that_cannot_be_turned_off(
    talking: EngineConfig,  # noqa: F811
) -> None:
    (Path(talking.model.path) / "chat_template.jinja").write_text(TEMPLATE.replace("enable_thinking", "other"))
    async with run_server(talking) as server:
        error = await refused(server, body(thinking={"type": "enabled", "budget_tokens": 1024}))
        assert "thinking.budget_tokens: it needs a token that closes reasoning" in error["message"]
    add_thinking_tokens(talking)
    async with run_server(talking) as server:
        error = await refused(server, body(thinking={"type": "disabled"}))
        assert "cannot disable it" in error["message"]
        await send(server, "hi", thinking={"type": "enabled", "budget_tokens": 1024})


async def test_a_model_without_reasoning_needs_no_limit_of_it(
    talking: EngineConfig,  # noqa: F811
) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (Path(talking.model.path) / "chat_template.jinja").write_text(template)
    async with run_server(talking) as server:
        message = await send(server, "hi", thinking={"type": "enabled", "budget_tokens": 1024})
        assert message["content"] == [{"type": "text", "text": "hi"}]
        assert "thinking" in server.frontend.input_processor.ignored


async def test_counting(server: Server) -> None:
    fields = {"model": "echo", "messages": says("hello world"), "system": "be kind", "tools": [F]}
    response = await server.http.post("/v1/messages/count_tokens", json=fields)
    assert response.status_code == 200
    message = await send(server, "hello world", system="be kind", tools=[F])
    usage = message["usage"]
    counted = {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert response.json() == counted
    more = {"max_tokens": 10**6, "stream": True, "temperature": 0.5, "top_p": 1, "top_k": 1, "stop_sequences": ["x"]}
    rest = {"metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"}, "tool_choice": {"type": "auto"}}
    response = await server.http.post("/v1/messages/count_tokens", json=fields | more | rest)
    assert response.json() == counted


BLOCK = {"role": "user", "content": [{"type": "audio", "source": {}}]}
FORMAT = {"type": "json_schema", "schema": CITY}


def document(source: Any = None, **fields: Any) -> dict[str, Any]:
    source = source or {"type": "text", "media_type": "text/plain", "data": "one"}
    return {"role": "user", "content": [{"type": "document", "source": source, **fields}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1000}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [BLOCK]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
     "messages"),
    ({"system": [{"type": "document"}]}, "system[0].type"),
    ({"messages": [document({"type": "base64", "media_type": "application/pdf", "data": ""})]},
     "messages[0].content[0].source.data"),
    ({"messages": [document({"type": "file", "file_id": ""})]}, "messages[0].content[0].source.file_id"),
    ({"messages": [document({"type": "text", "media_type": "text/html", "data": ""})]},
     "messages[0].content[0].source.media_type"),
    ({"messages": [document(citations={"enabled": True})]}, "messages[0].content[0].citations"),
    ({"tools": [{"type": "custom_20250305", "name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name"),
    ({"tools": [{"type": "computer_20251124", "name": "computer", "display_width_px": 9}]}, "tools[0].type"),
    ({"tools": [{"type": "browser_toolset_20260801"}]}, "tools[0].type"),
    ({"messages": [{"role": "system", "content": [changed("addition", **named("f"))]}]},
     "messages[0].content[0].tool.name"),
    ({"messages": [{"role": "system", "content": [changed("removal", type="x")]}]}, "messages[0].content[0].tool.type"),
    ({"messages": [{"role": "user", "content": "x", "clear_at": "never"}]}, "messages[0].clear_at"),
    ({"messages": [{"role": "system", "content": "x", "output_config": {"effort": "low"}}]},
     "messages[0].output_config"),
    ({"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [F], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": 2**70}, "top_k"),
    ({"container": "x"}, "container"),
    ({"output_config": {"effort": "some"}}, "output_config.effort"),
    ({"output_config": {"format": FORMAT | {"schema": {"type": 5}}}}, "output_config.format"),
    ({"output_format": FORMAT | {"schema": {"type": 5}}}, "output_format"),
    ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "output_format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"no_such_parameter": 1}, "no_such_parameter"),
]  # fmt: skip


async def test_what_is_wrong_is_named(server: Server) -> None:
    for fields, named in WRONG:
        error = await refused(server, {**body(), **fields})
        assert error["type"] == "invalid_request_error"
        assert named in error["message"]


async def test_a_last_message_that_cannot_be_gone_on_with(
    config: EngineConfig, core_mode: Callable[[str], None]
) -> None:
    """No parameter of this API requests it."""
    async with run_server(config, chat_template="{{ messages[0].content }}") as server:
        error = await refused(server, body(messages=[*says("ask"), {"role": "assistant", "content": "So"}]))
        assert error["message"].startswith("messages: this model's chat template changes the final message")


async def test_what_asks_for_nothing_is_accepted(server: Server) -> None:
    await send(
        server,
        metadata={"user_id": "u"},
        service_tier="auto",
        container=None,
        cache_control={"type": "ephemeral"},
    )


async def test_errors_have_anthropics_shape(
    talking: EngineConfig,  # noqa: F811
    core_mode: Callable[[str], None],
) -> None:
    import anthropic

    async with run_server(talking, api_key="secret") as server:
        assert (await refused(server, body(), 401))["type"] == "authentication_error"
        assert (await server.http.get("/v1/models")).json()["error"].keys() == {"message", "type", "param", "code"}
    async with run_server(talking) as server:
        assert (await refused(server, body(model="other"), 404))["type"] == "not_found_error"
        assert (await refused(server, {}, 404, "/batches"))["type"] == "not_found_error"
        assert (await refused(server, body("<fail>"), 500))["type"] == "api_error"
        for start in ("", "hello"):
            response = await server.http.post("/v1/messages", json=body(f"{start}<fail>", stream=True))
            (event,) = events_of(response.text)
            details = {"error_code": "request_failed"}
            assert event["error"] == {"type": "api_error", "message": "the KV cache is too small", "details": details}
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as client:
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                await client.messages.create(**body(), extra_body={"temperature": -1})
    core_mode("loading")
    async with run_server(talking, wait=False) as server:
        assert (await refused(server, body(), 503))["type"] == "overloaded_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(server: Server, stream: bool) -> None:
    for text in ("hello<hang>", "<hang>"):
        request = asyncio.create_task(server.http.post("/v1/messages", json=body(text, stream=stream)))
        while not server.frontend.client._running:
            await asyncio.sleep(0.001)
        request.cancel()
        while server.frontend.client._running:
            await asyncio.sleep(0.001)
    await server.until_idle()
