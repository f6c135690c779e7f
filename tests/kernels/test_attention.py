"""Paged attention against torch's dense attention, request by request."""

from __future__ import annotations

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

    def run(self) -> Tensor:
        starts = torch.tensor([0, *self.counts]).cumsum(0)
        lengths = torch.tensor(self.lengths)
        scale = self.query.shape[-1] ** -0.5
        return kernels.paged_attention(self.query, self.cache, self.tables, lengths, starts, scale)


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
        kernels.write_kv(key, value, cache, slots)
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
    torch.testing.assert_close(case.run(), case.expected, rtol=1e-4, atol=1e-5)


def test_decodes_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build([(48 + n % 16, 1) for n in range(100)], 4, 2, 8, 16)
    calls, attend = [], reference._attend

    def counted(*args: Tensor | float) -> Tensor:
        calls.append(args)
        return attend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "_attend", counted)
    torch.testing.assert_close(case.run(), case.expected, rtol=1e-4, atol=1e-5)
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
