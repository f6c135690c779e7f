"""Paged attention against a dense computation, request by request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.kernels import isa, reference
from quire.kernels.cache import LARGEST
from quire.kernels.reference import kv_cache, paged
from tests.integration.kernels.conftest import platforms_only, reference_only

CACHES = [torch.float32, torch.bfloat16, torch.float16, *LARGEST]


class Case(NamedTuple):
    query: Tensor
    cache: Tensor
    tables: Tensor
    lengths: list[int]
    counts: list[int]
    expected: Tensor
    options: Mapping[str, Any] = {}

    def run(self, operation: Callable[..., Tensor] = kernels.paged_attention) -> Tensor:
        starts = torch.tensor([0, *self.counts]).cumsum(0)
        lengths = torch.tensor(self.lengths)
        scale = self.query.shape[-1] ** -0.5
        out = operation(self.query, self.cache, self.tables, lengths, starts, scale, **self.options)
        assert out.shape == self.query.shape
        return out


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """`[queries, heads, head_dim]` in float64; the queries are the last of the tokens that have keys and values."""
    queries, heads, head_dim = query.shape
    tokens, kv_heads, _ = key.shape
    q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
    scores = q.reshape(kv_heads, -1, head_dim) @ k.mT * head_dim**-0.5
    scores = scores.view(heads, queries, tokens)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(tokens) - torch.arange(tokens - queries, tokens)[:, None]
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * distance
    if biases is not None:
        for number, each in enumerate(biases.double().transpose(0, 1).flip(-1).unbind(-1)):  # by distance
            scores = scores + each[..., None] * (distance == -number)
    seen = distance <= 0 if ends is None else torch.arange(tokens) < ends[:, None]
    if window:
        seen &= distance > -window
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += sinks.double().exp().expand(queries, heads).T[..., None]
    mixed: Tensor = (weights / total).view(kv_heads, -1, tokens) @ v
    return mixed.view(heads, queries, head_dim).transpose(0, 1)


def build(
    requests: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    num_biases: int = 0,
    has_own_sinks: bool = False,
    run_length: int = 0,
    **options: Any,
) -> Case:
    """Random keys and values for requests of (context, queries), written into shuffled blocks of a dirty cache; and,
    on request, random biases and sinks of each query, and ends of runs of this length or less."""
    torch.manual_seed(len(requests) * 1000 + heads)
    lengths, counts = [context + count for context, count in requests], [count for _, count in requests]
    width = max(-(-length // block_size) for length in lengths)
    tables = torch.randperm(len(requests) * width + 3)[: len(requests) * width].view(-1, width)
    cache = torch.randn(2, len(requests) * width + 3, kv_heads, block_size, head_dim) * 100
    queries, expected = [], []
    of_tokens: dict[str, list[Tensor]] = {}
    for table, length, count in zip(tables, lengths, counts, strict=True):
        query = torch.randn(count, heads, head_dim)
        key, value = torch.randn(2, length, kv_heads, head_dim)
        place = torch.arange(length)
        slots = table[place // block_size] * block_size + place % block_size
        reference.write_kv(key, value, cache, slots)
        queries.append(query)
        own = {"biases": torch.randn(count, heads, num_biases)} if num_biases else {}
        own |= {"sinks": torch.randn(count, heads)} if has_own_sinks else {}
        own |= {"ends": ends_of_runs(length, run_length)[-count:]} if run_length else {}
        for name, each in own.items():
            of_tokens.setdefault(name, []).append(each)
        expected.append(dense(query, key, value, **options | own).float())
    options |= {name: torch.cat(each) for name, each in of_tokens.items()}
    return Case(torch.cat(queries), cache, tables, lengths, counts, torch.cat(expected), options)


def ends_of_runs(length: int, most: int) -> Tensor:
    """The end of the run of each of so many tokens, many of which are a run of their own."""
    ends = [0]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + (1 if torch.rand(()) < 0.8 else int(torch.randint(1, most + 1, ())))))
    return torch.tensor(ends[1:]).repeat_interleave(torch.tensor(ends).diff())


def of_heads(heads: int, *names: str, window: int = 0) -> dict[str, Any]:
    """The options of these names, as models have them."""
    options = {
        "window": window,
        "softcap": 3.0,
        "sinks": torch.linspace(-2.0, 3.0, heads),
        "slopes": 2.0 ** -torch.linspace(1.0, 8.0, heads),
    }
    return {name: options[name] for name in names}


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


@reference_only
def test_bounds_on_memory_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build([(0, 50), (20, 50), *[(n, 1) for n in range(1, 60, 3)]], 4, 2, 8, 4)
    monkeypatch.setattr(paged, "_GATHER_ELEMENTS", 200)
    monkeypatch.setattr(paged, "SCORE_ELEMENTS", 900)
    torch.testing.assert_close(case.run(reference.paged_attention), case.expected, rtol=1e-4, atol=1e-5)


@reference_only
def test_decodes_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build([(48 + n % 16, 1) for n in range(100)], 4, 2, 8, 16)
    calls, attend = [], paged._attend

    def counted(*args: Tensor | float) -> tuple[Tensor, Tensor]:
        calls.append(args)
        return attend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(paged, "_attend", counted)
    torch.testing.assert_close(case.run(reference.paged_attention), case.expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only_inputs_and_output(dtype: torch.dtype) -> None:
    case = build([(10, 1), (0, 20), (33, 4)], 4, 2, 16, 16)
    half = case._replace(query=case.query.to(dtype), cache=case.cache.to(dtype))
    exact = case._replace(query=half.query.float(), cache=half.cache.float())
    assert half.run().dtype == dtype
    close(half.run(), exact.run().to(dtype), dtype)
    torch.testing.assert_close(exact.run(), case.expected, rtol=0.03, atol=0.03)


def test_memory_after_a_sequence_is_not_read() -> None:
    """Stale slots of its last block, and the blocks of others that pad its table, hold NaN and infinity."""
    case = build([(0, 3), (37, 1), (5, 2)], 4, 2, 8, 16)
    whole = case.run()
    torch.testing.assert_close(whole, case.expected, rtol=1e-4, atol=1e-5)
    poisoned = case.cache.clone()
    used = torch.zeros(poisoned.shape[1], poisoned.shape[3], dtype=torch.bool)
    for table, length in zip(case.tables, case.lengths, strict=True):
        place = torch.arange(length)
        used[table[place // 16], place % 16] = True
    for side, poison in ((0, torch.nan), (1, torch.inf)):
        poisoned[side].transpose(1, 2)[~used] = poison
    assert torch.equal(case._replace(cache=poisoned).run(), whole)


@platforms_only
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(3, 1, 80), (4, 2, 128), (2, 2, 256), (14, 2, 64), (9, 3, 96), (5, 1, 112)]
)
def test_long_contexts_are_those_of_the_reference(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Contexts that are split over keys, prompts of several tiles, and every type of cache."""
    requests = [(700, 1), (2100, 33), (0, 250), (1500, 2), (511, 1), (512, 1)]
    case = build(requests, heads, kv_heads, head_dim, 16)
    if dtype != torch.float32:
        case = case._replace(cache=converted(case.cache, dtype))
    else:
        torch.testing.assert_close(case.run(), case.expected, rtol=1e-5, atol=1e-5)
    close(case.run(), case.run(reference.paged_attention), dtype)


