"""Calls the ASGI application inside this process, without a socket."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope

logger = logging.getLogger(__name__)

SCOPE_DEADLINE = "quire.deadline"
"""Key in an ASGI scope: the deadline of the request (`client.Deadline`), if it has one."""
_DROPPED = frozenset({b"content-type", b"content-length", b"transfer-encoding"})


@dataclass
class InProcessReply:
    """A complete response."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)

    async def take(self, message: Message) -> None:
        """The `send` function of ASGI."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")


def serves(app: Starlette, method: str, path: str) -> bool:
    """Return whether the application has a route for this method and path."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": [], "app": app}
    return any(route.matches(scope)[0] == Match.FULL for route in app.router.routes)


async def post(
    app: ASGIApp, path: str, body: bytes, *, like: Scope | None = None, receive: Receive | None = None
) -> InProcessReply:
    """POST a JSON body to a route. `like` and `receive` belong to the request that this one is part of."""
    reply = InProcessReply()
    try:
        await app(post_scope(path, body, like), body_before(body, receive or _never), reply.take)
    except Exception:
        if not reply.status:
            raise
        logger.exception("POST %s", path)  # Starlette responds with 500, and raises the error again
    return reply


def post_scope(path: str, body: bytes, like: Scope | None = None) -> Scope:
    """The ASGI scope of a POST of JSON. Client, headers and deadline come from `like`."""
    like = like or {}
    headers = [header for header in like.get("headers", ()) if header[0] not in _DROPPED]
    return {
        "type": "http",
        "asgi": like.get("asgi", {"version": "3.0", "spec_version": "2.3"}),
        "http_version": "1.1",
        "method": "POST",
        "scheme": like.get("scheme", "http"),
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            *headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": like.get("client"),
        "server": like.get("server"),
        SCOPE_DEADLINE: like.get(SCOPE_DEADLINE),
    }


def body_before(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body, then the messages of `receive` (the disconnection of the client)."""
    is_read = False

    async def read() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("an in-process call has no client that could disconnect")
