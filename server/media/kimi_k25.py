"""The image processor of Kimi K2.5, which transformers has for torchvision only."""

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


class KimiK25Arguments(ImagesKwargs, total=False):
    """As in transformers."""

    max_patches: int
    patch_size: int
    merge_size: int


class KimiK25ImageProcessorPil(PilBackend):
    """Reduces a picture that is too large, and pads it to whole squares of patches."""

    valid_kwargs = KimiK25Arguments
    do_resize = True
    resample = PILImageResampling.BICUBIC
    size = {"max_height": 512, "max_width": 512}  # noqa: RUF012
    max_patches = 16384
    do_rescale = True
    rescale_factor = 1 / 255
    do_normalize = True
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    do_convert_rgb = True
    patch_size = 14
    merge_size = 2
    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012

    def _validate_preprocess_kwargs(self, **own: Any) -> None:  # type: ignore[override]
        """The size is given as the most patches along a side."""
        size = own.get("size")
        if size is not None and (size.max_height is None or size.max_height != size.max_width):
            raise ValueError("size must have equal max_height and max_width")
        super()._validate_preprocess_kwargs(**{**own, "do_resize": False})

    def _preprocess(  # type: ignore[override]  # called with names
        self,
        images: list[NDArray[Any]],
        size: SizeDict,
        resample: Any,
        patch_size: int,
        merge_size: int,
        max_patches: int,
        return_tensors: Any,
        **own: Any,
    ) -> BatchFeature:
        assert size.max_height is not None
        values, grids = [], []
        for image in images:
            if own["do_resize"]:
                height, width = reduced_size(image.shape[1], image.shape[2], patch_size, max_patches, size.max_height)
                image = self.resize(image, SizeDict(height=height, width=width), resample=resample)
                square = merge_size * patch_size
                image = np.pad(image, ((0, 0), (0, -height % square), (0, -width % square)))
            if own["do_rescale"]:
                image = self.rescale(image, own["rescale_factor"])
            if own["do_normalize"]:
                image = self.normalize(image, own["image_mean"], own["image_std"])
            rows, columns = image.shape[1] // patch_size, image.shape[2] // patch_size
            cut = image.reshape(3, rows, patch_size, columns, patch_size).transpose(1, 3, 0, 2, 4)
            values.append(cut.reshape(rows * columns, 3, patch_size, patch_size).astype(np.float32))
            grids.append([1, rows, columns])
        data = {"pixel_values": np.concatenate(values), "image_grid_thw": np.array(grids, dtype=np.int64)}
        return BatchFeature(data=data, tensor_type=return_tensors)


def reduced_size(height: int, width: int, patch: int, max_patches: int, max_side: int) -> tuple[int, int]:
    """Return height and width of the same shape, with at most `max_patches` patches, and `max_side` along a side."""
    count = max(1.0, height // patch) * max(1.0, width // patch)
    scale = min(1.0, math.sqrt(max_patches / count), max_side * patch / height, max_side * patch / width)
    return min(max(1, int(height * scale)), max_side * patch), min(max(1, int(width * scale)), max_side * patch)