def close(out: Tensor, expected: Tensor, of_cache: torch.dtype) -> None:
    """Equal but for the order of sums; where the processor multiplies pairs of bfloat16, queries are, too."""
    if of_cache == torch.bfloat16 and isa.has("avx512_bf16") and out.shape[-1] % 2 == 0:
        assert (out.float() - expected.float()).norm() <= 4e-3 * expected.float().norm()
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    else:
        tolerance = 1e-5 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


ALL = ("window", "softcap", "sinks", "slopes")


@pytest.mark.parametrize(("window", "names"), [(1, ALL), (100, ALL[:1]), (100, ALL), (600, ALL), (0, ALL[1:])])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (14, 2, 40), (32, 1, 16)])
def test_options_are_those_of_dense_attention(
    window: int, names: tuple[str, ...], heads: int, kv_heads: int, head_dim: int, implementation: str
) -> None:
    """Over contexts that are split, tiles of few rows and of many, and first tokens, which see themselves alone."""
    requests = [(700, 1), (1300, 40), (0, 130), (1100, 2), (511, 1), (0, 1), (230, 60), (0, 300)]
    case = build(requests, heads, kv_heads, head_dim, 16, **of_heads(heads, *names, window=window))
    torch.testing.assert_close(case.run(), case.expected, rtol=1e-5, atol=1e-5)
    if implementation != "reference":
        case = case._replace(cache=converted(case.cache, torch.bfloat16))
        close(case.run(), case.run(reference.paged_attention), torch.bfloat16)


