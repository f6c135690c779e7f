"""The Triton kernels against the reference, run by Triton's interpreter: float32 and float16, which it computes right.

The interpreter is slow, so shapes are small and few. Other types and sizes are compiled ahead of time for a GPU, and
compared there by `quire.kernels.check`. Its matrix products are numpy's, whose bits depend on the machine and on a
matrix's size; tests/gpu shows whether a result depends on the batch.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import check, dispatch, examples, experts, reference
from quire.kernels.attention_config import AttentionLayer
from quire.kernels.cache import LARGEST, allocate_kv_cache
from quire.kernels.examples import Inputs
from quire.kernels.low_rank import LowRankPool
from quire.kernels.quantized import QuantizedFormat
from tests.fakes.interpreter import with_scales_of_8_bit_floats
from tests.integration.kernels import (
    test_attention,
    test_experts,
    test_low_rank,
    test_recurrent,
    test_sampling,
    test_sparse,
)
from tests.integration.kernels import test_compression as entries
from tests.integration.kernels import test_hyper_connections as connections

pytest.importorskip("triton", reason="scripts/setup ci installs it")
platform = importlib.import_module("quire.kernels.triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that are masked out

CPU, TYPES = torch.device("cpu"), [torch.float32, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def implementation() -> Any:
    """The Triton kernels replace the CPU's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "PLATFORMS", {"cpu": platform})
        with_scales_of_8_bit_floats(patch)
        yield "triton"


def close(found: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    step = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2, 64), (0, 8), (2, 3, 2, 17), (4, 257)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    x, residual, weight = ((torch.randn(size) * 2).to(dtype) for size in (shape, shape, shape[-1:]))
    close(kernels.rms_norm(x, weight, 1e-6, offset), reference.rms_norm(x, weight, 1e-6, offset), dtype)
    found, expected = (module.add_rms_norm(x, residual, weight, 1e-6, offset) for module in (kernels, reference))
    close(found[0], expected[0], dtype)
    assert torch.equal(found[1], expected[1])


def test_norms_of_heads_inside_of_wider_rows() -> None:
    qkv, weight = torch.randn(7, 9, 33), torch.randn(33)
    for part in qkv.split_with_sizes([5, 2, 2], dim=1):
        close(kernels.rms_norm(part, weight, 1e-6), reference.rms_norm(part, weight, 1e-6))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai", "silu_7", "silu_16", "silu_clamped"]
)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2 * 1100) * 4).to(dtype)
    close(kernels.act_mul(x, activation), reference.act_mul(x, activation), dtype)
    assert kernels.act_mul(torch.tensor([[torch.nan, 1.0, 2.0, 3.0]]), activation).isnan().tolist() == [[True, False]]
    with pytest.raises(KeyError, match="swoosh"):
        kernels.act_mul(x, "swoosh")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("rows", "in_features", "widths", "ranks"),
    [(1, 64, (64,), (16,)), (19, 200, (72, 40, 8), (16, 1, 0, 3)), (300, 33, (17,), (3, 20)), (3, 1100, (5,), (70, 4))],
)
def test_low_rank_changes(
    rows: int, in_features: int, widths: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype
) -> None:
    test_low_rank.check_changes(rows, in_features, widths, ranks, dtype)


def test_low_rank_changes_of_many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than each program looks at; some have several blocks of rows."""
    monkeypatch.setattr(importlib.import_module("quire.kernels.triton.low_rank"), "_MOST_SLOTS", 1)
    test_low_rank.check_changes(45, 20, (17,), (3, 1), TYPES[0])


def test_low_rank_changes_of_large_ranks_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a launch keeps is bounded, whatever adapters the rows have."""
    module = importlib.import_module("quire.kernels.triton.low_rank")
    changed, sizes = module._add_low_rank, list[int]()

    def record(out: Tensor, x: Tensor, pool: LowRankPool, order: Tensor, starts: Tensor, splits: int) -> None:
        sizes.append(len(order) * splits * len(pool.widths) * pool.largest_rank)
        changed(out, x, pool, order, starts, splits)

    monkeypatch.setattr(module, "_MOST_SUMS", 250)
    monkeypatch.setattr(module, "_add_low_rank", record)
    test_low_rank.check_changes(9, 40, (17, 20), (30, 5, 0), TYPES[0])
    assert 125 < max(sizes) <= 250


