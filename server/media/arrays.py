"""Arrays in safetensors and npy files: features of images, and frames of videos. Runs in decoder processes only.

Neither format can hold code as it is read here: NumPy's without pickles, and of safetensors
(https://huggingface.co/docs/safetensors) only a JSON object and numbers.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.protocol.media import EMBEDS, GRID
from quire.server.media.images import MediaRefused

Grid = tuple[int, int, int]
_MAX_HEADER_BYTES, _MAX_FILES = 2**16, 3
_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "|u1",
    "BF16": "<u2",  # which NumPy does not have
}
"""Of safetensors, as NumPy's."""


LARGEST = {"float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38, "float16": 65504.0}
"""The largest number of each type that models compute with."""


def read_embeds(data: bytes, dtype: str = "float32") -> tuple[NDArray[np.float32], Grid | None]:
    """Return an image's features [features, width], and its grid in patches along time, height and width, if there is
    one. `data` is a file with the features, and perhaps a second one with the grid behind it; a file of safetensors may
    have both. Raises `MediaRefused`, also for numbers that are not finite in `dtype`, the model's.
    """
    arrays, *others = _read(data)
    if EMBEDS not in arrays and len(arrays) == 1:
        arrays = {EMBEDS: next(iter(arrays.values()))}
    if others:
        if len(others) > 1 or len(others[0]) > 1 or GRID in arrays:
            raise MediaRefused(f"the files of {EMBEDS} and {GRID} must have one array each")
        arrays[GRID] = next(iter(others[0].values()))
    if EMBEDS not in arrays or arrays.keys() - {EMBEDS, GRID}:
        raise MediaRefused(f"the arrays of a safetensors file must be {EMBEDS} and, if the model needs it, {GRID}")
    embeds, grid = arrays[EMBEDS], arrays.get(GRID)
    if embeds.ndim == 3 and len(embeds) == 1:
        embeds = embeds[0]
    if embeds.ndim != 2 or embeds.dtype.kind != "f" or not embeds.size:
        shape = " × ".join(map(str, embeds.shape))
        raise MediaRefused(f"the features must be floating-point numbers [tokens, width], got {embeds.dtype}, {shape}")
    with np.errstate(over="ignore"):
        embeds = np.ascontiguousarray(embeds, np.float32)
    if not (np.abs(embeds) <= LARGEST[dtype]).all():
        raise MediaRefused(f"the features have numbers that are not finite in {dtype}")
    if grid is None:
        return embeds, None
    if grid.size != 3 or grid.dtype.kind != "i" or grid.min() < 1:
        raise MediaRefused(f"{GRID} must be three positive integers: patches along time, height and width")
    time, height, width = grid.ravel().tolist()
    return embeds, (time, height, width)


def read_frames(data: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64], float, int]:
    """Return the frames [frames, height, width, 3] of a video, their numbers in the whole video, and its frames per
    second and in all. `data` is three files: the frames, their numbers, and the two others together. Raises
    `MediaRefused`.
    """
    arrays = [array for file in _read(data) for array in file.values()]
    if [(array.dtype.name, array.ndim) for array in arrays] != [("uint8", 4), ("int64", 1), ("float64", 1)]:
        raise MediaRefused("the frames of a video must be of uint8, [frames, height, width, 3]")
    frames, numbers, (rate, total) = arrays
    if not frames.size or frames.shape[3] != 3:
        raise MediaRefused(f"the frames of a video must be [frames, height, width, 3], not {[*frames.shape]}")
    if not (0 < rate < 1e4 and len(frames) <= total < 2**31 and numbers.shape == (len(frames),)):
        raise MediaRefused("the metadata of a video do not fit its frames: fps, total_num_frames or frames_indices")
    if numbers[0] < 0 or numbers[-1] >= total or (np.diff(numbers) < 0).any():
        raise MediaRefused("frames_indices of a video must be in ascending order, and less than total_num_frames")
    return frames, numbers, float(rate), int(total)


