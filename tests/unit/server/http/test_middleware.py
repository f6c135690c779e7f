"""The checks before the endpoints: keys, ids, limits, the queue, and other origins."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.engine_core import ToCore
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.stats import EngineStats
from quire.engine.protocol.supervision import ReplicaDraining, ReplicaLost
from quire.server.client.admission import Admission, QueueFull
from quire.server.client.engine_client import RANK_HEADER
from quire.server.client.output_stream import Deadline, OutputStream
from quire.server.config.server_options import ServerOptions
from quire.server.http import errors, middleware
from quire.server.http.api_keys import ApiKeys
from quire.server.http.middleware import MIB
from quire.server.http.request_model import MAX_MESSAGES
from tests.fakes.api_server import Server, run_server
from tests.fakes.waiting import until_async
from tests.unit.server.openai.test_embeddings import POOLING

HELLO = {"prompt": "hello", "max_tokens": 60}
HANG = {"prompt": "a<hang>", "stream": True}


async def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# --- request ids and origins ----------------------------------------------------------------------------------


async def test_every_answer_has_a_request_id(server: Server) -> None:
    for path in ("/health", "/nothing", "/v1/models"):
        mine = await server.http.get(path, headers={"X-Request-Id": "mine-1"})
        assert mine.headers.get_list("x-request-id") == ["mine-1"]
        ours = [(await server.http.get(path)).headers["x-request-id"] for _ in range(2)]
        assert ours[0] != ours[1]
    stream = await server.http.post("/v1/completions", json={**HELLO, "stream": True})
    assert stream.headers["x-request-id"].startswith("req_")
    answer = await server.openai.completions.create(model="echo", **HELLO, extra_headers={"X-Request-Id": "x"})  # type: ignore[call-overload]
    assert answer._request_id == "x"


async def test_origins(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with run_server(config, api_key="k") as server:
        response = await server.http.get("/health", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in response.headers
    async with run_server(config, api_key="k", allowed_origins=("https://a.example", "https://b.example")) as server:
        asked = {**preflight, "Access-Control-Request-Headers": "authorization,x-stainless-lang"}
        response = await server.http.options("/v1/completions", headers=asked)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in response.headers["access-control-allow-headers"]
        refused = await server.http.get("/v1/models", headers={"Origin": "https://b.example"})
        assert refused.status_code == 401  # which the page may read
        assert refused.headers["access-control-allow-origin"] == "https://b.example"
        assert "access-control-allow-credentials" not in refused.headers
        other = await server.http.options("/v1/completions", headers={**preflight, "Origin": "https://c.example"})
        assert other.status_code == 400
    options: dict[str, Any] = {"allowed_methods": ("GET",), "allowed_headers": ("X-A",), "allow_credentials": True}
    async with run_server(config, allowed_origins=('["https://a.example"]',), **options) as server:
        assert (await server.http.options("/v1/completions", headers=preflight)).status_code == 400
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
        response = await server.http.options("/v1/models", headers={**asked, "Access-Control-Request-Headers": "X-A"})
        assert response.status_code == 200
        assert response.headers["access-control-allow-credentials"] == "true"
        response = await server.http.options("/v1/models", headers={**asked, "Access-Control-Request-Headers": "X-B"})
        assert response.status_code == 400


async def test_root_path(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config, api_key="k", root_path="/llm") as server:
        for path in ("/health", "/llm/health", "/ping", "/llm/ping"):
            assert (await server.http.get(path)).status_code == 200
        page = await server.http.get("/llm", follow_redirects=True)
        assert (page.status_code, page.url.path) == (200, "/llm/")
        for path in ("/llm/v1/models", "/v1/models", "/llm/llm/health"):
            assert (await server.http.get(path)).status_code == 401
            response = await server.http.get(path, headers={"Authorization": "Bearer k"})
            assert response.status_code == (200 if path.endswith("models") else 404)
        document = (await server.http.get("/openapi.json", headers={"Authorization": "Bearer k"})).json()
        assert document["servers"] == [{"url": "/llm"}]


# --- keys -----------------------------------------------------------------------------------------------------


async def test_several_keys_and_a_file_that_changes(
    config: EngineConfig, core_mode: Callable[[str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  alice  # her laptop\nbob#1\n")
    async with run_server(config, api_key_file=str(file)) as server:

        async def status(key: str, header: str = "Authorization", scheme: str = "Bearer ") -> int:
            return (await server.http.get("/v1/models", headers={header: scheme + key})).status_code

        async def good() -> str:
            return "".join([name for name in ("alice", "bob#1", "carol") if await status(name) == 200])

        assert await good() == "alicebob#1"
        for key in ("#", "bob", "# ours", "alice  # her laptop", "ours"):
            assert await status(key) == 401
        assert await status("alice", "x-api-key", "") == 200  # as Anthropic's clients do
        assert await status("carol", "x-api-key", "") == 401
        file.write_text("carol\n")
        assert await good() == "carol"
        os.replace(_write(tmp_path / "new", "alice\n"), file)
        assert await good() == "alice"
        file.unlink()
        assert await good() == "alice"
        assert "the previous content stays valid" in caplog.text
        file.write_text("\n")
        assert await good() == ""
        file.write_text("bob#1")
        assert await good() == "bob#1"
    async with run_server(config, api_key="main", api_key_file=str(file)) as server:
        assert [await status(key) for key in ("main", "bob#1", "alice")] == [200, 200, 401]
        assert (await server.http.get("/ping")).status_code == 200


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_where_keys_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def good(**options: Any) -> str | None:
        keys = ApiKeys.load(ServerOptions(**options))
        return None if keys is None else "".join(key for key in "abcd" if keys.find(key.encode()))

    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    file = str(_write(tmp_path / "keys", "d"))
    assert good() is None
    assert good(api_key=("a", "b")) == "ab"
    assert good(api_key=("a",), api_key_file=file) == "ad"
    monkeypatch.setenv("QUIRE_API_KEY", " b, c ")
    assert good() == "bc"
    assert good(api_key=("a",)) == "a"
    assert good(api_key_file=file) == "bcd"
    for empty in ("", " ", ","):
        monkeypatch.setenv("QUIRE_API_KEY", empty)
        for options in ({}, {"api_key_file": file}):
            with pytest.raises(ConfigError, match=r"QUIRE_API_KEY .*is empty; unset it"):
                good(**options)
        assert good(api_key=("a",)) == "a"
    monkeypatch.delenv("QUIRE_API_KEY")
    for path in (tmp_path / "none", tmp_path, _write(tmp_path / "empty", "# nobody\n")):
        with pytest.raises(ConfigError, match="--api-key-file"):
            good(api_key_file=str(path))


# --- limits ---------------------------------------------------------------------------------------------------


def body_of(size: int) -> bytes:
    """A completion request of so many bytes."""
    bare = json.dumps({**HELLO, "user": ""}).encode()
    return bare[:-2] + b"x" * (size - len(bare)) + bare[-2:]


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_size_of_a_body(config: EngineConfig, core_mode: Callable[[str], None], chunked: bool) -> None:
    async def pieces(body: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    async with run_server(config, max_body_mib=1000 / MIB) as server:
        for size, status in ((1000, 200), (1001, 413), (5000, 413), (1000, 200)):
            body = body_of(size)
            assert len(body) == size
            response = await server.http.post(
                "/v1/completions",
                content=pieces(body) if chunked else body,
                headers={"Content-Type": "application/json"},
            )
            assert response.status_code == status
            if status == 413:
                error = await error_of(response)
                assert (error["type"], error["code"]) == ("invalid_request_error", "body_too_large")


async def test_the_number_of_messages_prompts_and_sequences(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.openai.completions.MAX_SEQUENCES", 4)
    for prompts, n, param in ((4, 1, None), (2049, 1, "prompt"), (2, 2, None), (1, 4, None), (1, 5, "n"), (2, 3, "n")):
        response = await server.http.post("/v1/completions", json={"prompt": ["a"] * prompts, "n": n})
        assert response.status_code == (400 if param else 200)
        assert not param or (await error_of(response))["param"] == param
    message = {"role": "assistant", "content": ""}
    for count, param in ((MAX_MESSAGES, "messages"), (MAX_MESSAGES + 1, "messages")):
        response = await server.http.post("/v1/chat/completions", json={"messages": [message] * count})
        error = await error_of(response)
        assert (response.status_code, error["param"]) == (400, param)
        assert ("at most 4096" in error["message"]) == (count > MAX_MESSAGES), error
        assert (error["code"] == "context_length_exceeded") == (count <= MAX_MESSAGES)
    body = {"model": "echo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * 4097}
    response = await server.http.post("/v1/messages", json=body)
    assert (response.status_code, "at most 4096" in response.text) == (400, True)


async def test_a_request_that_takes_too_long(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config, request_timeout=0.3) as server:
        response = await server.http.post("/v1/completions", json={**HANG, "stream": False})
        error = await error_of(response)
        assert (response.status_code, error["type"], error["code"]) == (504, "server_error", "request_timeout")
        assert "0.3 seconds" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        assert not server.frontend.client.num_open
        stream = await server.http.post("/v1/completions", json=HANG)
        assert stream.status_code == 200
        *_, event, done = [line for line in stream.text.splitlines() if line]
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert done == "data: [DONE]"
        # An answer that is on its way, too: the engine gives up the request.
        texts = list[str]()

        async def is_in_time() -> bool:
            parts = await server.http.post("/v1/completions", json={"prompt": ["hello", "a<hang>"], "stream": True})
            texts.append(parts.text)
            assert "request_timeout" in texts[-1]
            return '"text":"h' in texts[-1]

        await until_async(is_in_time, seen=lambda: texts[-1])
        assert not server.frontend.client.num_open
        await server.until_idle()


async def test_what_a_request_asks_for_inside_has_no_longer_than_it_has(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Deadline] = []
    kept: list[Deadline] = []
    end_at = OutputStream.end_at

    def make(*given: float) -> Deadline:
        made.append(Deadline(*given))
        return made[-1]

    def keep(stream: OutputStream, deadline: Deadline) -> None:
        kept.append(deadline)
        end_at(stream, deadline)

    monkeypatch.setattr(middleware, "Deadline", make)
    monkeypatch.setattr(OutputStream, "end_at", keep)
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    async with run_server(config, request_timeout=60) as server:
        for path, body, count in (
            ("/v1/completions", HELLO, 1),
            ("/invocations", HELLO, 1),
            ("/predict", {"instances": [HELLO] * 3}, 3),
        ):
            made.clear()
            kept.clear()
            assert (await server.http.post(path, json=body)).status_code == 200
            assert len(made) == 1, path
            assert kept == made * count


async def test_a_body_that_does_not_come(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config, request_timeout=0.1) as server:
        address = httpx.URL(server.url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        response = (await reader.read()).decode()  # to the end of the connection
        writer.close()
        assert response.startswith("HTTP/1.1 408 ")
        assert json.loads(response.partition("\r\n\r\n")[2])["error"]["code"] == "request_timeout"


# --- the queue ------------------------------------------------------------------------------------------------


async def test_so_many_may_wait_and_no_more(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    core_mode("one at a time")
    narrow = replace(config, scheduler=replace(config.scheduler, max_num_seqs=1))
    async with run_server(narrow, max_queue=2) as server:
        running = [asyncio.create_task(server.http.post("/v1/completions", json=HANG, timeout=60)) for _ in range(3)]
        client = server.frontend.client
        await until_async(lambda: client.num_open == 3, seen=lambda: client.num_open)
        assert (await server.http.get("/load")).json() == {"server_load": 3}
        for route, body in (
            ("completions", HELLO),
            ("chat/completions", {"messages": [{"role": "user", "content": ""}]}),
            ("responses", {"input": "hello"}),
        ):
            response = await server.http.post(f"/v1/{route}", json=body)
            error = await error_of(response)
            assert (response.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
            assert "2 requests are waiting already" in error["message"]
            assert response.headers["retry-after"] == str(errors.RETRY_AFTER_SECONDS)
        asked = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
        response = await server.http.post("/v1/messages", json={**asked, "max_tokens": 5})
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        assert response.headers["retry-after"] == str(errors.RETRY_AFTER_SECONDS)
        assert (await server.http.post("/v1/messages/count_tokens", json=asked)).status_code == 200
        with pytest.raises(openai.RateLimitError):
            await server.openai.completions.create(model="echo", prompt="hello")
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/v1/models")).status_code == 200
        # A client that tries again is served once there is room.
        monkeypatch.setattr(errors, "RETRY_AFTER_SECONDS", 0.01)
        patient = server.openai.with_options(max_retries=1000)
        again = asyncio.create_task(patient.completions.create(model="echo", prompt="hello"))
        for task in running:
            task.cancel()
        assert (await again).choices[0].text == "hello"
        await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.parametrize(
    ("max_queue", "num_open", "running", "waiting", "is_full"),
    [
        (0, 3, 0, 0, False),  # 4 run at once, and no step has been since
        (0, 4, 0, 0, True),
        (2, 5, 4, 0, False),
        (2, 6, 4, 0, True),
        (2, 5, 4, 1, False),
        (2, 6, 4, 2, True),
        (2, 2, 1, 1, False),  # the KV cache holds no more than one
        (2, 3, 1, 1, True),  # one was sent after these stats
        (2, 1, 4, 2, True),  # other processes' requests wait
        (2, 0, 4, 2, False),  # nothing open here: these stats may be old
        (None, 10**6, 4, 10**6, False),
    ],
)
async def test_what_counts_as_waiting(
    server: Server, max_queue: int | None, num_open: int, running: int, waiting: int, is_full: bool
) -> None:
    client = server.frontend.client
    client._admission = Admission(4, max_queue)
    client._metrics.take(0, EngineStats(running=running, waiting=waiting))
    client._running = dict.fromkeys(map(str, range(num_open)), SimpleNamespace())  # type: ignore[arg-type]
    try:
        if is_full:
            with pytest.raises(QueueFull):
                client.admit()
        else:
            client.admit()
    finally:
        client._running = {}


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"root_path": "llm"}, "--root-path llm"),
        ({"root_path": "/llm/"}, "--root-path /llm/"),
        ({"api_key": ("a", "")}, "--api-key is empty"),
        ({"max_queue": -1}, "--max-queue -1"),
        ({"request_timeout": 0.0}, "--request-timeout 0"),
        ({"request_timeout": float("nan")}, "--request-timeout nan"),
        ({"max_body_mib": -1.0}, "--max-body-mib -1"),
        ({"client_header_timeout": 0.0}, "--client-header-timeout 0: must be greater than 0"),
        ({"max_connections_per_client": 0}, "--max-connections-per-client 0"),
        ({"allowed_headers": ("X-A",)}, "--allowed-headers requires --allowed-origins"),
        ({"allow_credentials": True}, "--allow-credentials requires --allowed-origins"),
        ({"allowed_origins": ('["a"',)}, '["a": not a list of names, and not valid JSON'),
        ({"ssl_keyfile": "k"}, "--ssl-keyfile requires --ssl-certfile"),
        ({"ssl_certfile": "c"}, "--ssl-certfile requires --ssl-keyfile"),
        ({"ssl_ca_certs": "c"}, "--ssl-ca-certs requires --ssl-certfile"),
        ({"ssl_cert_reqs": 1}, "--ssl-cert-reqs 1 requires --ssl-ca-certs"),
        ({"ssl_cert_reqs": 3}, "--ssl-cert-reqs 3: must be 0, 1 or 2"),
        ({"ssl_keyfile": "/none", "ssl_certfile": "/none"}, "--ssl-keyfile /none: No such file"),
        ({"ssl_keyfile": __file__, "ssl_certfile": __file__}, "a certificate and its key"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerOptions(**options).check()
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_options_that_make_sense() -> None:
    ServerOptions().check()
    ServerOptions(
        root_path="/a/b",
        api_key=("a",),
        max_queue=0,
        request_timeout=0.1,
        allowed_origins=("*",),
        allow_credentials=True,
    ).check()
    assert ServerOptions(max_queue="unlimited").queue_limit is None


# --- replicas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", [False, True])
async def test_a_request_chooses_its_replica(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, pooling: bool
) -> None:
    """With an API for replicas 2 to 4."""
    parallel = replace(config.parallel, replicas=5, local_replicas=range(2, 5), external_lb=True)
    config = replace(config, parallel=parallel)
    messages = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    routes: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": ["hello", "you"], "n": 2, "max_tokens": 3},
        "/v1/chat/completions": messages,
        "/v1/messages": {"model": "echo", **messages},
        "/v1/responses": {"input": "hello", "max_output_tokens": 16},
        "/invocations": {"prompt": "hello", "stream": True},
    }
    if pooling:
        config = replace(config, model=replace(config.model, pooling=POOLING))
        routes = {"/v1/embeddings": {"input": ["hello", "you"]}}
    strange = [(wrong, "expected the number of a replica") for wrong in ("-1", "two", "3.0", "0_3", "3 4", "9" * 5000)]
    async with run_server(config) as server:
        client, used = server.frontend.client, set[int]()
        send = client._send

        def seen(message: ToCore, replica: int) -> None:
            used.add(replica)
            send(message, replica)

        monkeypatch.setattr(client, "_send", seen)
        for path, body in routes.items():
            for rank in (4, 2, 3):
                response = await server.http.post(path, json=body, headers={RANK_HEADER: str(rank)})
                assert response.status_code == 200, response.text
                assert used == {rank}
                used.clear()
            for wrong, message in (("1", "choose one of: 2, 3, 4"), *strange):
                response = await server.http.post(path, json=body, headers=[(RANK_HEADER, x) for x in wrong.split()])
                assert response.status_code == 400
                assert RANK_HEADER in response.text
                assert message in response.text
        client.update(ReplicaDraining(3, 60.0))
        response = await server.http.post(path, json=body, headers={RANK_HEADER: "3"})
        assert response.status_code == 503
        assert "replica 3 is draining" in response.text
        assert not used
        assert (await server.http.post(path, json=body)).status_code == 200


async def test_a_request_that_has_chosen_a_replica_outlives_it(
    config: EngineConfig, core_mode: Callable[[str], None]
) -> None:
    config = replace(config, parallel=replace(config.parallel, replicas=2, local_replicas=range(2)))
    async with run_server(config) as server:
        body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body, headers={RANK_HEADER: "1"}) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            server.frontend.client.update(ReplicaLost(1, "killed", returns=True))
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
