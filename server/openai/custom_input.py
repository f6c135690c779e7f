"""The input of a custom tool in the JSON arguments of its function, read while they arrive."""

from __future__ import annotations

import re
from typing import Literal

_OPENING = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"', re.DOTALL)
_HALF_OPENING = re.compile(
    r"""\s*(?:(\{)\s*(?:(\})\s* | (")(?:[^"\\]|\\.)*(?:(\\) | (")\s*(?:(:)\s*)?)?)?)?""", re.DOTALL | re.VERBOSE
)
"""The beginning of an opening, or no argument. Its groups without the rest are one, too."""
_COMPLETE = re.compile(
    r"""(?:[^"\\]+ | \\[^u] | \\u(?!H{4}|H{0,3}\Z) | \\u(?![dD][89abAB])H{4}
    | \\u[dD][89abAB]HH(?: \\u[dD][c-fC-F]HH | (?!(?:\\(?:u(?:[dD](?:[c-fC-F]H?)?)?)?)?\Z)))*""".replace(
        "H", "[0-9a-fA-F]"
    ),
    re.DOTALL | re.VERBOSE,
)
"""The part of a string up to an escape that is not complete, or half of a surrogate pair."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


class CustomInput:
    """The text of the first argument; or all arguments if that is not a text, as a model may write them that does not
    follow the function's schema. The text does not depend on how the arguments are divided into pieces.
    """

    def __init__(self) -> None:
        self._text = ""
        """What is still to be read."""
        self._before: list[str] = []
        """All pieces until the opening is complete."""
        self._state: Literal["before", "inside", "after", "all"] = "before"

    def feed(self, arguments: str) -> str:
        """Return the text that this piece of the arguments adds."""
        if self._state == "after":
            return ""
        self._text += arguments
        if self._state == "before":
            self._before.append(arguments)
            if found := _OPENING.match(self._text):
                self._state, self._text = "inside", self._text[found.end() :]
            elif found := _HALF_OPENING.fullmatch(self._text):
                self._text = "".join(filter(None, found.groups()))
            else:
                self._state, self._text = "all", "".join(self._before)
            if self._state != "before":
                self._before.clear()
        if self._state == "all":
            text, self._text = self._text, ""
            return text
        if self._state != "inside":
            return ""
        found = _COMPLETE.match(self._text)
        assert found is not None
        text, self._text = found[0], self._text[found.end() :]
        if self._text.startswith('"'):
            self._state = "after"
        if "\\" in text:
            text = _ESCAPE.sub(_unescaped, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text


def custom_input(arguments: str) -> str:
    """Return the input in all arguments, which may be cut off."""
    return CustomInput().feed(arguments)


def _unescaped(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else _ESCAPED.get(found[2], found[0])
