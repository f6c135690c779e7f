"""Rotary positions along several axes of a picture."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.engine.architecture.spec_parts import RopeSpec
from quire.engine.layers.rotary import inverse_frequencies


class GridRotary:
    """Equal parts of a head's pairs turn by the place along each axis, with the same frequencies."""

    def __init__(self, rope: RopeSpec, axes: int = 2) -> None:
        with torch.device("cpu"):  # see `Rotary`
            self._frequencies = inverse_frequencies(replace(rope, dim=rope.dim // axes), max_length=0)

    def __call__(self, places: Tensor) -> Tensor:
        """`[axes, patches]` on the CPU → `[patches, dim]` for `kernels.rotary`: cosines, then sines."""
        angles = (places[:, :, None] * self._frequencies).transpose(0, 1).flatten(1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


class AlternatingGridRotary:
    """Of the frequencies of a head's pairs, even ones turn by the row, and odd ones by the column (Pixtral)."""

    def __init__(self, rope: RopeSpec) -> None:
        with torch.device("cpu"):  # see `Rotary`
            self._frequencies = inverse_frequencies(rope, max_length=0)

    def __call__(self, places: Tensor) -> Tensor:
        """See `GridRotary`; pairs of rows come first."""
        by_row, by_column = (place[:, None] * self._frequencies[start::2] for start, place in enumerate(places))
        angles = torch.cat((by_row, by_column), dim=-1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TurnsGridRotary:
    """Two pairs of a head have the same frequency: the first turns by the column, the next by the row (Kimi K2.5)."""

    def __init__(self, rope: RopeSpec) -> None:
        with torch.device("cpu"):  # see `Rotary`
            self._frequencies = inverse_frequencies(replace(rope, dim=rope.dim // 2), max_length=0)

    def __call__(self, places: Tensor) -> Tensor:
        """See `GridRotary`."""
        angles = (places.flip(0).T[:, None, :] * self._frequencies[:, None]).flatten(1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)
