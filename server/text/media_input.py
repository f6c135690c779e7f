"""Images and videos of a request: where they come from, how many may be in it, and how long their data is kept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import EMBEDS, GRID, MediaKind
from quire.server.client.output_stream import DEADLINE, RequestTimedOut
from quire.server.client.request_record import current_key
from quire.server.media.data_urls import CUT_FILES, data_url, is_data_url
from quire.server.media.types import LoadedItem, LoadedMedia, MediaFormat, MediaSource
from quire.server.text.media_prompt import Placeholders

_MAX_UUID_CHARACTERS = 256
_MAX_OPTIONS_BYTES = 4096
_NAMES: Mapping[MediaKind, str] = {"image": "images", "video": "videos"}


class MediaLoader(Protocol):
    """What `quire.server.media.client.MediaClient` does for requests."""

    async def format(self) -> MediaFormat: ...
    async def load(self, sources: Sequence[MediaSource], owner: str = "") -> LoadedMedia: ...
    async def adopt(self, lease: str) -> object: ...
    def hand_over(self, lease: str) -> None: ...
    def release(self, lease: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class MediaAccess:
    """What a process needs to load images and videos."""

    path: str
    """The socket of the media process."""
    limits: Mapping[MediaKind, int]
    """Most items of a request, by kind; without a number, there is no limit."""


class MediaLease:
    """Keeps the data of a request's items in shared memory, as long as this object exists. In the process that loads
    for another one, it has no loader, and keeps nothing: the other process must `adopt` it.
    """

    def __init__(self, name: str, loader: MediaLoader | None = None) -> None:
        """With a `loader`, call it on the loader's event loop."""
        self.name, self._loader = name, loader
        self._loop = None if loader is None else asyncio.get_running_loop()

    def __reduce__(self) -> tuple[type[MediaLease], tuple[str]]:
        return MediaLease, (self.name,)

    async def adopt(self, loader: MediaLoader) -> None:
        """Keep the data that another process has loaded. Raises `MediaUnavailable` if it is gone."""
        await loader.adopt(self.name)
        self._loader, self._loop = loader, asyncio.get_running_loop()

    def __del__(self) -> None:
        if self._loader is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._loader.release, self.name)  # maybe in another thread


class PromptItems(NamedTuple):
    """The loaded items of a prompt."""

    items: Sequence[LoadedItem]
    sources: Sequence[MediaSource]
    """The source of each item."""
    counts: Sequence[int | str]
    """The number of items of each source of the prompt, or the text that it is."""


class MediaDeferred(Exception):
    """The request must be processed where it may wait for files."""


class MediaInput:
    """The images and videos that a model takes. `limits` as in `MediaAccess`."""

    def __init__(self, loader: MediaLoader, spec: MediaSpec, limits: Mapping[MediaKind, int]) -> None:
        self.loader, self.spec, self._limits = loader, spec, limits
        self.owner: str | None = None
        """The API key for which items are loaded; None: the current task's."""
        self.may_wait = True
        """Whether requests may wait for the media process here; otherwise `check` raises `MediaDeferred`."""
        self._format: MediaFormat | None = None

    async def check(self, sources: Sequence[MediaSource]) -> Placeholders:
        """Return the placeholders for a prompt. Raises `InvalidParameter` for an item of a kind that the model does not
        take, and for too many, `MediaUnavailable`, and `MediaDeferred`.
        """
        if not self.may_wait:
            raise MediaDeferred
        if self._format is None:
            self._format = await self.loader.format()
        format, texts = self._format, dict[MediaKind, str]()
        if format.image_placeholder:
            texts["image"] = format.image_placeholder
        if format.video_placeholder and self.spec.video_token_id is not None:
            texts["video"] = format.video_placeholder
        for source in sources:
            if source.kind not in texts:
                raise refusal(source)
        self._check_counts(sources)
        return Placeholders(
            texts,
            text_start=format.text_start,
            text_end=format.text_end,
            adds_special_tokens=format.adds_special_tokens,
        )

    async def load(self, prompts: Sequence[Sequence[MediaSource]]) -> tuple[list[PromptItems], str]:
        """Load the items of each prompt of a request, a source that prompts share once; also returns the lease. Raises
        `InvalidParameter`, `MediaUnavailable`, and `RequestTimedOut` at the `DEADLINE`.
        """
        sources = [*{id(source): source for source in itertools.chain(*prompts)}.values()]
        deadline = DEADLINE.get()
        try:
            async with asyncio.timeout_at(deadline and deadline.at):
                loaded = await self.loader.load(sources, current_key() if self.owner is None else self.owner)
        except TimeoutError:
            assert deadline is not None
            raise RequestTimedOut(f"the request exceeded the time limit of {deadline.seconds:g} seconds") from None
        items, found = iter(loaded.items), dict[int, list[LoadedItem]]()
        for source, count in zip(sources, loaded.num_items or itertools.repeat(1)):  # noqa: B905  # the latter is endless
            found[id(source)] = [*itertools.islice(items, count)]
        texts = {id(source): text for source, text in zip(sources, loaded.texts, strict=False) if text is not None}
        made = [
            PromptItems(
                [item for source in given for item in found[id(source)]],
                [source for source in given for _ in found[id(source)]],
                [texts.get(id(source), len(found[id(source)])) for source in given],
            )
            for given in prompts
        ]
        try:
            for each in made if loaded.num_items else ():
                self._check_counts(each.sources)
        except InvalidParameter:
            self.loader.release(loaded.lease)
            raise
        return made, loaded.lease

    def _check_counts(self, sources: Sequence[MediaSource]) -> None:
        counts: Counter[MediaKind] = Counter()
        for source in sources:
            counts[source.kind] += 1
            if (most := self._limits.get(source.kind)) is not None and counts[source.kind] > most:
                pages = ", each page of a document included" * source.is_document
                text = f"at most {most} {_NAMES[source.kind]} are allowed in a request{pages} (--limit-mm-per-prompt)"
                if most == 1:
                    text = text.replace(f"{_NAMES[source.kind]} are", f"{source.kind} is")
                if not most:
                    text = f"this server takes no {_NAMES[source.kind]} (--limit-mm-per-prompt)"
                raise InvalidParameter(f"{source.param}: {text}", source.param)