def test_large_products_with_a_of_low_rank_changes_stay_finite() -> None:
    test_low_rank.check_large_products(torch.float16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(6, 6), (80, 34), (64, 0)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_rotary_write_kv(head_dim: int, rotary_dim: int, block_size: int, dtype: torch.dtype) -> None:
    query, key, value = torch.randn(7, 8, head_dim).to(dtype).split_with_sizes([4, 2, 2], dim=1)
    slots, turns = torch.randperm(9 * block_size)[:7], torch.randn(7, rotary_dim)
    results = []
    for module in (kernels, reference):
        cache = kernels.allocate_kv_cache(1, 9, 2, block_size, head_dim, dtype, torch.device("cpu"))[0]
        results.append((module.rotary_write_kv(query, key, value, turns, cache, slots), cache))
    close(results[0], results[1], dtype)


@pytest.mark.parametrize("without", [[], [0, 3, 6]])
def test_keys_that_are_values_are_stored_once_and_not_without_a_slot(without: list[int]) -> None:
    query, key, turns = torch.randn(7, 3, 12), torch.randn(7, 1, 20), torch.randn(7, 8)
    slots = torch.arange(7) * 2
    slots[without] = -1
    results = []
    for module in (kernels, reference):
        cache = torch.zeros(1, 5, 1, 4, 20)
        results.append((module.rotary_write_kv(query, key, None, turns, cache, slots), cache))
    close(results[0], results[1])
    assert int(results[0][1].any(-1).sum()) == 7 - len(without)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "streams", "hidden"), [(1, 4, 300), (19, 3, 200), (3, 1, 20), (0, 4, 8)])
def test_hyper_connections(tokens: int, streams: int, hidden: int, dtype: torch.dtype) -> None:
    connections.check_connection(tokens, streams, hidden, dtype)


@pytest.mark.parametrize("kinds", [1, 2])
def test_hyper_connections_that_do_not_mix(kinds: int) -> None:
    connections.check_connection(19, 3, 200, torch.float32, kinds)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("ratio", "rows", "head_dim", "parts", "rotary"), [(4, 4, 24, 2, 8), (40, 4, 32, 1, 8), (5, 2, 6, 2, 0)]
)
def test_compression(ratio: int, rows: int, head_dim: int, parts: int, rotary: int, dtype: torch.dtype) -> None:
    entries.check_entries(entries.case(ratio, head_dim, parts, rotary, dtype), rows)


@pytest.mark.parametrize("dtype", TYPES)
def test_compression_without_norm_or_gates(dtype: torch.dtype) -> None:
    entries.check_entries_in_place(dtype, 24)
    entries.check_entries_without_gates(dtype, 24)


SHAPES = [(14, 2, 16), (6, 1, 80), (3, 3, 33), (4, 1, 128), (2, 1, 256)]
LONG = [(0, 1), (0, 17), (40, 1), (5, 3), (7, 1), (1100, 1), (600, 9), (511, 1)]
"""Contexts of many tiles and parts."""
SHORT = [(0, 1), (0, 17), (40, 1), (5, 3), (300, 1), (90, 9)]
"""Contexts of a few."""


@pytest.mark.parametrize(
    ("shape", "window", "names", "requests"),
    [
        (SHAPES[0], 600, test_attention.ALL, LONG),
        (SHAPES[1], 0, (), LONG),
        (SHAPES[0], 0, (), SHORT),
        *((shape, 100, test_attention.ALL, SHORT) for shape in SHAPES[1:]),
        (SHAPES[1], 10, test_attention.ALL, SHORT),
    ],
)
def test_attention_is_dense_attention(
    shape: tuple[int, int, int], window: int, names: tuple[str, ...], requests: list[tuple[int, int]]
) -> None:
    heads, kv_heads, head_dim = shape
    options = test_attention.of_heads(heads, *names, window=window)
    case = test_attention.build(requests, heads, kv_heads, head_dim, 16, **options)
    close(case.run(), case.expected)


def test_a_decode_sees_its_window_alone() -> None:
    case = test_attention.build([(40, 1), (5, 1)], 2, 1, 16, 16, window=10)
    close(case.run(), case.expected)


