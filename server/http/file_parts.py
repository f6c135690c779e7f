"""The parts of messages that are files: images, PDFs and texts, in the shapes of OpenAI's APIs."""

from __future__ import annotations

import mimetypes
import sys
from collections.abc import Mapping
from typing import Any, ClassVar
from xml.sax.saxutils import quoteattr

from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.request_model import LABEL, ExtraField, MessagePart, only_one
from quire.server.media.data_urls import data_url, is_data_url, media_type
from quire.server.media.types import MediaSource
from quire.server.text.media_input import media_source, uploaded_source

_TEXT_TYPES = ("application/json", "application/x-ndjson", "application/xml", "application/yaml", "application/x-yaml")
"""Besides text/*."""
PDF = "application/pdf"
_TYPES = mimetypes.MimeTypes()
"""By the ends of names: Python's own table, the same on all machines, and some that not all versions of it have."""
for _kind, _end in (
    *(("text/markdown", ".md"), ("text/plain", ".log"), ("application/yaml", ".yaml"), ("application/yaml", ".yml")),
    *(("application/x-ndjson", ".jsonl"), ("image/webp", ".webp"), ("image/heic", ".heic"), ("image/avif", ".avif")),
):
    _TYPES.add_type(_kind, _end)


def type_of_name(filename: str) -> str:
    """Return the media type of files with such a name; empty: unknown."""
    return _TYPES.guess_type(filename)[0] or ""


class FilePart(MessagePart):
    """A file: `input_file` of Responses, or what the part `file` of a chat has."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"detail": LABEL}

    file_data: str | None = None
    """The file in a data URL, or its base64. An image, a PDF, or a text in UTF-8."""
    file_url: str | None = None
    """The address of an image or a PDF."""
    file_id: str | None = None
    """The id of an uploaded image, PDF or text in UTF-8 (`/v1/files`)."""
    filename: str | None = None
    """The name by which the model knows the file. Without a media type in `file_data`, it tells the type."""

    def parts(self, param: str, options: Mapping[str, Any]) -> list[str | MediaSource]:
        """Return what the prompt shows of the file: an image, or a document between tags. `options` are arguments of
        the model's processor. Raises `InvalidParameter`.
        """
        names = ("file_data", "file_url", "file_id")
        data = only_one({f"{param}.{name}": getattr(self, name) for name in names})
        if data is None:
            raise InvalidParameter(f"{param}: file_data, file_url or file_id is missing", f"{param}.file_data")
        if self.file_id is not None:
            return document(uploaded_source(data, f"{param}.file_id", options=options), title=self.filename)
        if self.file_url is not None:
            return document(media_source("image", data, f"{param}.file_url", options=options), title=self.filename)
        where = f"{param}.file_data"
        data = data if is_data_url(data) else f"data:;base64,{data}"
        kind = media_type(data)
        if kind in ("", "application/octet-stream"):
            kind = type_of_name(self.filename or "")
        if kind.startswith("text/") or kind in _TEXT_TYPES:
            try:
                text = data_url(data, sys.maxsize).decode("utf-8-sig")
            except UnicodeDecodeError:
                raise InvalidParameter(f"{where}: the text is not UTF-8", where) from None
            except InvalidParameter as error:
                raise InvalidParameter(f"{where}: {error}", where) from None
            return [tagged("document", text, title=self.filename)]
        if kind.startswith("image/"):
            return [media_source("image", data, where, options=options)]
        if kind != PDF:
            raise InvalidParameter(
                f"{where}: files of type {kind[:100] or 'unknown'!r} are not supported, only images, PDFs and texts",
                where,
            )
        return document(media_source("image", data, where, options=options), title=self.filename)


def document(source: MediaSource, **attributes: str | None) -> list[str | MediaSource]:
    """Return a PDF or an image between tags with these attributes."""
    source.is_document = True
    begin, _, end = tagged("document", "", **attributes).rpartition("\n\n")
    return [begin, source, end]


def tagged(tag: str, text: str, **attributes: str | None) -> str:
    """Return a text between tags, as prompts show documents. Attributes that are None are left out."""
    given = "".join(f" {name}={quoteattr(value)}" for name, value in attributes.items() if value is not None)
    return f"<{tag}{given}>\n{text}\n</{tag}>"
