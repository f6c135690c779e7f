"""The feed-forward layer, with its inner features sharded over the ranks of a stage."""

from __future__ import annotations

from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.clipped import ClippedColumnParallelLinear, ClippedRowParallelLinear
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.linear import ColumnParallelLinear, GatedLinear, Linear, RowParallelLinear


class MLP(nn.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020), or `down(activation(up(x)))`."""

    def __init__(self, spec: MLPSpec, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self._spec, self._parallel = spec, parallel
        own = FromSpec(spec.parameters(hidden_size), parallel)
        self.gate_up: ColumnParallelLinear
        if spec.is_clipped:
            self.gate_up = own.column_parallel("feed_forward.gate_up", ClippedColumnParallelLinear)
        elif spec.is_gated and spec.gate_multiplier == 1.0 and not (spec.sparsity or spec.is_adapted):
            self.gate_up = own.gated("feed_forward.gate_up", spec.activation)
        else:
            self.gate_up = own.column_parallel("feed_forward.gate_up")
        self.down = own.row_parallel(
            "feed_forward.down", ClippedRowParallelLinear if spec.is_clipped else RowParallelLinear
        )

    @property
    def reads_input(self) -> Linear:
        """The layer that alone multiplies the input."""
        return self.gate_up

    def forward(
        self,
        x: Tensor | kernels.RoundedRows,
        adapters: kernels.RowAdapters | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        """`[tokens, hidden_size]` → the same. `added` is added to gates and ups, if the spec `is_adapted`."""
        out: Tensor = self.down(self._inner(x, adapters, added), adapters)
        return self._scaled(out)

    def partial(self, x: Tensor | kernels.RoundedRows, adapters: kernels.RowAdapters | None = None) -> Tensor:
        """This rank's part of the output; the output is the sum over all ranks."""
        return self._scaled(self.down.partial(self._inner(x, adapters), adapters))

    def _inner(
        self, x: Tensor | kernels.RoundedRows, adapters: kernels.RowAdapters | None, added: Tensor | None = None
    ) -> Tensor | kernels.RoundedRows:
        if isinstance(self.gate_up, GatedLinear):
            return self.gate_up.forward_to(self.down, x, adapters)
        inner: Tensor = self.gate_up(x, adapters)
        inner = inner if added is None else inner + added
        if not self._spec.is_gated:
            return kernels.activate(inner, self._spec.activation)
        gate, up = inner.chunk(2, dim=-1)
        gate = self._sparse(gate) if self._spec.sparsity else gate
        return kernels.act_mul(torch.cat((gate * self._spec.gate_multiplier, up), dim=-1), self._spec.activation)

    def _sparse(self, gate: Tensor) -> Tensor:
        """See `MLPSpec.sparsity`."""
        wide = gate.float()
        means = torch.stack((wide.mean(-1), wide.square().mean(-1)), dim=-1)
        mean, square = (self._parallel.all_reduce(means) / self._parallel.size).chunk(2, dim=-1)
        deviation = (square - mean.square()).clamp(min=0).sqrt()
        return F.relu(wide - (mean + deviation * NormalDist().inv_cdf(self._spec.sparsity))).to(gate.dtype)

    def _scaled(self, out: Tensor) -> Tensor:
        return out if self._spec.output_multiplier == 1.0 else out * self._spec.output_multiplier
