"""What becomes of each request: its id, its metrics, and its line in the access log.

`AccessMiddleware` is the outermost. Code that knows more of a request, such as why it is refused, fills in its
`RequestRecord`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Collection, Iterable
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.process import log
from quire.server.client.http_metrics import CUT, NO_ROUTE, HttpMetrics
from quire.server.client.request_record import RECORD, RequestRecord
from quire.server.http.errors import reason_of_status

SCOPE_RECORD = "quire.record"
"""Key in an ASGI scope: the `RequestRecord`."""
_ID = b"x-request-id"
_RANDOM = random.Random()
"""For ids. Asking the system for random bytes takes longer than the rest of the middleware."""


class AccessLog:
    """Writes a line for each request, unless its path or its route is in `without`."""

    def __init__(self, without: Collection[str], *, has_prompts: bool, max_characters: int | None) -> None:
        """`max_characters` is the maximum of a prompt; None: all."""
        self.has_prompts = has_prompts
        self._without = without
        self._max_characters = max_characters

    def write(self, scope: Scope, request_id: bytes, route: str, record: RequestRecord, seconds: float) -> None:
        """Write the line of a request that has ended after `seconds`; `route` is `METHOD ROUTE`."""
        _, _, template = route.partition(" ")
        if scope["path"] in self._without or template in self._without:
            return
        fields: dict[str, Any] = {
            "request_id": request_id.decode("latin-1"),
            "key": record.key or "-",
            "method": scope["method"],
            "route": template,
            "status": record.status or "cut",
        }
        if record.reason:
            fields["reason"] = record.reason
        if record.is_engine_request:
            fields |= {
                "prompt_tokens": record.num_prompt_tokens,
                "cached_tokens": record.num_cached_tokens,
                "output_tokens": record.num_tokens,
                "queue_seconds": None if record.queue is None else round(record.queue, 6),
                "ttft_seconds": None if record.first_token is None else round(record.first_token, 6),
            }
        fields["total_seconds"] = round(seconds, 6)
        if record.prompts:
            fields["prompts"] = [text[: self._max_characters] for text in record.prompts]
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        log.ACCESS.info("%s", text, extra={"fields": fields})


def _shown(value: Any) -> str:
    text = "-" if value is None else json.dumps(value) if isinstance(value, list) else str(value)
    is_plain = not isinstance(value, str) or (text.isprintable() and not set(text) & set(' ="'))
    return text if is_plain else json.dumps(text)


class _Routes:
    """Finds the route of a request, without its router: it may be refused before."""

    def __init__(self, routes: Iterable[BaseRoute], root_path: str) -> None:
        self._root_path = root_path
        self._of: dict[str, str] = {}
        """`METHOD ROUTE` by method and path."""
        self._with_parameters: list[tuple[Route, str]] = []
        for route in (each for each in routes if isinstance(each, Route)):
            for method in route.methods or ():
                if "{" in route.path:
                    self._with_parameters.append((route, method))
                else:
                    self._of[f"{method} {route.path}"] = f"{method} {route.path}"

    def find(self, scope: Scope) -> str:
        """Return `METHOD ROUTE`, or `NO_ROUTE`."""
        method, path = scope["method"], scope["path"]
        if self._root_path and path.startswith(f"{self._root_path}/"):
            path = path[len(self._root_path) :]
        if found := self._of.get(f"{method} {path}"):
            return found
        for route, its_method in self._with_parameters:
            if method == its_method and route.path_regex.match(path):
                return f"{method} {route.path}"
        return NO_ROUTE


class AccessMiddleware:
    """Adds an `X-Request-Id` to every response, the client's or a new one, and counts and logs requests."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        routes: Iterable[BaseRoute],
        root_path: str = "",
        access_log: AccessLog | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = _Routes(routes, root_path)
        self._log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or RECORD.get() is not None:  # a call inside the process is part of its request
            return await self._app(scope, receive, send)
        record = RequestRecord(logs_prompts=self._log is not None and self._log.has_prompts)
        scope[SCOPE_RECORD] = record
        given = next((value for name, value in scope["headers"] if name == _ID), b"")
        header = (_ID, given or b"req_%032x" % _RANDOM.getrandbits(128))
        route, is_whole, begun = self._routes.find(scope), False, time.monotonic()

        def send_and_note(message: Message) -> Awaitable[None]:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                if not any(name == _ID for name, _ in message["headers"]):
                    message = {**message, "headers": [*message["headers"], header]}
            elif not message.get("more_body", False):
                is_whole = True
            return send(message)

        row, token = self._metrics.begin(route), RECORD.set(record)
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
            if 400 <= record.status < 500:
                record.reason = record.reason or reason_of_status(record.status)
            self._metrics.end(row, record.status, seconds)
            if record.reason:
                self._metrics.fail(record.reason)
            if record.key:
                self._metrics.use_key(record.key, record.num_prompt_tokens, record.num_tokens)
            if self._log is not None:
                self._log.write(scope, header[1], route, record, seconds)
