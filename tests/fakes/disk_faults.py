"""Faults of a disk: calls that fail, and files that change."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_CALLS = ("write", "fsync", "rename", "open", "preadv", "unlink", "utime", "fstat")
_ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ENOENT, errno.ESTALE)


class FailingCalls:
    """Lets each call of `os` that reads or writes files fail with some probability, in one of the ways of disks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
        self.rate, self._random = 0.0, chance
        for name in _CALLS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*arguments: Any, **keywords: Any) -> Any:
            if self.rate and self._random.random() < self.rate:
                code = self._random.choice(_ERRORS)
                raise OSError(code, os.strerror(code))
            return real(*arguments, **keywords)

        return function


def damage(folder: Path, chance: random.Random) -> None:
    """Cut a file of the disk tier, flip a bit, remove the file, or replace it by another one."""
    if not (paths := sorted(folder.glob("*/*.kv"))):
        return
    path = chance.choice(paths)
    content = bytearray(path.read_bytes())
    match chance.randrange(4):
        case 0:
            path.write_bytes(content[: chance.randrange(len(content) + 1)])
        case 1:
            if content:
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
        case 2:
            path.unlink()
        case _:
            path.write_bytes(chance.choice(paths).read_bytes())
