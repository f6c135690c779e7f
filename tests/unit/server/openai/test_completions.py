"""The HTTP API as the official client sees it, with an echo for a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ValidationError

from quire.engine.config.engine_config import EngineConfig
from quire.server.client.admission import QueueFull
from quire.server.config.server_options import RestartPolicy
from quire.server.openai.completions import CompletionRequest
from quire.server.openai.embeddings import EmbeddingRequest
from quire.server.openai.tokenize import DetokenizeRequest
from tests.fakes import fake_core
from tests.fakes.api_server import Server, run_server
from tests.fakes.tokenizers import byte_level
from tests.fakes.waiting import until_async

USER: Any = [{"role": "user", "content": "hello world"}]
ECHO = "user\nhello world\nassistant\n"


def text(stream: str) -> str:
    """All text of a streamed completion."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def refused(server: Server, route: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    """The error object of a request that is turned away."""
    response = await server.http.post(f"/v1/{route}", json=body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def test_chat(server: Server) -> None:
    answer = await server.openai.chat.completions.create(model="echo", messages=USER)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ECHO, "stop")
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    prompt = await server.chat_ids(USER)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_chat_stream_says_the_same_in_pieces(server: Server) -> None:
    stream = await server.openai.chat.completions.create(
        model="alias", messages=USER, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.model for chunk in chunks} == {"alias"}
    *parts, last = chunks
    assert last.usage is not None
    assert not last.choices
    assert not any(part.usage for part in parts)
    for index in range(2):
        mine = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == ECHO
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]


async def test_chat_logprobs(server: Server) -> None:
    answer = await server.openai.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "é"}], logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    assert (
        bytes(b for entry in logprobs.content for b in entry.bytes or []).decode() == "user\né\nassistant\n<|im_end|>"
    )
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, -1.5, -9999.0]


async def test_chat_contents_and_roles(server: Server) -> None:
    answer = await server.openai.chat.completions.create(
        model="echo",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "refusal": None, "audio": None},
            {"role": "tool", "tool_call_id": "1", "content": "c"},
        ],
    )
    assert answer.choices[0].message.content == "system\nbe brief\nuser\na\nb\nassistant\n\ntool\nc\nassistant\n"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("hello", ["hello"]), (["hello", "你好 😀"], ["hello", "你好 😀"]), ([70, 71], None), ([[70], [71, 72]], None)],
)
async def test_completions_of_every_kind_of_prompt(server: Server, prompt: Any, texts: list[str] | None) -> None:
    answer = await server.openai.completions.create(model="echo", prompt=prompt, max_tokens=60, n=2)
    if texts is None:
        many = prompt if isinstance(prompt[0], list) else [prompt]
        texts = [server.tokenizer.decode(ids, skip_special_tokens=True) for ids in many]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(texts)))
    assert [choice.text for choice in answer.choices] == [text for text in texts for _ in range(2)]
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"


async def test_completions_default_to_16_tokens(server: Server) -> None:
    answer = await server.openai.completions.create(model="echo", prompt="hello " * 20)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


async def test_completions_logprobs_and_stream(server: Server) -> None:
    stream = await server.openai.completions.create(model="echo", prompt="hello world", logprobs=2, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    whole = (await server.openai.completions.create(model="echo", prompt="hello world", logprobs=2)).choices[0]
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [entry for choice in choices if choice.logprobs for entry in getattr(choice.logprobs, name)]
        assert pieces == getattr(whole.logprobs, name)
    assert "".join(whole.logprobs.tokens or []) == "hello world<|im_end|>"
    assert whole.logprobs.text_offset == [
        len("".join((whole.logprobs.tokens or [])[:at])) for at in range(len(whole.logprobs.tokens or []))
    ]
    assert "".join(choice.text for choice in choices) == whole.text == "hello world"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_request_in_the_engine_too(server: Server, stream: bool) -> None:
    body = {"prompt": "hello world", "stop": ["o w"], "ignore_eos": True, "max_tokens": 100, "stream": stream}
    response = await server.http.post("/v1/completions", json=body)
    choices = [
        json.loads(line[6:])["choices"][0] for line in response.text.splitlines() if line.startswith("data: {")
    ] or response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "hell"
    assert choices[-1]["finish_reason"] == "stop"
    await server.until_idle()


async def test_parameters_reach_the_engine(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Any = []
    send = server.frontend.client._send
    monkeypatch.setattr(server.frontend.client, "_send", lambda message, to: sent.append(message) or send(message, to))
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
    }
    others = {"n": 2, "logit_bias": {"11": -5}, "top_logprobs": 4, "logprobs": True}
    others |= {"max_completion_tokens": 9, "max_tokens": 5}  # the newer name takes precedence
    text_only = {"stop": "x", "skip_special_tokens": False, "include_stop_str_in_output": True, "user": "me"}
    body = {"messages": USER, "priority": -3, **given, **others, **text_only}
    response = await server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert len(sent) == 2
    for submit in sent:
        assert submit.priority == -3
        for name, value in (given | {"n": 1, "logit_bias": {11: -5}, "max_tokens": 9, "logprobs": 4}).items():
            assert getattr(submit.params, name) == value or name == "seed"
        assert (submit.params.stop, submit.params.skip_special_tokens) == ([], True)
    assert sent[0].params.seed == 5 != sent[1].params.seed


async def test_defaults_come_from_the_model(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {"temperature": 0.25, "top_k": 5}
    async with run_server(replace(config, model=replace(config.model, sampling_defaults=defaults))) as server:
        sent: Any = []
        send = server.frontend.client._send
        monkeypatch.setattr(
            server.frontend.client, "_send", lambda message, to: sent.append(message) or send(message, to)
        )
        for body in ({}, {"temperature": 1.0, "min_tokens": 20}):
            response = await server.http.post("/v1/chat/completions", json={"messages": USER, **body})
            assert response.status_code == 200, response.text
        found = [(m.params.temperature, m.params.top_k, m.params.top_p, m.params.max_tokens) for m in sent]
        assert found == [(0.25, 5, 1.0, None), (1.0, 5, 1.0, None)]


@pytest.mark.parametrize(("limit", "expected"), [(None, [9, 12, 12]), (5, [5, 5, 5])])
async def test_the_length_of_the_output_comes_from_the_model(
    config: EngineConfig,
    core_mode: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    expected: list[int],
) -> None:
    model = replace(config.model, sampling_defaults={"max_tokens": 9}, max_output_tokens=limit)
    async with run_server(replace(config, model=model)) as server:
        sent: Any = []
        send = server.frontend.client._send
        monkeypatch.setattr(
            server.frontend.client, "_send", lambda message, to: sent.append(message) or send(message, to)
        )
        for route, body in (
            ("chat/completions", {"messages": USER}),
            ("chat/completions", {"messages": USER, "max_tokens": 12}),
            ("completions", {"prompt": "x", "max_tokens": 12}),
        ):
            response = await server.http.post(f"/v1/{route}", json=body)
            assert response.status_code == 200, response.text
        assert [message.params.max_tokens for message in sent] == expected


async def test_logprobs_of_given_tokens(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(config) as server:
        sent: Any = []
        send = server.frontend.client._send
        monkeypatch.setattr(
            server.frontend.client, "_send", lambda message, to: sent.append(message) or send(message, to)
        )
        for route, body in (
            ("completions", {"prompt": "x", "logprobs": 0}),
            ("chat/completions", {"messages": USER, "logprobs": True}),
        ):
            response = await server.http.post(f"/v1/{route}", json=body | {"logprob_token_ids": [70, 5, 70]})
            assert response.status_code == 200, response.text
        assert [(each.params.logprob_token_ids, each.params.logprobs) for each in sent] == [([70, 5], 2)] * 2
        for route, body, message in (
            ("completions", {"prompt": "x"}, "requires logprobs"),
            ("chat/completions", {"messages": USER}, "requires logprobs: true"),
            ("completions", {"prompt": "x", "logprobs": 1, "logprob_token_ids": []}, "a list with token ids in it"),
            ("completions", {"prompt": "x", "logprobs": 1, "logprob_token_ids": [10**6]}, "vocabulary"),
            ("completions", {"prompt": "x", "logprobs": 1, "logprob_token_ids": [*range(21)]}, "at most 20 are"),
        ):
            error = await refused(server, route, {"logprob_token_ids": [5], **body})
            assert error["param"] == "logprob_token_ids"
            assert message in error["message"]


async def test_a_full_queue_comes_before_the_template_and_after_what_is_wrong(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise QueueFull("full")

    monkeypatch.setattr(server.frontend.client, "admit", full)
    monkeypatch.setattr(server.frontend.input_processor, "_render", None)  # which would raise TypeError
    for body, status in (({}, 429), ({"no_such_parameter": 1}, 400)):
        response = await server.http.post("/v1/chat/completions", json={"messages": USER, **body})
        assert response.status_code == status, response.text


async def test_priority_needs_its_policy(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    fcfs = replace(config, scheduler=replace(config.scheduler, policy="fcfs"))
    async with run_server(fcfs) as server:
        assert (await refused(server, "completions", {"prompt": "x", "priority": 1}))["param"] == "priority"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_request(server: Server, stream: bool) -> None:
    body = {"prompt": "hello", "ignore_eos": True, "max_tokens": 100, "stream": stream}
    for prompt in ("hello", "hello<hang>"):  # with tokens on the way, and before the first
        _, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        content = json.dumps(body | {"prompt": prompt}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        await writer.drain()
        await until_async(lambda: server.frontend.client._running)
        writer.close()
        await writer.wait_closed()
        await until_async(lambda: not server.frontend.client._running)
    await server.until_idle()


X = byte_level().token_to_id("x")
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    ("chat/completions", {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("chat/completions", {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"messages": USER, "guided_json": {}}, "guided_json"),
    ("chat/completions", {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat/completions", {"messages": USER, "n": 0}, "n"),
    ("chat/completions", {"messages": USER, "temperature": "hot"}, "temperature"),
    ("chat/completions", {"messages": USER, "top_k": 2**70}, "top_k"),
    ("chat/completions", {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
    (
        "chat/completions",
        {"messages": USER, "stream": True, "stream_options": {"chunk_size": 1}},
        "stream_options.chunk_size",
    ),
    ("chat/completions", {"messages": USER, "prompt_logprobs": -1}, "prompt_logprobs"),
    ("chat/completions", {"messages": USER, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ("chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ("chat/completions", {"messages": USER, "truncation_side": "middle"}, "truncation_side"),
    ("chat/completions", {"messages": USER, "max_tokens": 0}, "max_tokens"),
    ("chat/completions", {"messages": USER, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("chat/completions", {"messages": USER, "prediction": "x"}, "prediction"),
    ("chat/completions", {"messages": USER, "prediction": {"type": "file", "content": "x"}}, "prediction.type"),
    ("chat/completions", {"messages": USER, "prediction": {"type": "content"}}, "prediction.content"),
    ("chat/completions", {"messages": USER, "prediction": {"type": "content", "content": "\ud800"}}, "prediction"),
    ("chat/completions", {"messages": USER, "cache_salt": ""}, "cache_salt"),
    ("chat/completions", {"messages": USER, "cache_salt": "\ud800"}, "cache_salt"),
    ("chat/completions", {"messages": USER, "request_id": "a b"}, "request_id"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0].type",
    ),
    ("completions", {"prompt": "x", "no_such_thing": 1}, "no_such_thing"),
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
    ("completions", {"prompt": "x", "logprobs": -1}, "logprobs"),
    ("completions", {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
    ("completions", {"prompt": "x", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
    ("completions", {"prompt": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ("completions", {"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
    ("completions", {"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
    ("completions", {"prompt": "x", "best_of": 200}, "best_of"),
    ("completions", {"prompt": "x", "n": 0}, "n"),
    ("completions", {"prompt": "x", "use_beam_search": True, "stop": "a"}, "stop"),
    ("completions", {"prompt": "x", "use_beam_search": True, "best_of": 2}, "best_of"),
    ("completions", {"prompt": "x", "length_penalty": 2.0}, "length_penalty"),
    ("completions", {"prompt": "x", "spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": "x", "stop": [""]}, "stop"),
    ("completions", {"prompt": "x", "logit_bias": {"320": 1}}, "logit_bias"),
    ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ("completions", {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
    ("completions", {"prompt": "x", "allowed_token_ids": [320]}, "allowed_token_ids"),
    ("completions", {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
    ("completions", {"prompt": "x", "bad_words": [" "]}, "bad_words"),
    ("completions", {"prompt": "x", "echo": True, "logprobs": 0, "prompt_logprobs": -5}, "prompt_logprobs"),
    ("completions", {"prompt": "x", "bad_words": ["x"] * 2000}, "bad_words"),
    ("completions", {"prompt": "x", "allowed_token_ids": [X], "bad_words": ["x"]}, "allowed_token_ids"),
    ("completions", {"prompt": "x", "allowed_token_ids": [fake_core.EOS], "min_tokens": 1}, "allowed_token_ids"),
    ("completions", {"prompt": "x", "bad_word_ids": [[1]]}, "bad_word_ids"),
    ("completions", {"prompt": "x", "temperature": float("inf")}, "temperature"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"prompt": [5, 320]}, "prompt"),
    ("completions", {"prompt": {"a": 1}}, "prompt"),
    ("completions", {"prompt": [1, "x"]}, "prompt"),
    ("completions", {}, "prompt"),
]


async def test_bad_parameters_are_refused_by_name(server: Server) -> None:
    for route, body, param in REFUSED:
        response = await server.http.post(
            f"/v1/{route}", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert param.split(".")[-1].split("[")[0] in error["message"]
    assert not server.frontend.client._running


async def test_values_that_ask_for_nothing_are_accepted(server: Server) -> None:
    neutral = {
        "echo": False,
        "suffix": None,
        "best_of": 1,
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "structured_outputs": None,
    }
    response = await server.http.post("/v1/completions", json={"prompt": "hi", **neutral})
    assert response.status_code == 200, response.text
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    response = await server.http.post("/v1/chat/completions", json={"messages": USER, **tools})
    assert response.status_code == 200, response.text


async def test_too_long_is_refused_with_the_numbers(server: Server) -> None:
    long = await refused(server, "completions", {"prompt": [70] * 200})
    assert (long["code"], long["param"]) == ("context_length_exceeded", "prompt")
    assert "200" in long["message"]
    assert "128" in long["message"]
    together = await refused(server, "completions", {"prompt": [70] * 100, "max_tokens": 29})
    assert together["code"] == "context_length_exceeded"
    assert "129" in together["message"]
    chat = await refused(server, "chat/completions", {"messages": USER, "max_completion_tokens": 128})
    assert (chat["code"], chat["param"]) == ("context_length_exceeded", "messages")
    body = {"messages": [{"role": "user", "content": "a b " * 100}], "truncate_prompt_tokens": 128}
    full = await refused(server, "chat/completions", body)
    assert full["message"].endswith("128 tokens, output included, but the prompt has 128")


async def test_chat_may_use_the_rest_of_the_length(server: Server) -> None:
    answer = await server.openai.chat.completions.create(model="echo", messages=USER, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (128, "length")


async def test_errors_have_one_shape(server: Server) -> None:
    assert (await refused(server, "chat/completions", {"model": "gpt-9", "messages": USER}, 404))["code"] == (
        "model_not_found"
    )
    assert "/v1/nothing" in (await refused(server, "nothing", {}, 404))["message"]
    response = await server.http.get("/v1/completions")
    assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")
    for broken in ("{", "[]", '"x"', ""):
        response = await server.http.post(
            "/v1/completions", content=broken, headers={"Content-Type": "application/json"}
        )
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        await server.openai.chat.completions.create(model="gpt-9", messages=USER)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_leaves_the_others_alone(server: Server, stream: bool) -> None:
    other = asyncio.create_task(server.openai.completions.create(model="echo", prompt="hello", max_tokens=50))

    async def fail() -> None:
        answer: Any = await server.openai.completions.create(model="echo", prompt="a<fail>", stream=stream)
        [_ async for _ in answer]

    with pytest.raises(openai.APIError, match="KV cache is too small"):
        await fail()
    assert (await other).choices[0].text == "hello"


@pytest.mark.parametrize(("command", "reason"), [("<die>", "rank 1 was killed"), ("<vanish>", "exited with code 3")])
async def test_a_request_that_kills_the_core_is_given_up_and_the_others_go_on(
    config: EngineConfig, core_mode: Callable[[str], None], tmp_path: Path, command: str, reason: str
) -> None:
    (gate := tmp_path / "gate").touch()
    core_mode(f"held until {gate}")
    body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
    async with run_server(config) as server:
        undisturbed = (await server.http.post("/v1/completions", json=body)).text
        gate.unlink()
        other = asyncio.create_task(server.http.post("/v1/completions", json=body, timeout=60))
        await until_async(lambda: any(each.delivered for each in server.frontend.client._running.values()))
        kills = asyncio.create_task(server.openai.completions.create(model="echo", prompt=command))
        died = 'quire:engine_deaths_total{engine="0",model_name="echo"} %d.0'
        shown = list[str]()

        async def has_died_twice() -> bool:
            metrics = (await server.http.get("/metrics")).text.splitlines()
            shown[:] = [line for line in metrics if line.startswith("quire:engine_deaths_total")]
            return died % 2 in shown

        await until_async(has_died_twice, seen=lambda: shown)
        gate.touch()  # it goes on alone
        with pytest.raises(openai.InternalServerError, match=f"the engine died 3 times .*{reason}"):
            await kills
        assert text((await other).text) == text(undisturbed)
        assert (await server.http.get("/health")).status_code == 200
        assert died % 3 in (await server.http.get("/metrics")).text


@pytest.mark.parametrize(("command", "reason"), [("<die>", "rank 1 was killed"), ("<vanish>", "exited with code 3")])
async def test_without_restarts_every_request_and_health_report_the_death(
    config: EngineConfig,
    core_mode: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    reason: str,
) -> None:
    monkeypatch.setattr("quire.server.client.engine_manager.RestartPolicy", lambda: RestartPolicy(is_enabled=False))
    async with run_server(config) as server:
        hanging = {"prompt": "a<hang>", "stream": True}
        waiting = asyncio.create_task(server.http.post("/v1/completions", json=hanging, timeout=60))
        await until_async(lambda: server.frontend.client._running)
        with pytest.raises(openai.InternalServerError, match=reason):
            await server.openai.completions.create(model="echo", prompt=command)
        *_, event, done = [line for line in (await waiting).text.splitlines() if line]
        assert reason in json.loads(event.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        health = await server.http.get("/health")
        assert health.status_code == 503
        assert reason in health.json()["reason"]
        assert reason in (await refused(server, "completions", {"prompt": "x"}, 503))["message"]


async def test_health_asks_the_core(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await server.http.get("/health")).status_code == 200
    await server.openai.completions.create(model="echo", prompt="a<mute>")
    monkeypatch.setattr("quire.server.client.replica_calls.PROBE_SECONDS", 0.2)
    response = await server.http.get("/health")
    assert response.status_code == 503
    assert "has not answered" in response.json()["reason"]
    assert "the engine has not answered for 0.2 seconds" in caplog.text


async def test_while_loading(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    core_mode("loading")
    async with run_server(config, wait=False) as server:
        health = await server.http.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "the model is still loading")
        error = await refused(server, "chat/completions", {"messages": USER}, 503)
        assert error["message"] == "the model is still loading"
        assert (await server.http.get("/v1/models")).status_code == 200
        assert (await server.http.get("/metrics")).status_code == 200


async def test_api_key_guards_all_but_health(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config, api_key="s3cret") as server:
        assert (await server.http.get("/health")).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/docs", "/openapi.json", "/health/", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
                response = await server.http.get(path, headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await server.openai.models.list()).data[0].id == "echo"


async def test_models_version_metrics(server: Server) -> None:
    models = (await server.openai.models.list()).data
    assert [model.id for model in models] == ["echo", "alias"]
    assert (await server.http.get("/version")).json() == {"version": "0.1.0"}
    for stop in ("zzz", "lo"):
        await server.openai.completions.create(model="echo", prompt="hello", stop=stop)
    text = (await server.http.get("/metrics")).text
    assert 'quire:request_success_total{engine="0",finished_reason="stop",model_name="echo"} 2.0' in text
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert f'quire:{name}_count{{engine="0",model_name="echo"}} 2.0' in text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "inter_token_latency_seconds_bucket",
    ):
        assert f"quire:{name}{{" in text


async def test_many_streams_at_once(server: Server) -> None:
    texts = [f"hello {index} 😀 world" for index in range(100)]

    async def one(text: str) -> str:
        stream = await server.openai.completions.create(model="echo", prompt=text, max_tokens=60, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    assert await asyncio.gather(*map(one, texts)) == texts
    assert not server.frontend.client._running


def test_the_echo_knows_the_commands() -> None:
    from tests.fakes.tokenizers import COMMANDS, byte_level

    ids = [byte_level().token_to_id(command) for command in COMMANDS]
    assert ids == [fake_core.DIE, fake_core.VANISH, fake_core.FAIL, fake_core.HANG, fake_core.MUTE]


async def test_text_that_is_not_unicode_is_the_clients_error(server: Server) -> None:
    body = '{"prompt": "\\ud800"}'
    response = await server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "surrogate" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("request_type", "name"),
    [
        (CompletionRequest, "prompt"),
        (EmbeddingRequest, "input"),
        (CompletionRequest, "stop_token_ids"),
        (CompletionRequest, "allowed_token_ids"),
        (DetokenizeRequest, "tokens"),
    ],
)
def test_only_the_first_error_of_a_long_list_is_reported(request_type: type[BaseModel], name: str) -> None:
    good = {"prompt": "x"} if request_type is CompletionRequest else {}
    lists: list[Any] = [[1.5] * 50, [[1.5] * 50], [[1.5]] * 50, [*range(50), None, None], ["a", *[None] * 50]]
    for given in lists:
        with pytest.raises(ValidationError) as error:
            request_type.model_validate({**good, name: given})
        assert error.value.error_count() <= 6


async def test_a_token_that_the_model_has_no_row_for_is_the_clients_error(
    config: EngineConfig, core_mode: Callable[[str], None]
) -> None:
    """Tokenizers know added tokens, such as padding, that their model's embedding may lack."""
    small = replace(config.model.architecture, vocab_size=100)
    async with run_server(replace(config, model=replace(config.model, architecture=small))) as server:
        error = await refused(server, "completions", {"prompt": "~~~~ é"})
        assert "not in the model's vocabulary (0 to 99)" in error["message"]


