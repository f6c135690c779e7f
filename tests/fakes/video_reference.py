"""Videos processed by transformers' own processors: what `server/media/video.py` is compared with.

They need torchvision, of which the tests have none: the few functions that they use are here, by torch. A program:
`python -m tests.fakes.video_reference`, which reads `Case`s (JSON) and writes an npz file for each.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.metadata
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from quire.server.media.video_families import in_words

VERSION = "0.28.0"


class Case(msgspec.Struct):
    """A video, and the model's folder."""

    folder: str
    video: str
    options: dict[str, Any]
    target: str


class InterpolationMode(enum.Enum):
    """As torchvision's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(image: torch.Tensor, size: Any, interpolation: InterpolationMode | int, antialias: bool) -> torch.Tensor:
    """As torchvision resizes pictures of bytes on CPUs, with the bicubic filter: without making them floats."""
    flat = image.reshape(-1, *image.shape[-3:])
    assert flat.dtype == torch.uint8
    # torchvision takes Pillow's numbers, too
    mode = {InterpolationMode.BICUBIC: "bicubic", 3: "bicubic", InterpolationMode.LANCZOS: "lanczos"}[interpolation]
    resized = torch.nn.functional.interpolate(flat, size=list(size), mode=mode, antialias=antialias)
    return resized.reshape(*image.shape[:-2], *size)


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    """As torchvision's."""
    return (image - torch.as_tensor(mean).view(-1, 1, 1)) / torch.as_tensor(std).view(-1, 1, 1)


def to_pil_image(picture: torch.Tensor) -> Image.Image:
    """As torchvision's, of bytes `[channels, height, width]`."""
    return Image.fromarray(picture.permute(1, 2, 0).numpy())


def pil_to_tensor(picture: Image.Image) -> torch.Tensor:
    """As torchvision's."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def add_torchvision() -> None:
    """Make transformers find it. Must come before its classes are imported."""

    def add(name: str, **content: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(content)
        sys.modules[name] = module
        return module

    functional = add(
        "torchvision.transforms.v2.functional",
        resize=resize,
        normalize=normalize,
        grayscale_to_rgb=lambda image: image,
        InterpolationMode=InterpolationMode,
    )
    older = add("torchvision.transforms.functional", pil_to_tensor=pil_to_tensor, to_pil_image=to_pil_image)
    v2 = add("torchvision.transforms.v2", functional=functional)
    transforms = add("torchvision.transforms", v2=v2, functional=older, InterpolationMode=InterpolationMode)
    io = add("torchvision.io")
    add("torchvision", transforms=transforms, io=io, __version__=VERSION)
    metadata: Any = importlib.metadata
    version = metadata.version
    metadata.version = lambda name: VERSION if name == "torchvision" else version(name)


def record(expand: Any, texts: list[str], text: Any, images: Any, videos: list[str], audio: Any) -> Any:
    """Keep what stands for the videos in the prompt."""
    texts.extend(videos)
    return expand(text, images, videos, audio)


def main() -> None:
    """Process each case."""
    add_torchvision()
    transformers: Any = importlib.import_module("transformers")
    import_utils: Any = importlib.import_module("transformers.utils.import_utils")
    import_utils.is_torchvision_available = lambda: True
    import_utils.BACKENDS_MAPPING["torchvision"] = (lambda: True, "")
    video_utils: Any = importlib.import_module("transformers.video_utils")
    smolvlm: Any = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
    smolvlm.num2words = in_words  # the tests do not have the package
    base: Any = importlib.import_module("transformers.video_processing_utils").BaseVideoProcessor

    def fetch(self: Any, paths: list[str], sample_indices_fn: Any = None) -> Any:
        return tuple(zip(*(video_utils.read_video_pyav(path, sample_indices_fn) for path in paths), strict=True))

    base.fetch_videos = fetch
    for case in msgspec.json.decode(sys.stdin.buffer.read(), type=list[Case]):
        processor = transformers.AutoProcessor.from_pretrained(case.folder)
        texts: list[str] = []
        processor.get_text_with_replacements = partial(record, processor.get_text_with_replacements, texts)
        options = {"do_sample_frames": True, **case.options}
        found = processor(videos=[case.video], text=[processor.video_token], return_tensors="pt", videos_kwargs=options)
        if "pixel_values" in found:  # InternVL's name for all of a prompt's frames, and SmolVLM's for its videos
            frames = found.pop("pixel_values")
            found["pixel_values_videos"] = frames if frames.ndim == 5 else frames[None]
        known = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "video_position_ids")
        names = [name for name in known if name in found]
        arrays: dict[str, Any] = {name: np.asarray(found[name]) for name in names}
        np.savez(Path(case.target), text=np.array(texts[0]), **arrays)


if __name__ == "__main__":
    main()
