"""The input of a batch: requests in OpenAI's batch format, one per line.

https://platform.openai.com/docs/api-reference/batch/request-input: each line is an object with `custom_id`, `method`
(POST), `url` (a route) and `body`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from quire.engine.protocol.errors import UNDECODABLE

MAX_LINE_BYTES = 64 * 2**20
_MAX_URL = 256


@dataclass(frozen=True, slots=True)
class LineError:
    """The reason why a line is not a valid request. The codes are OpenAI's batch API's where it defines one."""

    code: str
    message: str


@dataclass(slots=True)
class BatchLine:
    """A line of the file, counted from 1. If `problem` is set, it holds no valid request."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    problem: LineError | None = None


class _BatchRequest(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _BatchBody(msgspec.Struct):
    stream: Any = None


def read_lines(file: BinaryIO, serves: Callable[[str], bool]) -> Iterator[BatchLine]:
    """Yield the lines one at a time; empty ones are counted but skipped. `serves` returns whether a route exists."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(MAX_LINE_BYTES)
            text = f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB"
            yield BatchLine(number, problem=LineError("invalid_json_line", text))
        elif raw.strip():
            yield _parse(number, raw, serves)


def count_lines(path: str) -> int:
    """Return the number of lines of a file, with or without a line feed at the end."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            count += chunk.count(b"\n")
            last = chunk[-1:]
    return count + (last != b"\n")


def _parse(number: int, raw: bytes, serves: Callable[[str], bool]) -> BatchLine:
    line = BatchLine(number)
    try:
        request = msgspec.json.decode(raw, type=_BatchRequest)
    except UNDECODABLE as error:
        line.problem = LineError("invalid_json_line", f"the line is not a JSON object: {error}")
        return line
    if isinstance(request.custom_id, str) and request.custom_id:
        line.custom_id = request.custom_id
    line.problem = _check(request, line, serves)
    if line.problem is None:
        line.url, line.body = request.url, bytes(request.body)
    return line


def _check(request: _BatchRequest, line: BatchLine, serves: Callable[[str], bool]) -> LineError | None:
    if line.custom_id is None:
        return LineError("missing_required_parameter", "custom_id: expected a string")
    if request.method != "POST":
        return LineError("invalid_method", "method: expected POST")
    if not isinstance(request.url, str) or len(request.url) > _MAX_URL or not serves(request.url):
        return LineError("invalid_url", f"url: there is no POST route {str(request.url)[:_MAX_URL]!r}")
    try:
        body = msgspec.json.decode(request.body, type=_BatchBody)
    except UNDECODABLE as error:
        return LineError("missing_required_parameter", f"body: expected an object: {error}")
    if body.stream:
        return LineError("invalid_request", "body: streaming is not supported in batches; omit `stream`")
    return None
