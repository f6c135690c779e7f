"""Parses the tool calls in a model's text, in the formats of `tool_formats`.

Text that is not a call remains content: text that only starts like a call, calls that are cut off before their
arguments, calls of functions that were not offered. Once a call has been streamed, it is not taken back: if its text
ends or becomes invalid, its arguments end there, deliberately incomplete (so a client that parses them notices), and
the text after it is content again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import Any

from quire.server.parsers.argument_types import (
    ANY_TYPE,
    TEXT,
    is_utf8,
    json_of,
    literal_json,
    property_names,
    property_types,
)
from quire.server.parsers.events import ToolCall
from quire.server.parsers.incremental import (
    CLOSERS,
    IncrementalParser,
    MalformedText,
    Steps,
    TextCutOff,
    any_of,
    decoded,
    space_before,
)
from quire.server.parsers.tags import Tags, closing_tag, is_tag, tags, units
from quire.server.parsers.tool_formats import Json, JsonObject, Python, Quoted, Tagged, ToolFormat

Schemas = Mapping[str, Mapping[str, Any]]
"""The functions that may be called: by name, the JSON schemas of their arguments."""

_NAME = re.compile(r"[\w.-]*")
_CALLED = re.compile(r"(?<![\w.:-])(?:functions\.)?([\w.-]+?)(?::\d+)?\s*\Z")
"""A name, or a call's id that contains it, at the end of a text."""
_LAST_WORD = re.compile(r"(?<![\w.:-])([\w.:-]+)(\s*)\Z")
_ATTRIBUTE_END = re.compile(r"""["']?\s*(?:string\s*=\s*["']?(true|false)["']?)?[ \t]*(?:>|(?=\n))""", re.IGNORECASE)
"""The end of a tag that has a key, and maybe whether the value is a string. A line break may stand for its `>`."""
_MAX_ATTRIBUTE = 40
"""Maximum number of characters of the text that ends such a tag."""
_MIN_CUT = 4
"""Minimum number of characters of a tag at the end of a text, by which it is recognized."""
_MAX_HEAD = 300
"""Maximum number of characters of a name and white space before the tag that makes it a call."""
_NAME_END, _HIDDEN = 2, 3
"""The sets of tags in the pattern of markers: a tag that follows a name, and one that is not shown."""
_CLOSES, _OPENS = 1, 2
"""The sets of tags in patterns for the end of a value."""
_DIGITS = re.compile(r"\d*")
_ID = re.compile(r"\w*")
_ARGUMENTS = ("arguments", "parameters")
_PYTHON = re.compile(r"""["'()\[\]{},]""")
_BARE_KEY = re.compile(r"[^:,{}\[\]<]*")
_BARE_VALUE = re.compile(r"[^,{}\[\]]*")
_IN_QUOTES = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in "'\""}


def tool_parser(
    format: ToolFormat,
    schemas: Schemas,
    *,
    hidden: Collection[str] = (),
    limit: int | None = None,
    is_required: bool = False,
) -> ToolParser:
    """Create a parser for one answer.

    Markers in `hidden` are dropped from the content unless they open a call. `limit` is the maximum number of calls to
    emit. With `is_required`, the answer consists of calls: what is cut off before a call's arguments is not content.
    """
    format = format.read_as or format
    match format.call:
        case Python():
            return _PythonicParser(format, schemas, hidden, limit, is_required)
        case Tagged() as call:
            return _TaggedParser(call, format, schemas, hidden, limit, is_required)
        case Quoted(quote):
            return _QuotedParser(quote, format, schemas, hidden, limit, is_required)
        case _:
            return ToolParser(format, schemas, hidden, limit, is_required)