@pytest.mark.parametrize(
    ("num_biases", "window", "names", "dtype"),
    [
        (1, 0, (), torch.float32),
        (40, 37, test_attention.ALL, torch.float32),
        (40, 37, test_attention.ALL, torch.float16),
        (120, 0, (), torch.float16),
    ],
)
def test_attention_with_biases_and_sinks_of_each_query(
    num_biases: int, window: int, names: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Biases for one key, for as many as a window has, and for more than a tile but not for all keys."""
    options = test_attention.of_heads(6, *names, window=window) | {"num_biases": num_biases, "has_own_sinks": True}
    case = test_attention.build(SHORT, 6, 2, 48, 16, **options)
    given = dict(case.options) | {"biases": case.options["biases"].to(dtype)}
    case = case._replace(query=case.query.to(dtype), cache=case.cache.to(dtype), options=given)
    close(case.run(), case.run(reference.paged_attention), dtype)


@pytest.mark.parametrize("window", [0, 30])
def test_attention_within_runs(window: int) -> None:
    """Runs that cross tiles of queries, are longer than the window, or began before the step."""
    case = test_attention.build([(0, 150), (270, 30), (40, 1)], 6, 2, 48, 16, run_length=90, window=window)
    assert (case.options["ends"].diff() == 0).sum() > 50
    close(case.run(), case.expected)


@pytest.mark.parametrize("count", [2, 4])
def test_attention_to_parts_of_the_keys(count: int) -> None:
    case = test_attention.build([(0, 1), (3, 1), (700, 1), (70, 40), (0, 5), (1, 2)], 6, 2, 48, 4, softcap=3.0)
    close(test_attention.in_parts(case, count), case.expected)


def test_attention_of_requests_without_queries() -> None:
    test_attention.test_requests_may_have_no_query()


@pytest.mark.parametrize("block_size", [1, 3])
def test_attention_over_odd_blocks(block_size: int) -> None:
    case = test_attention.build([(40, 1), (5, 3), (70, 2)], 4, 2, 16, block_size)
    close(case.run(), case.expected)


@pytest.mark.parametrize("cache", TYPES)
def test_attention_in_half_precision(cache: torch.dtype) -> None:
    case = test_attention.build([(10, 1), (0, 20), (300, 1)], 4, 2, 64, 16)
    case = case._replace(query=case.query.half(), cache=case.cache.to(cache))
    close(case.run(), case.run(reference.paged_attention), torch.float16)


@pytest.mark.parametrize(
    ("of_cache", "dtype", "heads", "kv_heads", "head_dim"),
    [
        (torch.int8, torch.float32, 4, 2, 64),
        (torch.int8, torch.float16, 6, 1, 80),
        (torch.int8, torch.float16, 3, 3, 20),
        (torch.float8_e4m3fn, torch.float16, 4, 2, 64),
        (torch.float8_e4m3fn, torch.float32, 6, 1, 80),
        (torch.float8_e4m3fn, torch.float32, 3, 3, 20),
    ],
)
def test_attention_over_quantized_caches(
    of_cache: torch.dtype, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    options = test_attention.of_heads(heads, *test_attention.ALL, window=150)
    case = test_attention.build([(10, 1), (0, 20), (300, 1), (30, 70)], heads, kv_heads, head_dim, 16, **options)
    case = case._replace(query=case.query.to(dtype), cache=test_attention.converted(case.cache, of_cache))
    close(case.run(), case.run(reference.paged_attention), dtype)


@pytest.mark.parametrize("of_cache", LARGEST)
@pytest.mark.parametrize("size", [1e-6, 1.0, 100.0])
def test_values_of_any_size_in_a_quantized_cache_keep_their_precision_beside_float16(
    size: float, of_cache: torch.dtype
) -> None:
    """Values of some requests, and of some keys, that are much smaller than others."""
    case = test_attention.build([(10, 1), (90, 9), (300, 1)], 4, 2, 64, 16)
    case.cache[1, ::3] *= 1e-3
    cache = test_attention.converted(case.cache * torch.tensor([1.0, size]).view(2, 1, 1, 1, 1), of_cache)
    case = case._replace(query=case.query.half(), cache=cache)
    expected = case._replace(query=case.query.float()).run(reference.paged_attention)
    torch.testing.assert_close(case.run().float(), expected, rtol=0.01, atol=max(0.003 * size, 6e-8))


@pytest.mark.parametrize("of_cache", LARGEST)
@pytest.mark.parametrize("head_dim", [12, 80, 33])
def test_quantized_rows_are_written_as_by_the_reference(head_dim: int, of_cache: torch.dtype) -> None:
    """To the bit where nothing is turned; rows of zeros, tokens without a slot, heads whose scales are not aligned."""
    query, key, value = torch.randn(9, 8, head_dim).split_with_sizes([4, 2, 2], dim=1)
    slots, results = torch.tensor([3, 17, -1, 0, 31, 30, 5, -1, 16]), []
    value[3] = 0.0
    for module in (kernels, reference):
        cache = allocate_kv_cache(1, 3, 2, 16, head_dim, of_cache, torch.device("cpu"))[0]
        cache.view(torch.uint8).fill_(7)
        module.rotary_write_kv(query, key, value * 3, torch.empty(9, 0), cache, slots)
        results.append(cache.view(torch.uint8))
    assert torch.equal(*results)
    assert int((results[0] != 7).any(-1).sum()) > 20


@pytest.mark.parametrize(
    ("layer", "block_size", "requests", "dtype"),
    [
        (AttentionLayer(6, 2, 64, 0.1), 16, [(0, 1), (0, 17), (15, 1), (16, 1), (31, 2), (5, 3), (1100, 1)], TYPES[0]),
        (AttentionLayer(6, 1, 80, 0.1, 37, softcap=20.0), 16, [(40, 1), (90, 70), (300, 1), (3, 40)], TYPES[1]),
        (AttentionLayer(3, 3, 20, 0.2, 7, has_sinks=True, has_alibi=True), 10, [(0, 9), (29, 1), (70, 25)], TYPES[0]),
        (AttentionLayer(4, 2, 16, 0.2, has_own_sinks=True, num_biases=40), 32, [(31, 1), (32, 1), (40, 90)], TYPES[1]),
    ],
)
def test_a_cache_of_4_bits(
    layer: AttentionLayer, block_size: int, requests: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Own blocks of one token and complete ones, windows inside them, tiles of several blocks, and parts of decodes."""
    for example in examples.int4_cache(Inputs(CPU, dtype), requests, layer, block_size):
        assert not check.difference(example, platform, dtype)


def test_attention_in_the_tiles_of_gpus_with_less_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the keys at a time: float16 heads of 256 take as much memory as float32 heads of 128, and so on."""
    attention, limits = (importlib.import_module(f"quire.kernels.triton.{name}") for name in ("attention", "limits"))
    device = torch.device("cpu")
    assert [attention._tile(head_dim, 2, limits.is_narrow(device))[1] for head_dim in (128, 256, 576)] == [
        64,
        64,
        32,
    ]
    monkeypatch.setattr(limits, "is_narrow", lambda _: True)
    assert [attention._tile(head_dim, 2, limits.is_narrow(device))[1] for head_dim in (128, 256, 576)] == [
        64,
        32,
        16,
    ]
    for kv_heads, head_dim in ((2, 256), (1, 576)):
        case = test_attention.build([(10, 1), (0, 20), (300, 1)], 4, kv_heads, head_dim, 16)
        close(case.run(), case.run(reference.paged_attention))


def test_attention_where_one_row_is_key_and_value_of_many_heads() -> None:
    """Over int8, too: test_attention_to_selected_tokens."""
    case = test_attention.build([(70, 1), (0, 2)], 32, 1, 576, 16)
    for dtype in (torch.float32, torch.float8_e4m3fn):
        side = test_attention.converted(case.cache, dtype)[:1]
        one = case._replace(cache=side.expand(2, -1, -1, -1, -1))
        close(one.run(), one.run(reference.paged_attention))


@pytest.mark.parametrize("cache_dtype", [None, *LARGEST])
@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [(6, 32, torch.float16), (40, 80, torch.float32)])
def test_selection_is_that_of_the_reference(
    heads: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    requests = [(0, 1), (130, 1), (0, 9), (60, 3)]
    test_sparse.check_selection(requests, (8, 70), heads, head_dim, dtype, cache_dtype=cache_dtype)


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    selection = importlib.import_module("quire.kernels.triton.selection")
    monkeypatch.setattr(selection, "_TILE", 64)
    test_sparse.test_of_equal_scores_the_earlier_tokens_are_chosen()
    test_sparse.check_groups(3, [(0, 1), (130, 1), (1, 9), (70, 4), (2, 1)])
    given = test_sparse.case([(70, 1), (90, 3), (0, 3), (200, 1)], 16, 64, is_exact=True)
    whole = kernels.select_tokens(*given, 48)
    assert torch.equal(whole, reference.select_tokens(*given, 48))
    monkeypatch.setattr(selection, "_SCORES", 1000)  # one query at a time
    assert torch.equal(kernels.select_tokens(*given, 48), whole)
    assert torch.equal(kernels.select_tokens(*given.of(1, 2), 48), whole[1:4])


@pytest.mark.parametrize("cache_dtype", [None, *LARGEST])
def test_selection_of_blocks(cache_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, of = [(0, 1), (130, 1), (0, 9), (60, 3)], (4, 24, torch.float16)
    test_sparse.check_blocks(requests, [(16, 3, 1), (24, 2, 2), (128, 2, 1)], *of, cache_dtype=cache_dtype)
    if cache_dtype is None:
        monkeypatch.setattr(
            importlib.import_module("quire.kernels.triton.selection"), "_SCORES", 1
        )  # one query at a time
        test_sparse.check_blocks(requests, [(16, 3, 1)], *of)
        test_sparse.test_of_blocks_with_equal_scores_the_earlier_are_chosen()


@pytest.mark.parametrize("cache_dtype", [None, *LARGEST])
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_tensors", "counts"),
    [(4, 24, 1, [1, 70, 16, 33]), (16, 576, 1, [17]), (8, 64, 2, [70, 2, 69])],
)
def test_attention_to_selected_tokens(
    heads: int, head_dim: int, num_tensors: int, counts: list[int], cache_dtype: torch.dtype | None
) -> None:
    test_sparse.check_selected(heads, head_dim, num_tensors, torch.float32, cache_dtype, counts)


def test_attention_to_all_tokens_is_that_of_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("quire.kernels.triton.attention"), "_PARTIALS", 1000)
    test_sparse.test_with_all_tokens_it_is_the_attention_of_a_decode(24, "triton")
    test_sparse.test_rows_beyond_the_count_are_not_used()


def test_attention_does_not_read_after_a_sequence() -> None:
    case = test_attention.build([(0, 3), (37, 1), (5, 2)], 4, 2, 8, 16)
    whole, poisoned = case.run(), case.cache.clone()
    used = torch.zeros(poisoned.shape[1], poisoned.shape[3], dtype=torch.bool)
    for table, length in zip(case.tables, case.lengths, strict=True):
        place = torch.arange(length)
        used[table[place // 16], place % 16] = True
    poisoned.transpose(2, 3)[:, ~used] = torch.nan
    close(case._replace(cache=poisoned).run(), whole)


@pytest.mark.parametrize(
    ("has_bias", "rows", "dtype"), [(False, 48, TYPES[0]), (True, 24, TYPES[0]), (True, 48, TYPES[1])]
)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (13, 7, 3), (150, 4, 2)])
def test_sums_over_experts(
    tokens: int, experts: int, top_k: int, has_bias: bool, rows: int, dtype: torch.dtype
) -> None:
    """With gates, and without."""
    x, weights = torch.randn(tokens, 40).to(dtype), torch.rand(tokens, top_k)
    ids = torch.randint(-2, experts + 2, (tokens, top_k))  # others' too
    ids[:, 0], ids[0] = experts - 1, torch.arange(top_k)
    matrices = (torch.randn(experts, rows, 40) / 6).to(dtype), (torch.randn(experts, 40, 24) / 5).to(dtype)
    biases = (torch.randn(experts, rows).to(dtype), torch.randn(experts, 40).to(dtype)) if has_bias else ()
    found, expected = (m.fused_experts(x, weights, ids, *matrices, "silu", *biases) for m in (kernels, reference))
    close(found, expected, dtype)


@pytest.mark.parametrize(
    ("gated", "dtype", "options"),
    [(True, TYPES[0], {}), (False, TYPES[0], {}), (True, TYPES[1], {"has_scale": True, "has_bias": True})],
)
def test_experts_that_adapters_change(gated: bool, dtype: torch.dtype, options: dict[str, bool]) -> None:
    x, slots = torch.randn(13, 40).to(dtype), torch.arange(13) % 3 - 1
    weights, ids = torch.rand(13, 2), torch.randint(-1, 5, (13, 2))
    gate_up, down, *biases = test_experts.random_experts(4, 24, 40, dtype, bias=bool(options))
    parts = [gate_up if gated else gate_up[:, :24], down, *biases]
    changes, merged = test_experts.changed_experts(x, ids, parts, slots, (16, 3), gated=gated, **options)
    expected = [
        reference.fused_experts(x.double(), weights, ids, each[0], each[1], "relu2", each[2], each[3])
        for each in merged
    ]
    form = experts.PlainExperts(gate_up if gated else gate_up[:, :24], down, "relu2", biases[0], biases[1])
    test_experts.check_changes(form, x, (weights, ids), slots, changes, expected, test_experts.TOLERANCES[dtype])


def test_no_tokens_for_experts() -> None:
    empty = kernels.fused_experts(
        *(torch.empty(0, 40), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64)),
        *(torch.randn(3, 48, 40), torch.randn(3, 40, 24), "silu"),
    )
    assert empty.shape == (0, 40)


@pytest.mark.parametrize("scoring", test_experts.SCORINGS)
@pytest.mark.parametrize(
    ("experts", "top_k", "renormalize"), [(1, 1, False), (8, 2, True), (60, 4, False), (64, 64, True), (129, 8, True)]
)
def test_routing(scoring: reference.Scoring, experts: int, top_k: int, renormalize: bool) -> None:
    logits = test_experts.apart(5, experts)
    test_experts.check_route(logits, top_k, scoring, renormalize=renormalize, scale=2.5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_grouped_routing(scoring: reference.Scoring, group_score: reference.GroupScore, with_bias: bool) -> None:
    options = {"groups": 5, "top_groups": 3, "correction_bias": torch.randn(35) if with_bias else None}
    logits = test_experts.apart(9, 35)
    test_experts.check_route(logits, 6, scoring, renormalize=True, group_score=group_score, **options)


@pytest.mark.parametrize("scoring", test_experts.SCORINGS)
@pytest.mark.parametrize("options", [{}, {"groups": 4, "top_groups": 2}])
def test_of_equal_experts_the_lower_number_comes_first(scoring: reference.Scoring, options: dict[str, int]) -> None:
    test_experts.check_route(torch.randint(-2, 3, (16, 12)).float(), 5, scoring, **options)


def test_experts_of_logits_that_are_no_numbers_are_there() -> None:
    assert kernels.route(torch.full((2, 8), torch.nan), 3, "softmax")[1].max() < 8
    assert kernels.route(torch.empty(0, 8), 3, "softmax")[1].shape == (0, 3)


@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "ties", "holes"])
def test_draws_are_those_of_the_reference(kind: str) -> None:
    rows, width = 12, 5003
    pick = torch.randint(0, 2, (3, rows)).bool()
    controls = {
        "temperature": torch.rand(rows) * 2 + 0.05,
        "top_k": torch.where(pick[0], torch.randint(1, width + 9, (rows,)) ** torch.randint(0, 2, (rows,)), 0),
        "top_p": torch.where(pick[1], torch.rand(rows) * 0.99 + 0.01, 1.0),
        "min_p": torch.where(pick[2], torch.rand(rows) ** 4, 0.0),
    }
    controls["temperature"][::7] = 0.0
    controls["seeds"], logits = torch.arange(rows), test_sampling.shaped(kind, rows, width)
    found, expected = test_sampling.both(logits, **controls)
    if kind == "ties":  # where the limit is beside the edge of tokens that are equally likely, rounding decides
        edge, top_p = torch.tensor([-1e-4, 1e-4])[:, None], controls["top_p"]
        near = [test_sampling.both(logits, **controls | {"top_p": at})[1] for at in (top_p + edge).clamp(1e-3, 1.0)]
        is_clear = (near[0] == expected) & (near[1] == expected)
        assert is_clear.sum() > 0.8 * rows
        found, expected = found[is_clear], expected[is_clear]
    assert torch.equal(found, expected)


def test_few_values_with_many_ties_are_drawn_alike() -> None:
    values = torch.randint(-3, 3, (4, 40)).float().masked_fill(torch.rand(4, 40) < 0.2, -torch.inf)
    values[0] = -torch.inf
    for top_k, top_p, min_p in ((0, 0.43, 0.0), (7, 0.91, 0.0), (12, 1.0, 0.3), (5, 0.07, 0.013)):
        controls = torch.full((4,), top_k), torch.full((4,), top_p), torch.full((4,), min_p)
        found, expected = test_sampling.both(values, **dict(zip(("top_k", "top_p", "min_p"), controls, strict=True)))
        assert torch.equal(found, expected)


def test_the_ways_to_a_token_that_are_not_the_usual_ones() -> None:
    """More tokens than top-k gathers, many rounds for top-p, and top-p of the tokens that min-p leaves."""
    logits = torch.cat((torch.zeros(9, 4100), torch.full((9, 100), 1.0), torch.randn(9, 4000)), dim=1)
    top_k, top_p, min_p = torch.zeros(9, dtype=torch.int64), torch.ones(9), torch.zeros(9)
    top_k[:3], top_p[1:6], min_p[5:] = torch.tensor([90, 110, 4200]), torch.tensor([0.9, 0.4, 1e-6, 0.02, 0.5]), 0.3
    found, expected = test_sampling.both(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_arg_max_beside_draws_goes_to_the_lowest_id(kind: str) -> None:
    logits = test_sampling.shaped(kind, 9, 4200)
    found, expected = test_sampling.both(logits, temperature=torch.tensor([0.0, 0.0, 0.8]).repeat(3))
    assert torch.equal(found, expected)


def test_rows_may_be_a_part_of_wider_ones() -> None:
    wide = torch.randn(9, 70)
    found, expected = test_sampling.both(wide[:, 3:60], top_k=torch.full((9,), 7))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("step", ["decodes", "short"])
def test_causal_conv(step: str, dtype: torch.dtype) -> None:
    test_recurrent.test_causal_conv_is_that_of_the_reference(step, dtype)


@pytest.mark.parametrize(("per_feature", "is_delta"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("step", ["decodes", "short"])
def test_linear_attention(step: str, per_feature: bool, is_delta: bool) -> None:
    test_recurrent.test_linear_attention_is_that_of_the_reference(step, per_feature, True, is_delta, torch.float32)


@pytest.mark.parametrize("step", ["decodes", "short"])
def test_linear_attention_with_values_of_an_odd_size(step: str) -> None:
    test_recurrent.test_values_of_an_odd_size_are_those_of_the_reference(step)


@pytest.mark.parametrize(("step", "state_size"), [("decodes", 1), ("decodes", 24), ("short", 24)])
def test_selective_scan(step: str, state_size: int) -> None:
    test_recurrent.test_selective_scan_is_that_of_the_reference(step, state_size, torch.float32)


@pytest.mark.parametrize(("step", "size"), [("decodes", 1.0), ("short", 40.0)])
def test_wkv(step: str, size: float) -> None:
    test_recurrent.test_wkv_is_that_of_the_reference(step, size, torch.float32)


@pytest.mark.parametrize("width", [1, 50, 5000])
def test_scores_of_tokens(width: int) -> None:
    logits, tokens = torch.randn(6, width) * 4, torch.randint(width, (6,))
    logits[0, : width // 2] = -torch.inf
    tokens[1] = logits[1].argmax()
    for rows in (slice(None), slice(0)):
        given = logits[rows], tokens[rows], min(7, width)
        close(kernels.score_tokens(*given), reference.score_tokens(*given))


@pytest.mark.parametrize("vocab", [9, 5000])
def test_penalties(vocab: int) -> None:
    """Few and many tokens, each seen once or often, in the prompt, in the output or in both."""
    logits, tokens = torch.randn(5, vocab) * 4, torch.randint(vocab, (9000,)).int()
    tokens[30:60] = 3
    spans = torch.tensor([[0, 10, 50], [20, 40, 40], [100, 100, 101], [5, 5000, 9000]])
    rows, factors = torch.tensor([4, 0, 1, 2]), torch.rand(4, 3) * 2 + 0.1
    found, expected = logits.clone(), logits.clone()
    kernels.penalize(found, tokens, rows, spans, factors, 8995)
    reference.penalize(expected, tokens, rows, spans, factors, 8995)
    close(found, expected)
    assert torch.equal(found[3], logits[3])
    assert not torch.equal(found[1], logits[1])


@pytest.mark.slow
def test_every_kernel_passes_the_check_of_a_rank() -> None:
    """As the check calls them. `test_check.py` tests its use of the results."""
    config = kernels.AttentionConfig((kernels.AttentionLayer(6, 2, 24, 0.2, window=9, softcap=5.0, has_sinks=True),))
    of_fp4 = QuantizedFormat("e2m1", 16, rounds_inputs=True)
    formats = QuantizedFormat("int8"), QuantizedFormat("int8", rounds_inputs=True), of_fp4
    found = check.differences(platform, torch.device("cpu"), torch.float32, config, formats)
    assert found == dict.fromkeys(platform.__all__, "")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("capability", "types"), [(89, ["fp32"]), (90, ["bf16", "fp16", "fp32"])]
)  # 99 and 227 KiB of shared memory, of which float32 takes the most
def test_every_kernel_compiles_ahead(capability: int, types: list[str]) -> None:
    """Every variant of every kernel for both sizes of shared memory: the smaller one in float32; the larger one in one
    of three types, which take turns, and each kernel once in each of them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "tests.integration.kernels.compile_ahead", str(capability)),
            *("--types", *types),
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    *variants, last = done.stdout.splitlines()
    assert last == f"{len(variants)} kernels compiled for sm_{capability}"
    names = {line.split()[0] for line in variants}
    assert len(names) == 33, names
    for name in (
        "_act_mul",
        "_decodes",
        "_grouped",
        "_prompts",
        "_rms_norm",
        "_rotary_write",
        "_sum",
    ):  # by the model's
        found = {line.split()[1] for line in variants if line.startswith(f"{name}_kernel")}
        assert found == set(types), name


