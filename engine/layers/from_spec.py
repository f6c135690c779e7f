"""Builds a rank's weights and linear layers from the parameters that a spec describes (`spec.parameters`).

Embeddings, heads and norms take their sizes as arguments instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from quire.engine.architecture.spec_parts import Parameter
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.linear import ColumnParallelLinear, GatedLinear, Partition, ReplicatedLinear, RowParallelLinear
from quire.engine.layers.weight import Shard, Weight

WHOLE = Parallel()
"""A single rank."""


def if_divisible(parallel: Parallel, units: int) -> Parallel:
    """The ranks if they divide so many units evenly, or else a single rank: each computes all of them."""
    return WHOLE if units % parallel.size else parallel


class FromSpec:
    """Looks up parameters by module path and kind, as the spec names them."""

    def __init__(self, parameters: Iterable[Parameter], parallel: Parallel = WHOLE) -> None:
        """Without `parallel`, the parameters must be the same on all ranks."""
        self._parameters = {(each.module, each.kind): each for each in parameters}
        self._parallel = parallel

    def shards(self, module: str, kind: str = "weight") -> list[Shard]:
        """The rank's slice of each part, one after another."""
        parameter, shards, offset = self._parameters[module, kind], list[Shard](), 0
        dim = parameter.dim
        own_shapes = parameter.shapes(self._parallel.size)
        for (part, shape), own in zip(parameter.parts.items(), own_shapes, strict=True):
            units = parameter.units.get(part)
            assert units is None or (units.spare != "padding" and units.is_divisible(self._parallel.size))
            start = 0 if units is None else units.start(shape[dim], self._parallel.rank, self._parallel.size)
            shards.append(Shard(shape, start, own[dim], dim, offset, part))
            offset += own[dim]
        return shards

    def widths(self, module: str) -> list[int]:
        """The rank's output features of each part of a linear layer."""
        return [shard.length for shard in self.shards(module)]

    def weight(self, module: str, kind: str = "weight") -> Weight:
        """The rank's slices of a parameter as one; float32 if the spec says so."""
        shards = self.shards(module, kind)
        shape, dim = shards[0].shape, shards[0].dim
        length = sum(shard.length for shard in shards)
        dtype = torch.float32 if self._parameters[module, kind].is_float32 else None
        return Weight((*shape[:dim], length, *shape[dim + 1 :]), *shards, dtype=dtype)

    def stack(self, module: str, kind: str, experts: Sequence[int]) -> Weight:
        """The same parameter of several experts, given by their numbers in the model, stacked."""
        one = self.weight(module, kind)
        shards = [
            replace(shard, expert=expert, local_expert=place)
            for place, expert in enumerate(experts)
            for shard in one.shards
        ]
        return Weight((len(experts), *one.shape), *shards)

    def column_parallel(
        self, module: str, kind: type[ColumnParallelLinear] = ColumnParallelLinear
    ) -> ColumnParallelLinear:
        """A layer with the rank's output features: a share, or all of them."""
        return kind(self._inputs(module), self._parts(module), bias=self._has_bias(module))

    def gated(self, module: str, activation: str) -> GatedLinear:
        """A column-parallel layer of gates and the features that they multiply."""
        gate, up = self._parts(module)
        return GatedLinear(self._inputs(module), gate, up, activation, bias=self._has_bias(module))

    def row_parallel(self, module: str, kind: type[RowParallelLinear] = RowParallelLinear) -> RowParallelLinear:
        """A layer with the rank's share of the input features."""
        (shape,) = self._parameters[module, "weight"].parts.values()
        return kind(shape[1], shape[0], self._parallel, bias=self._has_bias(module))

    def replicated(self, module: str) -> ReplicatedLinear:
        """A layer that is computed in float32 on every rank."""
        (shape,) = self._parameters[module, "weight"].parts.values()
        return ReplicatedLinear(shape[1], shape[0], bias=self._has_bias(module))

    def _parts(self, module: str) -> list[Partition]:
        return [Partition(each.part, each.shape[0], each.start, each.length) for each in self.shards(module)]

    def _inputs(self, module: str) -> int:
        return next(iter(self._parameters[module, "weight"].parts.values()))[1]

    def _has_bias(self, module: str) -> bool:
        return (module, "bias") in self._parameters
