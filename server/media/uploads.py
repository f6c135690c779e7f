"""Files that clients upload and then name by their ids: in a folder (--file-storage-path), below the API key that owns
them. API processes add them, and the media process reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from quire.engine.protocol.errors import InvalidParameter

P = ParamSpec("P")
T = TypeVar("T")
MAX_FILES = 4096
"""Files of an owner."""
_ID = re.compile(r"file-[0-9a-f]{32}")
_OWNER = re.compile(r"[0-9a-f]{32}")
_FACTS, _UNFINISHED = ".json", ".part"
_UNFINISHED_SECONDS = 3600.0
"""Age of a file that its process has left unfinished."""
_USAGE = "usage"
_COUNT_SECONDS = 3600.0
"""Age of the totals after which all files are counted again, as a process that died may have left some."""
_FULL_SECONDS = 10.0
"""The same, when there is no space left."""
_CHARGED_BYTES = 4 * 2**20
"""Least bytes by which the space of a file grows that is larger than expected."""
_THREADS = 8
_CALL_SECONDS = 30.0


class UploadNotFound(InvalidParameter):
    """There is no such file, or it is another key's."""


class UploadsStalled(Exception):
    """The folder does not answer in time."""


class Upload(msgspec.Struct, frozen=True):
    """A file."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    """Unix time."""


class _Usage(msgspec.Struct):
    """What the files of each owner's folder have, those included that are arriving."""

    num_files: dict[str, int]
    num_bytes: dict[str, int]
    counted_at: float
    """Unix time."""


