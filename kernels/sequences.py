"""What keeps the keys and values of whole sequences."""

from __future__ import annotations

from typing import Protocol

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
