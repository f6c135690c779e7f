"""Sparse attention: the tokens that an indexer selects, and attention to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import reference
from quire.kernels.cache import LARGEST, allocate_kv_cache, dequantize
from tests.integration.kernels.conftest import platforms_only, reference_only

BLOCK = 16
CPU = torch.device("cpu")


class Case(NamedTuple):
    """The arguments of `kernels.select_tokens`, except for the size of the selection."""

    query: Tensor
    weights: Tensor
    cache: Tensor
    tables: Tensor
    lengths: Tensor
    starts: Tensor

    def of(self, first: int, last: int) -> Case:
        """The requests from `first` to `last` alone."""
        rows = slice(int(self.starts[first]), int(self.starts[last]))
        starts = self.starts[first : last + 1] - self.starts[first]
        return Case(
            *(self.query[rows], self.weights[rows], self.cache, self.tables[first:last], self.lengths[first:last]),
            starts,
        )


def case(
    requests: list[tuple[int, int]],
    heads: int = 6,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    *,
    is_exact: bool = False,
) -> Case:
    """Random queries of requests of (context, queries), with shuffled block tables. With `is_exact`, all numbers are
    whole: scores do not depend on the order of sums, and neither does the choice."""
    noise = torch.Generator().manual_seed(0)
    lengths = torch.tensor([sum(request) for request in requests])
    width = -(-int(lengths.max()) // BLOCK)
    tables = torch.randperm(len(requests) * width, generator=noise).view(-1, width)
    cache = allocate_kv_cache(1, tables.numel(), 1, BLOCK, head_dim, cache_dtype or dtype, CPU, num_tensors=1)[0]
    keys = torch.randn(tables.numel() * BLOCK, 1, head_dim, generator=noise)
    keys = (keys * 2).round() if is_exact else keys
    reference.write_kv(keys.to(dtype), None, cache, torch.arange(len(keys)))
    starts = torch.tensor([0, *(count for _, count in requests)]).cumsum(0)
    query = torch.randn(int(starts[-1]), heads, head_dim, generator=noise)
    weights = torch.randn(len(query), heads, generator=noise)
    if is_exact:
        query, weights = (query * 2).round(), (weights * 4).round()
    return Case(query.to(dtype), weights, cache, tables, lengths, starts)


REQUESTS = [(0, 1), (300, 1), (0, 40), (5, 3), (700, 1), (90, 37), (31, 2)]


@reference_only
def test_the_reference_chooses_the_best_tokens() -> None:
    """Against plain sums over the keys of one request after another."""
    given, top_k = case(REQUESTS, is_exact=True), 24
    found = reference.select_tokens(*given, top_k)
    for request, (context, count) in enumerate(REQUESTS):
        table = given.tables[request]
        for place in range(count):
            row, seen = int(given.starts[request]) + place, context + place + 1
            slots = torch.tensor([int(table[i // BLOCK]) * BLOCK + i % BLOCK for i in range(seen)])
            keys = given.cache[0].flatten(0, 2)[slots]
            scores = (given.weights[row, :, None] * (given.query[row] @ keys.T).relu()).sum(0)
            best = scores.sort(descending=True, stable=True).indices[:top_k]
            expected = slots if seen <= top_k else slots[best.sort().values]
            assert found[row, : min(seen, top_k)].tolist() == expected.tolist()


@pytest.mark.parametrize("size", [3, 16])
def test_a_query_sees_the_keys_of_complete_groups(size: int) -> None:
    check_groups(size, [(0, 1), (300, 1), (size - 2, 40), (700, 70), (90, 2), (size - 1, 1)])


def check_groups(size: int, requests: list[tuple[int, int]]) -> None:
    """The choice equals the choice for a request of each query, with as many tokens as there are complete groups."""
    given, top_k = case(requests, 16, 32, is_exact=True), 6
    owners = torch.arange(len(requests)).repeat_interleave(given.starts.diff())
    positions = torch.cat([torch.arange(context, context + count) for context, count in requests])
    seen = (positions + 1) // size
    starts = torch.arange(len(positions) + 1)
    alone = reference.select_tokens(*given[:3], given.tables[owners], seen.clamp(min=1), starts, top_k)
    for module in (reference, kernels):
        found = module.select_tokens(*given, top_k, size)
        assert found.dtype == torch.int64
        is_key = torch.arange(top_k) < seen[:, None]
        assert torch.equal(found[is_key], alone[is_key])
        first = given.tables[owners, :1] * BLOCK  # in place of missing tokens
        assert torch.equal(found[~is_key], first.expand_as(found)[~is_key])
    assert (seen == 0).any()
    assert (seen > top_k).any()


@platforms_only
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(6, 32), (16, 12), (64, 128), (7, 80)])
def test_selection_is_that_of_the_reference(
    heads: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    check_selection(REQUESTS, (8, 24, 64, 2048), heads, head_dim, dtype, cache_dtype=cache_dtype or dtype)


def check_selection(requests: list[tuple[int, int]], sizes: tuple[int, ...], *of: Any, **options: Any) -> None:
    """The selection equals the reference's, except for keys that are rounded in the cache: their scores may be near."""
    *_, dtype = of
    is_exact = options.get("cache_dtype") in (None, dtype)
    given = case(requests, *of, **options, is_exact=is_exact)
    for top_k in sizes:
        found, expected = kernels.select_tokens(*given, top_k), reference.select_tokens(*given, top_k)
        assert found.dtype == torch.int64
        positions = torch.cat([torch.arange(context, context + count) for context, count in requests])
        is_token = torch.arange(top_k) <= positions[:, None]
        same = (found == expected)[is_token]
        assert same.all() if is_exact else same.float().mean() > 0.9
        assert ((found >= 0) & (found < given.tables.numel() * BLOCK)).all()


