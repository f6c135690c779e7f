"""A server with a fake core behind it, on a free port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.server.cli.api_process import http_server
from quire.server.config import ServerOptions
from quire.server.frontend import frontend as service_module
from quire.server.frontend.frontend import Frontend
from quire.server.frontend.renderer import ChatFormats
from quire.server.frontend.tokenizer import Tokenizer
from tests.fakes import fake_core
from tests.fakes.configs import TINY, engine_config
from tests.fakes.tokenizers import write_model


@dataclass
class Server:
    """A running server, and two clients of it."""

    url: str
    service: Frontend
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def tokenizer(self) -> Tokenizer:
        return self.service.renderer.tokenizer

    async def until_idle(self) -> None:
        """Return when the core has said that it runs nothing; a hanging test otherwise."""
        while self.service.metrics.stats.running or not self.service.metrics.stats.steps:
            await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


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
        monkeypatch.setattr(
            service_module, "start_core", lambda config, ends, level: fake_core.start(config, ends, level, mode)
        )

    choose("")
    return choose


@contextlib.asynccontextmanager
async def run_server(
    config: EngineConfig,
    api_key: str | None = None,
    wait: bool = True,
    names: tuple[str, ...] = ("echo", "alias"),
    **options: Any,
) -> AsyncIterator[Server]:
    """`options` are those of `quire serve`."""
    if api_key is not None:
        options["api_key"] = (api_key,)
    asked = ServerOptions(**options)
    service = await Frontend.start(config, name=names[0], formats=ChatFormats.of(asked), max_queue=asked.queue_limit)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = http_server(service, asked, names)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        if wait:
            await service.ready()
        async with (
            httpx.AsyncClient(base_url=url) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0) as client,
        ):
            yield Server(url, service, client, http)
    finally:
        service.client.fail("the test is over")
        server.should_exit = True
        await serving
        await service.close()


@pytest.fixture
async def server(config: EngineConfig, core_mode: Callable[[str], None]) -> AsyncIterator[Server]:
    async with run_server(config) as running:
        yield running
