"""The folder with the temporary files of a server or node, of which nothing stays behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from quire.engine.protocol.errors import ConfigError

_MAX_FOLDER_BYTES = 60
"""In bytes. The path of a Unix socket inside must be shorter than 108 bytes (unix(7)), also that of a core's fork
server.
"""
_PREFIX, _LOCK = "quire-", "server.lock"


class RuntimeFolder:
    """A temporary folder that is removed even if this process is killed: then the next one that makes a folder does it.

    The lock on a file inside says that the folder is in use.
    """

    def __init__(self) -> None:
        """Raises `ConfigError` if sockets in the folder would have too long a path."""
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        if len(os.fsencode(self.path)) > _MAX_FOLDER_BYTES:
            os.rmdir(self.path)
            raise ConfigError(
                f"the path in TMPDIR is too long for Unix sockets: {os.path.dirname(self.path)}; set a shorter one"
            )
        # Locked before it has its name, so that no other process takes the folder for an unused one.
        lock = os.open(f"{self.path}/new.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(f"{self.path}/new.lock", f"{self.path}/{_LOCK}")
        for other in Path(self.path).parent.glob(f"{_PREFIX}*/{_LOCK}"):
            if other.parent != Path(self.path):
                _remove_unused(other)

        self.remove = weakref.finalize(self, _remove, self.path, lock)
        """Removes the folder; the end of the process does, too."""


def _remove(folder: str, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_unused(lock: Path) -> None:
    """Remove the folder with this lock, unless a process holds it or it belongs to another user."""
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    except OSError:
        pass
