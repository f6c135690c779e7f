"""Parameters with sharding information. The mapping to checkpoint tensors belongs to the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn

_HAS_MEMORY = ContextVar("has_memory", default=True)


@contextmanager
def without_memory() -> Iterator[None]:
    """Create weights without memory until they `allocate` it: on a GPU a model that is quantized while it is loaded
    has no room for its weights in the model's type."""
    token = _HAS_MEMORY.set(False)
    try:
        yield
    finally:
        _HAS_MEMORY.reset(token)


@dataclass(frozen=True)
class Shard:
    """A slice of one checkpoint tensor: `length` rows (columns if `dim` is 1) from `start` on, stored at `offset`."""

    shape: tuple[int, ...]
    """Shape of the complete checkpoint tensor."""
    start: int
    length: int
    dim: int = 0
    offset: int = 0
    part: str = ""
    """Which tensor, if a parameter combines several: q, k, v."""
    expert: int | None = None
    """The expert's number in the model, if a parameter holds several experts. All sizes are per expert."""
    local_expert: int = 0
    """The expert's index in the parameter."""

    @property
    def source(self) -> tuple[slice, ...]:
        """The slice of the checkpoint tensor."""
        return (slice(None),) * self.dim + (slice(self.start, self.start + self.length),)

    @property
    def target(self) -> tuple[slice | int, ...]:
        """The slice of the parameter."""
        within = (slice(None),) * self.dim + (slice(self.offset, self.offset + self.length),)
        return within if self.expert is None else (self.local_expert, *within)

    @property
    def elements(self) -> int:
        count = self.length
        for dim, size in enumerate(self.shape):
            count *= 1 if dim == self.dim else size
        return count


def whole(*shape: int) -> Shard:
    """An unsharded tensor."""
    return Shard(shape, 0, shape[0])


@dataclass(frozen=True)
class DenseWeights:
    """The weights of a whole module as an adapter changes them."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Weight(nn.Parameter):
    """A parameter on one rank, uninitialized, with torch's default device, and its default type unless `dtype` is
    given; `shards` specify its content.

    Elements that no shard covers (padding) must be zero.
    """

    shards: tuple[Shard, ...]
    input_dtype: torch.dtype
    """The type of the inputs that the weight is multiplied by: its own type, unless `store_as` has narrowed the
    weight."""

    def __new__(cls, shape: tuple[int, ...], *shards: Shard, dtype: torch.dtype | None = None) -> Weight:
        weight = super().__new__(cls, torch.empty(shape, dtype=dtype), requires_grad=False)
        weight.shards, weight.input_dtype = shards, weight.dtype
        if not _HAS_MEMORY.get():
            weight.untyped_storage().resize_(0)
        return weight

    def __init__(self, shape: tuple[int, ...], *shards: Shard, dtype: torch.dtype | None = None) -> None:
        """`__new__` does everything, as for every tensor subclass."""

    def allocate(self) -> None:
        """Give the weight its memory, uninitialized, if it has none."""
        storage = self.untyped_storage()
        if not storage.size():
            storage.resize_(self.nbytes)

    def store_as(self, dtype: torch.dtype) -> None:
        """Load the weight in this narrower type, in which the checkpoint has it. Only a layer that is then packed, or
        that widens the rows that it looks up, can have such a weight."""
        data = torch.empty(self.shape, dtype=dtype, device=self.device)
        data.untyped_storage().resize_(0)
        self.data = data
