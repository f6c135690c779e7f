"""The model's own processor, of transformers, without torch: pictures → arrays and the text that stands for them.

Runs in decoder processes only.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.media import MediaKind
from quire.server.media.images import WHITE, MediaRefused
from quire.server.media.types import MediaFormat, MediaSettings
from quire.server.media.video import VideoProcessor

_ABSENT = ("torch", "torchvision", "torchaudio")
_TEXT_ARRAYS = ("input_ids", "attention_mask", "text_replacement_offsets")
"""What a processor returns for the text, beside token_type_ids of several names."""
_OWN_ARGUMENTS = {"return_tensors", "device", "data_format", "input_data_format", "disable_grouping"}
"""Arguments of processors that say how they work, not what comes out."""
_OPTIONS = {
    *("min_pixels", "max_pixels", "crop_to_patches", "min_patches", "max_patches", "do_image_splitting"),
    *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
    "pan_and_scan_min_ratio_to_activate",
}
"""Arguments that a request may give: the tower takes what comes out, whatever their values are."""
_OWN_PROCESSORS = {
    "cohere2_vision": "Cohere2VisionImageProcessorPil",
    "kimi_k25": "KimiK25ImageProcessorPil",
    "lfm2_vl": "Lfm2VlImageProcessorPil",
    "llama4": "Llama4ImageProcessorPil",
    "minimax_m3_vl": "MiniMaxM3VLImageProcessorPil",
    "step3p7": "Step3p7ImageProcessorPil",
}
"""Image processors that transformers has for torchvision only, by their module here."""
_EXAMPLES = ((96, 64), (64, 320), (2000, 1000))
"""Sizes of pictures of which a processor makes everything that it ever makes: some cut large ones in pieces."""
_VIDEO_FILES = (
    ("processor_config.json", "video_processor"),
    ("video_preprocessor_config.json", ""),
    ("preprocessor_config.json", ""),
)


class ProcessedItem(msgspec.Struct):
    """What a model's tower takes for one item, and what stands for it in the prompt (see `LoadedItem`)."""

    arrays: dict[str, NDArray[Any]]
    text: str
    grids: tuple[tuple[int, int, int], ...] = ()
    seconds_per_frame: float = 0.0


class VideoSettings(dict[str, Any]):
    """Stands for the video processor of transformers, which needs torch: the settings of the model's folder."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    @classmethod
    def from_pretrained(cls, folder: str, **_: Any) -> VideoSettings:
        """Read the settings, which the processor looks up when it makes the text of a video."""
        for file, key in _VIDEO_FILES:
            if (path := Path(folder, file)).is_file():
                settings = json.loads(path.read_bytes())
                if key == "" or key in settings:
                    return cls(settings[key] if key else settings)
        return cls()


class Processor:
    """The processor of a model."""

    def __init__(self, settings: MediaSettings) -> None:
        """Load it. Raises `ConfigError` if the model's folder has none, or none that works without torch."""
        for name in _ABSENT:
            sys.modules[name] = None  # type: ignore[assignment]
        self._name = _model_type(settings.model)
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
        except Exception as error:
            raise self._unsupported(error) from error
        self.examples: dict[MediaKind, list[ProcessedItem]] = {"image": images}
        """Items of each kind that is supported, of several sizes."""
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
        return MediaFormat(image_placeholder=self.hf.image_token, video_placeholder=self._video.placeholder)

    def image(self, image: Image.Image, options: Mapping[str, Any], *, among_several: bool = False) -> ProcessedItem:
        """Process a picture (RGB), with further arguments of the processor; `among_several` as in `DecodeOrder`. Raises
        `MediaRefused`, and whatever the processor raises.
        """
        arguments = {**self._defaults, **self._own(options, self._options)}
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
            merge = int(arguments.get("merge_size") or self.hf.image_processor.merge_size)
            ((time, height, width),) = grid.tolist()
            grids = ((time, height // merge, width // merge),)
            if is_framed:  # a token before all, one behind each row, and one behind all
                grids = ((1, 1, 1), (time, height // merge, width // merge + 1), (1, 1, 1))
        return ProcessedItem(arrays, self._replacement, grids)

    def video(self, file: IO[bytes], options: Mapping[str, Any], max_pixels: int, max_bytes: int) -> ProcessedItem:
        """Process a file with a video, whose frames have at most `max_pixels`, to arrays of at most `max_bytes`. Raises
        `MediaRefused`.
        """
        own = self._own(options, self._video.arguments)
        return ProcessedItem(*self._video.process(file, own, max_pixels, max_bytes))

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


def _model_type(folder: str) -> str:
    try:
        return str(json.loads(Path(folder, "config.json").read_bytes())["model_type"])
    except (OSError, ValueError, KeyError):
        return folder


def _load(folder: str) -> Any:
    """Load the processor of a folder, after mending what in transformers needs torch for no reason."""
    auto = importlib.import_module("transformers.models.auto.image_processing_auto")
    for family, name in _OWN_PROCESSORS.items():
        own = importlib.import_module(f"quire.server.media.{family}")
        auto.IMAGE_PROCESSOR_MAPPING_NAMES[family]["pil"] = getattr(own, name)
    processing = importlib.import_module("transformers.processing_utils")
    names = processing.MODALITY_TO_AUTOPROCESSOR_MAPPING._MAPPING_NAMES
    names["video_processor"] = (__name__, "VideoSettings")
    check = processing.ProcessorMixin.check_argument_for_proper_class

    def check_others(self: Any, name: str, argument: Any) -> Any:
        return None if isinstance(argument, VideoSettings) else check(self, name, argument)

    processing.ProcessorMixin.check_argument_for_proper_class = check_others
    # What these two need more is for videos, or for making tensors of pictures.
    package = "transformers.models.pixtral"
    with_pillow = importlib.import_module(f"{package}.image_processing_pil_pixtral")
    sys.modules.setdefault(f"{package}.image_processing_pixtral", with_pillow)
    pixtral = importlib.import_module(f"{package}.processing_pixtral")
    importlib.import_module(package).PixtralProcessor = pixtral.PixtralProcessor  # type: ignore[attr-defined]
    smolvlm: Any = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
    smolvlm.num2words = smolvlm.num2words or str
    loader: Any = importlib.import_module("transformers").AutoProcessor
    return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
