"""A shared-memory ring buffer with one writer and several readers; every reader gets every message."""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.reduction import DupFd
from typing import Any

_HEADER = struct.Struct("<I?")
"""Bytes in this slot, and whether the message continues in the next."""


class Semaphore:
    """A semaphore between processes. The kernel frees it with the last of these processes, as it has no name, unlike
    the semaphores of `multiprocessing`, which a killed process leaves behind in /dev/shm.
    """

    def __init__(self, value: int) -> None:
        self._fd = os.eventfd(value, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def acquire(self, timeout: float | None = None) -> bool:
        """Wait until the value is above 0, and decrement it; returns False after `timeout` seconds.

        No other process may wait at the same time.
        """
        if timeout is not None:
            poll = select.poll()  # unlike select(), it takes descriptors above 1023
            poll.register(self._fd, select.POLLIN)
            if not poll.poll(timeout * 1000):
                return False
        os.eventfd_read(self._fd)
        return True

    def release(self) -> None:
        """Increment the value."""
        os.eventfd_write(self._fd, 1)

    def __del__(self) -> None:
        os.close(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (DupFd(self._fd),)


def _attach(duplicate: Any) -> Semaphore:
    """Return the semaphore that another process has passed to this one."""
    semaphore = Semaphore.__new__(Semaphore)
    semaphore._fd = duplicate.detach()
    return semaphore


class ShmBroadcast:
    """`slots` pieces of shared memory, for messages of any size: a long one takes several slots.

    Invariant: a slot is written only after every reader has copied its previous content. Each reader has two
    semaphores, `filled` slots to read and `space` for the writer, so no process spins. The object is passed to the
    readers' processes when they start.
    """

    def __init__(self, context: BaseContext, readers: int, slots: int = 16, slot_bytes: int = 1 << 16) -> None:
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._memory = context.RawArray("B", slots * slot_bytes)
        self._filled = [Semaphore(0) for _ in range(readers)]
        self._space = [Semaphore(slots) for _ in range(readers)]
        self._next = 0
        """Slots used so far, in this process."""

    def write(self, message: bytes, while_waiting: Callable[[], object], poll: float = 1.0) -> None:
        """Send `message` to every reader. While the ring is full, call `while_waiting` every `poll` seconds.

        It may raise, to give up on readers that have died.
        """
        room = self._slot_bytes - _HEADER.size
        for start in range(0, max(1, len(message)), room):
            piece = message[start : start + room]
            for space in self._space:
                while not space.acquire(timeout=poll):
                    while_waiting()
            offset = self._next % self._slots * self._slot_bytes
            end = offset + _HEADER.size + len(piece)
            memory = memoryview(self._memory).cast("B")
            memory[offset:end] = _HEADER.pack(len(piece), start + room < len(message)) + piece
            self._next += 1
            for filled in self._filled:
                filled.release()

    def read(self, reader: int) -> bytes:
        """Wait for the next message for this reader."""
        pieces, more = list[bytes](), True
        while more:
            self._filled[reader].acquire()
            offset = self._next % self._slots * self._slot_bytes
            memory = memoryview(self._memory).cast("B")
            size, more = _HEADER.unpack_from(memory, offset)
            pieces.append(bytes(memory[offset + _HEADER.size : offset + _HEADER.size + size]))
            self._next += 1
            self._space[reader].release()
        return b"".join(pieces)
