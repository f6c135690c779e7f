"""What becomes of each request: its id, its metrics, and its line in the access log.

`AccessMiddleware` is the outermost. Code that knows more of a request, such as why it is refused, fills in its
`HttpRequestRecord`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Iterable
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.process import log
from quire.server.client.http_metrics import CUT, NO_ROUTE, HttpMetrics
from quire.server.client.request_record import RECORD, HttpRequestRecord
from quire.server.config.server_options import ServerOptions
from quire.server.http.errors import reason_of_status

SCOPE_RECORD = "quire.record"
"""Key in an ASGI scope: the `HttpRequestRecord`."""
_ID = b"x-request-id"
_WARNING = b"x-quire-warning"
_MAX_WARNING = 1024
"""Characters of that header."""
_MAX_ID = 128
"""Characters of an id in the log."""
_RANDOM = random.Random()
"""For ids. Asking the system for random bytes takes longer than the rest of the middleware."""


class AccessLog:
    """Writes a line for each request, except for those that the options leave out."""

    def __init__(self, options: ServerOptions) -> None:
        self.prompt_characters = (options.max_log_len or sys.maxsize) if options.log_prompts else 0
        paths = (options.disable_access_log_for_endpoints or "").split(",")
        self._without = frozenset(filter(None, map(str.strip, paths)))

    def write(
        self, method: str, path: str, route: str, request_id: bytes, record: HttpRequestRecord, seconds: float
    ) -> None:
        """Write the line of a request that has ended after `seconds`."""
        if path in self._without or route in self._without:
            return
        fields: dict[str, Any] = {
            "request_id": request_id.decode("latin-1")[:_MAX_ID] or None,
            "key": record.key or None,
            "method": method,
            "route": route,
            "status": record.status or "cut",
        }
        if record.reason:
            fields["reason"] = record.reason
        if record.is_engine_request:
            fields |= {
                "response_id": record.response_id,
                "prompt_tokens": record.num_prompt_tokens,
                "cached_tokens": record.num_cached_tokens,
                "output_tokens": record.num_tokens,
                "queue_seconds": None if record.queue is None else round(record.queue, 6),
                "ttft_seconds": None if record.first_token is None else round(record.first_token, 6),
            }
        fields["total_seconds"] = round(seconds, 6)
        if record.prompts:
            fields["prompts"] = record.prompts
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        log.ACCESS.info("%s", text, extra={"fields": fields})


def _shown(value: Any) -> str:
    text = "-" if value is None else json.dumps(value) if isinstance(value, list) else str(value)
    is_plain = not isinstance(value, str) or (text.isprintable() and not set(text) & set(' ="'))
    return text if is_plain else json.dumps(text)


class Recorder:
    """Counts requests in the metrics, and writes the access log if there is one."""

    def __init__(self, metrics: HttpMetrics, options: ServerOptions) -> None:
        self.metrics = metrics
        self.log = AccessLog(options) if options.access_log else None

    def refuse(self, status: int, reason: str) -> None:
        """Record that a connection was refused, or bytes that are no request."""
        self.metrics.begin(row := self.metrics.row(NO_ROUTE))
        self.end(row, NO_ROUTE, NO_ROUTE.partition(" ")[0], "", b"", HttpRequestRecord(status, reason), 0.0)

    def end(
        self, row: int, name: str, method: str, path: str, request_id: bytes, record: HttpRequestRecord, seconds: float
    ) -> None:
        """Record a request that has ended after `seconds`; `row` is that of its `name`, `METHOD ROUTE`."""
        if 400 <= record.status < 500:
            record.reason = record.reason or reason_of_status(record.status)
        self.metrics.end(row, record.status, seconds)
        if record.reason:
            self.metrics.fail(record.reason)
        if record.key:
            self.metrics.use_key(record.key, record.num_prompt_tokens, record.num_tokens)
        if self.log is not None:
            self.log.write(method, path, name.partition(" ")[2], request_id, record, seconds)


class AccessMiddleware:
    """Adds an `X-Request-Id` to every response, the client's or a new one, and an `X-Quire-Warning` to those with
    warnings; counts and logs requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        recorder: Recorder,
        routes: Iterable[BaseRoute],
        root_path: str = "",
    ) -> None:
        self._app = app
        self._recorder = recorder
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._root_path = root_path
        self._known: dict[str, tuple[str, int]] = {}
        """`METHOD ROUTE` and its row by method and path, for routes without parameters."""

    def _find(self, method: str, path: str) -> tuple[str, int]:
        """Return `METHOD ROUTE`, or `NO_ROUTE`, and its row. The router does not know requests that are refused before
        it.
        """
        below = path.removeprefix(self._root_path) if path.startswith(f"{self._root_path}/") else path
        matching = (r for r in self._routes if method in (r.methods or ()) and r.path_regex.fullmatch(below))
        route = next(matching, None)
        name = NO_ROUTE if route is None else f"{method} {route.path}"
        found = name, self._recorder.metrics.row(name)
        if route is not None and route.path == below:
            self._known[f"{method} {path}"] = found
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or RECORD.get() is not None:  # a call inside the process is part of its request
            return await self._app(scope, receive, send)
        recorder = self._recorder
        record: HttpRequestRecord = scope.setdefault(SCOPE_RECORD, HttpRequestRecord())  # the connection's, if any
        record.prompt_characters = 0 if recorder.log is None else recorder.log.prompt_characters
        given = next((value for name, value in scope["headers"] if name == _ID), b"")
        header = (_ID, given or b"req_%032x" % _RANDOM.getrandbits(128))
        method, path = scope["method"], scope["path"]
        route, row = self._known.get(f"{method} {path}") or self._find(method, path)
        is_whole, begun = False, time.monotonic()

        def send_and_note(message: Message) -> Awaitable[None]:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                if not any(name == _ID for name, _ in message["headers"]):
                    message = {**message, "headers": [*message["headers"], header]}
                if record.warnings:
                    text = ascii("; ".join(record.warnings))[1:-1][:_MAX_WARNING]
                    message = {**message, "headers": [*message["headers"], (_WARNING, text.encode())]}
            elif not message.get("more_body", False):
                is_whole = True
            return send(message)

        recorder.metrics.begin(row)
        token = RECORD.set(record)
        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            record.status, record.reason = record.status or CUT, "cut"
            raise
        except Exception:
            record.status, record.reason = record.status or 500, record.reason or "internal"
            raise
        else:
            if not is_whole:
                record.status, record.reason = record.status or 499, record.reason or "client_closed"
        finally:
            RECORD.reset(token)
            seconds = time.monotonic() - begun
            recorder.end(row, route, method, path, header[1], record, seconds)
