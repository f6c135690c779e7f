"""The block pool and its prefix cache, by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_cache import KVCache, extend_hashes


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
    kv = KVCache(num_blocks=4, block_size=4, enable_prefix_caching=True)
    hashes = hashes_of(list(range(12)))
    blocks = kv.take(3)
    for block, digest in zip(blocks, hashes, strict=True):
        kv.publish(block, digest)
    kv.release(blocks)
    assert kv.match(hashes) == blocks
    assert kv.take(1) == [3]  # a block without content goes first
    kv.take(1)
    assert kv.match(hashes) == blocks[:2]  # then the end of the chain
    kv.hold(blocks[:2])
    kv.check_integrity([[3], [blocks[2]], blocks[:2]])
    assert kv.num_free == 0
    assert not kv.can_take(1)


def test_two_holders_of_a_block_are_counted() -> None:
    kv = KVCache(num_blocks=2, block_size=4, enable_prefix_caching=True)
    (block,) = kv.take(1)
    kv.hold([block])
    kv.release([block])
    kv.check_integrity([[block]])
    kv.release([block])
    kv.check_integrity([])


def test_of_two_equal_blocks_the_first_stays_known() -> None:
    kv = KVCache(num_blocks=2, block_size=4, enable_prefix_caching=True)
    first, second = kv.take(2)
    (digest,) = hashes_of([1, 2, 3, 4])
    kv.publish(first, digest)
    kv.publish(second, digest)
    assert kv.match([digest]) == [first]
    kv.check_integrity([[first, second]])


def test_free_blocks_that_a_match_would_hold_are_not_counted_twice() -> None:
    kv = KVCache(num_blocks=2, block_size=4, enable_prefix_caching=True)
    blocks = kv.take(1)
    (digest,) = hashes_of([1, 2, 3, 4])
    kv.publish(blocks[0], digest)
    kv.release(blocks)
    assert kv.can_take(2)
    assert kv.can_take(1, beside=blocks)
    assert not kv.can_take(2, beside=blocks)


def test_check_integrity_notices_a_lost_block() -> None:
    kv = KVCache(num_blocks=2, block_size=4, enable_prefix_caching=True)
    kv.take(1)
    with pytest.raises(AssertionError, match="reference counts"):
        kv.check_integrity([])


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVCache(num_blocks=2, block_size=4, enable_prefix_caching=False)
    (digest,) = hashes_of([1, 2, 3, 4])
    kv.publish(kv.take(1)[0], digest)
    assert kv.match([digest]) == []
