"""A grammar whose cost grows with its output ends with a clear error, and streams beside it go on unchanged."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.serving import serve

AMBIGUOUS = {
    "prompt": "Quire is",
    "max_tokens": 1900,
    "n": 16,
    "ignore_eos": True,
    "structured_outputs": {"grammar": 'start: s\ns: s s s | s s | /[a-z ]/ | ""'},
}
PLAIN = {
    "prompt": "Once upon a time",
    "max_tokens": 300,
    "ignore_eos": True,
    "temperature": 0,
    "return_token_ids": True,
}


async def plain(client: httpx.AsyncClient) -> list[int]:
    answer: dict[str, Any] = (await client.post("/v1/completions", json=PLAIN)).json()
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


@pytest.mark.slow
async def test_an_ambiguous_grammar_ends_alone() -> None:
    with serve() as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            alone = await plain(client)
            beside = asyncio.create_task(plain(client))
            while not beside.done():
                refused = await client.post("/v1/completions", json=AMBIGUOUS)
                assert refused.status_code == 400
                message = refused.json()["error"]["message"]
                assert "structured output: the grammar is too ambiguous: more than 500 alternatives are open" in message
            assert await beside == alone
            assert len(alone) == 300
