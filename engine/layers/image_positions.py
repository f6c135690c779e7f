"""Positions that are added to the patches of an image, and its class token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.architecture.vit_spec import ImagePositionsSpec
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.sending import send


class ImagePositions(nn.Module):
    """See `ImagePositionsSpec`; replicated on all ranks."""

    def __init__(self, spec: ImagePositionsSpec, width: int) -> None:
        super().__init__()
        self._spec = spec
        own = FromSpec(spec.parameters(width))
        self.weight = own.weight("positions") if spec.kind else None
        self.class_token = own.weight("positions", "class_token") if spec.class_token else None

    def forward(self, x: Tensor) -> Tensor:
        """Patches `[tiles, rows, columns, width]` → tokens `[tiles, tokens, width]`"""
        _, rows, columns, width = x.shape
        x, token = x.flatten(1, 2), None
        places = None if self.weight is None else self.weight.flatten(0, -2)[self._spec.unused :]
        if self.class_token is not None:
            token = self.class_token.view(1, width)
            if places is not None:  # the class token has one, too
                cut = (1, len(places) - 1) if self._spec.class_token == "first" else (len(places) - 1, 1)
                first, last = places.split_with_sizes(cut)
                own, places = (first, last) if self._spec.class_token == "first" else (last, first)
                token = token + own
        x = x if places is None else x + self._stretched(places, rows, columns)
        if token is None:
            return x
        token = token.expand(len(x), 1, width)
        return torch.cat((token, x) if self._spec.class_token == "first" else (x, token), dim=1)

    def patches(self, tokens: Tensor) -> Tensor:
        """Cut the class token: `[tiles, tokens, …]` → `[tiles, patches, …]`"""
        match self._spec.class_token:
            case "first":
                return tokens[:, 1:]
            case "last":
                return tokens[:, :-1]
        return tokens

    def _stretched(self, places: Tensor, rows: int, columns: int) -> Tensor:
        """The vectors of the grid, `[grid * grid, width]`, for a grid of other sizes: `[rows * columns, width]`."""
        grid, kind = self._spec.grid, self._spec.kind
        if kind == "fractional":
            row, column = (send(_fractions(count, grid), places.device) for count in (rows, columns))
            return places[(row[:, None] * grid + column).flatten()]
        if kind == "axes":
            if max(rows, columns) > grid:
                raise ValueError(f"images must have at most {grid} patches along a side, not {rows} × {columns}")
            return (places[:columns] + places[grid : grid + rows, None]).flatten(0, 1)
        if (rows, columns) == (grid, grid):
            return places
        if kind in ("bicubic", "bilinear", "antialiased", "antialiased bicubic"):
            table = places.float().view(1, grid, grid, -1).permute(0, 3, 1, 2)
            mode, antialias = "bicubic" if kind.endswith("bicubic") else "bilinear", kind.startswith("antialiased")
            spread = F.interpolate(table, (rows, columns), mode=mode, align_corners=False, antialias=antialias)
            return spread.flatten(2)[0].T.to(places.dtype)
        raise ValueError(f"images must have {grid} × {grid} patches, not {rows} × {columns}")


def of_frames(count: int, width: int) -> Tensor:
    """What is added to all patches of each of `count` frames: sines, then cosines, of the frame's number times
    frequencies from 1 to almost 1/10000, float32 `[count, width]`."""
    with torch.device("cpu"):
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.arange(count, dtype=torch.float32)[:, None] * frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=1)


def _fractions(count: int, grid: int) -> Tensor:
    """For each of `count` patches, the patch of a grid that is at the same fraction of the side. In float32, since a
    patch on the boundary between two is in the one that rounding puts it in."""
    with torch.device("cpu"):
        fractions = (torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
        return torch.bucketize(fractions, torch.arange(1 / grid, 1.0, 1 / grid), right=True)
