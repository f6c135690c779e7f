"""Chunks with text only are put together from bytes, and equal chunks made in the general way. Also the usage and times
of requests in responses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from starlette.requests import ClientDisconnect

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.http import response as module
from quire.server.http.response import Formatter, Usage, _frame, cancelled_without_client
from quire.server.openai.chat import ChatRequest, _ChatFormatter
from quire.server.openai.completions import CompletionRequest, _CompletionFormatter
from quire.server.parsers.events import ToolCall
from quire.server.text.inputs import GenerationInput
from quire.server.text.output_processor import TextDelta
from tests.fakes.api_server import Server, run_server
from tests.fakes.tokenizers import byte_level, wrapped

TOKENIZER = wrapped(byte_level())
HEAD, TAIL = b"data: {", b"}\n\n"


def chat(**fields: Any) -> Formatter:
    given = GenerationInput(prompts=[[1]], params=SamplingParams())
    return _ChatFormatter(TOKENIZER, ChatRequest(messages=[], **fields), given)


def completion(**fields: Any) -> Formatter:
    return _CompletionFormatter(TOKENIZER, CompletionRequest(prompt="x", **fields), [[1]], None)


@pytest.mark.parametrize("shape", [chat(), completion()])
@pytest.mark.parametrize("text", ["a", 'quote " and \\', "\0", "é😀\n\ufffd"])
def test_a_frame_around_the_text_is_the_whole_event(shape: Formatter, text: str) -> None:
    before, after = _frame(shape, 3, HEAD, TAIL)
    event = HEAD + msgspec.json.encode(shape.chunk_choice(TextDelta(3, text, [7]))) + TAIL
    assert before + msgspec.json.encode(text) + after == event


HIDDEN: dict[str, Any] = {
    "index": 1,
    "text": "t",
    "token_ids": [1],
    "num_cached_tokens": 5,
    "num_loaded_tokens": (2, 1, 1),
    "num_accepted_tokens": 2,
    "num_rejected_tokens": 1,
    "num_tokens_before_words": 1,
    "stop_reason": None,
}
"""Values that a chunk of text may have without showing them."""
SHOWN: dict[str, Any] = {
    "logprobs": [TokenLogprobs(-1.0, 1, [], [])],
    "finish_reason": "stop",
    "prompt_logprobs": PromptLogprobs(0, b"\0\0\0\0", b"\1\0\0\0", b"", b""),
    "reasoning": "r",
    "tool_calls": [ToolCall(0)],
}


def test_whatever_a_chunk_shows_beside_text_goes_the_general_way() -> None:
    """A new field of `TextDelta` must be put into one of the two."""
    assert {field.name for field in dataclasses.fields(TextDelta)} == HIDDEN.keys() | SHOWN.keys()
    plain = TextDelta(**HIDDEN)
    assert plain.is_text
    assert not TextDelta(0).is_text
    for name, value in SHOWN.items():
        assert not dataclasses.replace(plain, **{name: value}).is_text


def test_a_prompt_is_found_in_the_cache_once_for_all_its_choices() -> None:
    usage = Usage([[1, 2, 3], [4, 5]], 2)
    usage.add(TextDelta(index, num_cached_tokens=cached) for index, cached in ((0, 2), (1, 2), (2, 1), (3, 1)))
    assert usage.object()["prompt_tokens_details"] == {"cached_tokens": 3}


def test_cached_tokens_are_told_by_tier() -> None:
    usage = Usage([[1] * 64, [2] * 64], 1)
    usage.add([TextDelta(0, num_cached_tokens=48, num_loaded_tokens=(16, 0, 0)), TextDelta(0), TextDelta(1)])
    usage.add([TextDelta(1, num_cached_tokens=32, num_loaded_tokens=(0, 32, 0))])
    assert usage.object()["prompt_tokens_details"] == {
        "cached_tokens": 80,
        "cached_tokens_details": {"device": 32, "host": 16, "disk": 32, "peer": 0},
    }


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
PROMPT: dict[str, Any] = {"prompt": "hello world", "max_tokens": 5}


async def answer(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The response, or the last chunk of the stream, which alone may have metrics."""
    response = await server.http.post(path, json=body)
    if not body.get("stream"):
        return dict(response.json())
    *chunks, last, end = response.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    assert not any('"metrics"' in chunk for chunk in chunks)
    return dict(json.loads(last.removeprefix("data: ")))


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("more", [{}, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)])
async def test_the_times_of_a_request_are_those_of_the_metrics(
    config: EngineConfig, core_mode: Callable[[str], None], path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    async with run_server(config, enable_per_request_metrics=True) as server:
        found = await answer(server, path, body | more)
        histogram = server.frontend.metrics.histogram
        queue, prefill, decode, itl, inference = (
            histogram(0, f"request_{name}")[-1]
            for name in (
                *("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds"),
                *("time_per_output_token_seconds", "inference_time_seconds"),
            )
        )
    assert decode > 0
    assert found["metrics"] == {
        "time_to_first_token_ms": prefill * 1000,
        "generation_time_ms": decode * 1000,
        "queue_time_ms": queue * 1000,
        "mean_itl_ms": pytest.approx(itl * 1000),
        "tokens_per_second": pytest.approx(found["usage"]["completion_tokens"] / inference),
    }


@pytest.mark.parametrize("more", [{}, STREAM], ids=["whole", "streamed"])
async def test_only_a_single_choice_has_times(
    config: EngineConfig, core_mode: Callable[[str], None], more: dict[str, Any]
) -> None:
    async with run_server(config, enable_per_request_metrics=True) as server:
        for body in ({**PROMPT, "n": 2}, {**PROMPT, "prompt": ["a", "b"]}):
            assert (await answer(server, "/v1/completions", body | more))["metrics"] is None
        beams = {**PROMPT, "use_beam_search": True, "max_tokens": 2}
        assert (await answer(server, "/v1/completions", beams))["metrics"] is None
        one = (await answer(server, "/v1/completions", {**PROMPT, "max_tokens": 1} | more))["metrics"]
        assert "mean_itl_ms" not in one
        assert one["generation_time_ms"] == 0
        stopped = (await answer(server, "/v1/completions", {**PROMPT, "stop": "w"} | more))["metrics"]
        assert stopped["tokens_per_second"] > 0
    async with run_server(config) as server:
        assert "metrics" not in await answer(server, "/v1/completions", PROMPT | more)


def test_usage_counts_drafts_if_there_are_any() -> None:
    usage = Usage([[1, 2]], n=1)
    usage.add([TextDelta(0, token_ids=[3])])
    assert "completion_tokens_details" not in usage.object()
    usage.add([TextDelta(0, token_ids=[3, 4, 5], num_accepted_tokens=2, num_rejected_tokens=1)])
    assert usage.object()["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 1,
    }


class WrappedError(Exception):
    """An error that work raises when it is cancelled."""


def start(when_gone: Callable[[asyncio.Task[None]], object], *, wraps: bool = False) -> asyncio.Task[None]:
    """Start work without an end, whose client disconnects right after `when_gone`."""

    async def receive() -> dict[str, str]:
        when_gone(task)
        return {"type": "http.disconnect"}

    async def work() -> None:
        with cancelled_without_client(receive):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise (WrappedError if wraps else asyncio.CancelledError) from None

    task = asyncio.create_task(work())
    return task


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WATCH_SECONDS", 0.0)


@pytest.mark.parametrize(("wraps", "error"), [(False, ClientDisconnect), (True, WrappedError)])
async def test_a_disconnect_leaves_no_cancellation_behind(watched: None, wraps: bool, error: type[Exception]) -> None:
    task = start(lambda task: None, wraps=wraps)
    with pytest.raises(error):
        await task
    assert task.cancelling() == 0


@pytest.mark.parametrize(
    "cancel",
    [lambda task: task.cancel(), lambda task: asyncio.get_running_loop().call_soon(task.cancel)],
    ids=["before", "after"],
)
async def test_a_cancellation_from_outside_is_no_disconnect(
    watched: None, cancel: Callable[[asyncio.Task[None]], object]
) -> None:
    """Also if the client disconnects before it arrives."""
    task = start(cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelling() == 1
