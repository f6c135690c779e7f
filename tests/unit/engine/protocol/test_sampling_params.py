"""Sampling parameters as programs for vLLM write them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputs


def test_none_is_the_default() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("stop", "stop_token_ids", "bad_words", "logit_bias"))
    assert SamplingParams(**nothing) == SamplingParams()
    given = SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None, seed=None, **nothing)
    assert given == SamplingParams(top_p=0.5, max_tokens=None)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    assert SamplingParams(logprobs=True, prompt_logprobs=True) == SamplingParams(logprobs=1, prompt_logprobs=1)


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], structured_outputs=StructuredOutputs(choice=["b"]))
    clone = params.clone()
    assert clone == params
    clone.stop.append("c")
    assert clone.structured_outputs is not params.structured_outputs
    assert params.stop == ["a"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"detokenize": False, "stop": "a"}, "stop must be empty if detokenize is False"),
        (
            {"spaces_between_special_tokens": False, "skip_special_tokens": False},
            "spaces_between_special_tokens must be True if skip_special_tokens is False",
        ),
        ({"thinking_token_budget": -2}, "thinking_token_budget must be at least 0, or -1"),
        ({"extra_args": {"a": 1}}, "extra_args must be empty, as no plug-in can read it"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        SamplingParams(**fields)


def test_the_engine_gets_nothing_of_the_python_api() -> None:
    params = SamplingParams(
        flat_logprobs=True,
        detokenize=False,
        spaces_between_special_tokens=False,
        truncate_prompt_tokens=3,
        thinking_token_budget=4,
        output_kind=RequestOutputKind.DELTA,
        extra_args={},
    )
    assert msgspec.json.encode(params.for_engine(7)) == b'{"seed":7}'
