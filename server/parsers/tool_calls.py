"""Parses the tool calls in a model's text, in the formats of `tool_formats`.

Text that is not a call remains content: text that only starts like a call, calls that are cut off before their
arguments (unless a call is required), calls of functions that were not offered. Once a call has been streamed, it is
not taken back: if its text ends or becomes invalid, its arguments end there, deliberately incomplete (so a client that
parses them notices), and the text after it is content again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire.server.parsers.argument_types import (
    is_utf8,
)
from quire.server.parsers.events import ToolCall
from quire.server.parsers.incremental import (
    IncrementalParser,
    MalformedText,
    Steps,
    TextCutOff,
    any_of,
    decoded,
    space_before,
)
from quire.server.parsers.tags import Tags, closing_tag, is_tag, tags, units
from quire.server.parsers.tool_formats import Json, JsonObject, Tagged, ToolFormat

Schemas = Mapping[str, Mapping[str, Any]]
"""The functions that may be called: by name, the JSON schemas of their arguments."""

NAME = re.compile(r"[\w.-]*")
_CALLED = re.compile(r"(?<![\w.:-])(?:functions\.)?([\w.-]+?)(?::\d+)?\s*\Z")
"""A name, or a call's id that contains it, at the end of a text."""
_LAST_WORD = re.compile(r"(?<![\w.:-])([\w.:-]+)(\s*)\Z")
_MAX_TAGS = 8
"""Maximum number of repetitions of tags that are read as one."""
_MIN_CUT = 4
"""Minimum number of characters of a tag at the end of a text, by which it is recognized."""
_MAX_HEAD = 300
"""Maximum number of characters of a name and white space before the tag that makes it a call."""
_NAME_END, _HIDDEN = 2, 3
"""The sets of tags in the pattern of markers: a tag that follows a name, and one that is not shown."""
CLOSES, OPENS = 1, 2
"""The sets of tags in patterns for the end of a value."""
_DIGITS = re.compile(r"\d*")
_ID = re.compile(r"\w*")
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class ParserOptions:
    """The format of an answer, and what is known of its calls."""

    format: ToolFormat
    schemas: Schemas
    hidden: Collection[str] = ()
    """Markers that are dropped from the content unless they open a call."""
    limit: int | None = None
    """Maximum number of calls to emit."""
    is_required: bool = False
    """It consists of calls: what is cut off before a call's arguments is not content."""
    is_enforced: bool = False
    """A grammar enforced the format: only exact tags end values."""


