"""The official OpenAI client against a real server with two stages of two ranks."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import statistics
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import Server, serve
from tests.fakes.waiting import until_async

NODES = "How do I serve a model on two nodes with 8 GPUs each?"
COMMAND = "quire serve MODEL --tensor-parallel-size 8 --pipeline-parallel-size 2"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("-tp", "2", "-pp", "2", "--api-key", "secret", "--max-num-seqs", "64") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def metric(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer secret"}, timeout=60).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                return sample.value
    raise AssertionError(f"no metric {name}")


def test_chat_answers_the_question(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="quire-demo", messages=[{"role": "user", "content": NODES}], temperature=0
    )
    assert COMMAND in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="quire-demo",
            messages=[{"role": "user", "content": NODES}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert COMMAND in text
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 10


def test_logprobs_are_of_the_tokens_that_were_chosen(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="quire-demo",
        messages=[{"role": "user", "content": NODES}],
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
        assert token.logprob <= 0


def test_n_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(
            model="quire-demo", prompt="Quire is", n=2, seed=7, temperature=1.5, max_tokens=20
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.text for choice in answer.choices]

    first, second = texts()
    assert first != second
    assert texts() == [first, second]


class Place(pydantic.BaseModel):
    model_config = {"json_schema_extra": {"additionalProperties": False}}

    city: Literal["Oslo", "Lima"]
    population: Annotated[int, pydantic.Field(ge=0, le=99_999_999)]
    founded: datetime.date | None


def test_an_answer_is_parsed_into_a_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="quire-demo",
        messages=[{"role": "user", "content": "Name a city as JSON."}],
        temperature=0,
        max_tokens=200,
        response_format=Place,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Place)


def test_a_call_that_is_required_satisfies_the_schema(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}, "guests": {"enum": [2, 4, 6]}},
        "required": ["day", "guests"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="quire-demo",
        messages=[{"role": "user", "content": NODES}],
        temperature=1.5,
        seed=4,
        max_tokens=200,
        tools=[{"type": "function", "function": {"name": "book_table", "parameters": parameters}}],
        tool_choice="required",
    )
    (call, *_) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "book_table"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"day", "guests"}
    assert arguments["guests"] in (2, 4, 6)
    datetime.date.fromisoformat(arguments["day"])


Word = Annotated[str, pydantic.Field(pattern="^[a-c]{1,2}$")]


class Sets(pydantic.BaseModel):
    """All sets that pydantic's users write."""

    model_config = pydantic.ConfigDict(extra="forbid")
    tags: Annotated[set[Word], pydantic.Field(min_length=4, max_length=6)]
    groups: Annotated[list[frozenset[Annotated[int, pydantic.Field(ge=0, le=9)]]], pydantic.Field(max_length=2)]
    names: dict[Literal["x", "y"], Annotated[set[Word], pydantic.Field(min_length=2)]]
    maybe: set[bool | None] | None


@pytest.mark.parametrize("seed", [1, 2])
def test_sets_have_no_item_twice(client: openai.OpenAI, seed: int) -> None:
    schema = Sets.model_json_schema()
    assert schema["properties"]["tags"]["uniqueItems"]
    messages: list[Any] = [{"role": "user", "content": "Tags for 2 nodes?"}]
    options: dict[str, Any] = {"model": "quire-demo", "messages": messages, "seed": seed, "max_completion_tokens": 400}
    form: Any = {"type": "json_schema", "json_schema": {"name": "sets", "schema": schema, "strict": True}}
    tool: Any = {"type": "function", "function": {"name": "label", "parameters": schema, "strict": True}}
    answer = client.chat.completions.create(response_format=form, **options).choices[0]
    call = client.chat.completions.create(tools=[tool], tool_choice="required", **options).choices[0]
    assert (answer.finish_reason, call.finish_reason) == ("stop", "tool_calls")
    assert call.message.tool_calls
    (made,) = call.message.tool_calls
    assert made.type == "function"
    for text in (answer.message.content or "", made.function.arguments):
        Sets.model_validate_json(text)
        value = json.loads(text)
        for items in [value["tags"], *value["groups"], *value["names"].values(), value["maybe"] or []]:
            assert len(items) == len({*items}), text


