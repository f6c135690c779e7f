"""Choose the replica of each request, instead of leaving that to the router.

    quire serve -dp 2
    pip install openai httpx
    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python examples/data_parallel_rank.py

The header X-data-parallel-rank has the number of a replica (GET /replicas lists them). It is for programs that balance
the load themselves, or that keep the requests of a session on one replica. Without it, Quire's router chooses the
replica that is expected to answer first, and considers the prefix caches.
"""

from __future__ import annotations

import asyncio

import httpx
from openai import AsyncOpenAI, BadRequestError


async def main() -> None:
    """Print an answer of each replica, which are the same, and the error for a replica that does not exist."""
    client = AsyncOpenAI()
    model = (await client.models.list()).data[0].id

    async def ask(rank: int) -> str:
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is tensor parallelism?"}],
            temperature=0,
            extra_headers={"X-data-parallel-rank": str(rank)},
        )
        return answer.choices[0].message.content or ""

    url, key = str(client.base_url.join("/replicas")), {"Authorization": f"Bearer {client.api_key}"}
    ranks = [each["index"] for each in httpx.get(url, headers=key).raise_for_status().json()["replicas"]]
    for rank, answer in zip(ranks, await asyncio.gather(*map(ask, ranks)), strict=True):
        print(f"replica {rank}: {answer}")
    try:
        await ask(max(ranks) + 1)
    except BadRequestError as error:
        print(error.message)


if __name__ == "__main__":
    asyncio.run(main())
