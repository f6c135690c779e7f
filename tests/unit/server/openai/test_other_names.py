"""Parameters under the names of other servers and clients, and numbers as they write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.server.openai.chat import ChatRequest
from quire.server.openai.completions import CompletionRequest
from quire.server.openai.responses_request import InputTokensRequest, ResponsesRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.validated({"messages": [{"role": "user", "content": "hi"}], **fields})


def response(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.validated({"input": "hi", **fields})


def params(**fields: Any) -> SamplingParams:
    request = chat(**fields)
    request.check_fields()
    return request.sampling_params({}, max_tokens=request.longest)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"repeat_penalty": 1.25, "num_predict": 7}, {"repetition_penalty": 1.25, "max_tokens": 7}),
        ({"num_predict": -1}, {"max_tokens": None}),
        ({"num_predict": 7, "max_tokens": None}, {"max_tokens": 7}),
        ({"num_predict": None, "max_tokens": 9}, {"max_tokens": 9}),
    ],
)
def test_ollamas_names(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = params(**fields)
    assert {name: getattr(found, name) for name in expected} == expected
    completion = CompletionRequest.validated({"prompt": "x", **fields}).params({})
    assert {name: getattr(completion, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_predict": 7, "max_tokens": 7}, "num_predict"),
        ({"repeat_penalty": 1, "repetition_penalty": 1}, "repeat_penalty"),
        ({"options": {"temperature": 0.5}}, "options.temperature"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"mirostat": 2}, "mirostat"),
        ({"tfs_z": 0.5}, "tfs_z"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
    ],
)
def test_what_has_no_counterpart_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter, match=param) as raised:
        params(**fields)
    assert raised.value.param == param


def test_what_cannot_matter_is_ignored() -> None:
    without_effect = {"mirostat": 0, "tfs_z": 1.0, "typical_p": 1, "repeat_last_n": -1}
    ignored = {
        "mirostat_tau": 5.0,
        "num_ctx": 4096,
        "num_gpu": 1,
        "use_mmap": True,
        "guided_decoding_backend": "outlines",
    }
    assert chat(**without_effect, **ignored).check_fields() == set(ignored)
    assert chat(options={**without_effect, "num_ctx": 4096}).check_fields() == {"options.num_ctx"}


@pytest.mark.parametrize(
    ("think", "thinking", "effort"), [(True, True, None), (False, False, None), ("high", None, "high")]
)
def test_think(think: Any, thinking: bool | None, effort: str | None) -> None:
    inputs = InputTokensRequest.validated({"input": "hi", "think": think})
    for found in (chat(think=think).chat_input(), response(think=think).read().chat, inputs.read().chat):
        assert (found.template.thinking, found.template.reasoning_effort) == (thinking, effort)


def test_responses_take_chats_effort() -> None:
    for fields in ({"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}):
        assert response(**fields).read().chat.template.reasoning_effort == "low"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "low", "reasoning": {"effort": "low"}}, "reasoning_effort"),
        ({"reasoning_effort": "low", "think": "low"}, "think"),
        ({"num_predict": 7, "max_output_tokens": 7}, "num_predict"),
        ({"num_predict": 0}, "num_predict"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"options": {"temperature": 0.5}}, "options.temperature"),
    ],
)
def test_responses_refuse_one_meaning_twice(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        response(**fields).read()
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"ebnf": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
        ({"format": "json"}, StructuredOutputs(json_object=True)),
        ({"format": SCHEMA}, StructuredOutputs(json=SCHEMA)),
        ({"format": json.dumps(SCHEMA)}, StructuredOutputs(json=json.dumps(SCHEMA))),
        ({"format": "", "regex": "a"}, StructuredOutputs(regex="a")),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
        ({"response_format": FORMAT}, StructuredOutputs(json=SCHEMA)),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        ({"regex": "a+", "response_format": {"type": "text"}}, StructuredOutputs(regex="a+")),
    ],
)
def test_structured_outputs(fields: dict[str, Any], expected: StructuredOutputs) -> None:
    assert params(**fields).structured_outputs == expected
    (name,) = {name for name, value in fields.items() if value} - {"response_format"} or fields
    assert chat(**fields).request_options().param_names.structured_outputs == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "regex"),
        ({"regex": "a", "response_format": FORMAT}, "response_format"),
        ({"format": "json", "response_format": FORMAT}, "response_format"),
        ({"regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": FORMAT | {"schema": SCHEMA}}, "response_format"),
        ({"response_format": FORMAT | {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_only_one_structure_is_allowed(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        params(**fields)
    assert raised.value.param == param


def test_integral_numbers_are_integers() -> None:
    found = chat(max_tokens=16.0, top_k=40.0, seed=-1e3, n=2.0)
    assert [found.max_tokens, found.top_k, found.seed, found.n] == [16, 40, -1000, 2]
    assert all(type(value) is int for value in (found.max_tokens, found.top_k, found.seed, found.n))
    for wrong in (16.5, "16", True, 1e300):
        with pytest.raises(RequestValidationError):
            chat(max_tokens=wrong)
