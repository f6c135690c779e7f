"""Matmuls of weights in few bits against dequantization, run by Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import coded_words, reference
from quire.kernels.quantized import VALUES, QuantizedWeight
from tests.integration.kernels import test_experts as plain_experts

pytest.importorskip("triton", reason="scripts/setup ci installs it")
coded = importlib.import_module("quire.kernels.triton.coded")
rounded = importlib.import_module("quire.kernels.triton.rounded")
elementwise = importlib.import_module("quire.kernels.triton.elementwise")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that no expert of this rank has


@pytest.fixture(autouse=True, scope="module")
def implementation() -> str:
    """The kernels are called by name, not by device."""
    return "triton"


def random_weight(
    values: str,
    out: int,
    inputs: int,
    group: int = 0,
    *,
    experts: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """A weight whose numbers are about 1, with zero points if codes have no sign; all codes but fp8's NaN."""
    stack = (experts,) if experts else ()
    codes = torch.randint(len(VALUES[values]), (*stack, out, inputs), dtype=torch.uint8)
    if values == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0
    groups = inputs // group if group else 1
    largest = VALUES[values].nan_to_num().abs().max()
    scales = (torch.rand(*stack, out, groups) + 0.1) / largest * 2.0 ** torch.randint(-3, 3, (*stack, out, 1))
    scales = scales.half().float()  # of 11 bits, as the packed ones of 4-bit codes
    offsets = None
    if values.startswith("uint"):
        offsets = -torch.randint(len(VALUES[values]), (*stack, out, groups)).float()
    return QuantizedWeight(values, dtype, codes, scales, offsets)


def expected_of(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    out = F.linear(x.double(), weight.dequantize().double(), None if bias is None else bias.double())
    return out.to(x.dtype)


def close(found: Tensor, expected: Tensor) -> None:
    """Within the rounding of weights and results, for sums of about a hundred numbers of size 1."""
    assert found.dtype == expected.dtype
    step = 1e-4 if found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=step, atol=step)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("inputs", "group"), [(130, 0), (256, 128), (176, 16), (27, 9), (384, 192)])
def test_packing_keeps_numbers(values: str, inputs: int, group: int) -> None:
    weight = random_weight(values, 5, inputs, group, experts=2)
    torch.testing.assert_close(
        coded_words.unpack_words(coded_words.pack_words(weight)), weight.dequantize(), rtol=1e-6, atol=0.0
    )


@pytest.mark.parametrize(("values", "size"), [("int4", 256 * 66 // 2 + 2 * 2 * 66), ("fp8", 256 * 66)])
def test_a_packed_weight_is_as_small_as_its_codes(values: str, size: int) -> None:
    packed = coded_words.pack_words(random_weight(values, 66, 256, 128 if values == "int4" else 0))
    tensors = [packed.words, packed.scales, packed.offsets, packed.of_rows]
    assert sum(each.nbytes for each in tensors if each is not None) == size + 4 * 66


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("group", "dtype"), [(0, torch.float32), (32, torch.float16)])
def test_matmul_is_that_of_the_dequantized_weight(values: str, group: int, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 160).to(dtype), random_weight(values, 70, 160, group, dtype=dtype), torch.randn(70)
    close(coded.coded_matmul(x, coded_words.pack_words(weight), bias.to(dtype)), expected_of(x, weight, bias.to(dtype)))


@pytest.mark.parametrize("values", ["uint4", "uint8"])
@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (192, 96), (80, 16), (40, 8), (27, 9), (1, 1)])
def test_groups_of_every_size(values: str, inputs: int, group: int) -> None:
    x, weight = torch.randn(2, inputs), random_weight(values, 9, inputs, group)
    close(coded.coded_matmul(x, coded_words.pack_words(weight)), expected_of(x, weight))


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 65])
@pytest.mark.parametrize(
    ("values", "inputs", "dtype"), [("int4", 9 * 128, torch.float16), ("fp8", 9 * 64, torch.float32)]
)
def test_all_numbers_of_rows(rows: int, values: str, inputs: int, dtype: torch.dtype) -> None:
    """Few rows with the inputs in parts, of which the last one is smaller."""
    x, weight = torch.randn(rows, inputs).to(dtype), random_weight(values, 130, inputs, 64, dtype=dtype)
    found = coded.coded_matmul(x, coded_words.pack_words(weight))
    assert found.shape == (rows, 130)
    close(found, expected_of(x, weight))


