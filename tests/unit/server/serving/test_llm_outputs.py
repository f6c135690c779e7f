"""The Python API's conversion of the text side's output."""

from __future__ import annotations

import pytest

from quire.engine.protocol.logprobs import TokenLogprobs
from quire.server.serving.llm_outputs import FlatLogprobs, Logprob, completion
from quire.server.text.output_processor import TextDelta
from tests.fakes.tokenizers import byte_level, wrapped


def test_of_equally_likely_tokens_the_sampled_one_has_its_own_rank() -> None:
    """The rank is 1 if no token is likelier, at any place among the most likely ones."""
    delta = TextDelta(0, "b", [71], [TokenLogprobs(-1.0, 1, [70, 71], [-1.0, -1.0])])
    found = completion(wrapped(byte_level()), delta, [], is_ranked=True).logprobs
    assert found is not None
    assert [(token, at.rank) for token, at in found[0].items()] == [(70, 1), (71, 1)]


def test_flat_logprobs_read_like_a_list() -> None:
    positions = [None, {3: Logprob(-0.5, 1, "a"), 4: Logprob(-1.0, None, "b")}, {5: Logprob(-2.0, 1, "c")}]
    flat = FlatLogprobs(positions)
    assert [*flat] == positions
    assert (len(flat), flat[1], flat[-1]) == (3, positions[1], positions[2])
    assert [*flat[1:]] == positions[1:]
    assert (flat.token_ids.tolist(), flat.start_indices.tolist(), flat.end_indices.tolist()) == (
        [3, 4, 5],
        [0, 0, 2],
        [0, 2, 3],
    )
    with pytest.raises(IndexError):
        flat[3]
