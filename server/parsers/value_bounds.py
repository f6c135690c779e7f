"""The lines that end a text between tags whose own closing tag is missing: the grammar does not write them in a text.

They are the tags that open another argument of the function, and the tag that closes the call. Formats without line
breaks have them anywhere in a line.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

from quire.server.parsers.tags import Tags
from quire.server.parsers.text_grammar import between_slashes
from quire.server.parsers.tool_formats import Tagged, ToolFormat

_SPACE = r"\s{0,4}"


def begins_line(tags: Tagged) -> bool:
    """Whether a text begins on a line of its own."""
    return tags.between.endswith("\n")


def excluded(format: ToolFormat, tags: Tagged, names: Collection[str]) -> str:
    """Return a terminal for texts with a line that opens one of these arguments, given or not, or closes the call.

    Both may go on in the same line: a model that has written the tag would do so if it may not end the line.
    """
    is_line = tags.close.endswith("\n")
    before = r"((.|\n)*\n)?" if begins_line(tags) else r"(.|\n)*\n" if is_line else r"(.|\n)*"
    bounds = [_opening(tags, names)] * bool(names)
    bounds.append(re.escape(_closing(format)[0]) if is_line else _call_end(format))
    whole = rf"{before}({'|'.join(bounds)})(.|\n)*"
    return f"/{between_slashes(whole)}/"


@lru_cache(maxsize=512)
def ends(format: ToolFormat, tags: Tagged, names: frozenset[str], is_first: bool) -> Tags:
    """Return the pattern for the exact tag that closes a text (its first group), and for lines that end it without.

    `names`: the arguments that may follow. `is_first`: the text to search begins with the value.
    """
    is_line = tags.close.endswith("\n")
    begin = r"(?:\n|\A)" if is_first and begins_line(tags) else r"\n" if is_line else ""
    opening = [_opening(tags, names) + r"(?=\n)" * begins_line(tags)] * bool(names)
    bound = f"{begin}(?:{'|'.join((*opening, _call_end(format)))})"
    texts = (*names, *_closing(format), *format.block, *format.call.around, tags.open, tags.between, tags.between_json)
    return Tags(
        re.compile(rf"(\n?{re.escape(tags.close.strip())})|({bound})"),
        re.compile(r"(?!)"),
        sum(map(len, texts)) + len(tags.close) + 10,
    )


def _opening(tags: Tagged, names: Collection[str]) -> str:
    """The tag that opens one of these arguments, up to the line of the value."""
    ways = (way.rstrip("\n") for way in (tags.between, tags.between_json) if way)
    between = "|".join(r">\n?<".join(map(re.escape, re.split(r">\n?<", way))) for way in ways)
    keys = "|".join(map(re.escape, sorted(names)))
    return f"{re.escape(tags.open)}({keys})({between})"


def _closing(format: ToolFormat) -> tuple[str, ...]:
    """The text that closes a call, and the texts that may follow."""
    before, _, after = (text.strip() for text in format.call.around)
    marker, _, closing = (text.strip() for text in format.block)
    return tuple(filter(None, (after, closing, marker, before) if after else (closing, marker)))


def _call_end(format: ToolFormat) -> str:
    """The text that closes a call, with the block's end or another call: alone, it may be a line of some document."""
    close, *others = map(re.escape, _closing(format))
    return f"{close}{_SPACE}({'|'.join(others)})"
