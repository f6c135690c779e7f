"""Low-rank changes by adapters against loops over rows in float64, and their independence of other rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import AdapterRows, LowRankPool, examples, linear
from quire.kernels.cpu.op_replay import OpReplay
from quire.kernels.examples import Inputs
from tests.integration.kernels.conftest import platforms_only

TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
RANKS = (16, 1, 0, 3, 12, 64, 33)
"""Of the slots; the next part has those of the next slots."""
SHAPES = [(1, 64, (64,)), (40, 200, (72, 40, 8)), (7, 33, (1, 257)), (130, 1100, (513,)), (30, 1, (5,))]
"""Rows, inputs, and features of the parts."""


def make_pool(in_features: int, widths: Sequence[int], ranks: Sequence[int], *args: Any, **options: Any) -> LowRankPool:
    """With NaN wherever no adapter has anything."""
    inputs = Inputs(torch.device("cpu"), torch.float32)
    pool = examples.low_rank_pool(inputs, in_features, widths, ranks, *args, **options)
    for (slot, part), width in zip(
        itertools.product(range(len(ranks)), range(len(widths))), itertools.cycle(widths), strict=False
    ):
        first, rank = pool.slots[slot, part].tolist()
        pool.b[first : first + rank, width:] = torch.nan
    nothing = torch.full((3, in_features), torch.nan, dtype=pool.a.dtype), torch.full_like(pool.b[:1], torch.nan)
    a, b = torch.cat((nothing[0], pool.a)), torch.cat((nothing[1].expand(3, -1), pool.b))
    pool.slots[..., 0] += 3
    return replace(pool, a=a, b=b)


def by_loops(out: Tensor, x: Tensor, pool: LowRankPool, slots: Sequence[int]) -> Tensor:
    """In float64, each row by itself."""
    changed = out.double()
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        for part, (first, rank) in enumerate(pool.slots[slot].tolist()):
            begin, end = pool.bounds[part : part + 2].tolist()
            a, b = (each[first : first + rank].double() for each in (pool.a, pool.b))
            changed[row, begin:end] += a @ x[row].double() @ b[:, : end - begin]
        vector = int(pool.vectors[slot])
        if pool.scale is not None and vector >= 0:
            changed[row] *= pool.scale[vector]
        if pool.bias is not None and vector >= 0:
            changed[row] += pool.bias[vector]
    return changed.to(out.dtype)


def check_large_products(dtype: torch.dtype) -> None:
    """The products with A may exceed float16."""
    pool, out = LowRankPool.allocate(1, 1, 512, (16,), dtype, torch.device("cpu"), 1), torch.zeros(1, 16, dtype=dtype)
    pool.assign(0, 0, [(torch.full((1, 512), 20.0), torch.full((16, 1), 2**-10))])
    kernels.add_low_rank(out, torch.full((1, 512), 10.0, dtype=dtype), pool, AdapterRows.of(torch.zeros(1).long(), 1))
    assert out[0].tolist() == [100.0] * 16


def check_changes(rows: int, in_features: int, widths: Sequence[int], ranks: Sequence[int], dtype: torch.dtype) -> None:
    x, out = torch.randn(rows, in_features).to(dtype), torch.randn(rows, sum(widths)).to(dtype)
    slots = torch.randint(-1, len(ranks), (rows,))
    of_rows = AdapterRows.of(slots, len(ranks))
    stored = TYPES if dtype == torch.float32 else [dtype]
    every = ((), ("has_scale",), ("has_scale", "has_bias"), ("has_bias",))
    for names, of_pool, of_result in zip(
        every, itertools.cycle(stored), itertools.cycle([dtype, torch.float32]), strict=False
    ):
        pool = make_pool(in_features, widths, ranks, of_pool, **dict.fromkeys(names, True))
        given = out.to(of_result)
        found, expected = given.clone(), by_loops(given, x, pool, slots.tolist())
        kernels.add_low_rank(found, x, pool, of_rows)
        error = (found.double() - expected.double()).norm()
        assert error <= TOLERANCES[dtype] * expected.double().norm()
        assert torch.equal(found[slots < 0], given[slots < 0])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "in_features", "widths"), SHAPES)
def test_each_row_is_changed_by_its_own_adapter(
    rows: int, in_features: int, widths: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_changes(rows, in_features, widths, RANKS, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_large_products_with_a_stay_finite(dtype: torch.dtype) -> None:
    check_large_products(dtype)


def test_rows_are_sorted_by_slot_and_then_by_number() -> None:
    rows = AdapterRows.of(torch.tensor([2, -1, 0, 2, -7, 0, 3]), 5)
    assert rows.order.tolist() == [2, 5, 0, 3, 6, 1, 4]
    assert rows.starts.tolist() == [0, 2, 2, 4, 5, 5, 7]
    assert AdapterRows.of(torch.empty(0, dtype=torch.int64), 2).starts.tolist() == [0, 0, 0, 0]
    assert AdapterRows.of(torch.full((3,), -1), 2).starts.tolist() == [0, 0, 0, 3]


@pytest.mark.parametrize("dtype", TYPES)
def test_what_no_adapter_changes_keeps_its_bits(dtype: torch.dtype) -> None:
    """Rows of none, parts that an adapter does not change, and the memory around a view."""
    pool = make_pool(40, (24, 8), (5, 0, 0))
    pool = replace(pool, a=pool.a.to(dtype), b=pool.b.to(dtype))
    memory = torch.randn(6, 50).to(dtype)
    memory[:, ::3] *= -0.0
    before, bits = memory.clone(), memory.view(torch.int32 if dtype == torch.float32 else torch.int16)
    rows = AdapterRows.of(torch.tensor([-1, 0, 1, 2, -1, 1]), 3)
    kernels.add_low_rank(memory[:, 9:41], torch.randn(6, 40).to(dtype), pool, rows)
    is_same = bits == before.view(bits.dtype)
    assert is_same[[0, 2, 4, 5]].all()  # the second part of slot 1 has the rank of slot 2
    assert is_same[1, :9].all()
    assert is_same[1, 33:].all()
    assert not is_same[1, 9:33].any()
    assert is_same[3, :33].all()  # of slot 2, the second part has the rank of slot 0
    assert not is_same[3, 33:41].any()


@platforms_only
@pytest.mark.parametrize(("dtype", "stored"), [(each, each) for each in TYPES] + [(torch.float32, torch.bfloat16)])
def test_a_rows_bits_depend_on_nothing_else(dtype: torch.dtype, stored: torch.dtype) -> None:
    """Not on the other rows and their adapters, the chunks of a prompt, the threads, other slots or what these have."""
    ranks, widths = (16, 3, 12, 40, 1), (300, 70)
    pool = make_pool(333, widths, ranks, stored)
    x, out = torch.randn(230, 333).to(dtype), torch.randn(230, sum(widths)).to(dtype)
    slots = torch.randint(-1, len(ranks), (230,))
    slots[60:200] = 2  # a prompt

    def changed(rows: slice, pool: LowRankPool = pool, slots: Tensor = slots) -> Tensor:
        found = out[rows].clone()
        kernels.add_low_rank(found, x[rows], pool, AdapterRows.of(slots[rows], len(pool.slots)))
        return found

    factors = torch.rand(len(ranks), sum(widths)), torch.randn(len(ranks), sum(widths))
    for scale, bias in itertools.product((None, factors[0]), (None, factors[1])):
        of_all = replace(pool, scale=scale, bias=bias)
        expected = changed(slice(None), of_all)
        for first, count in itertools.product((0, 60, 187), (1, 2, 5, 13, 43)):
            rows = slice(first, first + count)
            assert torch.equal(changed(rows, of_all), expected[rows])
    together = changed(slice(None))
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3, 5):
            torch.set_num_threads(number)
            assert torch.equal(changed(slice(None)), together)
            assert torch.equal(changed(slice(3, 4)), together[3:4])
    finally:
        torch.set_num_threads(threads)
    plain = replace(pool, scale=torch.ones(len(ranks), sum(widths)), bias=torch.zeros(len(ranks), sum(widths)))
    assert torch.equal(changed(slice(None), plain), together)
    wide = replace(pool, a=pool.a.to(dtype), b=pool.b.to(dtype))  # as beside adapters of another type
    assert torch.equal(changed(slice(None), wide), together)
    moved = make_pool(333, widths, ranks, stored)
    of_two, begin = moved.slots[2].clone(), int(moved.slots[2, 0, 0])
    count = int(of_two[:, 1].sum())
    far = replace(
        moved,
        a=torch.cat((moved.a, moved.a[begin : begin + count])),
        b=torch.cat((moved.b, moved.b[begin : begin + count])),
        slots=torch.cat((moved.slots, (of_two + torch.tensor([len(moved.a) - begin, 0]))[None])),
        vectors=torch.cat((moved.vectors, moved.vectors[2:3])),
    )
    elsewhere = slots.where(slots != 2, len(ranks))
    assert torch.equal(changed(slice(None), far, elsewhere), together)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(each, None) for each in TYPES] + [(torch.float32, "int8"), (torch.bfloat16, "int8"), (torch.float16, "int4")],
)
def test_a_layers_rows_have_the_results_of_their_own_adapters(
    dtype: torch.dtype, quantization: kernels.Quantization | None, with_bias: bool, implementation: str
) -> None:
    """Of plain and of gated layers. Those without an adapter have the results of a layer without any, to the bit where
    the matmul is our own."""
    ranks, size, ins = (16, 3, 0, 40), 300, 96
    weight, x = torch.randn(2 * size, ins).to(dtype) / 10, torch.randn(250, ins).to(dtype)
    bias = torch.randn(2 * size).to(dtype) if with_bias else None
    slots = torch.randint(-1, len(ranks), (250,))
    slots[100:220] = 1
    rows = AdapterRows.of(slots, len(ranks))
    plain = kernels.pack_linear(weight.clone(), quantization)
    gated = kernels.pack_gated(weight.clone(), "silu", quantization)
    is_ours = implementation == "cpu" and isinstance(gated, linear.FusedLinear)
    for options in ({}, {"has_scale": True, "has_bias": True}):
        pool = make_pool(ins, (size, size), ranks, dtype, **options)
        both = plain(x, bias)
        kernels.add_low_rank(both, x, pool, rows)
        assert torch.equal(plain.with_low_rank(x, bias, pool, rows), both)
        for layer in (plain, gated):  # a batch of which the host knows that no row has an adapter
            none = AdapterRows(slots[:0], slots[:0], has_adapters=False)  # not read
            assert torch.equal(layer.with_low_rank(x, bias, pool, none), layer(x, bias))
        found, separate = gated.with_low_rank(x, bias, pool, rows), gated.gates_and_ups(x, bias)
        kernels.add_low_rank(separate, x, pool, rows)
        expected = kernels.act_mul(separate, "silu").to(dtype)
        assert torch.equal(found, expected) if is_ours else (found - expected).norm() <= 1e-2 * expected.norm()
        error = (found.double() - kernels.act_mul(both, "silu").double()).norm()
        assert error <= 3 * TOLERANCES[dtype] * expected.double().norm()
        if dtype == torch.float32:
            narrow = replace(pool, a=pool.a.bfloat16(), b=pool.b.bfloat16())
            wide = replace(pool, a=narrow.a.float(), b=narrow.b.float())
            for layer in (plain, gated):
                found_narrow = layer.with_low_rank(x, bias, narrow, rows)
                assert torch.equal(found_narrow, layer.with_low_rank(x, bias, wide, rows))
        if not is_ours:
            continue
        assert torch.equal(found[slots < 0], gated(x, bias)[slots < 0])
        for first, count in ((0, 1), (99, 7), (150, 100)):
            part = slice(first, first + count)
            alone = gated.with_low_rank(x[part], bias, pool, AdapterRows.of(slots[part], len(ranks)))
            assert torch.equal(alone, found[part])
        threads = torch.get_num_threads()
        try:
            for number in (2, 3, 5):
                torch.set_num_threads(number)
                assert torch.equal(gated.with_low_rank(x, bias, pool, rows), found)
        finally:
            torch.set_num_threads(threads)


@platforms_only
def test_a_replayed_step_has_the_adapters_of_its_own_rows() -> None:
    pool, slots = make_pool(40, (24, 8), (5, 2, 9)), torch.tensor([0, 1, -1, 2])
    x, base, out = torch.randn(4, 40), torch.randn(4, 32), torch.zeros(4, 32)

    def step() -> None:
        found = base + 0.0
        kernels.add_low_rank(found, x, pool, AdapterRows.of(slots, 3))
        out.copy_(found)

    with OpReplay() as replay:
        step()
    assert not replay.reason
    for numbers in ([1, 1, 0, -1], [-1, -1, -1, -1], [2, 2, 2, 2]):
        slots.copy_(torch.tensor(numbers))
        x.copy_(torch.randn(4, 40))
        first, _ = pool.slots[2, 0].tolist()
        pool.assign(2, first, [None, (torch.randn(4, 40), torch.randn(8, 4))])
        replay.replay()
        torch.testing.assert_close(out, by_loops(base, x, pool, numbers), rtol=1e-5, atol=1e-5)


def test_no_rows_or_no_slots_change_nothing() -> None:
    pool = make_pool(40, (24, 8), (5, 2))
    for rows, slots in ((0, 2), (3, 0)):
        of_rows = AdapterRows.of(torch.full((rows,), -1), slots)
        out = torch.randn(rows, 32)
        before = out.clone()
        kernels.add_low_rank(
            out, torch.randn(rows, 40), replace(pool, slots=pool.slots[:slots], vectors=pool.vectors[:slots]), of_rows
        )
        assert torch.equal(out, before)


def test_a_slot_that_does_not_exist_is_refused() -> None:
    pool, rows = make_pool(40, (24, 8), (5, 2)), AdapterRows.of(torch.tensor([0, -1, 2]), 2)
    with pytest.raises(RuntimeError, match="row 2 has a slot that does not exist"):
        kernels.add_low_rank(torch.randn(3, 32), torch.randn(3, 40), pool, rows)
    gated = kernels.pack_gated(torch.randn(32, 40), "silu")
    with pytest.raises(RuntimeError, match="row 2 has a slot that does not exist"):
        gated.with_low_rank(torch.randn(3, 40), None, make_pool(40, (16, 16), (5, 2)), rows)


@platforms_only
def test_what_is_not_in_the_pool_or_the_step_is_refused() -> None:
    pool, x, out = make_pool(40, (24, 8), (5, 2)), torch.randn(3, 40), torch.randn(3, 32)
    rows = AdapterRows.of(torch.tensor([0, 1, -1]), 2)
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"slots": pool.slots + torch.tensor([100, 0])}, "the rank rows of slot 0 are not in the pool"),
        ({"slots": -pool.slots}, "the rank rows of slot 0 are not in the pool"),
        ({"slots": pool.slots.int()}, "slots and rows must be int64"),
        ({"a": pool.a[:, :39]}, "the rank rows do not match x"),
        ({"b": pool.b.half()}, "the rank rows do not match x"),
        ({"bounds": pool.bounds[:2]}, "the slots, parts or rows do not match"),
        ({"b": torch.ones(len(pool.a), 300), "bounds": torch.tensor([0, 200, 32])}, "the slots, parts or rows do not"),
        ({"bounds": torch.tensor([0, -8, 32])}, "the slots, parts or rows do not match"),
        ({"scale": torch.ones(2, 31)}, "scale and bias must be float32"),
        ({"scale": torch.ones(2, 32), "vectors": torch.tensor([2, 0])}, "scale or bias of slot 0 is not in the pool"),
        ({"vectors": torch.tensor([0])}, "the slots, parts or rows do not match"),
    )
    for change, message in changes:
        with pytest.raises(RuntimeError, match=message):
            kernels.add_low_rank(out, x, replace(pool, **change), rows)
    for wrong, message in (
        (rows._replace(order=rows.order + 3), "row 3 does not exist"),
        (rows._replace(order=rows.order[:2]), "the slots, parts or rows do not match"),
        (rows._replace(starts=rows.starts + 2), "the starts of rows do not match their order"),
        (rows._replace(starts=torch.tensor([0, 1, -(2**63), 3])), "the starts of rows do not match their order"),
        (rows._replace(order=torch.tensor([0, 0, 2])), "row 0 is listed twice"),
        (rows._replace(order=rows.order.flip(0), starts=torch.tensor([0, 2, 3, 3])), "not in ascending order"),
    ):
        with pytest.raises(RuntimeError, match=message):
            kernels.add_low_rank(out, x, pool, wrong)
    with pytest.raises(RuntimeError, match="rows of Half are not multiplied by low-rank matrices of Float"):
        kernels.add_low_rank(out.half(), x.half(), pool, rows)
