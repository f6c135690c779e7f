"""Patches of pixels: their embedding, their places in a picture, and windows of them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire import kernels
from quire.engine.architecture.tower_spec import PatchSpec
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.linear import Linear


class PatchEmbedding(Linear):
    """A convolution whose stride is its size: a product of each patch and the weight; replicated on all ranks."""

    def __init__(self, spec: PatchSpec, width: int) -> None:
        super().__init__()
        own = FromSpec(spec.parameters("patches", width))
        self.weight = own.weight("patches")
        self.bias = own.weight("patches", "bias") if spec.bias else None

    @property
    def may_be_quantized(self) -> bool:
        return False

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Checkpoints do not quantize it, and neither does Quire."""
        self._product = kernels.pack_linear(self.weight.flatten(1), inputs=self.weight.input_dtype)
        self.weight.data = self.weight.data.new_empty(0)

    def forward(self, pixels: Tensor, adapter: kernels.OneAdapter | None = None) -> Tensor:
        """Patches `[patches, …]`, whose numbers are in the order of the weight's → `[patches, width]`."""
        x = pixels.flatten(1).to(self.weight.input_dtype)
        if self._product is not None:
            out = self._product(x, self.bias)
        else:
            out = torch.nn.functional.linear(x, self.weight.flatten(1), self.bias)
        return self._changed(out, x, None if adapter is None else adapter.rows(x))


def patches_of(images: Tensor, side: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Cut images `[images, channels, height, width]` into squares of `side` pixels, without the rest below and at the
    right. Returns the squares `[patches, channels, side, side]` row by row, and the numbers of images, rows and
    columns."""
    count, _, height, width = images.shape
    rows, columns = height // side, width // side
    cut = images[..., : rows * side, : columns * side].reshape(count, -1, rows, side, columns, side)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(0, 2), (count, rows, columns)


def places(grid: tuple[int, int, int], merge: int) -> Tensor:
    """Row and column, int64 `[2, patches]`, of the patches of a picture: `grid` is the number of frames, rows and
    columns. Frame by frame, and in each square by square of `merge` rows and columns."""
    frames, rows, columns = grid
    whole = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    squares = whole.view(2, rows // merge, merge, columns // merge, merge).transpose(2, 3)
    return squares.reshape(2, -1).repeat(1, frames)


def windows(grid: tuple[int, int, int], size: int) -> tuple[Tensor, Tensor]:
    """Divide each frame into windows of at most `size` rows and columns.

    Returns the numbers of the places of `grid` (frames, rows, columns) window by window, int64 `[places]`, and where
    each window begins in them, followed by their number, int64 `[windows + 1]`.
    """
    frames, rows, columns = grid
    numbers = torch.arange(frames * rows * columns).view(frames, rows, columns)
    parts = [part.flatten() for frame in numbers for band in frame.split(size) for part in band.split(size, dim=1)]
    lengths = torch.tensor([0, *map(len, parts)])
    return torch.cat(parts), lengths.cumsum(0)
