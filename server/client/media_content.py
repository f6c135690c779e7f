"""The bytes of a request's images and videos, for ranks on other hosts, which cannot read this host's shared memory."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.media import MediaItem

_READ_SECONDS = 30.0
"""Time for which a request waits for file descriptors to read its images."""
_READ_AGAIN_SECONDS = 0.1


def _with_content(item: MediaItem) -> MediaItem:
    if item.data is None or not item.data.path:
        return item
    content = Path(item.data.path).read_bytes()[: item.data.num_bytes]
    return msgspec.structs.replace(item, data=msgspec.structs.replace(item.data, path="", content=content))


async def with_content(request: EngineCoreRequest, is_wanted: Callable[[], bool]) -> EngineCoreRequest | None:
    """Return a request with the bytes of its items; None: meanwhile it is not wanted any more. Raises `OSError`.

    A lack of file descriptors passes when connections are closed.
    """
    until = time.monotonic() + _READ_SECONDS
    while True:
        try:
            media = await asyncio.to_thread(lambda: [*map(_with_content, request.media)])
            return msgspec.structs.replace(request, media=media) if is_wanted() else None
        except OSError as error:
            if not is_wanted():
                return None
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() >= until:
                raise
        await asyncio.sleep(_READ_AGAIN_SECONDS)
