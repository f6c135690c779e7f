"""The lines that end a text between tags whose own closing tag is missing: the grammar does not write them in a text.

They are the tags that open another argument of the function. Formats without line breaks have them anywhere in a line.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

from quire.server.parsers.text_grammar import between_slashes
from quire.server.parsers.tool_formats import Tagged

_MAX_KEY = 256
"""Maximum number of characters of a key."""


def begins_line(tags: Tagged) -> bool:
    """Whether a text begins on a line of its own."""
    return tags.between.endswith("\n")


def excluded(tags: Tagged, names: Collection[str]) -> str:
    """Return a terminal for texts with a line that opens one of these arguments, given or not.

    The line may go on: a model that has written the tag would do so if it may not end the line.
    """
    before = r"((.|\n)*\n)?" if begins_line(tags) else r"(.|\n)*\n" if tags.close.endswith("\n") else r"(.|\n)*"
    keys = "|".join(map(re.escape, sorted(names)))
    whole = rf"{before}{re.escape(tags.open)}({keys}){_between(tags)}(.|\n)*"
    return f"/{between_slashes(whole)}/"


@lru_cache(maxsize=64)
def opening_lines(tags: Tagged, is_first: bool) -> re.Pattern[str]:
    """Return the pattern for lines that open an argument, with the line break before them if they have one, and up to
    the line of the value. Its first group is the argument's name. `is_first`: the text to search begins with a value.
    """
    begin = r"(?:\n|\A)" if is_first and begins_line(tags) else r"\n" if tags.close.endswith("\n") else ""
    opening = re.escape(tags.open)
    key = rf"((?:(?!{opening})[^\n]){{1,{_MAX_KEY}}}?)"
    return re.compile(begin + opening + key + _between(tags) + r"(?=\n)" * begins_line(tags))


def _between(tags: Tagged) -> str:
    """The text between key and value, up to the line of the value."""
    ways = (re.split(r">\n?<", way.rstrip("\n")) for way in (tags.between, tags.between_json) if way)
    between = "|".join(r">\n?<".join(map(re.escape, way)) for way in ways)
    return f"({between})"
