"""The image processor of Step 3.7, which transformers has for torchvision only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_base import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD


class Step3p7Arguments(ImagesKwargs, total=False):
    """As in transformers."""

    patch_size: int
    max_image_size: int


class Step3p7ImageProcessorPil(PilBackend):
    """Makes a small version of a picture, and windows of a larger one unless it is small."""

    valid_kwargs = Step3p7Arguments
    resample = PILImageResampling.BILINEAR
    size = {"height": 728, "width": 728}  # noqa: RUF012
    patch_size = 504
    do_rescale = True
    rescale_factor = 1 / 255
    do_normalize = True
    image_mean = OPENAI_CLIP_MEAN
    image_std = OPENAI_CLIP_STD
    do_convert_rgb = True
    max_image_size = 3024
    vision_patch_size = 14
    downsampler_stride = 4
    model_input_names = ["pixel_values", "pixel_values_local", "num_local_patches"]  # noqa: RUF012

    def _preprocess(  # type: ignore[override]  # called with names
        self, images: list[NDArray[Any]], size: SizeDict, patch_size: int, return_tensors: Any, **own: Any
    ) -> BatchFeature:
        assert size.height is not None
        wholes, windows, counts, ends = [], [], [], []
        for image in images:
            plan = planned_windows(image.shape[1], image.shape[2], size.height, patch_size, self.max_image_size)
            if plan.is_padded:
                side = max(image.shape)
                image = np.pad(image, ((0, 0), (0, side - image.shape[1]), (0, side - image.shape[2])))
            reduced = self._resized(image, plan.whole, own)
            wholes.append(self._scaled(self._resized(reduced, (size.height, size.height), own), own))
            rows = columns = 0
            if plan.window:
                larger = self._resized(image, plan.larger, own)
                rows, columns = (max(1, side // plan.window) for side in plan.larger)
                parts = [
                    larger[:, top : top + plan.window, left : left + plan.window]
                    for top in range(0, plan.larger[0], plan.window)
                    for left in range(0, plan.larger[1], plan.window)
                ]
                windows += [self._scaled(self._resized(part, (patch_size, patch_size), own), own) for part in parts]
            counts.append(rows * columns)
            ends.append([column == columns - 1 and row < rows - 1 for row in range(rows) for column in range(columns)])
        data: dict[str, Any] = {"pixel_values": np.stack(wholes), "num_local_patches": counts}
        if windows:
            data["pixel_values_local"] = np.stack(windows)
        found = BatchFeature(data=data, tensor_type=return_tensors)
        if windows:  # lists, as the processor takes them
            found["patch_newline_masks"] = [each + [False] * (max(counts) - len(each)) for each in ends]
        return found

    def _resized(self, image: NDArray[Any], size: tuple[int, int], own: dict[str, Any]) -> NDArray[Any]:
        found: NDArray[Any] = self.resize(image, SizeDict(height=size[0], width=size[1]), resample=own["resample"])
        return found

    def _scaled(self, image: NDArray[Any], own: dict[str, Any]) -> NDArray[Any]:
        image = self.rescale(image, own["rescale_factor"]) if own["do_rescale"] else image
        image = self.normalize(image, own["image_mean"], own["image_std"]) if own["do_normalize"] else image
        return image.astype(np.float32)


class WindowPlan(NamedTuple):
    """Heights and widths."""

    whole: tuple[int, int]
    """Of the picture before its small version is made."""
    larger: tuple[int, int]
    """Of the picture that windows are cut from."""
    window: int
    """The side of a window; 0: there are none."""
    is_padded: bool
    """The picture is padded to a square first."""


def planned_windows(height: int, width: int, small: int, window: int, most: int) -> WindowPlan:
    """The windows of a picture, whose small version has a side of `small` pixels; `most` is the longest side."""
    is_padded = min(width, height) < 32 and max(width / height, height / width) > 4
    if is_padded:
        width = height = max(width, height)
    if max(height, width) > most:
        scale = most / max(height, width)
        width, height = int(width * scale), int(height * scale)
    shorter, longer = min(height, width), max(height, width)
    if longer <= small:
        window = shorter if longer / shorter > 1.5 else 0
    elif longer / shorter > 4:
        window = min(shorter, window)
    if not window:
        return WindowPlan((height, width), (height, width), 0, is_padded)
    larger = [  # a rest of more than a fifth of a window becomes one
        window * (side // window + (side % window > 0.2 * window)) if side >= window else side
        for side in (height, width)
    ]
    return WindowPlan((height, width), (larger[0], larger[1]), window, is_padded)
