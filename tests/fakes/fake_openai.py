"""A server with the OpenAI API that follows a script, and a clock that advances only when the script says so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.server.cli.bench.load import LoadClock


class ScriptedClock(LoadClock):
    """Time stands still but for `go_on`. Waiting for a moment takes it there."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._looks = 0
        self._looked = threading.Condition()

    def now(self) -> float:
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return self.time

    async def until(self, moment: float) -> None:
        self.time = max(self.time, moment)

    def next_look(self) -> Callable[[], None]:
        """A function that returns once somebody has looked at the time, counted from now."""
        with self._looked:
            looks = self._looks

        def wait() -> None:
            with self._looked:
                assert self._looked.wait_for(lambda: self._looks > looks, timeout=60)

        return wait


@dataclass
class Connection:
    """The actions of a script on a request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    clock: ScriptedClock

    def reply(self, status: int, content: Mapping[str, Any], more: str = "") -> None:
        self.reply_text(json.dumps(content), status, more)

    def reply_text(self, text: str, status: int = 200, more: str = "") -> None:
        data = text.encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{more}\r\n"
        self.writer.write(head.encode() + data)

    def begin(self) -> None:
        """Start a stream of events."""
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def send(self, data: bytes, after: float = 0.0) -> None:
        """A part of the stream, `after` so many seconds; returns once the client has noted when it came."""
        self.clock.time += after

        wait = self.clock.next_look()
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await asyncio.to_thread(wait)

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")


def event(content: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def text(text: str) -> bytes:
    """An event with text."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


def usage(prompt: int, tokens: int) -> bytes:
    """The last event but one."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})


DONE = event(b"[DONE]")

Script = Callable[[Connection], Awaitable[None]]


@dataclass
class FakeServer:
    """Its address, and the requests that it has received."""

    url: str
    clock: ScriptedClock
    asked: list[Connection] = field(default_factory=list)
    num_connections: int = 0
    metrics: list[str | None] = field(default_factory=list)
    """The next answers of /metrics, None for status 404; after these, answers have no metrics."""


@contextlib.contextmanager
def fake_server(script: Script) -> Iterator[FakeServer]:
    """A server on a free port, in a thread of its own. `script` answers every POST; /v1/models names one model, and
    /metrics is as `FakeServer.metrics` says."""
    clock = ScriptedClock()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = FakeServer("", clock)
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        server.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):  # both are its end
            async for connection in _requests(reader, writer, clock):
                if connection.path.endswith("/v1/models"):
                    connection.reply(200, {"data": [{"id": "fake/model"}]})
                elif connection.path.endswith("/metrics"):
                    exposition = server.metrics.pop(0) if server.metrics else ""
                    connection.reply_text(exposition or "", 404 if exposition is None else 200)
                else:
                    server.asked.append(connection)
                    await script(connection)
        writer.close()
        tasks.discard(task)

    async def start() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0)

    async def stop(listening: asyncio.Server) -> None:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    try:
        listening = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(stop(listening), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _requests(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: ScriptedClock
) -> AsyncIterator[Connection]:
    while not writer.is_closing():
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except asyncio.IncompleteReadError:
            return
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        yield Connection(head[0].split()[1], headers, json.loads(data or b"{}"), writer, clock)
