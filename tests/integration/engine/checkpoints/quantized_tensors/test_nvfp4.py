"""NVFP4 as ModelOpt and compressed-tensors store it."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.architecture.quantization.nvfp4 import MODELOPT, W4A16_MODELOPT, NvFp4
from tests.integration.engine.checkpoints.quantized_tensors.layouts import (
    E2M1,
    E4M3,
    check,
    in_bytes,
    open_reader,
    random_codes,
)


def weights(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, the bits of scales, and the numbers that they represent without a scale of the whole."""
    codes = random_codes(1, 4, *shape)
    bits = random_codes(2, 8, *shape[:-1], shape[-1] // 16)
    return codes, bits, E2M1[codes] * E4M3[bits].repeat_interleave(16, -1)


def in_fp8(bits: Tensor) -> Tensor:
    return bits.to(torch.uint8).view(torch.float8_e4m3fn)


def test_modelopt_multiplies_by_the_second_scale() -> None:
    codes, bits, expected = weights(9, 64)
    for second in (torch.tensor(0.37), torch.tensor([0.37])):
        tensors = {".weight": in_bytes(codes), ".weight_scale": in_fp8(bits), ".weight_scale_2": second}
        check(MODELOPT, expected * second.double(), tensors)


def test_compressed_tensors_divides_by_the_global_scale() -> None:
    codes, bits, expected = weights(9, 64)
    whole = torch.tensor([2688.0 / 3])
    tensors = {".weight_packed": in_bytes(codes), ".weight_scale": in_fp8(bits), ".weight_global_scale": whole}
    check(NvFp4(), expected / whole.double(), tensors)


def test_the_constant_scale_of_inputs() -> None:
    """ModelOpt's scale divides inputs; compressed-tensors' scale multiplies them."""
    codes, bits, _ = weights(9, 64)
    whole = torch.tensor([2.0])
    tensors = {".weight": in_bytes(codes), ".weight_scale": in_fp8(bits), ".weight_scale_2": whole}
    for each in (torch.tensor(0.25), torch.tensor([0.25])):
        found = open_reader(MODELOPT, (9, 64), tensors | {".input_scale": each}).global_scale()
        assert found is not None
        assert float(found) == 4.0
    assert open_reader(MODELOPT, (9, 64), tensors).global_scale() is None
    assert "a.input_scale" in MODELOPT.tensors("a", (9, 64))
    assert "a.input_scale" not in W4A16_MODELOPT.tensors("a", (9, 64))
    tensors = {".weight_packed": in_bytes(codes), ".weight_scale": in_fp8(bits), ".weight_global_scale": whole}
    scheme = NvFp4(activations="fp4")
    found = open_reader(scheme, (9, 64), tensors | {".input_global_scale": torch.tensor([0.25])}).global_scale()
    assert found is not None
    assert float(found) == 0.25


def test_stacked_experts_have_a_scale_each() -> None:
    codes, bits, expected = weights(3, 9, 64)
    second = torch.tensor([0.5, 3.0, 7.0])
    for shape in ((3,), (3, 1), (3, 1, 1)):
        tensors = {".weight": in_bytes(codes), ".weight_scale": in_fp8(bits), ".weight_scale_2": second.view(shape)}
        check(MODELOPT, expected * second.double()[:, None, None], tensors)
