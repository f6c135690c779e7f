"""Answers as blocks, for Messages and Responses."""

from __future__ import annotations

import pytest

from quire.engine.protocol.logprobs import TokenLogprobs
from quire.server.http.content_blocks import ContentBlocks
from quire.server.text.output_processor import TextDelta


@pytest.mark.parametrize("is_one", [True, False])
def test_the_token_that_ends_the_answer_is_no_token_of_the_text(is_one: bool) -> None:
    """It comes with the text or after it, depending on how far the client is behind."""
    text = TextDelta(0, "hi", [5, 6], [TokenLogprobs(-1.0, 1, [], []), TokenLogprobs(-2.0, 1, [], [])])
    end = TextDelta(0, "", [2], [TokenLogprobs(-0.5, 1, [], [])], finish_reason="stop")
    if is_one:
        text.extend(end)
    blocks = ContentBlocks()
    events = [*blocks.feed([text] if is_one else [text, end]), *blocks.close()]
    assert events
    (block,) = blocks.blocks
    assert (block.text, [token for token, _ in block.logprobs]) == ("hi", [5, 6])
