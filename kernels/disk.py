"""Where what is compiled for this host stays, and whom it may be taken from.

The folder is `quire/kernels` in `XDG_CACHE_HOME` (`~/.cache`); `QUIRE_KERNEL_CACHE` names another, which may be filled
beforehand (in an image, by the same compiler on the same kind of processor) and be read-only then.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def folder() -> Path:
    """It need not exist."""
    named = os.environ.get("QUIRE_KERNEL_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire/kernels"


def check_owner(*paths: Path) -> None:
    """What is loaded runs as this user, so nobody else may have written it: raises `PermissionError` where they may."""
    for path in paths:
        status = path.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} can be written by others")


def processor() -> str:
    """The instruction sets of this host, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
