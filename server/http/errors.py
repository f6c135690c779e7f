"""Errors in the format of the OpenAI API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import logging
import time
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from quire.engine.protocol.errors import InvalidParameter
from quire.server.client.admission import QueueFull
from quire.server.client.fair_share import Overloaded
from quire.server.client.output_stream import (
    EngineUnavailable,
    RequestAborted,
    RequestFailed,
    RequestInvalid,
    RequestTimedOut,
)
from quire.server.client.request_record import RECORD
from quire.server.client.tracing import TRACE
from quire.server.media.types import MediaUnavailable
from quire.server.text.tokenizer import TokenizerFailed

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 2
"""Value of the Retry-After header when the queue is full."""

_LOG_SECONDS = 60.0
"""Seconds between warnings about the tokenizer."""
_MAX_REASON = 200
"""Characters of a reason in the log."""
_MAX_TEXT = 2000
"""Characters of a message."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "An error in the format of the OpenAI API.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
"""Schema of `error_object`, for the OpenAPI document."""


class ModelNotFound(InvalidParameter):
    """The request names a model that does not exist here."""


class ResponseNotFound(InvalidParameter):
    """The request names a response that is not stored here."""


class ApiError(HTTPException):
    """A request rejected before its endpoint is called, with an error code of the API."""

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.code = code


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error, also sent as an event when a stream fails. Long texts, as of a request, are cut."""
    return {"error": {"message": _cut(message), "type": kind, "param": param and _cut(param), "code": code}}


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT // 2]} … {text[-_MAX_TEXT // 4 :]}"


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body for an error. Its type is also the trace's, and its reason the record's."""
    if isinstance(error, TokenizerFailed):
        _tokenizer_warnings.add(error)
    status, body = _describe(error)
    if (record := RECORD.get()) is not None:
        record.reason = _reason(error, status, body["error"]["code"])
    if (trace := TRACE.get()) is not None:
        trace.error_type = body["error"]["code"] or body["error"]["type"]
    return status, body


class _TokenizerWarnings:
    """Logs one of the failures within `_LOG_SECONDS`: clients may cause any number."""

    def __init__(self) -> None:
        self._next, self._num_unlogged = 0.0, 0

    def add(self, error: TokenizerFailed) -> None:
        if (now := time.monotonic()) < self._next:
            self._num_unlogged += 1
            return
        others = f" ({self._num_unlogged} such failures were not logged)" if self._num_unlogged else ""
        logger.warning("the tokenizer failed for a text: %s%s", ascii(error.reason[:_MAX_REASON])[1:-1], others)
        self._next, self._num_unlogged = now + _LOG_SECONDS, 0


_tokenizer_warnings = _TokenizerWarnings()


def _describe(error: Exception) -> tuple[int, dict[str, Any]]:
    match error:
        case ModelNotFound():
            return 404, error_object(str(error), "invalid_request_error", error.param, "model_not_found")
        case ResponseNotFound():
            return 404, error_object(str(error), "invalid_request_error", error.param, "response_not_found")
        case InvalidParameter():
            return 400, error_object(str(error), "invalid_request_error", error.param, error.code)
        case RequestValidationError():
            message, param = _describe_validation(error)
            return 400, error_object(message, "invalid_request_error", param)
        case EngineUnavailable():
            return 503, error_object(str(error), "server_error", code="engine_unavailable")
        case Overloaded():
            return 503, error_object(str(error), "server_error", code="overloaded")
        case MediaUnavailable():
            return 503, error_object(str(error), "server_error", code="media_unavailable")
        case QueueFull():
            return 429, error_object(str(error), "rate_limit_error", code="queue_full")
        case RequestTimedOut():
            return 504, error_object(str(error), "server_error", code="request_timeout")
        case RequestInvalid():
            return 400, error_object(str(error), "invalid_request_error")
        case RequestAborted():
            return 500, error_object(str(error), "server_error", code="request_aborted")
        case RequestFailed():
            return 500, error_object(str(error), "server_error", code="request_failed")
        case ApiError():
            return error.status_code, error_object(error.detail, _kind(error.status_code), code=error.code)
        case HTTPException(status_code=status):
            return status, error_object(str(error.detail), _kind(status))
        case _:
            return 500, error_object("internal server error", "server_error")


def _reason(error: Exception, status: int, code: str | None) -> str:
    """The reason in the metrics (`http_metrics.REASONS`)."""
    match error:
        case EngineUnavailable():
            return error.reason
        case MediaUnavailable():
            return "unavailable"
        case RequestAborted():
            return "aborted"
        case RequestFailed() if not isinstance(error, RequestTimedOut | RequestInvalid):
            return "failed"
        case _ if code in ("body_too_large", "context_length_exceeded"):
            return "too_large"
        case _:
            return reason_of_status(status)


def reason_of_status(status: int) -> str:
    """Return why a request is refused or failed if nothing but its status is known."""
    if (found := _REASONS.get(status)) is None:
        return "internal" if status >= 500 else "invalid"
    return found


_REASONS = {
    401: "auth",
    403: "auth",
    404: "not_found",
    408: "client_timeout",
    409: "conflict",
    413: "too_large",
    429: "queue_full",
    431: "too_large",
    499: "client_closed",
    503: "overloaded",
    504: "timeout",
}


def _kind(status: int) -> str:
    """OpenAI's type of an error that has only a status."""
    return "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"


def install(app: FastAPI) -> None:
    """Return all errors in this format."""
    app.add_exception_handler(ClientDisconnect, _client_closed_request)
    for kind in (
        *(InvalidParameter, RequestValidationError, HTTPException),
        *(QueueFull, EngineUnavailable, MediaUnavailable, Overloaded, RequestFailed, Exception),
    ):
        app.add_exception_handler(kind, _respond)


def json_response(body: Any, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    """Create a JSON response."""
    return Response(encode_json(body), status, headers, "application/json")


def encode_json(body: Any) -> bytes:
    """Encode a response as JSON."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # half of a surrogate pair, which the client sent as an escape
        return json.dumps(body, separators=(",", ":")).encode()


def respond(error: Exception) -> Response:
    """Create the response for an error."""
    status, body = describe(error)
    return json_response(body, status, _headers(error))


def _headers(error: Exception) -> dict[str, str]:
    match error:
        case HTTPException(headers=headers):
            return dict(headers or {})
        case QueueFull() | EngineUnavailable() | MediaUnavailable() | Overloaded():
            return {"Retry-After": str(RETRY_AFTER_SECONDS)}
        case RequestTimedOut() | RequestAborted():  # or else OpenAI's clients would retry
            return {"x-should-retry": "false"}
        case _:
            return {}


async def _respond(request: Request, error: Exception) -> Response:
    status, body = describe(error)
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        body["error"]["message"] += f": {request.method} {request.url.path}"
    return json_response(body, status, _headers(error))


async def _client_closed_request(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's "client closed request"; the client never sees it


def _describe_validation(error: RequestValidationError) -> tuple[str, str | None]:
    """Return the first invalid field and all messages about it (a union has one for each of its members)."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        return f"the body cannot be read as JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    field = first["loc"][1] if len(first["loc"]) > 1 else None
    if field is None:
        return f"the body: {first['msg']}", None
    same = [problem for problem in problems if problem["loc"][1:2] == (field,)]
    path = str(field)
    if len(same) == 1:
        path += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][2:])
    said = dict.fromkeys(problem["msg"].removeprefix("Value error, ") for problem in same)
    return f"{path}: {', or '.join(said)}", path
