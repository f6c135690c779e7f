"""Large bodies are processed in another process (here: a thread), with the same answers as small ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.server.client.fair_share import Share
from quire.server.http import errors, large_bodies
from quire.server.http.errors import ApiError
from quire.server.http.large_bodies import LARGE_BODY, LargeBodies
from quire.server.text.tokenizer import Tokenizer, TokenizerFailed
from tests.fakes.api_server import Server, run_server

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {}}}}
PADDING = b" " * LARGE_BODY
"""Space has no meaning in JSON."""
VARYING = re.compile(r'"(id|created|created_at|completed_at|item_id)":\s*("[^"]*"|\d+)')
TEXTS = re.compile(r'"(?:content|text|delta)":\s*"((?:[^"\\]|\\.)*)"')

BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "max_tokens": 4}),
    (CHAT, {"messages": HELLO, "max_tokens": 4, "model": "alias", "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}),
    (CHAT, {"messages": HELLO, "model": "other"}),
    (CHAT, {"messages": HELLO, "verbosity": "low"}),
    (CHAT, {"messages": HELLO, "temperature": "hot"}),
    (CHAT, {"messages": [0] * 9}),
    (CHAT, {"messages": HELLO, "response_format": SCHEMA, "max_tokens": 4}),
    (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "(("}}),
    (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "a" * 20_000}}),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}),
    (COMPLETIONS, {"prompt": "hello world", "echo": True, "logprobs": 1, "max_tokens": 4}),
    (COMPLETIONS, {"prompt": [[7, 8], [9]], "n": 2, "max_tokens": 4, "stream": True}),
    (COMPLETIONS, {"prompt": "hello " * 900}),
    (COMPLETIONS, {"prompt": "hello world " * 900, "truncate_prompt_tokens": 3, "max_tokens": 4}),
    (COMPLETIONS, {}),
    (RESPONSES, {"input": "hello", "max_output_tokens": 4, "metadata": {"a": "b"}, "user": "me"}),
    (RESPONSES, {"input": HELLO, "stream": True, "instructions": "be", "text": {"format": {"type": "text"}}}),
    (RESPONSES, {"input": "hello", "previous_response_id": "resp_none"}),
    (RESPONSES, {"input": "hello", "user": "u" * 2000}),
    (RESPONSES, {"input": "hello", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": 1}}}}),
    ("/v1/messages", {"model": "echo", "messages": HELLO, "max_tokens": 4}),
    ("/v1/messages", {"model": "echo", "messages": HELLO, "max_tokens": 4, "stream": True}),
    ("/v1/messages", {"model": "other", "messages": HELLO, "max_tokens": 4}),
    (
        "/v1/messages",
        {
            "model": "echo",
            "messages": HELLO,
            "max_tokens": 4,
            "output_config": {"format": {"type": "json_schema", "schema": {"not": 1}}},
        },
    ),
    ("/v1/messages/count_tokens", {"model": "echo", "messages": HELLO}),
    ("/v1/embeddings", {"input": "hello"}),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": HELLO}),
    ("/tokenize", {"messages": [0]}),
    ("/detokenize", {"tokens": [40, 41]}),
    ("/detokenize", {"tokens": [-1]}),
    ("/invocations", {"prompt": "hello", "max_tokens": 4}),
    ("/invocations", {"promt": "hello"}),
    ("/predict", {"instances": [{"prompt": "hello"}, {"messages": HELLO}], "parameters": {"max_tokens": 4}}),
    ("/predict", {"instances": [{"prompt": "hello", "stream": True}]}),
    ("/predict", {"instances": []}),
    ("/predict", {"prompt": "hello", "max_tokens": 4}),
]


@pytest.fixture
async def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bodies that are processed elsewhere."""
    sizes: list[int] = []
    process = LargeBodies.process

    async def counted(self: LargeBodies, process_large: Any, body: memoryview, *stored: Any) -> Any:
        sizes.append(len(body))
        return await process(self, process_large, body, *stored)

    monkeypatch.setattr(LargeBodies, "process", counted)
    return sizes


async def post(server: Server, path: str, body: bytes) -> tuple[int, str]:
    response = await server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    if response.headers["content-type"].startswith("text/event-stream"):  # a slow reader gets several tokens at once
        return response.status_code, "".join(TEXTS.findall(response.text))
    return response.status_code, VARYING.sub("", response.text)


