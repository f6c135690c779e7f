"""The on-disk cache of compiled kernels, and the check of its ownership.

The folder is `quire/kernels` in `XDG_CACHE_HOME` (default: `~/.cache`). `QUIRE_KERNEL_CACHE` sets another one, which
may be filled in advance (in an image, with the same compiler) and then be read-only.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def folder() -> Path:
    """The cache folder, which may not exist yet."""
    override = os.environ.get("QUIRE_KERNEL_CACHE")
    return (
        Path(override)
        if override
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire/kernels"
    )


def check_owner(*paths: Path) -> None:
    """Raise `PermissionError` if another user could have written `paths`: a loaded library runs as this user."""
    for path in paths:
        status = path.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} can be written by others")
