"""Answers as models write them, in transcripts/: whole, cut at every character, and character by character.

A file's first line names its format of reasoning. Then come answers: `@@` and a title, the text, `=>` and its contents.
Arguments are an object, or the text of one that is cut off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.server.parsers.output_parser import OutputFormat
from quire.server.parsers.reasoning import REASONING_FORMATS
from quire.server.parsers.tool_formats import HARMONY_MARKERS, TOOL_FORMATS
from tests.unit.server.parsers.samples import cut, joined

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}}, "required": ["city"]},
    "now": {"properties": {}},
    "search": {
        "properties": {
            "query": {"type": "string"},
            "tags": {"type": "array"},
            "filters": {"$ref": "#/$defs/filters"},
            "exact": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
        "$defs": {"filters": {"type": "object"}},
    },
}
FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


def transcripts() -> Iterator[Any]:
    files = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
    files["deepseek_v4"] = files["deepseek_v32"].replace(
        "｜DSML｜function_calls", "｜DSML｜tool_calls"
    )  # all that differs
    for format, file in files.items():
        first, *answers = file.split("\n@@ ")
        for answer in answers:
            title, _, rest = answer.partition("\n")
            text, _, expected = rest.rpartition("\n=> ")
            reasoning = first.removeprefix("reasoning: ")
            yield pytest.param(format, reasoning, text, json.loads(expected), id=f"{format}: {title}")


def read(format: OutputFormat, chunks: Iterable[str]) -> dict[str, Any]:
    parser = format.parser()
    events = [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()
    content, reasoning, calls = joined(events)
    return {"content": content, "reasoning": reasoning, "calls": calls}


@pytest.mark.parametrize(("tools", "reasoning", "text", "expected"), [*transcripts()])
def test_what_models_write(tools: str, reasoning: str, text: str, expected: dict[str, Any]) -> None:
    format = OutputFormat(reasoning=REASONING_FORMATS[reasoning], tools=TOOL_FORMATS[tools], schemas=SCHEMAS)
    whole = read(format, [text])
    assert whole == read(format, text)
    for at in range(1, len(text)):
        assert read(format, [text[:at], text[at:]]) == whole
    calls = [
        [name, arguments if isinstance(wanted, str) else json.loads(arguments)]
        for (name, arguments), (_, wanted) in zip(whole.pop("calls"), expected.get("calls", []), strict=True)
    ]
    assert {"calls": calls, **whole} == {"content": "", "reasoning": "", "calls": [], **expected}


def test_every_format_has_ten() -> None:
    counts = {path.stem: path.read_text(encoding="utf-8").count("\n@@ ") for path in FILES}
    assert min(counts.values()) >= 10


PIECES = [*HARMONY_MARKERS, "analysis", "final", "commentary", " to=functions.now", '{"a": [1', "}", "]", "\n", "<|"]
PIECES += ["x " * 300, " " * 600]


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.lists(st.integers(0, 10_000), max_size=4))
@example(["<|end|>", "<|constrain|>", "analysis"], [3])
@example([" " * 600, "<|channel|>", "final", "<|message|>", "x"], [600])
def test_harmony_ends_whatever_the_model_writes(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    format = OutputFormat(tools=TOOL_FORMATS["openai"], schemas=SCHEMAS)
    whole = read(format, [text])
    assert read(format, cut(text, cuts)) == read(format, parts) == whole
    assert not any(marker in whole["content"] for marker in HARMONY_MARKERS)
