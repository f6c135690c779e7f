"""torchao's Int4Tensor."""

from __future__ import annotations

import torch

from quire.engine.architecture.quantization.torchao import TorchAoInt4
from tests.integration.engine.checkpoints.quantized_tensors.layouts import check, in_bytes, random_codes


def test_int4_with_a_scale_and_a_zero_for_each_group() -> None:
    for shape in ((10, 128), (2, 10, 128)):
        numbers = random_codes(1, 4, *shape) - 8
        generator = torch.Generator().manual_seed(2)
        factors = (*shape[:-2], 4, 10)
        scales = (torch.rand(factors, generator=generator) + 0.1).bfloat16()
        zeros = torch.randn(factors, generator=generator).bfloat16()
        scales[..., 1, :3] = torch.tensor([1e-6, 0.0, 0.0])  # groups of equal weights
        zeros[..., 1, 2] = 0.0
        scale, zero = (each.double().transpose(-1, -2).repeat_interleave(32, -1) for each in (scales, zeros))
        tensors = {
            "._weight_qdata": in_bytes(numbers & 15),
            "._weight_scale": scales,
            "._weight_zero_point": zeros,
        }
        check(TorchAoInt4(group=32), numbers * scale + zero, tensors)
