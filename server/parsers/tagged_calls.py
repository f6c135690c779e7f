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
from quire.server.parsers.value_bounds import ends

_ATTRIBUTE_END = re.compile(
    r"""["']?[ \t]*(?:string[ \t]*=[ \t]*["']?(true|false)["']?[ \t]*)?(?:>|(?=\n))""", re.IGNORECASE
)
"""The end of a tag that has a key, and maybe whether the value is a string. A line break may stand for its `>`."""
_MAX_ATTRIBUTE = 40
"""Maximum number of characters of the text that ends such a tag."""
_SPACE = re.compile(r"\s*")


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
        self._keeps_line = not call.close.startswith("\n")
        self._ends = tags(closes, opens, (*closing, *begins), others=every, lead="\n")
        self._nexts = tags(closes, (*opens, *begins), others=every, lead="\n")
        ends = self._ends.whole.pattern
        self._end_or_quote = re.compile(f'"|{ends}', re.IGNORECASE)
        self._end_in_string = re.compile(rf'"|\\.|{ends}|\n', re.DOTALL | re.IGNORECASE)
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
            self._end_in_string = re.compile(rf'"|\\.|{close.whole.pattern}|\n', re.DOTALL)
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
            self._stop = self._stops(is_first=True)
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

    def _stops(self, is_first: bool) -> Tags:
        return ends(self._format, self._tags, frozenset(self._left), is_first)

    def _stopped(self, found: re.Match[str], at: int) -> tuple[int, int]:
        for tag in takewhile(lambda tag: tag.end() <= at, self._ends.whole.finditer(self._text, found.start())):
            behind = _SPACE.match(self._text, tag.end())
            if behind is None or not self._ends.whole.match(self._text, behind.end()):
                continue
            if tag.lastindex == CLOSES:
                return self._closed(tag)
            if tag.lastindex != OPENS and tag[0].startswith("\n"):
                return tag.start(), tag.start()
        return at, at

    def _show_string(self) -> None:
        if self._pos:
            self._stop = self._stops(is_first=False)
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

    def _may_close(self, first: re.Match[str], close: re.Match[str]) -> Steps[bool]:
        """It does not if `first` opens an argument that the call requires and that does not come later."""
        if first.lastindex != OPENS:
            return True
        assert self._close is not None
        begin = self._pos
        try:
            self._pos = first.end()
            if not (yield from self._is_argument(first.end())):
                return True
            yield from self._peek()
            key = yield from self._argument_name()
            if key not in self._left & self._required or key in self._later:
                return True
            self._pos = close.end()
            while True:
                yield from self._peek()
                if not (yield from self._take(self._tags.open)):
                    return False
                yield from self._peek()
                if (yield from self._argument_name()) == key:
                    self._later.add(key)
                    return True
                while (found := self._close.whole.search(self._text, self._pos)) is None:
                    self._pos = max(self._pos, len(self._text) - self._close.longest)
                    yield from self._more()
                self._pos = found.end()
        except MalformedText:
            return True
        finally:
            self._pos = begin

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
