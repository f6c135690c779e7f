"""Errors in the format of Anthropic's API: `{"type": "error", "error": {"type", "message"}}`, and `details` with the
`error_code` of errors that have one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Message, Scope, Send

from quire.engine.protocol.errors import InvalidParameter

ROUTE = "/v1/messages"
"""Errors on paths with this route use Anthropic's format."""
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class UnsupportedThread(InvalidParameter):
    """The request creates or continues a thread. On this code, Anthropic's SDKs send the whole conversation instead."""

    code = "thread_unsupported_request"


def anthropic_error(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an OpenAI error to Anthropic's format, which has no field for the parameter."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    text, param = body["error"]["message"], body["error"]["param"]
    message = text if param is None or param in text else f"{param}: {text}"
    code = body["error"]["code"]
    details = {} if code is None else {"details": {"error_code": code}}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "An error in the format of Anthropic's API.",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {
                    "type": "object",
                    "properties": {"error_code": {"type": "string"}},
                    "required": ["error_code"],
                },
            },
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
"""Schema of errors, for the OpenAPI document."""


def errors_in_shape(scope: Scope, send: Send) -> Send:
    """Wrap `send` to convert all errors on these routes, including the middleware's, to Anthropic's format."""
    if scope["type"] != "http" or ROUTE not in scope["path"]:
        return send
    start: Message | None = None
    parts: list[bytes] = []

    async def send_in_shape(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start" and message["status"] >= 400:
            start = message
        elif start is None:
            await send(message)
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await _send_error(start, b"".join(parts), send)

    return send_in_shape


async def _send_error(start: Message, body: bytes, send: Send) -> None:
    with contextlib.suppress(ValueError, LookupError, TypeError):  # not an error object of this server
        body = json.dumps(anthropic_error(start["status"], json.loads(body))).encode()
    headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})