class ToolParser(IncrementalParser):
    """Splits text into content and calls; see `tool_parser`.

    What is read is wider than what is written: a call is its name and its arguments in the right order. The tags around
    them may be missing, doubled or misspelt (see `tags`), as long as at least one says that this is a call.
    """

    def __init__(
        self, format: ToolFormat, schemas: Schemas, hidden: Collection[str], limit: int | None, is_required: bool
    ) -> None:
        self._format = format
        self._schemas = schemas
        self._limit = limit
        self._is_required = is_required
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
        self._marker = tags(openers, name_ends, tuple(hidden), others=every)
        self._has_name_ends = bool(name_ends)
        self._name_beginnings = {name[:end] for name in schemas for end in range(len(name) + 1)} if name_ends else ()
        self._hidden_marker = any_of(*hidden)
        self._count = 0
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
                if (yield from self._try_block(self._pos)):
                    break

    def _content_up_to_a_block(self) -> Steps[bool]:
        """Emit content; returns whether an opening marker was found, and stops after it."""
        while True:
            if found := self._marker.whole.search(self._text):
                begin, end = found.start(), found.end()
                if found.lastindex == _NAME_END:
                    name = _CALLED.search(self._text, max(0, begin - _MAX_HEAD), begin)
                    is_known = name is not None and name[1] in self._schemas
                    begin = name.start() if name is not None and is_known else begin
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
                self._emit_text(half.start() if half else len(self._text))
                return False
            end = self._content_end()
            self._emit_text(end - space_before(self._text, end))
            yield

    def _content_end(self) -> int:
        """The end of the text that can be neither a part of a marker nor a name that a tag may follow."""
        half = self._marker.half.search(self._text, max(0, len(self._text) - self._marker.longest))
        end = half.start() if half else len(self._text)
        word = self._has_name_ends and _LAST_WORD.search(self._text, max(0, end - _MAX_HEAD), end)
        if not word:
            return end
        name, colon, digits = word[1].removeprefix("functions.").partition(":")
        if colon or word[2] or end < len(self._text):
            return word.start() if name in self._schemas and (digits or "0").isdecimal() else end
        is_half = name in self._name_beginnings or "functions.".startswith(word[1])
        return word.start() if is_half else end

    def _try_block(self, behind_marker: int) -> Steps[bool]:
        """Read a block, whose marker ends at `behind_marker`. If it is invalid, its marker is content."""
        calls_before = self._count
        self._pos = 0
        self._is_open = self._is_closing = False
        try:
            yield from self._block()
            self._is_closing = True
            yield from self._peek()  # white space at the very end belongs to the format
            self._pos = 0
        except MalformedText as error:
            is_cut = isinstance(error, TextCutOff)
            if is_cut and (self._is_required or self._is_open or self._is_closing):
                self._text = ""
            elif self._count == calls_before:
                marker = self._hidden_marker.sub("", self._text[:behind_marker])
                self._text = marker + self._text[behind_marker:]
                self._emit_text(len(marker))
            self._pos = 0
        return self._count > calls_before

    def _block(self) -> Steps[None]:
        """Read calls up to the end of their block."""
        is_marked = False
        while True:
            begins = yield from self._skip(self._begins)
            is_marked = is_marked or any(len(tag) > 1 for tag in begins)
            first = yield from self._peek()
            if first == "{" and isinstance(self._format.call, JsonObject | Json):
                yield from self._object(is_strict=bool(self._format.bare) or not is_marked)
            else:
                yield from self._named(is_marked or bool(begins))
            self._is_open, self._is_closing, is_marked = False, True, True
            self._drop()
            yield from self._skip(self._call_ends)
            self._drop()
            if (yield from self._skip(self._block_ends)):
                self._drop()
                return
            if (yield from self._peek()) in ",;":
                self._pos += 1
            self._is_closing = False

    def _skip(self, pattern: Tags) -> Steps[list[str]]:
        """Read any number of tags, and white space before them; returns them."""
        found: list[str] = []
        while True:
            begin = self._pos
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

    def _object(self, is_strict: bool) -> Steps[None]:
        """Read a call that is a JSON object, with its keys in any order. `is_strict`: it may as well be an answer."""
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
        if not is_out:
            self._begin(name)
            self._show_arguments(arguments or "{}")

    def _named(self, is_marked: bool) -> Steps[None]:
        """Read a call in the format's fixed order, after the tags before its name, if there are any."""
        if isinstance(self._format.call, JsonObject):
            raise MalformedText
        name, call_id = yield from self._name()
        yield from self._skip(self._betweens)
        while self._has_attribute and (yield from self._repeats(name)):
            pass
        yield from self._named_arguments(name, call_id)

    def _name(self) -> Steps[tuple[str, str | None]]:
        """Read the name of a function, and the call's id if the format has it here."""
        yield from self._peek()
        ways = {prefix + name: name for name in self._schemas for prefix in self._prefixes}
        ways |= {name: name for name in self._schemas}
        while (word := _NAME.match(self._text, self._pos)) is not None and word.end() == len(self._text):
            if not any(way.startswith(word[0]) for way in ways):
                raise MalformedText
            yield from self._more()
        written, call_id = (yield from self._match(_NAME)), None
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
        if (yield from self._skip(self._begins)) and (yield from self._match(_NAME)) == name:
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
                end = yield from self._value_end(found, nexts)
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

    def _value_end(self, found: re.Match[str], nexts: Tags) -> Steps[tuple[int, int] | None]:
        """Return where a value ends and where the text behind it begins, if `found` is the first tag that may end it.
        Returns None if it does not.

        The value's own closing tag ends it. So does the next argument, and the end of the call, unless the value's own
        closing tag stands before anything that opens.
        """
        if found.lastindex == _CLOSES:
            return self._closed(found)
        if found.lastindex == _OPENS:
            return (found.start(), found.start()) if (yield from self._is_argument(found.end())) else None
        at = found.end()
        while (following := nexts.whole.search(self._text, at)) is None and not self._ended:
            at = max(at, len(self._text) - nexts.longest)
            yield from self._more()
        if following is not None and following.lastindex == _CLOSES:
            return self._closed(following)
        return found.start(), found.start()

    def _closed(self, found: re.Match[str]) -> tuple[int, int]:
        """The end of a value, and of the tag that closes it."""
        return found.start(), found.end()

    def _is_argument(self, at: int) -> Steps[bool]:
        """Return whether a tag that ends at `at` opens an argument that the call may have."""
        raise NotImplementedError

    def _show_string(self) -> None:
        if self._pos:
            self._show_arguments(json.dumps(self._text[: self._pos], ensure_ascii=False)[1:-1])
        self._drop()

    def _call(self, piece: ToolCall) -> None:
        if self._limit is None or piece.index < self._limit:
            self._events.append(piece)

    def _known(self, name: str) -> str:
        if name not in self._schemas:
            raise MalformedText
        return name


