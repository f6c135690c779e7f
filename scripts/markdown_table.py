"""Tables of the generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; `|` in cells is escaped."""
    head = tuple(head)
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """In code, where the site would show the backslash that GitHub needs, an entity replaces `|`."""
    spans = re.split("`([^`]*)`", text)
    spans[1::2] = (
        f"<code>{escape(span, quote=False).replace('|', '&#124;')}</code>" if "|" in span else code(span)
        for span in spans[1::2]
    )
    return "".join(spans).replace("|", r"\|")


def code(text: object) -> str:
    """Text as code."""
    return f"`{text}`"
