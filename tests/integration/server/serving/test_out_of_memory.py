"""A step that finds no memory, seen by clients: an error for its requests, and the server goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.server.client import engine_manager
from tests.fakes import scarce_core
from tests.fakes.api_server import Server, run_server

MOST = 96
"""Tokens of a sequence that there is memory for."""
pytestmark = pytest.mark.asyncio(loop_scope="module")
REASON = r"out of memory on cpu in a step of .*; lower --max-num-batched-tokens, --max-num-seqs"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    options = EngineOptions(device="cpu", max_num_seqs=4, max_model_len=256, kv_cache_memory_bytes=1 << 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_manager, "start_core", lambda args, folder: scarce_core.start(args, folder, MOST))
        async with run_server(resolve(options)) as running:
            yield running


async def complete(server: Server, length: int, max_tokens: int) -> openai.types.Completion:
    return await server.openai.completions.create(
        model="echo", prompt=[7] * length, max_tokens=max_tokens, temperature=0.0, extra_body={"ignore_eos": True}
    )


async def test_a_prompt_that_runs_out_of_memory_fails_alone(server: Server) -> None:
    before = await complete(server, 32, 8)
    with pytest.raises(openai.InternalServerError, match=REASON) as failure:
        await complete(server, 120, 8)
    assert failure.value.status_code == 500
    assert failure.value.body is not None
    assert {"type", "code", "param", "message"} == set(failure.value.body)  # type: ignore[call-overload]
    after = await complete(server, 32, 8)
    assert after.choices[0].text == before.choices[0].text
    assert (await server.http.get("/health")).status_code == 200


async def test_a_stream_that_finds_no_memory_ends_with_an_error_event(server: Server) -> None:
    stream = await server.openai.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "Quire"}],
        max_tokens=200,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    num_tokens = 0

    async def read() -> None:
        nonlocal num_tokens
        async for chunk in stream:
            num_tokens += len((chunk.choices[0].model_extra or {}).get("token_ids", []))

    with pytest.raises(openai.APIError, match=REASON):
        await read()
    assert num_tokens > 20
    assert (await complete(server, 32, 8)).choices[0].finish_reason == "length"


async def test_waiting_requests_run_after_failed_ones(server: Server) -> None:
    """Four run at once, of which one outgrows the memory and takes the others of its step along."""
    alone = (await complete(server, 32, 8)).choices[0].text
    sent = [complete(server, 32, 100 if number < 4 else 8) for number in range(12)]
    answers = await asyncio.gather(*sent, return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, openai.InternalServerError)]
    served = [answer for answer in answers if isinstance(answer, openai.types.Completion)]
    assert len(failed) + len(served) == 12
    assert 4 <= len(failed) < 12
    assert {answer.choices[0].text for answer in served} == {alone}
    assert (await complete(server, 32, 8)).choices[0].text == alone
