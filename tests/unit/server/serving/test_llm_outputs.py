"""The Python API's conversion of the text side's output."""

from __future__ import annotations

from quire.engine.protocol.logprobs import TokenLogprobs
from quire.server.serving.llm_outputs import completion
from quire.server.text.output_processor import TextDelta
from tests.fakes.tokenizers import byte_level, wrapped


def test_of_equally_likely_tokens_the_sampled_one_has_its_own_rank() -> None:
    """The rank is 1 if no token is likelier, at any place among the most likely ones."""
    delta = TextDelta(0, "b", [71], [TokenLogprobs(-1.0, 1, [70, 71], [-1.0, -1.0])])
    found = completion(wrapped(byte_level()), delta, [], is_ranked=True).logprobs
    assert found is not None
    assert [(token, at.rank) for token, at in found[0].items()] == [(70, 1), (71, 1)]
