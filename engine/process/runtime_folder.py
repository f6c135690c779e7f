"""The folder with the temporary files of a server or node, which the last of its processes removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

from quire.engine.protocol.errors import ConfigError

MAX_TMPDIR_BYTES = 45
"""Maximum length of the path that TMPDIR sets. The path of a Unix socket in a folder there, also of a core's fork
server, must be shorter than 108 bytes (unix(7)).
"""
_PREFIX, _MARK = "quire-", "in-use"
_LAST = -1000
"""Exit priority of tasks that run after multiprocessing has removed its own folder, which may be in this one."""


class RuntimeFolder:
    """A temporary folder of one or more processes. The last of them to end removes it, or if they are all killed, the
    next process that makes such a folder.

    Each of them holds a shared lock on it, which tells others and systemd-tmpfiles(8) that it is in use. A file inside
    marks it as such a folder.
    """

    def __init__(self, path: str | None = None, *, where: str | None = None) -> None:
        """Make a folder, in `where` or else in the folder for temporary files, or use the one at `path`, which another
        process has made.

        Raises `ConfigError` if sockets in a new folder would have too long a path.
        """
        if len(os.fsencode(folder := where or tempfile.gettempdir())) > MAX_TMPDIR_BYTES:
            raise ConfigError(f"the path in TMPDIR is too long for Unix sockets: {folder}; set a shorter one")
        self.path = path or tempfile.mkdtemp(prefix=_PREFIX, dir=folder)
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH)
        self.remove = Finalize(None, _release, (self.path, lock), exitpriority=_LAST)
        """Stop using the folder, and remove it if no other process uses it; the end of this process does, too."""
        if path is None:
            # Marked after it is locked, so that no other process takes the folder for an unused one.
            Path(self.path, _MARK).touch()
            for mark in Path(self.path).parent.glob(f"{_PREFIX}*/{_MARK}"):
                if mark.parent != Path(self.path):
                    _remove_unused(mark.parent)

    @property
    def exists(self) -> bool:
        """Whether nobody has removed it."""
        return os.path.exists(f"{self.path}/{_MARK}")


def _release(folder: str, lock: int) -> None:
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The mark goes last: if this process is killed meanwhile, or something new has come, another one finishes.
            for each in os.scandir(folder):
                if each.is_dir(follow_symlinks=False):
                    shutil.rmtree(each, ignore_errors=True)
                elif each.name != _MARK:
                    os.unlink(each)
            mark = Path(folder, _MARK)
            mark.unlink(missing_ok=True)
            try:
                os.rmdir(folder)
            except OSError:
                mark.touch()
    finally:
        os.close(lock)


def _remove_unused(folder: Path) -> None:
    """Remove a folder, unless a process has it in use or it belongs to another user."""
    with contextlib.suppress(OSError):
        _release(str(folder), os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
