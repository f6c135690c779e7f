"""C++ kernels for CPUs, with the names and the meaning of `quire.kernels.reference`; what is not here stays there."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.build import CannotBuild, load

__all__ = ["CannotBuild", "load", "silu_mul"]


def silu_mul(x: Tensor) -> Tensor:
    out: Tensor = torch.ops.quire.silu_mul(x)
    return out
