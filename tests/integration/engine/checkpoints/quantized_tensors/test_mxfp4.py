"""MXFP4 as gpt-oss and compressed-tensors store it."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.architecture.quantization.mxfp4 import GPT_OSS, MxFp4
from quire.engine.checkpoints.quantized_tensors.mxfp4 import MxFp4Reader
from tests.integration.engine.checkpoints.quantized_tensors.layouts import E2M1, check, in_bytes, random_codes


def weights(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents plus 127, and the numbers that they represent."""
    codes = random_codes(1, 4, *shape)
    exponents = random_codes(2, 4, *shape[:-1], shape[-1] // 32) + 120
    return codes, exponents, E2M1[codes] * 2.0 ** (exponents.repeat_interleave(32, -1).double() - 127)


def test_stacked_experts_of_gpt_oss() -> None:
    codes, exponents, expected = weights(3, 10, 128)
    tensors = {"_blocks": in_bytes(codes).view(3, 10, 4, 16), "_scales": exponents.to(torch.uint8)}
    check(GPT_OSS, expected, tensors)


def test_packed_by_compressed_tensors() -> None:
    codes, exponents, expected = weights(10, 128)
    tensors = {".weight_packed": in_bytes(codes), ".weight_scale": exponents.to(torch.uint8)}
    check(MxFp4(), expected, tensors)


def test_scales_of_the_data_type_of_exponents() -> None:
    codes, exponents, expected = weights(10, 128)
    scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    check(MxFp4(), expected, {".weight_packed": in_bytes(codes), ".weight_scale": scales})


def test_smallest_and_largest_scales() -> None:
    codes = torch.full((1, 64), 2)
    exponents = torch.tensor([[0, 254]])
    expected = 2.0 ** (exponents.repeat_interleave(32, -1).double() - 127)
    reader = MxFp4Reader(
        MxFp4(), "m", (1, 64), {"m.weight_packed": in_bytes(codes), "m.weight_scale": exponents.to(torch.uint8)}
    )
    assert torch.equal(reader[slice(0, 1), slice(0, 64)].double(), expected)
