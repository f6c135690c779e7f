"""The input of a custom tool in JSON arguments, whole and in pieces."""

from __future__ import annotations

import json

import pytest

from quire.server.openai.custom_input import CustomInput, custom_input

TEXT = 'é "quoted" \\ back\n\ttab 😀 end'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (json.dumps({"input": TEXT}), TEXT),
        (json.dumps({"input": TEXT}, ensure_ascii=False), TEXT),
        (' { "in\\"put" : "a\\/b" , "more": "c"} ', "a/b"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": ""}', ""),
        ("{ } ", ""),
        ("", ""),
        ('{"input": "cut \\', "cut "),
        ('{"input": "cut \\u00e', "cut "),
        ('{"inp', ""),
        (r'{"input": "a \ud83d b \ud83d\n \ude00 \x"}', "a � b �\n � \\x"),
        (r'{"input": "\ud83d\ud83d\ude00 \ud83d\ud83d\n\ud83d\u00e9"}', "�😀 ��\n�é"),
        (r' {  "a\"\\" : 5', r' {  "a\"\\" : 5'),
        (r'{"input": "\u12" x', "\\u12"),
        ("{ } x", "{ } x"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": {"a": "b"}}', '{"input": {"a": "b"}}'),
    ],
)
def test_the_input_does_not_depend_on_the_pieces(arguments: str, expected: str) -> None:
    assert custom_input(arguments) == expected
    for size in (1, 2, 3, 7):
        reader = CustomInput()
        assert "".join(reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)) == expected


def test_it_arrives_at_once() -> None:
    reader = CustomInput()
    assert [reader.feed(piece) for piece in ('{"input": "a', "b", "\\", 'nc"', "}")] == ["a", "b", "", "\nc", ""]


@pytest.mark.parametrize("opening", [' {0}{{{0}"{0}"{0}:{0}"', '{{"{1}": "'])
def test_what_is_before_the_input_is_read_once(opening: str) -> None:
    reader = CustomInput()
    pieces = [*opening.format(" " * 10_000, r"a\"" * 12_000), "text", '"', *" " * 10_000, "}"]
    assert "".join(map(reader.feed, pieces)) == "text"  # not in minutes