class ToolParser(IncrementalParser):
    """Splits text into content and calls; see `output_parser.tool_parser`.

    What is read is wider than what is written: a call is its name and its arguments in the right order. The tags around
    them may be missing, doubled or misspelt (see `tags`), as long as at least one says that this is a call. But what a
    grammar of the format allows is read as the grammar says.
    """

    def __init__(self, options: ParserOptions, close: Tags | None = None) -> None:
        """`close` is the pattern for the exact tag that closes a string, if it is written between tags."""
        self._close = close
        self._is_unclosed = False
        """The text has ended, and no such tag is left in it."""
        self._format = format = options.format
        self._schemas = options.schemas
        self._limit = options.limit
        self._is_required = options.is_required
        call, (_, opening, closing) = format.call, format.block
        before, between, after = call.around if isinstance(call, Json | Tagged) else ("", "", "")
        in_values = tuple(filter(is_tag, units(call.between, call.close))) if isinstance(call, Tagged) else ()
        brackets, brace = ("", "") if isinstance(call, Tagged) else ("[]", "}")
        self._has_attribute = before.rstrip('"').endswith("=")
        """The tag that begins a call contains the name."""
        begins = (*format.markers, *units(opening, before))
        ends = (*units(closing), format.may_close, *map(closing_tag, format.markers))
        name_ends = tuple(filter(is_tag, units(between)))
        if isinstance(call, Tagged) and not name_ends and not self._has_attribute:
            name_ends = (call.open,)
        every = (*begins, *ends, *units(between, after), *in_values)
        self._prefixes = ("functions.", *(unit for unit in units(before) if not is_tag(unit)))
        self._begins = tags((*begins, brackets[:1]), others=every)
        self._betweens = tags(units(between), others=every)
        self._strays = tags(in_values, others=every)
        self._call_ends = tags((*units(after), *in_values, brace), others=every)
        self._block_ends = tags((*ends, brackets[1:]), others=every)
        openers = (*format.markers, *filter(is_tag, begins))
        self._marker = tags(openers, name_ends, tuple(options.hidden), others=every)
        self._name_ends = name_ends
        self._hidden_marker = any_of(*options.hidden)
        self._count = 0
        self._read: list[str] | None = None
        self._held: list[ToolCall] = []
        """The texts and calls that have been read in the current block; None while a tag says that it is one."""
        self._begin_end = 0
        """Where the tags end that begin the current block."""
        self._is_at_start = self._is_after_name = False
        self._is_open = self._is_closing = False
        """A call's arguments are not complete; they are, and the text up to the next call belongs to the format."""
        super().__init__()

    def _run(self) -> Steps[None]:
        while True:  # at the start of an answer and behind a block, a block may lack its marker
            while self._schemas and (yield from self._try_block(0)):
                pass
            while True:
                if not (yield from self._content_up_to_a_block()):
                    return
                is_marked = not self._is_after_name or not isinstance(self._format.call, Tagged)
                if (yield from self._try_block(self._pos, is_marked)):
                    break

    def _content_up_to_a_block(self) -> Steps[bool]:
        """Emit content; returns whether an opening marker was found, and stops after it."""
        while True:
            found, held = self._marker.whole.search(self._text), len(self._text) if self._ended else self._content_end()
            if found is not None and found.start() <= held:  # unless it is inside of a marker that has begun
                begin, end = found.start(), found.end()
                self._is_after_name = found.lastindex == _NAME_END
                if self._is_after_name:
                    name = _CALLED.search(self._text, max(0, begin - _MAX_HEAD), begin)
                    if name is not None and name[1] in self._schemas and self._begins_word(name.start()):
                        begin = name.start()
                if found.lastindex == _HIDDEN:
                    self._emit_text(begin)
                    self._text = self._text[end - begin :]
                    continue
                space = space_before(self._text, begin)
                self._emit_text(begin - space)
                self._pos = end - begin + space
                return True
            if self._ended:
                half = self._marker.half.search(self._text) if self._is_required else None
                self._emit_text(half.start() if half else held)
                return False
            self._emit_text(held - space_before(self._text, held))
            yield

    def _content_end(self) -> int:
        """The end of the text that can be neither a part of a marker nor a name that a tag may follow."""
        half = self._marker.half.search(self._text, max(0, len(self._text) - self._marker.longest))
        end = half.start() if half else len(self._text)
        word = self._name_ends and _LAST_WORD.search(self._text, max(0, end - _MAX_HEAD), end)
        if not word or not self._begins_word(word.start()):
            return end
        name, colon, digits = word[1].removeprefix("functions.").partition(":")
        if colon or word[2] or end < len(self._text):
            return word.start() if name in self._schemas and (digits or "0").isdecimal() else end
        is_half = any(known.startswith(name) for known in self._schemas) or "functions.".startswith(word[1])
        return word.start() if is_half else end

    def _begins_word(self, at: int) -> bool:
        """Whether the word at `at` is not the rest of one whose beginning has been emitted."""
        return at > 0 or _LAST_WORD.match(self._last_character) is None

    def _try_block(self, behind_marker: int, is_marked: bool = False) -> Steps[bool]:
        """Read a block, whose marker ends at `behind_marker`. If it is invalid, the tags that begin it are content.

        If it is not marked, it is only read if there are tags before or behind its calls, or nothing behind them and
        all of them are whole. Otherwise it is text about calls.
        """
        calls_before = self._count
        self._pos = self._begin_end = 0
        self._is_at_start = True
        self._is_open = self._is_closing = False
        self._read = None if is_marked or self._is_required or self._format.bare else []
        try:
            yield from self._block()
            self._is_closing = True
            yield from self._peek()  # white space at the very end belongs to the format
            if self._read is not None and not (yield from self._skip_beside(self._begins)):
                raise MalformedText
            self._pos = 0
            self._release()
        except MalformedText as error:
            is_cut = isinstance(error, TextCutOff)
            if self._read and not (is_cut and self._is_closing):
                text = self._hidden_marker.sub("", "".join(self._read))
                self._read, self._held, self._count = None, [], calls_before
                self._text, self._pos = text + self._text, 0
                self._emit_text(len(text))
                return False
            self._release()
            if is_cut and (self._is_required or self._is_open or self._is_closing):
                self._text = ""
            elif self._count == calls_before:
                behind = max(behind_marker, self._begin_end) if behind_marker else 0
                marker = self._hidden_marker.sub("", self._text[:behind])
                self._text = marker + self._text[behind:]
                self._emit_text(len(marker))
            self._pos = 0
        return self._count > calls_before

    def _block(self) -> Steps[None]:
        """Read calls up to the end of their block."""
        is_marked = False
        while True:
            begins = yield from self._skip_beside(self._begins)
            if self._is_at_start:
                self._is_at_start, self._begin_end = False, self._pos if begins else 0
            is_marked = is_marked or any(len(tag) > 1 for tag in begins)
            first = yield from self._peek()
            if first == "{" and isinstance(self._format.call, JsonObject | Json):
                yield from self._object(is_marked)
            else:
                yield from self._named(is_marked or bool(begins))
            self._is_open, self._is_closing, is_marked = False, True, True
            self._drop()
            yield from self._skip_beside(self._call_ends)
            self._drop()
            if (yield from self._skip_beside(self._block_ends)):
                self._drop()
                return
            if (yield from self._peek()) in ",;":
                self._pos += 1
            self._is_closing = False

    def _skip_beside(self, pattern: Tags) -> Steps[list[str]]:
        """Do the same as `_skip` next to a call, which a tag marks."""
        found = yield from self._skip(pattern)
        if any(is_tag(tag) or tag in self._format.markers for tag in found):
            self._release()
        return found

    def _release(self) -> None:
        """Emit the calls that have been held back."""
        self._events += self._held
        self._read, self._held = None, []

    def _drop(self) -> None:
        if self._read is not None:
            self._read.append(self._text[: self._pos])
        super()._drop()

    def _skip(self, pattern: Tags) -> Steps[list[str]]:
        """Read any number of tags up to a limit, and white space before them; returns them."""
        found: list[str] = []
        while True:
            begin = self._pos
            if len(found) == _MAX_TAGS:
                return found
            yield from self._peek()
            if not (tag := (yield from self._take_tag(pattern))):
                self._pos = begin
                return found
            found.append(tag)

    def _take_tag(self, pattern: Tags) -> Steps[str]:
        """Read a tag, if it comes next; returns it. The end of the text may cut it."""
        while (half := pattern.half.match(self._text, self._pos)) and not self._ended:
            yield from self._more()
        tag = pattern.whole.match(self._text, self._pos)
        if tag is None and half is not None and len(half[0]) < _MIN_CUT:
            raise TextCutOff
        if tag is None and half is None:
            return ""
        tag = tag or half
        assert tag is not None
        self._pos = tag.end()
        return tag[0]

    def _object(self, is_marked: bool) -> Steps[None]:
        """Read a call that is a JSON object, with its keys in any order. If it is not marked, it may be an answer."""
        is_strict = bool(self._format.bare) or not is_marked
        yield from self._expect("{")
        name = arguments = None
        is_out = False
        while True:
            yield from self._peek()
            key = yield from self._string()
            yield from self._expect(":")
            first = yield from self._peek()
            if key == "name" and name is None:
                name = self._known((yield from self._string()))
            elif key in _ARGUMENTS and arguments is None and name is not None and first == "{":
                arguments, is_out = "", True
                yield from self._arguments(name)
            elif key in _ARGUMENTS and arguments is None:
                arguments = _arguments_in((yield from self._value()))
            elif is_strict and key not in ("id", "type"):
                raise MalformedText  # a JSON answer, not a call
            else:
                yield from self._value()
            yield from self._peek()
            if not (yield from self._take(",")):
                break
        if name is None or not ((yield from self._take("}")) or arguments is not None):
            raise MalformedText
        if arguments is None and not (is_marked or self._format.bare):
            raise MalformedText
        if not is_out:
            self._begin(name)
            self._show_arguments(arguments or "{}")

    def _named(self, is_marked: bool) -> Steps[None]:
        """Read a call in the format's fixed order, after the tags before its name, if there are any."""
        if isinstance(self._format.call, JsonObject):
            raise MalformedText
        name, call_id = yield from self._name()
        between = yield from self._skip_beside(self._betweens)
        if not (is_marked or any(map(is_tag, between)) or isinstance(self._format.call, Tagged)):
            raise MalformedText
        while self._has_attribute and (yield from self._repeats(name)):
            pass
        yield from self._named_arguments(name, call_id)

    def _name(self) -> Steps[tuple[str, str | None]]:
        """Read the name of a function, and the call's id if the format has it here."""
        yield from self._peek()
        ways = {prefix + name: name for name in self._schemas for prefix in self._prefixes}
        ways |= {name: name for name in self._schemas}
        while (word := NAME.match(self._text, self._pos)) is not None and word.end() == len(self._text):
            if not any(way.startswith(word[0]) for way in ways):
                raise MalformedText
            yield from self._more()
        written, call_id = (yield from self._match(NAME)), None
        if written not in ways:
            raise MalformedText
        name = ways[written]
        if self._format.id_as_name:
            call_id = f"functions.{name}:{self._count}"
            if (yield from self._take(":")):
                call_id = f"{written}:{yield from self._match(_DIGITS)}"
        if "[CALL_ID]" in self._format.inner and (yield from self._take("[CALL_ID]")):
            yield from self._match(_ID)
        return name, call_id

    def _repeats(self, name: str) -> Steps[bool]:
        """Read the tag with the name once more, if it is there."""
        begin = self._pos
        if (yield from self._skip(self._begins)) and (yield from self._match(NAME)) == name:
            yield from self._skip(self._betweens)
            return True
        self._pos = begin
        return False

    def _named_arguments(self, name: str, call_id: str | None) -> Steps[None]:
        """Read the arguments of a call in the format's fixed order."""
        if (yield from self._peek()) != "{":
            raise MalformedText
        yield from self._arguments(name, call_id)

    def _arguments(self, name: str, call_id: str | None = None) -> Steps[None]:
        """Emit a call whose arguments follow, while they arrive."""
        self._begin(name, call_id)
        yield from self._nested(self._show_arguments)
        self._is_open, self._is_closing = False, True

    def _begin(self, name: str, call_id: str | None = None) -> None:
        """Emit the start of a call, which is not taken back."""
        self._drop()
        self._count += 1
        self._is_open = True
        self._call(ToolCall(self._count - 1, "", call_id or self._format.new_id(), name))

    def _show_arguments(self, text: str) -> None:
        self._call(ToolCall(self._count - 1, text))

    def _end_arguments(self, name: str, call_id: str | None, is_out: bool) -> None:
        """Emit the end of arguments that are converted one by one, the first of which has begun the call."""
        if not is_out:
            self._begin(name, call_id)
        self._show_arguments("}" if is_out else "{}")
        self._is_open, self._is_closing = False, True

    def _text_value(self, ends: Tags, nexts: Tags) -> Steps[None]:
        """Emit the text up to its end as a JSON string, while it arrives; see `_value_end`."""
        self._show_arguments('"')
        while True:
            found = ends.whole.search(self._text)
            if found is not None:
                end = yield from self._text_end(found, nexts)
                self._pos, behind = end or (found.end(), 0)
                begin = self._pos
                self._show_string()
                if end is not None:
                    self._pos = behind - begin
                    self._drop()
                    self._show_arguments('"')
                    return
                continue
            half = ends.half.search(self._text, max(0, len(self._text) - ends.longest))
            is_held = half is not None and (not self._ended or len(half[0].strip()) > 1)
            self._pos = half.start() if half and is_held else len(self._text)
            self._show_string()
            yield from self._more()

    def _text_end(self, found: re.Match[str], nexts: Tags) -> Steps[tuple[int, int] | None]:
        """Return the same as `_value_end` for a text, in which a grammar excludes only the exact closing tag: that one
        ends it, whatever tags come before, as long as `_closed_by` agrees.
        """
        assert self._close is not None
        if self._close.whole.fullmatch(found[0]):
            return self._closed(found)
        at = found.start()
        while not self._is_unclosed:
            close = self._close.whole.search(self._text, at)
            if close is not None:
                return (yield from self._closed_by(close, found, nexts))
            self._is_unclosed = self._ended
            at = max(at, len(self._text) - self._close.longest)
            if not self._ended:
                yield from self._more()
        return (yield from self._value_end(found, nexts))

    def _closed_by(self, close: re.Match[str], found: re.Match[str], nexts: Tags) -> Steps[tuple[int, int] | None]:
        """Return the same for a text with an exact closing tag behind `found`. If that tag may as well belong to
        another text, which the end of this one lacks, the text ends before it."""
        yield from ()
        return self._closed(close)

    def _value_end(self, found: re.Match[str], nexts: Tags) -> Steps[tuple[int, int] | None]:
        """Return where a value ends and where the text behind it begins, if `found` is the first tag that may end it.
        Returns None if it does not.

        The value's own closing tag ends it. So does the next argument, and the end of the call, unless the value's own
        closing tag stands before anything that opens.
        """
        if found.lastindex == CLOSES:
            return self._closed(found)
        if found.lastindex == OPENS:
            return (found.start(), found.start()) if (yield from self._is_argument(found.end())) else None
        at = found.end()
        while (following := nexts.whole.search(self._text, at)) is None and not self._ended:
            at = max(at, len(self._text) - nexts.longest)
            yield from self._more()
        if following is not None and following.lastindex == CLOSES:
            return self._closed(following)
        return found.start(), found.start()

    def _closed(self, found: re.Match[str]) -> tuple[int, int]:
        """The end of a value, and of the tag that closes it."""
        return found.start(), found.end()

    def _is_argument(self, at: int) -> Steps[bool]:
        """Return whether a tag that ends at `at` opens an argument that the call may have, or another call."""
        yield from ()
        return True

    def _show_string(self) -> None:
        if self._pos:
            self._show_arguments(json.dumps(self._text[: self._pos], ensure_ascii=False)[1:-1])
        self._drop()

    def _call(self, piece: ToolCall) -> None:
        if self._limit is None or piece.index < self._limit:
            (self._events if self._read is None else self._held).append(piece)

    def _known(self, name: str) -> str:
        if name not in self._schemas:
            raise MalformedText
        return name


def _arguments_in(text: str) -> str:
    """Parse arguments that could not be streamed: written before the name, as a string that contains JSON, or null."""
    value = decoded(text)
    if isinstance(value, str):
        text, value = value, decoded(value)
    if value is None:
        return "{}"
    if not isinstance(value, dict) or not is_utf8(text):
        raise MalformedText
    return text
