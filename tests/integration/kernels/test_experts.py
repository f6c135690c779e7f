"""Routing against loops in plain Python, and fused experts against one token and one expert at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.kernels import cpu, dispatch, examples, experts, isa, linear, reference
from quire.kernels.cpu.op_replay import OpReplay
from tests.integration.kernels.conftest import platforms_only

ACTIVATIONS: dict[str, Callable[[float, float], float]] = {
    "silu": lambda gate, up: gate / (1 + math.exp(-gate)) * up,
    "gelu": lambda gate, up: gate * (1 + math.erf(gate / math.sqrt(2))) / 2 * up,
    "gelu_tanh": lambda gate, up: gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up,
    "relu": lambda gate, up: max(gate, 0.0) * up,
    "relu2": lambda gate, up: max(gate, 0.0) ** 2 * up,
    "swiglu_oai": lambda gate, up: (
        min(gate, 7.0) / (1 + math.exp(-1.702 * min(gate, 7.0))) * (min(max(up, -7.0), 7.0) + 1)
    ),
    "silu_7": lambda gate, up: min(gate / (1 + math.exp(-gate)), 7.0) * min(max(up, -7.0), 7.0),
    "silu_16": lambda gate, up: min(gate / (1 + math.exp(-gate)), 16.0) * min(max(up, -16.0), 16.0),
    "silu_clamped": lambda gate, up: min(gate, 10.0) / (1 + math.exp(-min(gate, 10.0))) * min(max(up, -10.0), 10.0),
}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SCORINGS: tuple[reference.Scoring, ...] = ("softmax", "sigmoid", "topk_softmax")


def route_by_loops(
    row: list[float],
    top_k: int,
    scoring: str,
    *,
    renormalize: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    ineligible: float = -math.inf,
    bias: list[float] | None = None,
) -> dict[int, float]:
    """One token's experts and weights; sorted() keeps the order of equal ones."""
    total = sum(math.exp(x) for x in row)
    scores = {
        "softmax": [math.exp(x) / total for x in row],
        "sigmoid": [1 / (1 + math.exp(-x)) for x in row],
        "topk_softmax": row,
    }[scoring]
    choice = scores if bias is None else [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(row) // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    best = 2 if group_score == "top2_sum" else 1
    worth = [sum(sorted((choice[i] for i in group), reverse=True)[:best]) for group in members]
    open_groups = sorted(range(groups), key=lambda group: -worth[group])[:top_groups]
    choice = [choice[i] if i // size in open_groups else ineligible for i in range(len(row))]
    chosen = sorted(range(len(row)), key=lambda i: -choice[i])[:top_k]
    weights = [scores[i] for i in chosen]
    if scoring == "topk_softmax":
        weights = [math.exp(x) / sum(math.exp(row[i]) for i in chosen) for x in weights]
    divisor = sum(weights) if renormalize else 1.0
    return {i: weight / divisor * scale for i, weight in zip(chosen, weights, strict=True)}


def apart(tokens: int, num_experts: int) -> Tensor:
    """Random logits, far enough from each other for any rounding."""
    return (torch.rand(tokens, num_experts).argsort(dim=-1) - num_experts / 2) * 0.05


def check_route(logits: Tensor, top_k: int, scoring: reference.Scoring, **options: Any) -> None:
    weights, ids = kernels.route(logits, top_k, scoring, **options)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert weights.shape == ids.shape == (len(logits), top_k)
    bias = options.pop("correction_bias", None)
    options["bias"] = None if bias is None else bias.double().tolist()
    for row, some_weights, some_ids in zip(logits.double().tolist(), weights, ids.tolist(), strict=True):
        expected = route_by_loops(row, top_k, scoring, **options)
        assert some_ids == list(expected)
        torch.testing.assert_close(some_weights, torch.tensor(list(expected.values())), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (60, 4), (64, 64), (129, 8)])
def test_routing_is_that_of_plain_loops(
    scoring: reference.Scoring, renormalize: bool, num_experts: int, top_k: int
) -> None:
    check_route(apart(33, num_experts), top_k, scoring, renormalize=renormalize, scale=2.5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_grouped_routing_is_that_of_plain_loops(
    scoring: reference.Scoring, group_score: reference.GroupScore, with_bias: bool
) -> None:
    bias = torch.randn(24) if with_bias else None
    options = {"groups": 4, "top_groups": 2, "group_score": group_score, "correction_bias": bias}
    check_route(apart(50, 24), 5, scoring, renormalize=True, **options)


def test_experts_that_are_not_eligible_may_be_better_than_some_that_are() -> None:
    options = {"groups": 4, "top_groups": 2, "group_score": "top2_sum", "ineligible": 0.0}
    check_route(apart(50, 24), 9, "sigmoid", correction_bias=torch.randn(24) - 0.5, **options)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-2, 2), min_size=12, max_size=12), min_size=1, max_size=4), st.data())
