"""Low-rank changes of linear layers by adapters (LoRA, Hu et al. 2021): their memory on a device, and a step's rows.

A layer has a pool of *rank rows*. An adapter of rank r owns r consecutive ones, whatever the ranks of others; nothing
is padded to a largest rank. Adapters are known by the number of their *slot*, which is the same in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class AdapterRows(NamedTuple):
    """The rows of a step by their adapters: the same for all layers. The tensors are int64, and their sizes do not
    depend on the adapters."""

    order: Tensor
    """`[rows]`, numbers of rows: those of slot 0 in ascending order, then those of slot 1, …; last those of none."""
    starts: Tensor
    """`[num_slots + 2]`, where each slot's rows start in `order`, where those of none start, and where these end: this
    is the number of rows, unless some have a slot that does not exist, and follow."""

    has_adapters: bool = True
    """False: the host knows that no row has an adapter, and layers are as without any. A captured step keeps this: one
    for rows that may have adapters has True, is right for every step, and reads no rank rows for rows of none; one with
    False is a step of its own, for batches of none."""
    host_starts: npt.NDArray[np.int64] | None = None
    """`starts`, on the host; None: they are not known there, as in captured steps."""

    @classmethod
    def of(cls, slots: Tensor, num_slots: int, has_adapters: bool = True) -> AdapterRows:
        """`slots` is the slot of each row, int64 `[rows]`; negative: none. Does not wait for the device.

        On CPUs, operations refuse rows whose slot is `num_slots` or more. On GPUs nothing waits to read the numbers:
        the caller is to check them before it sends them, or such a row is one of none.
        """
        last = num_slots + 1  # of slots that do not exist, after none's
        groups = torch.where(slots < 0, num_slots, slots + (slots >= num_slots)).clamp_(max=last)
        counts = torch.zeros(last + 2, dtype=torch.int64, device=slots.device)
        starts = counts.scatter_add_(0, groups + 1, torch.ones_like(groups)).cumsum(0)[: last + 1]
        return cls(groups.argsort(stable=True), starts, has_adapters)

    def count(self, slot: int) -> int:
        """The number of a slot's rows; 0 if the host does not know it."""
        return 0 if self.host_starts is None else int(self.host_starts[slot + 1] - self.host_starts[slot])

    def of_slot(self, slot: int) -> Tensor:
        """The numbers of a slot's rows, as far as the host knows them."""
        first = 0 if self.host_starts is None else int(self.host_starts[slot])
        return self.order[first : first + self.count(slot)]

    def slots(self) -> Tensor:
        """The slot of each row, int64 `[rows]`; -1: none. Does not wait for the device."""
        numbers = torch.arange(len(self.order), device=self.order.device)
        groups = torch.searchsorted(self.starts[1:-1], numbers, right=True)
        slots = torch.where(groups < len(self.starts) - 2, groups, -1)
        return torch.empty_like(self.order).scatter_(0, self.order, slots)

    def of_rows(self, rows: slice) -> AdapterRows:
        """Those of some rows alone. Does not wait for the device."""
        return AdapterRows.of(self.slots()[rows], len(self.starts) - 2, self.has_adapters)


class OneAdapter:
    """Rows that all have the same adapter, however many a layer has: those of an image in a tower."""

    def __init__(self, slot: int, num_slots: int) -> None:
        self.slot, self._num_slots = slot, num_slots
        self._rows: dict[int, AdapterRows] = {}
        """By their number: a tower has few of them."""

    def rows(self, x: Tensor) -> AdapterRows:
        """Those of `x`, `[rows, …]`. Does not wait for the device."""
        if (count := len(x)) not in self._rows:
            numbers = torch.arange(max(count, self._num_slots + 2), device=x.device)
            starts = torch.where(numbers[: self._num_slots + 2] > self.slot, count, 0)
            self._rows[count] = AdapterRows(numbers[:count], starts)
        return self._rows[count]


RowAdapters = AdapterRows | OneAdapter
"""The adapters of a layer's rows."""