def with_biases_and_sinks(
    num_biases: int, window: int, names: tuple[str, ...], heads: int, kv_heads: int, head_dim: int
) -> Case:
    requests = [(700, 1), (1300, 9), (0, 130), (1100, 2), (511, 1), (0, 1), (230, 30)]
    options = of_heads(heads, *names, window=window) | {"num_biases": num_biases, "has_own_sinks": True}
    return build(requests, heads, kv_heads, head_dim, 16, **options)


@pytest.mark.parametrize(("num_biases", "window", "names"), [(1, 0, ()), (100, 0, ()), (37, 37, ALL), (1024, 600, ALL)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (14, 2, 40)])
def test_every_query_may_have_biases_and_sinks_of_its_own(
    num_biases: int, window: int, names: tuple[str, ...], heads: int, kv_heads: int, head_dim: int
) -> None:
    case = with_biases_and_sinks(num_biases, window, names, heads, kv_heads, head_dim)
    torch.testing.assert_close(case.run(), case.expected, rtol=1e-5, atol=1e-5)


@platforms_only
@pytest.mark.parametrize(("num_biases", "window", "names"), [(100, 0, ()), (37, 37, ALL), (1024, 600, ALL)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [(4, 2, 64, torch.float32), (4, 2, 64, torch.bfloat16), (14, 2, 40, torch.bfloat16), (14, 2, 40, torch.float16)],
)
def test_biases_of_every_type_are_those_of_the_reference(
    num_biases: int, window: int, names: tuple[str, ...], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = with_biases_and_sinks(num_biases, window, names, heads, kv_heads, head_dim)
    given = dict(case.options) | {"biases": case.options["biases"].to(dtype)}
    case = case._replace(query=case.query.to(dtype), cache=converted(case.cache, torch.bfloat16), options=given)
    close(case.run(), case.run(reference.paged_attention), torch.bfloat16)


@pytest.mark.parametrize(("window", "names"), [(0, ()), (100, ()), (30, ALL)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (14, 2, 40), (32, 1, 16)])
def test_queries_see_the_keys_up_to_the_end_of_their_run(
    window: int, names: tuple[str, ...], heads: int, kv_heads: int, head_dim: int, implementation: str
) -> None:
    """Runs that cross tiles, are longer than the window or began before the step."""
    requests = [(700, 1), (1300, 40), (0, 330), (1100, 2), (510, 1), (0, 1), (230, 60), (0, 300), (90, 1)]
    options = of_heads(heads, *names, window=window) | {"num_biases": 20 if names else 0}
    case = build(requests, heads, kv_heads, head_dim, 16, run_length=150, **options)
    assert (case.options["ends"].diff() == 0).sum() > 100
    torch.testing.assert_close(case.run(), case.expected, rtol=1e-5, atol=1e-5)
    if implementation != "reference":
        case = case._replace(cache=converted(case.cache, torch.bfloat16))
        close(case.run(), case.run(reference.paged_attention), torch.bfloat16)


def in_parts(case: Case, count: int) -> Tensor:
    """The case's result, combined from results for `count` parts of every block's tokens."""
    block_size, logs, mixed = case.cache.shape[3], [], []
    rows, places = block_size // count, torch.arange(max(case.lengths))
    ends = torch.cat([torch.arange(n - of, n) + 1 for n, of in zip(case.lengths, case.counts, strict=True)])
    for part in range(count):
        before = torch.tensor([0, *(places % block_size // rows == part).int().cumsum(0)])
        logs.append(torch.full(case.query.shape[:2], torch.nan))
        own = case._replace(
            cache=case.cache[:, :, :, part * rows : (part + 1) * rows].contiguous(),
            lengths=before[case.lengths].tolist(),
            options=dict(case.options) | {"ends": before[ends], "logs": logs[-1]},
        )
        mixed.append(own.run())
        assert (logs[-1].isinf() == (before[ends] == 0)[:, None]).all()
    weights = torch.stack(logs).softmax(0)[..., None]
    return (torch.stack(mixed).float() * weights).sum(0)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (14, 2, 40), (32, 1, 16)])
@pytest.mark.parametrize(("block_size", "count"), [(16, 2), (4, 4)])
def test_parts_of_the_keys_are_combined(
    heads: int, kv_heads: int, head_dim: int, block_size: int, count: int, implementation: str
) -> None:
    """Where some queries see no key of a part, and tiles and splits begin and end anywhere in it."""
    requests = [(0, 1), (3, 1), (2300, 1), (1300, 40), (0, 330), (2, 3), (4100, 2), (1, 5)]
    case = build(requests, heads, kv_heads, head_dim, block_size, softcap=3.0)
    torch.testing.assert_close(in_parts(case, count), case.expected, rtol=1e-5, atol=1e-5)
    if implementation != "reference":
        case = case._replace(cache=case.cache.bfloat16())
        close(in_parts(case, count), case.run(reference.paged_attention), torch.bfloat16)


def test_requests_may_have_no_query() -> None:
    """As those behind a picture's sequences in a captured layer; their lengths may be any."""
    case = build([(0, 37), (5, 1), (0, 20)], 4, 2, 16, 16, run_length=30)
    counts, lengths = [0, 37, 0, 1, 20, 0, 0], [0, 37, 5, 6, 20, 0, 0]
    tables = case.tables[[0, 0, 1, 1, 2, 2, 2]]
    found = case._replace(counts=counts, lengths=lengths, tables=tables).run()
    torch.testing.assert_close(found, case.expected, rtol=1e-4, atol=1e-5)


def test_biases_may_be_a_part_of_wider_rows() -> None:
    case = build([(20, 1), (0, 9)], 4, 2, 16, 16, num_biases=7)
    wide = torch.randn(len(case.query), 6, 9)
    wide[:, 1:5, 2:] = case.options["biases"]
    given = case._replace(options={"biases": wide[:, 1:5, 2:]})
    torch.testing.assert_close(given.run(), case.expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 16]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from([1, 8, 16, 21, 48, 64])),
    names=st.sets(st.sampled_from(ALL)),
    window=st.integers(1, 200),
    dtypes=st.tuples(*[st.sampled_from(CACHES)] * 2),
)
def test_options_hold_for_any_batch(
    requests: list[tuple[int, int]],
    block_size: int,
    shape: tuple[int, int, int],
    names: set[str],
    window: int,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    kv_heads, group, head_dim = shape
    options = of_heads(kv_heads * group, *sorted(names), window=window)
    case = build(requests, kv_heads * group, kv_heads, head_dim, block_size, **options)
    torch.testing.assert_close(case.run(), case.expected, rtol=1e-4, atol=1e-5)
    of_query = torch.float32 if dtypes[0] in LARGEST else dtypes[0]
    case = case._replace(query=case.query.to(of_query), cache=converted(case.cache, dtypes[1]))
    close(case.run(), case.run(reference.paged_attention), dtypes[1])


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 64), (10, 24)])
@pytest.mark.parametrize("window", [1, 16, 17, 300])
def test_keys_outside_the_window_are_not_read(dtype: torch.dtype, heads: int, head_dim: int, window: int) -> None:
    """Blocks that no query of a request sees any more belong to others: their entries name a block of NaN."""
    requests = [(700, 1), (37, 1), (330, 40), (0, 5), (64, 2), (2300, 1)]
    case = build(requests, heads, 2, head_dim, 16, window=window)
    case = case._replace(cache=converted(case.cache, dtype))
    whole, tables, cache = case.run(), case.tables.clone(), case.cache.clone()
    assert (whole - case.expected).norm() <= 0.1 * case.expected.norm()
    (poison, *_) = set(range(cache.shape[1])) - set(tables.flatten().tolist())
    cache[:, poison].view(torch.uint8).fill_(255)  # a number of any float type, or a scale, that is no number
    used = torch.zeros(cache.shape[1], dtype=torch.bool)
    for table, length, count in zip(tables, case.lengths, case.counts, strict=True):
        first = max(0, length - count - window + 1) // 16
        table[:first] = poison
        used[table[first:]] = True
    assert not used[poison]
    assert torch.equal(case._replace(tables=tables, cache=cache).run(), whole)


