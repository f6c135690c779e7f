"""The on-disk caches of compiled kernels and of packed weights, and the check of their ownership.

The folders are `quire/kernels` and `quire/packed` in `XDG_CACHE_HOME` (default: `~/.cache`). `QUIRE_KERNEL_CACHE` and
`QUIRE_PACKED_CACHE` set other ones, which may be filled in advance (in an image, with the same compiler and for packed
weights on the same kind of processor) and then be read-only.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal


def folder(content: Literal["kernels", "packed"] = "kernels") -> Path:
    """A cache folder, which may not exist yet."""
    override = os.environ.get("QUIRE_KERNEL_CACHE" if content == "kernels" else "QUIRE_PACKED_CACHE")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / content


def check_owner(*paths: Path) -> None:
    """Raise `PermissionError` if another user could have written `paths`: libraries that run as this user, weights."""
    for path in paths:
        status = path.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} can be written by others")
