"""Products of 4-bit floats by 4-bit floats: the definition against the published format, and the Triton kernels, run by
Triton's interpreter, against the definition."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import fp4, linear, reference
from quire.kernels.fp4 import pack_fp4, widen_fp4
from quire.kernels.quantized import QuantizedWeight
from tests.fakes.interpreter import with_scales_of_8_bit_floats
from tests.integration.engine.checkpoints.quantized_tensors.layouts import E2M1, E4M3

pytest.importorskip("triton", reason="scripts/setup ci installs it")
kernels = importlib.import_module("quire.kernels.triton.fp4")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that are masked out

GLOBAL_SCALE = torch.tensor(448.0 * 6 / 7.3)


@pytest.fixture(autouse=True, scope="module")
def implementation() -> Iterator[str]:
    """The kernels are called by name, not by device."""
    with pytest.MonkeyPatch.context() as patch:
        with_scales_of_8_bit_floats(patch)
        yield "triton"


def nearest(numbers: Tensor, table: Tensor) -> Tensor:
    """The codes of the nearest numbers of a table in ascending order, of two the even one, in float64."""
    distances = (numbers.double()[..., None] - table).abs()
    closest = distances == distances.amin(-1, keepdim=True)
    codes = torch.arange(len(table)).expand(closest.shape)
    return torch.where(closest, codes + (codes % 2) * 1000, 10_000).amin(-1) % 1000


def published(x: Tensor, global_scale: Tensor) -> Tensor:
    """Activations rounded to NVFP4: `x` as multiples of the scale of their group, which is `largest / 6` in units of `1
    / global_scale`, rounded to e4m3."""
    grouped = x.double().unflatten(1, (-1, 16))  # type: ignore[no-untyped-call]
    finite = E4M3[:127]
    codes = nearest(grouped.abs().amax(-1).float() / 6 * global_scale, finite)
    scales = finite[codes] / global_scale.double()
    numbers = torch.where(scales[..., None] > 0, grouped / scales[..., None], 0.0)
    return (E2M1[nearest(numbers.abs(), E2M1[:8])] * numbers.sign() * scales[..., None]).flatten(1)


def inputs(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of several sizes: the last ones beyond the global scale, of zeros, and so small that scales are 0."""
    sizes = torch.tensor([1.0, 0.03, 40.0, 0.0, 1e-6])[torch.arange(rows) % 5, None]
    return (torch.randn(rows, columns) * sizes).to(dtype)


def test_activations_are_rounded_as_published() -> None:
    x = inputs(10, 160)
    codes, scales = fp4.round_fp4(x, GLOBAL_SCALE)
    found = widen_fp4(codes, scales).double() / GLOBAL_SCALE.double()
    torch.testing.assert_close(found, published(x, GLOBAL_SCALE), rtol=1e-6, atol=0)
    assert found[0].norm() > 0.9 * x[0].norm()
    assert float(found[2].abs().max()) == pytest.approx(7.3), "cut off"
    assert not found[[3, 4]].any()


