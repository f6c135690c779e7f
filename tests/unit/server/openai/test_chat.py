"""Tools, thoughts and the parameters of rendering in chat, with a model that repeats the last message."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import ConfigError
from quire.server.cli.main import build_parser
from quire.server.cli.serve_options import read_options
from tests.fakes.api_server import Server, run_server
from tests.fakes.tokenizers import write_model
from tests.unit.server.openai.test_completions import refused

TEMPLATE = """\
{%- if never %}<tool_call>
{"name": …, "arguments": …}
</tool_call><think></think>{% endif -%}
{%- if documents %}{{ documents[0].text }}{% endif -%}
{%- if enable_thinking is defined %}thinking {{ enable_thinking }} {% endif -%}
{%- for message in messages %}{% if loop.last or tools %}{{ message.content or message.tool_calls[0].function.arguments
}}{% endif %}{% endfor -%}
{%- if not add_generation_prompt %}.{% endif -%}
"""
CITY = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def tool(name: str, **function: Any) -> Any:
    return {"type": "function", "function": {"name": name, **function}}


def says(text: str) -> Any:
    return [{"role": "user", "content": text}]


F, G = tool("f", parameters=CITY), tool("g")
CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'


@pytest.fixture
def talking(config: EngineConfig, core_mode: Callable[[str], None], tmp_path: Path) -> EngineConfig:
    """A model folder with this template, and <tool_call> as a special token."""
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True), AddedToken("</tool_call>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    architecture = replace(config.model.architecture, vocab_size=330)
    return replace(config, model=replace(config.model, path=tmp_path, tokenizer=tmp_path, architecture=architecture))


@pytest.fixture
async def server(talking: EngineConfig) -> AsyncIterator[Server]:
    async with run_server(talking) as running:
        yield running


async def chat(server: Server, text: str, **body: Any) -> dict[str, Any]:
    """The choice of a whole answer, which a stream must also produce."""
    body = {"messages": says(text), **body}
    response = await server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    streamed = await server.http.post("/v1/chat/completions", json={**body, "stream": True})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    message: dict[str, Any] = {"content": None, "refusal": None, "reasoning": None}
    calls: list[Any] = []
    for chunk in (chunk["choices"][0] for chunk in chunks):
        delta = chunk["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    expected = choice["message"] | {"content": choice["message"]["content"] or None}
    ids = [call.pop("id") for call in expected.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert message | {"role": "assistant"} | ({"tool_calls": calls} if calls else {}) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice


async def test_a_call(server: Server) -> None:
    choice = await chat(server, CALL, tools=[F, G])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
    choice = await chat(server, f"So: {CALL}", tools=[F])
    assert (choice["message"]["content"], len(choice["message"]["tool_calls"])) == ("So:", 1)


async def test_what_is_no_call_is_content_without_special_tokens(server: Server) -> None:
    choice = await chat(server, "a<tool_call>b</tool_call>c", tools=[F])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "stop")
    choice = await chat(server, "a<tool_call>b</tool_call>c", tools=[F], skip_special_tokens=False)
    assert choice["message"]["content"] == "a<tool_call>b</tool_call>c"
    choice = await chat(server, '<tool_call>{"name":"g"}</tool_call>', tools=[F])
    assert choice["message"]["content"] == '{"name":"g"}'
    assert (await chat(server, "", tools=[F], messages=[*says("x"), *says("hi")]))["message"]["content"] == "xhi"


async def test_none_calls_nothing(server: Server) -> None:
    choice = await chat(server, CALL, tools=[F], tool_choice="none")
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == '{"name":"f","arguments":{"a":1}}'


async def test_one_call_where_several_are_not_wanted(talking: EngineConfig) -> None:
    async with run_server(talking, tool_call_parser="llama3_json") as server:
        both = '{"name":"f","parameters":{}}; {"name":"g"}'
        assert len((await chat(server, both, tools=[F, G]))["message"]["tool_calls"]) == 2
        choice = await chat(server, both, tools=[F, G], parallel_tool_calls=False)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
        assert choice["message"]["content"] is None


async def test_a_call_that_is_cut_off_keeps_its_reason(server: Server) -> None:
    length = len(server.tokenizer.encode(CALL[: CALL.index("1}}")], add_special_tokens=False))
    choice = await chat(server, CALL, tools=[F], max_tokens=length)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":'


async def test_thoughts(server: Server) -> None:
    message = (await chat(server, f"<think>\nhm\n</think>\n\n{CALL}", tools=[F]))["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hm", "hm", None)
    assert len(message["tool_calls"]) == 1
    message = (await chat(server, "hm</think>yes <think>"))["message"]  # the prompt's end opens thoughts
    assert (message["reasoning"], message["content"]) == ("hm", "yes <think>")
    message = (await chat(server, "<think>hm</think>yes", include_reasoning=False))["message"]
    assert message == {"role": "assistant", "content": "yes", "refusal": None, "reasoning": None}
    message = (await chat(server, "<think>hm"))["message"]
    assert (message["reasoning"], message["content"]) == ("hm", None)


async def test_parsers_can_be_chosen_and_turned_off(talking: EngineConfig) -> None:
    async with run_server(talking, tool_call_parser="none", reasoning_parser="none") as server:
        assert (await chat(server, "<think>hm</think>"))["message"]["content"] == "<think>hm</think>"
        error = await refused(server, "chat/completions", {"messages": says("x"), "tools": [F]})
        assert "--tool-call-parser" in error["message"]
        error = await refused(server, "chat/completions", {"messages": says("x"), "thinking_token_budget": 5})
        assert ("--reasoning-parser" in error["message"], error["param"]) == (True, "thinking_token_budget")


async def test_grammars_reach_the_engine_where_they_must(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Any = []
    send = server.frontend.client._send
    monkeypatch.setattr(server.frontend.client, "_send", lambda message, to: sent.append(message) or send(message, to))
    guide = llguidance.LLTokenizer(server.tokenizer.backend.to_str(), eos_token=2)

    async def may_say(text: str, **body: Any) -> bool | None:
        """None without a grammar."""
        await chat(server, "x", **{"tools": [F, G], **body})
        outputs = sent[-1].params.structured_outputs
        if outputs is None:
            return None
        matcher = llguidance.LLMatcher(guide, outputs.grammar)
        ids = server.tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens(ids) == len(ids)

    named = {"type": "function", "function": {"name": "g"}}
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for body, expected in (
        ({}, None),
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "required"}, (True, False, False)),
        ({"tool_choice": named}, (False, False, False)),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}},
         (False, False, True)),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}},
         (False, False, False)),
        ({"tools": [tool("f", parameters=CITY, strict=True), G]}, (True, False, True)),
    ):  # fmt: skip
        texts = (written, written.replace("1", "true"), "Hello")
        found = [await may_say(text, **body) for text in texts]
        assert found == ([None] * 3 if expected is None else list(expected)), body


ANSWER: Any = {
    "type": "object",
    "properties": {"b": {"type": "null"}},
    "required": ["b"],
    "additionalProperties": False,
}


def in_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def test_calls_or_an_answer_in_a_format(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Any = []
    send = server.frontend.client._send
    monkeypatch.setattr(server.frontend.client, "_send", lambda message, to: sent.append(message) or send(message, to))
    guide = llguidance.LLTokenizer(server.tokenizer.backend.to_str(), eos_token=2)
    lax, strict = tool("f", parameters=CITY), tool("f", parameters=CITY, strict=True)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    texts = (call, call.replace("1", "true"), '{"b": null}', '{"b": 1}', "Hello")
    for body, expected in (
        ({"tools": [strict]}, (True, False, True, False, False)),
        ({"tools": [lax]}, (True, True, True, False, False)),
        ({"tools": [lax], "response_format": {"type": "json_object"}}, (True, True, True, True, False)),
        ({"tools": [lax], "tool_choice": "required"}, (True, False, False, False, False)),
        ({"tools": [lax], "tool_choice": "none"}, None),
        ({}, None),
    ):
        body = {"response_format": in_format(ANSWER), **body}
        await chat(server, "x", **body)
        outputs = sent[-1].params.structured_outputs
        if expected is None:
            assert outputs.json["required"] == ["b"]
            continue
        for text, is_good in zip(texts, expected, strict=True):
            matcher = llguidance.LLMatcher(guide, outputs.grammar)
            ids = server.tokenizer.encode(f"<think>hm</think>{text}", add_special_tokens=False)
            assert (matcher.validate_tokens(ids) == len(ids)) == is_good, (body, text)
    for body, param in (
        ({"tools": [lax], "response_format": in_format({"not": {}})}, "response_format"),
        ({"tools": [lax], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [lax], "structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"tools": [tool("f", parameters={"not": {}}, strict=True)], "response_format": in_format(ANSWER)}, "tools"),
    ):
        error = await refused(server, "chat/completions", {"messages": says("x"), **body})
        assert error["param"] == param, error


async def test_an_error_about_the_schema_of_a_tool_names_the_tool(server: Server) -> None:
    bad = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    tools = [tool("lax", parameters=bad), F, tool("bad", parameters=bad, strict=True)]
    error = await refused(server, "chat/completions", {"messages": says("x"), "tools": tools})
    assert error["param"] == "tools"
    assert error["message"].startswith("tools: bad: the schema's uniqueItems (at /properties/a)")


async def test_an_answer_in_a_format_is_no_call(server: Server) -> None:
    choice = await chat(server, '{"b": null}', tools=[F], response_format=in_format(ANSWER))
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"b": null}', "stop")
    choice = await chat(server, CALL, tools=[F], response_format=in_format(ANSWER))
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


async def test_a_result_goes_back_to_the_model(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = await server.openai.chat.completions.create(
        model="echo",
        messages=[
            {"role": "user", "content": "ask"},
            {"role": "assistant", "content": None, "tool_calls": [call]},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": "call_1", "content": " hot"},
        ],
        tools=[F],
    )
    assert answer.choices[0].message.content == "ask{'a': 1} hot"


async def test_a_past_call_without_arguments_has_none(server: Server) -> None:
    """Templates write them as JSON, and some as text, without asking whether they are there."""
    messages = [*says("ask"), {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    assert (await chat(server, "", messages=messages))["message"]["content"] == "{}"


async def test_rendering(talking: EngineConfig) -> None:
    async with run_server(talking, trust_request_chat_template=True) as server:

        async def shows(text: str = "hi", **body: Any) -> Any:
            return (await chat(server, text, **body))["message"]["content"]

        assert await shows() == "hi"
        assert await shows(add_generation_prompt=False) == "hi."
        assert await shows("hi ", continue_final_message=True) == "hi "
        assert await shows(chat_template_kwargs={"enable_thinking": 5}) == "thinking 5 hi"
        assert await shows(chat_template_kwargs={"self": 1, "enable_thinking": 6}) == "thinking 6 hi"
        assert await shows(reasoning_effort="none") == "thinking False hi"
        assert await shows(reasoning_effort="max") == "hi"
        reads = "{{ reasoning_effort }} {{ messages[0].content }}"
        assert await shows(reasoning_effort="max", chat_template=reads) == "max hi"
        assert await shows(documents=[{"text": "doc "}]) == "doc hi"
        assert await shows(chat_template="{{ messages[0].content | upper }}") == "HI"
        assert await shows(add_special_tokens=True) == "hi"
        message = (await chat(server, "", messages=[{"role": "assistant", "content": "<think>so"}],
                              continue_final_message=True))["message"]  # fmt: skip
        assert (message["reasoning"], message["content"]) == ("<think>so", None)
        trims = "{{ messages[0].content | trim }}!"
        assert await shows("hi \n", chat_template=trims, continue_final_message=True) == "hi"


async def test_the_servers_template_variables_are_those_of_requests_without(
    talking: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = {"enable_thinking": 1, "reasoning_effort": "low", "enable_thinkin": 1, "documents_": None}
    async with run_server(talking, default_chat_template_kwargs=defaults, trust_request_chat_template=True) as server:
        for expected, body in (
            ("thinking 1 hi", {}),
            ("thinking 6 hi", {"chat_template_kwargs": {"enable_thinking": 6}}),
            ("thinking False hi", {"reasoning_effort": "none"}),
            ("low", {"chat_template": "{{ reasoning_effort }}"}),
            ("max", {"chat_template": "{{ reasoning_effort }}", "reasoning_effort": "max"}),
        ):
            assert (await chat(server, "hi", **body))["message"]["content"] == expected
    assert [record.getMessage() for record in caplog.records if "template" in record.getMessage()] == [
        "--default-chat-template-kwargs: no chat template of the model reads documents_, enable_thinkin, "
        "reasoning_effort"
    ]
    async with run_server(talking, default_chat_template_kwargs={"enable_thinking": None}) as server:
        assert (await chat(server, "hi"))["message"]["content"] == "hi"


def test_the_servers_template_variables_are_checked_before_the_model_is_loaded() -> None:
    for name, message in (("tools", "requests set"), ("bos_token", "is the tokenizer's")):
        command = ["no/model", "--default-chat-template-kwargs", json.dumps({name: []})]
        _, server = read_options(build_parser().parse_args(["serve", *command]))
        batch = build_parser().parse_args(["run-batch", *command])
        for check in (server.check, lambda parsed=batch: parsed.run(parsed)):
            with pytest.raises(ConfigError, match=f"--default-chat-template-kwargs cannot set {name}, which {message}"):
                check()


async def test_what_is_wrong_is_named(server: Server) -> None:
    for body, param in (
        ({"tools": [{"type": "custom", "custom": {"name": 5}}]}, "tools[0].custom.name"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"think": "low", "reasoning_effort": "high"}, "think"),
        ({"repeat_penalty": 1.2, "repeat_last_n": 64}, "repeat_last_n"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [F, tool("a b")]}, "tools[1].function.name"),
        ({"tools": [F, F]}, "tools"),
        ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools"),
        ({"tools": [tool("f", strict=1)]}, "tools[0].function.strict"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters={"properties": []})]}, "tools[0].function.parameters.properties"),
        ({"tools": [tool("f", parameters={"required": "a"})]}, "tools[0].function.parameters.required"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": says([{"type": "refusal", "refusal": "no"}])}, "messages[0].content[0].type"),  # type: ignore[arg-type]
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [*says("x"), {"role": "assistant"}], "continue_final_message": True}, "continue_final_message"),
    ):  # fmt: skip
        error = await refused(server, "chat/completions", {"messages": says("x"), **body})
        assert error["param"] == param, error
        assert param.split(".")[-1].split("[")[0] in error["message"]


async def test_echo_repeats_the_message_that_is_continued(server: Server) -> None:
    begun = {"messages": [*says("x"), {"role": "assistant", "content": "so "}], "continue_final_message": True}
    for echo, expected in ((True, "so so "), (False, "so ")):
        assert (await chat(server, "", **begun, echo=echo))["message"]["content"] == expected
        parts = [{"type": "text", "text": "so "}]
        listed = {**begun, "messages": [*says("x"), {"role": "assistant", "content": parts}]}
        assert (await chat(server, "", **listed, echo=echo))["message"]["content"] == expected
    assert (await chat(server, "hi", echo=True))["message"]["content"] == "hi"
    long = {"messages": [*says("y" * 2**17), {"role": "assistant", "content": "so "}]}
    body = {**long, "truncate_prompt_tokens": 20, "echo": True}
    response = await server.http.post("/v1/chat/completions", json=body)  # another process reads it
    assert response.json()["choices"][0]["message"]["content"].startswith("so ")


async def test_a_template_without_documents_refuses_them(
    config: EngineConfig, core_mode: Callable[[str], None]
) -> None:
    async with run_server(config, trust_request_chat_template=True) as server:
        for body, param in (
            ({"documents": [{"text": "x"}]}, "documents"),
            ({"tools": [F]}, "tools"),  # it shows no format
            ({"chat_template": "{% if %}"}, "chat_template"),
            ({"chat_template": "x", "continue_final_message": True}, "continue_final_message"),
        ):
            assert (await refused(server, "chat/completions", {"messages": says("x"), **body}))["param"] == param
    async with run_server(config, tool_call_parser="hermes") as server:
        error = await refused(server, "chat/completions", {"messages": says("x"), "tools": [F]})
        assert "does not support them" in error["message"]
        assert (await chat(server, "x", tools=[F], tool_choice="none"))["finish_reason"] == "stop"
