"""The messages that docs/guides/troubleshooting.md explains exist in the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
GAP = "…"


def messages() -> list[str]:
    """First cells of the tables of messages; `…` stands for varying parts."""
    rows = PAGE.partition("## Messages about several devices or hosts")[2].splitlines()
    return [found[2].strip() for row in rows if (found := re.match(r"\| (`+)(.+?)\1 \|", row))]


def texts() -> Iterator[str]:
    """Every string of our sources, with `…` for the values in it."""
    for path in [*ROOT.glob("engine/**/*.py"), *ROOT.glob("server/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_sources_say_every_message_of_the_page() -> None:
    """One case, which every run has: of many, a run has as many as fit in its time."""
    sources, quoted = "\n".join(texts()), messages()
    patterns = ["[^\n]*".join(map(re.escape, message.strip(GAP).split(GAP))) for message in quoted]
    assert len(quoted) > 30
    assert [message for message, pattern in zip(quoted, patterns, strict=True) if not re.search(pattern, sources)] == []
