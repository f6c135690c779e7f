"""The folder with the temporary files of a server or node; it leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from quire.engine.protocol.errors import ConfigError

MAX_TMPDIR_BYTES = 45
"""Maximum length of the path that TMPDIR sets. The path of a Unix socket in a folder there, also of a core's fork
server, must be shorter than 108 bytes (unix(7)).
"""
_PREFIX, _MARK = "quire-", "in-use"


class RuntimeFolder:
    """A temporary folder that is removed even if this process is killed: then the next one that makes a folder does it.

    A lock on the folder says that it is in use, to others and to systemd-tmpfiles(8), and a file inside that it is such
    a folder.
    """

    def __init__(self) -> None:
        """Raises `ConfigError` if sockets in the folder would have too long a path."""
        if len(os.fsencode(folder := tempfile.gettempdir())) > MAX_TMPDIR_BYTES:
            raise ConfigError(f"the path in TMPDIR is too long for Unix sockets: {folder}; set a shorter one")
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        # Locked before it has the file, so that no other process takes the folder for an unused one.
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(self.path, _MARK).touch()
        for mark in Path(self.path).parent.glob(f"{_PREFIX}*/{_MARK}"):
            if mark.parent != Path(self.path):
                _remove_unused(mark.parent)
        self.remove = weakref.finalize(self, _remove, self.path, lock)
        """Removes the folder; the end of the process does, too."""

    @property
    def exists(self) -> bool:
        """Whether nobody has removed it."""
        return os.path.exists(f"{self.path}/{_MARK}")


def _remove(folder: str, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_unused(folder: Path) -> None:
    """Remove a folder, unless a process has it in use or it belongs to another user."""
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
