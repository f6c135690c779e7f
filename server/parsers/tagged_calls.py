"""Parses calls whose arguments are between tags."""

from __future__ import annotations

import json
import re
from itertools import takewhile

from quire.server.parsers.argument_types import TEXT, json_of, property_names, property_types
from quire.server.parsers.incremental import MalformedText, Steps, TextCutOff, decoded
from quire.server.parsers.tags import Tags, exact, is_tag, tags, units
from quire.server.parsers.tool_calls import CLOSES, NAME, OPENS, ParserOptions, ToolParser
from quire.server.parsers.tool_formats import Tagged
from quire.server.parsers.value_bounds import opening_lines

_ATTRIBUTE_END = re.compile(
    r"""["']?[ \t]*(?:string[ \t]*=[ \t]*["']?(true|false)["']?[ \t]*)?(?:>|(?=\n))""", re.IGNORECASE
)
"""The end of a tag that has a key, and maybe whether the value is a string. A line break may stand for its `>`."""
_MAX_ATTRIBUTE = 40
"""Maximum number of characters of the text that ends such a tag."""


class TaggedParser(ToolParser):
    """Calls with arguments between tags. Strings are emitted while they arrive, other values when they are complete."""

    def __init__(self, options: ParserOptions) -> None:
        format = options.format
        call = format.call
        assert isinstance(call, Tagged)
        self._tags = call
        before, _, after = call.around
        opens, closes, closing = (call.open,), units(call.close), units(after, format.block[2])
        begins = tuple(filter(is_tag, (*format.markers, *units(before))))
        every = (*opens, *closes, *begins, *closing, *units(call.between))
        line, *_ = call.between.strip().split("\n")
        both = zip(line, call.between_json or line, strict=False)
        self._key_end = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        self._open = tags(opens, others=every)
        self._value_tags = tags(tuple(filter(is_tag, units(call.between))), others=every, is_expected=True)
        key_end = self._value_tags.whole.pattern if is_tag(line) else r"[\"']?[ \t]*>"
        if call.between_json:
            key_end = r"[\"'](?:[ \t]*>|[ \t]+string\b)"
        self._key = re.compile(rf"(?:(?!{key_end})[^\n<])*", re.IGNORECASE)
        self._openers = tags(begins, others=every)
        self._is_first = False
        """The text begins with the value."""
        self._keeps_line = not call.close.startswith("\n")
        self._ends = tags(closes, opens, (*closing, *begins), others=every, lead="\n")
        self._nexts = tags(closes, (*opens, *begins), others=every, lead="\n")
        ends = self._ends.whole.pattern
        self._end_or_quote = re.compile(f'"|{ends}', re.IGNORECASE)
        self._end_in_string = re.compile(rf'"|\\[^<\n]|{ends}|\n', re.DOTALL | re.IGNORECASE)
        self._trusts_strings = True
        """No value of this answer has had a JSON string that is not closed."""
        self._left: set[str] = set()
        """The properties that the current call has no argument for; empty if its schema names none."""
        self._names: list[str] = []
        self._later: set[str] = set()
        """Required properties that come later in the current call."""
        self._required: frozenset[str] = frozenset()
        self._written_between = tuple(filter(is_tag, units(call.between)))
        close = exact(call.close.strip(), "\n")
        if options.is_enforced:
            self._ends = self._nexts = close
            self._end_or_quote = re.compile(f'"|{close.whole.pattern}')
            self._end_in_string = re.compile(rf'"|\\[^<\n]|{close.whole.pattern}|\n', re.DOTALL)
        super().__init__(options, close)

    def _named_arguments(self, name: str, call_id: str | None) -> Steps[None]:
        schema, is_out = self._schemas[name], False
        self._names = property_names(schema)
        self._left = {*self._names}
        self._required, self._later = frozenset(schema.get("required", ())), set()
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
            types = property_types(schema, key)
            is_text = yield from self._read_between(key, "string" in types)
            if is_text is not None:
                types = TEXT if is_text else types - TEXT or types
            if not is_out:
                self._begin(name, call_id)
            self._show_arguments(f"{', ' if is_out else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            is_out = True
            self._left.discard(key)
            self._is_first = True
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

    def _read_between(self, key: str, may_be_text: bool) -> Steps[bool | None]:
        """Read the text between key and value, and repetitions of the tags before it unless they may be a text's
        beginning; returns whether the value is text, if it says so."""
        is_text = yield from self._read_key_end(may_be_text)
        begin = self._pos
        while not may_be_text:
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

    def _read_key_end(self, may_be_text: bool = False) -> Steps[bool | None]:
        if is_tag(self._key_end):
            begin = self._pos
            for tag in self._written_between if may_be_text else ():
                yield from self._peek()
                if not (yield from self._take(tag)):
                    self._pos = begin
                    break
            if self._pos == begin and not (yield from self._skip(self._value_tags)):
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

    def _closed_by(self, close: re.Match[str], found: re.Match[str], nexts: Tags) -> Steps[tuple[int, int] | None]:
        """The text ends before an argument that the call does not have yet, and that does not come behind `close`
        either: at its opening tag if that is the first tag and the call requires the argument, or at a line that is
        its opening tag, unless the tag of a block or a call comes before. That would be quoted, and so is the line.
        """
        if found.lastindex == OPENS and (yield from self._is_argument(found.end())):
            key = yield from self._opened(found.end())
            if key in self._left & self._required and not (yield from self._comes_later(key, close.end())):
                return found.start(), found.start()
        lines = opening_lines(self._tags, self._is_first).finditer(self._text, found.start(), close.end())
        line = next((line for line in lines if line[1] in self._left), None)
        if line is None:
            return self._closed(close)
        is_quoted = self._openers.whole.search(self._text, found.start(), line.start())
        if is_quoted or (yield from self._comes_later(line[1], close.end())):
            return self._closed(close)
        return self._before(line.start(), found)

    def _before(self, at: int, found: re.Match[str]) -> tuple[int, int]:
        """The end of a text before a line, and where the text behind it begins: misspelt tags that close it, which may
        stand there, do not belong to it."""
        first, end = None, 0
        for tag in takewhile(lambda tag: tag.end() <= at, self._ends.whole.finditer(self._text, found.start())):
            if tag.lastindex != CLOSES:
                first = None
            elif first is None or self._text[end : tag.start()].strip():
                first = tag
            end = tag.end()
        return self._closed(first) if first and not self._text[end:at].strip() else (at, at)

    def _opened(self, at: int) -> Steps[str]:
        """The name of the argument whose opening tag ends at `at`."""
        begin, self._pos = self._pos, at
        yield from self._peek()
        key = yield from self._argument_name()
        self._pos = begin
        return key

    def _comes_later(self, key: str, at: int) -> Steps[bool]:
        """Whether the call, which goes on at `at` behind a value, has this argument there, or might have it."""
        assert self._close is not None
        begin = self._pos
        try:
            while key not in self._later:
                self._pos = at
                yield from self._peek()
                if not (yield from self._take(self._tags.open)):
                    return False
                yield from self._peek()
                self._later.add((yield from self._argument_name()))
                while (close := self._close.whole.search(self._text, self._pos)) is None:
                    self._pos = max(self._pos, len(self._text) - self._close.longest)
                    yield from self._more()
                at = close.end()
        except TextCutOff:
            return bool(self._text[at:].strip())
        except MalformedText:
            pass
        finally:
            self._pos = begin
        return True

    def _show_string(self) -> None:
        self._is_first = self._is_first and not self._pos
        super()._show_string()

    def _is_argument(self, at: int) -> Steps[bool]:
        begin, self._pos = self._pos, at
        try:
            yield from self._peek()
            key = yield from self._argument_name()
            is_free = not self._names and NAME.fullmatch(key) is not None
            if key not in self._left and not is_free:
                return False
            yield from self._read_key_end()
        except MalformedText as error:
            return isinstance(error, TextCutOff)
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
        inside: re.Match[str] | None = None  # the first closing tag inside of a string
        loose: re.Match[str] | None = None  # the first that is misspelt or closes something else
        may_be_text = "string" in types
        assert self._close is not None
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
                if self._ended and (inside := inside or loose) is not None:
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
                if self._close.whole.fullmatch(found[0]):
                    inside = inside or found
                elif not found[0].startswith("\\") and found.lastindex != OPENS:
                    loose = loose or found
            else:
                span = yield from (self._text_end if may_be_text else self._value_end)(found, self._nexts)
        if inside is not None and (span is None or not reads_strings or not _is_json(self._text[: span[0]])):
            span, self._trusts_strings = (yield from self._value_end(inside, self._nexts)), False
        assert span is not None
        end, self._pos = span
        self._show_arguments(json_of(self._text[:end], types))
        self._drop()


def _is_json(text: str) -> bool:
    try:
        decoded(text)
    except MalformedText:
        return False
    return True
