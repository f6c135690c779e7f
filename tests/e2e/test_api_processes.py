"""Two API processes in front of one real engine."""

from __future__ import annotations

import asyncio

import httpx
import psutil
import pytest

from tests.e2e.serving import Server, serve

BODY = {"prompt": "Quire is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
COUNT = 6


async def answers(server: Server) -> set[str]:
    """The answers of as many clients, each on a connection of its own."""

    async def one() -> str:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            answer = (await client.post("/v1/completions", json=BODY)).json()
            return str(answer["choices"][0]["text"])

    return set(await asyncio.gather(*(one() for _ in range(COUNT))))


@pytest.mark.slow
def test_they_answer_alike_and_are_replaced_and_end_together() -> None:
    """tests/integration/server/cli/test_serve.py tests that each of them answers, and counts for all."""
    with serve("--api-server-count", "2") as server:
        both, expected = [server.named(name) for name in ("quire-api-0", "quire-api-1")], set()
        for held in both:  # the other one answers
            held.suspend()
            expected |= asyncio.run(answers(server))
            held.resume()
        assert len(expected) == 1
        for process in both:
            process.kill()
        assert not psutil.wait_procs(both, timeout=30)[1]
        assert asyncio.run(answers(server)) == expected  # clients wait until one is back, without errors
        family = server.family()
        server.process.kill()
        assert not psutil.wait_procs(family, timeout=30)[1]
