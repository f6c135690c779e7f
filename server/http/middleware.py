"""ASGI middleware: API keys, body size limits and deadlines.

For a chunk of a stream, all of it costs one comparison.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Collection, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.client.fair_share import FairShare
from quire.server.client.output_stream import DEADLINE, Deadline
from quire.server.client.request_record import RECORD
from quire.server.http.api_keys import ApiKeys, Key
from quire.server.http.errors import ApiError, respond
from quire.server.http.in_process import SCOPE_DEADLINE
from quire.server.http.roles import SCOPE_KEY, key_required, wrong_role

MIB = 2**20


class RootPathMiddleware:
    """Also serves every route below this path, whether or not the proxy removes the path."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._path}, receive, send)


class ApiKeyMiddleware:
    """Finds the key of a request. If there are API keys, it rejects requests without one, except for reading the paths
    in `open_paths`; metrics keys read `metrics_paths` only. Which routes need an admin key is a matter of the routes
    (`quire.server.http.roles`).
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str], metrics_paths: Collection[str]
    ) -> None:
        self._app = app
        self._keys = keys
        self._open, self._metrics = open_paths, metrics_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        key = scope[SCOPE_KEY] = self._keys.find(_key(scope))
        if key is not None and (record := RECORD.get()) is not None:
            record.key, record.owner = key.name, key.owner
        readable = scope["path"] if scope["method"] in ("GET", "HEAD") else None
        if "api" not in self._keys.roles or readable in self._open or (key is not None and key.role != "metrics"):
            return await self._app(scope, receive, send)
        if key is None:
            return await respond(key_required())(scope, receive, send)
        if readable not in self._metrics:
            text = "a metrics key only reads /metrics, /ui/state and /ui/history"
            return await respond(wrong_role(text))(scope, receive, send)
        await self._app(scope, receive, send)


class FairShareMiddleware:
    """Assigns requests to the shares of their clients. `by` and `weights` are as in `FairShare`; keys have weights of
    their own.
    """

    def __init__(self, app: ASGIApp, by: str, weights: Mapping[str, float]) -> None:
        self._app = app
        self._fair_share = FairShare(by, weights)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key: Key | None = scope.get(SCOPE_KEY)
        if self._fair_share.by == "key" and key is not None:
            self._fair_share.enter(key.name, key.weight)
        elif self._fair_share.by == "address" and scope.get("client"):
            self._fair_share.enter(_network(scope["client"][0]))
        else:  # the body has the user; who has none, shares with the others without
            self._fair_share.enter("")
        await self._app(scope, receive, send)


class LimitsMiddleware:
    """Limits the size of a body in bytes, and the duration of a request in seconds (None: no limit).

    While the body is read, errors have status 413 or 408. Requests to the engine are then limited by `DEADLINE`.
    """

    def __init__(self, app: ASGIApp, max_body: int, timeout: float | None) -> None:
        self._app = app
        self._max_body = max_body
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_body:
            return await respond(self._too_large())(scope, receive, send)
        # A call inside the process has the deadline of the request that it is part of.
        deadline: Deadline | None = scope.get(SCOPE_DEADLINE)
        if deadline is None and self._timeout is not None:
            deadline = Deadline(asyncio.get_running_loop().time() + self._timeout, self._timeout)
        DEADLINE.set(deadline)
        scope = {**scope, SCOPE_DEADLINE: deadline}
        size, is_whole = 0, False

        async def receive_within_limits() -> Message:
            nonlocal size, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline and deadline.at):
                    message = await receive()
            except TimeoutError:
                text = f"the body did not arrive within {self._timeout:g} seconds"
                raise ApiError(408, text, "request_timeout", {"Connection": "close"}) from None
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise self._too_large()
            is_whole = not message.get("more_body", False)
            return message

        await self._app(scope, receive_within_limits, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body / MIB:g} MiB", "body_too_large")


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for header, value in scope["headers"] if header == name), b"")


def _network(address: str) -> str:
    """The address of a client. IPv6 addresses are cut to 64 bits: a client has all that begin with them."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))


def _key(scope: Scope) -> bytes:
    """The request's key, as OpenAI's or Anthropic's clients send it."""
    scheme, _, key = _header(scope, b"authorization").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else _header(scope, b"x-api-key")