class _PythonicParser(ToolParser):
    """Calls with Python keyword arguments, each of which is emitted when it is complete."""

    def _named(self, is_marked: bool) -> Steps[None]:
        name, _ = yield from self._name()
        yield from self._expect("(")
        begin = self._pos
        while not is_marked:  # only a tag behind the calls says that they are no text about calls
            while (yield from self._peek()) != ")":
                yield from self._literal()
                self._pos += self._text.startswith(",", self._pos)
            self._pos += 1
            yield from self._peek()
            if (yield from self._take_tag(self._block_ends)):
                break
            yield from self._name()
            yield from self._expect("(")
        self._pos = begin
        yield from self._keywords(name)

    def _keywords(self, name: str) -> Steps[None]:
        """Read the arguments of a call after the opening parenthesis, and the closing one."""
        is_out = False
        while (yield from self._peek()) != ")":
            key = yield from self._match(_NAME)
            if not key.isidentifier():
                raise MalformedText
            yield from self._expect("=")
            value = literal_json((yield from self._literal()))
            if not is_out:
                self._begin(name)
            self._show_arguments(f'{", " if is_out else "{"}"{key}": {value}')
            is_out = True
            self._drop()
            if (yield from self._peek()) != ")":
                yield from self._expect(",")
        self._pos += 1
        self._end_arguments(name, None, is_out)

    def _literal(self) -> Steps[str]:
        """Read the text of a value, up to the comma or parenthesis after it."""
        begin, depth, quote = self._pos, 0, ""
        while True:
            found = (_IN_QUOTES[quote] if quote else _PYTHON).search(self._text, self._pos)
            if found is None:
                is_half_escape = bool(quote) and self._text.endswith("\\", self._pos)
                self._pos = len(self._text) - is_half_escape
                yield from self._more()
                continue
            if not quote and not depth and found[0] in ",)":
                self._pos = found.start()
                return self._text[begin : self._pos]
            self._pos = found.end()
            match found[0]:
                case "'" | '"' as mark:
                    quote = "" if quote else mark
                case "(" | "[" | "{":
                    depth += 1
                case ")" | "]" | "}":
                    depth -= 1


