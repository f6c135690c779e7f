"""What an adapter does to a model: changes of the tensors of the base's checkpoint. No torch here.

`quire.engine.architecture.adapters` derives an `AdapterSpec` from the settings and headers of an adapter's files.
Changes refer to the checkpoint's tensors as the checkpoint stores them, so that whoever reads slices of these tensors,
such as a rank's shard of one of our parameters, reads the same slices of the changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.engine.architecture.spec_parts import Shape

Runs = tuple[range, ...]
"""Rows or columns of a matrix, as ranges."""


def length(runs: Runs) -> int:
    return sum(map(len, runs))


@dataclass(frozen=True)
class Piece:
    """A matrix, or a part of one, in the adapter's file. A tensor with more than two dimensions is read as a matrix
    whose columns are all its dimensions but the first; a vector as a matrix of one column."""

    tensor: str
    """Name in the file."""
    rows: Runs
    """Of the file's matrix, in the order of the piece's rows."""
    columns: Runs
    index: int | None = None
    """Of a tensor with three dimensions, the matrix in it."""
    is_transposed: bool = False
    """The piece is `[columns, rows]` of these."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = length(self.rows), length(self.columns)
        return (columns, rows) if self.is_transposed else (rows, columns)


@dataclass(frozen=True)
class LowRank:
    """A low-rank change of rows of a matrix `[out, in]`: `scaling * up @ down` is added (Hu et al. 2021)."""

    up: Piece
    """`[rows, rank]`"""
    down: Piece
    """`[rank, in]`"""
    scaling: float
    rows: Runs
    """The rows that change, in the order of those of `up`, as the checkpoint has them. In a tensor that is stored as
    `[in, out]`, they are its columns."""
    expert: int | None = None
    """The index of the matrix in a stack."""
    magnitude: Piece | None = None
    """The norms of the changed matrix's rows, `[rows, 1]`: after the addition, each row is scaled to its norm (DoRA,
    Liu et al. 2024)."""
    has_column_norms: bool = False
    """The magnitude has the norms of columns instead, `[in, 1]`, as DoRA of embeddings does."""
    bias: Piece | None = None
    """`[rows, 1]`; `scaling` times it is added to the outputs."""

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True)
class TensorChange:
    """What happens to a tensor of the checkpoint: first it or some of its rows are replaced, then low-rank changes are
    added, which change different rows."""

    shape: Shape
    """As the checkpoint stores it, or as its replacement is."""
    is_transposed: bool = False
    """The last two dimensions are `[in, out]`."""
    replacement: Piece | None = None
    new_rows: tuple[tuple[int, ...], Piece] | None = None
    """Indices of rows, such as those of trained tokens, and their new values."""
    low_rank: tuple[LowRank, ...] = ()


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter of one base."""

    changes: Mapping[str, TensorChange]
    """By the name of the checkpoint's tensor. A head that is tied to the embedding has its own name."""
    vocab_size: int | None = None
    """The size of the vocabulary, if it differs from the base's."""
    invocation_tokens: tuple[int, ...] = ()
    """The adapter is active from the start of the last occurrence of these token ids on, and not at all without one
    (aLoRA, Greenewald et al. 2025); empty: it always is."""

    @property
    def max_rank(self) -> int:
        """0: there are only replacements."""
        return max((each.rank for change in self.changes.values() for each in change.low_rank), default=0)
