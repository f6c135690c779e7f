"""The files with processed items, in shared memory: which there are, who needs them, which may go.

An item is known by its digest, and its file has that name. A file is written once, and deleted when it is neither
leased nor among the most recent ones that fit. Whoever has it mapped can go on reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from quire.server.media.types import LoadedItem, LoadedMedia

_SUFFIX, _UNFINISHED = ".item", ".part"
_MAX_ITEMS = 2**14
_MAX_KEYS = 16
"""Of an item: files with the same picture."""


@dataclass
class _Entry:
    num_bytes: int
    item: LoadedItem | None
    """None: of a process before this one. It is kept for who has a lease on it, and for nobody else."""
    num_holders: int = 0
    keys: list[bytes] = field(default_factory=list)
    """Of what it was made of (see `Store.add`)."""


class Store:
    """The files of a folder. All calls must be on one thread."""

    def __init__(self, folder: str, capacity: int, kept: int | None = None) -> None:
        """Takes over the finished files that the folder has. `capacity` is in bytes; as long as there are items that
        nobody needs, the items have at most `kept` bytes (None: the same).
        """
        self.folder, self.capacity = folder, capacity
        self._kept = capacity if kept is None else kept
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """By digest; the ones used last come last."""
        self._digests: dict[bytes, bytes] = {}
        """By key."""
        self._leases: dict[str, list[bytes]] = {}
        self._reserved = self._held_bytes = 0
        self._freed = asyncio.Event()
        for path in Path(folder).iterdir():
            if path.suffix == _SUFFIX:
                self._entries[bytes.fromhex(path.stem)] = _Entry(size := path.stat().st_size, None)
                self.num_bytes += size
            elif path.suffix == _UNFINISHED:
                path.unlink()

    def path(self, digest: bytes) -> str:
        """Return the path of an item's file."""
        return f"{self.folder}/{digest.hex()}{_SUFFIX}"

    def unfinished(self) -> tuple[int, str]:
        """Open a new file, which `add` makes an item's, or the caller deletes; returns its descriptor and path."""
        path = f"{self.folder}/{os.urandom(8).hex()}{_UNFINISHED}"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path

    async def reserve(self, num_bytes: int) -> None:
        """Wait until there is space for an item in addition to those that are in use; `unreserve` gives it back."""
        while not self.try_reserve(num_bytes):
            self._freed.clear()
            await self._freed.wait()

    def try_reserve(self, num_bytes: int) -> bool:
        """`reserve`, if there is space at once; returns whether there is."""
        if self._held_bytes + self._reserved + num_bytes > self.capacity:
            return False
        self._reserved += num_bytes
        self._evict()
        return True

    def unreserve(self, num_bytes: int) -> None:
        """Give back reserved space."""
        self._reserved -= num_bytes
        self._freed.set()

    def add(self, key: bytes, item: LoadedItem, path: str) -> bytes:
        """Add an item, whose file is at `path` so far; `key` says what it was made of. The caller holds it.

        Returns its digest.
        """
        entry = self._entries.get(digest := item.digest)
        if entry is not None and entry.item is not None:
            os.unlink(path)
        else:
            os.chmod(path, 0o400)
            os.rename(path, self.path(digest))
            if entry is None:
                entry = self._entries[digest] = _Entry(item.data.num_bytes, item)
                self.num_bytes += entry.num_bytes
            entry.item = item
        if key not in entry.keys:
            entry.keys.append(key)
            self._digests[key] = digest
            if len(entry.keys) > _MAX_KEYS:
                del self._digests[entry.keys.pop(0)]
        self.hold(digest)
        self._evict()
        return digest

    def find(self, key: bytes) -> bytes | None:
        """Return the digest of an item that was made of this, and hold the item."""
        if (digest := self._digests.get(key)) is not None:
            self.hold(digest)
        return digest

    def hold(self, digest: bytes) -> None:
        """Keep an item until `drop`."""
        entry = self._entries[digest]
        self._held_bytes += 0 if entry.num_holders else entry.num_bytes
        entry.num_holders += 1
        self._entries.move_to_end(digest)

    def drop(self, digests: Iterable[bytes]) -> None:
        """Undo `hold`."""
        for digest in digests:
            entry = self._entries[digest]
            entry.num_holders -= 1
            if entry.num_holders == 0:
                self._held_bytes -= entry.num_bytes
                if entry.item is None:
                    self._delete(digest)
        self._evict()
        self._freed.set()

    def size(self, digests: Iterable[bytes]) -> int:
        """Return how many bytes these items have together."""
        return sum(self._entries[digest].num_bytes for digest in {*digests})

    def lease(self, digests: list[bytes]) -> LoadedMedia:
        """Make a lease of items, which the caller holds so far."""
        self._leases[lease := os.urandom(12).hex()] = digests
        items = self.leased(lease)
        assert items is not None
        return LoadedMedia(items, lease)

    def leased(self, lease: str) -> tuple[LoadedItem, ...] | None:
        """Return the items of a lease; None: there is no such lease, or a process before this one made it."""
        if (digests := self._leases.get(lease)) is None:
            return None
        items = [item for digest in digests if (item := self._entries[digest].item) is not None]
        return tuple(items) if len(items) == len(digests) else None

    def renew(self, lease: str, digests: list[bytes]) -> None:
        """Enter a lease that a process before this one made."""
        if lease not in self._leases:
            known = [digest for digest in digests if digest in self._entries]
            for digest in known:
                self.hold(digest)
            self._leases[lease] = known

    def release(self, lease: str) -> None:
        """End a lease, if it exists."""
        self.drop(self._leases.pop(lease, ()))

    def forget_inherited(self) -> None:
        """Delete the files of processes before this one that nobody has a lease on."""
        for digest in [d for d, entry in self._entries.items() if entry.item is None and not entry.num_holders]:
            self._delete(digest)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def _evict(self) -> None:
        while self.num_bytes + self._reserved > self._kept or len(self._entries) > _MAX_ITEMS:
            free = (d for d, entry in self._entries.items() if not entry.num_holders and entry.item is not None)
            if (digest := next(free, None)) is None:
                break
            self._delete(digest)

    def _delete(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        for key in entry.keys:
            del self._digests[key]
        self.num_bytes -= entry.num_bytes
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(digest))

    def check_integrity(self) -> None:
        """Assert what always holds."""
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values())
        files = {path.name for path in Path(self.folder).iterdir() if path.suffix == _SUFFIX}
        assert files == {f"{digest.hex()}{_SUFFIX}" for digest in self._entries}
        held = [digest for digests in self._leases.values() for digest in digests]
        assert all(self._entries[digest].num_holders >= held.count(digest) for digest in held)
        assert all(key in self._entries[digest].keys for key, digest in self._digests.items())
        assert self._held_bytes == sum(entry.num_bytes for entry in self._entries.values() if entry.num_holders)