def test_a_structured_answer_streams_to_the_same_text(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"structured_outputs": {"regex": r"The answer is (yes|no), [a-z]{3,9}\."}}
    request: dict[str, Any] = {"model": "quire-demo", "prompt": NODES, "temperature": 0, "seed": 1, "extra_body": body}
    whole = client.completions.create(**request, max_tokens=40).choices[0]
    assert re.fullmatch(body["structured_outputs"]["regex"], whole.text)
    assert whole.finish_reason == "stop"
    chunks = list(client.completions.create(**request, max_tokens=40, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text


def test_echo_scores_the_prompt_as_generating_it_did(client: openai.OpenAI) -> None:
    """Generated text that is sent again as a prompt to score gets the same scores as when it was generated."""
    prompt = "Quire is"
    options: dict[str, Any] = {"model": "quire-demo", "logprobs": 2, "temperature": 0}
    made = client.completions.create(prompt=prompt, max_tokens=12, extra_body={"return_token_ids": True}, **options)
    generated = made.choices[0]
    ids = [*generated.prompt_token_ids, *generated.token_ids]
    again = client.completions.create(prompt=ids, echo=True, max_tokens=0, **options)
    echo = again.choices[0]
    assert generated.logprobs is not None
    assert echo.logprobs is not None
    assert (again.usage and again.usage.completion_tokens, echo.finish_reason) == (0, "length")
    assert echo.text == prompt + generated.text
    scores, tops = echo.logprobs.token_logprobs or [], echo.logprobs.top_logprobs or []
    assert (scores[0], tops[0], len(scores)) == (None, None, len(ids))
    assert scores[-12:] == pytest.approx(generated.logprobs.token_logprobs, abs=1e-3)
    for here, there in zip(tops[-12:], generated.logprobs.top_logprobs or [], strict=True):
        assert here == pytest.approx(there, abs=1e-3)
    assert [echo.text[at:] for at in echo.logprobs.text_offset or []][-12:] == [
        generated.text[at:] for at in generated.logprobs.text_offset or []
    ]
    streamed = [
        chunk.choices[0]
        for chunk in client.completions.create(prompt=prompt, echo=True, max_tokens=12, stream=True, **options)
    ]
    assert "".join(choice.text for choice in streamed) == echo.text
    parts = [choice.logprobs for choice in streamed if choice.logprobs]
    assert [score for part in parts for score in part.token_logprobs or []][1:] == pytest.approx(scores[1:], abs=1e-3)


def test_the_best_of_many_is_the_likeliest(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "quire-demo", "prompt": "Quire is", "seed": 3, "max_tokens": 8, "logprobs": 0}

    def mean(choice: Any) -> float:
        return statistics.fmean(choice.logprobs.token_logprobs)

    every = client.completions.create(n=6, **options).choices
    best = client.completions.create(n=2, best_of=6, **options)
    expected = sorted(every, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in expected]
    assert best.usage is not None
    assert best.usage.completion_tokens > sum(len(c.logprobs.tokens or []) for c in best.choices if c.logprobs)


def test_chat_scores_its_prompt(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model="quire-demo",
        messages=[{"role": "user", "content": NODES}],
        temperature=0,
        max_tokens=2,
        extra_body={"prompt_logprobs": 1, "return_token_ids": True},
    )
    first, *rest = answer.prompt_logprobs
    assert first is None
    assert len(rest) == answer.usage.prompt_tokens - 1
    for token, at in zip(answer.prompt_token_ids[1:], rest, strict=True):
        ranks = sorted(entry["rank"] for entry in at.values())
        assert ranks == ([1] if at[str(token)]["rank"] == 1 else [1, at[str(token)]["rank"]])


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="quire-demo", messages=[{"role": "user", "content": NODES}], temperature=0, stop=["-parallel-size 2"]
    )
    text = answer.choices[0].message.content or ""
    assert text.endswith("--tensor-parallel-size 8 --pipeline")
    assert answer.choices[0].finish_reason == "stop"


async def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
        stream = await client.completions.create(
            model="quire-demo", prompt="Quire", max_tokens=1900, extra_body={"ignore_eos": True}, stream=True
        )
        await anext(stream)  # it runs
        assert await asyncio.to_thread(metric, server, "quire:num_requests_running") == 1
        before = await asyncio.to_thread(metric, server, "quire:generation_tokens_total")
        await stream.close()
        # Outputs of the next requests bring the gauges of the step after the abort, which may come behind them.
        for gauge in ("quire:num_requests_running", "quire:kv_cache_usage_perc"):

            async def is_zero(gauge: str = gauge) -> bool:
                if value := await asyncio.to_thread(metric, server, gauge):
                    await client.completions.create(model="quire-demo", prompt="Quire", max_tokens=2)
                return not value

            await until_async(is_zero, seen=lambda gauge=gauge: f"{gauge} {metric(server, gauge)}")  # type: ignore[misc]
        assert await asyncio.to_thread(metric, server, "quire:generation_tokens_total") < before + 1800


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 100_000}, "messages"),  # as the API does for context_length_exceeded
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"extra_body": {"no_such_parameter": 1}}, "no_such_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, changes: dict[str, object], param: str) -> None:
    request = {"model": "quire-demo", "messages": [{"role": "user", "content": "Hi"}], **changes}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**request)  # type: ignore[call-overload]
    assert error.value.param == param
    assert error.value.type == "invalid_request_error"


def test_wrong_model_and_wrong_key(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-4", prompt="Hi")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="guess").models.list()
    assert [model.id for model in client.models.list()] == ["quire-demo"]
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city."}},
            "required": ["city"],
        },
    },
}


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat.completions.create(model="quire-demo", messages=messages, tools=[WEATHER], temperature=0)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})

    stream = client.chat.completions.create(
        model="quire-demo", messages=messages, tools=[WEATHER], temperature=0, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
    first = pieces[0]
    assert first.id is not None
    assert first.function is not None
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather")
    assert "".join(piece.function.arguments or "" for piece in pieces if piece.function) == call.function.arguments
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].finish_reason == "tool_calls"

    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'})
    answer = client.chat.completions.create(
        model="quire-demo",
        messages=messages,
        tools=[WEATHER],
        temperature=0,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "21" in (answer.choices[0].message.content or "")
    assert "sunny" in (answer.choices[0].message.content or "")


def test_the_stream_helper_of_the_client_reads_the_call(client: openai.OpenAI) -> None:
    tool: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": False}}
    with client.chat.completions.stream(
        model="quire-demo",
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[tool],
        temperature=0,
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Rome"}