class Uploads:
    """The files of a folder, which other processes use, too. A file exists as long as its facts do, which are written
    last and deleted first.

    Files are made, resized and deleted only under the lock of the totals (`usage`), so that the totals can be counted
    again at any time. An owner's files have at most `MAX_FILES`, and half of the bytes if it has a name.
    """

    def __init__(self, folder: str, max_bytes: int = 0) -> None:
        """`max_bytes` limits all files together."""
        self.folder, self._max_bytes = Path(folder), max_bytes
        self.arriving: Counter[str] = Counter()
        """Uploads that this process receives, by owner."""
        self._threads = ThreadPoolExecutor(_THREADS, "uploads")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method in threads that nothing else waits for. Raises `UploadsStalled`."""
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                return await asyncio.wrap_future(self._threads.submit(call, *args, **kwargs))
        except TimeoutError:
            raise UploadsStalled(f"the folder of uploaded files has not answered for {_CALL_SECONDS:g} s") from None

    def begin(self, owner: str, num_bytes: int = 0) -> ArrivingFile:
        """Begin a file of about that size. Raises `InvalidParameter` if there is no space, as `ArrivingFile.write`."""
        upload_id = f"file-{secrets.token_hex(16)}"
        (folder := self._folder_of(owner)).mkdir(mode=0o700, exist_ok=True)
        return ArrivingFile(self, owner, folder / upload_id, num_bytes)

    def add(self, owner: str, filename: str, purpose: str, data: bytes) -> Upload:
        """Add a whole file."""
        with contextlib.closing(self.begin(owner, len(data))) as file:
            file.write(data)
            return file.finish(filename, purpose)

    def get(self, owner: str, upload_id: str) -> Upload:
        """Return what is known of a file. Raises `UploadNotFound`."""
        with _finding(upload_id):
            return msgspec.json.decode(self.path(owner, upload_id + _FACTS).read_bytes(), type=Upload)

    def all(self, owner: str) -> list[Upload]:
        """Return the files of an owner, the newest first."""
        found = list[Upload]()
        for path in self._folder_of(owner).glob(f"*{_FACTS}"):
            with contextlib.suppress(UploadNotFound):  # it has just been deleted
                found.append(self.get(owner, path.stem))
        return sorted(found, key=lambda each: (-each.created_at, each.id))

    def read(self, owner: str, upload_id: str, max_bytes: int) -> bytes:
        """Return a file's content. Raises `InvalidParameter`."""
        if self.get(owner, upload_id).num_bytes > max_bytes:
            raise InvalidParameter(f"the file has more than {max_bytes} bytes (--max-media-bytes)")
        with _finding(upload_id):
            return self.path(owner, upload_id).read_bytes()

    def delete(self, owner: str, upload_id: str) -> None:
        """Delete a file. Raises `UploadNotFound`."""
        path, facts = self.path(owner, upload_id), self.path(owner, upload_id + _FACTS)
        with self.usage() as usage, _finding(upload_id):
            facts.unlink()
            num_bytes = path.stat().st_size
            path.unlink()
            self.charge(usage, path.parent.name, -num_bytes, -1)

    def path(self, owner: str, name: str) -> Path:
        """Return where a file lies. Raises `UploadNotFound` for what is no id."""
        if not _ID.fullmatch(name.removesuffix(_FACTS)):
            raise _not_found(name.removesuffix(_FACTS))
        return self._folder_of(owner) / name

    def _folder_of(self, owner: str) -> Path:
        return self.folder / blake2b(owner.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    @contextlib.contextmanager
    def usage(self) -> Iterator[_Usage]:
        """The totals, which one thread of all processes has at a time."""
        with open(os.open(self.folder / _USAGE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                usage = msgspec.json.decode(file.read(), type=_Usage)
            except msgspec.DecodeError:  # there are none, or a process died while it wrote them
                usage = _Usage({}, {}, -1.0)
            if not 0 <= time.time() - usage.counted_at < _COUNT_SECONDS:
                self._count(usage)
            try:
                yield usage
            finally:
                file.seek(0)
                file.truncate()
                file.write(msgspec.json.encode(usage))

    def charge(self, usage: _Usage, folder: str, num_bytes: int, num_files: int = 0) -> None:
        """Add to the totals of an owner's folder. Raises `InvalidParameter` if that is too much."""
        if num_bytes > 0 and self._problem(usage, folder, num_bytes, num_files):
            if time.time() - usage.counted_at > _FULL_SECONDS:
                self._count(usage)
            if problem := self._problem(usage, folder, num_bytes, num_files):
                raise InvalidParameter(f"file: {problem}; delete some", "file")
        for totals, count in ((usage.num_bytes, num_bytes), (usage.num_files, num_files)):
            totals[folder] = max(0, totals.get(folder, 0) + count)

    def _problem(self, usage: _Usage, folder: str, num_bytes: int, num_files: int) -> str:
        if usage.num_files.get(folder, 0) + num_files > MAX_FILES:
            return f"there are {MAX_FILES} files of your API key"
        if sum(usage.num_bytes.values()) + num_bytes > self._max_bytes:
            return "the space for files is used up (--file-storage-gb)"
        is_named = folder != self._folder_of("").name
        if is_named and usage.num_bytes.get(folder, 0) + num_bytes > self._max_bytes // 2:
            return "the space for the files of an API key, half of --file-storage-gb, is used up"
        return ""

    def _count(self, usage: _Usage) -> None:
        """Set the totals, and delete the files that will never be finished."""
        usage.num_files, usage.num_bytes, usage.counted_at = {}, {}, time.time()
        for folder in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if _OWNER.fullmatch(folder.name) and stat.S_ISDIR(folder.lstat().st_mode):
                    self._count_folder(usage, folder)

    def _count_folder(self, usage: _Usage, folder: Path) -> None:
        names = set(os.listdir(folder))
        for name in names:
            with contextlib.suppress(OSError):
                found = os.stat(folder / name)
                is_whole = not name.endswith(_UNFINISHED) and (name.endswith(_FACTS) or name + _FACTS in names)
                if not is_whole and time.time() - found.st_mtime > _UNFINISHED_SECONDS:
                    os.unlink(folder / name)
                elif _ID.fullmatch(name.removesuffix(_UNFINISHED)):
                    usage.num_files[folder.name] = usage.num_files.get(folder.name, 0) + 1
                    usage.num_bytes[folder.name] = usage.num_bytes.get(folder.name, 0) + found.st_size


class ArrivingFile:
    """A file of which the content is not complete. Its space is charged, as its size, before it is written; `close`
    returns the space unless `finish` has been called.
    """

    def __init__(self, uploads: Uploads, owner: str, path: Path, num_bytes: int) -> None:
        self._uploads, self._path, self._num_bytes, self._charged = uploads, path, 0, 0
        self._part = path.with_name(path.name + _UNFINISHED)
        self._file = FileIO(os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        try:
            self._resize(max(1, num_bytes), 1)
        except BaseException:
            self._file.close()
            self._part.unlink()
            raise

    def write(self, data: bytes) -> None:
        """Write a piece. Raises `InvalidParameter` if there is no space, and `OSError`."""
        if self._num_bytes + len(data) > self._charged:
            self._resize(self._num_bytes + max(len(data), _CHARGED_BYTES))
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._num_bytes += len(data)

    def finish(self, filename: str, purpose: str) -> Upload:
        """End the file, which exists then."""
        self._resize(self._num_bytes)
        upload = Upload(self._path.name, filename, purpose, self._num_bytes, int(time.time()))
        facts = self._path.with_name(self._path.name + _FACTS)
        part = facts.with_name(facts.name + _UNFINISHED)
        try:
            part.touch(0o600)
            part.write_bytes(msgspec.json.encode(upload))
            self._part.rename(self._path)
            part.rename(facts)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self._file.close()
        return upload

    def close(self) -> None:
        """Delete what has not been finished."""
        if self._file.closed:
            return
        self._file.close()
        with self._uploads.usage() as usage:
            self._part.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            self._uploads.charge(usage, self._path.parent.name, -self._charged, -1)

    def _resize(self, num_bytes: int, num_files: int = 0) -> None:
        with self._uploads.usage() as usage:
            self._uploads.charge(usage, self._path.parent.name, num_bytes - self._charged, num_files)
            self._charged = num_bytes
            self._file.truncate(num_bytes)


@contextlib.contextmanager
def _finding(upload_id: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, msgspec.DecodeError):  # facts may be empty after a loss of power
        raise _not_found(upload_id) from None


def _not_found(upload_id: str) -> UploadNotFound:
    return UploadNotFound(f"there is no file with the id {upload_id[:100]!r}")
