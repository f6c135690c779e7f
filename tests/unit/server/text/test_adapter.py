"""The first token of a prompt that an adapter changes."""

from __future__ import annotations

import pytest

from quire.engine.protocol.adapters import AdapterRef
from quire.server.text.adapter import RequestAdapter


@pytest.mark.parametrize(
    ("invocation", "prompt", "start"),
    [
        ((), [1, 2], 0),
        ((5,), [1, 5, 5, 2], 2),
        ((5, 5), [1, 5, 5, 5, 2], 2),
        ((5, 6), [5, 6, 1, 5, 6], 3),
        ((5, 6), [6, 5], None),
        ((5, 6), [], None),
        ((5, 6, 7), [5, 6], None),
        ((0, 1), [0, 0, 1], 1),
        ((256,), [1, 65536, 2], None),  # its bytes are there, but are no token
        ((0, 256), [0, 65536, 0, 256, 65536], 2),
        ((2**40,), [2**40, 2**32], 0),
    ],
)
def test_an_invocation_is_the_last_one_of_the_prompt(
    invocation: tuple[int, ...], prompt: list[int], start: int | None
) -> None:
    assert RequestAdapter("a", AdapterRef(b"", ()), "", 4, invocation).start(prompt) == start
