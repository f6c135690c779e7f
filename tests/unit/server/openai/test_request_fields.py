"""Fields that nothing reads: a field that would change the answer is refused by name, hints and labels are not."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from tests.fakes import fake_core
from tests.fakes.api_server import Server, run_server
from tests.fakes.client_bodies import BODIES, CLAUDE_CODE, CODEX, LITELLM, OPEN_WEBUI, OPENAI_AGENTS, SCHEMA
from tests.unit.server.openai.test_chat import talking  # noqa: F401

USER: Any = [{"role": "user", "content": "hi"}]
SAID: Any = {"role": "assistant", "content": "hi"}
TEXT: Any = {"type": "text", "text": "hi"}
TOOL: Any = {"type": "function", "function": {"name": "f"}}
WEB_SEARCH: Any = {"type": "web_search", "external_web_access": False}


@pytest.fixture
def roomy(talking: EngineConfig) -> EngineConfig:  # noqa: F811
    """Room for the tokens that Claude Code asks for."""
    return replace(talking, model=replace(talking.model, max_model_len=65_536))


@pytest.fixture
async def server(roomy: EngineConfig) -> AsyncIterator[Server]:
    async with run_server(roomy) as running:
        yield running


async def answer(server: Server, route: str, body: dict[str, Any]) -> str:
    response = await server.http.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    return response.text


async def refusal(server: Server, route: str, body: dict[str, Any]) -> tuple[str | None, str]:
    response = await server.http.post(f"/v1/{route}", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error.get("param"), error["message"]


@pytest.mark.parametrize("client", BODIES)
async def test_bodies_as_clients_send_them(server: Server, client: str) -> None:
    route, body = BODIES[client]
    assert '"error":{' not in await answer(server, route, body)


IGNORED: dict[str, set[str]] = {
    "Claude Code": {"betas", "output_config.effort", "speed", "thinking.display"},
    "Codex": {
        *("client_metadata", "input[].end_turn", "reasoning.effort", "service_tier", "text.verbosity"),
        "tools[].type=web_search",
    },
    "litellm": {
        *("messages[].annotations", "messages[].cache_control", "messages[].status"),
        *("messages[].provider_specific_fields", "messages[].thinking_blocks"),
        *("messages[].tool_calls[].function.provider_specific_fields", "messages[].tool_calls[].index"),
        *("messages[].tool_calls[].provider_specific_fields", "reasoning_effort", "service_tier"),
        *("store", "verbosity", "messages[].content[].cache_control", "tools[].cache_control"),
        "tools[].function.cache_control",
    },
    "Open WebUI": {
        *("keep_alive", "mirostat_eta", "mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread"),
        *("reasoning_effort", "use_mlock", "use_mmap"),
    },
    "OpenAI Agents": {
        *("messages[].extra_content", "messages[].parsed", "prompt_cache_retention"),
    },
}


@pytest.mark.parametrize("client", BODIES)
async def test_each_ignored_field_is_logged_once(server: Server, client: str, caplog: pytest.LogCaptureFixture) -> None:
    route, body = BODIES[client]
    with caplog.at_level(logging.INFO, "quire.server.text.input_processor"):
        for _ in range(2):
            await answer(server, route, body)
    lines = [record.getMessage() for record in caplog.records if "has no effect" in record.msg]
    assert sorted(line.split()[2] for line in lines) == sorted(IGNORED[client])


async def test_fields_of_a_large_body_are_logged_too(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Another process reads it."""
    long = {**OPEN_WEBUI, "chat_id": "x" * 2**17}
    with caplog.at_level(logging.INFO, "quire.server.text.input_processor"):
        for _ in range(2):
            await answer(server, "chat/completions", long)
    assert sum("field chat_id has no effect" in record.getMessage() for record in caplog.records) == 1


async def test_names_that_clients_choose_do_not_fill_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    many = {f"x{number}\n": 1 for number in range(500)}
    with caplog.at_level(logging.INFO, "quire.server.text.input_processor"):
        await answer(server, "chat/completions", {"messages": [{**USER[0], **many, "y" * 5000: 1}]})
    lines = [record.getMessage() for record in caplog.records if "has no effect" in record.msg]
    assert len(lines) == 256
    assert max(map(len, lines)) < 250
    assert not any("\n" in line for line in lines)


