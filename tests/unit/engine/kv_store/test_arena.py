from __future__ import annotations

import errno
import os
import random

import pytest

from quire.engine.config.kv_layout import least_memory
from quire.engine.kv_store import arena as module
from quire.engine.kv_store.arena import Arena, slab_bytes
from quire.engine.protocol.errors import ConfigError
from tests.fakes.kv_store import map_arena

SIZES = [96, 40, 3000]


def test_places_keep_their_bytes_until_they_are_free() -> None:
    """Random places of three kinds, some of which are in use, and are not moved."""
    choose, arena = random.Random(0), Arena(16 * 3008, SIZES)
    memory = map_arena(arena.path, arena.size)
    entries: dict[int, tuple[int, bytes, bool]] = {}
    num_moved = 0

    def on_move(old: int, new: int) -> None:
        nonlocal num_moved
        assert not entries[old][2]
        entries[new] = entries.pop(old)
        num_moved += 1

    for _ in range(3000):
        kind = choose.choice([0, 0, 0, 1, 2])
        offset = arena.allocate(kind)
        if offset is not None:
            entries[offset] = kind, choose.randbytes(SIZES[kind]), choose.random() < 0.05
            memory[offset : offset + SIZES[kind]] = entries[offset][1]
        elif not arena.vacate(lambda offset: not entries[offset][2], on_move):
            for offset in choose.sample(sorted(entries), len(entries) // 4):
                arena.free(entries.pop(offset)[0], offset)
        arena.check_integrity()
        assert {(kind, offset) for offset, (kind, _, _) in entries.items()} == arena.used()
        assert arena.used_bytes == sum(SIZES[kind] for kind, _, _ in entries.values())
        for offset, (kind, expected, _) in entries.items():
            assert arena.view(kind, offset) == expected
    assert num_moved > 10
    arena.close()


def test_slabs_leave_little_over() -> None:
    """Whatever the ratio of sizes, if there is memory enough. Otherwise a slab is as large as the largest entry."""
    for pages in (25, 31, 40, 47, 49, 73, 100, 999):
        sizes = [4096 * 25, 4096 * pages]
        slab = slab_bytes(2**30, sizes)
        assert max(slab % each for each in sizes) < slab / 20
        assert slab_bytes(least_memory(sizes), sizes) == max(sizes)
    assert slab_bytes(2**30, [1000]) == 1024


def test_an_arena_that_is_too_small_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind has a slab, and one is left."""
    Arena(least_memory(SIZES), SIZES).close()
    with pytest.raises(ConfigError, match=r"--kv-offloading-size"):
        Arena(least_memory(SIZES) - 1, SIZES)

    monkeypatch.setattr(module, "_PIECE", 1000)
    pieces: list[None] = []
    Arena(least_memory(SIZES), SIZES, lambda: pieces.append(None)).close()
    assert len(pieces) == -(-least_memory(SIZES) // 1000)
    with monkeypatch.context() as patch:
        patch.setattr(module, "free_host_memory", lambda: 999)
        patch.setattr(os, "posix_fallocate", None)
        with pytest.raises(ConfigError, match=r"not enough memory.*reduce --kv-offloading-size"):
            Arena(least_memory(SIZES), SIZES)

    def refuse(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match=r"not enough memory.*reduce --kv-offloading-size"):
        Arena(least_memory(SIZES), SIZES)
