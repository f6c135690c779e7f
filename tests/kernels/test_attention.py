"""Paged attention against torch's dense attention, request by request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.kernels import reference


class Case(NamedTuple):
    query: Tensor
    cache: Tensor
    tables: Tensor
    lengths: list[int]
    counts: list[int]
    expected: Tensor

    def run(self, operation: Callable[..., Tensor] = kernels.paged_attention) -> Tensor:
        starts = torch.tensor([0, *self.counts]).cumsum(0)
        lengths = torch.tensor(self.lengths)
        scale = self.query.shape[-1] ** -0.5
        out = operation(self.query, self.cache, self.tables, lengths, starts, scale)
        assert out.shape == self.query.shape
        return out


def build(requests: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int) -> Case:
    """Random keys and values for requests of (context, queries), written into shuffled blocks of a dirty cache."""
    torch.manual_seed(len(requests) * 1000 + heads)
    lengths, counts = [context + count for context, count in requests], [count for _, count in requests]
    width = max(-(-length // block_size) for length in lengths)
    tables = torch.randperm(len(requests) * width + 3)[: len(requests) * width].view(-1, width)
    cache = torch.randn(2, len(requests) * width + 3, kv_heads, block_size, head_dim) * 100
    queries, expected = [], []
    for table, length, count in zip(tables, lengths, counts, strict=True):
        query, key, value = (torch.randn(length, n, head_dim) for n in (heads, kv_heads, kv_heads))
        place = torch.arange(length)
        slots = table[place // block_size] * block_size + place % block_size
        reference.write_kv(key, value, cache, slots)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        queries.append(query[-count:])
        expected.append(dense[0].transpose(0, 1)[-count:])
    return Case(torch.cat(queries), cache, tables, lengths, counts, torch.cat(expected))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 8), (4, 4, 5), (8, 2, 16), (6, 1, 64), (9, 3, 33)])
def test_mixed_batch_is_dense_attention(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    requests = [(0, 1), (0, 17), (40, 1), (5, 3), (7, 1), (16, 16), (0, 3), (100, 1), (31, 2)]
    case = build(requests, heads, kv_heads, head_dim, block_size)
    torch.testing.assert_close(case.run(), case.expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=12),
    block_size=st.integers(1, 20),
    group=st.integers(1, 4),
)
def test_any_batch_is_dense_attention(requests: list[tuple[int, int]], block_size: int, group: int) -> None:
    case = build(requests, 2 * group, 2, 8, block_size)
    torch.testing.assert_close(case.run(), case.expected, rtol=1e-4, atol=1e-5)


def test_bounds_on_memory_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build([(0, 50), (20, 50), *[(n, 1) for n in range(1, 60, 3)]], 4, 2, 8, 4)
    monkeypatch.setattr(reference, "_GATHER_ELEMENTS", 200)
    monkeypatch.setattr(reference, "_SCORE_ELEMENTS", 900)
    torch.testing.assert_close(case.run(reference.paged_attention), case.expected, rtol=1e-4, atol=1e-5)


def test_decodes_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build([(48 + n % 16, 1) for n in range(100)], 4, 2, 8, 16)
    calls, attend = [], reference._attend

    def counted(*args: Tensor | float) -> Tensor:
        calls.append(args)
        return attend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "_attend", counted)
    torch.testing.assert_close(case.run(reference.paged_attention), case.expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only_inputs_and_output(dtype: torch.dtype) -> None:
    case = build([(10, 1), (0, 20), (33, 4)], 4, 2, 16, 16)
    half = case._replace(query=case.query.to(dtype), cache=case.cache.to(dtype))
    exact = case._replace(query=half.query.float(), cache=half.cache.float())
    assert half.run().dtype == dtype
    torch.testing.assert_close(half.run(), exact.run().to(dtype))


def test_what_lies_behind_a_sequence_cannot_reach_it() -> None:
    """Stale slots of its last block, and the blocks of others that pad its table, hold NaN and infinity."""
    case = build([(0, 3), (37, 1), (5, 2)], 4, 2, 8, 16)
    whole = case.run()
    poisoned = case.cache.clone()
    used = torch.zeros(poisoned.shape[1], poisoned.shape[3], dtype=torch.bool)
    for table, length in zip(case.tables, case.lengths, strict=True):
        place = torch.arange(length)
        used[table[place // 16], place % 16] = True
    for side, poison in ((0, torch.nan), (1, torch.inf)):
        poisoned[side].transpose(1, 2)[~used] = poison
    assert torch.equal(case._replace(cache=poisoned).run(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 80), (4, 2, 128), (2, 2, 256), (14, 2, 64)])
def test_long_contexts_are_those_of_the_reference(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Contexts that are split over keys, prompts of several tiles, and every type of cache."""
    requests = [(700, 1), (2100, 33), (0, 250), (1500, 2), (511, 1), (512, 1)]
    case = build(requests, heads, kv_heads, head_dim, 16)
    if dtype != torch.float32:
        case = case._replace(cache=converted(case.cache, dtype))
    else:
        torch.testing.assert_close(case.run(), case.expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.run(), case.run(reference.paged_attention), rtol=1e-5, atol=1e-5)


def converted(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """What `write_kv` makes of these keys and values in a cache of another type."""
    _, blocks, kv_heads, block_size, head_dim = cache.shape
    other = kernels.allocate_kv_cache(1, blocks, kv_heads, block_size, head_dim, dtype, torch.device("cpu"))[0]
    rows = cache.transpose(2, 3).reshape(2, -1, kv_heads, head_dim)
    reference.write_kv(rows[0], rows[1], other, torch.arange(blocks * block_size))
    return other


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 16]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 70)),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8])] * 2),
)
def test_any_batch_is_that_of_the_reference(
    requests: list[tuple[int, int]],
    block_size: int,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    kv_heads, group, head_dim = shape
    case = build(requests, kv_heads * group, kv_heads, head_dim, block_size)
    of_query = torch.float32 if dtypes[0] == torch.int8 else dtypes[0]
    case = case._replace(query=case.query.to(of_query), cache=converted(case.cache, dtypes[1]))
    tolerance = 1e-5 if of_query == torch.float32 else torch.finfo(of_query).eps
    expected = case.run(reference.paged_attention)
    torch.testing.assert_close(case.run(), expected, rtol=tolerance, atol=tolerance)


def test_neither_threads_nor_the_batch_change_a_bit(implementation: str) -> None:
    if implementation == "reference":
        pytest.skip("matrix products of torch depend on their size")
    case = build([(1300, 1), (3, 1), (2100, 60), (0, 70), (600, 1)], 6, 2, 64, 16)
    together, threads = case.run(), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(case.run(), together)
    finally:
        torch.set_num_threads(threads)
    first = 0
    for number, count in enumerate(case.counts):
        rows, one = slice(first, first + count), slice(number, number + 1)
        alone = Case(
            case.query[rows], case.cache, case.tables[one], case.lengths[one], case.counts[one], case.expected[rows]
        )
        assert torch.equal(alone.run(), together[rows])
        first += count


def test_queries_may_be_a_part_of_wider_rows() -> None:
    case = build([(20, 1), (0, 9)], 4, 2, 16, 16)
    wide = torch.randn(len(case.query), 9, 16)
    wide[:, 2:6] = case.query
    torch.testing.assert_close(case._replace(query=wide[:, 2:6]).run(), case.expected, rtol=1e-4, atol=1e-5)