async def test_answers_are_the_same(
    config: EngineConfig,
    core_mode: Callable[[str], None],
    elsewhere: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    async with run_server(config) as server:
        statuses = set()
        for path, fields in BODIES:
            body = json.dumps({"seed": 1, **fields} if path in (CHAT, COMPLETIONS) else fields).encode()
            small = await post(server, path, body)
            assert not elsewhere
            assert await post(server, path, body + PADDING) == small, (path, fields)
            assert elsewhere
            elsewhere.clear()
            statuses.add(small[0])
        for broken in (b"[", b"\xff", b"[" * 9000, b'{"prompt": 1' + b"0" * 9000 + b"}"):
            assert await post(server, COMPLETIONS, broken + PADDING) == await post(server, COMPLETIONS, broken)
        assert statuses == {200, 400, 404}
        assert server.frontend.client.num_open == 0


async def test_nothing_is_spent_on_a_request_that_is_not_admitted(
    config: EngineConfig, core_mode: Callable[[str], None], elsewhere: list[int]
) -> None:
    async with run_server(config, wait=False) as server:
        server.frontend.client.fail("it is broken")
        body = json.dumps({"prompt": "hello", "max_tokens": 2}).encode() + PADDING
        assert (await post(server, COMPLETIONS, body))[0] == 503
        assert not elsewhere
        assert server.state.bodies.num_bytes == 0


@pytest.mark.parametrize(
    ("path", "name", "count"),
    [(CHAT, "messages", 5000), (RESPONSES, "input", 17_000), ("/v1/messages", "messages", 5000)],
)
async def test_long_lists_are_not_even_validated(server: Server, path: str, name: str, count: int) -> None:
    status, text = await post(server, path, json.dumps({name: ["no message"] * count}).encode())
    assert status == 400
    assert f"{name}: at most" in text


async def test_a_stored_response_is_continued(server: Server, elsewhere: list[int]) -> None:
    first = (await server.http.post(RESPONSES, json={"input": "one", "max_output_tokens": 2})).json()
    body = json.dumps({"input": "two", "previous_response_id": first["id"], "max_output_tokens": 2}).encode()
    small = await server.http.post(RESPONSES, content=body, headers={"Content-Type": "application/json"})
    large = await server.http.post(RESPONSES, content=body + PADDING, headers={"Content-Type": "application/json"})
    assert len(elsewhere) == 2  # the first time, the conversation was missing
    assert large.status_code == 200, large.text
    assert large.json()["usage"] == small.json()["usage"]
    third = {"input": "three", "previous_response_id": large.json()["id"], "max_output_tokens": 2}
    assert (await server.http.post(RESPONSES, json=third)).json()["usage"]["input_tokens"] > 20


async def test_templates_of_requests_are_rendered_elsewhere(
    config: EngineConfig, core_mode: Callable[[str], None], elsewhere: list[int]
) -> None:
    async with run_server(config, trust_request_chat_template=True) as server:
        body = {"messages": HELLO, "chat_template": "{{ messages[0].content }}", "max_tokens": 2}
        response = await server.http.post(CHAT, json=body)
        assert response.json()["usage"]["prompt_tokens"] == len(
            server.tokenizer.encode("hello", add_special_tokens=False)
        )
        hidden = json.dumps(body).replace("chat_template", "chat\\u005ftemplate").encode()
        assert (await post(server, CHAT, hidden))[0] == 200
        assert (await post(server, CHAT, json.dumps(body).encode("utf-16")))[0] == 200
        assert len(elsewhere) == 3


async def test_the_bytes_of_all_bodies_are_limited(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = server.state.bodies
    monkeypatch.setattr(large_bodies, "MAX_BODIES_BYTES", 2 * LARGE_BODY)
    body = json.dumps({"prompt": "hello", "max_tokens": 2}).encode() + 3 * PADDING
    assert (await post(server, COMPLETIONS, body))[0] == 200  # alone, it may be larger than all together
    assert bodies.num_bytes == 0
    bodies.hold(Share(b"another"), LARGE_BODY, 0)
    response = await server.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert response.headers["retry-after"] == "2"
    assert bodies.num_bytes == LARGE_BODY
    with pytest.raises(ApiError, match="the bodies of your requests together have more than 0 MiB"):
        bodies.hold(Share(b"another"), 1, 0)
    bodies.hold(Share(b"third"), LARGE_BODY, 0)
    bodies.release(Share(b"another"), LARGE_BODY)
    assert bodies.num_bytes == LARGE_BODY


async def test_failures_of_the_tokenizer_are_logged_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any, **options: Any) -> list[int]:
        raise TokenizerFailed("the tokenizer cannot process this text", reason="a\nb" * 1000)

    monkeypatch.setattr(Tokenizer, "encode", fails)
    monkeypatch.setattr(errors, "_tokenizer_warnings", errors._TokenizerWarnings())
    for padding in (b"", PADDING, b""):
        headers = {"Content-Type": "application/json"}
        response = await server.http.post(COMPLETIONS, content=b'{"prompt": "a"}' + padding, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the tokenizer cannot process this text"
    (line,) = (record.getMessage() for record in caplog.records if "tokenizer" in record.getMessage())
    assert line.startswith(r"the tokenizer failed for a text: a\nba\nb")
    assert len(line) < 400
