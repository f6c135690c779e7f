"""Images and videos in requests, as parts of messages or beside a prompt, in the shapes of OpenAI's APIs and vLLM's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import EMBEDS, MediaKind
from quire.server.http.request_model import MessagePart, RequestModel, only_one
from quire.server.media.data_urls import decoded_base64
from quire.server.media.types import MediaSource
from quire.server.text.media_input import embeds_source, media_source, uploaded_source

Detail = Literal["auto", "low", "high", "original"]
"""How much of an image the model sees: a hint, which models whose processor has no such choice ignore."""


class MediaUrl(MessagePart):
    """Where an image or a video is: an address, or the file itself in a data URL."""

    url: str
    detail: Detail | None = None


_GivenUrl = Annotated[
    MediaUrl | None, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)
]
"""Some clients send only the address."""


class ImageUrlPart(MessagePart):
    """An image: chat's `image_url`, or `input_image` of Responses."""

    image_url: _GivenUrl = None
    file_id: str | None = None
    """The id of an uploaded image (`/v1/files`)."""
    detail: Detail | None = None
    uuid: str | None = None
    """vLLM extension: a name of the image. Later requests of the same API key may have only the name."""

    def source(self, param: str, options: Mapping[str, Any]) -> MediaSource:
        """Return the image. `options` are arguments of the model's processor. Raises `InvalidParameter`."""
        if self.file_id is not None:
            given = {f"{param}.file_id": self.file_id, f"{param}.image_url": self.image_url and self.image_url.url}
            if only_one(given) == self.file_id:
                options = _with_detail(options, self.detail)
                return uploaded_source(self.file_id, f"{param}.file_id", uuid=self.uuid, options=options)
        return _source("image", self.image_url, f"{param}.image_url", self.detail, self.uuid, options)


class VideoUrlPart(MessagePart):
    """A video."""

    video_url: _GivenUrl = None
    uuid: str | None = None
    """vLLM extension, as for images."""

    def source(self, param: str, options: Mapping[str, Any]) -> MediaSource:
        """Return the video; see `ImageUrlPart`."""
        return _source("video", self.video_url, f"{param}.video_url", None, self.uuid, options)


class ImageEmbedsPart(MessagePart):
    """vLLM extension: an image of which only the features are known."""

    image_embeds: str | dict[str, str] | None = None
    """Base64 of an array [tokens, width] in a safetensors or npy file, or an object of such files: `image_embeds` and
    `image_grid_thw`. The server needs `--enable-mm-embeds`.
    """
    uuid: str | None = None
    """As for images."""

    def source(self, param: str, options: Mapping[str, Any]) -> MediaSource:
        """Return the image. `options` have no effect on it. Raises `InvalidParameter`."""
        param = f"{param}.image_embeds"
        given = {EMBEDS: self.image_embeds} if isinstance(self.image_embeds, str) else self.image_embeds or {}
        files = list[bytes]()
        for name, content in given.items():
            try:
                files.append(decoded_base64(content))
            except InvalidParameter as error:
                raise InvalidParameter(f"{param}: {name}: {error}", param) from None
        return embeds_source(dict(zip(given, files, strict=True)), param, uuid=self.uuid)


class MultiModalUuids(RequestModel):
    """Names of the items of a prompt, by kind, as many as `multi_modal_data` has."""

    image: str | list[str | None] | None = None
    video: str | list[str | None] | None = None


class MultiModalData(RequestModel):
    """The items of a prompt, by kind, in the order of their placeholders: a URL or data URL, or a list of them. Null:
    the item is known by its name in `multi_modal_uuids`.
    """

    image: str | list[str | None] | None = None
    video: str | list[str | None] | None = None

    def sources(self, uuids: MultiModalUuids, options: Mapping[str, Any]) -> list[MediaSource]:
        """Return the items. `options` are arguments of the model's processor. Raises `InvalidParameter`."""
        found: list[MediaSource] = []
        for kind in get_args(MediaKind):
            param, named = f"multi_modal_data.{kind}", f"multi_modal_uuids.{kind}"
            urls, names = (
                given if isinstance(given, list) else [] if given is None else [given]
                for given in (getattr(self, kind), getattr(uuids, kind))
            )
            urls = urls or [None] * len(names)
            names = names or [None] * len(urls)
            if len(names) != len(urls):
                raise InvalidParameter(f"{named}: {len(names)} for {len(urls)} items of {param}", named)
            for at, (url, uuid) in enumerate(zip(urls, names, strict=True)):
                found.append(media_source(kind, url, f"{param}[{at}]", uuid=uuid, options=options))
        return found


def _source(
    kind: MediaKind,
    given: MediaUrl | None,
    param: str,
    detail: Detail | None,
    uuid: str | None,
    options: Mapping[str, Any],
) -> MediaSource:
    url = None
    if given is not None:
        url, detail = given.url, given.detail or detail
    return media_source(kind, url, param, uuid=uuid, options=_with_detail(options, detail))


def _with_detail(options: Mapping[str, Any], detail: Detail | None) -> Mapping[str, Any]:
    return options if detail in (None, "auto") else {**options, "detail": detail}


def content_of(parts: Iterable[str | MediaSource]) -> str | list[dict[str, Any]]:
    """Return the content of a message for `ChatInput`: consecutive texts are joined by a line break; only texts are one
    text.
    """
    content: list[dict[str, Any]] = []
    for is_text, group in itertools.groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            content.append({"type": "text", "text": "\n".join(part for part in group if isinstance(part, str))})
        else:
            content += [{"type": part.kind} for part in group if isinstance(part, MediaSource)]
    if all(part["type"] == "text" for part in content):
        return content[0]["text"] if content else ""
    return content
