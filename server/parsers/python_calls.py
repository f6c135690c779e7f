"""Parses calls in Python."""

from __future__ import annotations

import re

from quire.server.parsers.argument_types import literal_json
from quire.server.parsers.incremental import MalformedText, Steps
from quire.server.parsers.tool_calls import NAME, ToolParser

_PYTHON = re.compile(r"""["'()\[\]{},]""")
_IN_QUOTES = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in "'\""}


class PythonParser(ToolParser):
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
            key = yield from self._match(NAME)
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
