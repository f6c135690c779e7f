"""Controls how glibc treats memory that a rank on a CPU has freed; other C libraries are left unchanged."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""malloc.h"""
_TRIM_THRESHOLD_BYTES = 1 << 30
_MMAP_THRESHOLD_BYTES = 1 << 17


def return_freed_memory() -> None:
    """Return freed memory to the system, as loading frees every weight after packing it: no holes are left in the heap.

    By default glibc maps less and less memory separately, and keeps up to 64 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


class ActivationHeap:
    """Keeps large activations in the heap, and limits its growth between steps to about `kept_bytes`.

    By default glibc maps and unmaps blocks larger than 32 MiB each time; the page faults then cost as much as the
    matmul that fills the pages. But steps of ever different sizes leave holes in a heap, above all before glibc 2.38,
    which rarely reuses a freed block that was aligned (as torch's are): without a limit, a rank with 40 MiB of
    activations grows by 1 GiB.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept, self._limit = kept_bytes, 0
        self._has_trimmed = False  # in the step before
        libc = ctypes.CDLL(None)
        self._trim = getattr(libc, "malloc_trim", None)
        if self._trim is None:
            return
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
        self._page, self._sizes = os.sysconf("SC_PAGESIZE"), os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._trim(0)
        self._limit = self.resident_bytes() + self._kept

    def limit(self) -> None:
        """Return freed memory to the system if this process has grown by more than `kept_bytes` since the last time.

        Call it after each step; it takes 2 microseconds if there is nothing to do. If two steps in a row leave more
        than that, the limit doubles: they would fault the same pages in again and again.
        """
        if self._trim is None:
            return
        resident = self.resident_bytes()
        if resident <= self._limit:
            self._limit, self._has_trimmed = min(self._limit, resident + self._kept), False
            return
        self._trim(0)
        before, resident = resident, self.resident_bytes()
        if self._has_trimmed and before - resident > self._kept // 2:
            self._kept *= 2
        self._limit, self._has_trimmed = resident + self._kept, True

    def resident_bytes(self) -> int:
        """The resident memory of this process, including memory that it shares with others."""
        return int(os.pread(self._sizes, 128, 0).split()[1]) * self._page  # proc(5)