def refusal(source: MediaSource) -> InvalidParameter:
    """Return the error for an item of a kind that the model does not take."""
    return InvalidParameter(f"{source.param}: this model takes no {_NAMES[source.kind]}", source.param)


def text_only(source: MediaSource) -> InvalidParameter:
    """Return the error for an item of a server that takes only text."""
    text = "this server takes only text: the model does, or --language-model-only or --limit-mm-per-prompt is set"
    return InvalidParameter(f"{source.param}: {text}", source.param)


def check_text(source: MediaSource) -> MediaSource:
    """Return the item. Raises `InvalidParameter` for text or options that cannot be sent to the media process."""
    param = source.param
    if len(source.uuid) > _MAX_UUID_CHARACTERS:
        raise InvalidParameter(f"{param}: the uuid has more than {_MAX_UUID_CHARACTERS} characters", param)
    for name, value in (
        ("uuid", source.uuid),
        ("URL", source.url),
        ("file_id", source.file_id),
        ("mm_processor_kwargs", source.options),
    ):
        try:
            encoded = msgspec.msgpack.encode(value)
        except (UnicodeEncodeError, OverflowError, RecursionError, TypeError):
            raise InvalidParameter(f"{param}: {name} has an invalid character or number", param) from None
        if value is source.options and len(encoded) > _MAX_OPTIONS_BYTES:
            raise InvalidParameter(f"{param}: {name} has more than {_MAX_OPTIONS_BYTES} bytes", param)
    return source


def media_source(
    kind: MediaKind, url: str | None, param: str, *, uuid: str | None = None, options: Mapping[str, Any] | None = None
) -> MediaSource:
    """Return the item of a URL, or one that is known by its `uuid`. Data URLs are decoded.

    Raises `InvalidParameter`.
    """
    if url is None and uuid is None:
        raise InvalidParameter(f"{param}: a URL is missing", param)
    source = MediaSource(kind, param, uuid=uuid or "", options=dict(options or {}))
    if url is None:
        return check_text(source)
    if is_data_url(url) and (files := CUT_FILES.get()) is not None and (found := files.read(url)) is not None:
        source.data, source.is_base64 = found, True
    elif is_data_url(url):
        try:
            source.data = data_url(url, sys.maxsize)  # the media process, which knows the limit, checks the size
        except InvalidParameter as error:
            raise InvalidParameter(f"{param}: {error}", param) from None
        if not source.data:
            raise InvalidParameter(f"{param}: the data: URL is empty", param)
    elif url.partition(":")[0].lower() in ("http", "https", "file"):
        source.url = url
    else:
        raise InvalidParameter(f"{param}: expected a URL of the scheme http, https or data", param)
    return check_text(source)


def uploaded_source(
    file_id: str, param: str, *, uuid: str | None = None, options: Mapping[str, Any] | None = None
) -> MediaSource:
    """Return the image of an uploaded file. Raises `InvalidParameter`."""
    if not file_id:
        raise InvalidParameter(f"{param} is empty", param)
    return check_text(MediaSource("image", param, file_id=file_id, uuid=uuid or "", options=dict(options or {})))


def embeds_source(files: Mapping[str, bytes], param: str, *, uuid: str | None = None) -> MediaSource:
    """Return an image of which only the features are known: files of `EMBEDS` and, if the model needs it, `GRID`; or
    none, if it is known by its `uuid`. Raises `InvalidParameter`.
    """
    if unknown := sorted(files.keys() - {EMBEDS, GRID}):
        raise InvalidParameter(f"{param}: {unknown[0][:100]!r} is not supported, only {EMBEDS} and {GRID}", param)
    if not files.get(EMBEDS) and (files or uuid is None):
        raise InvalidParameter(f"{param}: the array {EMBEDS} is missing", param)
    data = files.get(EMBEDS, b"") + files.get(GRID, b"")
    return check_text(MediaSource("image", param, data=data, uuid=uuid or "", is_array=True))
