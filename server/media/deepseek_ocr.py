"""The processors of DeepSeek-OCR and DeepSeek-OCR 2 as published, whose folders have none that transformers knows: of
the second, transformers' own, and of the first, the same with other sizes and a token at the end of each row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast
from transformers.image_processing_base import BatchFeature
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.deepseek_ocr2.processing_deepseek_ocr2 import DeepseekOcr2Processor


class DeepseekOcrImageProcessorPil(DeepseekOcr2ImageProcessorPil):
    """Adds the columns and rows of the tiles, (1, 1) without tiles."""

    max_patches = 9
    tile_size = 640

    def _preprocess(  # type: ignore[override]  # called with names
        self, images: list[NDArray[Any]], **own: Any
    ) -> BatchFeature:
        found: BatchFeature = super()._preprocess(images=images, **own)
        side = own["tile_size"]
        found["tile_grid"] = np.array(
            [
                get_optimal_tiled_canvas(image.shape[1:], (side, side), own["min_patches"], own["max_patches"])
                if count
                else (1, 1)
                for image, count in zip(images, found["num_local_patches"], strict=True)
            ]
        )
        return found


class DeepseekOcrProcessor(DeepseekOcr2Processor):
    """Writes a token for each feature of tiles side by side, of the whole image, and of the separator."""

    images_kwargs: Any = {"crop_to_patches": True, "min_patches": 2, "max_patches": 9}  # noqa: RUF012

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **_: Any) -> str:
        """As in transformers."""
        pixels = self.patch_size * self.downsample_ratio  # along the side of a feature
        sides = {"pixel_values": (1, 1), "pixel_values_local": tuple(image_inputs["tile_grid"][image_idx])}
        if not image_inputs["num_local_patches"][image_idx]:
            del sides["pixel_values_local"]
        count = 1
        for name, (columns, rows) in sides.items():
            side = -(-image_inputs[name][0].shape[-1] // pixels)
            count += rows * side * (columns * side + 1)
        return str(self.image_token * int(count))


_CLASSES = {
    "DeepseekOCRForCausalLM": (DeepseekOcrProcessor, DeepseekOcrImageProcessorPil),
    "DeepseekOCR2ForCausalLM": (DeepseekOcr2Processor, DeepseekOcr2ImageProcessorPil),
}


def load(folder: str, architecture: str) -> Any:
    """Return the processor of a folder, with the settings of its processor_config.json."""
    processor, images = (cast("Any", each) for each in _CLASSES[architecture])
    path = Path(folder, "processor_config.json")
    told: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    own = {name: told[name] for name in told.keys() & {"image_mean", "image_std", "size", *_ARGUMENTS}}
    sizes = {name: told[name] for name in told.keys() & {"patch_size", "downsample_ratio"}}
    tokenizer: Any = PreTrainedTokenizerFast
    return processor(images(**own), tokenizer.from_pretrained(folder), **sizes)


_ARGUMENTS = ("min_patches", "max_patches", "tile_size", "background_color")
