"""Other APIs than chat through their official clients, against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import openai
import pydantic
import pytest
from anthropic.types import ToolParam, ToolUseBlock

from tests.e2e.serving import Server, serve
from tests.e2e.test_openai import COMMAND, NODES, WEATHER


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--api-key", "secret") as server:
        yield server


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, auth_token="secret", max_retries=0) as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


QUESTION: Any = {"model": "quire-demo", "max_tokens": 100, "messages": [{"role": "user", "content": NODES}]}
GREEDY = {"temperature": 0}
TOOL: ToolParam = {
    "name": "get_weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}


def test_a_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**QUESTION, extra_body=GREEDY)
    (block,) = message.content
    assert block.type == "text"
    assert COMMAND in block.text
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert message.usage.output_tokens > 0

    with claude.messages.stream(**QUESTION, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", message.usage.output_tokens)

    counted = claude.messages.count_tokens(model=QUESTION["model"], messages=QUESTION["messages"])
    for usage in (message.usage, final.usage):
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_ends_a_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**QUESTION, stop_sequences=["-parallel-size 2"], extra_body=GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "-parallel-size 2")
    message = claude.messages.create(**{**QUESTION, "max_tokens": 3}, extra_body=GREEDY)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


def test_a_message_calls_a_tool_and_sends_its_result(claude: anthropic.Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    request: dict[str, Any] = {"model": "quire-demo", "max_tokens": 100, "tools": [TOOL], "extra_body": GREEDY}
    message = claude.messages.create(messages=asked, **request)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})

    with claude.messages.stream(messages=asked, **request) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (same,) = stream.get_final_message().content
    assert isinstance(same, ToolUseBlock)
    assert json.loads("".join(pieces)) == same.input == call.input

    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    reported: list[Any] = [
        *asked,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    message = claude.messages.create(messages=reported, **request)
    assert message.stop_reason == "end_turn"
    assert message.content[0].type == "text"
    assert "21" in message.content[0].text
    assert "sunny" in message.content[0].text


def test_errors_of_messages(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**QUESTION, extra_body={"temperature": -1})
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(**{**QUESTION, "model": "claude"})
    assert missing.value.body == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "the model 'claude' does not exist; available: quire-demo",
            "details": {"error_code": "model_not_found"},
        },
    }
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(auth_token="guess").messages.create(**QUESTION)


ASKED: dict[str, Any] = {"model": "quire-demo", "input": NODES, "temperature": 0}
FLAT: Any = {"type": "function", "strict": False, **{k: v for k, v in WEATHER["function"].items() if k != "strict"}}


def test_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED)
    assert COMMAND in response.output_text
    assert response.status == "completed"
    assert client.responses.retrieve(response.id).output_text == response.output_text

    with client.responses.stream(**ASKED) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == response.output_text
    assert final.usage is not None
    assert response.usage is not None
    assert final.usage.output_tokens == response.usage.output_tokens

    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_response_calls_a_tool_and_goes_on(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "quire-demo", "temperature": 0, "tools": [FLAT]}
    asked = "What is the weather in Paris?"
    response = client.responses.create(input=asked, **request)
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})

    with client.responses.stream(input=asked, **request) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (same,) = stream.get_final_response().output
    assert same.type == "function_call"
    assert "".join(pieces) == same.arguments == call.arguments

    output = '{"temperature": 21, "condition": "sunny"}'
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    reported = client.responses.create(input=[result], previous_response_id=response.id, **request)
    assert "21" in reported.output_text
    assert "sunny" in reported.output_text
    items: list[Any] = [{"role": "user", "content": asked}, call.model_dump(exclude_none=True), result]
    assert client.responses.create(input=items, **request).output_text == reported.output_text


class Place(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: Annotated[int, pydantic.Field(ge=0, le=9)]


def test_formats(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    response = client.responses.parse(**ASKED, text_format=Place)
    assert isinstance(response.output_parsed, Place)
    format: Any = {"type": "json_schema", "schema": Place.model_json_schema()}
    message = claude.messages.create(**QUESTION, output_config={"format": format}, extra_body=GREEDY)
    assert message.content[0].type == "text"
    Place.model_validate_json(message.content[0].text)


def test_errors_of_responses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**ASKED, background=True)
    assert error.value.param == "background"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(**ASKED, previous_response_id="resp_other")
    assert (missing.value.code, missing.value.param) == ("response_not_found", "previous_response_id")