def _read(data: bytes) -> list[dict[str, NDArray[Any]]]:
    """Return the arrays of one or more files, one behind the other. That of an npy file has no name."""
    found, end = list[dict[str, NDArray[Any]]](), 0
    try:
        while end < len(data) and len(found) < _MAX_FILES:
            arrays, end = (_npy if data.startswith(b"\x93NUMPY", end) else _safetensors)(data, end)
            found.append(arrays)
    except MemoryError:
        raise
    except Exception:  # of NumPy and json
        found.clear()
    if not found or not all(found) or end < len(data):
        raise MediaRefused("the file has no arrays of numbers in safetensors or npy")
    return found


def _npy(data: bytes, start: int) -> tuple[dict[str, NDArray[Any]], int]:
    (file := io.BytesIO(data)).seek(start)
    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    shape, is_transposed, dtype = read[np.lib.format.read_magic(file)[0]](file)
    array = _array(data, file.tell(), dtype, shape[::-1] if is_transposed else shape)
    return {"": array.T if is_transposed else array}, file.tell() + array.nbytes


def _safetensors(data: bytes, start: int) -> tuple[dict[str, NDArray[Any]], int]:
    begin = start + 8
    if not 2 <= (length := int.from_bytes(data[start:begin], "little")) <= _MAX_HEADER_BYTES:
        raise ValueError
    header, end = json.loads(data[begin : begin + length]), 0
    header.pop("__metadata__", None)
    arrays = {}
    for name, tensor in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        array = _array(data, begin + length + end, np.dtype(_TYPES[tensor["dtype"]]), tensor["shape"])
        if tensor["data_offsets"] != [end, end + array.nbytes]:
            raise ValueError
        end += array.nbytes
        if tensor["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = array
    return arrays, begin + length + end


def _array(data: bytes, start: int, dtype: np.dtype[Any], shape: Any) -> NDArray[Any]:
    """The array of the bytes from `start` on. Raises `ValueError` if they are too few."""
    if dtype.str[1:] not in {each[1:] for each in _TYPES.values()} or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError
    return np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape)


@dataclass(frozen=True)
class EmbedsFormat:
    """What stands for an image in the prompt: a run of tokens, one for each feature, between two texts."""

    before: str
    token: str
    after: str
    num_features: int | None
    """Of each image; None: they differ."""
    merge: int
    """Patches of an image's grid along height and width that a feature is made of; 0: there are no grids."""

    @classmethod
    def of(cls, texts: Sequence[str], tokens: Iterable[str], merge: int) -> EmbedsFormat | None:
        """Find it in the `texts` of images of several sizes, whose feature token is one of `tokens`. None: they have
        another form, such as a token behind each row of features.
        """
        token = max(tokens, key=lambda each: sum(text.count(each) for text in texts), default="")
        counts = [text.count(token) for text in texts]
        before, _, after = texts[0].partition(token * counts[0] or texts[0])
        runs = zip(texts, counts, strict=True)
        if not all(counts) or any(text != before + token * count + after for text, count in runs):
            return None
        return cls(before, token, after, None if merge or len({*counts}) > 1 else counts[0], merge)

    def place(self, num_features: int, grid: Grid | None) -> tuple[str, tuple[Grid, ...]]:
        """Return the text and the grids (see `LoadedItem`) of so many features. Raises `MediaRefused`."""
        if self.num_features not in (None, num_features):
            raise MediaRefused(f"there are {num_features} features; an image of this model has {self.num_features}")
        text = self.before + self.token * num_features + self.after
        if not self.merge:
            if grid is not None:
                raise MediaRefused(f"this model takes no {GRID}")
            return text, ()
        if grid is None:
            raise MediaRefused(f"this model needs {GRID} with the features")
        time, height, width = grid
        if height % self.merge or width % self.merge:
            raise MediaRefused(f"height and width in {GRID} must be multiples of {self.merge} for this model")
        grid = time, height // self.merge, width // self.merge
        if (expected := math.prod(grid)) != num_features:
            raise MediaRefused(f"there are {num_features} features; {GRID} makes {expected}")
        return text, (grid,)

    def example(self, width: int) -> bytes:
        """Return a file with features."""
        file = io.BytesIO()
        np.save(file, np.zeros((self.num_features or 4, width), np.float32))
        if self.merge:
            np.save(file, np.array((1, 2 * self.merge, 2 * self.merge)))
        return file.getvalue()
