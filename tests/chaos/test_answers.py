"""The comparison finds lost, repeated and wrong output."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.answers import Answer, Verdict

_USAGE = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}}


def _chunk(tokens: list[int], finish: str | None = None, **changes: Any) -> dict[str, Any]:
    names = [f"t{token}" for token in tokens]
    logprobs = {"tokens": names, "token_logprobs": [-1.0] * len(names), "top_logprobs": [{"x": -2.0}] * len(names)}
    choice = {"index": 0, "text": "".join(names), "token_ids": tokens, "finish_reason": finish, "logprobs": logprobs}
    return {"choices": [choice | changes]}


def _answer(*payloads: dict[str, Any] | None) -> Answer:
    answer = Answer()
    for payload in payloads:
        answer.add(payload)
    return answer


EXPECTED = _answer(_chunk([5, 6]), _chunk([7, 8], "length"), _USAGE, None)


@pytest.mark.parametrize(
    ("payloads", "verdict"),
    [
        ([_chunk([5]), _chunk([6, 7, 8], "length"), _USAGE, None], "right"),
        ([_chunk([5, 6]), _chunk([6, 7, 8], "length"), _USAGE, None], "duplicated"),
        ([_chunk([5, 6, 7, 8], "length"), _chunk([], "length"), _USAGE, None], "duplicated"),
        ([_chunk([5, 6, 7, 8], "length"), _USAGE, None, None], "duplicated"),
        ([_chunk([5, 6, 7, 8], "length"), _USAGE, _USAGE, None], "duplicated"),
        ([_chunk([5, 6, 8], "length"), _USAGE, None], "wrong"),
        ([_chunk([5, 6, 7, 8], "stop"), _USAGE, None], "wrong"),
        ([_chunk([5, 6, 7, 8], text="other"), _chunk([], "length"), _USAGE, None], "wrong"),
        ([_chunk([5, 6, 7, 8], "length", logprobs=None), _USAGE, None], "wrong"),
        ([_chunk([5, 6, 7, 8], "length", index=1), _USAGE, None], "wrong"),
        ([_chunk([5, 6, 7, 8], "length"), _USAGE], "wrong"),
        ([_chunk([5, 6, 7, 8], "length"), None], "wrong"),
    ],
)
def test_whole_answers(payloads: list[dict[str, Any] | None], verdict: Verdict) -> None:
    assert _answer(*payloads).verdict(EXPECTED, is_whole=True) == verdict


@pytest.mark.parametrize(
    ("tokens", "verdict"), [([], "right"), ([5, 6, 7], "right"), ([5, 5], "duplicated"), ([5, 8], "wrong")]
)
def test_beginnings(tokens: list[int], verdict: Verdict) -> None:
    assert _answer(_chunk(tokens)).verdict(EXPECTED, is_whole=False) == verdict


def test_log_probabilities_and_embeddings_have_a_tolerance() -> None:
    def embedding(*values: float) -> Answer:
        return _answer({"data": [{"embedding": list(values)}]})

    assert embedding(0.5, 1.0).verdict(embedding(0.5, 1.0001), is_whole=True) == "right"
    assert embedding(0.5, 1.0).verdict(embedding(0.5, 1.1), is_whole=True) == "wrong"
    logprobs = {"tokens": ["t5"], "token_logprobs": [-1.1], "top_logprobs": [{"x": -2.0}]}
    assert _answer(_chunk([5], logprobs=logprobs)).verdict(EXPECTED, is_whole=False) == "wrong"


def test_tool_calls_are_compared() -> None:
    def called(*arguments: str) -> Answer:
        calls = [
            [{"index": 0, "function": {"name": "f" if i == 0 else "", "arguments": a}}] for i, a in enumerate(arguments)
        ]
        return _answer(*({"choices": [{"index": 0, "delta": {"tool_calls": call}}]} for call in calls))

    assert called('{"a', '": 1}').verdict(called('{"a": 1}'), is_whole=True) == "right"
    assert called('{"a').verdict(called('{"a": 1}'), is_whole=False) == "right"
    assert called('{"a', '": 2}').verdict(called('{"a": 1}'), is_whole=True) == "wrong"
