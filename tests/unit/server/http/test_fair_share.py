"""Fair sharing: the share of a request, and the effect of a full queue on each share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.stats import EngineStats
from quire.server.client.engine_client import EngineClient
from quire.server.client.fair_share import SHARE
from quire.server.config.server_options import ServerOptions
from quire.server.http.api_keys import ApiKeys
from quire.server.http.middleware import FairShareMiddleware
from tests.fakes.api_server import Server, run_server

HANG: dict[str, Any] = {"prompt": "a<hang>"}


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, float]]:
    """Key and weight of each request that was sent to the engine."""
    found: list[tuple[bytes, float]] = []
    place = EngineClient._place

    def record(client: EngineClient, running: Any, request: Any, rank: int | None) -> None:
        found.append((request.share, request.weight))
        place(client, running, request, rank)

    monkeypatch.setattr(EngineClient, "_place", record)
    return found


async def complete(server: Server, **body: Any) -> None:
    response = await server.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, **body})
    assert response.status_code == 200, response.text


async def test_without_it_all_requests_are_of_one_share(server: Server, shares: list[tuple[bytes, float]]) -> None:
    await complete(server, user="a")
    assert shares == [(b"", 1.0)]


async def test_shares_of_keys(
    config: EngineConfig, core_mode: Callable[[str], None], shares: list[tuple[bytes, float]], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("one\ntwo weight=2.5 # a team\ntwo words\n")
    async with run_server(config, fair_share="key", api_key_file=str(tmp_path / "keys")) as server:
        for key in ("one", "two", "one", "two words"):
            server.http.headers["Authorization"] = f"Bearer {key}"
            await complete(server, user="a")
        (tmp_path / "keys").write_text("one weight=7\n")
        server.http.headers["Authorization"] = "Bearer one"
        await complete(server)
    keys, weights = zip(*shares, strict=True)
    assert keys[0] == keys[2] == keys[4]
    assert len(set(keys)) == 3
    assert weights == (1.0, 2.5, 1.0, 1.0, 7.0)
    assert not any(b"two" in key for key in keys)


async def test_shares_of_users(
    config: EngineConfig, core_mode: Callable[[str], None], shares: list[tuple[bytes, float]]
) -> None:
    """Through every API, also in a large body; requests without a user have one share together."""
    chat: dict[str, Any] = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    async with run_server(config, fair_share="user", fair_share_weights=("a=b=3",)) as server:
        await complete(server, user="a=b")
        for path, body in (
            ("/v1/chat/completions", {**chat, "user": "a=b"}),
            ("/v1/responses", {"input": "hello", "user": "a=b", "max_output_tokens": 4}),
            ("/v1/messages", {**chat, "model": "echo", "metadata": {"user_id": "a=b"}}),
            ("/v1/messages", {**chat, "model": "echo", "metadata": {"user_id": "a=b", "more": "x" * 70_000}}),
            ("/v1/completions", {"prompt": "h", "max_tokens": 2, "user": "a=b", "metadata": {"more": "x" * 70_000}}),
        ):
            response = await server.http.post(path, json=body)
            assert response.status_code == 200, response.text
        assert set(shares) == {shares[0]}
        assert shares[0][1] == 3.0
        await complete(server)
        await complete(server, user=None)
        await complete(server, user="c")
    assert shares[-2] == shares[-3]
    assert len(set(shares)) == 3


async def test_shares_of_addresses() -> None:
    found: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(SHARE.get().key)

    middleware = FairShareMiddleware(app, "address", {})
    groups = [["1.2.3.4", "::ffff:1.2.3.4"], ["1.2.3.5"], ["2001:db8::1", "2001:db8::ffff:1"], ["2001:db8:0:1::1"]]
    for address in itertools.chain(*groups):
        await middleware({"type": "http", "headers": [], "client": (address, 1)}, None, None)  # type: ignore[arg-type]
    assert [found[0] == found[1], found[3] == found[4]] == [True, True]
    assert len(set(found)) == 4


async def test_the_address_behind_a_proxy(
    config: EngineConfig, core_mode: Callable[[str], None], shares: list[tuple[bytes, float]]
) -> None:
    async with run_server(config, fair_share="address", fair_share_weights=("1.2.3.4=3",)) as server:
        for address in (None, "1.2.3.4", "1.2.3.5"):
            server.http.headers.update({} if address is None else {"X-Forwarded-For": address})
            await complete(server)
    assert len(set(shares)) == 3
    assert [weight for _, weight in shares] == [1.0, 3.0, 1.0]


async def test_a_flood_does_not_fill_the_queue_for_others(
    config: EngineConfig, core_mode: Callable[[str], None]
) -> None:
    """Each share may have its part of the queue waiting."""

    def ask(server: Server, user: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(server.http.post("/v1/completions", json={**HANG, "user": user}))

    async with run_server(config, fair_share="user", fair_share_weights=("heavy=2",), max_queue=4) as server:
        client = server.frontend.client
        client._admission._max_num_seqs = 0
        client._metrics.take = lambda *_: None  # type: ignore[method-assign]
        client._stats = lambda replicas=None: {0: EngineStats()}  # type: ignore[method-assign]
        tasks: list[asyncio.Task[httpx.Response]] = []

        async def accepts(user: str) -> bool:
            task, before = ask(server, user), client.num_open
            while not task.done() and client.num_open == before:
                await asyncio.sleep(0.001)
            if not task.done():
                tasks.append(task)
                return True
            assert (await task).status_code == 429
            return False

        hanging = ["flood", "flood", "flood", "flood"]
        assert [await accepts(user) for user in hanging] == [True] * 4
        assert not await accepts("flood")
        assert [await accepts("second") for _ in range(3)] == [True, True, False]
        assert [await accepts("heavy") for _ in range(3)] == [True, True, False]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while client.num_open:
            await asyncio.sleep(0.001)
        assert not client._admission._num_waiting


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fair_share": "user", "fair_share_weights": ("a",)}, "--fair-share-weights a: expected NAME=WEIGHT"),
        ({"fair_share": "user", "fair_share_weights": ("a=0",)}, "from 0.01 to 100"),
        ({"fair_share": "user", "fair_share_weights": ("a=nan",)}, "from 0.01 to 100"),
        ({"fair_share": "key", "fair_share_weights": ("a=1",)}, "requires --fair-share user, address or adapter"),
        ({"fair_share_weights": ("a=1",)}, "requires --fair-share user, address or adapter"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**options).check()


def test_keys_that_share_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="--fair-share key requires API keys"):
        ApiKeys.load(ServerOptions(fair_share="key"))
    (tmp_path / "keys").write_text("a\nb weight=x\n")
    with pytest.raises(ConfigError, match="line 2: expected a weight from 0"):
        ApiKeys.load(ServerOptions(api_key_file=str(tmp_path / "keys")))
