"""Bodies that take too much, or whose clients leave, are stopped in the process that works on them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.server.http import large_bodies
from quire.server.text import template_renderer
from tests.fakes.api_server import Server, run_server

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def workers() -> Iterator[psutil.Process]:
    """The forks that have consumed processor time, and so work on a body."""
    for helper in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            for fork in helper.children() if helper.status() != psutil.STATUS_ZOMBIE else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if sum(fork.cpu_times()[:2]) >= 0.05:
                        yield fork


async def says(server: Server, **fields: object) -> httpx.Response:
    return await server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, **fields}, timeout=60)


async def test_what_takes_too_much_is_refused(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bodies, "BODY_SECONDS", 0.3)
    async with run_server(config, trust_request_chat_template=True) as server:
        for template in (ENDLESS, "{{ 'a' * 10**10 }}"):
            response = await says(server, chat_template=template)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "body_too_large")
        many = b'{"messages": [' + b"[]," * 20_000_000 + b"[]]}"
        response = await server.http.post(CHAT, content=many, headers={"Content-Type": "application/json"}, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "body_too_large")
        assert (await says(server, chat_template="{{ messages[0].content }}")).status_code == 200
        assert (await says(server, user="u" * large_bodies.LARGE_BODY)).status_code == 200
        assert server.state.bodies.num_bytes == 0


async def test_a_small_bodys_rendering_ends_when_its_client_leaves(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_renderer, "MEDIUM_SECONDS", 1000.0)
    async with run_server(config, chat_template=ENDLESS) as server:
        asked = asyncio.create_task(says(server))
        while not (working := [*workers()]):
            assert not asked.done(), asked.result().text
            await asyncio.sleep(0.02)
        asked.cancel()
        async with asyncio.timeout(60):
            while any(fork.is_running() for fork in [*working, *workers()]):
                await asyncio.sleep(0.02)


async def test_the_work_ends_when_the_client_leaves(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config, trust_request_chat_template=True) as server:
        body = json.dumps({"messages": HELLO, "chat_template": ENDLESS, "user": "u" * large_bodies.LARGE_BODY})
        headers = {"Content-Type": "application/json"}
        asked = asyncio.create_task(server.http.post(CHAT, content=body, headers=headers, timeout=60))
        while not (working := [*workers()]) or server.state.bodies.num_bytes <= large_bodies.LARGE_BODY:
            assert not asked.done(), asked.result().text
            await asyncio.sleep(0.02)
        asked.cancel()
        while any(fork.is_running() for fork in working):
            await asyncio.sleep(0.02)
        assert server.state.bodies.num_bytes == 0


async def test_a_models_template_that_does_not_end_stops_nobody_else(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_renderer, "MEDIUM_SECONDS", 0.2)
    monkeypatch.setattr(template_renderer, "RENDER_SECONDS", 0.3)
    monkeypatch.setattr(template_renderer, "WALL_CLOCK_FACTOR", 1000.0)  # however busy the machine is
    source = f"{{% if messages[0].content == 'loop' %}}{ENDLESS}{{% endif %}}{{{{ messages[0].content }}}}"
    async with run_server(config, chat_template=source) as server:
        looping = asyncio.create_task(says(server, messages=[{"role": "user", "content": "loop"}]))
        while not looping.done():
            assert (await says(server)).status_code == 200
            assert (await server.http.get("/health")).status_code == 200
        response = looping.result()
        assert response.status_code == 400
        assert "the chat template takes more than 0.3 s" in response.json()["error"]["message"]
