"""The interface of readers of quantized tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from quire.engine.architecture.quantization.method import Scheme, Shape
from quire.kernels.quantized import VALUES

S = TypeVar("S", bound=Scheme)
Cut = tuple[slice, ...]
"""Slices of `[out, in]` or `[experts, out, in]`, all with start and stop; rows may have a step."""


Part = Literal["codes", "scales", "offsets"]


class Sliceable(Protocol):
    """A tensor of a checkpoint."""

    def __getitem__(self, cut: Cut, /) -> Tensor: ...


class Reader(ABC, Generic[S]):
    """The weight of a module as a checkpoint stores it. Slices are read when they are requested, and no more than the
    slice (up to whole words and groups) is copied."""

    def __init__(self, scheme: S, module: str, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` has the tensors that `scheme.tensors(module, shape)` names, except optional ones that the
        checkpoint lacks; they are backed by the file."""
        self.scheme, self.shape = scheme, shape
        self._tensors = {name.removeprefix(module): tensor for name, tensor in tensors.items()}

    @property
    def group(self) -> int:
        """Inputs that share factors."""
        return self.scheme.group or self.shape[-1]

    @abstractmethod
    def codes(self, cut: Cut) -> Tensor:
        """uint8 `[…, rows, columns]`."""

    @abstractmethod
    def scales(self, cut: Cut) -> Tensor:
        """float32 `[…, rows, groups]`; the last slice of the cut is of groups instead of columns."""

    def offsets(self, cut: Cut) -> Tensor | None:
        """As `scales`, in units of the values; None if the scheme has none."""
        return None

    def order(self) -> Tensor | None:
        """The group of each column, int64 `[in]`; None: groups are consecutive columns."""
        return None

    def rounding(self) -> Tensor | None:
        """The scale and the zero point of inputs, float32 `[2]`, if they are constant."""
        return None

    def global_scale(self) -> Tensor | None:
        """The factor that inputs are multiplied by before they are rounded to 4 bits, float32, one number or
        `[experts]`, if the checkpoint has it."""
        return None

    def part(self, part: Part, group: int) -> Sliceable:
        """The codes or factors, as a tensor with a factor for each `group` columns, which divide a stored group."""
        if part == "codes":
            return _Codes(self)
        return _Factors(self, part, group)

    def __getitem__(self, cut: Cut) -> Tensor:
        """The dequantized weights, in float32."""
        columns = cut[-1]
        values, order = VALUES[self.scheme.values][self.codes(cut).int()], self.order()
        if order is None:
            order = torch.arange(self.shape[-1]) // self.group
        own = order[columns]
        first, last = int(own.min()), int(own.max())
        groups = (*cut[:-1], slice(first, last + 1))
        if (offsets := self.offsets(groups)) is not None:
            values += offsets[..., own - first]
        scales: Tensor = self.scales(groups)[..., own - first]
        return values.mul_(scales)


class _Codes:
    def __init__(self, reader: Reader[Any]) -> None:
        self._reader = reader

    def __getitem__(self, cut: Cut) -> Tensor:
        return self._reader.codes(cut)


class _Factors:
    def __init__(self, reader: Reader[Any], part: Literal["scales", "offsets"], group: int) -> None:
        self._reader, self._part, self._group = reader, part, group

    def __getitem__(self, cut: Cut) -> Tensor:
        stored, groups = self._reader.group, cut[-1]
        first, last = groups.start * self._group // stored, -(-groups.stop * self._group // stored)
        factors: Tensor | None = getattr(self._reader, self._part)((*cut[:-1], slice(first, last)))
        assert factors is not None
        return factors[..., torch.arange(groups.start, groups.stop) * self._group // stored - first]
