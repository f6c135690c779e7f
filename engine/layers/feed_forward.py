"""The gated feed-forward layer, its inner features cut over the ranks of a stage."""

from __future__ import annotations

from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import Architecture
from quire.engine.layers.linear import ColumnParallelLinear, RowParallelLinear, divided
from quire.engine.parallel import Parallel


class FeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`, SwiGLU (Shazeer 2020)."""

    def __init__(self, arch: Architecture, parallel: Parallel) -> None:
        super().__init__()
        parts = [divided(name, arch.intermediate_size, parallel) for name in ("gate", "up")]
        self.gate_up = ColumnParallelLinear(arch.hidden_size, parts, bias=arch.mlp_bias)
        self.down = RowParallelLinear(arch.intermediate_size, arch.hidden_size, parallel, bias=arch.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden_size]` → the same."""
        out: Tensor = self.down(kernels.silu_mul(self.gate_up(x)))
        return out