def test_of_equal_scores_the_earlier_tokens_are_chosen() -> None:
    given = case([(199, 1), (80, 7)])
    weights = torch.zeros_like(given.weights)
    weights[5] = torch.nan
    found = kernels.select_tokens(given.query, weights, *given[2:], 30)
    for row, request in ((0, 0), (1, 1), (5, 1), (7, 1)):
        slots = [int(given.tables[request, i // BLOCK]) * BLOCK + i % BLOCK for i in range(30)]
        assert found[row].tolist() == slots
    keys = given.cache.clone()
    keys[:] = keys[:, :1, :, :1].round()  # all tokens alike, with exact products: their order may depend on the place
    query = given.query.abs().round()
    assert kernels.select_tokens(query, given.weights, keys, *given[3:], 30)[0].tolist() == found[0].tolist()


def test_selection_does_not_depend_on_other_requests_or_chunks(implementation: str) -> None:
    """With any scores; by the reference, whose matrix products depend on their size, with exact ones."""
    given = case([(2000, 1), (400, 70), (0, 600), (900, 1)], 16, 64, is_exact=implementation == "reference")
    whole = kernels.select_tokens(*given, 128)
    for number in range(4):
        rows = slice(int(given.starts[number]), int(given.starts[number + 1]))
        assert torch.equal(kernels.select_tokens(*given.of(number, number + 1), 128), whole[rows])
    first, last = int(given.starts[1]), int(given.starts[2])
    for row in range(first, last, 13):  # one query after another
        part = given.query[row : row + 1], given.weights[row : row + 1], given.cache, given.tables[1:2]
        alone = kernels.select_tokens(*part, torch.tensor([401 + row - first]), torch.tensor([0, 1]), 128)
        assert torch.equal(alone, whole[row : row + 1])


def blocks_of(given: Case, *sizes: int, module: Any = kernels) -> Tensor:
    found: Tensor = module.select_blocks(given.query, *given[2:], *sizes)
    return found


@reference_only
def test_the_reference_chooses_the_best_blocks() -> None:
    """Against the largest products of one head of one query after another."""
    given, size, count, local = case(REQUESTS, heads=3, is_exact=True), 10, 5, 2
    found = blocks_of(given, size, count, local, module=reference)
    for request, (context, queries) in enumerate(REQUESTS):
        table = given.tables[request]
        for place in range(queries):
            row, position = int(given.starts[request]) + place, context + place
            slots = torch.tensor([int(table[i // BLOCK]) * BLOCK + i % BLOCK for i in range(position + 1)])
            keys, own = given.cache[0].flatten(0, 2)[slots], position // size
            for head in range(3):
                products = keys @ given.query[row, head]
                scores = torch.stack(
                    [part.max() for part in torch.split(products, size)][: max(own - local + 1, 0)] or [keys[0, 0]]
                )
                in_order = scores.sort(descending=True, stable=True).indices.tolist()
                best = in_order[: count - local] if own >= count else range(own - local + 1)
                expected = [*sorted(best), *range(max(own - local + 1, 0), own + 1)]
                assert found[row, head].tolist() == [*expected, *[0] * (count - len(expected))]


@platforms_only
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 32), (4, 128), (7, 80), (2, 12)])
def test_selection_of_blocks_is_that_of_the_reference(
    heads: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    sizes = [(4, 6, 1), (16, 3, 1), (16, 4, 4), (20, 7, 2), (128, 2, 1), (128, 16, 1), (300, 2, 1)]
    check_blocks(REQUESTS, sizes, heads, head_dim, dtype, cache_dtype=cache_dtype or dtype)


def check_blocks(requests: list[tuple[int, int]], sizes: list[tuple[int, int, int]], *of: Any, **options: Any) -> None:
    """The selection equals the reference's, except for keys that are rounded in the cache: their scores may be near."""
    *_, dtype = of
    is_exact = options.get("cache_dtype") in (None, dtype)
    given = case(requests, *of, **options, is_exact=is_exact)
    for each in sizes:
        found, expected = blocks_of(given, *each), blocks_of(given, *each, module=reference)
        assert found.dtype == torch.int64
        assert found.shape == expected.shape
        assert torch.equal(found, expected) if is_exact else (found == expected).float().mean() > 0.9


def test_of_blocks_with_equal_scores_the_earlier_are_chosen() -> None:
    given = case([(199, 1), (80, 7)])
    query = given.query.clone()
    query[:] = 0.0
    query[5] = torch.nan
    found = blocks_of(given._replace(query=query), 8, 5, 2)
    for row, own in ((0, 24), (1, 10), (5, 10), (7, 10)):
        assert found[row].tolist() == [[0, 1, 2, own - 1, own]] * 6


def test_selection_of_blocks_does_not_depend_on_other_requests_or_chunks(implementation: str) -> None:
    is_exact, sizes = implementation == "reference", (32, 6, 1)
    given = case([(2000, 1), (400, 70), (0, 600), (900, 1)], 4, 64, is_exact=is_exact)
    whole = blocks_of(given, *sizes)
    for number in range(4):
        rows = slice(int(given.starts[number]), int(given.starts[number + 1]))
        assert torch.equal(blocks_of(given.of(number, number + 1), *sizes), whole[rows])
    first, last = int(given.starts[1]), int(given.starts[2])
    for row in range(first, last, 13):  # one query after another
        part = given.query[row : row + 1], given.cache, given.tables[1:2]
        alone = kernels.select_blocks(*part, torch.tensor([401 + row - first]), torch.tensor([0, 1]), *sizes)
        assert torch.equal(alone, whole[row : row + 1])


@pytest.mark.parametrize("cache_dtype", [None, *LARGEST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim", "num_tensors"), [(4, 24, 1), (16, 576, 1), (64, 96, 1), (8, 64, 2)])
def test_attention_to_selected_tokens(
    heads: int,
    head_dim: int,
    num_tensors: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    implementation: str,
) -> None:
    counts = [70, 1, 2, 16, 69, 70, 17, 33, 70]
    found, alone = check_selected(heads, head_dim, num_tensors, dtype, cache_dtype, counts)
    assert implementation != "cpu" or torch.equal(alone, found)


def check_selected(
    heads: int,
    head_dim: int,
    num_tensors: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    of_queries: list[int],
) -> tuple[Tensor, Tensor]:
    """Attention to as many tokens for each query; returns the last one's, beside the others and alone."""
    noise, blocks, top_k, queries = torch.Generator().manual_seed(0), 30, 70, len(of_queries)
    cache = allocate_kv_cache(1, blocks, num_tensors, BLOCK, head_dim, cache_dtype or dtype, CPU, num_tensors)[0]
    rows = torch.randn(2, blocks * BLOCK, num_tensors, head_dim, generator=noise).to(dtype)
    reference.write_kv(rows[0], rows[1] if num_tensors == 2 else None, cache, torch.arange(blocks * BLOCK))
    cache = cache.expand(2, *cache.shape[1:])
    query = torch.randn(queries, heads, head_dim, generator=noise).to(dtype)
    slots = torch.stack([torch.randperm(blocks * BLOCK, generator=noise)[:top_k] for _ in range(queries)])
    counts = torch.tensor(of_queries)
    found = kernels.sparse_attention(query, cache, slots, counts, 0.2)
    side = cache[0].to(torch.float32) if cache_dtype is None else dequantize(cache[0])
    other = cache[1].to(torch.float32) if cache_dtype is None else dequantize(cache[1])
    for number, count in enumerate(counts.tolist()):
        chosen = slots[number, :count]
        keys, values = (x[chosen // BLOCK, :, chosen % BLOCK].transpose(0, 1) for x in (side, other))
        grouped = query[number].float().view(num_tensors, -1, head_dim)
        expected = ((grouped @ keys.mT * 0.2).softmax(-1) @ values).view(heads, head_dim)
        bound = 1e-4 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(found[number].float(), expected, rtol=bound, atol=bound)
    alone = kernels.sparse_attention(query[-1:], cache, slots[-1:], counts[-1:], 0.2)
    torch.testing.assert_close(alone, found[-1:], rtol=bound, atol=bound)
    return found[-1:], alone


@pytest.mark.parametrize("head_dim", [24, 576])
def test_with_all_tokens_it_is_the_attention_of_a_decode(head_dim: int, implementation: str) -> None:
    """By the compiled kernels exactly, so that a context as long as the selection is no border."""
    given = case([(1200, 1), (3, 1), (70, 1)], 16, head_dim)
    sides = given.cache.expand(2, *given.cache.shape[1:])
    slots = reference.select_tokens(*given, 1300)
    found = kernels.sparse_attention(given.query, sides, slots, given.lengths, 0.1)
    expected = kernels.paged_attention(given.query, sides, given.tables, given.lengths, given.starts, 0.1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert implementation != "cpu" or torch.equal(found, expected)
    sinks = torch.randn(given.query.shape[1]) * 3
    found = kernels.sparse_attention(given.query, sides, slots, given.lengths, 0.1, sinks)
    batch = sides, given.tables, given.lengths, given.starts
    with_sinks = kernels.paged_attention(given.query, *batch, 0.1, sinks=sinks)
    torch.testing.assert_close(found, with_sinks, rtol=1e-5, atol=1e-5)
    assert (with_sinks - expected).abs().max() > 0.01


def test_parts_of_the_tokens_are_combined() -> None:
    """Of which some queries have none in a part."""
    given = case([(1200, 1), (3, 1), (70, 1)], 16, 576)
    sides = given.cache.expand(2, *given.cache.shape[1:])
    slots = reference.select_tokens(*given, 1300)
    whole = kernels.sparse_attention(given.query, sides, slots, given.lengths, 0.1)
    first = torch.tensor([700, 0, 71])
    logs = torch.full((2, *given.query.shape[:2]), torch.nan)
    place = (torch.arange(slots.shape[1]) + first[:, None]).clamp(max=slots.shape[1] - 1)
    parts = [(slots, first), (slots.gather(1, place), given.lengths - first)]
    mixed = [
        kernels.sparse_attention(given.query, sides, own, counts, 0.1, logs=own_logs)
        for (own, counts), own_logs in zip(parts, logs, strict=True)
    ]
    assert logs[0, 1].isinf().all()
    combined = (torch.stack(mixed) * logs.softmax(0)[..., None]).sum(0)
    torch.testing.assert_close(combined, whole, rtol=1e-5, atol=1e-5)


def test_rows_beyond_the_count_are_not_used() -> None:
    given = case([(60, 1)], 4, 24)
    sides = given.cache.expand(2, *given.cache.shape[1:]).clone()
    slots = reference.select_tokens(*given, 61)
    expected = kernels.sparse_attention(given.query, sides, slots, torch.tensor([20]), 0.1)
    last = slots[0, 20:]
    sides[:, last // BLOCK, :, last % BLOCK] = torch.nan
    found = kernels.sparse_attention(given.query, sides, slots[:, :20].contiguous(), torch.tensor([20]), 0.1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
