"""What keeps the keys and values of whole sequences, and where a paged cache has them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class SequenceKV(Protocol):
    """Keys and values of whole sequences, for `attention` without biases by slices of the rows. Sequence `s` is in rows
    `starts[s]:starts[s + 1]`. A slice begins with row `first`."""

    def write(self, query: Tensor, key: Tensor, value: Tensor, first: int, cos_sin: Tensor | None) -> Tensor:
        """Store the keys and values of a slice, `[rows, kv_heads, head_dim]`, and return its queries. With `cos_sin`,
        queries and keys are rotated (`rotary`)."""
        ...

    def attend(self, query: Tensor, first: int, scale: float) -> Tensor:
        """`[rows, heads, head_dim]` of a slice → the same, when all keys and values are stored."""
        ...


class SequenceBlocks(NamedTuple):
    """The blocks of a paged cache that sequences take one after another, each beginning with a block, int64."""

    slots: Tensor
    """`[rows]`, as of `rotary_write_kv`."""
    ends: Tensor
    """`[rows]`, as of `paged_attention`: a row attends to all of its sequence."""
    lengths: Tensor
    """`[sequences]`"""
    tables: Tensor
    """`[sequences, blocks of the longest]`; entries behind a sequence are the numbers that follow."""
    num_blocks: int
    """Of all sequences."""

    @staticmethod
    def of(starts: Tensor, block_size: int) -> SequenceBlocks:
        """For sequences that begin at `starts` `[sequences + 1]`, which ends with the number of rows, on the host."""
        lengths = starts.diff()
        counts = (lengths + block_size - 1) // block_size
        first = counts.cumsum(0) - counts
        slots = torch.arange(int(starts[-1])) + (first * block_size - starts[:-1]).repeat_interleave(lengths)
        tables = first[:, None] + torch.arange(int(counts.max()))
        return SequenceBlocks(slots, lengths.repeat_interleave(lengths), lengths, tables, int(counts.sum()))
