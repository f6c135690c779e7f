"""The files with the arrays of images and videos, from a request's arrival to the end of its last step."""

from __future__ import annotations

import errno
import os
import resource
import weakref

import msgspec

from quire.engine.protocol.media import MediaItem

_DESCRIPTORS = 65536
"""Files that may be open at once, if the hard limit allows it."""
_RESERVE = 64
"""File descriptors that are left to the rest of the process, such as a rank that reads the files."""


def raise_limit() -> None:
    """Let this process open as many files as its requests may have images."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def keep_open(item: MediaItem) -> MediaItem:
    """Return an item whose file ranks on this host can read as long as something refers to its data, such as a plan in
    flight. Raises `OSError`.

    The server deletes the file when it needs no more, which it does not know of an aborted request whose step is in
    flight, or when the media process ends. The content of a file is there while a process has it open.
    """
    if item.data is None or not item.data.path:
        return item
    file = os.open(item.data.path, os.O_RDONLY | os.O_CLOEXEC)
    if file >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVE:  # the kernel gives out the lowest one
        os.close(file)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    data = msgspec.structs.replace(item.data, path=f"/proc/{os.getpid()}/fd/{file}")
    weakref.finalize(data, os.close, file).atexit = False
    return msgspec.structs.replace(item, data=data)
