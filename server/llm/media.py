"""Images and videos in the Python API: PIL images, arrays, files, bytes and URLs."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import MediaKind
from quire.server.media.types import MediaSource
from quire.server.text.conversation import Message
from quire.server.text.media_input import check_text, media_source

_KINDS: Mapping[str, MediaKind] = {
    **dict.fromkeys(("image", "image_pil", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url"), "video"),
}
"""The kinds of the parts of messages, by `type`. The field of the same name has the item (`input_image`: `image_url`).
"""
_URLS = ("image_url", "input_image", "video_url")
"""The parts that servers take, too: messages of others may have them, so they read no files but those that
--allowed-local-media-path allows.
"""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_SCHEMES = ("data:", "http:", "https:", "file:")


def prompt_media(prompt: Mapping[str, Any]) -> list[MediaSource]:
    """Return the items of a prompt's `multi_modal_data`. Raises `InvalidParameter`."""
    given = {name: prompt.get(name) for name in ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")}
    for param, value in given.items():
        if not isinstance(value, Mapping | None):
            raise InvalidParameter(f"{param}: expected a mapping, got {type(value).__name__}", param)
    data, all_uuids, options = (value or {} for value in given.values())
    found: list[MediaSource] = []
    for name, values in data.items():
        if name not in ("image", "video"):
            raise InvalidParameter(
                f"multi_modal_data: {name} is not supported, only image and video", "multi_modal_data"
            )
        many = list(values) if isinstance(values, list | tuple) else [values]
        uuids = all_uuids.get(name)
        named = list(uuids) if isinstance(uuids, list | tuple) else [uuids] * len(many)
        if len(named) != len(many):
            raise InvalidParameter(f"multi_modal_uuids: {len(named)} for {len(many)} of {name}", "multi_modal_uuids")
        for at, (value, uuid) in enumerate(zip(many, named, strict=True)):
            found.append(_source(_KINDS[name], value, f"multi_modal_data.{name}[{at}]", uuid, options))
    return found


def chat_media(messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[Sequence[Message], list[MediaSource]]:
    """Return messages as `ChatInput` has them, and the items of their parts. `options` are arguments of the model's
    processor. Raises `InvalidParameter`.
    """
    media: list[MediaSource] = []
    converted: list[Message] = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            converted.append(message)
            continue
        parts: list[Any] = []
        for at, part in enumerate(content):
            name = part.get("type") if isinstance(part, Mapping) else None
            kind = _KINDS.get(name) if isinstance(name, str) else None
            if kind is not None:
                param, uuid = f"messages[{number}].content[{at}]", part.get("uuid")
                value = part.get("image_url" if name == "input_image" else name)
                if isinstance(value, Mapping):
                    value = value.get("url")
                if name in _URLS and not isinstance(value, str | None):
                    raise InvalidParameter(f"{param}: {name} must be a URL; use the type {kind} for files", param)
                take = media_source if name in _URLS else _source
                media.append(take(kind, value, param, uuid=None if uuid is None else str(uuid), options=options))
            parts.append(part if kind is None else {"type": kind})
        converted.append({**message, "content": parts})
    return converted, media


def _source(kind: MediaKind, value: Any, param: str, uuid: Any, options: Mapping[str, Any]) -> MediaSource:
    """The item of an object, a file, bytes or a URL. Raises `InvalidParameter`."""
    uuid = None if uuid is None else str(uuid)
    if value is None or (isinstance(value, str) and value.lower().startswith(_SCHEMES)):
        return media_source(kind, value, param, uuid=uuid, options=options)
    source = check_text(MediaSource(kind, param, uuid=uuid or "", options=dict(options)))
    expected = "a PIL image, an array of uint8, a file, bytes or a URL" if kind == "image" else "a file, bytes or a URL"
    match value:
        case bytes():
            source.data = value
        case str() | Path():
            try:
                source.data = Path(value).read_bytes()
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not a path"
                raise InvalidParameter(f"{param}: expected {expected}: {str(value)!r}: {reason}", param) from None
        case _ if kind == "image" and hasattr(value, "__array_interface__"):
            try:
                source.data = _png(value)
            except Exception:  # Pillow's
                raise InvalidParameter(f"{param}: expected {expected}: this is not a picture", param) from None
        case _:
            raise InvalidParameter(f"{param}: expected {expected}, got {type(value).__name__}", param)
    return source


def _png(image: Any) -> bytes:
    """Return a PIL image, or an array of uint8 [height, width] or [height, width, channels], as a file."""
    pil: Any = importlib.import_module("PIL.Image")
    if not isinstance(image, pil.Image):
        if image.__array_interface__["typestr"] != "|u1":
            raise TypeError  # Pillow would cut off values
        image = pil.fromarray(image)
    file = io.BytesIO()
    (image if image.mode in _PNG_MODES else image.convert("RGB")).save(file, "PNG", compress_level=1)
    return file.getvalue()