def test_a_number_in_the_middle_takes_the_even_code() -> None:
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([[6.0, *middles, *(-each for each in middles), 0.5]])
    expected = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, 0.5]
    for module in (fp4, kernels):
        codes, scales = module.round_fp4(x, torch.ones(1))
        assert (widen_fp4(codes, scales).tolist(), scales.float().tolist()) == ([expected], [[1.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(0, 32), (1, 16), (11, 176), (5, 2064)])
def test_rows_are_rounded_alike(rows: int, columns: int, dtype: torch.dtype) -> None:
    x = inputs(rows, columns, dtype)
    for found, expected in zip(kernels.round_fp4(x, GLOBAL_SCALE), fp4.round_fp4(x, GLOBAL_SCALE), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    wide = torch.randn(rows, columns + 40)[:, 7 : columns + 7]
    assert torch.equal(kernels.round_fp4(wide, GLOBAL_SCALE)[0], fp4.round_fp4(wide, GLOBAL_SCALE)[0])


def random_weight(out: int, columns: int, *stack: int, dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    """A weight of about 1, each feature with a scale of its own besides the groups' scales, which are any e4m3."""
    codes = torch.randint(16, (*stack, out, columns), dtype=torch.uint8)
    scales = E4M3[torch.randint(127, (*stack, out, columns // 16))].float() / 448
    scales *= torch.rand(*stack, out, 1) + 0.5
    return QuantizedWeight(
        "e2m1", dtype, codes, scales, activations="fp4", global_scale=(torch.rand(stack) + 0.5) * GLOBAL_SCALE
    )


def test_packing_keeps_numbers() -> None:
    """With any largest scale, and any smaller ones."""
    weight = random_weight(9, 96)
    fractions = E4M3[8:127].float()
    every = torch.stack((fractions, *(fractions * 2**-power for power in (3, 9)), E4M3[1:120].float()), dim=1)
    factors = (torch.rand(len(every), 1) + 0.5) * 10.0 ** torch.randint(-9, 3, (len(every), 1))
    extreme = replace(random_weight(len(every), 64), scales=every * factors)
    extreme.scales[5] = 0.0
    for each in (weight, extreme):
        packed = pack_fp4(each)
        numbers = widen_fp4(packed.codes, packed.scales) * (packed.of_rows * packed.global_scale)[:, None]
        torch.testing.assert_close(numbers, each.dequantize(), rtol=1e-6, atol=0)
    assert sum(part.nbytes for part in pack_fp4(weight).tensors) == 9 * 96 // 2 + 9 * 96 // 16 + 4 * 9 + 4


def expected_of(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """The product of the published format, in float64."""
    assert weight.global_scale is not None
    rounded, wide = published(x.float(), weight.global_scale), replace(weight, dtype=torch.float64).dequantize()
    return F.linear(rounded, wide, None if bias is None else bias.double()).to(x.dtype)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    step = 1e-4 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(0, 32), (1, 256), (5, 176), (17, 80), (70, 304)])
def test_matmul(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Columns are no whole steps, and features and rows no whole tiles."""
    x, weight, bias = torch.randn(rows, columns).to(dtype), random_weight(133, columns, dtype=dtype), torch.randn(133)
    for module in (fp4, kernels):
        close(module.fp4_matmul(x, pack_fp4(weight), bias.to(dtype)), expected_of(x, weight, bias.to(dtype)))
        close(module.fp4_matmul(x, pack_fp4(weight)), expected_of(x, weight))


def test_what_is_no_number_makes_its_row_none() -> None:
    packed, x = pack_fp4(random_weight(20, 64)), torch.randn(3, 64)
    x[1, 5] = torch.nan
    for module in (fp4, kernels):
        found = module.fp4_matmul(x, packed)
        assert found[1].isnan().all()
        assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("tokens", "dtype"), [(7, torch.float32), (50, torch.float16)])
@pytest.mark.parametrize("sides", [2, 1])
def test_experts(tokens: int, dtype: torch.dtype, sides: int) -> None:
    """Each has its own scale of inputs, some of which are on other ranks."""
    gate_up, down = random_weight(sides * 48, 64, 4, dtype=dtype), random_weight(64, 48, 4, dtype=dtype)
    for each in (gate_up, down):
        each.scales.div_(8)
    x, ids, weights = torch.randn(tokens, 64).to(dtype), torch.randint(-1, 5, (tokens, 2)), torch.rand(tokens, 2)
    biases = torch.randn(4, sides * 48).to(dtype), torch.randn(4, 64).to(dtype)
    activation = "silu" if sides == 2 else "relu2"

    def feed_forward(expert: int, rows: Tensor) -> Tensor:
        both = expected_of(rows, gate_up.at(expert), biases[0][expert])
        inner = (reference.act_mul if sides == 2 else reference.activate)(both, activation)
        return expected_of(inner, down.at(expert), biases[1][expert])

    expected = reference.by_expert(x, weights, ids, 4, feed_forward)
    packed = pack_fp4(gate_up), pack_fp4(down)
    for module in (fp4, kernels):
        found = module.fp4_fused_experts(x, weights, ids, *packed, activation, *biases)
        assert found.dtype == dtype
        # A number in the middle may be rounded either way.
        assert (found.float() - expected.float()).norm() <= 0.02 * expected.float().norm()
    found = kernels.fp4_fused_experts(x, weights, ids, *packed, activation)
    plain = fp4.fp4_fused_experts(x, weights, ids, *packed, activation)
    assert (found.float() - plain.float()).norm() <= 0.02 * plain.float().norm()


def test_experts_without_tokens_and_unknown_activations() -> None:
    packed = pack_fp4(random_weight(96, 64, 4)), pack_fp4(random_weight(64, 48, 4))
    none = torch.zeros(0, 64), torch.rand(0, 2), torch.zeros(0, 2, dtype=torch.int64)
    assert kernels.fp4_fused_experts(*none, *packed, "silu").shape == (0, 64)
    with pytest.raises(KeyError, match="swoosh"):
        kernels.fp4_fused_experts(*none, *packed, "swoosh")


def test_where_inputs_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on GPUs that multiply 4-bit floats, in groups of 16, and only by a scale of the publisher's."""
    weight = random_weight(8, 64)
    for capability, expected in ((None, False), ((9, 0), False), ((10, 0), True), ((12, 0), True)):
        monkeypatch.setattr(linear, "gpu_capability", lambda device, found=capability: found)
        assert linear.rounds_inputs(weight) is expected
        assert not linear.rounds_inputs(replace(weight, global_scale=None))
        assert not linear.rounds_inputs(replace(weight, activations=None))
        assert not linear.rounds_inputs(replace(weight, scales=weight.scales.repeat_interleave(2, dim=1)))
    product = linear.pack_linear(weight)
    assert isinstance(product, linear.Fp4Linear)
    x = torch.randn(3, 64)
    assert torch.equal(product(x, None), fp4.fp4_matmul(x, product._weight))
