"""Parses calls whose arguments are like JSON, but for the quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from quire.server.parsers.argument_types import ANY_TYPE, TEXT, json_of, property_names, property_types
from quire.server.parsers.incremental import CLOSERS, MalformedText, Steps, TextCutOff
from quire.server.parsers.tags import Tags, exact, tags, units
from quire.server.parsers.tool_calls import ParserOptions, ToolParser
from quire.server.parsers.tool_formats import Quoted

_BARE_KEY = re.compile(r"[^:,{}\[\]<]*")
_BARE_VALUE = re.compile(r"[^,{}\[\]]*")


class QuotedParser(ToolParser):
    """Calls with arguments that are like JSON, but for the quotes of strings, and keys without quotes. Strings are
    emitted while they arrive, other values when they are complete."""

    def __init__(self, options: ParserOptions) -> None:
        format = options.format
        assert isinstance(format.call, Quoted)
        quote = format.call.quote
        closing = units(format.block[2])
        every = (quote, *closing, *format.markers)
        self._quotes = tags((quote,), others=every)
        self._ends = tags((quote,), format.markers, closing, others=every, lead="}")
        self._nexts = tags((quote,), format.markers, others=every, lead="}")
        self._unquoted = re.compile(rf"(?:(?!{self._quotes.whole.pattern}).)*", re.DOTALL | re.IGNORECASE)
        self._quote = exact(quote)
        close = exact(quote, "}")
        self._names: list[str] = []
        """The properties of the current call."""
        self._closers = [""]
        """The brackets that close what is open in it."""
        if options.is_enforced:
            self._ends = self._nexts = close
            self._quotes = self._quote
        super().__init__(options, close)

    def _closed(self, found: re.Match[str]) -> tuple[int, int]:
        return found.start() + found[0].startswith("}"), found.end()

    def _closed_by(self, close: re.Match[str], found: re.Match[str], nexts: Tags) -> Steps[tuple[int, int] | None]:
        """The quote opens another string if neither an argument, or a list's item, nor a bracket follows."""
        if (yield from self._goes_on(close.end())):
            return self._closed(close)
        return (yield from self._value_end(found, nexts))

    def _goes_on(self, at: int) -> Steps[bool]:
        begin, self._pos = self._pos, at
        try:
            first = yield from self._peek()
            if first != "," or self._closers[-1] == "]":
                return first in ",}]"
            self._pos += 1
            yield from self._key(self._names)
        except TextCutOff:
            return True
        except MalformedText:
            return False
        finally:
            self._pos = begin
        return True

    def _named_arguments(self, name: str, call_id: str | None) -> Steps[None]:
        """Read the arguments and the braces around them."""
        yield from self._expect("{")
        schema, is_out, is_first = self._schemas[name], False, True
        closers, names = self._closers, self._names = ["}"], property_names(schema)
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
        """Read the quote before a string, and its repetitions, the last of which may as well end an empty string."""
        if not (yield from self._take_tag(self._quotes)):
            return False
        while True:
            begin = self._pos
            yield from self._peek()
            if not (yield from self._take_tag(self._quote)) or (yield from self._peek()) in ",}]":
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
