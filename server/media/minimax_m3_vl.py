"""The image processor of MiniMax-M3, which transformers has for torchvision only; it is Qwen2-VL's with other sizes."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class MiniMaxM3VLImageProcessorPil(Qwen2VLImageProcessorPil):
    """Fits a picture between two numbers of pixels, and cuts it into squares of patches."""

    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 451584}  # noqa: RUF012

    def __init__(self, **settings: Any) -> None:
        if settings.get("size") == [672, 672]:  # in the published file, and never used
            del settings["size"]
        super().__init__(**settings)
