"""The messages between the media process and its decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.engine.protocol.media import EMBEDS, MediaArray, MediaKind
from quire.server.media.types import MediaFormat

ALIGNMENT = 64
"""Of the arrays in a result's file."""
ORDER_BYTES = 2**16
WRITTEN, NO_SPACE = b"\1", b"\0"


class ArrayLayout(msgspec.Struct, array_like=True, frozen=True):
    """What all arrays of a name have in common."""

    dtype: str
    rank: int
    width: int | None
    """The last dimension; None: it varies."""
    is_optional: bool
    """Whether there are items without it."""


class ItemLayout(msgspec.Struct, array_like=True, frozen=True):
    """What all items of a kind have in common, for this model."""

    arrays: dict[str, ArrayLayout]
    has_grids: bool


class DecoderReady(msgspec.Struct, array_like=True):
    """The first message of the process."""

    format: MediaFormat
    error: str = ""
    """Why it can never decode anything."""
    counts_images: bool = False
    """Whether an image is processed differently if its prompt has others."""
    layouts: Mapping[str, ItemLayout] = {}
    """By `DecodeOrder.layout`."""


class DecodeOrder(msgspec.Struct, array_like=True):
    """To the process; with it come two descriptors: a socket for the answer, and the item's file."""

    kind: MediaKind
    options: dict[str, Any]
    seconds: int
    """Processor time."""
    max_pixels: int
    max_bytes: int
    """Bytes of the result."""
    page: int | None = None
    """The page of a document, from 0; None: the file is no document."""
    among_several: bool = False
    """With `DecoderReady.counts_images`: the image's prompt has others."""
    is_array: bool = False
    """See `MediaSource`."""

    @property
    def layout(self) -> str:
        """The kind of the results."""
        return EMBEDS if self.is_array and self.kind == "image" else self.kind


class Decoded(msgspec.Struct, array_like=True, tag=True):
    """The answer of a fork, which comes after its process id and before the arrays.

    Process id and length of the answer have 4 bytes. Then the fork gets a descriptor of the result's file, writes the
    arrays there, and sends one byte: `WRITTEN` or `NO_SPACE`.
    """

    arrays: tuple[MediaArray, ...]
    num_bytes: int
    text: str
    grids: tuple[tuple[int, int, int], ...]
    seconds_per_frame: float
    num_pixels: int
    num_pages: int = 1
    """Of the document."""


class Refused(msgspec.Struct, array_like=True, tag=True):
    """The other answer: the item is not accepted."""

    reason: str
