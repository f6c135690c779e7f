"""Forms (`multipart/form-data`, RFC 7578) as they arrive: no part of one is kept."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from email.message import Message
from email.parser import HeaderParser
from typing import NamedTuple

from quire.engine.protocol.errors import InvalidParameter

PIECE_BYTES = 2**20
_MAX_BOUNDARY = 70
"""Characters, by RFC 2046."""
_MAX_HEADER_BYTES = 8192
_MAX_NAME = 255
"""Characters of a file's name."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class FormPart(NamedTuple):
    """A part of a form."""

    name: str
    filename: str | None
    """None: it is no file."""
    content: AsyncIterator[bytes]
    """Its pieces, of at most about `PIECE_BYTES`. They must be read before the next part."""

    async def text(self, max_bytes: int) -> str:
        """Return the whole content. Raises `InvalidParameter`."""
        found = b""
        async for piece in self.content:
            found += piece
            if len(found) > max_bytes:
                raise InvalidParameter(f"{self.name} is too long", self.name)
        return found.decode(errors="replace")


def form_boundary(content_type: str) -> bytes:
    """Return the boundary of a form's parts. Raises `InvalidParameter`."""
    header = Message()
    header["Content-Type"] = content_type.replace("\r", " ").replace("\n", " ")
    if header.get_content_type() != "multipart/form-data" or not (found := _parameter(header, "boundary")):
        raise InvalidParameter("file: the body must be multipart/form-data, with a boundary", "file")
    if len(found) > _MAX_BOUNDARY or not found.isascii():
        raise InvalidParameter(f"file: the boundary has more than {_MAX_BOUNDARY} characters, or not of ASCII", "file")
    return found.encode()


async def form_parts(body: AsyncIterator[bytes], boundary: bytes) -> AsyncGenerator[FormPart]:
    """Yield the parts of a form. Raises `InvalidParameter`."""
    source, delimiter = _Source(body), b"\r\n--" + boundary
    async for _ in source.before(delimiter):  # a preamble
        pass
    while not await source.ends():
        if (await source.line(b"\r\n")).strip(b" \t"):
            raise _invalid()
        try:
            headers = HeaderParser().parsestr((await source.line(b"\r\n\r\n")).decode())
        except UnicodeDecodeError:
            raise InvalidParameter("file: the headers of the form's parts are not UTF-8", "file") from None
        name = _parameter(headers, "name", "content-disposition")
        filename = _parameter(headers, "filename", "content-disposition")
        if name is None:
            raise _invalid()
        if filename is not None and (len(filename) > _MAX_NAME or _CONTROL.search(filename)):
            text = f"file: the name has more than {_MAX_NAME} characters, or control characters"
            raise InvalidParameter(text, "file")
        yield FormPart(name, filename, source.before(delimiter))
    async for _ in body:  # an epilogue
        pass


class _Source:
    """The bytes of a body, in order."""

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._buffer = bytearray(b"\r\n")  # before the first delimiter, as before the others

    async def before(self, mark: bytes) -> AsyncGenerator[bytes]:
        """Yield what comes before a mark, in pieces, and skip the mark."""
        searched = 0
        while (at := self._buffer.find(mark, searched)) < 0:
            searched = max(0, len(self._buffer) - len(mark) + 1)
            if searched >= PIECE_BYTES:
                yield bytes(self._buffer[:searched])
                del self._buffer[:searched]
                searched = 0
            await self._read()
        yield bytes(self._buffer[:at])
        del self._buffer[: at + len(mark)]

    async def line(self, mark: bytes) -> bytes:
        """Return what comes before a mark, and skip the mark."""
        while (at := self._buffer.find(mark, 0, _MAX_HEADER_BYTES)) < 0:
            if len(self._buffer) >= _MAX_HEADER_BYTES:
                raise InvalidParameter("file: the headers of a part of the form are too long", "file")
            await self._read()
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(mark)]
        return found

    async def ends(self) -> bool:
        """Whether the delimiter that has been skipped is the last one."""
        while len(self._buffer) < 2:
            await self._read()
        return self._buffer.startswith(b"--")

    async def _read(self) -> None:
        async for chunk in self._body:
            if chunk:
                self._buffer += chunk
                return
        raise _invalid()


def _parameter(message: Message, name: str, header: str = "content-type") -> str | None:
    """Return a parameter of a header; an encoded one (RFC 2231) must be UTF-8. Raises `InvalidParameter`."""
    try:
        found = message.get_param(name, header=header)
        if isinstance(found, tuple):
            charset, _, text = found
            if (charset or "utf-8").lower() not in ("utf-8", "us-ascii"):
                raise ValueError
            return text.encode("latin-1").decode()
    except (ValueError, TypeError):  # the latter, of `get_param`, for parts with numbers and without
        raise InvalidParameter(f"file: {name} in a header of the form is invalid, or not UTF-8", "file") from None
    return found


def _invalid() -> InvalidParameter:
    return InvalidParameter("file: the form is invalid or cut off", "file")
