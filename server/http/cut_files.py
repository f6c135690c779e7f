"""Cuts pictures, as base64, out of a large body, so that what is left is small and can be parsed like a small body."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from quire.server.media.data_urls import CutFiles

MAX_CUT_BODY = 8 * 2**20
"""Bytes of a body whose files are cut out, which takes about a quarter of a millisecond for each MiB."""
_LEAST = 1024
"""Bytes of a string that is cut out."""
_URL = rb"data:[\w.+/=;-]{0,100};base64,"
_FILE = re.compile(rb'(?<!\\)"(?:data"[ \t\r\n]*:[ \t\r\n]*"(?:%b)?|%b)' % (_URL, _URL), re.ASCII)
"""The beginning of a string that may be a file, up to its base64: a data: URL, or the value of `data`."""
_NOT_PLAIN = (b"\\", b"\n", b"\r", b"\t")
"""In JSON, such a string has other characters than it seems, or is invalid."""


def cut(body: bytes, most: int, drop: Callable[[], None]) -> tuple[bytes, CutFiles] | None:
    """Return a JSON body without its files, and the files; None: it has none, or more than `most` bytes are left.

    What seems to be a file may be something else with the same name; `CutFiles.check` finds that out.
    """
    nonce, left, contents, at, size = secrets.token_hex(16), list[bytes](), dict[str, bytes](), 0, 0
    while (found := _FILE.search(body, at, at + most)) is not None and size <= most:
        if (end := body.find(b'"', start := found.end())) < 0:
            break
        content = body[start:end]
        if len(content) >= _LEAST and content.isascii() and not any(mark in content for mark in _NOT_PLAIN):
            contents[name := f"{nonce}{len(contents):x}"] = content
            kept = body[at:start] + name.encode()
        else:
            kept = body[at:end]
        left.append(kept)
        size += len(kept)
        at = end
    left.append(body[at:])
    if not contents or size + len(left[-1]) > most:
        return None
    return b"".join(left), CutFiles(contents, drop)
