"""The messages that docs/guides/troubleshooting.md explains exist in the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
GAP = "…"


def messages() -> list[str]:
    """First cells of the table of troubles; `…` stands for varying parts."""
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


def test_there_are_messages() -> None:
    assert len(messages()) > 30


@pytest.fixture(scope="module")
def sources() -> str:
    return "\n".join(texts())


@pytest.mark.parametrize("message", messages())
def test_a_message_of_the_page_is_said_somewhere(message: str, sources: str) -> None:
    pattern = "[^\n]*".join(re.escape(part) for part in message.split(GAP))
    assert re.search(pattern, sources)
