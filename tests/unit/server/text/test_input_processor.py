"""Long texts are rendered beside the event loop, so that other streams go on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.server.text.prompt_tokenizer import SHORT
from tests.fakes.api_server import Server, run_server
from tests.unit.server.openai.test_embeddings import embedding

TURNS = 100
"""Turns of the event loop that other streams have while a text is encoded."""


class Watch:
    """Stands between the server and its tokenizer: it counts the work of the event loop itself; work in another thread
    takes until the loop has turned `TURNS` times."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop_thread = threading.get_ident()
        self._has_turned = threading.Event()
        self._backend = server.tokenizer.backend
        self.on_loop = 0
        """Characters and tokens that were worked on in the loop's thread."""
        self.top_level_fields = 0
        monkeypatch.setattr(server.tokenizer, "backend", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self._note(sum(map(len, texts)))
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        self._note(1)
        return self._backend.id_to_token(token_id)

    def _note(self, size: int) -> None:
        if threading.get_ident() == self._loop_thread:
            self.on_loop += size
        else:
            self.top_level_fields += size
            assert self._has_turned.wait(60), "the event loop does not turn"

    async def turn(self) -> None:
        """Another stream."""
        while True:
            turns = 0
            while turns < TURNS or not self.top_level_fields:
                await asyncio.sleep(0)
                turns += bool(self.top_level_fields)
            self._has_turned.set()
            await asyncio.sleep(3600)


@asynccontextmanager
async def watched(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watch]:
    watch = Watch(server, monkeypatch)
    other = asyncio.create_task(watch.turn())
    yield watch
    other.cancel()
    await asyncio.wait((other,))


@pytest.fixture
async def watch(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watch]:
    async with watched(server, monkeypatch) as watch:
        yield watch


LIST: Any = {"truncate_prompt_tokens": 5, "max_tokens": 1}
CUT = 156
"""Characters of which at least the last five tokens are made: 2 × 6 tokens of at most 13 characters."""
TURN = {"role": "user", "content": "hello world " * 25}


@pytest.mark.parametrize(
    ("path", "body", "size"),
    [
        ("/v1/completions", {**LIST, "prompt": "hello world " * 300}, CUT),
        ("/v1/completions", {**LIST, "prompt": ["hello world " * 25] * 12}, 12 * CUT),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "bad_words": ["hello", "world"] * 400}, 4000),
        ("/v1/chat/completions", {**LIST, "messages": [TURN] * 12}, CUT),
        ("/v1/messages/count_tokens", {"model": "echo", "messages": [TURN] * 2, "system": "s" * 3000}, 0),
        ("/v1/responses", {"input": [TURN] * 12}, 0),
        ("/tokenize", {"prompt": "~" * 3000}, 3000),
        ("/tokenize", {"prompt": "~" * 3000, "return_token_strs": True}, 6000),
        ("/tokenize", {"messages": [TURN] * 12}, 3600),
    ],
)
async def test_other_streams_go_on(watch: Watch, server: Server, path: str, body: Any, size: int) -> None:
    response = await server.http.post(path, json=body)
    expected = 200 if size else 400  # some are certainly too long: nothing is encoded
    assert response.status_code == expected, response.text
    assert watch.on_loop <= SHORT
    assert watch.top_level_fields >= size
    assert size > CUT or watch.top_level_fields == size


@pytest.mark.parametrize("body", [{}, {"prompt_name": "long"}])
async def test_an_embedding_prompt_counts_for_each_input(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    prompts = {"long": "quick " * 50}
    config = embedding(config, prompts=prompts, default_prompt=None if body else "long")
    async with run_server(config) as server, watched(server, monkeypatch) as watch:
        body = {"input": ["a"] * 20, "truncate_prompt_tokens": -1, **body}
        response = await server.http.post("/v1/embeddings", json=body)
        assert response.status_code == 200, response.text
        assert (watch.on_loop, watch.top_level_fields) == (0, 20 * 301)


async def test_short_texts_need_no_thread(watch: Watch, server: Server) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": ["hello", "world"], "bad_words": ["a"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ):
        assert (await server.http.post(path, json=body)).status_code == 200
    assert watch.top_level_fields == 0
    assert watch.on_loop > 0


async def test_the_tokenizer_leaves_the_interpreter_to_others(server: Server) -> None:
    """A thread is of no use to other streams if it holds the interpreter's lock: there are a few turns then, always.

    On a busy machine there may be few turns, too, but not each time.
    """
    text = "hello world, how are you? " * 40_000
    most = 0
    for _ in range(20):
        turns = 0
        encoding = asyncio.create_task(server.frontend.input_processor.tokenize(text, add_special_tokens=False))
        while not encoding.done():
            await asyncio.sleep(0)
            turns += 1
        most = max(most, turns)
        if most > 50:
            break
    assert most > 50
