"""Images and videos in the Python API: PIL images, arrays, files, bytes and URLs."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import EMBEDS, GRID, MediaKind
from quire.server.media.data_urls import decoded_base64
from quire.server.media.types import MediaSource
from quire.server.text.conversation import Message
from quire.server.text.media_input import check_text, embeds_source, media_source

_KINDS: Mapping[str, MediaKind] = {
    **dict.fromkeys(("image", "image_pil", "image_url", "input_image", EMBEDS), "image"),
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
_EXPECTED: Mapping[MediaKind, str] = {
    "image": "a PIL image, an array of uint8, a file, bytes or a URL",
    "video": "a file, bytes, a URL, or frames of one size: a list of PIL images, or an array of uint8 [frames, height, "
    "width, 3]",
}
_RATE = 24.0
"""Frames per second of frames without metadata, as in transformers."""
_METADATA = {"fps", "frames_indices", "total_num_frames"}
_OTHER_METADATA = {"duration", "video_backend", "width", "height", "do_sample_frames"}
"""Without effect: all frames are used."""


def prompt_media(prompt: Mapping[str, Any]) -> list[MediaSource]:
    """Return the items of a prompt's `multi_modal_data`. Raises `InvalidParameter`."""
    given = {name: prompt.get(name) for name in ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")}
    for param, value in given.items():
        if not isinstance(value, Mapping | None):
            raise InvalidParameter(f"{param}: expected a mapping, got {type(value).__name__}", param)
    data, all_uuids, options = (value or {} for value in given.values())
    found: list[MediaSource] = []
    for name, values in data.items():
        if name not in ("image", "video", EMBEDS):
            raise InvalidParameter(
                f"multi_modal_data: {name} is not supported, only image, video and {EMBEDS}", "multi_modal_data"
            )
        where = f"multi_modal_data.{name}"
        many = _many(name, values, where)
        uuids = all_uuids.get("image" if name == EMBEDS else name)
        named = list(uuids) if isinstance(uuids, list | tuple) else [uuids] * len(many)
        if len(named) != len(many):
            raise InvalidParameter(f"multi_modal_uuids: {len(named)} for {len(many)} of {name}", "multi_modal_uuids")
        for at, (value, uuid) in enumerate(zip(many, named, strict=True)):
            found.append(_source(_KINDS[name], value, f"{where}[{at}]", uuid, options))
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
        parts, found = content_media(content, f"messages[{number}].content", options)
        media += found
        converted.append({**message, "content": parts})
    return converted, media


def content_media(
    content: Sequence[Any], param: str, options: Mapping[str, Any]
) -> tuple[list[Any], list[MediaSource]]:
    """Return the parts of a message's content as `ChatInput` has them, and the items; otherwise like `chat_media`."""
    parts: list[Any] = []
    media: list[MediaSource] = []
    for at, part in enumerate(content):
        name = part.get("type") if isinstance(part, Mapping) else None
        kind = _KINDS.get(name) if isinstance(name, str) else None
        if kind is not None:
            where, uuid = f"{param}[{at}]", part.get("uuid")
            value = part.get("image_url" if name == "input_image" else name)
            if isinstance(value, Mapping) and (name in _URLS or "url" in value):
                value = value.get("url")
            if name in _URLS and not isinstance(value, str | None):
                raise InvalidParameter(f"{where}: {name} must be a URL; use the type {kind} for files", where)
            if kind == "image" and (isinstance(value, Mapping) or (name == EMBEDS and value is not None)):
                features = _embeds(value, where)
                if len(features) != 1:
                    text = f"{where}: expected the features of one image, not of {len(features)}"
                    raise InvalidParameter(text, where)
                (value,) = features
            take = media_source if name in _URLS else _source
            media.append(take(kind, value, where, uuid=None if uuid is None else str(uuid), options=options))
        parts.append(part if kind is None else {"type": kind})
    return parts, media


def _many(name: str, values: Any, param: str) -> list[Any]:
    """Return the items of one kind: what `multi_modal_data` has, one or several. Features become files. Raises
    `InvalidParameter`.
    """
    if name == EMBEDS:
        return _embeds(values, param)
    is_one = not isinstance(values, list | tuple) or (name == "video" and _has_frames(values))
    items = list[Any]()
    for each in [values] if is_one else values:
        items += _embeds(each, param) if name == "image" and isinstance(each, Mapping) else [each]
    return items


def _has_frames(value: Any) -> bool:
    """Whether a list or a tuple is one video: frames, or something with its metadata."""
    if _has_metadata(value):
        return True
    return isinstance(value, list | tuple) and len(value) > 0 and all(_rank(each) in (2, 3) for each in value)


def _has_metadata(value: Any) -> bool:
    """Whether a video comes with its metadata, which may be None."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping | None)


def _rank(value: Any) -> int:
    """The dimensions of an array or a PIL image; 0: it is none."""
    return len(value.__array_interface__["shape"]) if hasattr(value, "__array_interface__") else 0


def _array(value: Any) -> Any:
    """Return an array of NumPy's; tensors of torch become float32 if they are of floating-point numbers."""
    numpy = importlib.import_module("numpy")
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    return numpy.asarray(value)


def _embeds(values: Any, param: str) -> list[dict[str, bytes]]:
    """Return the files of images of which only the features are known (see `embeds_source`): an array
    [features, width] or [images, features, width], a list of arrays, or a mapping of one of these and of their grids
    [images, 3]. Files and their base64 are left as they are. Raises `InvalidParameter`.
    """
    given = values if isinstance(values, Mapping) else {EMBEDS: values}
    embeds, grids = given.get(EMBEDS), given.get(GRID)
    if embeds is None or given.keys() - {EMBEDS, GRID}:
        raise InvalidParameter(f"{param}: expected an array, or a mapping with {EMBEDS} and {GRID}", param)
    try:
        if isinstance(embeds, str | bytes):
            files = {EMBEDS: embeds} if grids is None else {EMBEDS: embeds, GRID: grids}
            return [{name: decoded_base64(each) if isinstance(each, str) else each for name, each in files.items()}]
        if isinstance(embeds, list | tuple):
            arrays = [_array(each) for each in embeds]
        elif (whole := _array(embeds)).ndim == 3:
            arrays = list(whole)
        else:
            arrays = [whole]
        if grids is None:
            return [{EMBEDS: _npy(array)} for array in arrays]
        rows = _array(grids).reshape(-1, 3)
        if len(arrays) == 1 and len(rows) > 1:  # the features of all images, one behind the other
            sizes = rows.prod(axis=1)
            ends = [int(end) * len(arrays[0]) // int(sizes.sum()) for end in accumulate(sizes)]
            arrays = [arrays[0][begin:end] for begin, end in pairwise([0, *ends])]
        return [{EMBEDS: _npy(array), GRID: _npy(row)} for array, row in zip(arrays, rows, strict=True)]
    except InvalidParameter as error:
        raise InvalidParameter(f"{param}: {error}", param) from None
    except (TypeError, ValueError, ZeroDivisionError):
        raise InvalidParameter(f"{param}: expected arrays of features, and as many grids", param) from None


def _source(kind: MediaKind, value: Any, param: str, uuid: Any, options: Mapping[str, Any]) -> MediaSource:
    """The item of an object, a file, bytes or a URL. Raises `InvalidParameter`."""
    uuid = None if uuid is None else str(uuid)
    if value is None or (isinstance(value, str) and value.lower().startswith(_SCHEMES)):
        return media_source(kind, value, param, uuid=uuid, options=options)
    if kind == "image" and isinstance(value, Mapping):
        return embeds_source(value, param, uuid=uuid)
    source = check_text(MediaSource(kind, param, uuid=uuid or "", options=dict(options)))
    wrong = f"{param}: expected {_EXPECTED[kind]}"
    if kind == "video" and (_has_frames(value) or _rank(value) == 4):
        frames, metadata = value if _has_metadata(value) else (value, None)
        metadata = {name: each for name, each in (metadata or {}).items() if each is not None}
        if isinstance(frames, str | bytes | Path):
            if metadata:
                raise InvalidParameter(f"{param}: metadata are for frames; those of a file are in it", param)
            return _source(kind, frames, param, uuid, options)
        source.is_array, source.data = True, _frames(frames, metadata, param, wrong)
        return source
    match value:
        case bytes():
            source.data = value
        case str() | Path():
            try:
                source.data = Path(value).read_bytes()
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not a path"
                raise InvalidParameter(f"{wrong}: {str(value)!r}: {reason}", param) from None
        case _ if kind == "image" and _rank(value):
            try:
                source.data = _png(value)
            except Exception:  # Pillow's
                raise InvalidParameter(f"{wrong}: this is not a picture", param) from None
        case _:
            raise InvalidParameter(f"{wrong}, got {type(value).__name__}", param)
    return source


def _frames(frames: Any, metadata: Mapping[str, Any], param: str, wrong: str) -> bytes:
    """Return the file of a video's frames (see `quire.server.media.arrays.read_frames`). Raises `InvalidParameter`."""
    numpy = importlib.import_module("numpy")
    if unknown := sorted(metadata.keys() - _METADATA - _OTHER_METADATA, key=str):
        raise InvalidParameter(f"{param}: {unknown[0]!r} of the metadata is not supported", param)
    if metadata.get("do_sample_frames"):
        raise InvalidParameter(f"{param}: do_sample_frames is not supported for frames; give the video's file", param)
    try:
        if isinstance(frames, list | tuple):
            pil: Any = importlib.import_module("PIL.Image")
            frames = numpy.stack([each.convert("RGB") if isinstance(each, pil.Image) else each for each in frames])
        if frames.dtype != numpy.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
            raise ValueError
        indices = metadata.get("frames_indices")
        numbers = numpy.arange(len(frames)) if indices is None else _array(indices).astype(numpy.int64, casting="safe")
        facts = metadata.get("fps", _RATE), metadata.get("total_num_frames", int(numbers[-1]) + 1)
        return b"".join(map(_npy, (frames, numbers, numpy.array(facts, numpy.float64))))
    except Exception:  # of Pillow and NumPy
        raise InvalidParameter(f"{wrong}; or a tuple of frames and their metadata", param) from None


def _npy(array: Any) -> bytes:
    """Return an array as a file."""
    numpy = importlib.import_module("numpy")
    numpy.save(file := io.BytesIO(), array, allow_pickle=False)
    return file.getvalue()


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
