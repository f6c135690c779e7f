"""Anthropic's official client: run with QUIRE_URL, QUIRE_BUSY_URL and QUIRE_KEY in the environment."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import anthropic

URL, BUSY_URL, KEY = (os.environ[name] for name in ("QUIRE_URL", "QUIRE_BUSY_URL", "QUIRE_KEY"))
QUESTION: Any = [{"role": "user", "content": "How do I serve a model on two nodes with 8 GPUs each?"}]
ANSWER = "quire serve MODEL --tensor-parallel-size 8 --pipeline-parallel-size 2"
MODEL: Any = {"model": "quire-demo", "max_tokens": 200}
GREEDY: Any = {"extra_body": {"temperature": 0}}
"""Some versions of the client do not let all models have a temperature."""
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city."}},
        "required": ["city"],
    },
}
ASK_WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def root(url: str) -> str:
    """The URL as this client wants it."""
    return url.removesuffix("/v1")


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def talks(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=QUESTION, **MODEL, **GREEDY)
    assert ANSWER in text_of(message)
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    message = client.messages.create(messages=QUESTION, stop_sequences=["-parallel-size 2"], **MODEL, **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "-parallel-size 2")
    begun: Any = [*QUESTION, {"role": "assistant", "content": "Run `quire serve MODEL --tensor"}]
    assert "-parallel-size 8" in text_of(client.messages.create(messages=begun, **MODEL, **GREEDY))


def streams(client: anthropic.Anthropic) -> None:
    whole = text_of(client.messages.create(messages=QUESTION, **MODEL, **GREEDY))
    events = list(client.messages.create(messages=QUESTION, stream=True, **MODEL, **GREEDY))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    with client.messages.stream(messages=QUESTION, **MODEL, **GREEDY) as stream:
        assert "".join(stream.text_stream) == whole
        final = stream.get_final_message()
    assert (text_of(final), final.stop_reason) == (whole, "end_turn")
    assert final.usage.output_tokens > 0


def reuses_prefixes(client: anthropic.Anthropic) -> None:
    """Claude Code's first block is another one in each request."""
    turns: Any = QUESTION
    for number in range(3):
        header = f"x-anthropic-billing-header: cc_version=2.1.120.{number}ab; cc_entrypoint=cli; cch={number}f00d;"
        system: Any = [{"type": "text", "text": text} for text in (header, "You are an assistant. " * 30)]
        message = client.messages.create(system=system, messages=turns, **MODEL, **GREEDY)
        usage = message.usage
        cached = usage.cache_read_input_tokens or 0
        assert not number or cached > 0.7 * (usage.input_tokens + cached), usage
        turns = [*turns, {"role": "assistant", "content": text_of(message)}, {"role": "user", "content": "And then?"}]


def calls_tools(client: anthropic.Anthropic) -> None:
    request: Any = {"tools": [WEATHER], **MODEL, **GREEDY}
    message = client.messages.create(messages=ASK_WEATHER, **request)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    with client.messages.stream(messages=ASK_WEATHER, **request) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
    assert json.loads("".join(pieces)) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    reported: Any = [
        *ASK_WEATHER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert "sunny" in text_of(client.messages.create(messages=reported, **request))
    forced = client.messages.create(messages=QUESTION, tool_choice={"type": "tool", "name": "get_weather"}, **request)
    assert [block.name for block in forced.content if block.type == "tool_use"] == ["get_weather"]


def counts_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="quire-demo", messages=QUESTION)
    usage = client.messages.create(messages=QUESTION, **MODEL, **GREEDY).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    more = client.messages.count_tokens(model="quire-demo", messages=QUESTION, tools=[WEATHER], system="Be kind.")
    assert more.input_tokens > counted.input_tokens


def raises(client: anthropic.Anthropic) -> None:
    def fails(kind: type[anthropic.APIStatusError], said: str, key: str = KEY, **changes: Any) -> None:
        try:
            client.with_options(api_key=key).messages.create(**{"messages": QUESTION, **MODEL, **changes})
        except kind as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"{changes} did not fail")

    fails(anthropic.BadRequestError, "no_such", extra_body={"no_such": 1})
    fails(anthropic.NotFoundError, "not_found_error", model="claude")
    fails(anthropic.AuthenticationError, "authentication_error", key="guess")


def retries() -> None:
    with anthropic.Anthropic(base_url=root(BUSY_URL), auth_token=KEY, max_retries=0) as impatient:
        try:
            impatient.messages.create(messages=QUESTION, **MODEL)
        except anthropic.RateLimitError:
            pass
        else:
            raise AssertionError("the server is not busy")
        impatient.models.list()  # the turn after a busy one
    with anthropic.Anthropic(base_url=root(BUSY_URL), auth_token=KEY, max_retries=1) as patient:
        assert ANSWER in text_of(patient.messages.create(messages=QUESTION, **MODEL, **GREEDY))


async def is_asynchronous() -> None:
    async with anthropic.AsyncAnthropic(base_url=root(URL), api_key=KEY, max_retries=0) as client:
        asked = (client.messages.create(messages=QUESTION, **MODEL, **GREEDY) for _ in range(4))
        assert all(ANSWER in text_of(message) for message in await asyncio.gather(*asked))


if __name__ == "__main__":
    with anthropic.Anthropic(base_url=root(URL), api_key=KEY, max_retries=0) as client:
        for part in (talks, streams, reuses_prefixes, calls_tools, counts_tokens, raises):
            part(client)
    retries()
    asyncio.run(is_asynchronous())
    print("anthropic", anthropic.__version__)
