"""A table of numbers that several processes map."""

from __future__ import annotations

import mmap


def map_table(path: str | None, num_cells: int) -> mmap.mmap:
    """Map a table of float64 that is the file at `path`, and 0 at first. Without a path, it is this process's own."""
    size = 8 * num_cells
    if path is None:
        return mmap.mmap(-1, size)
    with open(path, "ab+") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)
