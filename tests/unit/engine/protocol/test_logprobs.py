"""Log-probabilities of a prompt, cut and put together."""

from __future__ import annotations

import pytest

from quire.engine.protocol.logprobs import PromptLogprobs
from tests.fakes.outputs import prompt_logprobs


def scores(num_rows: int, num_top: int) -> PromptLogprobs:
    """Rows whose values are all different."""
    rows = [
        (-1.0 - row, 1 + row, [10 * row + top for top in range(num_top)], [-0.5 * row - top for top in range(num_top)])
        for row in range(num_rows)
    ]
    return prompt_logprobs(rows, num_top)


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_rows_are_cut_with_their_most_likely_tokens(num_top: int) -> None:
    whole = scores(4, num_top)
    for count in range(5):
        rest = whole.after(count)
        assert rest.rows() == whole.rows()[count:]
        first = scores(count, num_top)
        first.extend(rest)
        assert first == whole
