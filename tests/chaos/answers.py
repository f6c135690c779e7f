"""The answers of a server, streamed or not, and their differences from undisturbed answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["right", "wrong", "duplicated"]

_TOLERANCE = 1e-3
"""The tolerance of log-probabilities and embeddings: a resumed request computes tokens in one step that it had computed
in several."""


@dataclass
class Choice:
    """One choice of an answer: the contents of its chunks, joined."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    calls: dict[int, str] = field(default_factory=dict)
    """Tool calls: name and arguments."""
    scores: list[tuple[str, float]] = field(default_factory=list)
    """Tokens with their log-probabilities, prompt tokens first."""
    finish_reasons: list[str] = field(default_factory=list)


@dataclass
class Answer:
    """An answer, or the part of it that has been received."""

    choices: dict[int, Choice] = field(default_factory=dict)
    embeddings: list[list[float]] = field(default_factory=list)
    usage: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of prompt and output, each time they are sent."""
    refusals: list[str] = field(default_factory=list)
    """Why the request is invalid."""
    num_ends: int = 0
    """Number of ends that the stream has reported."""

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def add(self, payload: dict[str, Any] | None) -> None:
        """Add a chunk of a stream (None: its end), or a whole answer."""
        if payload is None:
            self.num_ends += 1
            return
        if "error" in payload:
            self.refusals.append(payload["error"]["message"])
        self.embeddings += [item["embedding"] for item in payload.get("data", ())]
        if usage := payload.get("usage"):
            self.usage.append((usage["prompt_tokens"], usage.get("completion_tokens", 0)))
        for part in payload.get("choices", ()):
            choice = self.choices.setdefault(part["index"], Choice())
            message = part.get("delta") or part.get("message") or {}
            choice.text += (part.get("text") or "") + (message.get("content") or "")
            choice.token_ids += part.get("token_ids") or []
            for number, call in enumerate(message.get("tool_calls") or ()):
                function, index = call["function"], call.get("index", number)
                said = function.get("name", "") + (function.get("arguments") or "")
                choice.calls[index] = choice.calls.get(index, "") + said
            for place in part.get("prompt_logprobs") or ():
                choice.scores += [(token, score["logprob"]) for token, score in (place or {}).items()]
            choice.scores += _scores(part.get("logprobs") or {})
            choice.finish_reasons += [part["finish_reason"]] if part.get("finish_reason") else []

    def verdict(self, expected: Answer, *, is_whole: bool) -> Verdict:
        """Compare with an undisturbed answer; if not `is_whole`, with the beginning of it."""
        if self.num_ends > expected.num_ends or len(self.usage) > len(expected.usage):
            return "duplicated"
        verdicts = {_compare(choice, expected.choices.get(i), is_whole) for i, choice in self.choices.items()}
        if "duplicated" in verdicts:
            return "duplicated"
        is_right = verdicts <= {"right"}
        if is_whole:
            is_right = (
                is_right
                and self.choices.keys() == expected.choices.keys()
                and (self.num_ends, self.usage) == (expected.num_ends, expected.usage)
                and self.refusals == expected.refusals
                and len(self.embeddings) == len(expected.embeddings)
                and all(map(_are_close, self.embeddings, expected.embeddings))
            )
        return "right" if is_right else "wrong"


def _scores(logprobs: dict[str, Any]) -> list[tuple[str, float]]:
    """The text of a chat (`content`) or of a completion."""
    found = []
    for place in logprobs.get("content") or ():
        found += [(each["token"], each["logprob"]) for each in (place, *place["top_logprobs"])]
    for token, score, top in zip(
        *(logprobs.get(k) or () for k in ("tokens", "token_logprobs", "top_logprobs")), strict=False
    ):
        found += [(token, score), *top.items()]
    return [(token, score) for token, score in found if score is not None]


def _compare(got: Choice, expected: Choice | None, is_whole: bool) -> Verdict:
    if expected is None:
        return "wrong"
    if len(got.finish_reasons) > 1 or _repeats(got.token_ids, expected.token_ids):
        return "duplicated"
    if is_whole:
        same = (got.text, got.token_ids, got.calls, got.finish_reasons) == (
            expected.text,
            expected.token_ids,
            expected.calls,
            expected.finish_reasons,
        )
        same = same and len(got.scores) == len(expected.scores)
    else:
        same = (
            expected.text.startswith(got.text)
            and expected.token_ids[: len(got.token_ids)] == got.token_ids
            and all(expected.calls.get(i, "").startswith(call) for i, call in got.calls.items())
        )
    pairs = list(zip(got.scores, expected.scores, strict=False))
    same = same and all(mine == other for (mine, _), (other, _) in pairs)
    return "right" if same and _are_close([s for (_, s), _ in pairs], [s for _, (_, s) in pairs]) else "wrong"


def _repeats(got: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether tokens are the expected ones, but some of them twice in a row."""
    same = next((i for i, (mine, other) in enumerate(zip(got, expected, strict=False)) if mine != other), len(expected))
    rest = got[same:]
    return bool(rest) and any(
        [*expected[back : back + len(rest)]] == [*rest][: len(expected) - back] for back in range(same)
    )


def _are_close(got: Sequence[float], expected: Sequence[float]) -> bool:
    return len(got) == len(expected) and all(
        math.isclose(mine, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        for mine, other in zip(got, expected, strict=True)
    )