@dataclass(frozen=True)
class LowRankPool:
    """The low-rank changes of a linear layer by all adapters on a device.

    A layer has one or more *parts*, whose output features follow each other (queries, keys and values; gates and ups):
    each part is changed by rank rows of its own. All tensors may be changed in place between steps, also of steps that
    have been captured.
    """

    a: Tensor
    """`[rank rows, in]`; A of the change `B A`, of the type of the layer's inputs, or of 16 bits for float32."""
    b: Tensor
    """`[rank rows, features of the widest part]`, B transposed, with the scaling included, of the type of `a`. Only the
    features of the row's part are read."""
    slots: Tensor
    """Int64 `[num_slots, parts, 2]`: the first rank row, and the rank; 0: the adapter does not change this part."""
    widths: tuple[int, ...]
    """Output features of each part."""
    bounds: Tensor
    """Int64 `[parts + 1]`, where the features of each part start."""
    largest_rank: int
    """At least the rank of any slot. On a GPU, the size of an intermediate result depends on it: a captured step keeps
    this number."""
    vectors: Tensor
    """Int64 `[num_slots]`: the row of `scale` and `bias` that the slot has; negative: it has none."""
    scale: Tensor | None = None
    """Float32 `[vector rows, out]`, factors of the changed product (DoRA, Liu et al. 2024); None: all are 1."""
    bias: Tensor | None = None
    """Float32 `[vector rows, out]`, added in the end; None: all are 0. If the layer's product includes a bias, which
    factors must not change, this is to include `(1 - scale)` times that bias."""

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        rank_rows: int,
        in_features: int,
        widths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        largest_rank: int,
        *,
        has_scale: bool = False,
        has_bias: bool = False,
    ) -> LowRankPool:
        """A pool in which no slot changes anything. With scales or biases, each slot has the row of its number.

        Rank rows have any numbers: those of none are not read, and on CPUs take no memory before they are written."""
        out = sum(widths)
        bounds = torch.tensor([0, *widths], device=device).cumsum(0)
        return cls(
            torch.empty(rank_rows, in_features, dtype=dtype, device=device),
            torch.empty(rank_rows, max(widths), dtype=dtype, device=device),
            torch.zeros(num_slots, len(widths), 2, dtype=torch.int64, device=device),
            tuple(widths),
            bounds,
            largest_rank,
            torch.arange(num_slots, device=device),
            torch.ones(num_slots, out, device=device) if has_scale else None,
            torch.zeros(num_slots, out, device=device) if has_bias else None,
        )

    def assign(self, slot: int, first: int, changes: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Store the changes of all parts as those of a slot, in the rank rows from `first` on: A `[rank, in]`, and B
        `[features, rank]` with the scaling included; None: the part is not changed."""
        assert len(changes) == len(self.widths)
        for part, change in enumerate(changes):
            rank = 0
            if change is not None:
                a, b = change
                rank, width = len(a), self.widths[part]
                assert b.shape == (width, rank)
                assert rank <= self.largest_rank
                assert first + rank <= len(self.a)
                self.a[first : first + rank] = a
                self.b[first : first + rank, :width] = b.T
            self.slots[slot, part] = torch.tensor((first, rank))
            first += rank


class ExpertChanges(NamedTuple):
    """The low-rank changes of a layer's experts in a step. Each row has a *pair* with each of its experts, one row's
    pairs after another's.

    In the pools, expert e of `experts` has the slot `adapter's slot * experts + e`.
    """

    gate_up: LowRankPool | None
    """None: no adapter changes these matrices."""
    down: LowRankPool | None
    x: Tensor
    """The experts' inputs as they were before they were rounded."""
    slots: Tensor
    """Int64 `[pairs]`, in the pools; negative: the row has no adapter, or the expert is on another rank."""
    pairs: AdapterRows
    """The pairs by these slots."""

    @classmethod
    def of(
        cls,
        gate_up: LowRankPool | None,
        down: LowRankPool | None,
        x: Tensor,
        ids: Tensor,
        rows: AdapterRows,
        experts: int,
    ) -> Self:
        """`ids` are the experts of `rows`, `[rows, top_k]`, as in `kernels.fused_experts`."""
        adapters = rows.slots()[:, None]
        has_none = (adapters < 0) | (ids < 0) | (ids >= experts)
        slots = torch.where(has_none, -1, adapters * experts + ids).flatten()
        return cls(gate_up, down, x, slots, AdapterRows.of(slots, (len(rows.starts) - 2) * experts))

    @property
    def size(self) -> int:
        """The features between the two matrices."""
        if self.gate_up is not None:
            return self.gate_up.widths[0]
        assert self.down is not None
        return self.down.a.shape[1]

    def of_pairs(self, pairs: Tensor, top_k: int) -> Self:
        """The changes of some pairs alone, as of rows with one expert."""
        slots = self.slots[pairs]
        return self._replace(
            x=self.x[pairs // top_k], slots=slots, pairs=AdapterRows.of(slots, len(self.pairs.starts) - 2)
        )

    def of_rows(self, rows: slice) -> Self:
        """The changes of some rows alone."""
        top_k = len(self.slots) // len(self.x)
        slots = self.slots.view(-1, top_k)[rows].flatten()
        return self._replace(x=self.x[rows], slots=slots, pairs=AdapterRows.of(slots, len(self.pairs.starts) - 2))
