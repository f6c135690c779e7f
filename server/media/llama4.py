"""The image processor of Llama 4, which transformers has for torchvision only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_base import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs


class Llama4Arguments(ImagesKwargs, total=False):
    """As in transformers."""

    max_patches: int
    resize_to_max_canvas: bool


class Llama4ImageProcessorPil(PilBackend):
    """Fits a picture into a canvas of tiles, and adds a small version of the whole if there are several."""

    valid_kwargs = Llama4Arguments
    resample = PILImageResampling.BILINEAR
    image_mean = [0.5, 0.5, 0.5]  # noqa: RUF012
    image_std = [0.5, 0.5, 0.5]  # noqa: RUF012
    size = {"height": 336, "width": 336}  # noqa: RUF012
    do_resize = True
    do_rescale = True
    rescale_factor = 1 / 255
    do_normalize = True
    do_convert_rgb = True
    max_patches = 16
    resize_to_max_canvas = False

    def _preprocess(  # type: ignore[override]  # called with names
        self,
        images: list[NDArray[Any]],
        size: SizeDict,
        resample: Any,
        max_patches: int,
        resize_to_max_canvas: bool,
        return_tensors: Any,
        **own: Any,
    ) -> BatchFeature:
        assert size.height is not None
        tile, tiles, ratios = size.height, [], []
        for image in images:
            height, width = image.shape[1:]
            canvas = fitting_canvas(height, width, tile, max_patches, is_largest=resize_to_max_canvas)
            # The original has the canvas's sides in a tensor, so that what they divide is rounded to float32.
            limits: tuple[Any, ...] = np.float32(canvas[0]), np.float32(canvas[1])
            if not resize_to_max_canvas:
                wanted = max(height, tile), max(width, tile)
                limits = tuple(side if side <= most else most for side, most in zip(wanted, limits, strict=True))
            new_height, new_width = (max(side, 1) for side in undistorted_size(height, width, limits))
            picture = self.resize(image, SizeDict(height=new_height, width=new_width), resample=resample)
            picture = np.pad(picture, ((0, 0), (0, canvas[0] - new_height), (0, canvas[1] - new_width)))
            rows, columns = canvas[0] // tile, canvas[1] // tile
            parts = [
                picture[:, top : top + tile, left : left + tile]
                for top in range(0, canvas[0], tile)
                for left in range(0, canvas[1], tile)
            ]
            if len(parts) > 1:
                parts.append(self.resize(image, size, resample=resample))
            tiles += [self._scaled(part, own) for part in parts]
            ratios.append([rows, columns])
        return BatchFeature(data={"pixel_values": np.stack(tiles), "aspect_ratios": ratios}, tensor_type=return_tensors)

    def _scaled(self, part: NDArray[Any], own: dict[str, Any]) -> NDArray[Any]:
        """Rescale and normalize in bfloat16, as the model was trained."""
        x = part.astype(np.float32)
        if own["do_rescale"]:
            x = as_bfloat16(x * np.float32(own["rescale_factor"]))
        if own["do_normalize"]:
            mean, deviation = (
                as_bfloat16(np.array(own[name], dtype=np.float32))[:, None, None]
                for name in ("image_mean", "image_std")
            )
            x = as_bfloat16(as_bfloat16(x - mean) / deviation)
        return x


def as_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to the nearest bfloat16, and to even ones between two."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def undistorted_size(height: int, width: int, limits: tuple[Any, ...]) -> tuple[int, int]:
    """Return the largest height and width of the same shape within `limits`, in the arithmetic of their type."""
    down, across = limits[0] / height, limits[1] / width
    if across < down:
        return min(math.floor(height * across), int(limits[0])), int(limits[1])
    return int(limits[0]), min(math.floor(width * down), int(limits[1]))


def fitting_canvas(height: int, width: int, tile: int, max_tiles: int, *, is_largest: bool) -> tuple[int, int]:
    """Return height and width of the canvas of tiles in which the picture is enlarged least (or most, if `is_largest`),
    or reduced least if all canvases are smaller; among equals, the smallest one.
    """
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for count in range(max_tiles, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_shape.setdefault(rows / (count // rows), []).append((rows * tile, count // rows * tile))
    canvases = np.array([canvas for same in by_shape.values() for canvas in same])
    sides = canvases.astype(np.float32) / np.array([height, width], dtype=np.float32)
    scales = sides.min(axis=1)
    enlarging = scales[scales >= 1]
    scale = (enlarging.max() if is_largest else enlarging.min()) if len(enlarging) else scales.max()
    chosen = canvases[scales == scale]
    best = chosen[int(np.argmin(chosen[:, 0] * chosen[:, 1]))]
    return int(best[0]), int(best[1])
