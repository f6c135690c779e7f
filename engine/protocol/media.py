"""Images and videos of a prompt: the arrays that a tower encodes, and the tokens that features replace. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

MediaKind = Literal["image", "video"]
PIXELS = "pixel_values"
"""Names that begin so are of arrays whose numbers a tower computes with. Others are grids, sizes, places and masks."""
EMBEDS, GRID = "image_embeds", "image_grid_thw"
"""Names of arrays: the features of an item that needs no tower, `[num_features, feature_width]`, and the grid of its
patches before they are merged. As in vLLM."""
MAX_ITEMS = 256
"""Images and videos of a prompt, together."""


class MediaArray(msgspec.Struct, array_like=True, frozen=True):
    """An array in the bytes of an item, in row-major order."""

    name: str
    """Its name in the output of the model's processor, such as pixel_values."""
    dtype: Literal["float32", "int64", "uint8"]
    shape: tuple[int, ...]
    start: int
    """Index of its first byte; a multiple of 64."""


class MediaData(msgspec.Struct, array_like=True, frozen=True, weakref=True):
    """The processed item: what the model's tower takes."""

    arrays: tuple[MediaArray, ...]
    num_bytes: int
    path: str = ""
    """A file in shared memory with the bytes; empty: they are in `content`."""
    content: bytes = b""
    """The bytes, for engines on other hosts."""


class MediaRun(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive tokens of an item's text that its features replace."""

    start: int
    """Index of the first one in the item's tokens."""
    length: int
    grid: tuple[int, int, int] = (0, 0, 0)
    """Features along time, height and width, whose product is `length`; zeros: they have no such order."""


class MediaItem(msgspec.Struct, array_like=True, frozen=True):
    """An item of a prompt. Its features replace the embeddings of the tokens of `runs`, in order."""

    digest: bytes
    """16 bytes: of the arrays, the grids and the text that stands for the item. In the engine also of what else its
    features, or who may know of them, depend on: the request's salt, and an adapter that changes the tower."""
    kind: MediaKind
    offset: int
    """Index of the item's first token in the prompt."""
    length: int
    """Tokens in the prompt that stand for the item, those between its runs included."""
    runs: tuple[MediaRun, ...]
    seconds_per_frame: float = 0.0
    """Videos: time between two features, for models whose positions depend on it."""
    data: MediaData | None = None
    """None: the features are known, or the reader does not need them."""

    @property
    def end(self) -> int:
        """Index of the first token after the item."""
        return self.offset + self.length

    @property
    def num_features(self) -> int:
        return sum(run.length for run in self.runs)

    @property
    def needs_tower(self) -> bool:
        """Whether its data are not features."""
        return self.data is None or all(array.name != EMBEDS for array in self.data.arrays)
