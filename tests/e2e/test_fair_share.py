"""One client floods the server; another one is answered as if it were alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import serve
from tests.e2e.test_openai import metric

FLOOD, LENGTH = 100, 200


async def complete(client: httpx.AsyncClient, key: str, prompt: str, max_tokens: int) -> Any:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    response = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


@pytest.mark.slow
async def test_a_second_client_is_answered_during_a_flood(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("flood\nsecret weight=2\n")
    with serve("--fair-share", "key", "--api-key-file", str(keys), "--max-num-seqs", "4") as server:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            alone = [await complete(client, "secret", f"Once upon a time {at}", 20) for at in range(4)]
            first = await complete(client, "flood", "The flood 0", LENGTH)
            flood = [asyncio.create_task(complete(client, "flood", f"The flood {at}", LENGTH)) for at in range(FLOOD)]
            # A fast server answers many before the last one has been sent.
            while metric(server, "quire:num_requests_waiting") < FLOOD // 4:
                assert not all(task.done() for task in flood)
                await asyncio.sleep(0.05)
            for at, expected in enumerate(alone):
                assert await complete(client, "secret", f"Once upon a time {at}", 20) == expected
            assert sum(task.done() for task in flood) < FLOOD // 2
            assert metric(server, "quire:num_preemptions_total") > 0
            answers = await asyncio.gather(*flood)
            assert answers[0] == first
            assert all(len(answer) == LENGTH for answer in answers)
