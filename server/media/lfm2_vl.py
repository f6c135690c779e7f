"""The image processor of LFM2-VL, which transformers has for torchvision only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_base import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs
from transformers.utils.constants import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD


class Lfm2VlArguments(ImagesKwargs, total=False):
    """As in transformers."""

    downsample_factor: int
    do_image_splitting: bool
    min_tiles: int
    max_tiles: int
    use_thumbnail: bool
    min_image_tokens: int
    max_image_tokens: int
    encoder_patch_size: int
    tile_size: int
    max_pixels_tolerance: float
    return_row_col_info: bool


class Lfm2VlImageProcessorPil(PilBackend):
    """Resizes a small picture, and cuts a large one into tiles with a small version of the whole; each becomes padded
    patches.
    """

    valid_kwargs = Lfm2VlArguments
    downsample_factor = 2
    do_image_splitting = True
    min_tiles = 2
    max_tiles = 10
    use_thumbnail = True
    min_image_tokens = 64
    max_image_tokens = 256
    encoder_patch_size = 16
    tile_size = 512
    max_pixels_tolerance = 2.0
    do_resize = True
    size = {"height": 512, "width": 512}  # noqa: RUF012
    resample = PILImageResampling.BILINEAR
    do_rescale = True
    rescale_factor = 1 / 255
    do_normalize = True
    do_convert_rgb = True
    do_pad = True
    return_row_col_info = False
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    model_input_names = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]  # noqa: RUF012

    def _preprocess(  # type: ignore[override]  # called with names
        self, images: list[NDArray[Any]], resample: Any, return_tensors: Any, return_row_col_info: bool, **own: Any
    ) -> BatchFeature:
        patch, factor = own["encoder_patch_size"], own["downsample_factor"]
        splits, tile = own["do_image_splitting"], own["tile_size"]
        longest = max(own["max_image_tokens"] * factor**2, (tile // patch) ** 2 if splits else 0)
        values, shapes, info = [], [], []
        for image in images:
            height, width = image.shape[1:]
            limits = own["min_image_tokens"], own["max_image_tokens"]
            small = fitting_size(height, width, patch * factor, *limits)
            columns = rows = 1
            most = limits[1] * (patch * factor) ** 2 * own["max_pixels_tolerance"]
            if splits and own["max_tiles"] > 1 and rounded_pixels(height, width, patch, patch * factor) > most:
                columns, rows = tile_grid(height, width, own["min_tiles"], own["max_tiles"], tile)
                whole = self.resize(image, SizeDict(height=tile * rows, width=tile * columns), resample=resample)
                parts = [
                    whole[:, top : top + tile, left : left + tile]
                    for top in range(0, tile * rows, tile)
                    for left in range(0, tile * columns, tile)
                ]
            else:
                parts = []
            if not parts or (own["use_thumbnail"] and columns * rows > 1):
                parts.append(self.resize(image, SizeDict(height=small[0], width=small[1]), resample=resample))
            for part in parts:
                if own["do_rescale"]:
                    part = self.rescale(part, own["rescale_factor"])
                if own["do_normalize"]:
                    part = self.normalize(part, own["image_mean"], own["image_std"])
                down, across = part.shape[1] // patch, part.shape[2] // patch
                cut = (
                    part.reshape(3, down, patch, across, patch)
                    .transpose(1, 3, 2, 4, 0)
                    .reshape(down * across, -1)
                    .astype(np.float32)
                )
                values.append(cut)
                shapes.append((down, across))
            info.append((rows, columns, [*small]))
        longest = max(longest, *map(len, values))
        data: dict[str, Any] = {
            "pixel_values": np.stack([np.pad(cut, ((0, longest - len(cut)), (0, 0))) for cut in values]),
            "pixel_attention_mask": np.array([[*[1] * len(cut), *[0] * (longest - len(cut))] for cut in values]),
            "spatial_shapes": np.array(shapes, dtype=np.int64),
        }
        if return_row_col_info:
            names = ("image_rows", "image_cols", "image_sizes")
            data |= dict(zip(names, map(list, zip(*info, strict=True)), strict=True))
        return BatchFeature(data=data, tensor_type=return_tensors)


def fitting_size(height: int, width: int, factor: int, min_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Return height and width of the same shape, multiples of `factor`, which give at least `min_tokens` squares of
    that size, and at most `max_tokens` if the shape allows it.
    """
    new_height, new_width = (max(factor, round(side / factor) * factor) for side in (height, width))
    least, most = min_tokens * factor**2, max_tokens * factor**2
    if new_height * new_width > most:
        scale = math.sqrt(height * width / most)
        return tuple(max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if new_height * new_width < least:
        scale = math.sqrt(least / (height * width))
        return tuple(math.ceil(side * scale / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return new_height, new_width


def rounded_pixels(height: int, width: int, patch: int, factor: int) -> int:
    """The pixels of a picture whose sides are rounded to multiples of `factor`, and are at least a patch's."""
    return max(patch, round(height / factor) * factor) * max(patch, round(width / factor) * factor)


def tile_grid(height: int, width: int, min_tiles: int, max_tiles: int, tile: int) -> tuple[int, int]:
    """Return the columns and rows of tiles whose shape is closest to the picture's; among equal ones, the last one that
    the picture covers more than half of.
    """
    grids = {  # in the order of the original, which sets the order of equal ones
        (w, h)
        for n in range(min_tiles, max_tiles + 1)
        for w in range(1, n + 1)
        for h in range(1, n + 1)
        if min_tiles <= w * h <= max_tiles
    }
    best, least = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - columns / rows)
        is_covered = width * height > 0.5 * tile * tile * columns * rows
        if difference < least or (difference == least and is_covered):
            best, least = (columns, rows), difference
    return best
