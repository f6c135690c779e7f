"""The media process's files: leases keep them, space is bounded, a later process inherits them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from quire.engine.protocol.media import MediaData
from quire.server.media.store import Store
from quire.server.media.types import LoadedItem

SIZE = 100


def add(store: Store, name: bytes, key: bytes = b"") -> bytes:
    """Add an item of `SIZE` bytes, which the caller holds."""
    target, path = store.unfinished()
    os.write(target, b"x" * SIZE)
    os.close(target)
    digest = name.ljust(16, b"-")
    data = MediaData((), SIZE, store.path(digest))
    added = store.add(key or name, LoadedItem(digest, "image", "", (), 0.0, data), path)
    store.check_integrity()
    return added


def test_what_is_not_in_use_goes_when_space_is_needed_the_least_recent_first(tmp_path: Path) -> None:
    store = Store(str(tmp_path), 3 * SIZE)
    first, second, third = (add(store, name) for name in (b"1", b"2", b"3"))
    lease = store.lease([first]).lease
    store.drop([second, third])
    assert store.find(b"2") == second
    store.drop([second])
    add(store, b"4")  # 3 was used least recently, and 1 is leased
    assert [store.find(key) for key in (b"1", b"2", b"3")] == [first, second, None]
    store.drop([first, second])
    store.release(lease)
    store.release(lease)  # as a process may whose lease has ended
    add(store, b"5")
    assert store.find(b"2") == second
    assert store.find(b"1") is None
    assert not os.path.exists(store.path(first))


def test_without_a_cache_items_stay_while_they_are_needed(tmp_path: Path) -> None:
    store = Store(str(tmp_path), 3 * SIZE, 0)
    lease = store.lease([add(store, b"1")]).lease
    add(store, b"2")
    assert store.find(b"1")
    store.drop([b"1".ljust(16, b"-"), b"2".ljust(16, b"-")])
    assert (store.find(b"2"), store.num_bytes) == (None, SIZE)
    store.release(lease)
    store.check_integrity()
    assert store.num_bytes == 0


def test_an_item_is_one_file_whatever_it_was_made_of(tmp_path: Path) -> None:
    store = Store(str(tmp_path), 3 * SIZE)
    assert add(store, b"1", b"png") == add(store, b"1", b"jpeg") == store.find(b"png") == store.find(b"jpeg")
    assert store.num_bytes == SIZE
    store.check_integrity()


async def test_work_waits_for_space_until_leases_end(tmp_path: Path) -> None:
    store = Store(str(tmp_path), 3 * SIZE)
    lease = store.lease([add(store, b"1"), add(store, b"2")]).lease
    await store.reserve(SIZE)
    waiting = asyncio.create_task(store.reserve(SIZE))
    await asyncio.sleep(0)
    assert not waiting.done()
    store.release(lease)
    await waiting
    assert store.find(b"1") is None, "its space was needed"
    assert store.find(b"2") is not None


def test_a_later_process_keeps_the_files_of_leases_that_are_entered(tmp_path: Path) -> None:
    before = Store(str(tmp_path), 10 * SIZE)
    kept, lost = add(before, b"1"), add(before, b"2")
    target, unfinished = before.unfinished()
    os.close(target)
    store = Store(str(tmp_path), 10 * SIZE)
    assert not os.path.exists(unfinished)
    store.renew("lease", [kept, b"unknown".ljust(16)])
    store.forget_inherited()
    store.check_integrity()
    assert (os.path.exists(store.path(kept)), os.path.exists(store.path(lost))) == (True, False)
    assert store.find(b"1") is None, "what made it is not known"
    store.release("lease")
    store.check_integrity()
    assert not os.path.exists(store.path(kept))


@pytest.mark.parametrize("is_renewed_first", [True, False])
def test_an_inherited_item_that_is_made_again_is_one_file(tmp_path: Path, is_renewed_first: bool) -> None:
    digest = add(Store(str(tmp_path), 10 * SIZE), b"1")
    store = Store(str(tmp_path), 10 * SIZE)
    if is_renewed_first:
        store.renew("lease", [digest])
    assert add(store, b"1") == digest
    store.drop([digest])
    store.release("lease")
    store.forget_inherited()
    store.check_integrity()
    assert store.find(b"1") == digest