def test_of_equal_experts_the_lower_number_comes_first(rows: list[list[int]], data: st.DataObject) -> None:
    logits = torch.tensor(rows, dtype=torch.float32)
    scoring = data.draw(st.sampled_from(SCORINGS))
    check_route(logits, data.draw(st.integers(1, 6)), scoring)
    check_route(logits, data.draw(st.integers(1, 6)), scoring, groups=4, top_groups=2)


def test_no_tokens_and_scores_of_zero() -> None:
    weights, ids = kernels.route(torch.empty(0, 8), 2, "softmax")
    assert weights.shape == ids.shape == (0, 2)
    weights, ids = kernels.route(torch.full((2, 8), -1e4), 2, "sigmoid", renormalize=True)
    assert ids.tolist() == [[0, 1]] * 2
    assert not weights.any()


def experts_by_loops(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """In float64, each token by itself."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, numbers) in enumerate(zip(x.double(), ids.tolist(), strict=True)):
        for weight, expert in zip(weights[token].tolist(), numbers, strict=True):
            if not 0 <= expert < len(down):
                continue
            both = gate_up[expert].double() @ row
            both = both if gate_up_bias is None else both + gate_up_bias[expert]
            pairs = zip(*both.view(2, -1).tolist(), strict=True)
            inner = torch.tensor([ACTIVATIONS[activation](gate, up) for gate, up in pairs], dtype=torch.float64)
            result = down[expert].double() @ inner
            out[token] += weight * (result if down_bias is None else result + down_bias[expert])
    return out


def random_experts(
    num_experts: int, size: int, hidden: int, dtype: torch.dtype = torch.float32, *, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    shapes = (num_experts, 2 * size, hidden), (num_experts, hidden, size)
    gate_up, down = ((torch.randn(shape) * 2 / shape[2] ** 0.5).to(dtype) for shape in shapes)
    if not bias:
        return gate_up, down, None, None
    return gate_up, down, torch.randn(num_experts, 2 * size).to(dtype), torch.randn(num_experts, hidden).to(dtype)


def routed(tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    return kernels.route(torch.randn(tokens, num_experts) * 2, top_k, "softmax")


def close(out: Tensor, expected: Tensor, tolerance: float) -> None:
    assert out.shape == expected.shape
    assert (out.double() - expected).norm() <= tolerance * (1 + expected.norm())


def by_expert(
    pack: Callable[[Tensor], kernels.PackedLinear],
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
) -> kernels.PackedExperts:
    first, second = ([pack(weight) for weight in weights] for weights in (gate_up, down))
    return experts.ExpertByExpert(first, second, activation, gate_up_bias, down_bias, gated=True)


def forms(
    gate_up: Tensor, down: Tensor, activation: str, gate_up_bias: Tensor | None, down_bias: Tensor | None
) -> list[kernels.PackedExperts]:
    """Every implementation that takes such weights here, of copies: packing may overwrite them."""
    biases = (gate_up_bias, down_bias)
    made: list[kernels.PackedExperts] = [
        experts.PlainExperts(gate_up, down, activation, *biases),
        by_expert(linear.TiledLinear, gate_up, down, *biases, activation=activation),
        kernels.pack_experts(gate_up.clone(), down.clone(), activation, gate_up_bias=biases[0], down_bias=biases[1]),
        experts.TiledExperts(gate_up.clone(), down.clone(), activation, *biases, gated=True),
    ]
    return made


SHAPES = [(1, 4, 2, 16, 32), (3, 5, 3, 20, 40), (40, 8, 2, 33, 70), (17, 60, 4, 64, 128), (9, 3, 3, 5, 6)]
"""Tokens, experts, top_k, size, hidden."""


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tokens", "num_experts", "top_k", "size", "hidden"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_fused_experts_are_the_loop_over_tokens(
    tokens: int, num_experts: int, top_k: int, size: int, hidden: int, bias: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(tokens, hidden).to(dtype)
    weights, ids = routed(tokens, num_experts, top_k)
    parts = random_experts(num_experts, size, hidden, dtype, bias=bias)
    expected = experts_by_loops(x, weights, ids, *parts[:2], "silu", *parts[2:])
    for form in forms(*parts[:2], "silu", *parts[2:]):
        out = form(x, weights, ids)
        assert out.dtype == dtype
        close(out, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k", "size", "hidden"), SHAPES)
def test_float32_by_experts_of_16_bits_is_that_by_wide_experts(
    tokens: int, num_experts: int, top_k: int, size: int, hidden: int, stored: torch.dtype, implementation: str
) -> None:
    x, routes = torch.randn(tokens, hidden), routed(tokens, num_experts, top_k)
    gate_up, down, *_ = random_experts(num_experts, size, hidden, stored)
    exact = experts_by_loops(x, *routes, gate_up, down, "silu")
    wide = experts.TiledExperts(gate_up.float(), down.float(), "silu", None, None, gated=True)
    narrow = experts.TiledExperts(gate_up, down, "silu", None, None, gated=True)
    assert {each.dtype for each in narrow.state(0)} == {stored}
    found, expected = narrow(x, *routes), wide(x, *routes)
    close(found, exact, 2e-6)
    assert implementation == "reference" or torch.equal(found, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    x, (weights, ids) = torch.randn(6, 32) * 6, routed(6, 4, 2)
    gate_up, down, *_ = random_experts(4, 24, 32)
    expected = experts_by_loops(x, weights, ids, gate_up, down, activation)
    for form in forms(gate_up, down, activation, None, None):
        close(form(x, weights, ids), expected, 3e-6)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tokens", "num_experts", "top_k", "size", "hidden"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_experts_without_gates(
    tokens: int, num_experts: int, top_k: int, size: int, hidden: int, bias: bool, dtype: torch.dtype
) -> None:
    """relu2 is relu with the ups as gates."""
    x = torch.randn(tokens, hidden).to(dtype)
    weights, ids = routed(tokens, num_experts, top_k)
    gate_up, down, gate_up_bias, down_bias = random_experts(num_experts, size, hidden, dtype, bias=bias)
    up, up_bias = gate_up[:, :size], None if gate_up_bias is None else gate_up_bias[:, :size]
    twice = torch.cat((up, up), dim=1), None if up_bias is None else torch.cat((up_bias, up_bias), dim=1)
    expected = experts_by_loops(x, weights, ids, twice[0], down, "relu", twice[1], down_bias)
    first, second = ([linear.TiledLinear(each) for each in part] for part in (up, down))
    made: list[kernels.PackedExperts] = [
        experts.PlainExperts(up, down, "relu2", up_bias, down_bias),
        experts.ExpertByExpert(first, second, "relu2", up_bias, down_bias, gated=False),
        kernels.pack_experts(up.clone(), down.clone(), "relu2", gate_up_bias=up_bias, down_bias=down_bias, gated=False),
        experts.TiledExperts(up.clone(), down.clone(), "relu2", up_bias, down_bias, gated=False),
    ]
    for form in made:
        close(form(x, weights, ids), expected, TOLERANCES[dtype])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("size", [32, 80])
def test_quantized_experts_without_gates(quantization: kernels.Quantization, size: int) -> None:
    x, (weights, ids) = torch.randn(21, 128), routed(21, 6, 2)
    gate_up, down, *_ = random_experts(6, size, 128)
    up = gate_up[:, :size].clone()
    expected = experts_by_loops(x, weights, ids, torch.cat((up, up), dim=1), down, "relu")
    packed = kernels.pack_experts(up, down.clone(), "relu2", quantization=quantization, gated=False)
    close(packed(x, weights, ids), expected, 0.03 if quantization == "int8" else 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 13, 1000])
@pytest.mark.parametrize("spread", ["all to one", "one alone", "even"])
def test_none_one_and_all_tokens_for_an_expert(tokens: int, spread: str, dtype: torch.dtype) -> None:
    num_experts, x = 6, torch.randn(tokens, 64).to(dtype)
    ids = torch.full((tokens, 1), 4)
    if spread == "one alone":
        ids[tokens // 2] = 1
    elif spread == "even":
        ids[:, 0] = torch.arange(tokens) % num_experts
    weights = torch.rand(tokens, 1)
    gate_up, down, *_ = random_experts(num_experts, 48, 64, dtype)
    gate, up = (gate_up.double()[ids[:, 0]] @ x.double()[..., None]).chunk(2, dim=1)  # [tokens, size, 1]
    expected = weights * (down.double()[ids[:, 0]] @ (F.silu(gate) * up))[..., 0]
    for form in forms(gate_up, down, "silu", None, None):
        close(form(x, weights, ids), expected, TOLERANCES[dtype])


def test_the_experts_of_other_ranks_add_nothing() -> None:
    x, (weights, ids) = torch.randn(30, 32), routed(30, 8, 3)
    gate_up, down, *_ = random_experts(8, 16, 32)
    for form, (start, stop) in itertools.product(range(4), [(0, 3), (3, 4), (4, 8)]):
        part = forms(gate_up[start:stop], down[start:stop], "silu", None, None)[form]
        expected = experts_by_loops(x, weights, ids - start, gate_up[start:stop], down[start:stop], "silu")
        close(part(x, weights, ids - start), expected, 2e-6)
    for form_ in forms(gate_up, down, "silu", None, None):
        assert not form_(x, weights, ids + 8).any()
        assert form_(x[:0], weights[:0], ids[:0]).shape == (0, 32)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 96])
def test_quantized_experts(quantization: kernels.Quantization, dtype: torch.dtype, size: int) -> None:
    x, (weights, ids) = torch.randn(21, 128).to(dtype), routed(21, 6, 2)
    parts = random_experts(6, size, 128, dtype, bias=True)
    first, second = parts[0].clone(), parts[1].clone()
    packed = kernels.pack_experts(
        first, second, "silu", gate_up_bias=parts[2], down_bias=parts[3], quantization=quantization
    )
    expected = experts_by_loops(x, weights, ids, *parts[:2], "silu", *parts[2:])
    close(packed(x, weights, ids), expected, 0.03 if quantization == "int8" else 0.25)
    one_by_one = by_expert(lambda weight: linear.pack_linear(weight, quantization), *parts)
    close(packed(x, weights, ids), one_by_one(x, weights, ids).double(), 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "hidden"), [(16, 32), (20, 70), (48, 128)])
def test_int8_tiles_are_the_int8_linears(size: int, hidden: int, dtype: torch.dtype) -> None:
    """To rounding: an inner feature may fall on the next step where it lies between two."""
    x, (weights, ids) = torch.randn(15, hidden).to(dtype), routed(15, 5, 2)
    gate_up, down, *_ = random_experts(5, size, hidden)
    expected = experts_by_loops(x, weights, ids, gate_up, down, "silu")
    tiles = experts.TiledExperts(gate_up, down, "silu", None, None, True, "int8")
    one_by_one = by_expert(linear.Int8Linear, gate_up, down)
    close(one_by_one(x, weights, ids), expected, 0.03)
    close(tiles(x, weights, ids), one_by_one(x, weights, ids).double(), 1e-2)


@platforms_only
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_output_of_a_token_does_not_depend_on_batch_or_threads(kind: str) -> None:
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(kind, torch.float32)
    quantizations: dict[str, kernels.Quantization] = {"int8": "int8", "int4": "int4"}
    gate_up, down, *_ = random_experts(7, 192, 704, dtype)
    product = kernels.pack_experts(gate_up, down, "silu", quantization=quantizations.get(kind))
    if not isinstance(product, experts.TiledExperts):
        pytest.skip(f"{kind} is not ours on this processor")
    most = 1 if dtype == torch.float16 else 3  # products of gates and ups are finite
    x = (torch.randn(240, 704) * torch.logspace(-3, most, 240)[:, None]).to(dtype)
    weights, ids = routed(240, 7, 3)
    together = product(x, weights, ids)
    for rows in ([0], [17, 3], [239], range(0, 240, 5)):
        index = torch.tensor(rows)
        assert torch.equal(product(x[index], weights[index], ids[index]), together[index])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            assert torch.equal(product(x, weights, ids), together)
            assert torch.equal(product(x[:2], weights[:2], ids[:2]), together[:2])
    finally:
        torch.set_num_threads(threads)


def test_a_token_that_is_not_a_number_harms_no_other() -> None:
    x, (weights, ids) = torch.randn(5, 64), routed(5, 4, 2)
    x[1, 5] = torch.nan
    gate_up, down, *_ = random_experts(4, 16, 64)
    for form in forms(gate_up, down, "silu", None, None):
        out = form(x, weights, ids)
        assert out[1].isnan().all()
        assert not out[[0, 2, 3, 4]].isnan().any()


def test_packing_takes_the_memory_of_the_weights() -> None:
    gate_up, down, *_ = random_experts(3, 32, 64)
    packed = experts.TiledExperts(gate_up, down, "silu", None, None, gated=True)
    assert packed._weights[0].data_ptr() == gate_up.data_ptr()
    assert packed._weights[3].data_ptr() == down.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_an_expert_moves_to_another_place(dtype: torch.dtype, bias: bool) -> None:
    """Bit for bit the same as if its weights had been there from the start; its neighbours stay as they are."""
    here, there = (random_experts(3, 32, 64, dtype, bias=bias) for _ in range(2))
    mixed = [None if mine is None else mine.clone() for mine in here]
    for mine, theirs in zip(mixed, there, strict=True):
        if mine is not None and theirs is not None:
            mine[1] = theirs[2]
    x, (weights, ids) = torch.randn(20, 64).to(dtype), routed(20, 3, 2)
    for old, source, expected in zip(*(movable(*weights) for weights in (here, there, mixed)), strict=True):
        before = [part.clone() for part in source.state(2)]
        received = [part.clone() for part in before]
        old.restore(1, received)
        for part in received:  # as a buffer that is used again
            part.zero_()
        assert torch.equal(old(x, weights, ids), expected(x, weights, ids))
        assert all(map(torch.equal, old.state(1), before))
        sizes = {tuple(part.nbytes for part in old.state(place)) for place in range(3)}
        assert len(sizes) == 1
        assert all(part.is_contiguous() for part in old.state(0))


def movable(
    gate_up: Tensor | None, down: Tensor | None, gate_up_bias: Tensor | None, down_bias: Tensor | None
) -> list[kernels.PackedExperts]:
    """All `forms`, the quantized ones, and the forms for processors without our own products."""
    assert gate_up is not None
    assert down is not None
    biases = [None if bias is None else bias.clone() for bias in (gate_up_bias, down_bias)]
    made = forms(gate_up.clone(), down.clone(), "silu", biases[0], biases[1])
    packs: list[Callable[[Tensor], kernels.PackedLinear]] = [linear.Int8Linear, linear.Int4Linear]
    if isa.has("avx512_vnni"):
        packs.append(linear.Int8OneDNNLinear)
    if isa.has("avx512_bf16") or gate_up.dtype == torch.float32:
        packs.append(linear.OneDNNLinear)
    for pack in packs:
        biases = [None if bias is None else bias.clone() for bias in (gate_up_bias, down_bias)]
        made.append(by_expert(pack, gate_up, down, *biases))
    quantizations: tuple[kernels.Quantization, ...] = ("int8", "int4")
    for quantization in quantizations:
        biases = [None if bias is None else bias.clone() for bias in (gate_up_bias, down_bias)]
        made.append(
            experts.TiledExperts(gate_up.clone(), down.clone(), "silu", biases[0], biases[1], True, quantization)
        )
    return made


def changed_experts(
    x: Tensor,
    ids: Tensor,
    parts: Sequence[Any],
    slots: Tensor,
    ranks: Sequence[int],
    *,
    gated: bool = True,
    **options: Any,
) -> tuple[kernels.ExpertChanges, list[list[Any]]]:
    """Random changes by adapters of these ranks, which do not change some experts; and for each adapter, the experts
    with its changes, in float64. `parts` are gates and ups, downs, and the biases of both or None."""
    num_experts, hidden, size = parts[1].shape
    merged: list[list[Any]] = [[part if part is None else part.double() for part in parts] for _ in ranks]
    pools, inputs = list[Any](), examples.Inputs(torch.device("cpu"), x.dtype)
    of_slots = [rank * ((slot + expert) % 4 > 0) for slot, rank in enumerate(ranks) for expert in range(num_experts)]
    for number, widths in enumerate(((size, size) if gated else (size,), (hidden,))):
        pool = examples.low_rank_pool(inputs, parts[number].shape[2], widths, of_slots, **options)
        pools.append(pool)
        for slot, expert in itertools.product(range(len(ranks)), range(num_experts)):
            at, weight, bias = slot * num_experts + expert, merged[slot][number], merged[slot][number + 2]
            delta = torch.cat(
                [
                    pool.b[first : first + rank, :width].double().T @ pool.a[first : first + rank].double()
                    for (first, rank), width in zip(pool.slots[at].tolist(), widths, strict=True)
                ]
            )
            vector = int(pool.vectors[at])
            scale = torch.ones(sum(widths)) if pool.scale is None or vector < 0 else pool.scale[vector]
            added = torch.zeros(sum(widths)) if pool.bias is None or vector < 0 else pool.bias[vector]
            weight[expert] = scale[:, None] * (weight[expert] + delta)
            if bias is not None:
                bias[expert] = scale * bias[expert] + added
            else:
                assert not added.any()
    rows = kernels.AdapterRows.of(slots, len(ranks))
    return kernels.ExpertChanges.of(pools[0], pools[1], x, ids, rows, num_experts), merged


def check_changes(
    form: Callable[..., Tensor],
    x: Tensor,
    routes: tuple[Tensor, Tensor],
    slots: Tensor,
    changes: kernels.ExpertChanges,
    expected: Sequence[Tensor],
    tolerance: float,
) -> None:
    """`expected` are the results of all tokens with each adapter."""
    plain, found = form(x, *routes), form(x, *routes, changes)
    assert found.dtype == x.dtype
    if dispatch.PLATFORMS:
        assert torch.equal(found[slots < 0], plain[slots < 0])
    else:  # torch's activation of a number depends on its place in the tensor
        close(found[slots < 0], plain[slots < 0].double(), 1e-6)
    for slot, every in enumerate(expected):
        close(found[slots == slot], every[slots == slot], tolerance)
        assert not torch.equal(found[slots == slot], plain[slots == slot])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tokens", "num_experts", "top_k", "size", "hidden"), SHAPES[2:4])
@pytest.mark.parametrize("options", [{}, {"has_scale": True, "has_bias": True}])
def test_changes_by_adapters_are_those_of_merged_weights(
    tokens: int, num_experts: int, top_k: int, size: int, hidden: int, options: dict[str, bool], dtype: torch.dtype
) -> None:
    x, slots = torch.randn(tokens, hidden).to(dtype), torch.arange(tokens) % 4 - 1
    weights, ids = routed(tokens, num_experts + 1, top_k)
    ids = ids - 1  # of another rank
    parts = random_experts(num_experts, size, hidden, dtype, bias=bool(options))
    changes, merged = changed_experts(x, ids, parts, slots, (16, 3, 8), **options)
    expected = [experts_by_loops(x, weights, ids, each[0], each[1], "silu", each[2], each[3]) for each in merged]
    for form in forms(*parts[:2], "silu", *parts[2:]):
        check_changes(form, x, (weights, ids), slots, changes, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("pools", ["gate_up", "down"])
def test_changes_of_one_matrix_by_adapters(pools: str) -> None:
    x, slots, (weights, ids) = torch.randn(20, 40), torch.arange(20) % 3 - 1, routed(20, 5, 3)
    parts = random_experts(5, 20, 40)
    changes, merged = changed_experts(x, ids, parts, slots, (5, 8))
    changes = changes._replace(gate_up=None) if pools == "down" else changes._replace(down=None)
    matrices = [(each[0], parts[1]) if pools == "gate_up" else (parts[0], each[1]) for each in merged]
    expected = [experts_by_loops(x, weights, ids, first, second, "silu") for first, second in matrices]
    for form in forms(*parts[:2], "silu", None, None):
        check_changes(form, x, (weights, ids), slots, changes, expected, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.03), ("int4", 0.25), (None, 0.03)])
@pytest.mark.parametrize("gated", [True, False])
def test_changes_of_quantized_experts_by_adapters(
    quantization: kernels.Quantization | None, tolerance: float, gated: bool, dtype: torch.dtype
) -> None:
    """None: FP8 as it is published."""
    x, slots, (weights, ids) = torch.randn(21, 128).to(dtype), torch.arange(21) % 3 - 1, routed(21, 6, 2)
    gate_up, down, *_ = random_experts(6, 64, 128, dtype)
    gate_up = gate_up if gated else gate_up[:, :64].clone()
    if quantization is None:
        inputs, form = examples.Inputs(torch.device("cpu"), dtype), kernels.QuantizedFormat("fp8", 32)
        stacks = [examples.random_weight(inputs, form, 6, *shape) for shape in (gate_up.shape[1:], down.shape[1:])]
        gate_up, down = (stack.dequantize().to(dtype) for stack in stacks)
        packed = kernels.pack_experts(stacks[0], stacks[1], "relu2", gated=gated)
        assert isinstance(packed, experts.CodedExperts)
    else:
        given = gate_up.clone(), down.clone(), "relu2"
        packed = kernels.pack_experts(*given, quantization=quantization, gated=gated)
    changes, merged = changed_experts(x, ids, (gate_up, down, None, None), slots, (16, 5), gated=gated)
    twice = [(first if gated else torch.cat((first, first), dim=1), second) for first, second, *_ in merged]
    activation = "relu2" if gated else "relu"
    expected = [experts_by_loops(x, weights, ids, *each, activation) for each in twice]
    check_changes(packed, x, (weights, ids), slots, changes, expected, tolerance)


@platforms_only
def test_a_changed_token_depends_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    x, slots, (weights, ids) = torch.randn(70, 40), torch.arange(70) % 3 - 1, routed(70, 5, 3)
    gate_up, down, *_ = random_experts(5, 20, 40)
    form = kernels.pack_experts(gate_up.clone(), down.clone(), "silu")
    changes, _ = changed_experts(x, ids, (gate_up, down, None, None), slots, (16, 8))
    whole = form(x, weights, ids, changes)
    one = slice(13, 14)
    assert torch.equal(form(x[one], weights[one], ids[one], changes.of_rows(one)), whole[one])
    monkeypatch.setattr(cpu, "_PAIRS_AT_ONCE", 30)
    assert torch.equal(form(x, weights, ids, changes), whole)


@platforms_only
def test_changes_by_adapters_are_replayed() -> None:
    """With other adapters, experts and inputs."""
    gate_up, down, *_ = random_experts(5, 20, 40)
    form = kernels.pack_experts(gate_up.clone(), down.clone(), "silu")
    steps = []
    for number in range(2):
        x, (weights, ids), slots = torch.randn(9, 40), routed(9, 5, 3), torch.arange(9) % (3 - number) - 1 + number
        rows = kernels.AdapterRows.of(slots, 2)
        steps.append((x, weights, ids, rows.order, rows.starts))
    pools, _ = changed_experts(x, ids, (gate_up, down, None, None), slots, (16, 8))

    def run(x: Tensor, weights: Tensor, ids: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        of_step = kernels.AdapterRows(order, starts)
        return form(x, weights, ids, kernels.ExpertChanges.of(pools.gate_up, pools.down, x, ids, of_step, 5))

    expected, given, out = run(*steps[1]), [each.clone() for each in steps[0]], torch.empty(9, 40)
    with OpReplay() as recorded:
        out.copy_(run(*given))
    for each, other in zip(given, steps[1], strict=True):
        each.copy_(other)
    recorded.replay()
    assert torch.equal(out, expected)
