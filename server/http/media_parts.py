"""The parts of messages that are images and videos, in the shapes of OpenAI's APIs and vLLM's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from quire.engine.protocol.media import MediaKind
from quire.server.http.request_model import MessagePart
from quire.server.media.types import MediaSource
from quire.server.text.media_input import media_source

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
    detail: Detail | None = None
    uuid: str | None = None
    """vLLM extension: a name of the image. Later requests of the same API key may have only the name."""

    def source(self, param: str, options: Mapping[str, Any]) -> MediaSource:
        """Return the image. `options` are arguments of the model's processor. Raises `InvalidParameter`."""
        return _source("image", self.image_url, f"{param}.image_url", self.detail, self.uuid, options)


class VideoUrlPart(MessagePart):
    """A video."""

    video_url: _GivenUrl = None
    uuid: str | None = None
    """vLLM extension, as for images."""

    def source(self, param: str, options: Mapping[str, Any]) -> MediaSource:
        """Return the video; see `ImageUrlPart`."""
        return _source("video", self.video_url, f"{param}.video_url", None, self.uuid, options)


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
    hints = {} if detail in (None, "auto") else {"detail": detail}
    return media_source(kind, url, param, uuid=uuid, options={**options, **hints})


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
