"""Chunks that bring text alone are put together from bytes; they are what the general way would have made."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.server.frontend.output_processor import TextDelta
from quire.server.http.response import Formatter, _frame
from quire.server.openai.chat import ChatRequest, _ChatFormatter
from quire.server.openai.completions import CompletionRequest, _CompletionFormatter
from quire.server.parsers.events import ToolCall
from tests.fakes.tokenizers import byte_level, wrapped

TOKENIZER = wrapped(byte_level())
HEAD, TAIL = b"data: {", b"}\n\n"


def chat(**fields: Any) -> Formatter:
    return _ChatFormatter(TOKENIZER, ChatRequest(messages=[], **fields), [1])


def completion(**fields: Any) -> Formatter:
    return _CompletionFormatter(TOKENIZER, CompletionRequest(prompt="x", **fields), [[1]], None)


@pytest.mark.parametrize("shape", [chat(), completion()])
@pytest.mark.parametrize("text", ["a", 'quote " and \\', "\0", "é😀\n\ufffd"])
def test_a_frame_around_the_text_is_the_whole_event(shape: Formatter, text: str) -> None:
    frame = _frame(shape, 3, HEAD, TAIL)
    assert frame is not None
    event = HEAD + msgspec.json.encode(shape.chunk_choice(TextDelta(3, text, [7]))) + TAIL
    assert frame[0] + msgspec.json.encode(text) + frame[1] == event


@pytest.mark.parametrize("shape", [chat(return_token_ids=True), completion(return_token_ids=True)])
def test_a_shape_that_shows_more_than_text_has_no_frame(shape: Formatter) -> None:
    assert _frame(shape, 0, HEAD, TAIL) is None


HIDDEN: dict[str, Any] = {
    "index": 1,
    "text": "t",
    "token_ids": [1],
    "num_cached_tokens": 5,
    "num_tokens_before_words": 1,
    "stop_reason": None,
}
"""What a chunk of text may have without showing it."""
SHOWN: dict[str, Any] = {
    "logprobs": [TokenLogprobs(-1.0, 1, [], [])],
    "finish_reason": "stop",
    "prompt_logprobs": PromptLogprobs(0, b"\0\0\0\0", b"\1\0\0\0", b"", b""),
    "reasoning": "r",
    "tool_calls": [ToolCall(0)],
}


def test_whatever_a_chunk_shows_beside_text_goes_the_general_way() -> None:
    """A new field of `TextDelta` must be put into one of the two."""
    assert {field.name for field in dataclasses.fields(TextDelta)} == HIDDEN.keys() | SHOWN.keys()
    plain = TextDelta(**HIDDEN)
    assert plain.is_text
    assert not TextDelta(0).is_text
    for name, value in SHOWN.items():
        assert not dataclasses.replace(plain, **{name: value}).is_text
