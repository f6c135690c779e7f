"""The disk tier: entries in files that outlive the server, and that several servers may share. No torch.

    PATH/<signature>/model.json      names the model, for people
    PATH/<signature>/<name>.kv       a group of entries, which are evicted together
    PATH/<signature>/<name>.tmp      a file until it is complete

A file gets its name when it is complete, and its content never changes. Its modification time is the time of its last
use by any server; the least recently used files are evicted. docs/design/kv-store.md describes the format. There are no
locks: a file may vanish at any time, and its entries with it. Whoever finds a damaged file removes it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import itertools
import json
import logging
import os
import re
import struct
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.cluster.handshake import versions
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.kv_layout import KVLayout
from quire.engine.config.kv_store_config import why_untrusted
from quire.engine.kv_store.checksum import checksum
from quire.engine.process.log import printable
from quire.engine.process.version import commit
from quire.engine.protocol.errors import UNDECODABLE, ConfigError, reason_of
from quire.engine.protocol.kv_store import KVEntry
from quire.engine.repository.model_files import read_json, with_overrides
from quire.engine.repository.weights_digest import weights_digest

logger = logging.getLogger(__name__)

FILE_BYTES = 32 << 20
"""Target size of a file, if there is that much to write."""
SCAN_SECONDS = 10.0
"""Interval of scans for files that other servers have written or removed."""
_LISTING_SHARE = 20
"""At most one part in this many of the time is spent listing files."""
_SLICE_SECONDS = 0.2
"""Time for which one `scan` reads headers."""
_RETRY_SECONDS = 30.0
"""Time after an error until the file is read again, or the next one is written."""
_FULL_SECONDS = 600.0
"""Time for which files take no more room than when the disk was full."""
_HANGING_SECONDS = 5.0
"""An operation without progress for this long stops the others."""
_USED_SECONDS = 60.0
"""Precision of the times of last use in files."""
_LEFTOVER_SECONDS = 600.0
"""An incomplete file that has not changed for this long was left by a writer that has ended."""

_SIGNATURE_BYTES = 16
_MAGIC = b"quireKV1"
"""The first bytes of a file; the last character is the version of the format."""
_PREFIX = struct.Struct("<8sI16s")
"""Magic, bytes of the header, checksum of the header."""
_MAX_HEADER = 64 << 20
"""Bytes."""
_MODEL = "model.json"
_FOLDER = re.compile(rf"[0-9a-f]{{{2 * _SIGNATURE_BYTES}}}")
_FILE = re.compile(r"[0-9a-f]{32}\.(kv|tmp)")
"""Names of Quire's folders and files; others are left alone."""


class StoredEntry(msgspec.Struct, array_like=True, frozen=True):
    """An entry in a file's header. The bytes of the entries follow the header without gaps, in the same order."""

    link: bytes
    kind: int
    size: int
    """Bytes."""
    checksum: bytes

    @property
    def entry(self) -> KVEntry:
        return KVEntry(self.link, self.kind)


class FileHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a file, in msgpack."""

    signature: bytes
    """Digest of everything that entries depend on; the name of the folder."""
    entries: list[StoredEntry]


class DamagedFile(Exception):
    """A file is not as it was written. The message says why."""


@dataclass(eq=False)
class _EntryFile:
    """A file below the path, of any model."""

    path: Path
    size: int = 0
    """Bytes."""
    used: int = 0
    """Time of the last use, in nanoseconds since 1970."""
    entries: tuple[KVEntry, ...] | None = None
    """None: the header has not been read."""
    is_bad: bool = False
    """It is damaged or was evicted, and cannot be removed."""
    retry: float = 0.0
    """It is not read before this time."""


def signature_of(config: EngineConfig, layout: KVLayout) -> bytes:
    """Return the digest of everything that entries depend on besides their links: the weights of the model and of the
    draft model, the layout, and the versions of Quire and torch. It may take minutes. Raises `OSError` and
    `ConfigError`."""
    models = [each.model for each in config.with_drafter]
    for model in models:
        if isinstance(model.architecture, TransformersModelSpec) and model.trust_remote_code:
            hf_config = with_overrides(read_json(model.path / "config.json"), model.hf_overrides)
            _check_code(model.path, hf_config.get("auto_map"))
    weights = [weights_digest(model.path, model.load_format) for model in models]
    parts = (_MAGIC, layout.signature, weights, versions(), commit())
    return hashlib.sha256(repr(parts).encode()).digest()[:_SIGNATURE_BYTES]


def _check_code(path: Path, auto_map: object) -> None:
    """Raise `ConfigError` if the code of the model in `path` is not in its folder, so that the digest does not cover
    it."""
    if (other := re.search('"([^"]+)--', json.dumps(auto_map))) is not None:
        raise ConfigError(
            f"--kv-disk is not supported for {path}, whose code is in another repository, {other[1]}; "
            "copy the code into the model's folder"
        )


class DiskTier:
    """The entries of a model on disk.

    Methods may be called from any thread. All but `in` and `use` block, and none raises `OSError`: an entry that cannot
    be read counts as missing, and one that cannot be written is not kept.
    """

    def __init__(
        self,
        path: Path,
        limit: int,
        signature: bytes,
        sizes: Sequence[int],
        *,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit` is in bytes, for the files of all models below `path`; `sizes` are the bytes of an entry by kind."""
        assert len(signature) == _SIGNATURE_BYTES
        self.capacity, self.written_bytes, self.evicted_entries, self.failed = limit, 0, 0, 0
        self._path, self._folder = path, path / signature.hex()
        self._signature, self._sizes, self._model, self._clock = signature, tuple(sizes), model, clock
        self._changing = threading.Lock()  # held while scanning, writing or clearing
        self._lock = threading.Lock()  # of the fields below, never held during I/O
        self._files: dict[Path, _EntryFile] = {}
        self._places: dict[KVEntry, _EntryFile] = {}
        self._bytes = 0
        self._running: dict[object, tuple[float, str]] = {}  # operations: time of their last progress, and their names
        self._unread: list[_EntryFile] = []  # the last one is read next
        self._has_lost = False  # it has lost entries that other files may have, too
        self._unlisted, self._next_list = "", 0.0
        self._next_warnings: dict[str, float] = {}  # by what cannot be done
        self._unwritten, self._next_write = "", 0.0
        self._room, self._room_end = 0, 0.0  # bytes for which a full disk had room, and until when that counts
        self.changed: deque[KVEntry] = deque()
        """Entries that have come or gone, for `TierEvents`, which takes them out."""

    @property
    def used_bytes(self) -> int:
        """Size of the files of all models."""
        return self._bytes

    @property
    def num_entries(self) -> int:
        """Entries of this model."""
        return len(self._places)

    @property
    def error(self) -> str:
        """Why nothing is read or written at present; empty: the tier is in use. It recovers by itself."""
        return self._hanging() or self._unlisted or self._unwritten

    def __contains__(self, entry: KVEntry) -> bool:
        """Whether the entry is known to be on disk, and can be read at present."""
        return entry in self._places and not self._unlisted and not self._hanging()

    def holds(self, entry: KVEntry) -> bool:
        """Whether the entry is known to be on disk, even if the disk does not answer at present."""
        return entry in self._places

    def scan(self) -> bool:
        """Scan the folder for a slice of time, for files that other servers have written or removed, or that earlier
        ones have left. Returns whether there is more to see; otherwise the next scan is due after `SCAN_SECONDS`."""
        with self._changing:
            end = time.monotonic() + _SLICE_SECONDS
            if not self._unread and self._clock() >= self._next_list:
                self._list()
                self._next_list = self._clock() + _LISTING_SHARE * (time.monotonic() - end + _SLICE_SECONDS)
            while self._unread:
                self._read_index(self._unread.pop())
                if time.monotonic() > end:
                    return True
            self._evict(0)
            return False

    def _list(self) -> None:
        """List the files, and find those whose headers must be read."""
        try:
            with self._working("a listing") as beat:
                if reason := self._why_untrusted():
                    self._unlisted = reason
                    return
                found = files_below(self._path, lambda name: name != self._folder.name, beat)
        except OSError as error:
            self._unlisted = f"{self._path} cannot be read: {reason_of(error)}"
            return
        self._unlisted = ""
        with self._lock:
            for path in self._files.keys() - found.keys():
                self._forget(self._files[path])
            for path, status in found.items():
                file = self._files.setdefault(path, _EntryFile(path))
                self._bytes += status.st_size - file.size
                file.size, file.used = status.st_size, max(min(status.st_mtime_ns, time.time_ns()), file.used)
            files = sorted((file for file in self._files.values() if not file.is_bad), key=lambda file: file.used)
            if self._has_lost:
                for file in files:
                    if file.entries is not None:
                        self._add(file, file.entries)
            self._has_lost = False
        for file in files:
            # A wrong clock may have set a time in the future, with which a file would never be the oldest.
            if abs(file.used - found[file.path].st_mtime_ns) > int(_USED_SECONDS * 1e9):
                with contextlib.suppress(OSError):  # as on a disk that is read-only
                    os.utime(file.path, ns=(file.used, file.used), follow_symlinks=False)
        now, oldest = self._clock(), time.time_ns() - int(_LEFTOVER_SECONDS * 1e9)
        for file in files:
            if file.path.suffix == ".tmp":
                if file.used < oldest:
                    self._remove(file)
            elif file.path.parent == self._folder and file.entries is None and file.retry <= now:
                self._unread.append(file)

    def read(self, entries: Sequence[KVEntry], buffers: Sequence[memoryview]) -> list[bytes | None]:
        """Read entries into buffers of their sizes. Returns for each the checksum that it was stored with, which the
        caller compares with its bytes; None: it is no longer there, and the buffer's content is arbitrary."""
        found: list[bytes | None] = [None] * len(entries)
        numbers: defaultdict[_EntryFile, list[int]] = defaultdict(list)
        with self._lock:
            for number, entry in enumerate(entries):
                if (file := self._places.get(entry)) is not None:
                    numbers[file].append(number)
        for file, its_numbers in numbers.items():
            with self._handling(file), self._working("a read") as beat, _opened(file.path) as descriptor:
                places = {stored.entry: (stored, start) for stored, start in _places(self._header(descriptor))}
                for number in its_numbers:
                    if entries[number] not in places:
                        raise DamagedFile("it has been replaced")
                    stored, start = places[entries[number]]
                    _read(descriptor, buffers[number], start)
                    beat()
                    found[number] = stored.checksum
                file.used = time.time_ns()
        return found

    def use(self, entries: Iterable[KVEntry]) -> None:
        """Note that entries are in use, which are not read here because memory has them, too. Fast."""
        now = time.time_ns()
        for entry in entries:
            if (file := self._places.get(entry)) is not None:
                file.used = now

    def drop(self, entry: KVEntry) -> None:
        """Remove the file with an entry whose checksum was wrong."""
        if (file := self._places.get(entry)) is not None:
            self._remove(file, "an entry has a wrong checksum")

    def write(self, entries: Sequence[KVEntry], contents: Sequence[memoryview], checksums: Sequence[bytes]) -> bool:
        """Write a file with the entries that are not on disk yet. Returns False if that is not possible."""
        with self._changing:
            if self._unlisted or self._clock() < self._next_write:
                return False
            numbers = [number for number, entry in enumerate(entries) if entry not in self._places]
            stored = [
                StoredEntry(entries[number].link, entries[number].kind, contents[number].nbytes, checksums[number])
                for number in numbers
            ]
            assert all(each.size == self._sizes[each.kind] for each in stored)
            header = msgspec.msgpack.encode(FileHeader(self._signature, stored))
            head = _PREFIX.pack(_MAGIC, len(header), checksum(header)) + header
            size = len(head) + sum(each.size for each in stored)
            if not numbers:
                return True
            file = _EntryFile(self._folder / f"{uuid.uuid4().hex}.kv", size)
            try:
                if size > self.capacity:
                    raise OSError(errno.EFBIG, f"a file of {size:,} bytes is larger than the tier")
                if not self._evict(size):
                    raise OSError(errno.EDQUOT, "files that cannot be removed take up the space")
                with self._working("a write") as beat:
                    parts = [memoryview(head), *(contents[number] for number in numbers)]
                    try:
                        self._make_folder()
                        _write_aside(file.path, parts, beat)
                    except FileNotFoundError:  # the folder was removed just now
                        self._make_folder()
                        _write_aside(file.path, parts, beat)
                file.used = time.time_ns()
            except OSError as error:
                self._fail_writes(error)
                return False
            self._unwritten = ""
            with self._lock:
                self._files[file.path] = file
                self._bytes += size
                self.written_bytes += size
                self._add(file, [each.entry for each in stored])
            return True

    def clear(self) -> tuple[int, str]:
        """Remove this model's files. Returns how many entries they had, and why some may be left; empty: none are."""
        with self._changing:
            count, left = len(self._places), 0
            self._list()
            self._unread.clear()
            with self._lock:
                files = [file for path, file in self._files.items() if path.parent == self._folder]
            for file in files:
                if file.path.suffix == ".kv":
                    left += not self._remove(file)
            error = f"{left:,} files in {self._folder} cannot be removed: check its permissions" if left else ""
            return count, self._unlisted or error

    def check_integrity(self) -> None:
        """Assert that files and places match."""
        with self._lock:
            assert self._bytes == sum(file.size for file in self._files.values())
            for path, file in self._files.items():
                assert path == file.path
                assert file.entries is None or (path.parent == self._folder and not file.is_bad)
            for entry, file in self._places.items():
                assert self._files[file.path] is file
                assert file.entries is not None
                assert entry in file.entries

    def _hanging(self) -> str:
        """Which operation hangs; empty: none does."""
        late = time.monotonic() - _HANGING_SECONDS
        names = (name for since, name in [*self._running.values()] if since < late)
        return "".join(f"{self._folder}: {name} takes more than {_HANGING_SECONDS:g} s" for name in [*names][:1])

    @contextlib.contextmanager
    def _working(self, name: str) -> Iterator[Callable[[], None]]:
        """An operation. It must call the yielded function when it makes progress."""
        key = object()

        def beat() -> None:
            self._running[key] = time.monotonic(), name

        beat()
        try:
            yield beat
        finally:
            del self._running[key]

    @contextlib.contextmanager
    def _handling(self, file: _EntryFile) -> Iterator[None]:
        """In this block, a file that cannot be read loses its entries, and a damaged file is removed."""
        try:
            yield
        except FileNotFoundError:
            with self._lock:
                self._forget(file)
        except DamagedFile as damage:
            self._remove(file, str(damage))
        except OSError as error:
            self._warn("read, and is not used for some time", file, error)
            with self._lock:
                self.failed += 1
                self._forget_entries(file)
                file.retry = self._clock() + _RETRY_SECONDS

    def _warn(self, what: str, file: _EntryFile, error: OSError) -> None:
        """Log what cannot be done with a file: once in `_RETRY_SECONDS` for each `what`, as many files may fail."""
        with self._lock:
            now = self._clock()
            if is_due := now >= self._next_warnings.get(what, now):
                self._next_warnings[what] = now + _RETRY_SECONDS
        if is_due:
            logger.warning("%s cannot be %s: %s", file.path, what, reason_of(error))

    def _header(self, descriptor: int) -> tuple[FileHeader, int]:
        """Read the header of a file of this model; see `read_header`."""
        header, start = read_header(descriptor)
        if header.signature != self._signature:
            raise DamagedFile("its entries belong to another model")
        for each in header.entries:
            if not 0 <= each.kind < len(self._sizes) or each.size != self._sizes[each.kind]:
                raise DamagedFile("its entries have other sizes")
        return header, start

    def _read_index(self, file: _EntryFile) -> None:
        with self._handling(file), self._working("a read"), _opened(file.path) as descriptor:
            header, _ = self._header(descriptor)
            with self._lock:
                self._add(file, [each.entry for each in header.entries])

    def _add(self, file: _EntryFile, entries: Sequence[KVEntry]) -> None:
        """With the lock. If several servers have written the same entries, the first file is read, and the others when
        it is gone."""
        file.entries = tuple(entries)
        for entry in entries:
            self._places.setdefault(entry, file)
        self.changed.extend(entries)

    def _forget_entries(self, file: _EntryFile) -> None:
        """With the lock."""
        for entry in file.entries or ():
            if self._places.get(entry) is file:
                del self._places[entry]
                self.changed.append(entry)
                self._has_lost = True
        file.entries = None

    def _forget(self, file: _EntryFile) -> None:
        """With the lock."""
        self._forget_entries(file)
        if self._files.get(file.path) is file:
            del self._files[file.path]
            self._bytes -= file.size

    def _remove(self, file: _EntryFile, damage: str = "") -> bool:
        """Remove a file, because of `damage` or for another reason. Even if that fails, it is not read again."""
        if damage:
            logger.warning("%s is damaged: %s; removing it", file.path, damage)
        try:
            with self._working("removing a file"):
                file.path.unlink(missing_ok=True)
        except OSError as error:
            self._warn("removed", file, error)
            with self._lock:
                self.failed += 1
                self._forget_entries(file)
                file.is_bad = True
            return False
        with self._lock:
            self.failed += bool(damage)
            self._forget(file)
        return True

    def _evict(self, size: int) -> bool:
        """Remove the least recently used files until there is room for another one of `size` bytes. Returns whether
        there is."""
        limit = min(self.capacity, self._room) if self._clock() < self._room_end else self.capacity
        files = self._complete_files() if self._bytes + size > limit else []
        now, queue = time.time_ns(), [(file.used, number) for number, file in enumerate(files)]
        heapq.heapify(queue)
        while self._bytes + size > limit and queue:
            _, number = heapq.heappop(queue)
            oldest = files[number]
            with contextlib.suppress(OSError):  # removing it logs why
                if (used := min(oldest.path.stat().st_mtime_ns, now)) > oldest.used:  # by another server
                    oldest.used = used
                    heapq.heappush(queue, (used, number))
                    continue
            count = len(oldest.entries or ())
            if self._remove(oldest):
                self.evicted_entries += count
        return self._bytes + size <= self.capacity

    def _complete_files(self) -> list[_EntryFile]:
        """The files of all models that are complete and can be removed."""
        with self._lock:
            return [file for file in self._files.values() if file.path.suffix == ".kv" and not file.is_bad]

    def _why_untrusted(self) -> str:
        return why_untrusted(str(self._path)) or why_untrusted(str(self._folder))

    def _make_folder(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if reason := self._why_untrusted():
            raise PermissionError(errno.EPERM, reason)
        if not (file := self._folder / _MODEL).exists():
            _write_aside(file, [memoryview(json.dumps({"model": self._model}).encode())])

    def _fail_writes(self, error: OSError) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._room, self._room_end = self._bytes, self._clock() + _FULL_SECONDS
        if not self._unwritten:
            logger.warning("%s cannot be written: %s", self._folder, reason_of(error))
        with self._lock:
            self.failed += 1
        self._unwritten = f"{self._folder} cannot be written: {reason_of(error)}"
        self._next_write = self._clock() + _RETRY_SECONDS


def files_below(
    path: Path,
    may_skip: Callable[[str], bool] = lambda name: False,
    on_file: Callable[[], object] = lambda: None,
) -> dict[Path, os.stat_result]:
    """Return Quire's files below the path of a disk tier; none if it does not exist. Raises `OSError`. `may_skip`
    decides whether a folder that this user cannot read is skipped. `on_file` is called for each file."""
    found = {}
    try:
        with os.scandir(path) as folders:
            names = [folder.name for folder in folders if _FOLDER.fullmatch(folder.name)]
    except FileNotFoundError:
        return {}
    for name in names:
        try:
            with os.scandir(path / name) as files:
                for file in files:
                    on_file()
                    if _FILE.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):
                            found[path / name / file.name] = file.stat(follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            if not may_skip(name):
                raise
    return found


def read_header(descriptor: int) -> tuple[FileHeader, int]:
    """Return the header of an open file, and the offset of its entries. Raises `OSError`, and `DamagedFile` unless the
    file has the size that its header implies."""
    size, prefix = os.fstat(descriptor).st_size, bytearray(_PREFIX.size)
    _read(descriptor, memoryview(prefix), 0)
    magic, length, expected = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise DamagedFile(f"it begins with {bytes(magic)!r}")
    if length > min(_MAX_HEADER, size - _PREFIX.size):
        raise DamagedFile("it is shorter than its header")
    encoded = bytearray(length)
    _read(descriptor, memoryview(encoded), _PREFIX.size)
    if checksum(encoded) != expected:
        raise DamagedFile("its header has a wrong checksum")
    try:
        header = msgspec.msgpack.decode(encoded, type=FileHeader)
    except UNDECODABLE as error:
        raise DamagedFile(f"its header is not valid: {error}") from None
    start = _PREFIX.size + length
    if any(each.size < 0 for each in header.entries) or start + sum(each.size for each in header.entries) != size:
        raise DamagedFile(f"it has {size:,} bytes, not the number that its header implies")
    return header, start


def model_of(folder: Path) -> str:
    """Return the path of the model whose entries a folder has; empty if it is not known."""
    try:
        return printable(json.loads((folder / _MODEL).read_bytes())["model"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""


def count_entries(file: Path) -> int:
    """Return how many entries a file has. Raises `OSError` and `DamagedFile`."""
    with _opened(file) as descriptor:
        return len(read_header(descriptor)[0].entries)


def remove_folder(folder: Path) -> None:
    """Remove a model's folder, unless files are left in it that are new or not Quire's. Raises `OSError`."""
    if not [name for name in os.listdir(folder) if name != _MODEL]:
        (folder / _MODEL).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a server writes to it
            folder.rmdir()


def find_damage(file: Path, on_bytes: Callable[[int], object]) -> str:
    """Read a whole file, and return what is wrong with it; empty: nothing. `on_bytes` is called with the number of
    bytes read. Raises `OSError`."""
    try:
        with _opened(file) as descriptor:
            header, end = read_header(descriptor)
            on_bytes(end)
            if header.signature.hex() != file.parent.name:
                return "its entries belong to another model"
            for number, (stored, start) in enumerate(_places((header, end))):
                content = bytearray(stored.size)
                _read(descriptor, memoryview(content), start)
                on_bytes(stored.size)
                if checksum(content) != stored.checksum:
                    return f"entry {number} of {len(header.entries)} has a wrong checksum"
    except DamagedFile as damage:
        return str(damage)
    return ""


def _places(opened: tuple[FileHeader, int]) -> Iterator[tuple[StoredEntry, int]]:
    """The entries of a file, and the offset of each."""
    header, start = opened
    starts = itertools.accumulate((each.size for each in header.entries), initial=start)
    return zip(header.entries, starts, strict=False)  # the last start is the end


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int, buffer: memoryview, start: int) -> None:
    """Fill a buffer from an offset in a file. Raises `DamagedFile` if the file is too short."""
    done = 0
    while done < len(buffer):
        if not (count := os.preadv(descriptor, [buffer[done:]], start + done)):
            raise DamagedFile("it is too short")
        done += count


def _write_aside(path: Path, parts: Sequence[memoryview], on_write: Callable[[], object] = lambda: None) -> None:
    """Write a file under a temporary name, and rename it when it is complete and synced. `on_write` is called when
    there is progress."""
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            for part in parts:
                done = 0
                while done < len(part):
                    done += os.write(descriptor, part[done:])
                    on_write()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
