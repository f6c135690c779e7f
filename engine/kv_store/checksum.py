"""The checksum of an entry's bytes, in memory, on disk and on the wire."""

from __future__ import annotations

import msgspec
from xxhash import xxh3_128_digest

CHECKSUM_BYTES = 16


def checksum(content: bytes | bytearray | memoryview) -> bytes:
    """Return a checksum of `CHECKSUM_BYTES` bytes that detects accidental changes (XXH3, 128 bits)."""
    return xxh3_128_digest(content)


def placed_checksum(place: msgspec.Raw, content: bytes | memoryview) -> bytes:
    """Return a checksum of bytes and the place that they belong to, so that they are not accepted for another place."""
    return checksum(bytes(place) + checksum(content))


def bind(checksum: bytes, link: bytes, kind: int) -> bytes:
    """Combine the checksum of an entry's bytes with its link and kind, so that other entries with the same bytes
    differ."""
    return xxh3_128_digest(b"%b%b%d" % (checksum, link, kind))
