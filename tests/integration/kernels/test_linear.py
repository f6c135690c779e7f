"""Packed matmuls against `F.linear` by the weights that they represent."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.engine.architecture.quantization.form import INT4_GROUPS
from quire.kernels import isa, linear, packed, packed_state
from tests.integration.kernels.conftest import platforms_only
from tests.integration.kernels.test_operations import activated

SHAPES = [(1, 1, 32), (3, 5, 32), (7, 33, 64), (13, 96, 96), (33, 64, 256), (50, 40, 288), (2, 200, 640)]
"""Rows, output and input features."""
ODD_SHAPES = [(1, 7, 1), (5, 31, 7), (6, 70, 333), (14, 45, 1027)]
"""The same, with inputs that fill neither words nor pieces. 4-bit weights have groups."""


def close(out: Tensor, expected: Tensor, tolerance: float) -> None:
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    assert (out.double() - expected.double()).norm() <= tolerance * (1 + expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "outs", "ins"), SHAPES + ODD_SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_full_precision_is_the_plain_product(
    rows: int, outs: int, ins: int, dtype: torch.dtype, with_bias: bool
) -> None:
    x, weight = torch.randn(rows, ins).to(dtype), torch.randn(outs, ins).to(dtype)
    bias = torch.randn(outs).to(dtype) if with_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    packs: list[Callable[[Tensor], kernels.PackedLinear]] = [
        kernels.pack_linear,
        linear.PlainLinear,
        linear.TiledLinear,
    ]
    # Without AVX-512, oneDNN takes no bfloat16.
    if dtype == torch.float32 or (dtype == torch.bfloat16 and isa.has("avx512f")):
        packs.append(linear.OneDNNLinear)
    for pack in packs:
        close(pack(weight)(x, bias), expected, tolerance)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "outs", "ins"), SHAPES + ODD_SHAPES)
def test_float32_by_weights_of_16_bits_is_that_by_wide_weights(
    rows: int, outs: int, ins: int, stored: torch.dtype, implementation: str
) -> None:
    """To the last bit; the reference's products are torch's, which depend on a matrix's place in memory."""
    x, weight, bias = torch.randn(rows, ins), torch.randn(2 * outs, ins).to(stored), torch.randn(2 * outs)
    exact = F.linear(x.double(), weight.double())
    for activation, each in itertools.product(("", "silu"), (None, bias)):
        narrow, wide = (linear.TiledLinear(part, activation) for part in (weight, weight.float()))
        assert packed_state.tensors_of(narrow)[0].dtype == stored
        found, expected = narrow(x, each), wide(x, each)
        product = exact if each is None else exact + each
        close(found, (activated(product, activation) if activation else product).float(), 1e-6)
        assert implementation == "reference" or torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "outs", "ins"), SHAPES[1:] + ODD_SHAPES[1:])
def test_int8_is_exact_on_the_rounded_numbers(rows: int, outs: int, ins: int, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(rows, ins).to(dtype), torch.randn(outs, ins), torch.randn(outs).to(dtype)
    x_bytes, x_scales = packed.quantize_rows(x)
    packs: list[Callable[[Tensor], kernels.PackedLinear]] = [linear.Int8Linear]
    if isa.has("avx512_vnni"):
        packs.append(linear.Int8OneDNNLinear)
    for pack in packs:
        bytes_, scales = packed.quantize_weight(weight)
        sums = (x_bytes.double() - packed.INT8_ZERO) @ bytes_.double().T
        expected = (sums * x_scales[:, None] * scales + bias).to(dtype)
        close(pack(weight)(x, bias), expected, {torch.float32: 4e-6}.get(dtype, 1e-2))
        close(pack(weight)(x, bias), F.linear(x.float(), weight, bias.float()).to(dtype), 0.03)
        close(pack(weight)(x, None), (expected.double() - bias.double()).to(dtype), 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "outs", "ins"), SHAPES)
