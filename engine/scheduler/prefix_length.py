"""How long a cached prefix is, given which blocks are cached: for the prefix cache, the KV store, and the router of the
server."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from quire.engine.config.engine_config import KVCacheGroup


def windows_of(groups: Sequence[KVCacheGroup]) -> dict[int, int]:
    """Return the window of each group that has one, by group number."""
    # A token sees the state after the token before it.
    windows = {number: 2 if group.is_state else group.window for number, group in enumerate(groups)}
    return {number: window for number, window in windows.items() if window is not None}


def first_visible_block(window: int | None, position: int, block_size: int) -> int:
    """Return the number of the first block that a query at `position` sees, in a group with this window."""
    return 0 if window is None else max(0, position + 1 - window) // block_size


def prefix_length(
    hashes: Sequence[Any], known: Container[Any], num_groups: int, windows: Mapping[int, int], block_size: int
) -> int:
    """Return the blocks of each group in the longest prefix whose next token sees only blocks with known hashes.

    `hashes` has those of each block of tokens, one for each group, and `windows` is as `windows_of` returns it.
    """

    def first_seen(length: int) -> dict[int, int]:
        return {
            group: first_visible_block(window, length * block_size, block_size) for group, window in windows.items()
        }

    length = len(hashes) // num_groups
    for group in range(num_groups):
        if group not in windows:
            missing = (at for at in range(length) if hashes[at * num_groups + group] not in known)
            length = next(missing, length)
    at, seen = length, first_seen(length)
    while at > min(seen.values(), default=at):
        at -= 1
        if any(at >= first and hashes[at * num_groups + group] not in known for group, first in seen.items()):
            length, seen = at, first_seen(at)
    return length
