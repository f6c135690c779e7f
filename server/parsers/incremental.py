"""Basis of incremental parsers: a buffer, a generator that pauses at the end of the text, and a JSON scanner."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from quire.server.parsers.events import Content, Event, Reasoning

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser: it yields when it needs more text, and returns a T."""

_IN_STRING = re.compile(r'"|\\.', re.DOTALL)
_STRUCTURE = re.compile(r'["{}\[\]<]')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[-+.\w]*")
_SPACE = re.compile(r"\s*")
CLOSERS = {"{": "}", "[": "]"}
_MAX_NAME = 256
"""Maximum number of characters of a key or name; longer ones are invalid."""
_MAX_DELIMITER = 64
"""Maximum number of characters of the text that ends a key or name."""
_MAX_SPACE = 16
"""Maximum number of white space characters that belong to a marker; at most this many are held back."""


class MalformedText(Exception):
    """The text does not have the format that it seemed to have."""


class TextCutOff(MalformedText):
    """The text ends before the format is complete."""


class IncrementalParser(ABC):
    """An incremental parser. Subclasses implement `_run`.

    Invariant: `_text[:_pos]` has been read but not emitted, so that reading can restart at 0.
    """

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._ended = False
        self._events: list[Event] = []
        self._last_character = ""
        """The last one that has been emitted as text."""
        self._steps = self._run()
        next(self._steps)

    def feed(self, text: str) -> list[Event]:
        """Return the events that this additional text completes."""
        self._text += text
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Return the remaining events at the end of the text. `feed` must not be called afterwards."""
        self._ended = True
        return self.feed("")

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Read from `_pos` on, pausing with `_more` at the end of the text."""

    def _drop(self) -> None:
        """Discard the text that has been read."""
        self._text, self._pos = self._text[self._pos :], 0

    def _emit_text(self, length: int, kind: type[Content | Reasoning] = Content) -> None:
        """Emit the first characters of the text."""
        if length:
            self._events.append(kind(self._text[:length]))
            self._last_character = self._text[length - 1]
            self._text = self._text[length:]

    def _more(self) -> Steps[None]:
        if self._ended:
            raise TextCutOff
        yield

    def _peek(self) -> Steps[str]:
        """Return the next character that is not white space; skip the white space before it."""
        while True:
            found = _SPACE.match(self._text, self._pos)
            assert found is not None
            self._pos = found.end()
            if self._pos < len(self._text):
                return self._text[self._pos]
            yield from self._more()

    def _take(self, literal: str) -> Steps[bool]:
        """Read `literal` if it comes next."""
        while not self._text.startswith(literal, self._pos):
            if not literal.startswith(self._text[self._pos :]):
                return False
            yield from self._more()
        self._pos += len(literal)
        return True

    def _expect(self, literal: str) -> Steps[None]:
        """Read `literal` after white space."""
        yield from self._peek()
        if not (yield from self._take(literal)):
            raise MalformedText

    def _match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the matching text; at least one character that does not match must follow."""
        while True:
            found = pattern.match(self._text, self._pos)
            if found is not None and found.end() < len(self._text):
                if len(found[0]) > _MAX_NAME:
                    raise MalformedText
                self._pos = found.end()
                return found[0]
            if len(self._text) - self._pos > _MAX_NAME + _MAX_DELIMITER:
                raise MalformedText
            yield from self._more()

    def _string(self) -> Steps[str]:
        """Read a short JSON string: a key or a name."""
        while (found := _STRING.match(self._text, self._pos)) is None:
            if not self._text.startswith('"', self._pos) or len(self._text) - self._pos > _MAX_NAME:
                raise MalformedText
            yield from self._more()
        if len(found[0]) > _MAX_NAME:
            raise MalformedText
        self._pos = found.end()
        return str(decoded(found[0]))

    def _value(self) -> Steps[str]:
        """Read a JSON value of any kind; returns its text."""
        first = yield from self._peek()
        begin = self._pos
        if first in '{["':
            yield from self._nested(None)
        elif not (yield from self._match(_SCALAR)):
            raise MalformedText
        return self._text[begin : self._pos]

    def _nested(self, show: Callable[[str], None] | None) -> Steps[None]:
        """Read an object, list or string to its end.

        With `show`, its text is emitted and discarded as it arrives, and a tag, which JSON has only in strings, closes
        what is open. Unpaired brackets raise `MalformedText`; nothing else is checked.
        """
        closers: list[str] = []
        in_string = False
        while True:
            found = (_IN_STRING if in_string else _STRUCTURE).search(self._text, self._pos)
            if found is not None:
                self._pos = found.end()
                match found[0]:
                    case '"':
                        in_string = not in_string
                    case "{" | "[" as opener:
                        closers.append(CLOSERS[opener])
                    case "<":
                        self._pos -= 1
                        self._show(show)
                        if show is None:
                            raise MalformedText
                        show("".join(reversed(closers)))
                        return
                    case "}" | "]" as closer if not closers or closers.pop() != closer:
                        self._pos -= 1
                        self._show(show)
                        raise MalformedText
                if not closers and not in_string:
                    self._show(show)
                    return
                continue
            is_half_escape = in_string and not self._ended and self._text.endswith("\\", self._pos)
            self._pos = len(self._text) - is_half_escape
            self._show(show)
            yield from self._more()

    def _show(self, show: Callable[[str], None] | None) -> None:
        if show is not None:
            if self._pos:
                show(self._text[: self._pos])
            self._drop()


def decoded(text: str) -> object:
    """Parse JSON text; raises `MalformedText`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedText from None


@lru_cache(maxsize=256)
def any_of(*markers: str) -> re.Pattern[str]:
    """A pattern for the first of the markers. If one marker is a prefix of another, the longer one matches."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)")


@lru_cache(maxsize=256)
def beginning_of(*markers: str) -> re.Pattern[str]:
    """A pattern for the start of a marker at the end of a text."""
    beginnings = {marker[:n] for marker in markers for n in range(1, len(marker))}
    return re.compile(f"(?:{any_of(*beginnings).pattern})\\Z")


def space_before(text: str, end: int) -> int:
    """The length of the white space before `end` that belongs to a marker there: all of it, up to a limit."""
    begin = max(0, end - _MAX_SPACE)
    return end - begin - len(text[begin:end].rstrip())
