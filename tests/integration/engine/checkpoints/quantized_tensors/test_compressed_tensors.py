"""Slices of compressed-tensors weights against all of them, packed and dequantized code by code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.architecture.quantization.compressed_tensors import read
from quire.engine.architecture.quantization.method import Scheme, Shape
from tests.integration.engine.checkpoints.quantized_tensors.layouts import check, open_reader

OUT, IN, GROUP = 20, 96, 32


def scheme_of(layout: str, *, sparse: bool = False, **weights: Any) -> Scheme:
    group = {"targets": ["Linear"], "weights": weights}
    sparsity = {"format": "sparse-24-bitmask"} if sparse else None
    method = read({"config_groups": {"group_0": group}, "format": layout, "sparsity_config": sparsity})
    found = None if method is None else method.scheme("m")
    assert found is not None
    return found


def integers(bits: int, *shape: int) -> Tensor:
    half = 2 ** (bits - 1)
    return torch.randint(-half, half, shape, generator=torch.Generator().manual_seed(bits))


def factors(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.1


def packed(numbers: Tensor, bits: int) -> Tensor:
    """int32 `[…, words]`: 32 / bits numbers plus 2 ** (bits - 1), the first lowest."""
    count = 32 // bits
    words = torch.zeros(*numbers.shape[:-1], -(-numbers.shape[-1] // count), dtype=torch.int64)
    for column in range(numbers.shape[-1]):
        words[..., column // count] |= numbers[..., column] + 2 ** (bits - 1) << column % count * bits
    return torch.where(words < 2**31, words, words - 2**32).int()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [GROUP, -1])
def test_words(bits: int, symmetric: bool, size: int) -> None:
    scheme = scheme_of("pack-quantized", num_bits=bits, symmetric=symmetric, group_size=size)
    groups = IN // size if size > 0 else 1
    numbers, scales = integers(bits, OUT, IN), factors(OUT, groups).to(torch.bfloat16)
    zeros = integers(bits, OUT, groups).flip(1) * (not symmetric)
    tensors = {".weight_packed": packed(numbers, bits), ".weight_scale": scales}
    if not symmetric:
        tensors[".weight_zero_point"] = packed(zeros.T, bits).T.contiguous()
    group = torch.arange(IN) // (IN // groups)
    expected = (numbers - zeros[:, group]) * scales.float()[:, group]
    check(scheme, expected, tensors)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_end_within_words(bits: int) -> None:
    numbers, scales = integers(bits, OUT, 37), factors(OUT, 1)
    tensors = {".weight_packed": packed(numbers, bits), ".weight_scale": scales}
    check(scheme_of("pack-quantized", num_bits=bits, strategy="channel"), numbers * scales, tensors)


def test_one_scale_of_words() -> None:
    numbers = integers(4, OUT, IN)
    tensors = {".weight_packed": packed(numbers, 4), ".weight_scale": factors(1)}
    check(scheme_of("pack-quantized", num_bits=4, strategy="tensor"), numbers * factors(1), tensors)


def test_columns_in_another_order() -> None:
    scheme = scheme_of("pack-quantized", num_bits=4, symmetric=False, group_size=GROUP, actorder="group")
    numbers, scales, zeros = integers(4, OUT, IN), factors(OUT, 3), integers(4, OUT, 3).flip(0)
    order = torch.randperm(IN, generator=torch.Generator().manual_seed(4)) // GROUP
    tensors = {".weight_packed": packed(numbers, 4), ".weight_scale": scales}
    tensors[".weight_zero_point"] = packed(zeros.T, 4).T.contiguous()
    expected = (numbers - zeros[:, order]) * scales[:, order]
    found = check(scheme, expected, {**tensors, ".weight_g_idx": order.int()}).order()
    assert found is not None
    assert torch.equal(found, order)
    assert open_reader(scheme, (OUT, IN), tensors).order() is None


def test_words_of_stacked_experts() -> None:
    scheme = scheme_of("pack-quantized", num_bits=4, symmetric=False, group_size=GROUP)
    numbers, scales, zeros = integers(4, 3, OUT, IN), factors(3, OUT, 3), integers(4, 3, OUT, 3).flip(0)
    tensors = {"_packed": packed(numbers, 4), "_scale": scales}
    tensors["_zero_point"] = packed(zeros.transpose(1, 2), 4).transpose(1, 2).contiguous()
    group = torch.arange(IN) // GROUP
    check(scheme, (numbers - zeros[..., group]) * scales[..., group], tensors)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("strategy", "shape", "rows", "columns"),
    [
        ("tensor", (1,), OUT, IN),
        ("channel", (OUT, 1), 1, IN),
        ("group", (OUT, IN // GROUP), 1, GROUP),
        ("block", (3, 3), 8, 40),
    ],
)
def test_integers_in_bytes(bits: int, symmetric: bool, strategy: str, shape: Shape, rows: int, columns: int) -> None:
    size, block = (GROUP, None) if strategy == "group" else (None, [8, 40] if strategy == "block" else None)
    weights: dict[str, Any] = {"num_bits": bits, "symmetric": symmetric, "strategy": strategy}
    scheme = scheme_of("int-quantized", **weights, group_size=size, block_structure=block)
    numbers, scales, zeros = integers(bits, OUT, IN), factors(*shape), integers(bits, *shape) * (not symmetric)
    tensors = {".weight": numbers.to(torch.int8), ".weight_scale": scales}
    if not symmetric:
        tensors[".weight_zero_point"] = zeros.to(torch.int8)
    blocks = (torch.arange(OUT) // rows)[:, None], torch.arange(IN) // columns
    two = (-(-OUT // rows), -(-IN // columns))
    expected = (numbers - zeros.view(two)[blocks]) * scales.view(two)[blocks]
    check(scheme, expected, tensors)


def test_fp8() -> None:
    weight = (torch.randn(OUT, IN, generator=torch.Generator().manual_seed(5)) * 30).to(torch.float8_e4m3fn)
    scales = factors(OUT, 1).to(torch.bfloat16)
    scheme = scheme_of("float-quantized", type="float", num_bits=8, strategy="channel")
    check(scheme, weight.float() * scales.float(), {".weight": weight, ".weight_scale": scales})


@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("columns", [IN, IN - 4])
def test_two_of_four(kind: str, columns: int) -> None:
    numbers = integers(8, OUT, columns)
    kept = torch.rand(OUT, columns // 4, 4, generator=torch.Generator().manual_seed(6)).argsort(-1).flatten(1) < 2
    octets = numbers.to(torch.int8).view(torch.float8_e4m3fn if kind == "float" else torch.int8)
    octets = torch.where(octets.float().isnan(), torch.ones_like(octets), octets)
    bits = torch.zeros(OUT, -(-columns // 8), dtype=torch.uint8)
    for column in range(columns):
        bits[:, column // 8] |= kept[:, column].byte() << column % 8
    stored = octets.view(torch.uint8)[kept].view(OUT, columns // 2).view(octets.dtype)
    layout = "float-quantized" if kind == "float" else "int-quantized"
    scheme = scheme_of(layout, sparse=True, type=kind, num_bits=8, strategy="channel")
    tensors = {".compressed": stored, ".bitmask": bits, ".weight_scale": factors(OUT, 1)}
    expected = torch.where(kept, octets.float(), 0) * factors(OUT, 1)
    check(scheme, expected, tensors)