def test_rows_may_be_a_part_of_wider_ones() -> None:
    weight, wide = random_weight("nf4", 33, 64, 64), torch.randn(5, 200)
    x = wide[:, 7:71]
    close(coded.coded_matmul(x, coded_words.pack_words(weight)), expected_of(x, weight))


@pytest.mark.parametrize("values", ["int4", "e2m1", "int8"])
def test_scales_beyond_half_precision(values: str) -> None:
    """Sums and the scales of features are float32, and factors are relative to the feature's largest."""
    weight = random_weight(values, 20, 64, 32)
    weight.scales.mul_(torch.tensor([1e-12, 1e12]).repeat(10)[:, None])
    x = torch.randn(4, 64)
    found, expected = coded.coded_matmul(x, coded_words.pack_words(weight)), expected_of(x, weight)
    largest = x.abs() @ weight.dequantize().abs().T  # the largest possible sum, without its terms' signs
    assert float(((found - expected).abs() / largest).max()) < 1e-3


def test_not_a_number_is_seen_in_its_feature_only() -> None:
    weight = random_weight("fp8", 6, 64)
    weight.codes[2, 5], weight.codes[4, 1] = 0x7F, 0xFF
    found = coded.coded_matmul(torch.ones(1, 64), coded_words.pack_words(weight))
    assert found.isnan().tolist() == [[False, False, True, False, True, False]]


def test_a_feature_of_zeros_is_zero() -> None:
    weight = random_weight("uint4", 6, 64, 32)
    weight.scales[3] = 0.0
    found = coded.coded_matmul(torch.randn(2, 64), coded_words.pack_words(weight))
    assert found[:, 3].tolist() == [0.0, 0.0]
    assert found.isfinite().all()


