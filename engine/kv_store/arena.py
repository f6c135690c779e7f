"""The memory of a host's KV store: an anonymous file that ranks map. It is divided into slabs, and a slab into places
of one size.

All entries of a kind have the same size. A slab has places for entries of one kind, until all of its places are free.
When a kind needs a place and only slabs of other kinds have some, the entries of one of these slabs are moved to other
slabs of their kind (`vacate`), so that less than one slab of each kind is unused.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Sequence

from quire.engine.config.devices import free_host_memory
from quire.engine.config.kv_layout import least_memory, place_bytes
from quire.engine.protocol.errors import ConfigError

_LEAST_SLABS = 16
"""Minimum slabs for each kind, if the memory has room for them."""
_MOST_ENTRIES = 32
"""Maximum entries of the largest kind in a slab."""
_PARTS = 32
"""A slab may leave less than one in this many bytes unused."""
_PIECE = 2**30
"""Bytes that are allocated at a time."""


def slab_bytes(size: int, sizes: Sequence[int]) -> int:
    """Return the bytes of a slab in an arena of `size` bytes: a multiple of the largest entry's, chosen so that little
    is left over with entries of the other kinds.
    """
    places = [place_bytes(each) for each in sizes]
    most = max(1, size // (_LEAST_SLABS * len(sizes) * max(places)))
    slabs = (max(places) * count for count in range(1, min(most, _MOST_ENTRIES) + 1))
    return min(slabs, key=lambda slab: max(slab % place * _PARTS // slab for place in places))


def open_arena(path: str) -> int:
    """Open an arena for reading and writing. Raises `OSError` if its process has ended, even if another process has its
    number by now."""
    file, _, name = path.partition("#")
    if name and name not in os.readlink(file):
        raise FileNotFoundError(errno.ENOENT, "the KV store has ended", file)
    return os.open(file, os.O_RDWR | os.O_CLOEXEC)


class Arena:
    """The file, and which of its places are free.

    Invariants (`check_integrity`): free slabs and slabs with free places are listed; free places are counted.
    """

    def __init__(self, size: int, sizes: Sequence[int], on_piece: Callable[[], None] = lambda: None) -> None:
        """Allocate `size` bytes, for entries of `sizes` by kind. Raises `ConfigError` if the host has less free memory,
        or if not even one entry of each kind fits. `on_piece` is called after each piece.
        """
        if size < (least := least_memory(sizes)):
            raise ConfigError(
                f"the KV store needs at least {least / 2**30:.3f} GiB of memory for one entry of each kind "
                f"of this model ({', '.join(f'{each:,}' for each in sizes)} bytes), but has {size / 2**30:.3f} GiB; "
                "increase --kv-offloading-size"
            )
        self.size = size
        self._sizes, self._places = sizes, [place_bytes(each) for each in sizes]
        self._slab = slab_bytes(size, sizes)
        self._per_slab = [self._slab // each for each in self._places]
        self._kind_of: list[int | None] = [None] * (size // self._slab)
        """By slab; None: it is free."""
        self._free_slabs = list(reversed(range(len(self._kind_of))))
        self._free: dict[int, set[int]] = {}
        """For each slab with a free place: the offsets of its free places."""
        self._open: list[dict[int, None]] = [{} for _ in sizes]
        """By kind: the slabs with free places."""
        self._num_free = [0] * len(sizes)
        """By kind: free places in its slabs."""
        self._num_used = [0] * len(sizes)
        # Anonymous, because a killed process must leave nothing behind, and a container's /dev/shm may be small.
        name = f"quire-kv-{secrets.token_hex(8)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, fd)
        """Gives the memory back, once nobody has it mapped any more."""
        try:  # all of it now: if memory is short, writers would be killed later
            for start in range(0, size, _PIECE):
                if free_host_memory() < (piece := min(_PIECE, size - start)):  # it would be killed
                    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                os.posix_fallocate(fd, start, piece)
                on_piece()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"not enough memory for the KV store: {size / 2**30:.3f} GiB ({error.strerror}); reduce "
                f"--kv-offloading-size"
            ) from None
        self.path = f"/proc/{os.getpid()}/fd/{fd}#{name}"
        """The path by which processes of this user can open it (`open_arena`)."""
        self.memory = memoryview(mmap.mmap(fd, size))

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(count * size for count, size in zip(self._num_used, self._sizes, strict=True))

    def view(self, kind: int, offset: int) -> memoryview:
        """Return the bytes of an entry."""
        return self.memory[offset : offset + self._sizes[kind]]

    def allocate(self, kind: int) -> int | None:
        """Take a place for an entry; returns its offset. None: all places are in use, or belong to other kinds."""
        if not self._open[kind]:
            if not self._free_slabs:
                return None
            slab = self._free_slabs.pop()
            start, count = slab * self._slab, self._per_slab[kind]
            self._kind_of[slab] = kind
            self._open[kind][slab] = None
            self._free[slab] = {start + at * self._places[kind] for at in range(count)}
            self._num_free[kind] += count
        slab = next(reversed(self._open[kind]))
        return self._take(kind, slab)

    def free(self, kind: int, offset: int) -> None:
        """Give a place back."""
        slab = offset // self._slab
        assert self._kind_of[slab] == kind
        free = self._free.setdefault(slab, set())
        assert offset not in free
        free.add(offset)
        self._open[kind][slab] = None
        self._num_free[kind] += 1
        self._num_used[kind] -= 1
        if len(free) == self._per_slab[kind]:
            self._kind_of[slab] = None
            self._num_free[kind] -= len(free)
            del self._free[slab], self._open[kind][slab]
            self._free_slabs.append(slab)

    def vacate(self, is_movable: Callable[[int], bool], on_move: Callable[[int, int], None]) -> bool:
        """Move the entries of a slab to free places in other slabs of its kind, so that it becomes free. Returns
        whether that was possible.

        `on_move` gets the old and the new offset of each entry. `is_movable` says whether an entry at an offset is
        unused.
        """
        for kind, count in enumerate(self._per_slab):
            if self._num_free[kind] < count:
                continue
            for slab in sorted(self._open[kind], key=lambda slab: -len(self._free[slab])):
                start, place = slab * self._slab, self._places[kind]
                used = {start + at * place for at in range(count)} - self._free[slab]
                if not all(map(is_movable, used)):
                    continue
                others = [each for each in self._open[kind] if each != slab]
                for offset in used:
                    while others[-1] not in self._open[kind]:
                        others.pop()
                    new = self._take(kind, others[-1])
                    self.view(kind, new)[:] = self.view(kind, offset)
                    on_move(offset, new)
                    self.free(kind, offset)
                return True
        return False

    def _take(self, kind: int, slab: int) -> int:
        free = self._free[slab]
        offset = free.pop()
        if not free:
            del self._free[slab], self._open[kind][slab]
        self._num_free[kind] -= 1
        self._num_used[kind] += 1
        return offset

    def used(self) -> set[tuple[int, int]]:
        """Kind and offset of every place in use."""
        return {
            (kind, offset)
            for slab, kind in enumerate(self._kind_of)
            if kind is not None
            for at in range(self._per_slab[kind])
            if (offset := slab * self._slab + at * self._places[kind]) not in self._free.get(slab, ())
        }

    def check_integrity(self) -> None:
        assert sorted(self._free_slabs) == [slab for slab, kind in enumerate(self._kind_of) if kind is None]
        for kind, count in enumerate(self._per_slab):
            own = {slab: len(self._free.get(slab, ())) for slab, each in enumerate(self._kind_of) if each == kind}
            assert set(self._open[kind]) == {slab for slab, free in own.items() if free}
            assert all(free < count for free in own.values())
            assert self._num_free[kind] == sum(own.values())
            assert self._num_used[kind] == len(own) * count - sum(own.values())
        assert set(self._free) == {slab for each in self._open for slab in each}
        assert len(self.used()) == sum(self._num_used)
