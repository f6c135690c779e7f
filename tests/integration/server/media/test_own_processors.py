"""Image processors that transformers has for torchvision only, against its own with Pillow in torchvision's place."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict

from quire.server.media.kimi_k25 import KimiK25ImageProcessorPil
from quire.server.media.lfm2_vl import Lfm2VlImageProcessorPil
from quire.server.media.llama4 import Llama4ImageProcessorPil
from quire.server.media.minimax_m3_vl import MiniMaxM3VLImageProcessorPil
from quire.server.media.step3p7 import Step3p7ImageProcessorPil

SIZES = [(100, 60), (28, 28), (3, 5), (31, 33), (200, 20), (20, 200), (64, 64), (333, 111), (90, 91), (500, 470)]
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "kimi_k25": (
        KimiK25ImageProcessorPil,
        "Kimi_K25ImageProcessor",
        {"patch_size": 7, "max_patches": 300, "size": {"max_height": 30, "max_width": 30}},
    ),
    "lfm2_vl": (
        Lfm2VlImageProcessorPil,
        "Lfm2VlImageProcessor",
        {"encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 16},
    ),
    "lfm2_vl without thumbnails": (
        Lfm2VlImageProcessorPil,
        "Lfm2VlImageProcessor",
        {"encoder_patch_size": 4, "tile_size": 32, "max_image_tokens": 64, "use_thumbnail": False, "min_tiles": 1}
        | {"min_image_tokens": 4},
    ),
    "lfm2_vl without tiles": (Lfm2VlImageProcessorPil, "Lfm2VlImageProcessor", {"do_image_splitting": False}),
    "minimax_m3_vl": (MiniMaxM3VLImageProcessorPil, "MiniMaxM3VLImageProcessor", {"size": [672, 672]}),
    "minimax_m3_vl of 7 pixels": (
        MiniMaxM3VLImageProcessorPil,
        "MiniMaxM3VLImageProcessor",
        {"size": {"shortest_edge": 4 * 14**2, "longest_edge": 40 * 14**2}, "patch_size": 7},
    ),
    "step3p7": (
        Step3p7ImageProcessorPil,
        "Step3p7ImageProcessor",
        {"size": {"height": 56, "width": 56}, "patch_size": 28, "max_image_size": 220},
    ),
    "llama4": (Llama4ImageProcessorPil, "Llama4ImageProcessor", {"size": {"height": 28, "width": 28}}),
    "llama4 enlarged": (
        Llama4ImageProcessorPil,
        "Llama4ImageProcessor",
        {"size": {"height": 28, "width": 28}, "max_patches": 5, "resize_to_max_canvas": True},
    ),
}


class WithPillow:
    """Stands for `TorchvisionBackend`."""

    rescale_factor, resample = 1 / 255, None

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)

    def resize(self, image: Tensor, size: SizeDict, resample: Any = None, **_: Any) -> Tensor:
        resized = [PilBackend().resize(each.numpy(), size, resample=resample) for each in image]
        return torch.from_numpy(np.stack(resized))

    def pad(self, images: Any, pad_size: SizeDict) -> Any:
        if isinstance(images, list):
            return [self.pad(each, pad_size) for each in images]
        down, across = pad_size.height - images.shape[-2], pad_size.width - images.shape[-1]
        return torch.nn.functional.pad(images, (0, across, 0, down))

    def normalize(self, images: Tensor, mean: Any, std: Any) -> Tensor:
        mean, std = (torch.tensor(each, dtype=images.dtype)[:, None, None] for each in (mean, std))
        normed: Tensor = (images - mean) / std
        return normed

    def rescale_and_normalize(self, images: Tensor, _: bool, factor: float, __: bool, mean: Any, std: Any) -> Tensor:
        return self.normalize(images.float() * factor, mean, std)


def theirs(family: str, name: str, settings: dict[str, Any], image: np.ndarray) -> Any:
    """What transformers' class, whose file cannot be imported without torchvision, makes of `[channels, height,
    width]`."""
    package = f"transformers.models.{family}"
    path = Path(importlib.import_module(package).__path__[0], f"image_processing_{family}.py")
    body = [
        node
        for node in ast.parse(path.read_text()).body
        if not (
            isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torchvision", "image_processing_b"))
        )
    ]
    for node in [each for part in body for each in ast.walk(part)]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):  # docstrings need a module
            node.decorator_list = [each for each in node.decorator_list if "docstring" not in ast.dump(each)]
    pads = SimpleNamespace(
        pad=lambda images, padding, fill: torch.nn.functional.pad(images, (0, padding[2], 0, padding[3]))
    )
    names: dict[str, Any] = {
        "__package__": package,
        "__name__": "theirs",
        "TorchvisionBackend": WithPillow,
        "tvF": pads,
    }
    exec(compile(ast.Module(body, []), str(path), "exec"), names)
    processor = names[name](**settings)
    arguments = {each: getattr(processor, each, None) for each in inspect.signature(processor._preprocess).parameters}
    arguments |= {"images": [torch.from_numpy(image)], "size": SizeDict(**processor.size), "disable_grouping": False}
    del arguments["kwargs"]
    return processor._preprocess(**arguments | {"return_tensors": "pt"})


@pytest.mark.parametrize("case", CASES)
def test_arrays_are_those_of_transformers(case: str) -> None:
    ours, name, settings = CASES[case]
    for width, height in SIZES:
        picture = Image.effect_mandelbrot((width, height), (-2, -1, 1, 1), 50).convert("RGB")
        found = ours(**settings)(images=[picture], return_tensors="np")
        expected = theirs(case.split()[0], name, settings, np.asarray(picture).transpose(2, 0, 1).copy())
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            theirs_of = np.asarray(
                value.float()
                if isinstance(value, Tensor)
                else [each.tolist() if isinstance(each, Tensor) else each for each in value]
            )
            shape = (-1, *np.asarray(found[key]).shape[1:])
            np.testing.assert_allclose(found[key], theirs_of.reshape(shape), rtol=1e-5, atol=2e-6, err_msg=key)
