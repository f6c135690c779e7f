"""Inputs of pooling routes that are more than a text: content with images, in the shapes of vLLM and Jina."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.request_model import ExtraField, RequestModel, hint, only_one
from quire.server.media.types import MediaSource
from quire.server.openai.chat import ChatMessage
from quire.server.openai.protocol import MAX_PROMPTS
from quire.server.text.inputs import ContentParts
from quire.server.text.media_input import media_source


class ContentInput(RequestModel):
    """A text, an image, or several parts that are one input. Other fields are ignored, and not returned."""

    unknown_fields: ClassVar[ExtraField] = hint()

    text: str | None = None
    image: str | None = None
    """An image, as a URL or a data: URL; as in Jina's API."""
    content: list[dict[str, Any]] | None = None
    """Parts as in the message of a chat: `text`, `image_url`, `video_url` and `file`; as in vLLM."""

    def read(self, param: str, options: Mapping[str, Any]) -> str | ContentParts:
        """Return the input, whose name is `param`. `options` are arguments of the model's processor. Raises
        `InvalidParameter`.
        """
        given = {f"{param}.{name}": getattr(self, name) for name in ("text", "image", "content")}
        if only_one(given) is None:
            raise InvalidParameter(f"{param}: expected text, image or content", param)
        if self.text is not None:
            return self.text
        if self.image is not None:
            image = media_source("image", self.image, f"{param}.image", options=options)
            return ContentParts(parts=[{"type": "image"}], media=[image])
        if not self.content:
            raise InvalidParameter(f"{param}.content must not be empty", f"{param}.content")
        message = ChatMessage(role="user", content=self.content)
        message.check_parts(param)
        media: list[MediaSource] = []
        return ContentParts(parts=message.shown(param, media, options)["content"], media=media)


Inputs = Annotated[list[str | ContentInput], Field(fail_fast=True, max_length=MAX_PROMPTS)]


def read_inputs(
    given: str | ContentInput | Sequence[str | ContentInput], param: str, options: Mapping[str, Any]
) -> str | ContentParts | list[str | ContentParts]:
    """Return one input, or several; see `ContentInput.read`."""
    if isinstance(given, str | ContentInput):
        return read_input(given, param, options)
    return [read_input(each, f"{param}[{at}]", options) for at, each in enumerate(given)]


def read_input(given: str | ContentInput, param: str, options: Mapping[str, Any]) -> str | ContentParts:
    """See `ContentInput.read`."""
    return given if isinstance(given, str) else given.read(param, options)
