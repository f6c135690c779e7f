"""Thoughts, apart from content and calls."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.parsers.output_parser import OutputFormat
from quire.server.parsers.reasoning import REASONING_FORMATS, detect_reasoning
from quire.server.parsers.tool_formats import TOOL_FORMATS
from tests.unit.server.parsers.samples import SCHEMAS, TWO_CALLS, joined

CALL = TWO_CALLS["hermes"]


def read(text: str, is_thinking: bool, chunks: list[str] | None = None, shows: bool = True) -> tuple[str, str, int]:
    output_format = OutputFormat(
        reasoning=REASONING_FORMATS["qwen3"],
        is_thinking=is_thinking,
        tools=TOOL_FORMATS["hermes"],
        schemas=SCHEMAS,
        shows_reasoning=shows,
    )
    parser = output_format.parser()
    events = [event for chunk in chunks or list(text) for event in parser.feed(chunk)] + parser.finish()
    content, reasoning, calls = joined(events)
    return reasoning, content, len(calls)


@pytest.mark.parametrize(
    ("is_thinking", "text", "expected"),
    [
        (False, "<think>\nWell.\n\nSo.\n</think>\n\nYes.", ("Well.\n\nSo.", "Yes.", 0)),
        (True, "\nWell.\n</think>\n\nYes.", ("Well.", "Yes.", 0)),
        (True, "Well.</think>", ("Well.", "", 0)),
        (True, "Well, </thin", ("Well, </thin", "", 0)),
        (True, f"Maybe {CALL}?</think>{CALL}", (f"Maybe {CALL}?", "", 2)),
        (False, f"\n<think></think>\n{CALL}\n", ("", "", 2)),
        (False, "Yes. <think>No.</think>", ("", "Yes. <think>No.</think>", 0)),
        (False, "<thi", ("", "<thi", 0)),
        (False, " \n", ("", " \n", 0)),
    ],
)
def test_thoughts_stand_at_the_beginning(is_thinking: bool, text: str, expected: tuple[str, str, int]) -> None:
    assert read(text, is_thinking) == expected
    assert read(text, is_thinking, [text]) == expected
    assert read(text, is_thinking, shows=False) == ("", *expected[1:])


@given(st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<", "/", CALL]), max_size=8), st.booleans())
def test_the_cuts_make_no_difference(parts: list[str], is_thinking: bool) -> None:
    text = "".join(parts)
    assert read(text, is_thinking) == read(text, is_thinking, [text]) == read(text, is_thinking, parts)


def test_a_prompt_tells_whether_the_model_thinks_already() -> None:
    think = REASONING_FORMATS["deepseek_r1"]
    assert think.is_opened_by("<｜Assistant｜><think>\n")
    assert not think.is_opened_by("what is <think> for?\n<|im_start|>assistant\n")
    assert think.is_closed_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    harmony = REASONING_FORMATS["openai_gptoss"]
    assert not harmony.is_closed_by("<|start|>user<|message|>Hello<|end|><|start|>assistant")


def test_harmony_is_parsed_where_its_format_was_pickled() -> None:
    """As the format of a large body, which another process prepares."""
    format = pickle.loads(pickle.dumps(OutputFormat(reasoning=REASONING_FORMATS["openai_gptoss"])))
    parser = format.parser()
    text = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    content, reasoning, calls = joined(parser.feed(text) + parser.finish())
    assert (content, reasoning, calls) == ("Yes.", "Well.", [])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{%- if add_generation_prompt %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}", "deepseek_r1"),
        ("Think after 'Here is my thought process:' and answer after 'Here is my response:'", "granite"),
        ("{{- '[THINK]' + block['thinking'] + '[/THINK]' }}", "mistral"),
        ("{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}", "openai_gptoss"),
        ("{{- '<seed:think>' + thinking + '</seed:think>' }}", "seed_oss"),
        ("{{- '<think>' + thinking + '</think><answer>' + content + '</answer>' }}", "hunyuan_a13b"),
        ("{{- '<|channel>thought' + thinking + '<channel|>' }}", "gemma4"),
        ("{{- '<think>' + thinking + '</think><|tool_calls_section_begin|>' }}", "kimi_k2"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)  # fmt: skip
def test_the_template_shows_the_format(template: str, name: str | None) -> None:
    assert detect_reasoning(template) == name
