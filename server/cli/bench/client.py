"""A small HTTP client with little overhead of its own.

A chunk of a streamed response costs one callback: no task is woken, and the time is taken when it is read from the
socket.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from quire.server.cli import remote
from quire.server.cli.bench.load import LoadClock, SendTimes
from quire.server.cli.bench.stream import RequestRecord, message_of

_LONGEST_ERROR = 200
"""Characters of an error's body to show."""

OnBody = Callable[[float, bytes], None]


class BenchRefused(Exception):
    """The server responded with a status other than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        try:
            text = message_of(json.loads(body))
        except ValueError:
            text = " ".join(body.decode(errors="replace").split())
        super().__init__(f"{status}: {text[:_LONGEST_ERROR]}" if text else str(status))
        self.status = status


class BenchClient:
    """Sends requests to one server, over persistent connections. Use it as a context manager."""

    def __init__(self, base_url: str, api_key: str | None, clock: LoadClock) -> None:
        self.base_url = remote.base_url(base_url, "--base-url")
        url = urlsplit(self.base_url)
        assert url.hostname is not None
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._path = url.path.rstrip("/")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {url.netloc.rpartition('@')[2]}\r\nUser-Agent: quire-bench\r\n{key}"
        self._clock = clock
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    def __enter__(self) -> BenchClient:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open:
            connection.close()

    async def get(self, path: str) -> bytes:
        """Return the response of a path; raises `OSError` and `BenchRefused`."""
        body = bytearray()
        await self._exchange(
            f"GET {self._path}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), lambda _, part: body.extend(part)
        )
        return bytes(body)

    def prepare(self, path: str, body: bytes) -> bytes:
        """Return the bytes of a request."""
        return (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def stream(self, request: bytes, moments: SendTimes, prompt_len: int) -> RequestRecord:
        """Send a request for a streamed response and record it. Errors are only in the record."""
        record = RequestRecord(moments, prompt_len)
        try:
            await self._exchange(request, record.feed)
        except (OSError, BenchRefused) as error:
            if not record.is_done:
                record.error = record.error or reason(error)
        record.close(self._clock.now())
        return record

    async def _exchange(self, request: bytes, on_body: OnBody) -> None:
        while True:
            is_used = bool(self._idle)
            connection = self._idle.pop() if is_used else await self._connect()
            try:
                keep = await connection.exchange(request, on_body)
            except BaseException as error:
                connection.close()
                self._open.discard(connection)
                if is_used and not connection.has_answered and isinstance(error, ConnectionError):
                    continue  # the server had closed the idle connection
                raise
            if keep:
                self._idle.append(connection)
            else:
                connection.close()
                self._open.discard(connection)
            return

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self._clock.now), self._host, self._port, ssl=self._ssl
        )
        self._open.add(connection)
        return connection


def reason(error: BaseException) -> str:
    """A short description of why a request failed."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; one request at a time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[bool] | None = None
        self._is_lost = False
        self.has_answered = False

    async def exchange(self, request: bytes, on_body: OnBody) -> bool:
        """Send a request and pass on the body of the response; returns whether the connection can be reused."""
        assert self._transport is not None
        self.has_answered = False
        if self._is_lost:
            raise ConnectionResetError("the server has closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._refusal: bytearray | None = None
        self._is_sized = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._done = None

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    # Called by asyncio:

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        self._arrived = self._now()
        self.has_answered = True
        if self._done is None:
            return self.close()  # not requested
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the server sent an invalid HTTP response: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self.has_answered and not self._is_sized and error is None:
            self._finish(False)  # such a response ends with its connection
        else:
            self._fail(error or ConnectionResetError("the server closed the connection before the end of its response"))

    # Called by the parser:

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_sized = True

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._refusal = bytearray()

    def on_body(self, body: bytes) -> None:
        if self._refusal is None:
            self._on_body(self._arrived, body)
        else:
            self._refusal += body

    def on_message_complete(self) -> None:
        self._finish(self._parser.should_keep_alive())

    def _finish(self, keep: bool) -> None:
        if self._done is None or self._done.done():
            return
        if self._refusal is not None:
            self._done.set_exception(BenchRefused(self._parser.get_status_code(), bytes(self._refusal)))
        else:
            self._done.set_result(keep)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
