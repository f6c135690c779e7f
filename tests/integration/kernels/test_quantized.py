"""Products by weights in few bits, against products by the weights that they represent."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.kernels import coded_words, experts, isa, linear, packed, packed_state, quantized
from quire.kernels.low_rank import AdapterRows, LowRankPool
from quire.kernels.quantized import VALUES, QuantizedWeight, Rounding
from tests.integration.kernels.conftest import platforms_only, reference_only
from tests.integration.kernels.test_experts import experts_by_loops
from tests.integration.kernels.test_operations import activated

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""float32's tolerance includes rounding inputs to 16 bits."""
LAYOUTS = [(1, 0, 7), (1, 0, 333), (1, 2, 40), (3, 1, 96), (4, 2, 512), (1, 1, 1024), (5, 2, 40)]
"""Groups; factors, of which scales of features are none; and inputs."""
SIZES = [(1, 7), (2, 64), (5, 31), (14, 70)]
"""Rows and output features."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Tolerances are for sums that are about as large as their terms, which does not hold for every few random
    numbers."""
    torch.manual_seed(0)


def random_weight(
    values: str, *shape: int, groups: int = 1, factors: int = 1, dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Factors are numbers that float16 represents, as in checkpoints."""
    codes = torch.randint(0, len(VALUES[values]), shape, dtype=torch.uint8)
    codes = torch.where(VALUES[values].isnan()[codes.int()], 1, codes)
    scales = (torch.rand(*shape[:-1], groups) * torch.logspace(-1, 0, shape[-2])[:, None]).half().float()
    offsets = torch.randint(-16, 1, scales.shape).float() if factors == 2 else None
    return QuantizedWeight(values, dtype, codes, scales, offsets)


def close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    assert out.shape == expected.shape
    assert (out.double() - expected.double()).norm() <= TOLERANCES[dtype] * (1 + expected.double().norm())


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("groups", "factors", "ins"), LAYOUTS)
def test_a_product_is_that_by_the_weight(values: str, groups: int, factors: int, ins: int) -> None:
    for (rows, outs), dtype in itertools.product(SIZES, TOLERANCES):
        weight = random_weight(values, outs, ins, groups=groups, factors=factors)
        x, bias = torch.randn(rows, ins).to(dtype), torch.randn(outs).to(dtype)
        expected = F.linear(x.double(), weight.dequantize().double())
        product = kernels.pack_linear(replace(weight, dtype=dtype))
        assert type(product) is linear.CodedLinear
        close(product(x, None), expected, dtype)
        close(product(x, bias), expected + bias, dtype)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("groups", "factors", "ins"), LAYOUTS)
def test_rows_are_those_of_the_weight(values: str, groups: int, factors: int, ins: int) -> None:
    """To the last bit, also with factors that float16 does not represent."""
    weight = random_weight(values, 70, ins, groups=groups, factors=factors)
    weight = replace(weight, scales=weight.scales * torch.rand(70, groups), activations="int8")
    columns = torch.randperm(ins)
    rows, expected = torch.tensor([69, 0, 33, 33]), weight.dequantize()
    assert kernels.pack_embedding(weight).rows(rows)[:, :ins].equal(expected[rows])
    assert coded_words.unpack_words(coded_words.pack_words(replace(weight, wide=True)).rows(rows)).equal(expected[rows])
    found = kernels.pack_embedding(replace(weight, columns=columns)).rows(rows)
    assert found[:, columns].equal(expected[rows])


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("groups", "factors"), [(1, 0), (3, 1), (3, 2)])
def test_a_gated_product_is_the_activation_of_the_product(values: str, groups: int, factors: int) -> None:
    for (rows, size), dtype in itertools.product([(1, 5), (3, 24), (14, 40)], TOLERANCES):
        weight = random_weight(values, 2 * size, 96, groups=groups, factors=factors)
        weight = replace(weight, scales=(weight.scales / VALUES[values].nan_to_num().abs().max()).half().float())
        x, bias = torch.randn(rows, 96).to(dtype), torch.randn(2 * size).to(dtype)
        both = F.linear(x.float(), weight.dequantize(), bias.float())
        gated = kernels.pack_gated(weight, "silu")
        close(gated(x, bias), activated(both, "silu"), dtype)
        assert torch.equal(kernels.act_mul(gated.gates_and_ups(x, bias), "silu").to(dtype), gated(x, bias))


@platforms_only
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("groups", "factors"), [(1, 0), (6, 1), (6, 2), (2, 1)])
def test_a_row_is_independent_of_batch_and_threads(values: str, groups: int, factors: int) -> None:
    dtype = torch.bfloat16 if values == "fp8" and factors == 1 else torch.float32
    product = kernels.pack_linear(random_weight(values, 80, 768, groups=groups, factors=factors, dtype=dtype))
    x = (torch.randn(110, 768) * torch.logspace(-3, 3, 110)[:, None]).to(dtype)
    assert product(x[:0], None).shape == (0, 80)
    together = product(x, None)
    for first, count in itertools.product((0, 17, 90), (1, 2, 3, 4, 5, 9, 20)):
        assert torch.equal(product(x[first : first + count], None), together[first : first + count])
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert torch.equal(product(x, None), together)
            assert torch.equal(product(x[:1], None), together[:1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("rows", [1, 9])
def test_inputs_of_any_size(values: str, rows: int) -> None:
    """Sums of the largest codes by the largest inputs, small inputs beside a large one, and NaN and infinity."""
    table = VALUES[values].nan_to_num()
    codes = torch.full((40, 512), int(table.argmax()), dtype=torch.uint8)
    scales, offsets = torch.ones(40, 2), torch.full((40, 2), -3.0)
    product = kernels.pack_linear(QuantizedWeight(values, torch.float32, codes, scales, offsets))
    for x in (torch.ones(rows, 512), -torch.rand(rows, 512) * 1e25, torch.zeros(rows, 512)):
        close(product(x, None), x @ (table[codes.int()] - 3).T, torch.float32)
    x = torch.randn(rows, 512)
    x[:, 7] = 1000.0
    weight = random_weight(values, 40, 512, groups=2)
    weight.codes[:, 7] = codes[0, 0]
    close(kernels.pack_linear(weight)(x, None), x @ weight.dequantize().T, torch.float32)
    for wrong in (torch.nan, torch.inf):
        x[0, 300] = wrong
        out = product(x, None)
        assert not out[0].isfinite().any()
        assert out[1:].isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [1, 9])
def test_each_code_is_its_number(rows: int, dtype: torch.dtype) -> None:
    """Also codes that processors might take for zero."""
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(8)[:, None].expand(-1, 8).clone()
    numbers = VALUES["fp8"][codes[:, 0].int()]
    codes[numbers.isnan()] = 0
    codes[:, 1:] = 0
    x = torch.ones(rows, 8, dtype=dtype)
    product = kernels.pack_linear(QuantizedWeight("fp8", dtype, codes, torch.ones(len(codes), 1)))
    torch.testing.assert_close(product(x, None), numbers.nan_to_num().to(dtype).expand(rows, -1), rtol=0, atol=0)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("values", ["int4", "int8"])
def test_columns_in_another_order_take_their_inputs(values: str, is_padded: bool) -> None:
    weight = random_weight(values, 40, 64, groups=4)
    inputs = 61 if is_padded else 64
    columns = torch.randperm(64).clamp(max=inputs)
    x, bias = torch.randn(5, inputs), torch.randn(40)
    plain = torch.zeros(40, 65).index_add(1, columns, weight.dequantize())[:, :inputs]
    product = kernels.pack_linear(replace(weight, columns=columns))
    close(product(x, bias), F.linear(x, plain, bias), torch.float32)
    gated = kernels.pack_gated(replace(weight, columns=columns), "silu")
    close(gated(x, None), activated(F.linear(x, plain), "silu"), torch.float32)
    assert torch.equal(kernels.act_mul(gated.gates_and_ups(x, None), "silu"), gated(x, None))
    pool = LowRankPool.allocate(1, 3, inputs, (20, 20), torch.float32, x.device, largest_rank=3)
    changes = [None, (torch.randn(3, inputs), torch.randn(20, 3))]
    pool.assign(0, 0, changes)
    found = gated.with_low_rank(x, None, pool, AdapterRows.of(torch.zeros(5, dtype=torch.int64), 1))
    changed = plain + torch.cat((torch.zeros(20, inputs), pool.b[:, :20].T @ pool.a))
    close(found, activated(F.linear(x, changed), "silu"), torch.float32)
    other = kernels.pack_linear(replace(random_weight(values, 40, 64, groups=4), columns=columns.flip(0)))
    other = packed_state.with_tensors(other, packed_state.tensors_of(product))
    assert torch.equal(other(x, bias), product(x, bias))


@pytest.mark.parametrize("outs", [6, 70])
def test_integers_whose_inputs_may_be_rounded_are_not_rounded_again(outs: int) -> None:
    weight = replace(random_weight("int8", outs, 45), activations="int8")
    integers = weight.codes.view(torch.int8).double()
    x = torch.randn(5, 45)
    x_bytes, x_scales = packed.quantize_rows(x)
    sums = (x_bytes.double() - packed.INT8_ZERO) @ integers.T
    expected = sums * x_scales[:, None] * weight.scales[:, 0]
    products = [kernels.pack_linear(weight), linear.Int8Linear(weight)]
    if isa.has("avx512_vnni"):
        products.append(linear.Int8OneDNNLinear(weight))
    for product in products:
        assert not isinstance(product, linear.CodedLinear)
        close(product(x, None), expected, torch.float32)
    gated = kernels.pack_gated(weight, "silu")(x, None)
    assert (gated - activated(expected.float(), "silu")).norm() <= 1e-5 * (1 + gated.norm())
    for other in (
        replace(weight, activations=None),
        replace(weight, offsets=weight.scales),
        random_weight("fp8", 6, 45),
    ):
        assert not linear.rounds_inputs(other)


@pytest.mark.parametrize("zero", [0.0, -100.0])
def test_inputs_are_rounded_with_a_static_scale_and_zero_point(zero: float) -> None:
    rounding = torch.tensor([1 / 64, zero])
    weight = replace(random_weight("int8", 70, 333), activations="int8", rounding=rounding)
    integers, bias = weight.codes.view(torch.int8).double(), torch.randn(70)
    product = kernels.pack_linear(weight)
    assert type(product) is linear.Int8Linear
    for rows, dtype in itertools.product((1, 9), TOLERANCES):
        x = (torch.randn(rows, 333) * 2).to(dtype)  # some are cut off
        x[0, :2] = torch.tensor([torch.inf, -torch.inf])
        steps = (x.double() * 64 + zero).round().clamp(-128, 127) - zero
        expected = steps @ integers.T / 64 * weight.scales[:, 0]
        out = product(x, None)
        if dtype == torch.float32:  # sums are exact
            torch.testing.assert_close(out.double(), expected, rtol=3e-7, atol=0)
        close(out, expected, dtype)
        close(product(x, bias.to(dtype)), expected + bias, dtype)
        gated = kernels.pack_gated(replace(weight, scales=weight.scales / 128), "silu")(x, None)
        close(gated, activated(expected.float() / 128, "silu"), dtype)
    x[0, 0] = torch.nan
    assert product(x, None)[0].isnan().all()
    other = kernels.pack_linear(replace(weight, codes=weight.codes.flip(0), rounding=torch.tensor([1.0, 3.0])))
    other = packed_state.with_tensors(other, packed_state.tensors_of(product))
    assert torch.equal(other(x[1:], bias.to(dtype)), product(x[1:], bias.to(dtype)))


def test_static_scales_of_weights_in_groups() -> None:
    weight = random_weight("int8", 40, 64, groups=2, factors=2)
    x = torch.randint(-300, 300, (5, 64)) / 64
    expected = F.linear((x * 64 + 3).clamp(-128, 127) / 64 - 3 / 64, weight.dequantize())
    product = kernels.pack_linear(replace(weight, activations="int8", rounding=torch.tensor([1 / 64, 3.0])))
    close(product(x, None), expected, torch.float32)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("groups", "factors", "ins", "size"), [(1, 1, 384, 128), (3, 1, 96, 32), (2, 2, 128, 64)])
def test_4_bit_integers_whose_inputs_may_be_rounded(
    groups: int, factors: int, ins: int, size: int, gated: bool
) -> None:
    weight = replace(random_weight("int4", 70, ins, groups=groups, factors=factors), activations="int8")
    for rows, dtype in itertools.product((1, 9), TOLERANCES):
        x = torch.randn(rows, ins).to(dtype)
        x_bytes, x_scales = packed.quantize_rows(x.view(-1, size))
        rounded = ((x_bytes.float() - packed.INT8_ZERO) * x_scales[:, None]).view(x.shape)
        expected = F.linear(rounded.double(), weight.dequantize().double())
        if gated:
            out = kernels.pack_gated(replace(weight, scales=weight.scales / 8), "silu")(x, None)
            close(out, activated(expected.float() / 8, "silu"), dtype)
        else:
            product = kernels.pack_linear(weight)
            assert type(product) is linear.Int4Linear
            close(product(x, None), expected, dtype)
    for other in (replace(weight, columns=torch.arange(ins)), random_weight("int4", 6, 96, groups=4)):
        assert not linear.rounds_inputs(replace(other, activations="int8"))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("values", ["int4", "nf4", "fp8", "int8"])
def test_scales_of_any_size(values: str, gated: bool) -> None:
    """float16 factors have the power of two that a feature's need."""
    weight = random_weight(values, 64, 96, groups=3, factors=2)
    scales = torch.logspace(-18, 8, 64).log2().floor().exp2()[:, None] * torch.tensor([1.0, 0.375, 0.0])
    weight = replace(weight, scales=scales)
    x = torch.randn(3, 96)
    expected = F.linear(x, weight.dequantize())
    out = linear.pack_linear(weight)(x, None)
    close(out / scales[:, 0], expected / scales[:, 0], torch.float32)
    if gated:
        assert kernels.pack_gated(weight, "silu")(x, None).shape == (3, 32)


def random_experts(
    values: str, size: int, hidden: int, groups: tuple[int, int], factors: int
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Six experts, with weights about as large as a model's."""
    made = []
    for outs, ins, count in ((2 * size, hidden, groups[0]), (hidden, size, groups[1])):
        weight = random_weight(values, 6, outs, ins, groups=count, factors=factors)
        scales = weight.scales / VALUES[values].nan_to_num().abs().max() / ins**0.5
        made.append(replace(weight, scales=scales.half().float()))
    return made[0], made[1]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(
    ("size", "hidden", "groups", "factors", "kind"),
    [
        (48, 96, (3, 3), 1, experts.CodedExperts),
        (48, 96, (3, 1), 2, experts.CodedExperts),
        (21, 70, (1, 1), 0, experts.CodedExperts),
        (24, 64, (2, 3), 1, experts.ExpertByExpert),
    ],
)
def test_experts_are_those_of_the_weights(
    values: str, size: int, hidden: int, groups: tuple[int, int], factors: int, kind: type[kernels.PackedExperts]
) -> None:
    weights, ids = kernels.route(torch.randn(17, 6) * 2, 2, "softmax")
    gate_up, down = random_experts(values, size, hidden, groups, factors)
    biases = torch.randn(6, 2 * size), torch.randn(6, hidden)
    plain = gate_up.dequantize(), down.dequantize(), "silu"
    for dtype in TOLERANCES:
        x, first, second = torch.randn(17, hidden).to(dtype), biases[0].to(dtype), biases[1].to(dtype)
        product = kernels.pack_experts(gate_up, down, "silu", gate_up_bias=first, down_bias=second)
        assert type(product) is kind
        expected = experts_by_loops(x, weights, ids, *plain, first, second)
        close(product(x, weights, ids), expected, dtype)
    without = kernels.pack_experts(gate_up, down, "silu")
    x = torch.randn(3, hidden)
    close(without(x, weights[:3], ids[:3]), experts_by_loops(x, weights[:3], ids[:3], *plain), torch.float32)


@pytest.mark.parametrize("values", ["int4", "nf4", "fp8"])
def test_an_expert_moves_and_a_token_stands_alone(values: str, implementation: str) -> None:
    here, there = (kernels.pack_experts(*random_experts(values, 32, 64, (2, 1), 1), "silu") for _ in range(2))
    assert here.layout == there.layout
    x, (weights, ids) = torch.randn(20, 64), kernels.route(torch.randn(20, 6), 3, "softmax")
    for index in range(6):
        here.restore(index, [part.clone() for part in there.state(index)])
    together = here(x, weights, ids)
    assert torch.equal(together, there(x, weights, ids))
    if implementation == "cpu":
        for row in range(20):
            one = slice(row, row + 1)
            assert torch.equal(here(x[one], weights[one], ids[one]), together[one])


@pytest.mark.parametrize(("values", "size", "hidden", "groups"), [("int8", 21, 70, (1, 1)), ("int4", 64, 96, (3, 1))])
def test_integer_experts_whose_inputs_may_be_rounded(
    values: str, size: int, hidden: int, groups: tuple[int, int]
) -> None:
    gate_up, down = (replace(each, activations="int8") for each in random_experts(values, size, hidden, groups, 1))
    x, (weights, ids) = torch.randn(9, hidden), kernels.route(torch.randn(9, 6), 2, "softmax")
    product = kernels.pack_experts(gate_up, down, "silu")
    assert not isinstance(product, experts.CodedExperts)
    expected = experts_by_loops(x, weights, ids, gate_up.dequantize(), down.dequantize(), "silu")
    assert (product(x, weights, ids) - expected).norm() <= 0.03 * expected.norm()


def test_one_kind_of_weight_may_be_quantized_and_not_the_other() -> None:
    gate_up, down = random_experts("int4", 32, 64, (2, 1), 1)
    x, (weights, ids) = torch.randn(9, 64), kernels.route(torch.randn(9, 6), 2, "softmax")
    product = kernels.pack_experts(gate_up, down.dequantize(), "silu")
    expected = experts_by_loops(x, weights, ids, gate_up.dequantize(), down.dequantize(), "silu")
    close(product(x, weights, ids), expected, torch.float32)


def test_they_are_kept_in_files() -> None:
    """As plain data and tensors."""
    gate_up, down = random_experts("nf4", 32, 64, (2, 1), 1)
    weight = replace(random_weight("uint4", 40, 64, groups=2, factors=2), columns=torch.randperm(64))
    tensors: list[Tensor] = []
    x, (weights, ids) = torch.randn(9, 64), kernels.route(torch.randn(9, 6), 2, "softmax")
    product, mixture = kernels.pack_linear(weight), kernels.pack_experts(gate_up, down, "silu")
    plain = [packed_state.to_plain(each, tensors) for each in (product, mixture)]
    again, mixed = (packed_state.from_plain(each, tensors) for each in plain)
    assert torch.equal(again(x, None), product(x, None))
    assert torch.equal(mixed(x, weights, ids), mixture(x, weights, ids))


@reference_only
@pytest.mark.parametrize(
    "pack",
    [
        linear.CodedLinear,
        linear.CodedWordsLinear,
        lambda weight: linear.RoundedLinear(random_weight("fp8", 40, 64)),
        lambda weight: linear.GatheredLinear(linear.CodedLinear(weight), torch.randperm(64)),
        lambda weight: linear.StaticScaleLinear(linear.CodedLinear(weight), torch.rand(2)),
        lambda weight: linear.PackedGatedLinear(linear.CodedLinear(weight), "silu"),
        lambda weight: linear.PackedGroups([linear.CodedLinear(weight), linear.CodedLinear(weight)]),
        lambda weight: linear.Fp4Linear(replace(weight, global_scale=torch.rand(1) + 0.5)),
    ],
    ids=["coded", "words", "rounded", "gathered", "static", "gated", "groups", "fp4"],
)
def test_a_packed_weight_is_its_plain_data_and_tensors(pack: Callable[[QuantizedWeight], linear.PackedLinear]) -> None:
    """So that experts, each of which has its own, may take each other's tensors."""
    here, there = (pack(random_weight("e2m1", 40, 64, groups=4)) for _ in range(2))
    tensors: list[Tensor] = []
    plain = packed_state.to_plain(here, [])
    assert packed_state.to_plain(there, tensors) == plain
    x = torch.randn(9, 128 if isinstance(here, linear.PackedGroups) else 64)
    assert torch.equal(packed_state.from_plain(json.loads(json.dumps(plain)), tensors)(x, None), there(x, None))
    assert not torch.equal(here(x, None), there(x, None))


@reference_only
def test_the_plain_data_of_experts_of_their_own() -> None:
    gate_up, down = (replace(each, values="e2m1") for each in random_experts("nf4", 24, 64, (2, 3), 1))
    bias, x, (weights, ids) = torch.randn(6, 64), torch.randn(9, 64), kernels.route(torch.randn(9, 6), 2, "softmax")
    mixture, tensors = kernels.pack_experts(gate_up, down, "silu", down_bias=bias), list[Tensor]()
    assert type(mixture) is experts.ExpertByExpert
    plain = json.loads(json.dumps(packed_state.to_plain(mixture, tensors)))
    assert torch.equal(packed_state.from_plain(plain, tensors)(x, weights, ids), mixture(x, weights, ids))


@reference_only
def test_formats_of_onednn_are_only_copied() -> None:
    here, there = (linear.PackedGatedLinear(linear.OneDNNLinear(torch.randn(40, 64)), "silu") for _ in range(2))
    with pytest.raises(packed_state.NotPlain):
        packed_state.to_plain(here, [])
    x = torch.randn(9, 64)
    again = packed_state.with_tensors(here, packed_state.tensors_of(there))
    torch.testing.assert_close(again(x, None), there(x, None))


@reference_only
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("gated", [False, True])
def test_packing_keeps_the_weight(values: str, gated: bool) -> None:
    weight = random_weight(values, 70, 96, groups=3, factors=2)
    tiles = quantized.pack_coded(weight, gated)
    expected = packed.interleave_gated(weight.dequantize()) if gated else weight.dequantize()
    out = quantized.unpack_coded(tiles) * tiles.scales[:, None]
    torch.testing.assert_close(out[: len(expected)], expected)


@platforms_only
@settings(max_examples=100, deadline=None)
@given(
    outs=st.integers(1, 70),
    ins=st.integers(1, 300),
    group=st.sampled_from([8, 16, 24, 32, 128, 256]),
    bits=st.sampled_from([4, 8]),
    factors=st.integers(0, 2),
    wide=st.booleans(),
    gated=st.booleans(),
)
def test_compiled_tiles_are_the_references(
    outs: int, ins: int, group: int, bits: int, factors: int, wide: bool, gated: bool
) -> None:
    noise = torch.Generator().manual_seed(outs * ins)
    codes = torch.randint(1 << bits, (outs * (1 + gated), ins), generator=noise).to(torch.uint8)
    shape = factors, len(codes), -(-ins // group)
    scales, offsets = (*(torch.randn(shape, generator=noise) * 1000), None, None)[:2]
    form = group, bits, wide, gated
    mine, expected = (
        pack(codes, scales, offsets, *form) for pack in (linear._pack_coded_tiles, quantized.pack_coded_tiles)
    )
    assert torch.equal(mine, expected)


@platforms_only
def test_compiled_packing_refuses_what_it_cannot_lay_out() -> None:
    codes, scales = torch.zeros(5, 64, dtype=torch.uint8), torch.ones(5, 2)
    for group, bits in ((12, 4), (0, 8), (32, 5)):
        with pytest.raises(RuntimeError, match=f"groups of {group} codes of {bits} bits are not supported"):
            linear._pack_coded_tiles(codes, None, None, group, bits, False)
    for wrong in (scales[:4], scales[:, :1], scales.half(), scales[0]):
        for first, second in ((wrong, None), (scales, wrong)):
            with pytest.raises(RuntimeError, match="the factors do not match the codes"):
                linear._pack_coded_tiles(codes, first, second, 32, 4, False)
    with pytest.raises(RuntimeError, match="the numbers of gates and ups must be equal, got 5"):
        linear._pack_coded_tiles(codes, scales, None, 32, 4, False, True)
    with pytest.raises(RuntimeError, match="codes are bytes"):
        linear._pack_coded_tiles(codes.char(), scales, None, 32, 4, False)


@reference_only
def test_float16_scales_lose_what_is_least() -> None:
    """Nothing, if they are 8-bit floats times one number for each feature."""
    number = torch.rand(40, 1) * torch.logspace(-9, 9, 40)[:, None]
    exact = torch.rand(40, 6).clamp(min=0.02).to(torch.float8_e4m3fn).float() * number
    any_scales = torch.randn(40, 6)
    any_scales[3] = 0
    for scales in (exact, any_scales):
        factors = quantized.common_factor(scales, wide=False)[:, None]
        kept = (scales / factors).half().float() * factors
        torch.testing.assert_close(kept, scales, rtol=1e-6 if scales is exact else 2**-11, atol=0)


ROUNDINGS = {
    "int4": Rounding("int4", 32),
    "int4 with offsets": Rounding("int4", 32, has_offsets=True),
    "int8": Rounding("int8"),
    "fp8": Rounding("fp8"),
    "fp8 of blocks": Rounding("fp8", 32, rows=16),
    "mxfp4": Rounding("e2m1", 32, scales="e8m0"),
    "nvfp4": Rounding("e2m1", 16, scales="e4m3"),
}


@reference_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_weights_are_rounded_to_the_nearest_number(name: str, dtype: torch.dtype) -> None:
    rounding = ROUNDINGS[name]
    weight = (torch.randn(2, 40, 64) * torch.logspace(-3, 0, 40)[:, None]).to(dtype)
    weight[1, 3:5] = 0
    rounded = quantized.quantize(weight, rounding)
    assert rounded.dequantize().dtype == dtype
    grouped = weight.unflatten(-1, (rounded.scales.shape[-1], -1)).float()  # type: ignore[no-untyped-call]
    numbers = VALUES[rounding.values].nan_to_num().expand(*rounded.scales.shape, -1)
    if rounded.offsets is not None:
        numbers = numbers + rounded.offsets[..., None]
    numbers = numbers * rounded.scales[..., None]
    errors = (replace(rounded, dtype=torch.float32).dequantize() - weight.float()).abs()
    least = (grouped[..., None] - numbers[..., None, :]).abs().amin(-1).flatten(-2)
    assert (errors <= least + 2e-7 * weight.float().abs()).all()
    # Scales are as large as they must be, and no larger: the largest weight is cut by about half of a step.
    limit = {"int4": 0.6, "int8": 0.8, "fp8": 17, "e2m1": 1.4}[rounding.values]
    assert (errors <= (limit * rounded.scales).repeat_interleave(64 // rounded.scales.shape[-1], -1)).all()
    largest = numbers.abs().amax(-1)
    assert (largest <= 2.3 * grouped.abs().amax(-1))[grouped.abs().amax(-1) > 0].all() or rounding.rows > 1


@reference_only
def test_scales_are_of_their_types() -> None:
    weight = torch.randn(48, 64)
    powers = quantized.quantize(weight, ROUNDINGS["mxfp4"]).scales
    assert (powers.log2() % 1 == 0).all()
    unit = quantized.unit_of(weight.abs().max())
    eighths = quantized.quantize(weight, ROUNDINGS["nvfp4"]).scales / unit
    torch.testing.assert_close(eighths, eighths.to(torch.float8_e4m3fn).float(), rtol=1e-6, atol=0)
    assert 447 < eighths.max() < 449
    blocks = quantized.quantize(weight, ROUNDINGS["fp8 of blocks"]).scales
    assert (blocks.view(3, 16, 2) == blocks.view(3, 16, 2)[:, :1]).all()
    assert torch.equal(blocks[16], weight[16:32].view(16, 2, 32).abs().amax((0, 2)) / 448)
    halves = quantized.quantize(weight.bfloat16(), ROUNDINGS["int4"]).scales
    assert torch.equal(halves, halves.bfloat16().float())
    offsets = quantized.quantize(weight, ROUNDINGS["int4 with offsets"]).offsets
    assert offsets is not None
    assert torch.equal(offsets, offsets.round())


@reference_only
def test_a_number_in_the_middle_of_two_takes_the_even_code() -> None:
    weight = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0] + [0.0] * 21])
    rounded = quantized.quantize(weight, ROUNDINGS["mxfp4"])
    assert rounded.scales.tolist() == [[1.0]]
    assert rounded.dequantize()[0, :11].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -4]