async def test_a_request_may_come_again_if_the_cause_of_its_failure_passes(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_core, "FAILURE", {"error": "Too many open files", "is_unavailable": True})
    response = await server.http.post("/v1/completions", json={"prompt": "a<fail>"})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "Too many open files")
    assert response.headers["Retry-After"]


async def test_a_grammar_that_fails_at_run_time_is_the_requests_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With status 400; in a stream, and of a response that has begun, as its last event."""
    error = "structured output: after 3 tokens the grammar allows no token"
    monkeypatch.setattr(fake_core, "FAILURE", {"error": error, "is_invalid": True})
    expected = {"message": error, "type": "invalid_request_error", "param": None, "code": None}
    body = {"prompt": "a<fail>"}
    response = await server.http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]) == (400, expected)
    response = await server.http.post("/v1/completions", json={**body, "stream": True})
    assert response.status_code == 200
    assert json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["error"] == expected
    response = await server.http.post("/v1/responses", json={"input": "a<fail>", "stream": True})
    last = json.loads(response.text.strip().rpartition("\ndata: ")[2])
    assert last["response"]["error"] == {"code": "invalid_prompt", "message": error}
    lines = server.frontend.metrics.exposition().decode().splitlines()
    assert [
        line for line in lines if 'reason="invalid"' in line and line.startswith("quire:") and line.endswith(" 3.0")
    ]
