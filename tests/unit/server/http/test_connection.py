"""Slow clients, and clients that open many connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.server.http import connection
from tests.fakes.api_server import Server, run_server

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
SOON: Any = {"client_header_timeout": 0.2, "client_body_timeout": 0.2}


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))


async def rest(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and message of the answer until the connection is closed; 0 if there is none."""
    head, _, body = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)["error"]["message"]) if head else (0, "")


@pytest.mark.parametrize("begin", [b"", b"\r\n", b"P", HEAD])
async def test_headers_that_do_not_come(config: EngineConfig, core_mode: Callable[[str], None], begin: bytes) -> None:
    async with run_server(config, **SOON) as server:
        reader, writer = await connect(server)
        writer.write(begin)
        assert await rest(reader) == (408, "no request within 0.2 seconds")
        writer.close()


async def test_headers_that_do_not_come_after_a_request(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config, **SOON) as server:
        for begin in (b"\r\n", HEAD):
            reader, writer = await connect(server)
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.3)  # longer than the limit: an idle connection is another matter
            writer.write(begin)
            assert b"408" in await asyncio.wait_for(reader.read(), 60)
            writer.close()


@pytest.mark.parametrize("length", [b"Content-Length: 99\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
async def test_a_body_that_does_not_come(config: EngineConfig, core_mode: Callable[[str], None], length: bytes) -> None:
    async with run_server(config, **SOON) as server:
        reader, writer = await connect(server)
        writer.write(HEAD + length)
        assert await rest(reader) == (408, "the body arrives too slowly")
        writer.close()
        assert server.frontend.client.num_open == 0


async def test_a_body_that_stops_is_not_waited_for(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    """No matter how much of it has come before."""
    async with run_server(config, **SOON) as server:
        reader, writer = await connect(server)
        writer.write(HEAD + b"Content-Length: 9999999\r\n\r\n" + bytes(1 << 20))
        assert await rest(reader) == (408, "the body arrives too slowly")
        writer.close()


async def test_a_body_that_goes_on_has_time(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that the limit is over, some of it has come."""
    monkeypatch.setattr(connection, "_BODY_RATE", 0.01)
    made: list[connection.HttpProtocol] = []
    connection_made = connection.HttpProtocol.connection_made

    def note(one: connection.HttpProtocol, transport: asyncio.Transport) -> None:
        made.append(one)
        connection_made(one, transport)

    monkeypatch.setattr(connection.HttpProtocol, "connection_made", note)
    async with run_server(config) as server:
        reader, writer = await connect(server)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY))
        while not (made and made[0]._phase == "body"):
            await asyncio.sleep(0)
        for byte in BODY[:-1]:
            writer.write(bytes([byte]))
            while not made[0]._num_bytes:
                await asyncio.sleep(0)
            timer = made[0]._timer
            assert timer is not None
            timer.cancel()
            made[0]._on_time()
        writer.write(BODY[-1:])
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()


async def test_answers_have_time(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config, **SOON) as server:
        reader, writer = await connect(server)
        long = json.dumps({"prompt": "a<hang>", "max_tokens": 2}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(long) + long)
        await asyncio.sleep(0.5)
        assert not reader.at_eof()
        assert server.frontend.client.num_open == 1
        writer.close()
        while server.frontend.client.num_open:
            await asyncio.sleep(0.01)


async def test_pipelined_requests(server: Server) -> None:
    reader, writer = await connect(server)
    writer.write((HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY) * 3)
    for _ in range(3):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
    writer.close()


async def test_endless_headers(server: Server) -> None:
    reader, writer = await connect(server)
    begin = b"GET / HTTP/1.1\r\nX: "
    writer.write(begin + b"a" * (connection.MAX_HEADER_BYTES + 1 - len(begin)))
    assert (await rest(reader))[0] == 431
    writer.close()


async def test_the_connections_of_a_client_are_limited(
    config: EngineConfig, core_mode: Callable[[str], None], caplog: pytest.LogCaptureFixture, log: None
) -> None:
    async with run_server(config, max_connections_per_client=2) as server:
        held = [await connect(server) for _ in range(2)]
        for reader, writer in held:
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        for _ in range(3):
            reader, writer = await connect(server)
            assert (await rest(reader))[0] == 429
            writer.close()
        assert [record.getMessage() for record in caplog.records if record.name == connection.__name__] == [
            "127.0.0.1 has 2 connections (--max-connections-per-client); further ones are refused"
        ]
        held[0][1].close()
        await held[0][1].wait_closed()
        while (await server.http.get("/version")).status_code == 429:
            await asyncio.sleep(0.01)
        held[1][1].close()


async def test_some_descriptors_are_left(
    config: EngineConfig,
    core_mode: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    log: None,
) -> None:
    monkeypatch.setattr(connection, "_RESERVE", resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    async with run_server(config, wait=False) as server:
        for _ in range(2):
            reader, writer = await connect(server)
            assert (await rest(reader))[0] == 503
            writer.close()
        (warning,) = [record.getMessage() for record in caplog.records if record.name == connection.__name__]
        assert "file descriptors are in use; raise the limit (ulimit -n)" in warning


async def test_upgrades_and_broken_requests_are_not_logged(
    server: Server, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], log: None
) -> None:
    for request in (
        b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"nonsense\r\n\r\n",
    ):
        reader, writer = await connect(server)
        writer.write(request)
        assert await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert not [record for record in caplog.records if "uvicorn" in record.name]
    assert capfd.readouterr().err == ""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages of quire reach caplog."""
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)


GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_pipelined_requests_are_answered_in_turn(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config) as server:
        reader, writer = await connect(server)
        for _ in range(3):
            writer.write(GET * connection.MAX_PIPELINED)
            for _ in range(connection.MAX_PIPELINED):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
                assert b"200 OK" in head
                await reader.readuntil(b"}")
        writer.close()


async def test_pipelined_requests_without_end_are_refused(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    on_headers_complete = connection.HttpProtocol.on_headers_complete

    def count(one: connection.HttpProtocol) -> None:
        begun.append(one)
        on_headers_complete(one)

    monkeypatch.setattr(connection.HttpProtocol, "on_headers_complete", count)
    async with run_server(config) as server:
        reader, writer = await connect(server)
        writer.write(GET * 5000)
        with contextlib.suppress(ConnectionResetError):  # if the server closes it before all has been sent
            status, message = await rest(reader)
            assert (status, message[:18]) == (429, "more than 32 reque")
        assert len(begun) < 2 * connection.MAX_PIPELINED
        writer.close()


async def test_what_is_pipelined_is_not_read_on_before_it_is_answered(
    config: EngineConfig, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []
    receive = connection.HttpProtocol.data_received

    def data_received(one: connection.HttpProtocol, data: bytes) -> None:
        waiting.append(len(one.pipeline))
        receive(one, data)

    monkeypatch.setattr(connection.HttpProtocol, "data_received", data_received)
    monkeypatch.setattr(connection, "MAX_PIPELINED", 1000)
    async with run_server(config) as server:
        reader, writer = await connect(server)
        for _ in range(40):
            writer.write(GET * 3)
            await asyncio.sleep(0)
        for _ in range(120):
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), 60)
        assert not any(waiting)
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (
            b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (70 << 10) + b"\r\n\r\n",
            (431, "the headers have more than 64 KiB"),
        ),
        (b"nonsense\r\n\r\n", (400, "Invalid HTTP request received.")),
    ],
)
async def test_what_is_malformed_gets_an_error_object(
    server: Server, request_bytes: bytes, expected: tuple[int, str]
) -> None:
    reader, writer = await connect(server)
    writer.write(request_bytes)
    assert await rest(reader) == expected
    writer.close()


def post(**body: Any) -> bytes:
    content = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content


@pytest.mark.parametrize("behind", [b"", GET, GET * 5])
async def test_a_client_that_leaves_aborts_its_request_whatever_waits_behind_it(server: Server, behind: bytes) -> None:
    _, writer = await connect(server)
    writer.write(post(prompt="a<hang>") + behind)
    while not server.frontend.client.num_open:
        await asyncio.sleep(0.001)
    writer.close()
    while server.frontend.client.num_open:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "bad", [b"nonsense\r\n\r\n", GET + b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a" * (70 << 10)]
)
async def test_no_error_is_written_into_another_response(server: Server, bad: bytes) -> None:
    reader, writer = await connect(server)
    writer.write(post(prompt="a<hang>", stream=True))
    begin = await reader.readuntil(b"\r\n\r\n")
    writer.write(bad)
    rest_of_it = await asyncio.wait_for(reader.read(), 60)
    assert (begin + rest_of_it).count(b"HTTP/1.1") == 1
    while server.frontend.client.num_open:
        await asyncio.sleep(0.001)
    writer.close()
