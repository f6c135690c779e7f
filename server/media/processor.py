"""The model's own processor, of transformers, without torch: pictures → arrays and the text that stands for them.

Runs in decoder processes only.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.media import EMBEDS
from quire.engine.repository.processors import load_processor
from quire.server.media.arrays import EmbedsFormat, read_embeds
from quire.server.media.images import WHITE, MediaRefused
from quire.server.media.types import MediaFormat, MediaSettings
from quire.server.media.video import VideoProcessor, check_least_pixels, resolved
from quire.server.media.video_families import in_words

_ABSENT = ("torch", "torchvision", "torchaudio")
_TEXT_ARRAYS = ("input_ids", "attention_mask", "labels", "text_replacement_offsets")
"""What a processor returns for the text, beside token_type_ids of several names."""
_OWN_ARGUMENTS = {"return_tensors", "device", "data_format", "input_data_format", "disable_grouping"}
"""Arguments of processors that say how they work, not what comes out."""
_OPTIONS = {
    *("min_pixels", "max_pixels", "crop_to_patches", "min_patches", "max_patches", "do_image_splitting"),
    *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
    "pan_and_scan_min_ratio_to_activate",
}
"""Arguments that a request may give: the tower takes what comes out, whatever their values are."""
_COUNTS = ("max_patches", "pan_and_scan_max_num_crops")
"""Those of them that limit the rows of an array."""
_OWN_PROCESSORS = {
    "cohere2_vision": "Cohere2VisionImageProcessorPil",
    "kimi_k25": "KimiK25ImageProcessorPil",
    "lfm2_vl": "Lfm2VlImageProcessorPil",
    "llama4": "Llama4ImageProcessorPil",
    "minimax_m3_vl": "MiniMaxM3VLImageProcessorPil",
    "step3p7": "Step3p7ImageProcessorPil",
}
"""Image processors that transformers has for torchvision only, by their module here."""
_PUBLISHED = dict.fromkeys(("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"), "deepseek_ocr")
"""Architectures whose folders have no processor that transformers knows: the modules here that load one."""
_EXAMPLES = ((96, 64), (64, 320), (2000, 1000))
"""Sizes of pictures of which a processor makes everything that it ever makes: some cut large ones in pieces."""


class ProcessedItem(msgspec.Struct):
    """What a model's tower takes for one item, and what stands for it in the prompt (see `LoadedItem`)."""

    arrays: dict[str, NDArray[Any]]
    text: str
    grids: tuple[tuple[int, int, int], ...] = ()
    seconds_per_frame: float = 0.0


