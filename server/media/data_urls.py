"""Files that are part of a request: in data: URLs (RFC 2397), and base64 that was cut out of its body."""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from urllib.parse import unquote_to_bytes

from quire.engine.protocol.errors import InvalidParameter

_HEADER = re.compile(r"data:([^,]{0,1000}),", re.IGNORECASE)
_BLANK = re.compile(r"[ \t\r\n]+")


CUT_FILES: ContextVar[CutFiles | None] = ContextVar("CUT_FILES", default=None)
"""Those of the request that this task answers."""


class CutFiles:
    """The files of a request whose base64 was cut out of its body before that was parsed.

    Each has a name in its place, which nobody can guess. The body was understood only if all files are read: a name
    that is left stands in a text, or somewhere else where the base64 itself would matter.
    """

    def __init__(self, contents: Mapping[str, bytes], drop: Callable[[], None]) -> None:
        """`contents` is base64 by name; `drop` is called when the body is no longer needed."""
        self._contents, self._drop = dict(contents), drop
        self._unread = set(contents)

    def read(self, url: str) -> bytes | None:
        """Return the base64 that a data: URL names; None: it names none."""
        header, _, name = url.partition(",")
        if (found := self._contents.get(name)) is None or not header.lower().endswith(";base64"):
            return None
        self._unread.discard(name)
        return found

    def restored(self, text: bytes) -> bytes:
        """Return JSON with the base64 in the place of the names."""
        names = re.compile(b"|".join(name.encode() for name in self._contents))
        return names.sub(lambda found: self._contents[found[0].decode()], text)

    @property
    def all_read(self) -> bool:
        return not self._unread

    def check(self) -> None:
        """Call this when the request has been processed. Raises `FilesNotRead`; otherwise drops the files."""
        if self._unread:
            raise FilesNotRead
        self._contents.clear()
        self._drop()


class FilesNotRead(Exception):
    """The request must be processed with its original body."""


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def media_type(url: str) -> str:
    """The media type that a data: URL names, without its parameters; empty: none."""
    header = _HEADER.match(url)
    return header[1].partition(";")[0].strip().lower() if header else ""


def data_url(url: str, max_bytes: int) -> bytes:
    """The bytes of a data: URL, whose media type is ignored. Raises `InvalidParameter`.

    A megabyte of base64 takes about a millisecond. Line breaks and missing padding are accepted.
    """
    if (header := _HEADER.match(url)) is None:
        raise InvalidParameter("the data: URL is invalid: it must be like data:image/png;base64,iVBORw0K…")
    is_base64 = header[1].lower().rstrip().endswith(";base64")
    if len(url) - header.end() > 4 * max_bytes:  # more than any form of so many bytes, but for blanks
        raise _too_large(max_bytes)
    content = url[header.end() :]
    data = decoded_base64(content) if is_base64 else unquote_to_bytes(content.encode(errors="surrogatepass"))
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    return data


def decoded_base64(content: str | bytes) -> bytes:
    """The bytes of base64, with what URLs may have in it. Raises `InvalidParameter`."""
    try:
        encoded = content if isinstance(content, bytes) else content.encode("ascii")
        try:
            return binascii.a2b_base64(encoded, strict_mode=True)
        except binascii.Error:
            unquoted = unquote_to_bytes(encoded) if b"%" in encoded else encoded
            bare = _BLANK.sub("", unquoted.decode("ascii", "replace")).rstrip("=").encode("ascii", "replace")
            return binascii.a2b_base64(bare + b"=" * (-len(bare) % 4), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidParameter("invalid base64") from None


def _too_large(max_bytes: int) -> InvalidParameter:
    return InvalidParameter(f"the file has more than {max_bytes} bytes (--max-media-bytes)")
