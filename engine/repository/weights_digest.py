"""Digests of whole files, and of a model's weights. No torch.

A large file's digest is computed once for each version of it, which its inode and times tell, and kept in
`quire/digests` in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from quire.engine.repository import gguf_folder, model_files

_THREADS = 8
_MIN_BYTES = 64 << 20
"""Size from which a file's digest is kept."""
_LOCK_SECONDS = 300.0
"""Time in which another process should have computed a digest."""
_LOWEST_PRIORITY = 19
"""nice(2)"""


def weights_digest(folder: Path, load_format: str) -> bytes:
    """Return a digest of the model in `folder`: of all bytes of the files that the weights are read from, and of the
    settings and code beside them. It may take minutes the first time. Raises `OSError` and `ConfigError`.
    """
    if load_format == "gguf":  # the folder is written for the file, and names its path
        files = {tensor.file for tensor in gguf_folder.headers(folder).values()}
    else:
        files = {folder / "config.json", *folder.glob("*.py")}
        if load_format == "pt":
            files.update(model_files.torch_files(folder))
        elif load_format != "dummy":
            files.update(tensor.file for tensor in model_files.read_headers(folder, load_format).values())
    return hashlib.sha256(repr(sorted(digests(sorted(files)).values())).encode()).digest()


def digests(files: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file by its name, in threads that leave the processors to others. Raises `OSError`."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), initializer=_yield_processor) as pool:
        return dict(zip((file.name for file in files), pool.map(_cached, files), strict=True))


def _yield_processor() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _cached(file: Path) -> str:
    """The digest of a file. Of processes that ask at once, one computes it and the others wait."""
    if file.stat().st_size < _MIN_BYTES:
        return _compute(file)
    with contextlib.ExitStack() as stack:
        kept = None
        with contextlib.suppress(OSError, RuntimeError):  # a cache that cannot be used: no home folder, read-only
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "digests"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            kept = stack.enter_context((folder / _key(file)).open("a+"))
            _lock(kept)
            kept.seek(0)
            if len(found := kept.read()) == hashlib.sha256().digest_size * 2:
                return found
        key = _key(file)
        digest = _compute(file)
        if kept is not None and _key(file) == key:  # it was not written meanwhile
            with contextlib.suppress(OSError):
                kept.truncate(0)
                kept.write(digest)
                kept.flush()
        return digest


def _lock(kept: IO[str]) -> None:
    """Lock a file; raises `BlockingIOError` if a process holds the lock for too long: it may have been stopped."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _compute(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _key(file: Path) -> str:
    status = file.stat()
    parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return "-".join(map(str, parts))
