"""The processor of transformers in a model's folder. No torch here, although it uses it where it is installed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.engine.protocol.errors import ConfigError

_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
_VIDEO_FILES = (
    ("processor_config.json", "video_processor"),
    ("video_preprocessor_config.json", ""),
    ("preprocessor_config.json", ""),
)


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
                    found = cls(settings[key] if key else settings)
                    if "font" in found:
                        found["font"] = str(Path(folder, Path(str(found["font"])).name))
                    return found
        return cls()


def check_processor(folder: Path) -> None:
    """Raise `ConfigError` if a model's folder has no processor of images. If it has one, `load_processor` may fail."""
    if not any((folder / name).is_file() for name in _IMAGE_FILES):
        raise ConfigError(
            f"{folder} has no processor of images, {' or '.join(_IMAGE_FILES)}; add the file, or use "
            "--language-model-only, without images"
        )


def load_processor(folder: str, in_words: Callable[[int], str] = str) -> Any:
    """Load it, after mending what in transformers needs torch for no reason. `in_words` writes the numbers in the text
    of a video (SmolVLM). Whatever transformers raises is passed on.
    """
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
    # Those of ColQwen2 and ColPali make whole prompts, with torch; of pictures, the same as Qwen2-VL's and PaliGemma's.
    qwen2: Any = importlib.import_module("transformers.models.qwen2_vl.processing_qwen2_vl")
    importlib.import_module("transformers.models.colqwen2").ColQwen2Processor = qwen2.Qwen2VLProcessor  # type: ignore[attr-defined]
    pali: Any = importlib.import_module("transformers.models.paligemma.processing_paligemma")
    importlib.import_module("transformers.models.colpali").ColPaliProcessor = pali.PaliGemmaProcessor  # type: ignore[attr-defined]
    smolvlm: Any = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
    smolvlm.num2words = in_words  # of a package that nothing else needs
    loader: Any = importlib.import_module("transformers").AutoProcessor
    return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