async def test_what_is_ignored_does_not_reach_the_template(roomy: EngineConfig) -> None:
    shown = "{{ messages[-1] | tojson }}{{ tools | tojson }}"
    async with run_server(roomy, chat_template=shown, tool_call_parser="hermes") as server:
        for call in ({"index": 3}, {}):
            past = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **call}, **call}
            message = {"role": "assistant", "tool_calls": [past], "parsed": call or None, "mood": call or None}
            function = {"x": call or None, "strict": None, "description": None, "parameters": {}, "name": "f"}
            tool = {"type": "function", "function": function, "cache_control": call or None}
            body = {"messages": [message], "tools": [tool], "tool_choice": "none"}
            text = json.loads(await answer(server, "chat/completions", body))["choices"][0]["message"]["content"]
            assert json.loads(text.replace("}[", "},[").join("[]")) == [
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "id": "c", "function": {"name": "f", "arguments": {}}}],
                },
                [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            ]
            assert list(json.loads(text.replace("}[", "},[").join("[]"))[1][0]["function"]) == ["name", "parameters"]


async def test_the_old_form_of_a_call_reaches_the_template(roomy: EngineConfig) -> None:
    shown = "{% for m in messages %}{{ m.role }} {{ m.tool_calls[0].function | tojson if m.tool_calls }};{% endfor %}"
    async with run_server(roomy, chat_template=shown) as server:
        for more in ({}, {"tool_calls": [{"type": None, "function": {"name": "g", "arguments": None}}]}):
            past = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}, **more}
            body = {"messages": [past, {"role": "function", "name": "f", "content": "1"}]}
            text = json.loads(await answer(server, "chat/completions", body))["choices"][0]["message"]["content"]
            call: dict[str, Any] = {"name": "g" if more else "f", "arguments": {}}
            assert text == f"assistant {json.dumps(call)};tool ;"


async def test_a_role_of_its_own_is_one_that_the_template_names(roomy: EngineConfig) -> None:
    messages = [*USER, {"role": "critic", "content": "no"}]
    for named in ("'critic'", '"critic"', "'critics'"):
        template = f"{{% for m in messages %}}{{{{ m.role }}}}{{{{ m.role == {named} }}}};{{% endfor %}}"
        async with run_server(roomy, chat_template=template) as server:
            if named == "'critics'":
                param, said = await refusal(server, "chat/completions", {"messages": messages})
                assert param == "messages[1].role"
                assert "got 'critic'" in said
                continue
            body = json.loads(await answer(server, "chat/completions", {"messages": messages}))
            assert body["choices"][0]["message"]["content"] == "userFalse;criticTrue;"


async def test_the_most_calls_of_a_response(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_core, "MAX_MODEL_LEN", 500)
    call = '<tool_call>{"name":"g","arguments":{}}</tool_call>'
    for most, count in ((None, 3), (1, 1), (2, 2), (5, 3)):
        body = {"input": call * 3, "tools": [{"type": "function", "name": "g"}], "max_tool_calls": most}
        found = json.loads(await answer(server, "responses", body))
        assert [item["type"] for item in found["output"]] == ["function_call"] * count
        assert found["max_tool_calls"] == most


NULLS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "x", "structured_outputs": {"regex": "a", "choice": None, "foo": None}}),
    ("completions", {"prompt": "x", "stream": True, "stream_options": {"include_usage": None}}),
    ("completions", {"prompt": "x", "stream_options": None, "response_format": {"type": "text", "foo": None}}),
    ("chat/completions", {"messages": [{**USER[0], "foo": None}], "stream": True,
                          "stream_options": {"include_usage": True, "foo": None}}),
    ("responses", {"input": [{**USER[0], "foo": None}], "text": {"format": {"type": "text", "foo": None}},
                   "reasoning": {"foo": None}}),
    ("messages", {"model": "echo", "max_tokens": 5, "messages": [{**USER[0], "foo": None}],
                  "thinking": {"type": "adaptive", "foo": None}, "output_config": {"foo": None},
                  "tools": [{"name": "f", "input_schema": SCHEMA, "foo": None}],
                  "tool_choice": {"type": "auto", "foo": None}}),
]  # fmt: skip


async def test_null_is_nothing(server: Server) -> None:
    for route, body in NULLS:
        await answer(server, route, {**body, "foo": None})
    for path, body in (
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": USER}),
        ("/detokenize", {"tokens": [70]}),
    ):
        response = await server.http.post(path, json={**body, "foo": None})
        assert response.status_code == 200, response.text


