"""Weights with a byte for each code: FP8, MXFP8, INT8, and INT4 in bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.engine.architecture.quantization import fp8
from quire.engine.architecture.quantization.method import Scheme, Shape
from quire.engine.architecture.quantization.quark import INT8_OF_ROWS
from quire.engine.architecture.quantization.unpacked import FP8, FP8_OF_BLOCKS, FP8_OF_ROWS, MXFP8, Unpacked
from quire.engine.protocol.errors import ConfigError
from tests.integration.engine.checkpoints.quantized_tensors.layouts import E4M3, check, open_reader, random_codes

OUT, IN = 40, 48


def scheme_of(**settings: object) -> Scheme:
    found = fp8.read({"quant_method": "fp8", **settings}).scheme("m")
    assert found is not None
    return found


def numbers(*shape: int) -> tuple[Tensor, Tensor]:
    """The tensor and its values."""
    codes = random_codes(1, 8, *shape)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), E4M3[codes]


def factors(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.1


def spread(scales: Tensor, rows: int, columns: int, shape: Shape) -> Tensor:
    """The scale of each weight."""
    *_, out, width = shape
    return scales.double().repeat_interleave(rows, -2)[..., :out, :].repeat_interleave(columns, -1)[..., :width]


@pytest.mark.parametrize("name", [".weight_scale", ".weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_scale(name: str, shape: Shape) -> None:
    codes, values = numbers(OUT, IN)
    scale = factors(*shape)
    check(scheme_of(activation_scheme="static"), values * scale.double(), {".weight": codes, name: scale})


@pytest.mark.parametrize("shape", [(OUT, 1), (OUT,)], ids=str)
def test_a_scale_for_each_row(shape: Shape) -> None:
    codes, values = numbers(OUT, IN)
    scales = factors(OUT, 1)
    check(FP8_OF_ROWS, values * scales.double(), {".weight": codes, ".weight_scale": scales.reshape(shape)})


@pytest.mark.parametrize("block", [(16, 16), (16, 32), (1, 16), (64, 64)], ids=str)
def test_blocks(block: tuple[int, int]) -> None:
    rows, columns = block
    codes, values = numbers(OUT, IN)
    scales = factors(-(-OUT // rows), -(-IN // columns))
    tensors = {".weight": codes, ".weight_scale_inv": scales}
    check(scheme_of(weight_block_size=block), values * spread(scales, rows, columns, (OUT, IN)), tensors)


def test_blocks_of_modelopt_have_more_dimensions() -> None:
    codes, values = numbers(200, 384)
    scales = factors(2, 3)
    tensors = {".weight": codes, ".weight_scale": scales.view(2, 1, 3, 1)}
    check(FP8_OF_BLOCKS, values * spread(scales, 128, 128, (200, 384)), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_types(dtype: torch.dtype) -> None:
    codes, values = numbers(OUT, IN)
    scales = torch.ldexp(torch.ones(3, 3), torch.arange(-4, 5).view(3, 3))
    tensors = {".weight": codes, ".weight_scale_inv": scales.to(dtype)}
    check(scheme_of(weight_block_size=[16, 16]), values * spread(scales, 16, 16, (OUT, IN)), tensors)


def test_exponents() -> None:
    codes, values = numbers(OUT, 64)
    exponents = random_codes(2, 4, OUT, 2) + 120
    tensors = {".weight": codes, ".weight_scale": exponents.to(torch.uint8)}
    check(MXFP8, values * spread(2.0 ** (exponents.double() - 127), 1, 32, (OUT, 64)), tensors)


@pytest.mark.parametrize("names", [("", "_scale_inv"), (".weight", ".weight_scale_inv")])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_stacks(is_transposed: bool, names: tuple[str, str]) -> None:
    codes, values = numbers(3, OUT, IN)
    blocks, rows, (weight, scale_inv) = factors(3, 3, 2), factors(3, OUT, 1), names
    scale = scale_inv.removesuffix("_inv")

    def stored(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if is_transposed else tensor

    expected = values * spread(blocks, 16, 32, (3, OUT, IN))
    check(scheme_of(weight_block_size=[16, 32]), expected, {weight: stored(codes), scale_inv: stored(blocks)})
    for each in (rows, rows.transpose(1, 2)):  # of Llama 4: of gate_up_proj and of down_proj
        check(FP8_OF_ROWS, values * rows.double(), {weight: stored(codes), scale: each})
    for each in (factors(3), factors(3, 1, 1), factors(1)):
        tensors = {weight: stored(codes), scale_inv: each}
        check(scheme_of(), values * each.double().view(-1, 1, 1), tensors)


def test_slices_are_views_of_the_file() -> None:
    weight, _ = numbers(OUT, IN)
    tensors = {".weight": weight, ".weight_scale": factors(1)}
    codes = open_reader(FP8, (OUT, IN), tensors).codes((slice(8, 16), slice(0, IN)))
    assert codes.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("zero_point", [None, torch.zeros(OUT, dtype=torch.int8)])
def test_int8_of_quark(zero_point: Tensor | None) -> None:
    codes, scales = random_codes(1, 8, OUT, IN) - 128, factors(OUT)
    tensors = {".weight": codes.to(torch.int8), ".weight_scale": scales}
    if zero_point is not None:
        tensors[".weight_zero_point"] = zero_point
    check(INT8_OF_ROWS, codes * scales.double()[:, None], tensors)


def test_zero_points_of_a_symmetric_scheme_are_refused() -> None:
    zero_point = torch.zeros(OUT, dtype=torch.int8)
    zero_point[7] = 1
    tensors = {".weight": torch.zeros((OUT, IN), dtype=torch.int8), ".weight_scale": torch.ones(OUT)}
    with pytest.raises(ConfigError, match="weight_zero_point is not 0"):
        open_reader(INT8_OF_ROWS, (OUT, IN), {**tensors, ".weight_zero_point": zero_point})


@pytest.mark.parametrize("values", ["int4", "int8"])
def test_groups_with_zero_points(values: str) -> None:
    bits = int(values[3:])
    codes = random_codes(1, bits, OUT, 64) - (1 << bits - 1)
    scales, zeros = factors(OUT, 2), random_codes(3, 4, OUT, 2) - 8
    tensors = {".weight": codes.to(torch.int8), ".weight_scale": scales, ".weight_zero_point": zeros.to(torch.int8)}
    expected = (codes - spread(zeros, 1, 32, (OUT, 64))) * spread(scales, 1, 32, (OUT, 64))
    check(Unpacked(values=values, rows=1, group=32, has_offsets=True), expected, tensors)
