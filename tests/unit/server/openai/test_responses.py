"""The Responses API, with a model that repeats the last message; read by the official client's types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.server.client.request_record import RECORD, HttpRequestRecord
from quire.server.http.large_bodies import LARGE_BODY
from quire.server.http.response_store import ResponseStore, StoredResponse
from quire.server.openai.responses_request import ResponsesRequest
from tests.fakes.api_server import Server, run_server
from tests.unit.server.openai.test_chat import CALL, CITY, TEMPLATE, talking  # noqa: F401
from tests.unit.server.openai.test_completions import refused

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
F: Any = {"type": "function", "name": "f", "description": "does", "parameters": CITY, "strict": False}
G: Any = {"type": "function", "name": "g"}
ALL = "{% for m in messages %}{{ m.role[0] }}:{{ m.content or m.tool_calls[0].function.arguments.a }};{% endfor %}"


@pytest.fixture
async def server(talking: EngineConfig) -> AsyncIterator[Server]:  # noqa: F811
    async with run_server(talking) as running:
        yield running


@pytest.fixture
async def telling(talking: EngineConfig) -> AsyncIterator[Server]:  # noqa: F811
    """A server whose model repeats all messages; tools are shown by the template's first line."""
    (Path(talking.model.path) / "chat_template.jinja").write_text(TEMPLATE.partition("{%- if documents")[0] + ALL)
    async with run_server(talking) as running:
        yield running


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named twice, numbered, and has the shape of its kind."""
    events = []
    for number, block in enumerate(text.strip().split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        events.append(event)
    return events


def like(response: dict[str, Any]) -> dict[str, Any]:
    """A response without the fields that differ between two answers to the same request."""
    output = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
    ]
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)
    fields = {key: value for key, value in response.items() if key not in ("id", "created_at", "completed_at")}
    return fields | {"output": output}


async def send(server: Server, said: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A whole response, which a stream must also produce."""
    whole = await server.http.post("/v1/responses", json={"input": said, **fields})
    assert whole.status_code == 200, whole.text
    response: dict[str, Any] = whole.json()
    Response.model_validate(response)
    streamed = await server.http.post("/v1/responses", json={"input": said, **fields, "stream": True})
    created, begun, *parts, last = events_of(streamed.text)
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == begun["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert last["type"] == f"response.{response['status']}"
    assert like(last["response"]) == like(response)
    done: list[dict[str, Any]] = []
    while parts:
        done.append(read_item(parts, len(done)))
    assert done == last["response"]["output"]
    return response


def read_item(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The events of one item, taken from the front."""
    added = events.pop(0)
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    item: dict[str, Any] = added["item"]
    assert item["status"] == "in_progress"
    kind = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
    name = f"response.{kind[item['type']]}"
    is_call = item["type"] == "function_call"
    if not is_call:
        part = events.pop(0)
        assert (part["type"], part["part"]["text"]) == ("response.content_part.added", "")
    text = ""
    while events[0]["type"] == f"{name}.delta":
        delta = events.pop(0)
        assert (delta["item_id"], delta["output_index"]) == (item["id"], index)
        text += delta["delta"]
    end = events.pop(0)
    assert (end["type"], end["arguments" if is_call else "text"]) == (f"{name}.done", text)
    if is_call:
        assert item["arguments"] == ""
    else:
        assert item["content"] == []
        part = events.pop(0)
        assert (part["type"], part["part"]["text"]) == ("response.content_part.done", text)
    last = events.pop(0)
    assert (last["type"], last["output_index"], last["item"]["id"]) == ("response.output_item.done", index, item["id"])
    whole: dict[str, Any] = last["item"]
    assert (whole["arguments"] if is_call else whole["content"][0]["text"]) == text
    return whole


async def test_text(server: Server) -> None:
    response = await send(server, "hello world", metadata={"a": "b"}, temperature=0.5, max_output_tokens=50)
    assert response["id"].startswith("resp_")
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}]
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    assert (response["metadata"], response["temperature"], response["max_output_tokens"]) == ({"a": "b"}, 0.5, 50)
    assert response["completed_at"] >= response["created_at"]
    prompt = await server.chat_ids([{"role": "user", "content": "hello world"}])
    assert response["usage"] == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": len(prompt) + 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 2 * len(prompt) + 1,
    }


async def test_nothing(server: Server) -> None:
    response = await send(server, "<|im_end|>")
    assert (response["status"], response["output"]) == ("completed", [])


async def test_thoughts_and_calls(server: Server) -> None:
    response = await send(server, f"<think>hm</think>So: {CALL}", tools=[F])
    thoughts, text, call = response["output"]
    assert (thoughts["type"], thoughts["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "hm"}])
    assert text["content"][0]["text"] == "So:"
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a":1}')
    assert call["call_id"]
    encode = server.tokenizer.encode
    reasoning = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    length = len(encode("<think>hm</think>", add_special_tokens=False))
    assert length - 1 <= reasoning <= length
    response = await send(server, '<tool_call>{"name":"g","arguments":{}}</tool_call>' * 2, tools=[F, G])
    assert [(item["type"], item["arguments"]) for item in response["output"]] == [("function_call", "{}")] * 2


async def test_what_is_cut_off_is_incomplete(server: Server) -> None:
    response = await send(server, "hello world", max_output_tokens=2)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None


async def test_items_become_messages(telling: Server) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 7}'},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "e", "annotations": []}]},
        {"role": "developer", "content": "f"},
    ]
    response = await send(telling, items, instructions="be")
    assert response["output"][0]["content"][0]["text"] == "s:be;u:a;u:b;a:7;t:d;a:e;s:f;"
    assert response["instructions"] == "be"


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(message) for message in ResponsesRequest(input=items).read().chat.messages]


def test_what_the_model_did_in_a_row_is_one_message() -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "x"}
    past = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
    assert messages_of([thoughts, said, call, call, said, call, thoughts, said]) == [
        {"role": "assistant", "reasoning_content": "hm", "content": "x", "tool_calls": [past, past]},
        {"role": "assistant", "content": "x", "tool_calls": [past]},
        {"role": "assistant", "reasoning_content": "hm", "content": "x"},
    ]
    assert messages_of([{"type": "reasoning", "summary": [], "encrypted_content": None}]) == []
    cut = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"a": '}}
    assert messages_of([{**call, "arguments": '{"a": '}]) == [{"role": "assistant", "tool_calls": [cut]}]


def test_tools_and_formats_become_those_of_chat() -> None:
    one = {"type": "function", "name": "f"}
    for choice, names, is_required in (
        ("required", ["f", "g"], True),
        (one, ["f"], True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [one]}, ["f"], False),
    ):
        chat = ResponsesRequest(input="", tools=[F, G], tool_choice=choice).read().chat
        assert chat.tool_use is not None
        assert ([tool.name for tool in chat.tool_use.tools], chat.tool_use.required) == (names, is_required)
    function = {key: value for key, value in F.items() if key != "type"}
    assert chat.tools == [{"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}}]
    given = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    request = ResponsesRequest.model_validate({"input": "", "text": {"format": given}, "reasoning": {"effort": "low"}})
    assert request.read().chat.template.reasoning_effort == "low"
    assert request.text is not None
    assert request.text.format is not None
    assert request.text.format.structured() == StructuredOutputs(json=CITY)


async def test_a_response_goes_on_with_an_earlier_one(telling: Server) -> None:
    client = telling.openai
    first = await client.responses.create(model="echo", input="a", instructions="be")
    assert first.output_text == "s:be;u:a;"
    second = await client.responses.create(model="echo", input="b", previous_response_id=first.id)
    assert second.output_text == "u:a;a:s:be;u:a;;u:b;"
    assert second.previous_response_id == first.id
    again = await client.responses.create(model="echo", input="c", previous_response_id=first.id, instructions="do")
    assert again.output_text == "s:do;u:a;a:s:be;u:a;;u:c;"


async def test_a_call_and_its_result_over_an_earlier_response(server: Server) -> None:
    stream = await server.openai.responses.create(model="echo", input=CALL, tools=[F], stream=True)
    events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.completed"
    (call,) = last.response.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": " hot"}
    reported = await server.openai.responses.create(
        model="echo", input=[result], previous_response_id=last.response.id, tools=[F], tool_choice="none"
    )
    assert reported.output_text.endswith("{'a': 1} hot")


async def test_a_call_that_was_cut_off_is_not_remembered(server: Server) -> None:
    length = len(server.tokenizer.encode(CALL[: CALL.index("1}}")], add_special_tokens=False))
    first = await server.openai.responses.create(model="echo", input=CALL, tools=[F], max_output_tokens=length)
    assert first.status == "incomplete"
    again = await server.openai.responses.create(model="echo", input="hi", previous_response_id=first.id)
    assert again.output_text == "hi"


async def test_looking_up_and_deleting(server: Server) -> None:
    client = server.openai
    made = await client.responses.create(model="echo", input="hi")
    assert await client.responses.retrieve(made.id) == made
    with pytest.raises(openai.BadRequestError, match="completed"):
        await client.responses.cancel(made.id)
    await client.responses.delete(made.id)
    gone = [client.responses.retrieve, client.responses.delete, client.responses.cancel]
    for look_up in gone:
        with pytest.raises(openai.NotFoundError) as missing:
            await look_up(made.id)  # type: ignore[operator]
        assert (missing.value.code, missing.value.param) == ("response_not_found", "response_id")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.create(model="echo", input="x", previous_response_id=made.id)
    assert missing.value.param == "previous_response_id"
    unkept = await client.responses.create(model="echo", input="hi", store=False)
    assert unkept.id
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unkept.id)
    error = (await server.http.get(f"/v1/responses/{made.id}", params={"stream": "true"})).json()["error"]
    assert error["param"] == "stream"


@pytest.mark.parametrize("end", ["cancel", "delete"])
async def test_a_running_response_can_be_ended(server: Server, end: str) -> None:
    stream = await server.openai.responses.create(model="echo", input="hello<hang>", stream=True)
    first = await anext(stream)
    assert first.type == "response.created"
    running = await server.openai.responses.retrieve(first.response.id)
    assert running.status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="not ended"):
        await server.openai.responses.create(model="echo", input="x", previous_response_id=running.id)
    if end == "cancel":
        cancelled = await server.openai.responses.cancel(running.id)
        assert cancelled.status == "cancelled"
        assert (await server.openai.responses.cancel(running.id)).status == "cancelled"
    else:
        await server.openai.responses.delete(running.id)
        with pytest.raises(openai.NotFoundError):
            await server.openai.responses.retrieve(running.id)
    *_, last = [event async for event in stream]
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    await server.until_idle()
    assert not server.frontend.client._running


async def test_responses_belong_to_a_key(talking: EngineConfig, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "keys").write_text("alice: a\nbob: b\nalice: a2\n")
    async with run_server(talking, api_key_file=str(tmp_path / "keys")) as server:
        alice, bob, again = (server.openai.with_options(api_key=key) for key in ("a", "b", "a2"))
        made = await alice.responses.create(model="echo", input="hi")
        stream = await alice.responses.create(model="echo", input="hello<hang>", stream=True)
        first = await anext(stream)
        assert first.type == "response.created"
        item: Any = {"type": "item_reference", "id": made.output[0].id}
        filler = {"client_metadata": {"x": " " * LARGE_BODY}}
        for response_id in (made.id, first.response.id):
            for refused_call in (
                bob.responses.retrieve(response_id),
                bob.responses.cancel(response_id),
                bob.responses.delete(response_id),
                bob.responses.input_items.list(response_id),
                bob.responses.create(model="echo", input="x", previous_response_id=response_id),
                bob.responses.create(model="echo", input="x", previous_response_id=response_id, extra_body=filler),
                bob.responses.create(model="echo", input=[item]),
                bob.responses.create(model="echo", input=[item], extra_body=filler),
                bob.responses.input_tokens.count(model="echo", input=[item]),
            ):
                with pytest.raises(openai.NotFoundError):
                    await refused_call
        assert (await again.responses.create(model="echo", input=[item])).output_text == "hi"
        assert (await again.responses.retrieve(made.id)).id == made.id
        assert (await again.responses.cancel(first.response.id)).status == "cancelled"
        await again.responses.delete(made.id)
        await stream.close()


async def test_a_failure_is_reported(server: Server) -> None:
    assert (await refused(server, "responses", {"input": "x<fail>"}, 500))["code"] == "request_failed"
    streamed = await server.http.post("/v1/responses", json={"input": "x<fail>", "stream": True})
    *_, last = events_of(streamed.text)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the KV cache is too small"}
    assert (await server.openai.responses.retrieve(last["response"]["id"])).status == "failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(server: Server, stream: bool) -> None:
    body = {"input": "hello<hang>", "stream": stream}
    request = asyncio.create_task(server.http.post("/v1/responses", json=body))
    while not server.frontend.client._running:
        await asyncio.sleep(0.001)
    request.cancel()
    while server.frontend.client._running:
        await asyncio.sleep(0.001)
    await server.until_idle()


WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].file_data"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "compaction_trigger"}]}, "input[0].type"),
    ({"tools": [{"type": 5}]}, "tools[0].type"),
    ({"tools": [{"type": []}]}, "tools[0].type"),
    ({"tools": [F], "tool_choice": {"type": []}}, "tool_choice"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**F, "parameters": {"type": "string"}}]}, "tools[0].parameters"),
    ({"tools": [F], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text.format"),
    ({"text": {"length": "low"}}, "text.length"),
    ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
    ({"background": True}, "background"),
    ({"conversation": "x"}, "conversation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"include": ["message.output_text.image"]}, "include"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 500}, "input"),
    ({"temperature": -1}, "temperature"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"no_such_parameter": 1}, "no_such_parameter"),
    ({"tools": [{**F, "parameters": {"type": "object", "description": "\ud800"}}]}, None),
]  # fmt: skip


async def test_what_is_wrong_is_named(server: Server) -> None:
    for fields, param in WRONG:
        content = json.dumps({"input": "hi", **fields})
        response = await server.http.post(
            "/v1/responses", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        error = json.loads(response.content)["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error


async def test_an_error_may_contain_half_of_a_surrogate_pair(server: Server) -> None:
    content = json.dumps({"messages": [], "tools": [{"type": "function", "function": {"name": "\ud800"}}]})
    headers = {"content-type": "application/json"}
    response = await server.http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert json.loads(response.content)["error"]["param"] == "tools[0].function.name"


async def test_vllms_sampling_parameters(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Any = []
    submit = server.frontend.client._send
    monkeypatch.setattr(server.frontend.client, "_send", lambda *args: sent.append(args[0]) or submit(*args))
    given = {"top_k": 5, "seed": 7, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 1.0}
    response = await send(server, "hello STOP world", **given, stop=["STOP"])
    assert response["output"][0]["content"][0]["text"] == "hello "
    assert {name: getattr(sent[0].params, name) for name in given} == given


async def test_ollamas_names(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Any = []
    submit = server.frontend.client._send
    monkeypatch.setattr(server.frontend.client, "_send", lambda *args: sent.append(args[0]) or submit(*args))
    schema = {"type": "object"}
    answer = await send(server, repeat_penalty=1.25, num_predict=7, format=schema, reasoning_effort="low", num_ctx=4096)
    params = sent[0].params
    assert (params.repetition_penalty, params.max_tokens) == (1.25, 7)
    assert params.structured_outputs.json.items() >= schema.items()
    assert (answer["max_output_tokens"], answer["reasoning"]["effort"]) == (7, "low")
    assert {"num_ctx", "reasoning_effort"} <= server.frontend.input_processor.ignored
    await send(server, num_predict=-1)
    assert sent[-1].params.max_tokens is None
    both = {"input": "hi", "format": "json", "text": {"format": {"type": "json_object"}}}
    for fields, param in ((both, "text.format"), ({"input": "hi", "format": {"type": "no"}}, "format")):
        assert (await refused(server, "responses", fields))["param"] == param


async def test_what_asks_for_nothing_is_accepted(server: Server) -> None:
    await send(
        server,
        background=False,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        text={"format": {"type": "text"}},
        service_tier="auto",
        truncation="disabled",
        prompt_cache_key="k",
        conversation=None,
    )


def test_the_store_is_bounded() -> None:
    def kept(size: int) -> StoredResponse:
        return StoredResponse(b"x" * size, b"")

    store = ResponseStore(max_responses=3, max_bytes=100)
    for number in range(4):
        store.add(str(number), kept(10))
    assert [store.get(str(number)) is not None for number in range(4)] == [False, True, True, True]
    store.add("large", kept(85))
    assert [store.get(name) is not None for name in ("1", "2", "3", "large")] == [False, False, True, True]
    store.add("too large", kept(101))
    assert [store.get(name) is not None for name in ("3", "large", "too large")] == [True, True, False]
    store.add("one", kept(100))
    assert not any(store.get(name) for name in ("3", "large"))
    assert store.delete("one")
    assert not store.delete("one")
    store.add("other", kept(100))
    assert store.get("other") is not None


def test_an_id_is_stored_once() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    for size in (60, 70):
        store.add("same", StoredResponse(b"x" * size, b""))
    found = store.get("same")
    assert found is not None
    assert found.size == 70
    store.add("other", StoredResponse(b"x" * 30, b""))
    assert store.delete("same")
    assert not store.delete("same")
    store.add("third", StoredResponse(b"x" * 70, b""))
    assert store.get("other") is not None


def test_keys_share_the_store() -> None:
    store = ResponseStore(max_responses=6, max_bytes=100)
    record = HttpRequestRecord()

    def add(key: str, *names: str, size: int = 5) -> None:
        record.owner = key
        for name in names:
            store.add(name, StoredResponse(b"x" * size, b""))

    def held(key: str) -> list[str]:
        record.owner = key
        return [name for name in "abcdefgh" if store.get(name) is not None]

    token = RECORD.set(record)
    try:
        add("quiet", "a", "b", "c")
        add("loud", *"abcdefgh")
        assert (held("quiet"), held("loud")) == (["a", "b", "c"], ["f", "g", "h"])
        add("third", "a")  # of those that hold most, the one with the oldest response loses
        assert (held("quiet"), held("loud"), held("third")) == (["b", "c"], ["f", "g", "h"], ["a"])
        add("loud", "a", "b", size=48)
        assert (held("loud"), held("third"), held("quiet")) == (["b"], ["a"], ["b", "c"])
        add("quiet", "d", size=60)  # what is new is kept
        assert (held("quiet"), held("loud"), held("third")) == (["d"], [], ["a"])
        add("quiet", "d", size=40)
        add("third", "b", size=95)  # but not what is much larger than what others hold
        assert (held("quiet"), held("third")) == (["d"], [])
        add("first", "a", "b")
        for name in "abcdefgh":  # all hold one response at most
            add(f"key {name}", name)
        assert [held(f"key {name}") for name in "abcdefgh"] == [[], [], *([name] for name in "cdefgh")]
    finally:
        RECORD.reset(token)


async def test_logprobs_are_those_of_the_text(server: Server) -> None:
    for count, fields in ((2, {"top_logprobs": 2}), (0, {"include": ["message.output_text.logprobs"]})):
        response = await send(server, "<think>hm</think>hello", **fields)
        assert response["top_logprobs"] == count
        (part,) = response["output"][-1]["content"]
        tokens = part["logprobs"]
        assert "".join(token["token"] for token in tokens) == part["text"] == "hello"
        assert [len(token["top_logprobs"]) for token in tokens] == [count] * len(tokens)
    (part,) = (await send(server, "hello"))["output"][-1]["content"]
    assert part["logprobs"] == []
