"""One HTTP request on a connection of its own, whose port and pace are known."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import h11

KEY = {"authorization": "Bearer chaos"}
_SMALL_BUFFER = 4096
"""Receive buffer of a slow reader in bytes: the server soon finds that it cannot send."""


class Refused(Exception):
    """The server takes no requests: nobody listens, or the answer is 503; or it has no such model (404)."""


class Broken(Exception):
    """The connection ended before the answer, or the answer is an error."""


@dataclass
class Pace:
    """The pace of a client: `size` bytes at a time, with pauses of `pause` seconds."""

    size: int = 1 << 16
    pause: float = 0.0


async def events(
    address: tuple[str, int], path: str, body: dict[str, Any], pace: Pace, on_connect: Callable[[int], None]
) -> AsyncGenerator[dict[str, Any] | None]:
    """Yield the payloads of an event stream, then None for each `[DONE]`; or the one payload of a JSON answer, also of
    one with status 400.

    `on_connect` gets the local port. Raises `Refused` and `Broken`.
    """
    client = socket.socket()
    client.setblocking(False)
    try:
        if pace.pause:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(client, address)
        except ConnectionError as error:
            raise Refused(str(error)) from None
        on_connect(client.getsockname()[1])
        try:
            async for payload in _exchange(client, path, body, pace):
                yield payload
        except (OSError, h11.RemoteProtocolError) as error:
            raise Broken(f"the connection broke: {error!r}") from None
    finally:
        client.close()


async def _exchange(
    client: socket.socket, path: str, body: dict[str, Any], pace: Pace
) -> AsyncGenerator[dict[str, Any] | None]:
    loop, http = asyncio.get_running_loop(), h11.Connection(h11.CLIENT)
    content = json.dumps(body).encode()
    headers = {"host": "quire", "content-type": "application/json", "connection": "close", **KEY}
    request = h11.Request(method="POST", target=path, headers=[*headers.items(), ("content-length", str(len(content)))])
    await loop.sock_sendall(client, b"".join(filter(None, map(http.send, (request, h11.Data(content))))))
    status, is_stream, unread = 0, False, b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await loop.sock_recv(client, pace.size))
            await asyncio.sleep(pace.pause)
        elif isinstance(event, h11.Response):
            status = event.status_code
            is_stream = dict(event.headers).get(b"content-type", b"").startswith(b"text/event-stream")
        elif isinstance(event, h11.Data):
            unread += event.data
            while is_stream and b"\n\n" in unread:
                line, unread = unread.split(b"\n\n", 1)
                data = line.removeprefix(b"data: ")
                yield None if data == b"[DONE]" else _checked(json.loads(data))
        else:
            break
    if status in (404, 503):
        raise Refused(unread.decode()[:500])
    if status == 400:
        yield json.loads(unread)
        return
    if status != 200 or (is_stream and unread):
        raise Broken(f"{status}: {unread.decode()[:500]}")
    if not is_stream:
        yield _checked(json.loads(unread))


def _checked(payload: dict[str, Any]) -> dict[str, Any]:
    if "error" in payload:
        raise Broken(json.dumps(payload["error"]))
    return payload
