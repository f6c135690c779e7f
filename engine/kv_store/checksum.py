"""The checksum of an entry's bytes, in memory, on disk and on the wire."""

from __future__ import annotations

import msgspec
from xxhash import xxh3_128_digest

CHECKSUM_BYTES = 16


def checksum(content: bytes | bytearray | memoryview) -> bytes:
    """Return `CHECKSUM_BYTES` bytes that are others when the content has changed by accident (XXH3, 128 bits)."""
    return xxh3_128_digest(content)


def placed_checksum(place: msgspec.Raw, content: bytes | memoryview) -> bytes:
    """Return the same for bytes that belong to a place, so that they are not taken for another's."""
    return checksum(bytes(place) + checksum(content))


def bind(checksum: bytes, link: bytes, kind: int) -> bytes:
    """Return a checksum of an entry with this checksum: that of another entry differs, also if the bytes do not."""
    return xxh3_128_digest(b"%b%b%d" % (checksum, link, kind))
