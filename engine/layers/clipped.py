"""Linear layers that clamp their inputs and outputs to bounds that the checkpoint has (Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import ColumnParallelLinear, Partition, RowParallelLinear
from quire.engine.layers.weight import Shard, Weight, whole


class ClippedColumnParallelLinear(ColumnParallelLinear):
    """The parts have bounds of their own."""

    def __init__(self, in_features: int, parts: Sequence[Partition], *, bias: bool) -> None:
        super().__init__(in_features, parts, bias=bias)
        self._widths = [part.length for part in parts]
        shards = [Shard((1,), 0, 1, offset=number, part=part.name) for number, part in enumerate(parts)]
        self.input_min, self.input_max = Weight((len(parts),), *shards), Weight((len(parts),), *shards)
        self.output_min, self.output_max = Weight((len(parts),), *shards), Weight((len(parts),), *shards)
        self._bounds: list[tuple[float, float]] = []
        """Of each part's inputs, once they are known."""

    def read_bounds(self) -> None:
        """Prepare for use, when the parameters are loaded: whether parts clamp their inputs alike is decided here, on
        the host."""
        self._bounds = [*zip(self.input_min.tolist(), self.input_max.tolist(), strict=True)]

    def forward(self, x: Tensor | kernels.RoundedRows, adapters: kernels.RowAdapters | None = None) -> Tensor:
        """See `ColumnParallelLinear`. Parts that clamp their inputs alike are one product."""
        assert isinstance(x, Tensor)
        assert self._bounds
        products = {
            each: self.product(x.clamp(*each), self.bias, adapters).split_with_sizes(self._widths, -1)
            for each in dict.fromkeys(self._bounds)
        }
        found = [
            products[each][number].clamp(self.output_min[number], self.output_max[number])
            for number, each in enumerate(self._bounds)
        ]
        return torch.cat(found, dim=-1)


class ClippedRowParallelLinear(RowParallelLinear):
    """See the module."""

    def __init__(self, in_features: int, out_features: int, parallel: Parallel, *, bias: bool) -> None:
        super().__init__(in_features, out_features, parallel, bias=bias)
        self.input_min, self.input_max = Weight((1,), whole(1)), Weight((1,), whole(1))
        self.output_min, self.output_max = Weight((1,), whole(1)), Weight((1,), whole(1))

    def forward(self, x: Tensor | kernels.RoundedRows, adapters: kernels.RowAdapters | None = None) -> Tensor:
        """See `RowParallelLinear`."""
        assert isinstance(x, Tensor)
        clamped = x.clamp(self.input_min, self.input_max)
        return super().forward(clamped, adapters).clamp(self.output_min, self.output_max)