async def test_what_would_change_the_answer_is_refused_by_name(server: Server) -> None:
    chat: Any = {"messages": USER}
    for route, body, param in (
        ("chat/completions", {**chat, "no_such_thing": 1}, "no_such_thing"),
        ("chat/completions", {**chat, "web_search_options": {}}, "web_search_options"),
        ("chat/completions", {**chat, "modalities": ["text", "audio"]}, "modalities"),
        ("chat/completions", {**chat, "response_format": {"type": "text", "foo": 1}}, "response_format.foo"),
        ("chat/completions", {"messages": [*USER, {**SAID, "prefix": True}]}, "messages[1].prefix"),
        ("chat/completions", {"messages": [*USER, {**SAID, "partial": True}]}, "messages[1].partial"),
        ("chat/completions", {"messages": [{**SAID, "audio": {"id": "audio_1"}}]}, "messages[0].audio"),
        ("chat/completions", {"messages": [{**USER[0], "images": ["iVBOR"]}]}, "messages[0].images"),
        ("responses", {"input": "hi", "context_management": [{"type": "compaction"}]}, "context_management"),
        ("responses", {"input": "hi", "text": {"foo": 1}}, "text.foo"),
        ("responses", {"input": "hi", "include": ["foo"]}, "include"),
        ("responses", {"input": "hi", "prompt": {"id": "p"}}, "prompt"),
        ("responses", {"input": "hi", "tools": [WEB_SEARCH], "tool_choice": "required"}, "tool_choice"),
        ("responses", {"input": "hi", "tools": [WEB_SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ("responses", {"input": "hi", "tools": [{"type": "custom"}]}, "tools[0].name"),
        ("responses", {"input": "hi", "max_tool_calls": 0}, "max_tool_calls"),
    ):
        assert (await refusal(server, route, body))[0] == param
    message: Any = {"model": "echo", "max_tokens": 5, "messages": USER}
    thinking = {"type": "adaptive", "foo": 1}
    for name, value, param in (("container", "c", "container"), ("thinking", thinking, "thinking.foo")):
        assert f"{param} is not" in (await refusal(server, "messages", {**message, name: value}))[1]


async def test_strict_parameters_refuse_hints_too(roomy: EngineConfig) -> None:
    async with run_server(roomy, strict_parameters=True) as server:
        chat: Any = {"messages": USER}
        for route, body, param in (
            ("chat/completions", {**chat, "verbosity": "low"}, "verbosity"),
            ("chat/completions", {**chat, "store": True}, "store"),
            ("chat/completions", {**chat, "reasoning_effort": "low"}, "reasoning_effort"),
            ("chat/completions", {"messages": [*USER, {**USER[0], "mood": "bad"}]}, "messages[1].mood"),
            ("responses", {"input": "hi", "text": {"verbosity": "low"}}, "text.verbosity"),
            ("responses", {"input": "hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
            ("responses", {"input": [*USER, {**USER[0], "mood": "bad"}], "instructions": "x"}, "input[1].mood"),
            ("responses", {"input": "hi", "tools": [WEB_SEARCH]}, "tools[0].type=web_search"),
            ("chat/completions", {**chat, "tools": [WEB_SEARCH]}, "tools[0].type=web_search"),
            ("completions", {"prompt": "x", "think": True}, "think"),
            ("chat/completions", {**chat, "tools": [{**TOOL, "id": 1}]}, "tools[0].id"),
            (
                "chat/completions",
                {**chat, "tools": [{**TOOL, "function": {"name": "f", "x": 1}}]},
                "tools[0].function.x",
            ),
            (
                "chat/completions",
                {"messages": [{**USER[0], "content": [{**TEXT, "cache_control": {}}]}]},
                "messages[0].content[0].cache_control",
            ),
            ("embeddings", {"input": "x"}, "model"),
        ):
            assert (await refusal(server, route, body))[0] == param
        _, said = await refusal(server, "messages", {**CLAUDE_CODE, "stream": False})
        assert "is not supported, and --strict-parameters is set" in said
        for body in (LITELLM, OPENAI_AGENTS, {**OPEN_WEBUI, "chat_id": "x" * 2**17}):
            _, said = await refusal(server, "chat/completions", body)
            assert "--strict-parameters" in said
        assert "--strict-parameters" in (await refusal(server, "responses", CODEX))[1]
        await answer(server, "chat/completions", {**chat, "store": False, "user": "u", "verbosity": "medium"})
