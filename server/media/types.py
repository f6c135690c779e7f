"""What the media process is asked for, and what it gives: items whose arrays lie in shared memory. No decoding here."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from quire.engine.protocol.media import MediaData, MediaKind
from quire.server.config.media_defaults import CACHE_GB, FETCH_SECONDS, MAX_BYTES

MIB = 2**20
DIGEST_BYTES = 16


class MediaUnavailable(Exception):
    """Images and videos cannot be loaded at the moment (503). The text says why; a client may try again."""


class MediaSource(msgspec.Struct, array_like=True):
    """One image or video of a request, before it is loaded."""

    kind: MediaKind
    param: str
    """The part of the request, for errors, such as messages[0].content[1].image_url."""
    url: str = ""
    """http:, https: or file:. The caller decodes data: URLs."""
    file_id: str = ""
    """An uploaded file, as an alternative."""
    data: bytes = b""
    """The file itself, as another."""
    is_base64: bool = False
    """Whether `data` is the file in base64."""
    data_digest: bytes = b""
    """Digest of `data`, instead of it: for an item that may be there already."""
    uuid: str = ""
    """A name that the client gives the item. With neither URL nor data: the item that had this name before."""
    options: dict[str, Any] = {}
    """Arguments of the model's processor (mm_processor_kwargs of the request), and "detail", which is a hint."""
    is_document: bool = False
    """Images: the file may be a PDF, too, each page of which is an image; or an uploaded text."""
    is_array: bool = False
    """The file has the features that a tower has made of an image, or the frames of a video (see `arrays`)."""

    def digest(self) -> bytes:
        """Return a digest of `data`, and of whether it is base64."""
        return blake2b(self.data, digest_size=DIGEST_BYTES, person=b"base64" if self.is_base64 else b"").digest()


class LoadedItem(msgspec.Struct, array_like=True, frozen=True):
    """An image or a video that has been processed."""

    digest: bytes
    """16 bytes: of the kind, the arrays, the grids, the text and the seconds."""
    kind: MediaKind
    text: str
    """What the model's processor puts in the prompt instead of the placeholder."""
    grids: tuple[tuple[int, int, int], ...]
    """Features along time, height and width of each run of feature tokens in the text; empty: they have no such
    order.
    """
    seconds_per_frame: float
    """Videos: seconds between two features along time."""
    data: MediaData


class LoadedMedia(msgspec.Struct, array_like=True, frozen=True):
    """The items of a request. Their files stay until the lease is released."""

    items: tuple[LoadedItem, ...]
    lease: str
    num_items: tuple[int, ...] = ()
    """The items of each source, if some source is a document; otherwise each has one."""
    texts: tuple[str | None, ...] = ()
    """For each source, the text that it is instead of items; empty: none is."""


class MediaFormat(msgspec.Struct, array_like=True, frozen=True):
    """How prompts refer to images and videos: what a chat template writes for an item. Empty: not supported."""

    image_placeholder: str
    video_placeholder: str
    text_start: str = ""
    """What the processor puts behind the last item of a prompt (PaliGemma)."""
    text_end: str = ""
    """What it puts behind the prompt."""
    adds_special_tokens: bool = True
    """Whether the tokenizer's special tokens are added to prompts with items."""


@dataclass(frozen=True, kw_only=True)
class MediaSettings:
    """The options of a media process."""

    model: str
    """The folder with the files of the model's processor."""
    dtype: str = "float32"
    """The type that the model computes with."""
    fetch: bool = True
    """Whether URLs are fetched; otherwise only files that a request contains are accepted."""
    allowed_domains: tuple[str, ...] = ()
    """Only these, if there are any: names, or *.suffix. They may have addresses that are not public."""
    allowed_networks: tuple[str, ...] = ()
    """Networks (CIDR) whose addresses are allowed although they are not public."""
    allowed_local_path: str = ""
    """The folder of the files that file: URLs may name; empty: none."""
    fetch_timeout: float = FETCH_SECONDS
    """Seconds for a whole download."""
    max_bytes: int = MAX_BYTES
    """Bytes of a file."""
    max_pixels: int = 2**26
    """Pixels of an image, and of a frame of a video."""
    max_request_bytes: int = 256 * MIB
    """Bytes of all files of a request."""
    max_request_pixels: int = 2**28
    """Pixels of all images of a request."""
    decode_seconds: float = 20.0
    """Processor time for an item."""
    wait_seconds: float = 60.0
    """Time for an item to be decoded, with its wait for space and a decoder; also for the wait to be fetched."""
    num_decoders: int = 0
    """Items of one owner that are decoded at the same time, of all together one more; 0: by the number of processors.
    """
    upload_folder: str = ""
    """The folder of uploaded files (see `uploads`); empty: there are none."""
    embeds: bool = False
    """Whether features of images are accepted (--enable-mm-embeds)."""
    shared_bytes: int = 2**30
    """With less free space in shared memory, items lie in the folder for temporary files."""
    cache_gb: float = CACHE_GB
    """GiB of processed items in shared memory; those of running requests may have more, up to 1 GiB."""
    processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model's processor (--mm-processor-kwargs)."""
    io_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By kind: how files are decoded (--media-io-kwargs), such as {"video": {"num_frames": 32}}."""


@dataclass(frozen=True)
class MediaProcessArgs:
    """The arguments of a media process."""

    settings: MediaSettings
    folder: str
    """Of the socket and of the items."""
    metrics: str
    """The file of `quire.server.client.media_metrics`."""
    log_level: str
