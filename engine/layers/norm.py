"""Root-mean-square normalization; never cut."""

from __future__ import annotations

from torch import Tensor, nn

from quire import kernels
from quire.engine.layers.weight import Weight, whole


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = Weight((size,), whole(size))

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`residual + x`, normalized and as it is."""
        return kernels.add_rms_norm(x, residual, self.weight, self._eps)
