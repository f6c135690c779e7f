"""Parameters that know their sharding. Which checkpoint tensor a part comes from is the model's business."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Shard:
    """A slice of one checkpoint tensor: `length` rows (or columns, `dim` 1) from `start` on, put at `offset`."""

    shape: tuple[int, ...]
    """Of the whole checkpoint tensor."""
    start: int
    length: int
    dim: int = 0
    offset: int = 0
    part: str = ""
    """Which tensor, where a parameter is made of several: q, k, v."""
    expert: int | None = None
    """Which expert's, where a parameter holds several: its number in the model. All sizes are those of one expert."""
    place: int = 0
    """That expert's place in the parameter."""

    @property
    def source(self) -> tuple[slice, ...]:
        """The slice of the checkpoint tensor."""
        return (slice(None),) * self.dim + (slice(self.start, self.start + self.length),)

    @property
    def target(self) -> tuple[slice | int, ...]:
        """The slice of the parameter."""
        within = (slice(None),) * self.dim + (slice(self.offset, self.offset + self.length),)
        return within if self.expert is None else (self.place, *within)

    @property
    def elements(self) -> int:
        count = self.length
        for dim, size in enumerate(self.shape):
            count *= 1 if dim == self.dim else size
        return count


def whole(*shape: int) -> Shard:
    """All of a tensor."""
    return Shard(shape, 0, shape[0])


class Weight(nn.Parameter):
    """A parameter of one rank, uninitialized, of torch's default type and device; `shards` say what fills it.

    What no shard covers (padding) is to be zero.
    """

    shards: tuple[Shard, ...]

    def __new__(cls, shape: tuple[int, ...], *shards: Shard) -> Weight:
        weight = super().__new__(cls, torch.empty(shape), requires_grad=False)
        weight.shards = shards
        return weight

    def __init__(self, shape: tuple[int, ...], *shards: Shard) -> None:
        """All is done in `__new__`, as for every tensor subclass."""