def experts_of(values: str, group: int, dtype: torch.dtype, rows: int = 96) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Gates and ups `[4, 2 * 48, 64]`, or ups only, and downs `[4, 64, 48]`."""
    gate_up = random_weight(values, rows, 64, group, experts=4, dtype=dtype)
    down = random_weight(values, 64, 48, group and 16, experts=4, dtype=dtype)
    gate_up.scales.div_(8)
    down.scales.div_(8)
    return gate_up, down


@pytest.mark.parametrize(("values", "group"), [("uint4", 32), ("e2m1", 16), ("fp8", 0)])
@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.float32, False), (torch.float16, True)])
@pytest.mark.parametrize("rows", [96, 48])
def test_experts(values: str, group: int, dtype: torch.dtype, has_bias: bool, rows: int) -> None:
    gate_up, down = experts_of(values, group, dtype, rows)
    biases = [torch.randn(4, rows).to(dtype), torch.randn(4, 64).to(dtype)] if has_bias else [None, None]
    x, ids, weights = torch.randn(7, 64).to(dtype), torch.randint(-1, 5, (7, 2)), torch.rand(7, 2)
    activation = "relu2" if rows == 48 else "swiglu_oai" if has_bias else "silu"
    plain = gate_up.dequantize(), down.dequantize()
    expected = reference.fused_experts(x, weights, ids, *plain, activation, *biases)
    for module in (coded, coded_words):
        packed = coded_words.pack_words(gate_up), coded_words.pack_words(down)
        close(module.coded_fused_experts(x, weights, ids, *packed, activation, *biases, rows == 96), expected)


def check_changes(
    form: Callable[..., Tensor], parts: Sequence[Tensor], activation: str, *, gated: bool, tolerance: float
) -> None:
    """Of experts by adapters, given the experts as they are."""
    gate_up, down, *biases = parts
    x, weights = torch.randn(9, gate_up.shape[2]).to(gate_up.dtype), torch.rand(9, 2)
    ids, slots = torch.randint(-1, len(down) + 1, (9, 2)), torch.arange(9) % 3 - 1
    given = gate_up, down, *(biases or (None, None))
    changes, merged = plain_experts.changed_experts(x, ids, given, slots, (16, 5), gated=gated)
    expected = [
        reference.fused_experts(x.double(), weights, ids, each[0], each[1], activation, each[2], each[3])
        for each in merged
    ]
    plain_experts.check_changes(form, x, (weights, ids), slots, changes, expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [96, 48])
def test_coded_experts_that_adapters_change(dtype: torch.dtype, rows: int) -> None:
    stacks, activation, gated = experts_of("uint4", 32, dtype, rows), "silu" if rows == 96 else "relu2", rows == 96
    packed = [coded_words.pack_words(each) for each in stacks]

    def form(module: Any, *given: Any) -> Tensor:
        call, given, changes = module.coded_fused_experts, given[:3], given[3] if len(given) > 3 else None
        return call(*given, *packed, activation, gated=gated, changes=changes)  # type: ignore[no-any-return]

    parts = [each.dequantize() for each in stacks]
    for module in (coded, coded_words):
        check_changes(partial(form, module), parts, activation, gated=gated, tolerance=2e-3)


@pytest.mark.parametrize("sides", [2, 1])
def test_rounded_experts_that_adapters_change(sides: int) -> None:
    dtype, kind = torch.float16, torch.float8_e4m3fn
    stacks = [random_weight("fp8", rows, 128, 128, experts=4, dtype=dtype) for rows in (sides * 128, 128)]
    for each in stacks:
        each.scales.copy_((torch.rand(each.scales.shape) + 0.5) / 448 / 16)
    packed = [part for each in stacks for part in (each.codes.view(kind), each.scales)]
    activation = "silu" if sides == 2 else "relu2"

    def form(module: Any, *given: Any) -> Tensor:
        call, given, changes = module.rounded_fused_experts, given[:3], given[3] if len(given) > 3 else None
        return call(*given, *packed, activation, changes=changes)  # type: ignore[no-any-return]

    parts = [each.dequantize() for each in stacks]
    for module in (rounded, coded_words):
        check_changes(partial(form, module), parts, activation, gated=sides == 2, tolerance=0.05)


@pytest.mark.parametrize(("group", "dtype"), [(0, torch.float32), (16, torch.float32), (32, torch.float16)])
def test_experts_with_columns_in_another_order(group: int, dtype: torch.dtype) -> None:
    """An order of each expert's, with columns that no input belongs to."""
    gate_up, down = experts_of("uint4", group, dtype)
    ordered, plain = [], []
    for weight, inputs in ((gate_up, 60), (down, 48)):
        columns = torch.rand(4, weight.codes.shape[2]).argsort().clamp(max=inputs)
        whole = torch.zeros(4, weight.codes.shape[1], inputs + 1)
        whole.scatter_add_(2, columns[:, None].expand(weight.codes.shape), weight.dequantize().float())
        ordered.append(replace(weight, columns=columns))
        plain.append(whole[..., :inputs].to(dtype))
    x, ids, weights = torch.randn(7, 60).to(dtype), torch.randint(-1, 5, (7, 2)), torch.rand(7, 2)
    plain[1] = F.pad(plain[1], (0, 0, 0, -4))  # as many outputs as inputs
    ordered[1] = replace(ordered[1], codes=ordered[1].codes[:, :60], scales=ordered[1].scales[:, :60])
    assert ordered[1].offsets is not None
    ordered[1] = replace(ordered[1], offsets=ordered[1].offsets[:, :60])
    expected = reference.fused_experts(x, weights, ids, plain[0], plain[1], "silu")
    for module in (coded, coded_words):
        packed = [coded_words.pack_words(each) for each in ordered]
        close(module.coded_fused_experts(x, weights, ids, *packed, "silu"), expected)