def test_int4_is_the_product_of_the_rounded_groups(rows: int, outs: int, ins: int, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(rows, ins).to(dtype), torch.randn(outs, ins), torch.randn(outs).to(dtype)
    group = next(size for size in INT4_GROUPS if ins % size == 0)
    halves, scales, zeros = packed.quantize_groups(weight, group)
    rounded = (halves.view(outs, -1, group) * scales[..., None] + zeros[..., None]).flatten(1)
    assert (rounded - weight).abs().max() <= scales.max() / 2 + 1e-6
    x_bytes, x_scales = packed.quantize_rows(x.reshape(-1, group))
    rounded_x = ((x_bytes.float() - packed.INT8_ZERO) * x_scales[:, None]).view(x.shape)
    expected = F.linear(rounded_x, rounded, bias.float()).to(dtype)
    close(kernels.pack_linear(weight, "int4")(x, bias), expected, {torch.float32: 4e-6}.get(dtype, 1e-2))
    of_floats = F.linear(x.float(), rounded, bias.float())
    assert (expected - of_floats).abs().max() <= 0.02 * (x.norm() * rounded.norm() + bias.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size", "ins"), [(1, 1, 32), (3, 5, 64), (14, 24, 96), (33, 40, 256)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai", "silu_7"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_gated_products_are_the_product_and_its_activation(
    rows: int, size: int, ins: int, dtype: torch.dtype, activation: str, quantization: kernels.Quantization | None
) -> None:
    x, weight = torch.randn(rows, ins).to(dtype), torch.randn(2 * size, ins).to(dtype)
    bias = torch.randn(2 * size).to(dtype)
    gated, plain = (
        kernels.pack_gated(weight.clone(), activation, quantization),
        kernels.pack_linear(weight, quantization),
    )
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for each in (None, bias):
        close(gated(x, each), activated(plain(x, each), activation).to(dtype), tolerance)
        separate = gated.gates_and_ups(x, each)
        close(separate, plain(x, each).to(separate.dtype), tolerance)
        assert torch.equal(kernels.act_mul(separate, activation).to(dtype), gated(x, each))
    larger = packed_state.tensors_of(kernels.pack_gated(weight * 2, activation, quantization))
    for mine, other in zip(packed_state.tensors_of(gated), larger, strict=True):
        assert mine.shape == other.shape
    twice = kernels.pack_linear(weight * 2, quantization)(x, bias)
    found = packed_state.with_tensors(gated, larger)(x, bias)
    close(found, activated(twice, activation).to(dtype), tolerance)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(dtype, None) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    + [(torch.float32, "int8"), (torch.bfloat16, "int8"), (torch.float32, "int4"), (torch.float16, "int4")],
)
def test_empty_input_and_independence_of_batch_and_threads(
    dtype: torch.dtype, quantization: kernels.Quantization | None, implementation: str
) -> None:
    """A row's product does not depend on other rows: to the bit, where the matmul is our own."""
    product = kernels.pack_linear(torch.randn(176, 704).to(dtype), quantization)
    x = (torch.randn(240, 704) * torch.logspace(-3, 3, 240)[:, None]).to(dtype)
    assert product(x[:0], None).shape == (0, 176)
    together = product(x, None)
    is_ours = implementation == "cpu" and isinstance(
        product, linear.TiledLinear | linear.Int8Linear | linear.Int4Linear
    )
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for first, count in itertools.product((0, 17, 200), (1, 2, 5, 9, 13, 40)):
        alone = product(x[first : first + count], None)
        if is_ours:
            assert torch.equal(alone, together[first : first + count])
        else:
            for mine, other in zip(alone, together[first : first + count], strict=True):
                torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3, 5) if is_ours else ():
            torch.set_num_threads(number)
            assert torch.equal(product(x, None), together)
            assert torch.equal(product(x[:1], None), together[:1])
    finally:
        torch.set_num_threads(threads)


def test_rows_and_weights_of_zeros_stay_zero() -> None:
    weight = torch.randn(32, 64)
    weight[3] = 0
    for quantization in ("int8", "int4"):
        product = kernels.pack_linear(weight, quantization)
        assert not product(torch.zeros(2, 64), None).any()
        assert not product(torch.randn(2, 64), None)[:, 3].any()


@platforms_only
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 40), columns=st.integers(1, 300), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e20]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rounding_is_the_references(rows: int, columns: int, scale: float, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, columns) * scale).to(dtype)
    compiled: Callable[[Tensor], tuple[Tensor, Tensor]] = linear._quantize_rows
    for one, other in zip(compiled(x), packed.quantize_rows(x), strict=True):
        assert torch.equal(one, other)


@platforms_only
@settings(max_examples=60, deadline=None)
@given(outs=st.integers(1, 70), ins=st.integers(1, 90), gated=st.booleans(), data=st.data())
def test_compiled_packing_is_the_references(outs: int, ins: int, gated: bool, data: st.DataObject) -> None:
    words = {torch.float32: (1,), torch.bfloat16: (1, 2), torch.uint8: (1, 4)}
    dtype, per_word = data.draw(st.sampled_from([(dtype, count) for dtype in words for count in words[dtype]]))
    weight = torch.randint(0, 256, (outs * (1 + gated), ins)).to(dtype)
    assert torch.equal(linear._pack_tiles(weight, per_word, gated), packed.pack_tiles(weight, per_word, gated))