class Processor:
    """The processor of a model."""

    def __init__(self, settings: MediaSettings) -> None:
        """Load it. Raises `ConfigError` if the model's folder has none, or none that works without torch."""
        for name in _ABSENT:
            sys.modules[name] = None  # type: ignore[assignment]
        self._dtype = settings.dtype
        self._name = str(_config(settings.model).get("model_type", settings.model))
        try:
            self.hf = _load(settings.model)
        except Exception as error:
            raise self._unsupported(error) from error
        if not hasattr(self.hf, "image_processor") or not hasattr(self.hf, "get_text_with_replacements"):
            raise self._unsupported(TypeError(f"its processor is {type(self.hf).__name__}"))
        self._replacement = ""
        """The text of the last item."""
        expand = self.hf.get_text_with_replacements

        def record(text: Any, images_replacements: Any = (), *others: Any, **named: Any) -> Any:
            self._replacement = next(iter(images_replacements), "")
            return expand(text, images_replacements, *others, **named)

        self.hf.get_text_with_replacements = record
        accepted = getattr(self.hf.image_processor, "valid_kwargs", None)
        self._image_arguments = (
            set(getattr(accepted, "__annotations__", {})) | set(getattr(self.hf, "images_kwargs", {}))
        ) - _OWN_ARGUMENTS
        self._options = self._image_arguments & _OPTIONS
        if hasattr(self.hf.image_processor, "merge_size"):  # its towers take pictures of any size
            self._options.add("size")
        given, of_videos = settings.processor_kwargs, settings.io_kwargs.get("video", {})
        self._defaults = {name: value for name, value in given.items() if name in self._image_arguments}
        try:
            folder = getattr(self.hf, "video_processor", None) or {}
            self._video = VideoProcessor(self.hf, folder, {})
            defaults = {name: value for name, value in given.items() if name in self._video.arguments}
            self._video = VideoProcessor(self.hf, folder, {**defaults, **of_videos})
        except MediaRefused as error:
            raise ConfigError(f"--mm-processor-kwargs or --media-io-kwargs: {error}") from None
        of_images = dict(settings.io_kwargs.get("image", {}))
        color = of_images.pop("rgba_background_color", WHITE)
        if unknown := [*(settings.io_kwargs.keys() - {"image", "video"}), *(f"image.{name}" for name in of_images)]:
            raise ConfigError(f"--media-io-kwargs: {', '.join(sorted(unknown))}: not supported")
        if not (len(color) == 3 and all(value in range(256) for value in color)):
            raise ConfigError("--media-io-kwargs: image.rgba_background_color must be three numbers from 0 to 255")
        self.background: tuple[int, int, int] = tuple(color)
        """The color under transparent pictures."""
        if unknown := sorted(given.keys() - self._image_arguments - self._video.arguments):
            raise ConfigError(
                f"--mm-processor-kwargs: {', '.join(unknown)}: not an argument of {type(self.hf).__name__}"
            )
        try:  # also imports what the processor imports when it is first used
            pictures = [Image.new("RGB", size, (200, 100, 50)) for size in _EXAMPLES]
            images = [self.image(picture, {}) for picture in pictures]
            self.counts_images = "batch_num_images" in images[0].arrays
            """Whether it cuts an image into tiles only if the prompt has no others (LLaVA-OneVision)."""
            images += [self.image(picture, {}, among_several=True) for picture in pictures if self.counts_images]
            arrays = [array for array in images[0].arrays.values() if array.ndim]
            self._row_bytes = max(array.nbytes // len(array) for array in arrays)
            """Of a patch or a tile."""
            self._size: dict[str, Any] = {}
            """The least and most pixels; empty: the model has no such limits, or requests cannot change them."""
            size = dict(getattr(self.hf.image_processor, "size", None) or {})
            if "size" in self._options and {"shortest_edge", "longest_edge"} <= size.keys():
                self._size = resolved({"size": size}, self._defaults)["size"]
                side = 16 * self.hf.image_processor.patch_size * self._merge({})
                exact = {"size": dict.fromkeys(("shortest_edge", "longest_edge"), side**2)}
                item = self.image(Image.new("RGB", (side, side)), exact)
                self._bytes_per_pixel = sum(array.nbytes for array in item.arrays.values()) / side**2
                """Bytes of arrays by pixels as `_size` counts them: GLM-4.1V has twice as many."""
        except Exception as error:
            raise self._unsupported(error) from error
        self.examples: dict[str, list[ProcessedItem]] = {"image": images}
        """Items of each kind that is supported, of several sizes, and of `EMBEDS`."""
        texts, tokens = [item.text for item in images], self.hf.tokenizer.get_added_vocab()
        grids = images[0].grids
        self._embeds = None if len(grids) > 1 else EmbedsFormat.of(texts, tokens, self._merge({}) if grids else 0)
        if self._embeds is not None:
            self.examples[EMBEDS] = [self.embeds(self._embeds.example(width)) for width in (1, 2)]
        if (video := self._video.example) is not None:
            self.examples["video"] = [ProcessedItem(*video)]

    def _unsupported(self, error: Exception) -> ConfigError:
        reason = " ".join(str(error).split())[:300]
        return ConfigError(
            f"images are not supported for {self._name}: its processor does not work with Pillow and without torch"
            f" ({reason}); --language-model-only serves text alone"
        )

    @property
    def format(self) -> MediaFormat:
        """How prompts refer to items."""
        placeholder, example = self.hf.image_token, "x"
        picture = Image.new("RGB", _EXAMPLES[0])
        _, (text,), *_ = self.hf.prepare_inputs_layout(  # GOT-OCR 2's reads `format` and `images_kwargs`
            images=[picture], text=[placeholder + example], format=False, images_kwargs={}
        )
        start, _, end = text.partition(placeholder)[2].rpartition(example)
        special, plain = (self.hf.tokenizer(example, add_special_tokens=adds).input_ids for adds in (True, False))
        return MediaFormat(placeholder, self._video.placeholder, start, end, special != plain)

    def image(
        self,
        image: Image.Image,
        options: Mapping[str, Any],
        *,
        among_several: bool = False,
        max_bytes: float = math.inf,
    ) -> ProcessedItem:
        """Process a picture (RGB), with further arguments of the processor; `among_several` as in `DecodeOrder`. Arrays
        that would have more than `max_bytes` because of the arguments are not made. Raises `MediaRefused`, and whatever
        the processor raises.
        """
        arguments = {**self._defaults, **(own := self._own(options, self._options))}
        if max_bytes < math.inf:
            self._check_bytes(own, image.width * image.height, max_bytes)
        images, text = ([[image, image]] if among_several else [image]), self.hf.image_token * (1 + among_several)
        if is_framed := getattr(self.hf, "cat_extra_token", False):  # Hunyuan VL
            text = f"{self.hf.image_start_token}{text}{self.hf.image_end_token}"
        found = self.hf(images=images, text=[text], return_tensors="np", images_kwargs=arguments)
        arrays = {
            name: _plain(value)[:1] if among_several else _plain(value)
            for name, value in found.items()
            if name not in _TEXT_ARRAYS and not name.endswith("token_type_ids")
        }
        grids: tuple[tuple[int, int, int], ...] = ()
        if (grid := arrays.get("image_grid_thw")) is not None:
            merge = self._merge(arguments)
            ((time, height, width),) = grid.tolist()
            grids = ((time, height // merge, width // merge),)
            if is_framed:  # a token before all, one behind each row, and one behind all
                grids = ((1, 1, 1), (time, height // merge, width // merge + 1), (1, 1, 1))
        return ProcessedItem(arrays, self._replacement, grids)

    def _check_bytes(self, options: Mapping[str, Any], num_pixels: int, max_bytes: float) -> None:
        """Raise `MediaRefused` if a picture of so many pixels would become more than `max_bytes`. Values that are no
        numbers are left to the processor.
        """
        for name in options.keys() & {*_COUNTS}:
            if isinstance(value := options[name], int | float) and value * self._row_bytes > max_bytes:
                raise MediaRefused(f"{name} must be at most {max_bytes // self._row_bytes:.0f}")
        if self._size:
            size = resolved({"size": self._size}, options)["size"]
            check_least_pixels(size, self._size)
            pixels = max(size["shortest_edge"], min(num_pixels, size["longest_edge"]))
            if (needed := pixels * self._bytes_per_pixel) > max_bytes:
                raise MediaRefused(
                    f"the processed item would have {needed:.0f} bytes; at most {max_bytes:.0f} are allowed"
                )

    def _merge(self, arguments: Mapping[str, Any]) -> int:
        """Patches along each side of a feature."""
        return int({**self._defaults, **arguments}.get("merge_size") or self.hf.image_processor.merge_size)

    def embeds(self, data: bytes) -> ProcessedItem:
        """Process the features of an image in a file (see `read_embeds`). Raises `MediaRefused`."""
        if self._embeds is None:
            raise MediaRefused(f"{EMBEDS} are not supported for this model: its features are not in one run of tokens")
        values, grid = read_embeds(data, self._dtype)
        return ProcessedItem({EMBEDS: values}, *self._embeds.place(len(values), grid))

    def video(
        self, file: IO[bytes], options: Mapping[str, Any], max_pixels: int, max_bytes: int, *, is_array: bool = False
    ) -> ProcessedItem:
        """Process a file with a video, or with an array of its frames, which have at most `max_pixels`, to arrays of at
        most `max_bytes`. Raises `MediaRefused`.
        """
        own = self._own(options, self._video.arguments)
        return ProcessedItem(*self._video.process(file, own, max_pixels, max_bytes, is_array=is_array))

    def _own(self, options: Mapping[str, Any], arguments: Set[str]) -> dict[str, Any]:
        """The options for one kind of item. Raises `MediaRefused` for those that are for none."""
        if unknown := sorted(options.keys() - self._options - self._video.arguments):
            raise MediaRefused(f"not supported as an argument of this model's processor: {', '.join(unknown)}")
        return {name: value for name, value in options.items() if name in arguments}


def _plain(value: Any) -> NDArray[Any]:
    """The array as float32, int64 or uint8, in row-major order."""
    array = np.asarray(value)
    kind = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.uint8}[array.dtype.kind]
    return np.ascontiguousarray(array, dtype=np.uint8 if array.dtype == np.uint8 else kind)


def _config(folder: str) -> dict[str, Any]:
    try:
        return dict(json.loads(Path(folder, "config.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _load(folder: str) -> Any:
    """Load the processor of a folder, with image processors of ours where transformers has none for Pillow."""
    auto = importlib.import_module("transformers.models.auto.image_processing_auto")
    for family, name in _OWN_PROCESSORS.items():
        own = importlib.import_module(f"quire.server.media.{family}")
        auto.IMAGE_PROCESSOR_MAPPING_NAMES[family]["pil"] = getattr(own, name)
    for architecture in _config(folder).get("architectures") or ():
        if architecture in _PUBLISHED:
            return importlib.import_module(f"quire.server.media.{_PUBLISHED[architecture]}").load(folder, architecture)
    return load_processor(folder, in_words)
