"""A server with a fake core behind it, on a free port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.server.cli.api_process import http_server
from quire.server.client import engine_manager
from quire.server.config.server_options import ServerOptions
from quire.server.http.state import ServedModel
from quire.server.media.service import media_settings
from quire.server.serving.adapters import AdapterSettings
from quire.server.serving.frontend import Frontend
from quire.server.text.chat_formats import ChatFormats
from quire.server.text.inputs import ChatInput
from quire.server.text.tokenizer import Tokenizer
from tests.fakes import fake_core
from tests.fakes.configs import TINY, engine_config
from tests.fakes.tokenizers import write_model
from tests.fakes.waiting import until_async

if TYPE_CHECKING:
    from quire.server.http.tracing import Tracing

TLS = ssl.create_default_context()
"""One SSL context for all clients: reading the certificates takes longer than most tests."""


@dataclass
class Server:
    """A running server, and two clients of it."""

    url: str
    frontend: Frontend
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient
    state: ServedModel

    @property
    def tokenizer(self) -> Tokenizer:
        return self.frontend.input_processor.tokenizer

    async def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids that a conversation is rendered to."""
        return await self.frontend.input_processor.tokenize_chat(ChatInput(messages=messages), None, None)

    async def until_idle(self) -> None:
        """Return when the core has reported that it runs nothing."""
        metrics = self.frontend.metrics.of
        await until_async(lambda: metrics(0).steps and not metrics(0).running, seen=lambda: metrics(0))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_folder: Path) -> EngineConfig:
    return engine_config(
        max_model_len=fake_core.MAX_MODEL_LEN,
        path=model_folder,
        tokenizer=model_folder,
        architecture=replace(TINY, vocab_size=320),
        eos=(fake_core.EOS,),
        policy="priority",
    )


@pytest.fixture
def core_mode(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Every engine of the test is a fake core; call it with a mode to choose another than the plain one."""

    def choose(mode: str) -> None:
        monkeypatch.setattr(engine_manager, "start_core", lambda args, folder: fake_core.start(args, folder, mode))

    # Fake cores restart at once.
    monkeypatch.setattr("quire.server.client.suspects._SAME_MOMENT_SECONDS", 0.0)
    choose("")
    return choose


@contextlib.asynccontextmanager
async def run_server(
    config: EngineConfig,
    api_key: str | None = None,
    wait: bool = True,
    names: tuple[str, ...] = ("echo", "alias"),
    tracing: Tracing | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """`options` are the options of `quire serve`."""
    if api_key is not None:
        options["api_key"] = (api_key,)
    asked = ServerOptions(**options)
    frontend = Frontend.start(
        config,
        name=names[0],
        formats=ChatFormats.of(asked),
        max_queue=asked.queue_limit,
        media=media_settings(config, asked),
        adapters=AdapterSettings.of(asked, names),
    )
    for adapter in asked.adapters():
        frontend.adapters.set(adapter.name, adapter)
    listener = socket.create_server(("127.0.0.1", 0))
    # asyncio does so only for sockets that name their protocol; each answer would wait 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server, state = http_server(frontend, asked, names, tracing)
    over = asyncio.Event()

    async def shutdown(sockets: list[socket.socket] | None = None) -> None:
        for each in server.servers:
            each.close()

    # uvicorn's own look for the end ten times a second, and then wait for as long again.
    server.main_loop, server.shutdown = over.wait, shutdown  # type: ignore[assignment,method-assign]
    serving = asyncio.create_task(server.serve([listener]))
    try:
        if wait:
            await frontend.ready()
        async with (
            httpx.AsyncClient(base_url=url, verify=TLS, timeout=60) as http,
            openai.AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key=api_key or "none",
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(verify=TLS),
            ) as client,
        ):
            yield Server(url, frontend, client, http, state)
    finally:
        frontend.client.fail("the test is over")
        over.set()
        await serving
        await frontend.close()


@pytest.fixture
async def server(config: EngineConfig, core_mode: Callable[[str], None]) -> AsyncIterator[Server]:
    async with run_server(config) as running:
        yield running
