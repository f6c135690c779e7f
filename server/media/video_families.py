"""What the models of each family take of a video: which frames, of which size, in which arrays (see `video`).

As the video processors of transformers do, which need torch and torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from quire.server.media.images import MediaRefused

MAX_FRAMES = 100_000
"""Frames of a file up to the last one that is used: all of them are decoded."""
_MAX_ASPECT = 200
Grids = tuple[tuple[int, int, int], ...]

ARGUMENTS: dict[str, type] = {
    "fps": float,
    "num_frames": int,
    "min_frames": int,
    "max_frames": int,
    "min_pixels": int,
    "max_pixels": int,
    "size": dict,
    "cap_pixels_per_frame": bool,
}
"""What operators and requests may give."""


@dataclass(frozen=True)
class FramePlan:
    """Which frames of a video are used, and their size."""

    indices: NDArray[np.int64]
    """In ascending order."""
    rate: float
    """Frames per second of the file."""
    total: int
    """Frames of the file."""


def _from(start: float, total: int, step: float) -> NDArray[np.int64]:
    """The frames at equal distances, counted in float32 as torch.arange does."""
    numbers = start + np.arange(math.ceil((total - start) / step)) * step
    indices: NDArray[np.int64] = numbers.astype(np.float32).astype(np.int64)
    return indices


_NONE: NDArray[np.int64] = np.empty(0, np.int64)
_COMMON = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class _Qwen2:
    """Qwen2-VL's: patches of pairs of frames, merged 2 × 2; each frame's number of pixels is limited."""

    arguments = frozenset(ARGUMENTS)
    """What requests may give."""
    defaults: Mapping[str, Any] = {
        **_COMMON,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2},
        "cap_pixels_per_frame": False,
        "max_video_tokens": 128_000,
        "fps": 2.0,  # of Qwen's package for clients: this processor has none, and would take all frames
        "num_frames": None,
        "min_frames": 4,
        "max_frames": 768,
    }
    """What the class of the video processor has where the model's folder says nothing."""

    def side(self, settings: Mapping[str, Any]) -> int:
        """Height and width of a picture that is not too small."""
        return 2 * int(settings["patch_size"]) * int(settings["merge_size"])

    def sample(self, total: int, rate: float, settings: Mapping[str, Any]) -> NDArray[np.int64]:
        """The frames that are used, of `total` frames; empty: they are too few."""
        factor = settings["temporal_patch_size"]
        if settings["num_frames"] is not None:
            count = round(settings["num_frames"] / factor) * factor
        else:
            most = min(settings["max_frames"], total) // factor * factor
            wanted = min(max(total / rate * settings["fps"], settings["min_frames"]), most, total)
            count = math.floor(wanted / factor) * factor
        return _from(0, total, total / count) if 0 < count <= total else _NONE

    def size(self, count: int, height: int, width: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        """Height and width of the resized frames. Raises `MediaRefused`."""
        factor, frames_factor = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
        least, most = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
        if settings["cap_pixels_per_frame"]:
            tokens = int(settings["max_video_tokens"] * factor**2 * 0.9)
            most = max(min(most, tokens * frames_factor // count), int(least * 1.05))
        return self._within(1, 1, height, width, factor, least, most, settings)

    def steps(self, count: int, height: int, width: int, settings: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
        """Heights and widths to which frames are resized, one after another; the last one is `size`."""
        return (self.size(count, height, width, settings),)

    def _within(
        self,
        count: int,
        rounded: int,
        height: int,
        width: int,
        factor: int,
        least: float,
        most: float,
        settings: Mapping[str, Any],
    ) -> tuple[int, int]:
        """Multiples of `factor` such that `count` (or `rounded`) frames have from `least` to `most` pixels."""
        if not settings["do_resize"]:
            if height % factor or width % factor:
                raise MediaRefused(f"the frames' height and width must be multiples of {factor} for this model")
            return height, width
        if max(height, width) > _MAX_ASPECT * min(height, width):
            raise MediaRefused(f"one side of the video is more than {_MAX_ASPECT} times as long as the other")
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if rounded * new_height * new_width > most:
            scale = math.sqrt(count * height * width / most)
            new_height = max(factor, math.floor(height / scale / factor) * factor)
            new_width = max(factor, math.floor(width / scale / factor) * factor)
        elif rounded * new_height * new_width < least:
            scale = math.sqrt(least / (count * height * width))
            new_height = math.ceil(height * scale / factor) * factor
            new_width = math.ceil(width * scale / factor) * factor
        return new_height, new_width

    def drawn(self, picture: NDArray[np.uint8], seconds: float, settings: Mapping[str, Any]) -> NDArray[np.uint8]:
        """A frame `[height, width, 3]` at this time of the video, before it is resized."""
        return picture

    def arrays(self, values: NDArray[np.float32], settings: Mapping[str, Any]) -> tuple[dict[str, NDArray[Any]], Grids]:
        """The arrays of the tower from frames [frames, height, width, 3], and the grids (see `LoadedItem`).

        Patches are [patches, 3 * temporal_patch_size * patch_size²], those that are merged side by side.
        """
        patch, merge, time = settings["patch_size"], settings["merge_size"], settings["temporal_patch_size"]
        if missing := -len(values) % time:
            values = np.concatenate([values, np.repeat(values[-1:], missing, axis=0)])
        count, height, width, _ = values.shape
        grid = (count // time, height // patch, width // patch)
        cut = values.reshape(grid[0], time, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3)
        patches = np.ascontiguousarray(cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)).reshape(math.prod(grid), -1)
        found: dict[str, NDArray[Any]] = {"pixel_values_videos": patches, "video_grid_thw": np.array([grid], np.int64)}
        return found, self._grids(grid[0], grid[1] // merge, grid[2] // merge)

    def _grids(self, time: int, height: int, width: int) -> Grids:
        return ((time, height, width),)

    def seconds(self, plan: FramePlan, settings: Mapping[str, Any]) -> float:
        """Seconds between two features along time, if positions depend on it."""
        return 0.0


class _Qwen25(_Qwen2):
    def seconds(self, plan: FramePlan, settings: Mapping[str, Any]) -> float:
        return float(settings["temporal_patch_size"] / (len(plan.indices) / plan.total * plan.rate))


class _Qwen3(_Qwen2):
    """Qwen3-VL's: the number of pixels of all frames together is limited, and each step in time has a text."""

    defaults: Mapping[str, Any] = {
        **_Qwen2.defaults,
        "patch_size": 16,
        "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2},
        "max_video_tokens": 768,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }

    def sample(self, total: int, rate: float, settings: Mapping[str, Any]) -> NDArray[np.int64]:
        """From the first to the last frame."""
        if (count := settings["num_frames"]) is None:
            wanted = int(total / rate * settings["fps"])
            count = min(max(wanted, settings["min_frames"]), settings["max_frames"], total)
        if not settings["temporal_patch_size"] <= count <= MAX_FRAMES:
            return _NONE
        indices: NDArray[np.int64] = np.linspace(0, total - 1, count).round().astype(np.int64)
        return indices

    def size(self, count: int, height: int, width: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        factor, frames_factor = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
        least, most = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
        if settings["cap_pixels_per_frame"]:
            most = max(min(settings["max_video_tokens"] * factor**2, most // count), int(least * 1.05)) * count
        if settings["do_resize"] and (height < factor or width < factor):
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        rounded = round(count / frames_factor) * frames_factor
        return self._within(count, rounded, height, width, factor, least, most, settings)

    def _grids(self, time: int, height: int, width: int) -> Grids:
        return ((1, height, width),) * time


class _Glm4V(_Qwen3):
    """GLM-4.1V's and 4.5V's: frames at a rate, up to a duration; beyond it, as many at equal distances."""

    arguments = frozenset({"fps", "min_pixels", "max_pixels", "size"})
    defaults: Mapping[str, Any] = {
        **_Qwen2.defaults,
        "size": {"shortest_edge": 112**2, "longest_edge": 30_000 * 2 * 28**2},
        "max_duration": 300,
    }

    def sample(self, total: int, rate: float, settings: Mapping[str, Any]) -> NDArray[np.int64]:
        """The last frame twice, if there would be an odd number."""
        seconds, wanted = total / rate, settings["fps"]
        if seconds <= settings["max_duration"]:
            times = np.arange(max(math.floor(seconds * wanted), 1)) / wanted
            places = [math.ceil(number * rate / wanted) for number in range(len(times))]
        elif (count := int(settings["max_duration"] * wanted)) >= total:
            places = [*range(total)]
        else:
            places = [math.ceil(time * rate) for time in np.linspace(0, seconds, count)]
        indices = np.unique(np.minimum(np.array(places, np.int64), total - 1))
        return _even(indices) if len(indices) <= MAX_FRAMES else _NONE


class _Glm46V(_Glm4V):
    """GLM-4.6V's: the longer the video, the lower the rate."""

    arguments = frozenset({"min_pixels", "max_pixels", "size"})

    def sample(self, total: int, rate: float, settings: Mapping[str, Any]) -> NDArray[np.int64]:
        """See `_Glm4V`."""
        seconds, most = total / rate, 2400
        used = min(seconds, most)
        wanted = (3 if used <= 30 else 1 if used <= 300 else 0.5) * settings["temporal_patch_size"]
        count = min(int(used * wanted), 640)
        places: list[int] = []
        if total < count:
            places = np.linspace(0, total - 1, count, dtype=int).tolist()
        else:
            due = 0.0
            for number in range(total):
                if number * (1 / rate) >= due:
                    due += 1 / wanted
                    places.append(number)
                    if due >= int(seconds):
                        break
        if len(places) < count:
            first, last = (places[0], places[-1]) if places else (0, max(total - 1, 0))
            places = np.linspace(first, last, count, dtype=int).tolist()
        elif len(places) > count:
            places = np.linspace(0, total - 1, count, dtype=int).tolist()
        return _even(np.unique(np.array(places, np.int64)))


def _even(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """With the last frame twice, if their number is odd."""
    return np.append(indices, indices[-1:]) if len(indices) % 2 else indices


class _Ernie(_Qwen2):
    """ERNIE 4.5 VL's: patches of single frames, on which their times are drawn; the tower merges pairs of frames."""

    arguments = frozenset(ARGUMENTS) - {"cap_pixels_per_frame"}
    defaults: Mapping[str, Any] = {
        **_Qwen2.defaults,
        "size": {"shortest_edge": 299 * 28**2, "longest_edge": 1196 * 28**2},
        "fps": None,
        "min_frames": 16,
        "max_frames": 180,
        "draw_on_frames": True,
        "font": b"",
    }

    def sample(self, total: int, rate: float, settings: Mapping[str, Any]) -> NDArray[np.int64]:
        """Without a rate and a number, all frames up to the limit."""
        least, most, count = settings["min_frames"], settings["max_frames"], settings["num_frames"]
        if count is None:
            wanted = total if settings["fps"] is None else total / rate * settings["fps"]
            count = min(max(wanted, least), most, total)
        elif not least <= count <= most:
            return _NONE
        return _from(0, total, total / count) if count <= total else _NONE

    def drawn(self, picture: NDArray[np.uint8], seconds: float, settings: Mapping[str, Any]) -> NDArray[np.uint8]:
        """With the time in black letters with white borders."""
        if not settings["draw_on_frames"]:
            return picture
        image = Image.fromarray(picture)
        size = int(min(image.size) * 0.1)
        if size > 0:
            text = f"time: {int(seconds // 3600):02d}:{int(seconds % 3600 // 60):02d}:{seconds % 60:05.02f}"
            font, black, white = ImageFont.truetype(BytesIO(settings["font"]), size), (0, 0, 0), (255, 255, 255)
            drawing, border = ImageDraw.Draw(image), int(size * 0.1)
            drawing.text((0, 0), text, font=font, fill=black, stroke_width=border, stroke_fill=white)
        return np.asarray(image)

    def arrays(self, values: NDArray[np.float32], settings: Mapping[str, Any]) -> tuple[dict[str, NDArray[Any]], Grids]:
        """See `_Qwen2`; the last frame is repeated if their number is odd."""
        count = len(values) + len(values) % 2
        values = np.concatenate([values, np.repeat(values[-1:], count - len(values), axis=0)])
        found, ((_, height, width),) = super().arrays(values, {**settings, "temporal_patch_size": 1})
        return found, ((count // 2, height, width),)


class _Pictures(_Qwen2):
    """LLaVA-OneVision's: frames of one size, each as a picture."""

    arguments = frozenset({"fps", "num_frames"})
    defaults: Mapping[str, Any] = {**_COMMON, "size": {"height": 384, "width": 384}, "fps": None, "num_frames": 32}

    def side(self, settings: Mapping[str, Any]) -> int:
        if (size := settings["size"]).keys() != {"height", "width"}:
            raise ValueError(f"size {size}")
        return int(size["height"])

    def sample(self, total: int, rate: float, settings: Mapping[str, Any]) -> NDArray[np.int64]:
        count = self._count(total, rate, settings)
        return np.arange(count, dtype=np.int64) * total // count

    def _count(self, total: int, rate: float, settings: Mapping[str, Any]) -> int:
        """Frames that are used: at most all of them."""
        if (count := settings["num_frames"]) is None:
            count = max(1, int(total / rate * settings["fps"]))
        return min(int(count), total)

    def size(self, count: int, height: int, width: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        size = settings["size"]
        return (size["height"], size["width"]) if settings["do_resize"] else (height, width)

    def arrays(self, values: NDArray[np.float32], settings: Mapping[str, Any]) -> tuple[dict[str, NDArray[Any]], Grids]:
        """Frames as [1, frames, 3, height, width]."""
        return {"pixel_values_videos": np.ascontiguousarray(values.transpose(0, 3, 1, 2))[None]}, ()


class _InternVL(_Pictures):
    """InternVL's: frames from the middle of equal parts."""

    def sample(self, total: int, rate: float, settings: Mapping[str, Any]) -> NDArray[np.int64]:
        count = self._count(total, rate, settings)
        return _from(total / count / 2, total, total / count)


class _SmolVLM(_Pictures):
    """SmolVLM 2's: frames at a rate, up to a number; each is a square picture between its time and the next."""

    defaults: Mapping[str, Any] = {
        **_COMMON,
        "resample": 1,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {},
        "max_image_size": {"longest_edge": 364},
        "video_sampling": {"fps": 1, "max_frames": 64},
        "fps": None,
        "num_frames": None,
    }

    def side(self, settings: Mapping[str, Any]) -> int:
        return int(settings["max_image_size"]["longest_edge"])

    def sample(self, total: int, rate: float, settings: Mapping[str, Any]) -> NDArray[np.int64]:
        """Without the first and the last second of long videos."""
        usual, seconds = settings["video_sampling"], total / rate
        wanted, most = settings["fps"] or usual["fps"], settings["num_frames"] or usual["max_frames"]
        first, last = 0, total - 1
        if seconds - 2 > most * wanted:
            first, last = int(rate), min(int(total - rate), last)
        if first >= last:
            first, last = 0, total - 1
        count = min(round(wanted * seconds), most, last - first + 1)
        indices: NDArray[np.int64] = np.unique(np.linspace(first, last, max(count, 1), dtype=np.int64))
        return indices

    def size(self, count: int, height: int, width: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        return (self.side(settings),) * 2 if settings["do_resize"] else (height, width)

    def steps(self, count: int, height: int, width: int, settings: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
        """A picture of the same shape first, as of images that are not cut; the shorter side is even."""
        last = self.size(count, height, width, settings)
        if not settings["do_resize"]:
            return (last,)
        size = settings["size"] or settings["video_sampling"].get("video_size") or {"longest_edge": 4 * 364}
        longest = min(int(size["longest_edge"]), 4096)
        shorter = int(longest / (width / height)) if width >= height else int(longest * (width / height))
        shorter = max(shorter + shorter % 2, 1)
        return ((shorter, longest) if width >= height else (longest, shorter), last)


class _Gemma4(_Pictures):
    """Gemma 4's: patches of frames that keep their ratio of height to width, with padding behind them."""

    defaults: Mapping[str, Any] = {
        **_COMMON,
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
        "size": {},
        "fps": None,
        "num_frames": 32,
        "patch_size": 16,
        "max_soft_tokens": 70,
        "pooling_kernel_size": 3,
    }

    def side(self, settings: Mapping[str, Any]) -> int:
        return int(settings["patch_size"] * settings["pooling_kernel_size"])

    def sample(self, total: int, rate: float, settings: Mapping[str, Any]) -> NDArray[np.int64]:
        return _from(0, total, total / self._count(total, rate, settings))

    def size(self, count: int, height: int, width: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        factor, most = self.side(settings), settings["max_soft_tokens"]
        if not settings["do_resize"]:
            return self._within(1, 1, height, width, factor, 0, 0, settings)
        scale = math.sqrt(most * factor**2 / (height * width))
        rows, columns = math.floor(scale * height / factor), math.floor(scale * width / factor)
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        return rows * factor, columns * factor

    def arrays(self, values: NDArray[np.float32], settings: Mapping[str, Any]) -> tuple[dict[str, NDArray[Any]], Grids]:
        """Patches [frames, patches, 3 * patch_size²] and their columns and rows [frames, patches, 2]; -1 is padding."""
        side, pool = settings["patch_size"], settings["pooling_kernel_size"]
        frames, height, width, _ = values.shape
        rows, columns = height // side, width // side
        cut = values.reshape(frames, rows, side, columns, side, 3).transpose(0, 1, 3, 2, 4, 5)
        most, count = settings["max_soft_tokens"] * pool**2, rows * columns
        padding = ((0, 0), (0, max(0, most - count)), (0, 0))
        patches = np.pad(cut.reshape(frames, count, -1), padding)
        places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(1, count, 2)
        where = np.pad(np.repeat(places, frames, axis=0), padding, constant_values=-1)
        return {
            "pixel_values_videos": patches,
            "video_position_ids": where.astype(np.int64),
            "num_frames_per_video": np.array([frames], np.int64),
            "num_soft_tokens_per_video": np.array([count // pool**2], np.int64),
        }, ()


FAMILIES: Mapping[str, _Qwen2] = {
    "Qwen2VLProcessor": _Qwen2(),
    "Qwen2_5_VLProcessor": _Qwen25(),
    "Qwen3VLProcessor": _Qwen3(),
    "Glm4vProcessor": _Glm4V(),
    "Glm46VProcessor": _Glm46V(),
    "Gemma4Processor": _Gemma4(),
    "LlavaOnevisionProcessor": _Pictures(),
    "InternVLProcessor": _InternVL(),
    "SmolVLMProcessor": _SmolVLM(),
    "Ernie4_5_VLMoeProcessor": _Ernie(),
}
"""By the class of a model's processor."""


_FIRST = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_FIRST += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """The English words of a number below a million, as the text of SmolVLM 2's videos has that of the frames."""
    for value, name in ((1000, "thousand"), (100, "hundred")):
        if (count := number // value) > 0:
            words, rest = f"{in_words(count)} {name}", number % value
            if not rest:
                return words
            return f"{words} and {in_words(rest)}" if rest < 100 else f"{words}, {in_words(rest)}"
    if number < len(_FIRST):
        return _FIRST[number]
    tens, ones = _TENS[number // 10 - 2], number % 10
    return f"{tens}-{_FIRST[ones]}" if ones else tens