@platforms_only
@settings(max_examples=60, deadline=None)
@given(outs=st.integers(1, 70), groups=st.integers(1, 4), gated=st.booleans(), data=st.data())
def test_compiled_int4_tiles_are_the_references(outs: int, groups: int, gated: bool, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    group = data.draw(st.sampled_from(INT4_GROUPS))
    weight = torch.randn(outs * (1 + gated), groups * group, generator=torch.Generator().manual_seed(outs)).to(dtype)
    weight[outs // 2] = 0
    assert torch.equal(linear._pack_int4_tiles(weight, group, gated), packed.pack_int4_tiles(weight, group, gated))


@platforms_only
@settings(max_examples=60, deadline=None)
@given(outs=st.integers(1, 70), ins=st.integers(1, 90), gated=st.booleans(), data=st.data())
def test_compiled_int8_tiles_are_the_references(outs: int, ins: int, gated: bool, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    weight = torch.randn(outs * (1 + gated), ins, generator=torch.Generator().manual_seed(outs * ins)).to(dtype)
    weight[outs // 2] = 0
    for one, other in zip(linear.pack_int8_tiles(weight, gated), packed.pack_int8_tiles(weight, gated), strict=True):
        assert torch.equal(one, other)


@platforms_only
def test_compiled_packing_refuses_what_it_cannot_lay_out() -> None:
    weight = torch.zeros(5, 8, dtype=torch.uint8)
    for per_word in (0, 2, 3, 9):
        with pytest.raises(RuntimeError, match=f"tiles of Byte with {per_word} per word are not supported"):
            linear._pack_tiles(weight, per_word)
    for pack in (linear._pack_tiles, linear.pack_int8_tiles):
        with pytest.raises(RuntimeError, match="the numbers of gates and ups must be equal, got 5"):
            pack(weight.float(), gated=True)
    with pytest.raises(RuntimeError, match="groups of 24 4-bit weights are not supported"):
        linear._pack_int4_tiles(torch.zeros(5, 48), 24)
    with pytest.raises(RuntimeError, match="inputs must be whole groups of 32"):
        linear._pack_int4_tiles(torch.zeros(5, 48), 32)


@platforms_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_quantization_is_the_references(dtype: torch.dtype) -> None:
    weight = torch.randn(67, 45).to(dtype)
    weight[5] = 0
    for one, other in zip(linear._quantize_weight(weight), packed.quantize_weight(weight), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_the_largest_numbers_of_8_bits_do_not_saturate(rows: int) -> None:
    """Two of their products fill 16 bits all but one."""
    signs = torch.ones(3, 512)
    signs[1, ::2] = signs[2, ::4] = -1
    assert torch.equal(
        linear.Int8Linear(signs * 127)(signs[:1].expand(rows, -1) * 127, None), signs.sum(1).expand(rows, 3) * 127**2
    )
    assert torch.equal(
        linear.Int8Linear(signs * 127)(signs[1:2] * -127, None), (signs * -signs[1]).sum(1)[None] * 127**2
    )


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_row_that_is_not_a_number_stays_none(quantization: kernels.Quantization) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    out = kernels.pack_linear(torch.randn(8, 64), quantization)(x, None)
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "rows"), [(1, 3), (4, 1), (4, 9)])
def test_groups_of_inputs_have_weights_of_their_own(
    groups: int, rows: int, dtype: torch.dtype, implementation: str
) -> None:
    x, weight, other = (torch.randn(shape).to(dtype) for shape in ((rows, groups * 48), *[(groups * 40, 48)] * 2))
    tensors = packed_state.tensors_of(kernels.pack_groups(weight, groups))
    packed = packed_state.with_tensors(kernels.pack_groups(other, groups), tensors)
    parts = zip(x.double().chunk(groups, dim=1), weight.double().chunk(groups), strict=True)
    expected = torch.cat([one @ by.T for one, by in parts], dim=1)
    step = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(packed(x, None).double(), expected, rtol=2 * step, atol=10 * step)
    if implementation == "cpu" and type(kernels.pack_linear(weight)) is linear.TiledLinear:
        assert torch.equal(packed(x[-1:], None), packed(x, None)[-1:])  # regardless of other rows
