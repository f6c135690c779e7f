"""HTTP connections: time limits for headers and bodies, and limits on headers, connections and descriptors.

uvicorn itself waits for a request forever once its first byte has arrived, and reads pipelined requests without end.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.client.request_record import HttpRequestRecord
from quire.server.config.server_options import ServerOptions
from quire.server.http.access import SCOPE_RECORD, Recorder
from quire.server.http.errors import error_object, reason_of_status

MAX_HEADER_BYTES = 64 * 2**10
"""Bytes of a request's line and headers."""
MAX_PIPELINED = 32
"""Requests of a connection that wait for the responses to earlier ones."""
_BODY_RATE = 1024
"""Bytes of a body that give a client one more second."""
_DESCRIPTORS = 65536
"""File descriptors that the server asks the system for."""
_RESERVE = 64
"""File descriptors that connections leave to the rest of the process."""
_LOG_SECONDS = 60.0
"""Minimum interval between two messages about the same shortage."""

logger = logging.getLogger(__name__)
_uvicorn_logger = logging.getLogger("quire.uvicorn")
_uvicorn_logger.setLevel(logging.ERROR)
"""In place of uvicorn's own logger, which has no format. Its warnings are about malformed requests."""


class ConnectionLimits:
    """The limits of all connections of an API process, and their usage. Times are in seconds."""

    def __init__(self, options: ServerOptions) -> None:
        self.header_seconds = options.client_header_timeout
        self.body_seconds = options.client_body_timeout
        self.num_by_client: Counter[str] = Counter()
        self._max_by_client = options.max_connections_per_client
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
        self._descriptors = max(soft, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._descriptors, hard))
        self._warned: dict[str, float] = {}
        """Time until which there is no further message, by its subject."""

    def refusal(self, client: str, descriptor: int) -> tuple[HTTPStatus, str] | None:
        """Return why another connection of a client is refused, or None. The kernel gives out the lowest descriptor, so
        it tells how many are in use.
        """
        if descriptor > self._descriptors - _RESERVE:
            text = f"{descriptor} of {self._descriptors} file descriptors are in use"
            remedy = "raise the limit (ulimit -n), or set --max-connections-per-client"
            self._warn("", f"connections are refused: {text}; {remedy}")
            return HTTPStatus.SERVICE_UNAVAILABLE, "the server has too many connections; try again"
        if client and self._max_by_client is not None and self.num_by_client[client] >= self._max_by_client:
            text = f"{client} has {self._max_by_client} connections (--max-connections-per-client)"
            self._warn(client, f"{text}; further ones are refused")
            return HTTPStatus.TOO_MANY_REQUESTS, f"{text}; close some"
        return None

    def _warn(self, subject: str, text: str) -> None:
        now = time.monotonic()
        self._warned = {each: until for each, until in self._warned.items() if until > now}
        if subject not in self._warned:
            self._warned[subject] = now + _LOG_SECONDS
            logger.warning("%s", text)


def protocol(options: ServerOptions, recorder: Recorder) -> Callable[..., asyncio.Protocol]:
    """Return the factory of a connection's protocol, for uvicorn. `recorder` records what is refused here."""
    return partial(HttpProtocol, limits=ConnectionLimits(options), recorder=recorder)


class HttpProtocol(HttpToolsProtocol):
    """A connection. While it waits for the client, it is in a phase with a time limit: headers, or body."""

    def __init__(self, *args: Any, limits: ConnectionLimits, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _uvicorn_logger
        self._limits, self._recorder = limits, recorder
        self._address: str | None = None
        """The client's, if the connection is counted."""
        self._phase: Literal["headers", "body"] | None = None
        self._begun = 0.0
        self._num_bytes = 0
        """Received since the phase began, or since the last one ended."""
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or was last."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if refusal := self._limits.refusal(address, transport.get_extra_info("socket").fileno()):
            self._refuse(*refusal, "overloaded")
        else:
            self._address = address
            self._limits.num_by_client[address] += 1
            self._begin("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_phase()
        # uvicorn passes only the request that was parsed last, but it may wait behind the one that is being answered.
        for cycle in filter(None, (self._running, *(cycle for cycle, _ in self.pipeline))):
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()
        self.pipeline.clear()
        if self._address is not None:
            self._limits.num_by_client[self._address] -= 1
            if not self._limits.num_by_client[self._address]:
                del self._limits.num_by_client[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is None and (self.cycle is None or self.cycle.response_complete):
            self._begin("headers")
        self._num_bytes += len(data)
        super().data_received(data)
        if self._phase != "body" and self._num_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse_headers()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) == MAX_PIPELINED:
            text = f"more than {MAX_PIPELINED} requests wait for the responses to earlier ones on this connection"
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, text, "overloaded")
            raise ValueError(text)  # ends the parser
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refuse_headers()
            raise ValueError
        self._begin("body")
        self.scope[SCOPE_RECORD] = HttpRequestRecord()  # type: ignore[literal-required]
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self.pipeline:  # super() reads on
            self.flow.pause_reading()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def on_message_complete(self) -> None:
        self._end_phase()
        super().on_message_complete()

    def _begin(self, phase: Literal["headers", "body"]) -> None:
        self._end_phase()
        self._phase, self._begun = phase, self.loop.time()
        limits = self._limits
        self._timer = self.loop.call_later(
            limits.header_seconds if phase == "headers" else limits.body_seconds, self._on_time
        )

    def _end_phase(self) -> None:
        self._phase, self._num_bytes = None, 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        now = self.loop.time()
        if self._phase == "headers":
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"no request within {self._limits.header_seconds:g} seconds")
            return
        if not self.flow.read_paused and self._num_bytes < _BODY_RATE * (now - self._begun):
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the body arrives too slowly")
        else:  # or it is the server that is slow
            self._begun, self._num_bytes = now, 0
            self._timer = self.loop.call_later(self._limits.body_seconds, self._on_time)

    def _refuse_headers(self) -> None:
        text = f"the headers have more than {MAX_HEADER_BYTES >> 10} KiB"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)

    def _refuse(self, status: HTTPStatus, text: str, reason: str | None = None) -> None:
        """Close the connection, with an error unless a response has begun, or an earlier request has none yet."""
        reason = reason or reason_of_status(status)
        running, phase = self._running, self._phase
        is_idle = running is None or running.response_complete
        is_reading = running is self.cycle and phase == "body" and running is not None and not running.response_started
        self._end_phase()
        if is_reading and running is not None:  # the request is recorded when it ends
            record: HttpRequestRecord = running.scope[SCOPE_RECORD]  # type: ignore[literal-required]
            record.status, record.reason = status, reason
        else:
            self._recorder.refuse(status, reason)
        if not self.pipeline and (is_idle or is_reading):
            body = msgspec.json.encode(error_object(text, "invalid_request_error"))
            head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/json\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self.transport.close()
