"""Changes of an embedding's rows, or of a head's, by an adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowChanges:
    """What an adapter does to this rank's rows of a matrix `[rows, width]`: some are replaced, and then a low-rank
    product is added to all."""

    numbers: Tensor
    """Int64 `[replaced]`, ascending."""
    rows: Tensor
    """`[replaced, width]`"""
    up: Tensor
    """`[rows, rank]`; rank 0: nothing is added. Of heads it is always 0: their products have a pool."""
    down: Tensor
    """`[rank, width]`, with the scaling."""

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values())

    def vectors(self, numbers: Tensor, vectors: Tensor) -> Tensor:
        """The changed rows with these numbers, given the base's, `[tokens, width]`."""
        if len(self.numbers):
            at = torch.searchsorted(self.numbers, numbers).clamp_(max=len(self.numbers) - 1)
            vectors = torch.where((self.numbers[at] == numbers)[:, None], self.rows[at].to(vectors.dtype), vectors)
        if len(self.down):
            added = self.up[numbers].float() @ self.down.float()
            vectors = (vectors.float() + added).to(vectors.dtype)
        return vectors
