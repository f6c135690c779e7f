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
    beginning_of,
    decoded,
    space_before,
)
from quire.server.parsers.tool_formats import JsonObject, Python, Quoted, Tagged, ToolFormat

Schemas = Mapping[str, Mapping[str, Any]]
"""The functions that may be called: by name, the JSON schemas of their arguments."""

_NAME = re.compile(r"[\w.-]*")
_DIGITS = re.compile(r"\d*")
_ID = re.compile(r"\w*")
_ARGUMENTS = ("arguments", "parameters")
_PYTHON = re.compile(r"""["'()\[\]{},]""")
_BARE_KEY = re.compile(r"[^:,{}\[\]]*")
_BARE_VALUE = re.compile(r"[^,{}\[\]]*")
_IN_QUOTES = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in "'\""}


def tool_parser(
    format: ToolFormat, schemas: Schemas, *, hidden: Collection[str] = (), limit: int | None = None
) -> ToolParser:
    """Create a parser for one answer.

    Markers in `hidden` are dropped from the content unless they open a call. `limit` is the maximum number of calls to
    emit.
    """
    format = format.read_as or format
    match format.call:
        case Python():
            return _PythonicParser(format, schemas, hidden, limit)
        case Tagged() as tags:
            return _TaggedParser(tags, format, schemas, hidden, limit)
        case Quoted(quote):
            return _QuotedParser(quote, format, schemas, hidden, limit)
        case _:
            return ToolParser(format, schemas, hidden, limit)


