"""Where tokens are before their blocks are complete and stored in 4 bits (`quire.kernels.int4_kv`)."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.engine.config.engine_config import RecentBlocks

Ints = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers", Ints, Tensor)


class RecentSlots:
    """Places in `LayerCache.recent`, as of the first layer there. Each request slot has a ring of blocks, for its
    newest ones: the newest tokens, which may be computed again, are in them after each step. A row's other blocks are
    complete when the step ends, and have places for its time, before all rings. If the first of them was begun before,
    it is moved there from the ring."""

    def __init__(self, blocks: RecentBlocks, block_size: int) -> None:
        self._blocks, self._size = blocks, block_size

    def in_ring(self, owners: Numbers, positions: Numbers) -> Numbers:
        """The places of the newest tokens of these request slots."""
        size = self._size
        return self._ring_block(owners, positions // size) * size + positions % size

    def owners(self, places: Tensor) -> Tensor:
        """The inverse of `in_ring`: the request slots."""
        return (places // self._size - self._blocks.others) // self._blocks.per_request

    def _ring_block(self, owners: Numbers, blocks: Numbers) -> Numbers:
        return self._blocks.others + owners * self._blocks.per_request + blocks % self._blocks.per_request

    def of_step(
        self, slots: Ints, first: Ints, counts: Ints, owners: Ints, positions: Ints
    ) -> tuple[Ints, Ints | None]:
        """The fields of `RecentTokens` for rows of `counts` tokens from position `first` on, whose tokens are at
        `positions` of the request slots `owners`."""
        places, size, ring = self.in_ring(owners, positions), self._size, self._blocks.per_request
        begins = first // size
        others = np.maximum((first + counts - 1) // size + 1 - begins - ring, 0)
        if not others.any():
            return places, None
        assert others.sum() <= self._blocks.others
        starts = others.cumsum() - others
        rows = np.repeat(np.arange(len(slots)), counts)
        at = positions // size - begins[rows]
        places = np.where(at < others[rows], (starts[rows] + at) * size + positions % size, places)
        is_moved = (others > 0) & (first % size > 0)
        return places, np.stack((self._ring_block(slots, begins), starts))[:, is_moved]
