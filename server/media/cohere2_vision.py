"""The image processor of Command A Vision, which transformers has for torchvision only.

It differs from GOT-OCR 2's in how many tiles a picture is cut into.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil


class Cohere2VisionImageProcessorPil(GotOcr2ImageProcessorPil):
    """Cuts a picture into tiles, and adds a small version of the whole."""

    size = {"height": 512, "width": 512}  # noqa: RUF012
    crop_to_patches = True
    patch_size = 16

    def crop_image_to_patches(  # type: ignore[override]  # called with names
        self, image: NDArray[Any], min_patches: int, max_patches: int, patch_size: Any, resample: Any, **_: Any
    ) -> list[NDArray[Any]]:
        """Return tiles [channels, height, width] of a picture of the same layout."""
        columns, rows = tile_grid(image.shape[1:], (patch_size.height, patch_size.width), max_patches)
        whole = type(patch_size)(height=patch_size.height * rows, width=patch_size.width * columns)
        resized = self.resize(image, whole, resample=resample)
        tiles = [
            resized[:, top : top + patch_size.height, left : left + patch_size.width]
            for top in range(0, whole.height, patch_size.height)
            for left in range(0, whole.width, patch_size.width)
        ]
        return tiles if len(tiles) == 1 else [*tiles, self.resize(image, patch_size, resample=resample)]


def tile_grid(size: tuple[int, ...], tile: tuple[int, int], max_tiles: int) -> tuple[int, int]:
    """Return columns and rows for a picture (height, width): the ones that enlarge it least, or reduce it least if all
    do. Among equals, the first in order of tiles, then of columns.
    """
    grids = sorted(
        ((w, h) for w in range(1, max_tiles + 1) for h in range(1, max_tiles + 1) if w * h <= max_tiles),
        key=lambda grid: grid[0] * grid[1],
    )
    # As the original does, both sides are measured by the tile's height.
    scales = np.min(np.array(grids) * tile[0] / np.array([size[1], size[0]]), axis=1)
    if np.all(scales < 1):
        return grids[int(np.argmax(scales))]
    return grids[int(np.argmin(np.where(scales < 1, np.inf, scales)))]
