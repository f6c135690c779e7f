"""A server's memory does not grow with the number of pictures that it has seen."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.e2e.serving import Server, serve
from tests.fakes.vision import write_qwen2_vl

pytestmark = pytest.mark.slow

PICTURES, PARTS, PER_REQUEST, CLIENTS = 5000, 5, 20, 4
CACHE_BYTES = 32 * 2**20
"""A picture's arrays have 75 KiB, so the cache is full after a tenth of the pictures."""
GROWTH = 4 * 2**20
"""Bytes that a process may have more after the last part than after the second one: 1.4 KiB for a picture. The media
process remembers what the last 65,536 names stand for, in some 600 bytes each."""


def resident(server: Server) -> dict[str, int]:
    """Bytes of each lasting process that are its own, without shared memory."""
    found: dict[str, int] = {}
    for process in server.family():
        memory = process.memory_info()
        if process.name().startswith("quire-"):
            found.setdefault(f"{process.name()} {process.pid}", memory.rss - memory.shared)
    return found


def pictures() -> Iterator[str]:
    """New ones, of noise, as data URLs."""
    rng = np.random.default_rng(0)
    while True:
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (56, 56, 3), dtype=np.uint8)).save(file, "PNG")
        yield f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


async def ask(server: Server, urls: Iterator[str], count: int) -> None:
    """Ask about so many new pictures, by several clients."""
    requests = iter(range(count // PER_REQUEST))

    async def one(client: httpx.AsyncClient) -> None:
        for _ in requests:
            content: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": next(urls)}} for _ in range(PER_REQUEST)
            ]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "stream": True}
            answer = await client.post(f"{server.url}/v1/chat/completions", json=body)
            assert "data: [DONE]" in answer.text, answer.text

    async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(one(client))


def test_memory_stays_flat(tmp_path: Path) -> None:
    gib = str(CACHE_BYTES / 2**30)
    flags = (
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        str(2**23),
        "--mm-processor-cache-gb",
        gib,
    )
    with serve(str(write_qwen2_vl(tmp_path / "model")), *flags) as server:
        sockets = [str(each.laddr) for each in server.named("quire-media").net_connections("unix")]
        (socket,) = (Path(path) for path in sockets if path.endswith("/media"))
        urls, memory = pictures(), list[dict[str, int]]()
        for _ in range(PARTS):
            asyncio.run(ask(server, urls, PICTURES // PARTS))
            memory.append(resident(server))
            files = sum(path.stat().st_size for path in (socket.parent / "items").iterdir())
            assert CACHE_BYTES / 2 < files <= CACHE_BYTES
    lasting = memory[0].keys() & memory[-1].keys()
    assert {name.split()[0] for name in lasting} >= {"quire-serve", "quire-core", "quire-media", "quire-decoder"}
    for name in sorted(lasting):
        sizes = [each[name] for each in memory]
        print(name, *(f"{size / 2**20:.1f}" for size in sizes), "MiB")
    assert not {name for name in lasting if memory[-1][name] > memory[1][name] + GROWTH}
