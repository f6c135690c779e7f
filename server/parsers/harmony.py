"""Parses Harmony, the format of gpt-oss: messages with a channel and a recipient
(https://github.com/openai/harmony/blob/main/docs/format.md).

A message is a header, <|message|>, the text, and a marker that ends it. The header has a role (the prompt has written
the first one), a channel and a recipient: `<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json`.
The analysis channel is reasoning, messages to functions are calls, all others are content.
"""

from __future__ import annotations

import re

from quire.server.parsers.events import Content, Reasoning
from quire.server.parsers.incremental import (
    MalformedText,
    Steps,
    TextCutOff,
    any_of,
    beginning_of,
)
from quire.server.parsers.tool_calls import Schemas, ToolParser
from quire.server.parsers.tool_formats import HARMONY, HARMONY_MARKERS

_BODY = "<|message|>"
_END_ONLY = ("<|end|>", "<|return|>", "<|call|>")
_ENDS = (*_END_ONLY, "<|start|>", "<|channel|>")
"""The end of a message's text: an end marker, or the header of the next message."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_ANY = any_of(*HARMONY_MARKERS)
_END = any_of(*_ENDS)
_HALF = beginning_of(*HARMONY_MARKERS)
_MAX_HEADER = 512
"""Characters of a header with its <|message|>, and of white space before it; a longer text is not one."""


class HarmonyParser(ToolParser):
    """Splits the messages of an answer into reasoning, content and calls. Text without a header is content.

    Messages of the same kind are separated by a line break.
    """

    def __init__(self, schemas: Schemas, limit: int | None) -> None:
        """`limit`: maximum number of calls to emit."""
        self._shown: set[type[Content | Reasoning]] = set()
        """The kinds of text that have been emitted."""
        self._is_new = False
        """Nothing of the current message has been emitted."""
        super().__init__(HARMONY, schemas, (), limit)

    def _run(self) -> Steps[None]:
        is_first = True
        while True:
            try:
                header = yield from self._header(is_first)
                is_first = False
                recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
                kind = Reasoning if channel is not None and channel[1] == "analysis" else Content
                self._is_new = True
                if recipient is not None and recipient[1] in self._schemas:
                    yield from self._arguments_of(recipient[1])
                yield from self._body(kind)
            except TextCutOff:
                yield

    def _header(self, is_first: bool) -> Steps[str]:
        """Read a header and the marker of the text; returns "" for text without a header.

        Each decision depends on the shortest text that allows it, not on the amount of text that has arrived after it.
        """
        openers = (*HARMONY_MARKERS, "to=") if is_first else HARMONY_MARKERS
        while True:
            start = self._text.lstrip()
            opener = next((marker for marker in openers if start.startswith(marker)), "")
            if len(self._text) - len(start) > _MAX_HEADER:  # white space
                return ""
            if opener in _END_ONLY:  # of a message that has no header and no text
                self._text = start[len(opener) :]
                continue
            if opener and (at := start.find(_BODY, 0, _MAX_HEADER)) >= 0:
                self._text = start[at + len(_BODY) :]
                return start[:at]
            if opener and len(start) >= _MAX_HEADER:  # too long for a header, whose marker is not shown
                self._text = self._text if opener == "to=" else start[len(opener) :]
                return ""
            if not opener and not any(marker.startswith(start) for marker in openers):
                return ""
            if self._ended:
                if opener not in ("", "to="):  # a header that is cut off
                    self._text = ""
                if not self._text:
                    raise TextCutOff
                return ""
            yield

    def _arguments_of(self, name: str) -> Steps[None]:
        """Read the arguments of a call."""
        if (yield from self._peek()) != "{":
            self._pos = 0
            return
        try:
            yield from self._arguments(name)
            yield from self._peek()
            self._drop()
        except TextCutOff:
            self._text, self._pos = "", 0
            raise
        except MalformedText:
            self._pos = 0

    def _body(self, kind: type[Content | Reasoning]) -> Steps[None]:
        """Emit the text up to the marker that ends it."""
        while (found := _END.search(self._text)) is None:
            half = None if self._ended else _HALF.search(self._text)
            self._emit(kind, half.start() if half else len(self._text))
            yield from self._more()
        self._emit(kind, found.start())
        self._pos = len(found[0]) if found[0] in _END_ONLY else 0
        self._drop()

    def _emit(self, kind: type[Content | Reasoning], length: int) -> None:
        text, self._text = self._text[:length], self._text[length:]
        text = _ANY.sub("", text)
        if text:
            if self._is_new and kind in self._shown:
                text = f"\n{text}"
            self._events.append(kind(text))
            self._shown.add(kind)
            self._is_new = False
