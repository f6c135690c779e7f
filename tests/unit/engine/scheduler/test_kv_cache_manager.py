"""The block pool and its prefix cache, by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.config.engine_config import KVCacheGroup
from quire.engine.scheduler.kv_cache_manager import FREED, KVCacheManager, extend_hashes


def hashes_of(tokens: list[int], block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size)
    return hashes


@given(st.lists(st.integers(0, 2**40), max_size=40), st.integers(1, 7), st.integers(0, 40))
def test_hashes_grow_with_the_tokens(tokens: list[int], block_size: int, cut: int) -> None:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens[:cut], block_size)
    extend_hashes(hashes, tokens, block_size)
    assert hashes == hashes_of(tokens, block_size)
    assert len(hashes) == len(tokens) // block_size


def test_a_hash_stands_for_all_tokens_before_it() -> None:
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8])[1] != hashes_of([0, 2, 3, 4, 5, 6, 7, 8])[1]


def test_a_released_prefix_is_found_until_its_blocks_are_needed() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4, enable_prefix_caching=True)
    hashes = hashes_of(list(range(12)))
    blocks = kv.allocate(3)
    for block, digest in zip(blocks, hashes, strict=True):
        kv.publish(block, digest)
    kv.free(blocks)
    assert kv.match(hashes) == blocks
    assert kv.allocate(1) == [3]  # a block without content goes first
    kv.allocate(1)
    assert kv.match(hashes) == blocks[:2]  # then the end of the chain
    kv.touch(blocks[:2])
    kv.check_integrity([[3], [blocks[2]], blocks[:2]])
    assert kv.num_free == 0
    assert not kv.can_allocate(1)


def test_two_holders_of_a_block_are_counted() -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4, enable_prefix_caching=True)
    (block,) = kv.allocate(1)
    kv.touch([block])
    kv.free([block])
    kv.check_integrity([[block]])
    kv.free([block])
    kv.check_integrity([])


def test_of_two_equal_blocks_the_first_stays_known() -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4, enable_prefix_caching=True)
    first, second = kv.allocate(2)
    (digest,) = hashes_of([1, 2, 3, 4])
    kv.publish(first, digest)
    kv.publish(second, digest)
    assert kv.match([digest]) == [first]
    kv.check_integrity([[first, second]])


def test_free_blocks_that_a_match_would_hold_are_not_counted_twice() -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4, enable_prefix_caching=True)
    blocks = kv.allocate(1)
    (digest,) = hashes_of([1, 2, 3, 4])
    kv.publish(blocks[0], digest)
    kv.free(blocks)
    assert kv.can_allocate(2)
    assert kv.can_allocate(1, cached_blocks=blocks)
    assert not kv.can_allocate(2, cached_blocks=blocks)


def test_check_integrity_notices_a_lost_block() -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4, enable_prefix_caching=True)
    kv.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        kv.check_integrity([])


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4, enable_prefix_caching=False)
    (digest,) = hashes_of([1, 2, 3, 4])
    kv.publish(kv.allocate(1)[0], digest)
    assert kv.match([digest]) == []


def grouped(windows: tuple[int | None, ...], num_blocks: int = 400, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, True, [KVCacheGroup(window=window) for window in windows])


Windows = (
    st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=4)
    .map(tuple)
    .filter(lambda windows: len(windows) == 1 or any(windows))
)


@given(Windows, st.integers(0, 12), st.sets(st.integers(0, 47)))
def test_a_prefix_counts_as_cached_if_what_the_next_token_sees_is(
    windows: tuple[int | None, ...], length: int, lost: set[int]
) -> None:
    kv, stride = grouped(windows), len(windows)
    hashes: list[bytes] = []
    extend_hashes(hashes, list(range(length * 4)), 4, b"", stride)
    assert len(set(hashes)) == len(hashes) == length * stride
    blocks = kv.allocate(length * stride)
    for place, (block, digest) in enumerate(zip(blocks, hashes, strict=True)):
        if place not in lost:
            kv.publish(block, digest)

    def seen(blocks_before: int) -> set[int]:
        """The blocks that a token after so many blocks sees, by place in the list."""
        return {
            position // 4 * stride + group
            for group, window in enumerate(windows)
            for position in range(0 if window is None else max(0, blocks_before * 4 + 1 - window), blocks_before * 4)
        }

    best = max(count for count in range(length + 1) if not seen(count) & lost)
    expected = [blocks[place] if place in seen(best) else FREED for place in range(best * stride)]
    assert kv.match(hashes) == expected
    assert kv.without_freed(expected) == [block for block in expected if block != FREED]
    assert all(block >= 0 for block in kv.block_table(expected))


@given(Windows, st.lists(st.integers(1, 30), max_size=12), st.booleans())
def test_blocks_are_given_back_as_soon_as_nothing_sees_them(
    windows: tuple[int | None, ...], rows: list[int], from_cache: bool
) -> None:
    """Also: a request never has more blocks than are counted for it beforehand."""
    kv, stride = grouped(windows), len(windows)
    blocks: list[int] = []
    if from_cache:
        hashes: list[bytes] = []
        extend_hashes(hashes, list(range(12)), 4, b"", stride)
        for block, digest in zip(kv.allocate(3 * stride), hashes, strict=True):
            kv.publish(block, digest)
        blocks = kv.match(hashes)
    computed, before, largest = kv.num_tokens_in(len(blocks)), len(kv.without_freed(blocks)), max(rows, default=0)
    counted = kv.max_pages_needed(computed + sum(rows), largest, blocks)
    for row in rows:
        kv.free_out_of_window(blocks, computed)
        blocks += kv.allocate(kv.num_blocks_for(computed + row) - len(blocks))
        assert len(kv.without_freed(blocks)) - before <= counted
        kv.check_windows(blocks, computed, largest)
        for group, window in enumerate(windows):
            mine = blocks[group::stride]
            first = 0 if window is None else max(0, computed + 1 - window) // 4
            assert [block != FREED for block in mine] == [place >= first for place in range(len(mine))]
        computed += row


def test_a_block_that_was_given_back_is_found_until_it_is_taken() -> None:
    kv = grouped((4,), num_blocks=3)
    hashes = hashes_of(list(range(8)))
    blocks = kv.allocate(2)
    for block, digest in zip(blocks, hashes, strict=True):
        kv.publish(block, digest)
    first, second = blocks
    kv.free_out_of_window(blocks, 8)
    assert blocks == [FREED, second]
    assert kv.match(hashes[:1]) == [first]
    assert kv.match(hashes) == [FREED, second]
    kv.check_integrity([kv.without_freed(blocks)])
    assert sorted(kv.allocate(2)) == [first, 2]
    assert kv.match(hashes[:1]) == []
    assert kv.match(hashes) == [FREED, second]


def test_check_windows_notices_what_is_given_back_too_early_or_kept() -> None:
    kv = grouped((None, 5))
    blocks = kv.allocate(kv.num_blocks_for(40))
    with pytest.raises(AssertionError, match="are kept"):
        kv.check_windows(blocks, 40, 4)
    kv.free_out_of_window(blocks, 40)
    kv.check_windows(blocks, 40, 4)
    with pytest.raises(AssertionError, match="in the window"):
        kv.check_windows(blocks, 36, 4)


def test_blocks_that_fill_pages_share_none() -> None:
    groups = [KVCacheGroup(), KVCacheGroup(window=5, fills_pages=True)]
    kv = KVCacheManager(30, 2, True, groups, blocks_per_page=3)
    blocks: list[int] = []
    assert kv.pages_needed(blocks, 8) == 2 + 4  # four blocks of the first group in two pages
    kv.extend(blocks, [], 0, 8, 8, 8)
    assert kv.num_free == 10 - 6
    assert [block % 3 for block in blocks[1::2]] == [0] * 4
    assert len({block // 3 for block in blocks}) == 6
    kv.check_integrity([blocks])
    hashes: list[bytes] = []
    extend_hashes(hashes, list(range(8)), 2, num_groups=2)
    for block, digest in zip(blocks, hashes, strict=True):
        kv.publish(block, digest)
    kv.free_out_of_window(blocks, 8)
    assert blocks[1::2][:2] == [FREED, FREED]
    assert kv.pages_needed(blocks, 10) == 1 + 0  # there is room for the first group's in its last page
    kv.check_integrity([kv.without_freed(blocks)])
    assert kv.match(hashes) == blocks
    kv.free(kv.without_freed(blocks))
    assert kv.num_free == 10
    kv.check_integrity([])
    assert kv.match(hashes) == blocks


def test_a_page_of_two_requests_is_used_until_both_have_ended() -> None:
    """Though the prefix cache forgets its blocks meanwhile."""
    groups = [KVCacheGroup(), KVCacheGroup(is_state=True)]
    kv = KVCacheManager(40, 4, enable_prefix_caching=True, groups=groups, blocks_per_page=4)
    hashes: list[bytes] = []
    extend_hashes(hashes, [*range(8)], 4, num_groups=2)
    first: list[int] = []
    kv.extend(first, hashes, 0, 8, 8, 8)
    for index in (0, 2, 3):
        kv.publish(first[index], hashes[index])
    second = kv.match(hashes)
    assert kv.without_freed(second) == [first[0], first[2], first[3]]
    kv.touch(kv.without_freed(second))
    kv.unpublish_all()
    kv.free(kv.without_freed(first))
    kv.check_integrity([kv.without_freed(second)])
    third: list[int] = []
    kv.extend(third, [], 0, 8, 8, 8)
    assert not {*kv.without_freed(third)} & {*second}
    kv.free(kv.without_freed(second))
    kv.free(kv.without_freed(third))
    kv.check_integrity([])
    assert kv.num_free == 10