class ToolParser(IncrementalParser):
    """Splits text into content and calls; see `tool_parser`."""

    def __init__(self, format: ToolFormat, schemas: Schemas, hidden: Collection[str], limit: int | None) -> None:
        self._format = format
        self._schemas = schemas
        self._limit = limit
        _, opening, closing = format.block
        self._opening, self._closing = opening.strip(), closing.strip()
        self._before, self._between, self._after = format.call.around
        markers = (*format.markers, *hidden)
        self._marker, self._half_marker, self._hidden_marker = any_of(*markers), beginning_of(*markers), any_of(*hidden)
        self._longest = max(map(len, markers), default=0)
        self._count = 0
        self._is_closing = False
        """A call's arguments are complete; the text up to the next call belongs to the format."""
        self._lacks_close = False
        """The block was opened by a call, so nothing need close it."""
        super().__init__()

    def _run(self) -> Steps[None]:
        if self._format.bare and (yield from self._begins_bare()):
            yield from self._try_block()
        while (yield from self._content_up_to_a_block()):
            yield from self._try_block()

    def _begins_bare(self) -> Steps[bool]:
        try:
            first = yield from self._peek()
        except TextCutOff:
            first = ""
        self._pos = 0
        return first == self._format.bare

    def _content_up_to_a_block(self) -> Steps[bool]:
        """Emit content; returns whether an opening marker was found, and stops after it."""
        while True:
            if found := self._marker.search(self._text):
                marker, end = found[0], found.start()
                if marker in self._format.markers:
                    space = space_before(self._text, end)
                    self._emit_text(end - space)
                    self._lacks_close = marker == self._before
                    self._pos = space + (0 if self._lacks_close else len(marker))
                    return True
                self._emit_text(end)
                self._text = self._text[len(marker) :]
                continue
            if self._ended:
                self._emit_text(len(self._text))
                return False
            half = self._half_marker.search(self._text, max(0, len(self._text) - self._longest))
            end = half.start() if half else len(self._text)
            self._emit_text(end - space_before(self._text, end))
            yield

    def _try_block(self) -> Steps[None]:
        """Read a block. If it is invalid, its marker is content."""
        behind_marker = self._pos + (len(self._before) if self._lacks_close else 0)
        calls_before = self._count
        self._is_closing = False
        try:
            yield from self._block()
            self._drop()
            if (may_close := self._format.may_close) and may_close.startswith((yield from self._peek())):
                if (yield from self._take(may_close)):
                    self._drop()
                self._pos = 0
            yield from self._peek()  # white space at the very end belongs to the format
            self._pos = 0
        except MalformedText as error:
            if self._count == calls_before:
                marker = self._hidden_marker.sub("", self._text[:behind_marker])
                self._text = marker + self._text[behind_marker:]
                self._emit_text(len(marker))
            elif self._is_closing and isinstance(error, TextCutOff):
                self._text = ""
            self._pos = 0

    def _block(self) -> Steps[None]:
        if not self._lacks_close:
            yield from self._piece(self._opening.removesuffix("["))
        first = yield from self._peek()
        in_list = first == "["
        self._pos += in_list
        read = self._object if first in "[{" else self._named
        separator = "," if in_list else self._format.separator
        while True:
            yield from self._peek()
            self._is_closing = False
            yield from read()
            self._is_closing = True
            self._drop()
            if separator is None or not (yield from self._continues(separator.strip())):
                break
        close = self._closing
        if in_list:
            yield from self._expect("]")
            close = close.removeprefix("]")
        if self._lacks_close:
            yield from self._peek()
            yield from self._take(close)
        else:
            yield from self._piece(close)

    def _piece(self, text: str) -> Steps[None]:
        """Read a piece of the format, which may be empty. Line breaks in it are optional."""
        for line in text.split("\n"):
            if line.strip():
                yield from self._expect(line.strip())

    def _continues(self, separator: str) -> Steps[bool]:
        """Return whether another call follows, and read the separator if so."""
        yield from self._peek()
        if separator:
            return (yield from self._take(separator))
        begin = self._pos
        found = yield from self._take(self._before)
        self._pos = begin
        return found

    def _object(self) -> Steps[None]:
        """Read a call that is a JSON object, with its keys in any order."""
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
            elif self._format.bare and key not in ("id", "type"):
                raise MalformedText  # a JSON answer, not a call
            else:
                yield from self._value()
            yield from self._peek()
            if not (yield from self._take(",")):
                break
        yield from self._expect("}")
        if name is None:
            raise MalformedText
        if not is_out:
            self._begin(name)
            self._show_arguments(arguments or "{}")

    def _named(self) -> Steps[None]:
        """Read a call in the format's fixed order."""
        if isinstance(self._format.call, JsonObject) or not (yield from self._take(self._before)):
            raise MalformedText
        yield from self._peek()
        name, call_id = (yield from self._match(_NAME)), None
        if self._format.id_as_name:
            if not (yield from self._take(":")):
                raise MalformedText
            call_id = f"{name}:{yield from self._match(_DIGITS)}"
            name = name.removeprefix("functions.")
        name = self._known(name)
        if "[CALL_ID]" in self._format.inner and (yield from self._take("[CALL_ID]")):
            yield from self._match(_ID)
        yield from self._piece(self._between)
        calls_before = self._count
        try:
            yield from self._named_arguments(name, call_id)
        except TextCutOff:
            if self._count > calls_before:  # half of an argument is not content
                self._text, self._pos = "", 0
            raise
        if self._after:
            yield from self._expect(self._after.strip())

    def _named_arguments(self, name: str, call_id: str | None) -> Steps[None]:
        """Read the arguments of a call in the format's fixed order."""
        if (yield from self._peek()) != "{":
            raise MalformedText
        yield from self._arguments(name, call_id)

    def _arguments(self, name: str, call_id: str | None = None) -> Steps[None]:
        """Emit a call whose arguments follow, while they arrive."""
        self._begin(name, call_id)
        yield from self._nested(self._show_arguments)
        self._is_closing = True

    def _begin(self, name: str, call_id: str | None = None) -> None:
        """Emit the start of a call, which is not taken back."""
        self._drop()
        self._count += 1
        self._call(ToolCall(self._count - 1, "", call_id or self._format.new_id(), name))

    def _show_arguments(self, text: str) -> None:
        self._call(ToolCall(self._count - 1, text))

    def _end_arguments(self, name: str, call_id: str | None, is_out: bool) -> None:
        """Emit the end of arguments that are converted one by one, the first of which has begun the call."""
        if not is_out:
            self._begin(name, call_id)
        self._show_arguments("}" if is_out else "{}")
        self._is_closing = True

    def _text_value(self, end: re.Pattern[str], half_end: re.Pattern[str]) -> Steps[None]:
        """Emit the text up to its end as a JSON string, while it arrives."""
        self._show_arguments('"')
        while (found := end.search(self._text)) is None:
            half = None if self._ended else half_end.search(self._text)
            self._pos = half.start() if half else len(self._text)
            self._show_string()
            yield from self._more()
        self._pos = found.start()
        self._show_string()
        self._pos = found.end() - found.start()
        self._drop()
        self._show_arguments('"')

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

    def _block(self) -> Steps[None]:
        yield from self._piece(self._opening)
        separator = (self._format.separator or "").strip()
        while True:
            yield from self._peek()
            self._is_closing = False
            name = self._known((yield from self._match(_NAME)))
            yield from self._expect("(")
            yield from self._keywords(name)
            self._drop()
            yield from self._peek()
            if separator and not (yield from self._take(separator)):
                break
            if not separator and (yield from self._take(self._closing)):
                return
        yield from self._expect(self._closing)

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
        self, tags: Tagged, format: ToolFormat, schemas: Schemas, hidden: Collection[str], limit: int | None
    ) -> None:
        self._tags = tags
        line, _, _ = tags.between.strip().partition("\n")
        both = zip(line, tags.between_json or line, strict=False)
        self._key_end = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        self._key = re.compile(rf"(?:(?!{re.escape(self._key_end)})[^\n])*")
        closer = tags.close.strip()
        closers = (closer, f"\n{closer}") if tags.close.startswith("\n") else (closer,)
        self._value_end = any_of(*closers)
        self._half_value_end = beginning_of(*closers)
        self._longest_end = max(map(len, closers))
        self._end_or_quote = re.compile(rf'"|{self._value_end.pattern}')
        self._end_in_string = re.compile(rf'"|\\.|{self._value_end.pattern}|\n', re.DOTALL)
        self._trusts_strings = True
        """No value of this answer has had a JSON string that is not closed."""
        super().__init__(format, schemas, hidden, limit)

    def _named_arguments(self, name: str, call_id: str | None) -> Steps[None]:
        schema, is_out = self._schemas[name], False
        unlike_keys = sorted((key for key in property_names(schema) if not self._key.fullmatch(key)), reverse=True)
        while True:
            yield from self._peek()
            if not (yield from self._take(self._tags.open)):
                break
            key = yield from self._argument_name(unlike_keys)
            is_text = yield from self._read_between()
            types = property_types(schema, key)
            if is_text is not None:
                types = TEXT if is_text else types - TEXT or types
            if not is_out:
                self._begin(name, call_id)
            self._show_arguments(f"{', ' if is_out else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            is_out = True
            if types == TEXT:
                yield from self._text_value(self._value_end, self._half_value_end)
            else:
                yield from self._typed_value(types)
        begin = self._pos
        yield from self._expect((self._after or self._closing).strip())
        self._pos = begin
        self._end_arguments(name, call_id, is_out)

    def _argument_name(self, unlike_keys: Collection[str]) -> Steps[str]:
        """Read a key: one of the properties whose names contain the end of a key, or any other."""
        for key in unlike_keys:
            if (yield from self._take(key + self._key_end)):
                self._pos -= len(self._key_end)
                return key
        return (yield from self._match(self._key))

    def _read_between(self) -> Steps[bool | None]:
        """Read the text between key and value; returns whether the value is text, if it says so."""
        tags, is_text = self._tags, None
        if tags.between_json:
            yield from self._peek()
            is_text = yield from self._take(tags.between)
            if not is_text:
                yield from self._expect(tags.between_json)
        else:
            yield from self._piece(tags.between)
        if tags.between.endswith("\n"):
            yield from self._take("\n")
        self._drop()
        return is_text

    def _typed_value(self, types: frozenset[str]) -> Steps[None]:
        """Emit a value as JSON. A closing tag inside of a JSON string does not end it, unless the string is not closed:
        it contains a line break, or the value is no JSON up to the next tag outside of strings, or the text ends.

        The text is read once; once more only after the first such string, as no others are looked for then.
        """
        reads_strings = self._trusts_strings and (yield from self._peek()) in "{["
        self._pos = 0
        in_string = False
        inside: re.Match[str] | None = None  # the first tag inside of a string
        while True:
            half = None
            if not self._ended:
                half = self._half_value_end.search(self._text, max(self._pos, len(self._text) - self._longest_end))
            end = half.start() if half else len(self._text)
            pattern = self._value_end
            if reads_strings:
                pattern = self._end_in_string if in_string else self._end_or_quote
            found = pattern.search(self._text, self._pos, end)
            if found is None:
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
                inside = inside or (None if found[0].startswith("\\") else found)
            else:
                break
        if inside is not None and (found is None or not reads_strings or not _is_json(self._text[: found.start()])):
            found, self._trusts_strings = inside, False
        assert found is not None
        self._show_arguments(json_of(self._text[: found.start()], types))
        self._pos = found.end()
        self._drop()


class _QuotedParser(ToolParser):
    """Calls with arguments that are like JSON, but for the quotes of strings, and keys without quotes. Strings are
    emitted while they arrive, other values when they are complete."""

    def __init__(
        self, quote: str, format: ToolFormat, schemas: Schemas, hidden: Collection[str], limit: int | None
    ) -> None:
        self._quote = quote
        self._quote_end, self._half_quote_end = any_of(quote), beginning_of(quote)
        self._unquoted = re.compile(rf"(?:(?!{re.escape(quote)}).)*", re.DOTALL)
        super().__init__(format, schemas, hidden, limit)

    def _named_arguments(self, name: str, call_id: str | None) -> Steps[None]:
        """Read the arguments after their opening brace, up to the closing one."""
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
            elif (yield from self._take(self._quote)):
                self._drop()
                yield from self._text_value(self._quote_end, self._half_quote_end)
            else:
                text = (yield from self._match(_BARE_VALUE)).strip()
                if not text:
                    raise MalformedText
                self._show_arguments(json_of(text, types - TEXT or types))
                self._drop()
        self._end_arguments(name, call_id, is_out)

    def _key(self, names: Collection[str]) -> Steps[str]:
        """Read a key, which may be in quotes, and the colon. `names` may contain the character that ends other keys."""
        yield from self._peek()
        if (yield from self._take(self._quote)):
            key = yield from self._match(self._unquoted)
            yield from self._expect(self._quote)
            yield from self._expect(":")
            return key
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