_STEPS = """
import torch
from triton.runtime.jit import JITFunction
from quire.kernels import triton as platform
from tests.integration.kernels.compile_ahead import Variant

variants = {}

def run(kernel, *args, grid, warmup, **options):
    meta = {name: value for name, value in options.items() if name in kernel.arg_names}
    variants.setdefault(kernel.__name__, set()).add(Variant.of(kernel, args, meta).key)

JITFunction.run = run
cache, of_4_bits = torch.zeros(2, 64, 2, 16, 64), torch.zeros(1, 64, 2, 16, 84, dtype=torch.uint8)
experts = torch.zeros(4, 64, 64), torch.zeros(4, 64, 32)
for requests in (1, 2, 3, 16, 31):
    for width in (1, 2, 16, 50):
        counts = torch.arange(requests) % 3 + 2
        tokens = int(counts.sum())
        for offset in (0, 1):  # of rows that came in one transfer
            sizes = (offset + tokens, offset + requests, offset + requests + 1)
            slots, lengths, starts = (torch.zeros(size, dtype=torch.int64)[offset:] for size in sizes)
            query, table = torch.zeros(tokens, 4, 64), torch.zeros(requests, width, dtype=torch.int64)
            platform.rotary_write_kv(query, query[:, :2], query[:, 2:], torch.zeros(tokens, 64), cache, slots)
            platform.paged_attention(query, cache, table, lengths, starts, 0.1)
            platform.quantize_kv(cache, of_4_bits, slots, slots)
            platform.int4_attention(query, of_4_bits, table, lengths, starts, 0.1, cache, slots)
            ids = torch.zeros(tokens, 2, dtype=torch.int64)
            platform.fused_experts(torch.zeros(tokens, 64), torch.ones(tokens, 2), ids, *experts, "silu")
    for top_p in (1.0, 0.9, 0.5):
        zeros = torch.zeros(requests, dtype=torch.int64)
        ones = torch.ones(requests)
        platform.sample(torch.zeros(requests, 999), ones, zeros, ones * top_p, ones * 0, zeros, zeros)
for name, keys in variants.items():
    print(name, len(keys))
"""


def test_what_changes_from_step_to_step_compiles_nothing_anew() -> None:
    """Except for kernels shaped by the rows, with few shapes: experts' blocks and chunks, and the first draw. Attention
    reads two kinds of caches here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    counts = {name: int(count) for name, count in (line.split() for line in done.stdout.splitlines())}
    assert {"_prompts_kernel", "_decodes_kernel", "_join_kernel", "_rotary_write_kernel", "_weigh_kernel"} <= set(
        counts
    )
    shaped = {"_sort_kernel": 8, "_grouped_kernel": 8, "_draw_kernel": 2, "_prompts_kernel": 2, "_decodes_kernel": 2}
    assert {name: count for name, count in counts.items() if count > shaped.get(name, 1)} == {}


def test_triton_does_not_warn_about_its_own_defaults() -> None:
    """Triton 3.9's warning would be an error here, and a line on every user's terminal elsewhere."""
    assert importlib.import_module("triton").knobs.language.fp_fusion_enabled(None)