@reference_only
def test_a_window_costs_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    case, shapes, gather = build([(3000, 1), (2900, 7)], 2, 1, 8, 16, window=50), [], kv_cache.gather_kv

    def counted(cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append(tables.shape)
        return gather(cache, tables)

    monkeypatch.setattr(paged, "gather_kv", counted)
    torch.testing.assert_close(case.run(reference.paged_attention), case.expected, rtol=1e-4, atol=1e-5)
    assert all(columns <= 5 for _, columns in shapes)


def test_a_window_that_shows_all_changes_nothing() -> None:
    case = build([(1300, 1), (3, 1), (700, 60)], 6, 2, 16, 16)
    whole = case.run()
    torch.testing.assert_close(whole, case.expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(case._replace(options={"window": 4000}).run(), whole)


@platforms_only
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(("heads", "head_dim"), [(128, 576), (16, 192)])
def test_one_row_is_key_and_value_of_many_heads(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """As multi-head latent attention has it: a cache of one side, expanded."""
    case = build([(700, 1), (0, 3), (1100, 1), (60, 9)], heads, 1, head_dim, 16)
    side = converted(case.cache, dtype)[:1]
    case = case._replace(cache=side.expand(2, -1, -1, -1, -1))
    doubled = case._replace(cache=side.repeat(2, 1, 1, 1, 1))
    expected = doubled.run(reference.paged_attention)
    for operation in (kernels.paged_attention, reference.paged_attention):
        close(case.run(operation), expected, dtype)
    assert torch.equal(case.run(), doubled.run())


def test_a_sink_that_outweighs_all_leaves_nothing() -> None:
    sinks = torch.tensor([1e30, -1e30, -torch.inf, 90.0])
    case = build([(1300, 1), (3, 1), (700, 60)], 4, 2, 16, 16)
    out = case._replace(options={"sinks": sinks}).run()
    assert not out[:, 0].any()
    assert out[:, 3].abs().max() < 1e-30
    torch.testing.assert_close(out[:, 1:3], case.run()[:, 1:3], rtol=1e-5, atol=1e-6)


def converted(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """These keys and values, written by `write_kv` to a cache of another type."""
    _, blocks, kv_heads, block_size, head_dim = cache.shape
    other = kernels.allocate_kv_cache(1, blocks, kv_heads, block_size, head_dim, dtype, torch.device("cpu"))[0]
    rows = cache.transpose(2, 3).reshape(2, -1, kv_heads, head_dim)
    reference.write_kv(rows[0], rows[1], other, torch.arange(blocks * block_size))
    return other


@platforms_only
@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 16]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 70)),
    dtypes=st.tuples(*[st.sampled_from(CACHES)] * 2),
)
def test_any_batch_is_that_of_the_reference(
    requests: list[tuple[int, int]],
    block_size: int,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    kv_heads, group, head_dim = shape
    case = build(requests, kv_heads * group, kv_heads, head_dim, block_size)
    of_query = torch.float32 if dtypes[0] in LARGEST else dtypes[0]
    case = case._replace(query=case.query.to(of_query), cache=converted(case.cache, dtypes[1]))
    close(case.run(), case.run(reference.paged_attention), dtypes[1])


@platforms_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [(), ALL])
def test_neither_threads_nor_the_batch_change_a_bit(names: tuple[str, ...], dtype: torch.dtype) -> None:
    """Matrix products of torch depend on their size."""
    options = of_heads(6, *names, window=1000)
    case = build([(1300, 1), (3, 1), (2100, 60), (0, 70), (600, 1)], 6, 2, 64, 16, **options)
    case = case._replace(cache=converted(case.cache, dtype))
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
        alone = case._replace(
            query=case.query[rows], tables=case.tables[one], lengths=case.lengths[one], counts=case.counts[one]
        )
        assert torch.equal(alone.run(), together[rows])
        first += count


def test_queries_may_be_a_part_of_wider_rows() -> None:
    case = build([(20, 1), (0, 9)], 4, 2, 16, 16)
    wide = torch.randn(len(case.query), 9, 16)
    wide[:, 2:6] = case.query
    torch.testing.assert_close(case._replace(query=wide[:, 2:6]).run(), case.expected, rtol=1e-4, atol=1e-5)
