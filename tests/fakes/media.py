"""A media process that loads nothing: each item has a text and a digest of its source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from quire.engine.architecture.media_spec import MediaSpec, TowerSpec
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import MediaArray, MediaData
from quire.server.media.types import LoadedItem, LoadedMedia, MediaFormat, MediaSource, MediaUnavailable

Made = tuple[str, tuple[tuple[int, int, int], ...]]
"""The text of an item, and its grids."""


def media_spec(image_token_id: int | None, video_token_id: int | None = None) -> MediaSpec:
    assert image_token_id is not None
    return MediaSpec(tower=TowerSpec(hidden_size=8), image_token_id=image_token_id, video_token_id=video_token_id)


TEXT = "hi"
"""The file with the id `text`."""


class FakeLoader:
    """Takes the place of `MediaClient`. `make` returns an item's text; URLs with `missing` cannot be fetched, with
    `down` not now, and with `slow` not ever. A document has two pages.
    """

    def __init__(self, format: MediaFormat, make: Callable[[MediaSource], Made]) -> None:
        self._format, self._make = format, make
        self.loaded: list[MediaSource] = []
        self.owners: list[str] = []
        self.leases: set[str] = set()
        """Those that are held."""
        self.adopted: list[str] = []
        self.handed_over: list[str] = []
        self.folder: Path | None = None
        """Where the data lies; None: in the items."""

    async def format(self) -> MediaFormat:
        return self._format

    async def load(self, sources: Sequence[MediaSource], owner: str = "") -> LoadedMedia:
        await asyncio.sleep(0)
        items = []
        for source in sources:
            if source.file_id == "text":
                continue
            if "down" in source.url:
                raise MediaUnavailable("images and videos cannot be loaded now")
            if "slow" in source.url:
                await asyncio.sleep(3600)
            if "missing" in source.url:
                raise InvalidParameter(f"{source.param}: cannot be fetched", source.param)
            text, grids = self._make(source)
            key = f"{source.kind} {source.url} {source.uuid} {source.options}".encode() + source.data
            digest = blake2b(key, digest_size=16).digest()
            data = MediaData((MediaArray("pixel_values", "float32", (1, 4), 0),), 16, content=digest)
            if self.folder is not None:
                (path := self.folder / digest.hex()).write_bytes(digest.ljust(64, b"\0"))
                data = msgspec.structs.replace(data, path=str(path), content=b"")
            items += [LoadedItem(digest, source.kind, text, grids, 0.0, data)] * (1 + source.is_document)
        self.loaded += sources
        self.owners.append(owner)
        lease = f"lease {len(self.owners)}"
        self.leases.add(lease)
        has_documents = any(source.is_document for source in sources)
        texts = tuple(TEXT if source.file_id == "text" else None for source in sources)
        counts = tuple(0 if text else 1 + source.is_document for source, text in zip(sources, texts, strict=True))
        return LoadedMedia(tuple(items), lease, counts if has_documents else (), texts if any(texts) else ())

    async def adopt(self, lease: str) -> None:
        assert lease in self.leases
        self.adopted.append(lease)

    def hand_over(self, lease: str) -> None:
        self.handed_over.append(lease)

    def release(self, lease: str) -> None:
        self.leases.remove(lease)

    def close(self) -> None:
        """There is no connection."""
