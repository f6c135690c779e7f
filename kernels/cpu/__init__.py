"""C++ kernels for CPUs, with the names and the meaning of `quire.kernels.reference`; what is not here stays there."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.build import CannotBuild, load

__all__ = ["CannotBuild", "int4_linear", "load", "quantize_rows", "scale_rows", "silu_mul", "widened_linear"]


def silu_mul(x: Tensor) -> Tensor:
    out: Tensor = torch.ops.quire.silu_mul(x)
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scales = torch.ops.quire.quantize_rows(x)
    return quantized, scales


def scale_rows(x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out: Tensor = torch.ops.quire.scale_rows(x, scales, bias, dtype)
    return out


def widened_linear(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.quire.widened_linear(x, weight)
    return out


def int4_linear(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    out: Tensor = torch.ops.quire.int4_linear(x, weight, scales, zeros)
    return out
