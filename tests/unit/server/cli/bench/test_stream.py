"""Server-sent events, cut anywhere, and the tokens in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.server.cli.bench.load import SendTimes
from quire.server.cli.bench.stream import RequestRecord, SSEParser, message_of

BODY = b': ping\n\ndata: {"a": 1}\n\ndata:two\r\n\r\nevent: x\ndata: 3\ndata: more\n\n\n\ndata: [DONE]\n\ndata: not yet'
EVENTS = [b'{"a": 1}', b"two", b"3\nmore", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_may_be_cut_anywhere(size: int) -> None:
    stream = SSEParser()
    events = [event for at in range(0, len(BODY), size) for event in stream.feed(BODY[at : at + size])]
    assert events == EVENTS


def fed(*chunks: Any, moments: SendTimes | None = None) -> RequestRecord:
    """A record that got these chunks, a second apart from 1 on."""
    record = RequestRecord(moments or SendTimes(0, 0, 0), 5)
    for second, chunk in enumerate(chunks, 1):
        record.feed(second, b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) + b"\n\n")
    record.close(len(chunks))
    return record


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None} | more]}


def delta(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def usage(tokens: int, prompt: int = 7) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": tokens + prompt}}


def test_completions() -> None:
    record = fed(text("a"), text("bc"), text("", finish_reason="length"), {"choices": []} | usage(2), b"[DONE]")
    assert (record.arrivals, record.tokens) == ([1, 2], [1, 1])
    assert (record.output_len, record.prompt_len, record.ok, record.is_done) == (2, 7, True, True)
    assert "".join(record.texts) == "abc"


def test_chat_begins_with_a_chunk_that_is_no_token() -> None:
    record = fed(delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="a"), delta("stop"))
    assert record.arrivals == [2, 3]
    assert record.texts == ["hm", "a"]


def test_the_last_usage_says_how_many_tokens_there_were() -> None:
    record = fed(text("several at once"), text(" and more"), {"choices": []} | usage(9))
    assert record.output_len == 9
    assert record.tpot == pytest.approx((3 - 1) / 8)


def test_usage_in_every_chunk_counts_each() -> None:
    record = fed(text("a") | usage(3), text("") | usage(4), text("b") | usage(4), text("cd") | usage(9))
    assert (record.tokens, record.arrivals, record.output_len) == ([3, 1, 0, 5], [1, 2, 3, 4], 9)


def test_token_ids_in_chunks_count() -> None:
    record = fed(text("ab", token_ids=[1, 2]), text("c", token_ids=[3]))
    assert (record.tokens, record.output_len) == ([2, 1], 3)


def test_tokens_that_make_no_text_arrive_with_the_end() -> None:
    record = fed(text("", finish_reason="length"), {"choices": []} | usage(4))
    assert (record.arrivals, record.output_len, record.ok) == ([1], 4, True)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([], "the response has no tokens"),
        ([text("a"), {"error": {"message": "the engine\n is gone", "code": 503}}], "the engine is gone"),
        ([text("a"), b"{not json"], "the server sent an invalid chunk"),
        ([text("a"), {"choices": 3}], "the server sent an invalid chunk"),
    ],
)
def test_what_a_failure_says(chunks: list[Any], error: str) -> None:
    assert fed(*chunks).error.startswith(error)


def test_errors_come_in_many_shapes() -> None:
    for shape in ("no", {"error": "no"}, {"error": {"message": "no"}}, {"message": "no"}, {"detail": "no"}):
        assert message_of(shape) == "no"
