"""Tables of the generated pages."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; `|` in cells is escaped."""
    head = tuple(head)
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def code(text: object) -> str:
    """Text as code."""
    return f"`{text}`"
