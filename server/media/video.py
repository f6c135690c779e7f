"""Video files → what a model's tower takes: frames by PyAV (the extra video), the rest as transformers' processors do.

Runs in decoder processes only. Those processors need torch and torchvision; here frames are resized by Pillow, whose
bicubic filter theirs follows, to within two levels of 255. Number and size of the frames are checked before any is
decoded, by the file's header, and again for each frame.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.server.media.arrays import read_frames
from quire.server.media.images import MediaRefused, check_pixels
from quire.server.media.video_families import ARGUMENTS, FAMILIES, MAX_FRAMES, FramePlan

HAS_PYAV = importlib.util.find_spec("av") is not None
if HAS_PYAV:
    import av

logger = logging.getLogger(__name__)

MAX_SECONDS = 3600.0
_FORMATS = "mov,matroska,webm,avi,mpegts,gif"
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg", "gif")
_NAMES = "MP4, MOV, WebM, MKV, AVI, MPEG-TS or GIF with H.264, H.265, VP8, VP9, AV1, MPEG-4, MJPEG or GIF frames"
_OPTIONS = {"format_whitelist": _FORMATS, "codec_whitelist": ",".join(_CODECS), "max_streams": "20"}
_USUAL_RATE = 24.0
"""Frames per second of a file that does not say."""
_LEAST_PART = 0.9
"""Of the frames that a header promises; the last one that there is stands for the others."""


Picture = tuple[NDArray[np.uint8], int]
"""A frame [height, width, 3], and how often it is used."""
ProcessedVideo = tuple[dict[str, NDArray[Any]], str, tuple[tuple[int, int, int], ...], float]
"""Arrays, text, grids, and seconds between two features along time (see `quire.server.media.processor`)."""


@dataclass
class Metadata:
    """What processors of transformers make the text of a video from."""

    fps: float
    frames_indices: NDArray[np.int64]
    duration: float
    """Seconds of the whole video."""

    @property
    def timestamps(self) -> list[float]:
        """Seconds from the beginning of the video to each frame."""
        return [float(index) / self.fps for index in self.frames_indices]


class VideoProcessor:
    """The video part of a model's processor."""

    def __init__(self, hf: Any, settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """`hf` is the processor of transformers, which makes the text; `settings` those of its video processor, from
        the model's folder, and `arguments` those of the operator. Raises `MediaRefused` if they are invalid.
        """
        self._hf = hf
        family = FAMILIES.get(type(hf).__name__)
        self.arguments: frozenset[str] = frozenset()
        """What requests may give."""
        self.reason = ""
        """Why there are no videos; empty: there are."""
        self.example: ProcessedVideo | None = None
        """What became of a small video."""
        if family is None:
            self.reason = "videos are not supported for this model"
        elif not HAS_PYAV:
            self.reason = "videos need PyAV on the server: install quire-llm[video]"
        else:
            self._family = family
            self.arguments = family.arguments
            told = {name: value for name, value in settings.items() if value is not None}
            if "font" in told:  # forks can open no files
                told["font"] = Path(told["font"]).read_bytes() if Path(told["font"]).is_file() else b""
            self._settings = resolved(resolved(family.defaults, told), self._checked(arguments))
            hf.video_processor = _Attributes(self._settings)  # from which it makes the text
            try:
                self.example = self._try()
            except Exception as error:  # settings in the model's folder that this does not know: images may work
                logger.warning("videos are not supported with the settings of this model's processor: %s", error)
                self.reason, self.arguments = "videos are not supported for this model", frozenset()

    def _try(self) -> ProcessedVideo:
        """Process a video, which also imports what is imported only when it is first used: forks can import nothing."""
        side = self._family.side(self._settings)
        black, white, file = Image.new("RGB", (side, side)), Image.new("RGB", (side, side), "white"), io.BytesIO()
        black.save(file, "GIF", save_all=True, append_images=[white, black] * 4)
        file.seek(0)
        options = {"num_frames": 4} if "num_frames" in self.arguments else {}
        arrays = io.BytesIO()
        for array in (np.zeros((2, side, side, 3), np.uint8), np.arange(2), np.array((1.0, 2.0))):
            np.save(arrays, array)
        arrays.seek(0)
        self.process(arrays, {}, side**2, 2**30, is_array=True)
        return self.process(file, options, side**2, 2**30)

    @property
    def placeholder(self) -> str:
        """What a chat template writes for a video; empty: there are none."""
        return "" if self.reason else str(self._hf.video_token)

    def process(
        self, file: IO[bytes], options: Mapping[str, Any], max_pixels: int, max_bytes: int, *, is_array: bool = False
    ) -> ProcessedVideo:
        """Process a file, of which some frames are used, or the frames of an array (see `read_frames`): all of them.

        `max_pixels` limits those of a frame of the file, `max_bytes` those of the arrays. Raises `MediaRefused`.
        """
        if self.reason:
            raise MediaRefused(self.reason)
        settings = resolved(self._settings, self._checked(options))
        check_least_pixels(settings["size"], self._settings["size"])
        read = self._frames_of_array if is_array else self._frames
        plan, frames = read(file, settings, max_pixels, max_bytes)
        arrays, grids = self._family.arrays(_normalized(frames, settings), settings)
        metadata = Metadata(plan.rate, plan.indices, plan.total / plan.rate)
        for_text = {"pixel_values": arrays["pixel_values_videos"], **arrays, "video_metadata": [metadata]}
        text = self._hf.replace_video_token(for_text, 0)
        return arrays, text, grids, self._family.seconds(plan, settings)

    def _checked(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options without those that are None. Raises `MediaRefused`."""
        options = {name: value for name, value in options.items() if value is not None}
        for name, value in options.items():
            if name not in self.arguments:
                raise MediaRefused(f"not supported as an argument of this model's video processor: {name}")
            kind, values = ARGUMENTS[name], value.values() if isinstance(value, dict) else [value]
            is_right = isinstance(value, (int, float) if kind is float else kind) and (
                kind is bool or all(isinstance(each, int | float) and 0 < each < 2**40 for each in values)
            )
            if not is_right or (kind is dict and value.keys() - {"shortest_edge", "longest_edge"}):
                raise MediaRefused(f"invalid value of {name}")
        if "fps" in options and "num_frames" in options:
            raise MediaRefused("fps and num_frames exclude each other")
        return options

    def _frames(
        self, file: IO[bytes], settings: Mapping[str, Any], max_pixels: int, max_bytes: int
    ) -> tuple[FramePlan, NDArray[np.uint8]]:
        """The frames of a file that are used, resized: [frames, height, width, 3]. Raises `MediaRefused`."""
        try:
            container: Any = av.open(file, options=_OPTIONS, io_open=_refuse)
            stream: Any = next(each for each in container.streams if each.type == "video")
            assert stream.codec_context.codec.name in _CODECS
        except MemoryError:
            raise
        except Exception:
            raise MediaRefused(f"the file is not a supported video ({_NAMES})") from None
        try:
            with container:
                check_pixels(stream.width, stream.height, max_pixels)
                # With room for the padding of rows and columns, which decoders count.
                stream.codec_context.options = {"max_pixels": str(2 * max_pixels + 2**16)}
                stream.codec_context.thread_count = 1
                plan = self._plan(container, stream, settings)
                pictures = _pictures(container.decode(stream), plan, max_pixels)
                return plan, self._resized(pictures, plan, settings, max_bytes)
        except (MediaRefused, MemoryError):
            raise
        except Exception:
            raise MediaRefused("the video is damaged or incomplete") from None

    def _frames_of_array(
        self, file: IO[bytes], settings: Mapping[str, Any], max_pixels: int, max_bytes: int
    ) -> tuple[FramePlan, NDArray[np.uint8]]:
        """`_frames` of an array."""
        frames, indices, rate, total = read_frames(file.read())
        check_pixels(frames.shape[2], frames.shape[1], max_pixels)
        if len(frames) > MAX_FRAMES:
            raise MediaRefused(f"the video has {len(frames):,} frames; at most {MAX_FRAMES:,} are allowed")
        plan = FramePlan(indices, rate, total)
        return plan, self._resized(((frame, 1) for frame in frames), plan, settings, max_bytes)

    def _plan(self, container: Any, stream: Any, settings: Mapping[str, Any]) -> FramePlan:
        total = stream.frames
        if total <= 0:  # unknown, as in WebM
            total = 0
            for packet in container.demux(stream):
                total += packet.size > 0
                if total > MAX_FRAMES:
                    break
            container.seek(0)
        rate = float(stream.average_rate or 0) or _USUAL_RATE
        if total == 0:
            raise MediaRefused("the video has no frames")
        if total > MAX_FRAMES or total / rate > MAX_SECONDS:
            raise MediaRefused(
                f"the video has {total:,} frames of {rate:g} per second; at most {MAX_FRAMES:,} frames and "
                f"{MAX_SECONDS:,.0f} seconds are allowed"
            )
        indices = self._family.sample(total, rate, settings)
        if len(indices) == 0:
            raise MediaRefused(f"the video has {total} frames, which is too few for this model or for num_frames")
        return FramePlan(indices, rate, total)

    def _resized(
        self, pictures: Iterable[Picture], plan: FramePlan, settings: Mapping[str, Any], max_bytes: int
    ) -> NDArray[np.uint8]:
        """The planned frames, resized: [frames, height, width, 3]. Raises `MediaRefused`."""
        frames: NDArray[np.uint8] | None = None
        filter_, found = Image.Resampling(settings["resample"]), 0
        for picture, repeats in pictures:
            if frames is None:
                height, width = self._family.size(len(plan.indices), picture.shape[0], picture.shape[1], settings)
                padded = len(plan.indices) + -len(plan.indices) % settings.get("temporal_patch_size", 1)
                if (size := padded * height * width * 12) > max_bytes:
                    raise MediaRefused(
                        f"the processed video would have {size} bytes, of {len(plan.indices)} frames; at most "
                        f"{max_bytes} are allowed: use fewer frames (fps, num_frames) or pixels (max_pixels)"
                    )
                frames = np.empty((len(plan.indices), height, width, 3), np.uint8)
            # First the rows, as torch does: Pillow takes the cheaper order, which rounds otherwise.
            resized = self._family.drawn(picture, plan.indices[found] / plan.rate, settings)
            for height, width in self._family.steps(len(plan.indices), picture.shape[0], picture.shape[1], settings):
                for size in ((width, resized.shape[0]), (width, height)):
                    resized = np.asarray(Image.fromarray(resized).resize(size, filter_))
            frames[found : found + repeats] = resized
            found += repeats
        if frames is None or found < len(plan.indices) * _LEAST_PART:
            raise MediaRefused("the video is damaged or incomplete")
        frames[found:] = frames[found - 1]
        return frames


def _pictures(frames: Iterable[Any], plan: FramePlan, max_pixels: int) -> Iterator[Picture]:
    """Decode frames up to the last planned one, and yield the planned ones. Raises `MediaRefused`."""
    repeats = dict(zip(*np.unique(plan.indices, return_counts=True), strict=True))
    last = int(plan.indices[-1])
    for index, frame in enumerate(frames):
        if index in repeats:
            check_pixels(frame.width, frame.height, max_pixels)
            yield np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90), repeats[index]
        if index >= last:
            break


class _Attributes:
    """Settings, as attributes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.__dict__.update(settings)


def _refuse(url: str, flags: int, options: object) -> Any:
    """Takes the place of FFmpeg's own files and connections, for formats that refer to others."""
    raise OSError("a video refers to another file")


def resolved(defaults: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over others. Limits of pixels have two names; rate and number of frames exclude each other."""
    settings = {**defaults, **told, "size": {**defaults["size"], **(told.get("size") or {})}}
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if (pixels := settings.pop(name, None)) is not None:
            settings["size"][edge] = pixels
    if told.get("num_frames") is not None:
        settings["fps"] = told.get("fps")
    elif told.get("fps") is not None:
        settings["num_frames"] = None
    return settings


def check_least_pixels(size: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
    """Raise `MediaRefused` if a small picture would become larger than any picture does without options."""
    most = max(limits.get("longest_edge", math.inf), limits.get("shortest_edge", 0))
    if size.get("shortest_edge", 0) > most:
        raise MediaRefused(f"min_pixels and size.shortest_edge must be at most {most}")


def _normalized(frames: NDArray[np.uint8], settings: Mapping[str, Any]) -> NDArray[np.float32]:
    """Frames [frames, height, width, 3] as the tower's numbers."""
    values = frames.astype(np.float32)
    if settings["do_normalize"]:
        scale = np.float32(1 / settings["rescale_factor"] if settings["do_rescale"] else 1)
        values -= np.array(settings["image_mean"], np.float32) * scale
        values /= np.array(settings["image_std"], np.float32) * scale
    elif settings["do_rescale"]:
        values *= np.float32(settings["rescale_factor"])
    return values
