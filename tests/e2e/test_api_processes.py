"""Two API processes in front of one real engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil

from tests.e2e.serving import Server, serve
from tests.e2e.test_openai import metric

BODY = {"prompt": "Quire is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
COUNT = 24


async def answers(server: Server) -> set[str]:
    """Of as many clients, each on a connection of its own."""

    async def one() -> str:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            answer = (await client.post("/v1/completions", json=BODY)).json()
            return str(answer["choices"][0]["text"])

    return set(await asyncio.gather(*(one() for _ in range(COUNT))))


def test_they_answer_alike_count_together_and_end_together() -> None:
    with serve("--api-server-count", "2") as server:
        family = server.family()
        sibling = server.named("quire-api-1")
        before = sibling.cpu_times().user
        assert len(asyncio.run(answers(server))) == 1
        with ThreadPoolExecutor(8) as pool:  # whoever of them is asked
            for name, value in (
                ("quire:generation_tokens_total", COUNT * 24),
                ("quire:e2e_request_latency_seconds_count", COUNT),
                ("quire:num_requests_running", 0),
            ):
                assert set(pool.map(lambda _, name=name: metric(server, name), range(16))) == {value}
        assert sibling.cpu_times().user > before
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        expected = asyncio.run(answers(server))
        killed = [server.named(name) for name in ("quire-api-0", "quire-api-1")]
        for process in killed:
            process.kill()
        assert not psutil.wait_procs(killed, timeout=30)[1]
        assert asyncio.run(answers(server)) == expected  # clients wait until one is back, without errors
        family = server.family()
        server.process.kill()
        assert not psutil.wait_procs(family, timeout=30)[1]
