"""The official client, 2.x and 3.x: run with QUIRE_URL, …_BUSY_URL, …_EMBEDDING_URL and …_KEY in the environment."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import re
from typing import Any, Literal

import openai
import pydantic

URL, BUSY_URL, KEY = (os.environ[name] for name in ("QUIRE_URL", "QUIRE_BUSY_URL", "QUIRE_KEY"))
EMBEDDING_URL = os.environ["QUIRE_EMBEDDING_URL"]
QUESTION: Any = [{"role": "user", "content": "How do I serve a model on two nodes with 8 GPUs each?"}]
ANSWER = "quire serve MODEL --tensor-parallel-size 8 --pipeline-parallel-size 2"
MODEL: Any = {"model": "quire-demo", "temperature": 0}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city."}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
ASK_WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Place(pydantic.BaseModel):
    city: Literal["Oslo", "Lima"]
    is_capital: bool


def chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=QUESTION, **MODEL)
    assert ANSWER in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    raw = client.chat.completions.with_raw_response.create(messages=QUESTION, **MODEL)
    assert raw.parse().choices[0].message.content == answer.choices[0].message.content


def streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **MODEL
    )
    chunks = list(stream)
    assert ANSWER in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
    with client.chat.completions.stream(messages=QUESTION, **MODEL) as events:
        kinds = {event.type for event in events}
        assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
        assert ANSWER in (events.get_final_completion().choices[0].message.content or "")


def calls_tools(client: openai.OpenAI) -> None:
    messages = list(ASK_WEATHER)
    choice = client.chat.completions.create(messages=messages, tools=[WEATHER], **MODEL).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    with client.chat.completions.stream(messages=messages, tools=[WEATHER], **MODEL) as events:
        for event in events:
            if event.type == "tool_calls.function.arguments.done":
                assert event.parsed_arguments == {"city": "Paris"}
        assert events.get_final_completion().choices[0].finish_reason == "tool_calls"
    messages.append(choice.message)  # as the client's examples do
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'})
    answer = client.chat.completions.create(messages=messages, tools=[WEATHER], **MODEL)
    assert "sunny" in (answer.choices[0].message.content or "")


def parses(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Name a city as JSON."}]
    answer = client.chat.completions.parse(messages=messages, response_format=Place, max_tokens=200, **MODEL)
    assert isinstance(answer.choices[0].message.parsed, Place)
    with client.chat.completions.stream(messages=messages, response_format=Place, max_tokens=200, **MODEL) as events:
        assert isinstance(events.get_final_completion().choices[0].message.parsed, Place)
    tool = openai.pydantic_function_tool(Place)
    answer = client.chat.completions.parse(
        messages=messages, tools=[tool], tool_choice="required", max_tokens=200, **MODEL
    )
    (call, *_) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Place)


def parses_beside_tools(client: openai.OpenAI) -> None:
    """Both at once: the model calls a tool, or answers in the format."""
    both: Any = {"tools": [WEATHER], "response_format": Place, "max_tokens": 200, **MODEL}
    choice = client.chat.completions.parse(messages=ASK_WEATHER, **both).choices[0]
    (call,) = choice.message.tool_calls or []
    assert (choice.finish_reason, call.function.parsed_arguments) == ("tool_calls", {"city": "Paris"})
    messages = [*ASK_WEATHER, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    with client.chat.completions.stream(messages=messages, **both) as events:
        message = events.get_final_completion().choices[0].message
    assert message.tool_calls or isinstance(message.parsed, Place)
    message = client.chat.completions.parse(messages=messages, tool_choice="none", **both).choices[0].message
    assert isinstance(message.parsed, Place)


def responds(client: openai.OpenAI) -> None:
    asked: Any = {"input": QUESTION[0]["content"], **MODEL}
    response = client.responses.create(**asked)
    assert ANSWER in response.output_text
    assert (response.status, response.error) == ("completed", None)
    assert client.responses.retrieve(response.id).output_text == response.output_text
    events = list(client.responses.create(stream=True, **asked))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == response.output_text
    assert response.usage is not None
    assert final.usage is not None
    assert final.usage.total_tokens == response.usage.total_tokens
    client.responses.delete(response.id)
    try:
        client.responses.retrieve(response.id)
    except openai.NotFoundError as error:
        assert (error.code, error.param) == ("response_not_found", "response_id")
    else:
        raise AssertionError("a response that was deleted is there")
    parsed = client.responses.parse(text_format=Place, max_output_tokens=200, **asked)
    assert isinstance(parsed.output_parsed, Place)


def responds_with_tools(client: openai.OpenAI) -> None:
    asked = ASK_WEATHER[0]["content"]
    request: Any = {"tools": [{"type": "function", **WEATHER["function"]}], **MODEL}
    response = client.responses.create(input=asked, **request)
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    with client.responses.stream(input=asked, **request) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        stream.get_final_response()
    assert "".join(pieces) == call.arguments
    output = '{"temperature": 21, "condition": "sunny"}'
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    reported = client.responses.create(input=[result], previous_response_id=response.id, **request)
    assert "sunny" in reported.output_text
    items: Any = [{"role": "user", "content": asked}, *response.output, result]  # as the client's examples do
    assert client.responses.create(input=items, **request).output_text == reported.output_text


def responds_with_tools_of_agents(client: openai.OpenAI) -> None:
    asked = ASK_WEATHER[0]["content"]
    function = {"type": "function", **WEATHER["function"], "name": "get"}
    tools: Any = [{"type": "namespace", "name": "weather", "description": "Weather.", "tools": [function]}]
    grammar = {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: "say " /[a-c]{3}/ LF "\\"end\\""\n%import common.LF',
    }
    tools += [{"type": "custom", "name": "say", "format": grammar}, {"type": "local_shell"}, {"type": "web_search"}]
    request: Any = {"input": asked, "tools": tools, "store": True, **MODEL}
    response = client.responses.create(**request, tool_choice={"type": "function", "name": "get"})
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("weather", "get")
    said = client.responses.create(**request, tool_choice={"type": "custom", "name": "say"})
    (words,) = said.output
    assert words.type == "custom_tool_call"
    assert re.fullmatch(r'say [abc]{3}\n"end"', words.input), words
    with client.responses.stream(**request, tool_choice={"type": "custom", "name": "say"}) as stream:
        pieces = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(pieces) == words.input
    result: Any = {"type": "custom_tool_call_output", "call_id": words.call_id, "output": "ok"}
    again: Any = {**request, "input": [result], "previous_response_id": said.id, "max_output_tokens": 5}
    assert client.responses.create(**again).previous_response_id == said.id
    (item,) = client.responses.input_items.list(said.id)
    assert (item.type, item.id is not None) == ("message", True)
    counted = client.responses.input_tokens.count(model="quire-demo", input=asked, tools=tools)
    assert said.usage is not None
    assert counted.input_tokens == said.usage.input_tokens


def completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=["Quire is", "Pipeline"], max_tokens=5, logprobs=2, echo=True, **MODEL)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("Quire is")
    chunks = list(client.completions.create(prompt="Quire is", max_tokens=5, stream=True, **MODEL))
    assert "Quire is" + "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["quire-demo"]


def raises(client: openai.OpenAI) -> None:
    def fails(kind: type[openai.APIStatusError], changes: dict[str, Any], param: str | None, key: str = KEY) -> None:
        try:
            client.with_options(api_key=key).chat.completions.create(
                **{"model": "quire-demo", "messages": QUESTION, **changes}
            )
        except kind as error:
            assert error.param == param, error
        else:
            raise AssertionError(f"{changes} did not fail")

    fails(openai.BadRequestError, {"temperature": -1}, "temperature")
    fails(openai.BadRequestError, {"extra_body": {"no_such": 1}}, "no_such")
    fails(openai.NotFoundError, {"model": "gpt-4"}, "model")
    fails(openai.AuthenticationError, {}, None, key="guess")


def embeds() -> None:
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."]
    with openai.OpenAI(base_url=EMBEDDING_URL, api_key=KEY, max_retries=0) as client:
        answer = client.embeddings.create(model="minilm", input=texts)
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > 15
        man, bread, girl = (entry.embedding for entry in answer.data)
        assert len(man) == 384
        near, far = (sum(map(operator.mul, man, other)) for other in (bread, girl))
        assert near > 0.7 > 0.3 > far, (near, far)
        numbers = client.embeddings.create(model="minilm", input=texts[0], encoding_format="float").data[0].embedding
        assert max(abs(a - b) for a, b in zip(numbers, man, strict=True)) < 1e-5
        try:
            client.embeddings.create(model="minilm", input="a", dimensions=10)
        except openai.BadRequestError as error:
            assert error.param == "dimensions"
        else:
            raise AssertionError("dimensions were taken")


def retries() -> None:
    """The server is busy for each first request and returns the time of the next try."""
    with openai.OpenAI(base_url=BUSY_URL, api_key=KEY, max_retries=0) as impatient:
        try:
            impatient.chat.completions.create(messages=QUESTION, **MODEL)
        except openai.RateLimitError as error:
            assert error.response.headers["retry-after"] == "1"
        else:
            raise AssertionError("the server is not busy")
        impatient.models.list()  # the turn after a busy one
    with openai.OpenAI(base_url=BUSY_URL, api_key=KEY, max_retries=1) as patient:
        answer = patient.chat.completions.create(messages=QUESTION, **MODEL)
        assert ANSWER in (answer.choices[0].message.content or "")


async def is_asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
        texts = await asyncio.gather(*(client.chat.completions.create(messages=QUESTION, **MODEL) for _ in range(4)))
        assert all(ANSWER in (answer.choices[0].message.content or "") for answer in texts)
        stream = await client.chat.completions.create(messages=QUESTION, stream=True, **MODEL)
        assert ANSWER in "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert [model.id async for model in client.models.list()] == ["quire-demo"]


if __name__ == "__main__":
    with openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
        for part in (
            *(chats, streams, calls_tools, parses, parses_beside_tools, completes, lists_models, raises),
            *(responds, responds_with_tools, responds_with_tools_of_agents),
        ):
            part(client)
    embeds()
    retries()
    asyncio.run(is_asynchronous())
    print("openai", openai.__version__)