@pytest.mark.parametrize(("zero", "group", "dtype"), [(0.0, 0, torch.float32), (-9.0, 32, torch.float16)])
def test_static_scales_of_inputs(zero: float, group: int, dtype: torch.dtype) -> None:
    """Scales of one weight, and of experts with different ones. Some inputs are cut off."""
    weight = random_weight("int8", 33, 200, group and 8, dtype=dtype)
    rounding = torch.tensor([1 / 64, zero])
    x = torch.randn(5, 200).to(dtype) * 2
    x[0, 3:5] = torch.tensor([torch.inf, -torch.inf])
    steps = ((x.double() * 64 + zero).round().clamp(-128, 127) - zero) / 64
    packed = coded_words.pack_words(replace(weight, rounding=rounding))
    for module in (coded, coded_words):
        close(module.coded_matmul(x, packed), expected_of(steps, replace(weight, dtype=torch.float32)).to(dtype))
    x[1, 7] = torch.nan
    assert coded.coded_matmul(x, packed)[1].isnan().all()
    stacks = [
        replace(each, rounding=torch.tensor([[1 / 32, zero], [1 / 64, zero], [1.0, zero], [1 / 16, zero]]))
        for each in experts_of("int8", group, dtype)
    ]
    first, second = (coded_words.pack_words(each) for each in stacks)
    rows, ids, shares = torch.randn(9, 64).to(dtype), torch.randint(-1, 5, (9, 2)), torch.rand(9, 2)
    found = coded.coded_fused_experts(rows, shares, ids, first, second, "silu")
    expected = coded_words.coded_fused_experts(rows, shares, ids, first, second, "silu")
    assert (found - expected).float().norm() <= (1e-5 if dtype == torch.float32 else 0.02) * expected.float().norm()


def test_many_rows_of_one_expert() -> None:
    gate_up, down = experts_of("int4", 32, torch.float16)
    x, ids, weights = torch.randn(80, 64).half(), torch.ones(80, 1, dtype=torch.int64), torch.rand(80, 1)
    ids[::7] = 2
    found = coded.coded_fused_experts(
        x, weights, ids, coded_words.pack_words(gate_up), coded_words.pack_words(down), "silu"
    )
    close(found, reference.fused_experts(x, weights, ids, gate_up.dequantize(), down.dequantize(), "silu"))


def test_experts_without_tokens_and_unknown_activations() -> None:
    packed = [coded_words.pack_words(each) for each in experts_of("int4", 32, torch.float32)]
    ids = torch.zeros(0, 2, dtype=torch.int64)
    assert coded.coded_fused_experts(torch.randn(0, 64), torch.rand(0, 2), ids, *packed, "silu").shape == (0, 64)
    with pytest.raises(KeyError, match="swoosh"):
        coded.coded_fused_experts(torch.randn(0, 64), torch.rand(0, 2), ids, *packed, "swoosh")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("groups", [1, 3])
