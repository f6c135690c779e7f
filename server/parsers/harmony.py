"""Parses Harmony, the format of gpt-oss: messages with a channel and a recipient
(https://github.com/openai/harmony/blob/main/docs/format.md).

A message is a header, <|message|>, the text, and a marker that ends it. The header has a role (the prompt has written
the first one), a channel and a recipient: `<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json`.
The analysis channel is reasoning, messages to functions are calls, all others are content.
"""

from __future__ import annotations

import re

from quire.server.parsers.events import Content, Reasoning
from quire.server.parsers.incremental import MalformedText, Steps, TextCutOff
from quire.server.parsers.tags import tags
from quire.server.parsers.tool_calls import ParserOptions, Schemas, ToolParser
from quire.server.parsers.tool_formats import HARMONY

_MESSAGE = ("<|message|>",)
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HEADS = ("<|start|>", "<|channel|>")
_MARKERS = tags(_MESSAGE, _ENDS, (*_HEADS, "<|constrain|>"))
_IS_MESSAGE, _IS_END = 1, 2
"""Sets of _MARKERS; the others are markers of a header."""
_MESSAGES = tags(_MESSAGE)
_END = tags(_ENDS, _HEADS)
"""The end of a message's text: an end marker, or the header of the next message."""
_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", "to=functions.")
_WORD = re.compile(
    r"(?<=>)(?:analysis|commentary|final)|(?:assistant|analysis|commentary|final|json|code)\b|to=[\w.-]+"
)
"""A word of a header. After its marker, the name of a channel may stick to the text."""
_ANALYSIS = re.compile(r"(?<![\w.-])analysis")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_SPACE = re.compile(r"\s*")
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
        super().__init__(ParserOptions(HARMONY, schemas, limit=limit))

    def _run(self) -> Steps[None]:
        while True:
            try:
                header = yield from self._header()
                recipient = _RECIPIENT.search(header)
                kind = Reasoning if _ANALYSIS.search(header) else Content
                self._is_new = True
                if recipient is not None and recipient[1] in self._schemas:
                    yield from self._arguments_of(recipient[1])
                yield from self._body(kind)
            except TextCutOff:
                yield

    def _header(self) -> Steps[str]:
        """Read a header and the marker of the text; returns "" for text without a header.

        Without that marker, the header ends before the brace of a call's arguments, or else where the text is neither a
        marker nor a word of a header. Each decision depends on the shortest text that allows it, not on the amount of
        text that has arrived after it.
        """
        while True:
            start = self._text.lstrip()
            if len(self._text) - len(start) > _MAX_HEADER:  # white space
                return ""
            end, is_header, is_undecided = self._words(start)
            rest = start[end:]
            found = _MARKERS.whole.match(start, end)
            if found is not None and found.lastindex == _IS_END and not end:  # of a message without header and text
                self._text = start[found.end() :]
                continue
            if is_undecided and self._ended:
                if is_header:  # cut off
                    self._text = ""
                if not self._text:
                    raise TextCutOff
                return ""
            if not is_undecided or len(start) >= _MAX_HEADER:
                found = _MARKERS.whole.search(start, end)
                is_message = found is not None and found.lastindex == _IS_MESSAGE and found.end() < _MAX_HEADER
                if found is not None and is_message and (is_header or not found.start()) and rest[:1] != "{":
                    self._text = start[found.end() :]
                    return start[: found.start()]
                if not is_header:
                    return ""
                if found is not None or self._ended or len(start) >= _MAX_HEADER or rest.startswith("{"):
                    self._text = rest
                    return start[:end]
            yield

    def _words(self, text: str) -> tuple[int, bool, bool]:
        """Return where the markers and words at the start of a header end, whether they are one, and whether another
        may be about to follow."""
        end, is_header = 0, False
        while True:
            space = _SPACE.match(text, end)
            assert space is not None
            at = space.end()
            found, word = _MARKERS.whole.match(text, at), _WORD.match(text, at)
            if found is not None and found.lastindex not in (_IS_MESSAGE, _IS_END) and found.end() < _MAX_HEADER:
                end, is_header = found.end(), True
            elif word is not None and word.end() < min(_MAX_HEADER, len(text)):
                name = _RECIPIENT.fullmatch(word[0])
                is_header = is_header or (name is not None and name[1] in self._schemas)
                end = word.end()
            else:
                break
        rest = text[at:]
        is_prefix = any(each.startswith(rest) for each in _WORDS) or (word is not None and word.end() == len(text))
        is_undecided = found is None and (is_prefix or _MARKERS.half.match(text, at) is not None)
        return end if at < _MAX_HEADER and found is None else min(at, _MAX_HEADER), is_header, is_undecided

    def _arguments_of(self, name: str) -> Steps[None]:
        """Read the arguments of a call."""
        yield from self._skip(_MESSAGES)
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
        while (found := _END.whole.search(self._text)) is None:
            half = None if self._ended else _MARKERS.half.search(self._text)
            self._emit(kind, half.start() if half else len(self._text))
            yield from self._more()
        ends_here = found.lastindex == 1
        length = found.end() - found.start()
        self._emit(kind, found.start())
        self._pos = length if ends_here else 0
        self._drop()

    def _emit(self, kind: type[Content | Reasoning], length: int) -> None:
        text, self._text = self._text[:length], self._text[length:]
        text = _MARKERS.whole.sub("", text)
        if text:
            if self._is_new and kind in self._shown:
                text = f"\n{text}"
            self._events.append(kind(text))
            self._shown.add(kind)
            self._is_new = False