class _TaggedParser(ToolParser):
    """Calls with arguments between tags. Strings are emitted while they arrive, other values when they are complete."""

    def __init__(
        self,
        call: Tagged,
        format: ToolFormat,
        schemas: Schemas,
        hidden: Collection[str],
        limit: int | None,
        is_required: bool,
    ) -> None:
        self._tags = call
        before, _, after = call.around
        opens, closes, closing = (call.open,), units(call.close), units(after, format.block[2])
        begins = tuple(filter(is_tag, (*format.markers, *units(before))))
        every = (*opens, *closes, *begins, *closing, *units(call.between))
        line, *_ = call.between.strip().split("\n")
        both = zip(line, call.between_json or line, strict=False)
        self._key_end = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        self._open = tags(opens, others=every)
        self._value_tags = tags(tuple(filter(is_tag, units(call.between))), others=every)
        key_end = self._value_tags.whole.pattern if is_tag(line) else r"[\"']?[ \t]*>"
        if call.between_json:
            key_end = r"[\"'](?:[ \t]*>|[ \t]+string\b)"
        self._key = re.compile(rf"(?:(?!{key_end})[^\n<])*", re.IGNORECASE)
        self._keeps_line = not call.close.startswith("\n")
        self._ends = tags(closes, opens, closing, others=every, lead="\n")
        self._nexts = tags(closes, (*opens, *begins), others=every, lead="\n")
        ends = self._ends.whole.pattern
        self._end_or_quote = re.compile(f'"|{ends}', re.IGNORECASE)
        self._end_in_string = re.compile(rf'"|\\.|{ends}|\n', re.DOTALL | re.IGNORECASE)
        self._trusts_strings = True
        """No value of this answer has had a JSON string that is not closed."""
        self._left: set[str] = set()
        """The properties that the current call has no argument for; empty if its schema names none."""
        self._names: list[str] = []
        super().__init__(format, schemas, hidden, limit, is_required)

    def _named_arguments(self, name: str, call_id: str | None) -> Steps[None]:
        schema, is_out = self._schemas[name], False
        self._names = property_names(schema)
        self._left = {*self._names}
        while True:
            try:
                key = yield from self._next_key()
            except TextCutOff:
                rest = self._text.strip()
                if not is_out or self._open.half.match(rest) or self._left & {*schema.get("required", ())}:
                    raise
                key = None
            if key is None:
                break
            is_text = yield from self._read_between(key)
            types = property_types(schema, key)
            if is_text is not None:
                types = TEXT if is_text else types - TEXT or types
            if not is_out:
                self._begin(name, call_id)
            self._show_arguments(f"{', ' if is_out else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            is_out = True
            self._left.discard(key)
            if types == TEXT:
                yield from self._text_value(self._ends, self._nexts)
            else:
                yield from self._typed_value(types)
        if not is_out:  # only a tag says that this is a call
            begin = self._pos
            yield from self._peek()
            for pattern in (self._call_ends, self._block_ends, self._begins):
                if (yield from self._take_tag(pattern)):
                    break
            else:
                raise MalformedText
            self._pos = begin
        self._end_arguments(name, call_id, is_out)

    def _next_key(self) -> Steps[str | None]:
        """Read an opening tag and the key, if another argument follows. The tag may be missing before a property."""
        yield from self._skip(self._strays)
        begin = self._pos
        if (yield from self._skip(self._open)):
            yield from self._peek()
            return (yield from self._argument_name())
        yield from self._peek()
        if is_tag(self._key_end):
            for key in sorted(self._left, key=len, reverse=True):
                if (yield from self._take(key)):
                    if (yield from self._skip(self._value_tags)):
                        self._pos = begin
                        yield from self._expect(key)
                        return key
                    break
        self._pos = begin
        return None

    def _argument_name(self) -> Steps[str]:
        """Read a key: one of the properties whose names contain the end of a key, or any other."""
        for key in sorted((key for key in self._names if not self._key.fullmatch(key)), reverse=True):
            if (yield from self._take(key + self._key_end)):
                self._pos -= len(self._key_end)
                return key
        key = yield from self._match(self._key)
        return key if key in self._names else key.strip(" \t\"'")

    def _read_between(self, key: str) -> Steps[bool | None]:
        """Read the text between key and value, and repetitions of the tags before it; returns whether the value is
        text, if it says so."""
        is_text = yield from self._read_key_end()
        while True:
            begin = self._pos
            if not (yield from self._skip(self._open)):
                break
            yield from self._peek()
            if not (yield from self._take(key)):
                break
            is_text = yield from self._read_key_end()
        self._pos = begin
        if self._tags.between.endswith("\n"):
            yield from self._take("\n")
        self._drop()
        return is_text

    def _read_key_end(self) -> Steps[bool | None]:
        if is_tag(self._key_end):
            begin = self._pos
            if not (yield from self._skip(self._value_tags)):
                raise MalformedText
            if self._pos == begin:
                raise MalformedText
            return None
        while (found := _ATTRIBUTE_END.match(self._text, self._pos)) is None:
            if len(self._text) - self._pos > _MAX_ATTRIBUTE:
                raise MalformedText
            yield from self._more()
        self._pos = found.end()
        return None if found[1] is None else found[1].lower() == "true"

    def _closed(self, found: re.Match[str]) -> tuple[int, int]:
        return found.start() + (self._keeps_line and found[0].startswith("\n")), found.end()

    def _is_argument(self, at: int) -> Steps[bool]:
        begin, self._pos = self._pos, at
        try:
            yield from self._peek()
            key = yield from self._argument_name()
            is_free = not self._names and _NAME.fullmatch(key) is not None
            if key not in self._left and not is_free:
                return False
            yield from self._read_key_end()
        except TextCutOff:
            raise
        except MalformedText:
            return False
        finally:
            self._pos = begin
        return True

    def _typed_value(self, types: frozenset[str]) -> Steps[None]:
        """Emit a value as JSON. A closing tag inside of a JSON string does not end it, unless the string is not closed:
        it contains a line break, or the value is no JSON up to the next tag outside of strings, or the text ends.

        The text is read once; once more only after the first such string, as no others are looked for then.
        """
        reads_strings = self._trusts_strings and (yield from self._peek()) in "{["
        self._pos = 0
        in_string = False
        inside: re.Match[str] | None = None  # the first tag inside of a string
        span: tuple[int, int] | None = None
        while span is None:
            half = None
            if not self._ended:
                half = self._ends.half.search(self._text, max(self._pos, len(self._text) - self._ends.longest))
            end = half.start() if half else len(self._text)
            pattern = self._ends.whole
            if reads_strings:
                pattern = self._end_in_string if in_string else self._end_or_quote
            found = pattern.search(self._text, self._pos)
            if found is None or found.start() >= end:
                if self._ended and inside is not None:
                    break
                self._pos = end - (in_string and self._text.endswith("\\", self._pos, end))
                yield from self._more()
                continue
            self._pos = found.end()
            if found[0] == '"':
                in_string = not in_string
            elif found[0] == "\n":
                reads_strings = in_string = False
                if inside is not None:
                    break
            elif in_string:
                inside = inside or (None if found[0].startswith("\\") or found.lastindex == _OPENS else found)
            else:
                span = yield from self._value_end(found, self._nexts)
        if inside is not None and (span is None or not reads_strings or not _is_json(self._text[: span[0]])):
            span, self._trusts_strings = (yield from self._value_end(inside, self._nexts)), False
        assert span is not None
        end, self._pos = span
        self._show_arguments(json_of(self._text[:end], types))
        self._drop()


class _QuotedParser(ToolParser):
    """Calls with arguments that are like JSON, but for the quotes of strings, and keys without quotes. Strings are
    emitted while they arrive, other values when they are complete."""

    def __init__(
        self,
        quote: str,
        format: ToolFormat,
        schemas: Schemas,
        hidden: Collection[str],
        limit: int | None,
        is_required: bool,
    ) -> None:
        closing = units(format.block[2])
        every = (quote, *closing, *format.markers)
        self._quotes = tags((quote,), others=every)
        self._ends = tags((quote,), (), closing, others=every, lead="}")
        self._nexts = tags((quote,), format.markers, others=every, lead="}")
        self._unquoted = re.compile(rf"(?:(?!{self._quotes.whole.pattern}).)*", re.DOTALL | re.IGNORECASE)
        super().__init__(format, schemas, hidden, limit, is_required)

    def _closed(self, found: re.Match[str]) -> tuple[int, int]:
        return found.start() + found[0].startswith("}"), found.end()

    def _named_arguments(self, name: str, call_id: str | None) -> Steps[None]:
        """Read the arguments and the braces around them."""
        yield from self._expect("{")
        schema, closers, is_out, is_first = self._schemas[name], ["}"], False, True
        names = property_names(schema)
        while (first := (yield from self._peek())) != "}" or len(closers) > 1:
            if first == closers[-1]:
                self._pos += 1
                self._show_arguments(closers.pop())
                self._drop()
                is_first = False
                continue
            before, types = "", ANY_TYPE
            if not is_first:
                yield from self._expect(",")
                before = ", "
            if closers[-1] == "}":
                key = yield from self._key(names if len(closers) == 1 else ())
                types = property_types(schema, key) if len(closers) == 1 else ANY_TYPE
                before += f"{json.dumps(key, ensure_ascii=False)}: "
            if not is_out:
                self._begin(name, call_id)
            self._show_arguments(before if is_out else "{" + before)
            is_out, is_first = True, False
            self._drop()
            opener = yield from self._peek()
            if opener in CLOSERS:
                self._pos += 1
                closers.append(CLOSERS[opener])
                self._show_arguments(opener)
                self._drop()
                is_first = True
            elif (yield from self._opens_string()):
                self._drop()
                yield from self._text_value(self._ends, self._nexts)
                yield from self._skip(self._quotes)
            else:
                text = yield from self._match(_BARE_VALUE)
                said = self._quotes.whole.sub("", text).strip()
                if not said or "<" in said:
                    raise MalformedText
                self._show_arguments(json_of(said, TEXT if said != text.strip() else types - TEXT or types))
                self._drop()
        self._end_arguments(name, call_id, is_out)

    def _opens_string(self) -> Steps[bool]:
        """Read the quote before a string, and its repetition unless that ends an empty string."""
        if not (yield from self._take_tag(self._quotes)):
            return False
        begin = self._pos
        yield from self._peek()
        if not (yield from self._take_tag(self._quotes)) or (yield from self._peek()) in ",}]<":
            self._pos = begin
        return True

    def _key(self, names: Collection[str]) -> Steps[str]:
        """Read a key, which may be in quotes, and the colon. `names` may contain the character that ends other keys."""
        yield from self._peek()
        if (yield from self._skip(self._quotes)):
            key = yield from self._match(self._unquoted)
            yield from self._skip(self._quotes)
            yield from self._expect(":")
            return key.strip()
        for key in sorted((name for name in names if not _BARE_KEY.fullmatch(name)), reverse=True):
            if (yield from self._take(f"{key}:")):
                return key
        key = (yield from self._match(_BARE_KEY)).strip()
        yield from self._expect(":")
        return key


def _is_json(text: str) -> bool:
    try:
        decoded(text)
    except MalformedText:
        return False
    return True


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