def test_rows_are_rounded_to_8_bits(dtype: torch.dtype, groups: int) -> None:
    x = torch.randn(5, 300) * torch.tensor([1e-3, 1.0, 0.0, 50.0, 1e4])[:, None]
    x[1, 130:] *= 1e-3
    codes, scales = rounded.round_rows(x, dtype, groups)
    assert (codes.float().abs().amax(dim=1) == (127 if dtype == torch.int8 else 448)).tolist() == [
        True,
        True,
        False,
        True,
        True,
    ]
    expected, expected_scales = coded_words.round_rows(x, dtype, groups)
    assert torch.equal(codes.float(), expected.float())
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize(("columns", "groups"), [(300, 3), (4100, 1), (1030, 9)])
@pytest.mark.parametrize(("kind", "dtype"), [(torch.int8, torch.float16), (torch.float8_e4m3fn, torch.float32)])
def test_norms_and_activations_are_rounded_in_the_same_kernel(
    columns: int, groups: int, kind: torch.dtype, dtype: torch.dtype
) -> None:
    """As in a pass of their own, except for numbers in the middle; NaN and infinity invalidate their row."""
    x, residual, both = (
        torch.randn(3, columns).to(dtype),
        torch.randn(3, columns).to(dtype),
        torch.randn(3, 2 * columns),
    )
    both, weight = both.to(dtype), torch.rand(columns).to(dtype) + 0.5
    x[1] = 0.0
    both[1] = 0.0
    both[2, 7] = x[2, 7] = torch.nan
    codes, scales = elementwise.rms_norm_rounded(x, weight, 1e-6, 1.0, kind, groups)
    added_codes, added_scales, total = elementwise.add_rms_norm_rounded(x, residual, weight, 1e-6, 0.0, kind, groups)
    gated_codes, gated_scales = elementwise.act_mul_rounded(both, "silu", kind, groups)
    activated = elementwise.act_mul_rounded(x, "relu2", kind, groups, gated=False)
    for name, found, plain in (
        ("norm", (codes, scales), elementwise.rms_norm(x, weight, 1e-6, 1.0)),
        ("sum", (added_codes, added_scales), elementwise.add_rms_norm(x, residual, weight, 1e-6)[0]),
        ("gated", (gated_codes, gated_scales), elementwise.act_mul(both, "silu")),
        ("activated", activated, reference.activate(x, "relu2")),
    ):
        expected_codes, expected_scales = rounded.round_rows(plain, kind, groups)
        assert torch.equal(found[0][:2].float(), expected_codes[:2].float()), name
        assert torch.equal(found[1][:2], expected_scales[:2]), name
        assert found[1][2].isnan().any(), name
    assert torch.equal(total[:2], (residual + x)[:2])
    plain, added = torch.empty_like(x), torch.empty_like(x)
    kept = elementwise.rms_norm_rounded(x, weight, 1e-6, 1.0, kind, groups, plain)
    also_kept = elementwise.add_rms_norm_rounded(x, residual, weight, 1e-6, 0.0, kind, groups, added)
    for with_plain, without in zip((*kept, *also_kept), (codes, scales, added_codes, added_scales, total), strict=True):
        assert torch.equal(with_plain[:2].float(), without[:2].float())
    assert torch.equal(plain[:2], elementwise.rms_norm(x, weight, 1e-6, 1.0)[:2])
    assert torch.equal(added[:2], elementwise.add_rms_norm(x, residual, weight, 1e-6)[0][:2])


def test_a_product_takes_rows_that_are_rounded_already() -> None:
    weight = replace(random_weight("fp8", 70, 256, 128), activations="fp8")
    codes, x = weight.codes.view(torch.float8_e4m3fn), torch.randn(5, 256).half()
    rows = rounded.round_rows(x, codes.dtype, 2)
    for module in (rounded, coded_words):
        found = module.rounded_matmul(rows[0], codes, weight.scales, None, rows[1], torch.float16)
        close(found, module.rounded_matmul(x, codes, weight.scales))


