"""A table of numbers that several processes map."""

from __future__ import annotations

import mmap
import os


def map_table(path: str | None, num_cells: int) -> mmap.mmap:
    """Map a table of float64 that is the file at `path`, and 0 at first. Without a path, it is this process's own."""
    size = 8 * num_cells
    if path is None:
        return mmap.mmap(-1, size)
    with open(path, "ab+") as file:
        if os.fstat(file.fileno()).st_size < size:  # a page without a block on a full disk would end who writes to it
            os.posix_fallocate(file.fileno(), 0, size)
        return mmap.mmap(file.fileno(), size)
