"""What goes over the media process's socket: messages, each after its length (4 bytes)."""

from __future__ import annotations

import asyncio
import struct
from typing import TypeVar

import msgspec

from quire.server.media.types import LoadedMedia, MediaFormat, MediaSource

T = TypeVar("T")
_LENGTH = struct.Struct("!I")
READ_BYTES = 2**20


class AskFormat(msgspec.Struct, array_like=True, tag=True):
    """Asks for the format, when the processor is loaded."""

    id: int


class Load(msgspec.Struct, array_like=True, tag=True):
    """Asks for the items of a request."""

    id: int
    owner: str
    sources: list[MediaSource]


class Adopt(msgspec.Struct, array_like=True, tag=True):
    """Takes over a lease; answered with `LoadedMedia`."""

    id: int
    lease: str


class HandOver(msgspec.Struct, array_like=True, tag=True):
    """A lease outlives the connection for some seconds, in which another process may adopt it."""

    lease: str


class Cancel(msgspec.Struct, array_like=True, tag=True):
    """Nobody waits for the answer any more."""

    id: int


class Release(msgspec.Struct, array_like=True, tag=True):
    """Ends a lease."""

    lease: str


class Renew(msgspec.Struct, array_like=True, tag=True):
    """Enters a lease, with the digests of its items: the process may have been started since it was made."""

    lease: str
    digests: list[bytes]


Message = AskFormat | Load | Adopt | HandOver | Cancel | Release | Renew


class Answer(msgspec.Struct, array_like=True):
    """The answer to a message."""

    id: int
    media: LoadedMedia | None = None
    format: MediaFormat | None = None
    error: str = ""
    param: str = ""
    """What in the request the error is about."""
    is_unavailable: bool = False
    """Whether the error is not the request's."""
    needs_data: bool = False
    """An item of which only the data's digest was sent is not there."""


def encode(message: Message | Answer) -> bytes:
    """Return a message with its length."""
    encoded = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(encoded)) + encoded


async def receive(reader: asyncio.StreamReader) -> bytes:
    """Return the next message; raises `asyncio.IncompleteReadError` and `OSError` at the end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)