@pytest.mark.parametrize(("rows", "dtype"), [(0, torch.float32), (3, torch.float32), (20, torch.float16)])
@pytest.mark.parametrize(("values", "inputs", "groups"), [("fp8", 200, 1), ("fp8", 256, 2), ("int8", 200, 1)])
def test_matmul_of_rounded_rows(values: str, inputs: int, groups: int, rows: int, dtype: torch.dtype) -> None:
    weight = random_weight(values, 70, inputs, inputs // groups, dtype=dtype)
    kind = torch.int8 if values == "int8" else torch.float8_e4m3fn
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(70).to(dtype)
    codes, scales = coded_words.round_rows(x, kind, groups)
    plain = (codes.float().view(rows, groups, inputs // groups) * scales[..., None]).flatten(1)
    wide = replace(weight, dtype=torch.float32)
    expected = expected_of(plain, wide, bias.float()).to(dtype)
    for module in (rounded, coded_words):
        close(module.rounded_matmul(x, weight.codes.view(kind), weight.scales, bias), expected)


@pytest.mark.parametrize(
    ("values", "groups", "tokens", "dtype"),
    [("fp8", 1, 7, torch.float32), ("fp8", 2, 7, torch.float16), ("int8", 1, 50, torch.float16)],
)
@pytest.mark.parametrize("sides", [2, 1])
def test_experts_of_rounded_rows(values: str, groups: int, tokens: int, dtype: torch.dtype, sides: int) -> None:
    """Against weights and inputs as they are: the difference comes from rounding inputs, which another test covers."""
    size = 128 * groups
    gate_up = random_weight(values, sides * size, size, size // groups, experts=4, dtype=dtype)
    down = random_weight(values, size, size, size // groups, experts=4, dtype=dtype)
    for each in (gate_up, down):
        each.scales.copy_((torch.rand(4, len(each.scales[0]), groups) + 0.5) / VALUES[values].nan_to_num().max() / 16)
    kind = torch.int8 if values == "int8" else torch.float8_e4m3fn
    x, ids, weights = torch.randn(tokens, size).to(dtype), torch.randint(-1, 5, (tokens, 2)), torch.rand(tokens, 2)
    biases = torch.randn(4, sides * size).to(dtype), torch.randn(4, size).to(dtype)
    expected = reference.fused_experts(x, weights, ids, gate_up.dequantize(), down.dequantize(), "silu", *biases)
    packed = gate_up.codes.view(kind), gate_up.scales, down.codes.view(kind), down.scales
    for module in (rounded, coded_words):
        found = module.rounded_fused_experts(x, weights, ids, *packed, "silu", *biases)
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < (0.01 if values == "int8" else 0.04)
        assert found.dtype == dtype
        codes, scales = module.round_rows(x, kind, groups)
        before = module.rounded_fused_experts(
            codes, weights, ids, *packed, "silu", *biases, x_scales=scales, dtype=dtype
        )
        assert torch.equal(before, found), "rounded before"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_rows_that_are_no_numbers_stay_so(dtype: torch.dtype) -> None:
    x, codes = torch.randn(3, 128), torch.ones(16, 128).to(dtype)
    x[1, 5] = torch.nan
    found = rounded.rounded_matmul(x, codes, torch.ones(16, 1))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("capability", "types", "turn"),
    [
        (80, ["bf16"], (2, 2)),
        (89, ["bf16"], (1, 2)),
        (90, ["bf16", "fp16", "fp32"], (1, 1)),
        (100, ["bf16"], (1, 2)),
        (120, ["bf16"], (2, 2)),
    ],
)  # 163, 99, 227, 227 and 99 KiB of shared memory
def test_every_kernel_compiles_ahead(capability: int, types: list[str], turn: tuple[int, int]) -> None:
    """Every kernel for every capability, and in every type for one of them. In bfloat16, one half of a kernel's
    variants is compiled for 8.0 and 12.0, and the other for 8.9 and 10.0: each is once with much and once with little
    shared memory. For 9.0 all are compiled, in types that take turns."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "tests.integration.kernels.compile_ahead", str(capability)),
            *("--coded", "--types", *types, "--turn", *map(str, turn)),
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    *variants, last = done.stdout.splitlines()
    assert last == f"{len(variants)} kernels compiled for sm_{capability}"
    for name in ("_coded", "_coded_grouped"):
        found = {line.split()[1] for line in variants if line.startswith(f"{name}_kernel")}
        assert found == set(types), name
    found = {line.split()[1] for line in variants if line.startswith("_rounded_kernel")}
    assert found == ({"i8", "fp8e4nv"} if capability >= 89 else {"i8"})
    found = {line.split()[0] for line in variants if line.startswith("_fp4")}
    assert found == ({"_fp4_kernel", "_fp4_grouped_kernel"} if capability >= 100 else set())
