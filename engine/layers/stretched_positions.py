"""A learned grid of position vectors, stretched to a picture's size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.architecture.tower_spec import StretchedPositionsSpec
from quire.engine.layers.sending import send
from quire.engine.layers.weight import Weight, whole

_SHARPNESS = -0.75
"""The parameter of cubic interpolation, as in torch."""


class StretchedPositions(nn.Module):
    """See `StretchedPositionsSpec`; replicated on all ranks."""

    def __init__(self, spec: StretchedPositionsSpec, width: int) -> None:
        super().__init__()
        self._spec = spec
        self.weight = Weight((spec.side**2, width), whole(spec.side**2, width))

    def forward(self, places: Tensor, rows: int, columns: int) -> Tensor:
        """The vectors `[patches, width]` of `places` `[2, patches]` of a picture with so many patches."""
        device, side = self.weight.device, self._spec.side
        down, across = (send(self._shares(size), device) for size in (rows, columns))
        grid = self.weight.float().view(side, -1)
        stretched = across @ (down @ grid).view(rows, side, -1)  # [rows, columns, width]
        row, column = send(places, device)
        return stretched[row, column].to(self.weight.dtype)

    def _shares(self, size: int) -> Tensor:
        """The share of each of the grid's rows (or columns) in each of the picture's, float32 `[size, side]`."""
        side, places = self._spec.side, torch.arange(size, dtype=torch.float32)
        if self._spec.kind == "linear":
            exact, taps = places * (side - 1) / max(size - 1, 1), torch.arange(2)
        else:
            exact, taps = (places + 0.5) * side / size - 0.5, torch.arange(-1, 3)
        numbers = exact.floor().long()[:, None] + taps
        distance = (exact[:, None] - numbers).abs()
        if self._spec.kind == "linear":
            shares = (1 - distance).clamp(min=0)
        else:
            near = ((_SHARPNESS + 2) * distance - (_SHARPNESS + 3)) * distance.square() + 1
            far = ((distance - 5) * distance + 8) * distance * _SHARPNESS - 4 * _SHARPNESS
            shares = torch.where(distance <= 1, near, far)
        # Rows beyond the border are the border's.
        return torch.zeros(size, side).scatter_add_(1, numbers.clamp(0, side - 1), shares)
