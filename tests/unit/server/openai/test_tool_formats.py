"""Calls through OpenAI's SDK and back: a model that says its prompt, whose template writes calls as real ones do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig
from tests.fakes import fake_core
from tests.fakes.api_server import run_server
from tests.fakes.tokenizers import write_model
from tests.unit.server.parsers.test_transcripts import SCHEMAS

TEMPLATES = {
    "qwen3_coder": """'<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments|items %}{{- '<parameter=' + key + '>\\n' + text(value) + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}""",
    "glm47": """'<tool_call>' + call.name }}{% for key, value in call.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ text(value) }}</arg_value>{%- endfor %}{{- '</tool_call>' }}""",
    "kimi_k2": """'<|tool_calls_section_begin|><|tool_call_begin|>' + tool_call.id + '<|tool_call_argument_begin|>'
+ call.arguments|tojson + '<|tool_call_end|><|tool_calls_section_end|>' }}""",
    "deepseek_v32": """'<｜DSML｜function_calls>\\n<｜DSML｜invoke name="' + call.name + '">\\n' }}
{%- for key, value in call.arguments.items() %}{{- '<｜DSML｜parameter name="' + key + '" string="'
+ ('true' if value is string else 'false') + '">' + text(value) + '</｜DSML｜parameter>\\n' }}{%- endfor %}
{{- '</｜DSML｜invoke>\\n</｜DSML｜function_calls>' }}""",
    "minimax_m2": """'\\n<minimax:tool_call>\\n<invoke name="' + call.name + '">\\n' }}
{%- for key, value in call.arguments|items %}{{- '<parameter name="' + key + '">' + text(value) + '</parameter>\\n' }}
{%- endfor %}{{- '</invoke>\\n</minimax:tool_call>' }}""",
    "seed_oss": """'\\n<seed:tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments|items %}{{- '<parameter=' + key + '>' + text(value) + '</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</seed:tool_call>' }}""",
    "functiongemma": """'<start_function_call>call:' + call.name + '{' }}{% for key, value in call.arguments|dictsort %}
{{- key }}:{{ gemma(value, '<escape>') }}{{ ',' if not loop.last }}{% endfor %}{{- '}<end_function_call>' }}""",
    "gemma4": """'<|tool_call>call:' + call.name + '{' }}{% for key, value in call.arguments|dictsort %}
{{- key }}:{{ gemma(value, '<|"|>') }}{{ ',' if not loop.last }}{% endfor %}{{- '}<tool_call|>' }}""",
    "openai": """'<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>'
+ call.arguments|tojson + '<|call|>' }}""",
}
CALLS = {
    "get_weather": {"city": "Köln", "unit": "c"},
    "search": {"query": 'a <b>\n\n  "c"', "tags": ["d", {"e": None}], "exact": True, "limit": 2.5},
}


GEMMA = """{%- macro gemma(value, quote) %}{% if value is string %}{{ quote + value + quote }}
{%- elif value is mapping %}{{- '{' }}{% for key, each in value|dictsort %}{{ key }}:{{ gemma(each, quote) }}
{{- ',' if not loop.last }}{% endfor %}{{- '}' }}
{%- elif value is sequence %}{{- '[' }}{% for each in value %}{{ gemma(each, quote) }}{{ ',' if not loop.last }}
{%- endfor %}{{- ']' }}{% else %}{{ value|tojson }}{% endif %}{% endmacro %}"""


def template(format: str) -> str:
    """One that writes the calls of the last message, or else its text."""
    return (
        f"{GEMMA if 'gemma' in format else ''}"
        "{%- macro text(value) %}{{ value if value is string else value|tojson }}{% endmacro %}"
        "{%- if tools %}{% endif %}"
        "{%- for tool_call in messages[-1].tool_calls %}{% set call = tool_call.function %}{{- "
        f"{TEMPLATES[format]}{{%- endfor %}}{{{{ messages[-1].content }}}}"
    )


@pytest.mark.parametrize("format", TEMPLATES)
async def test_calls_go_through_the_sdk_and_back(
    format: str, config: EngineConfig, core_mode: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_core, "MAX_MODEL_LEN", 2048)
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template(format))
    config = replace(config, model=replace(config.model, path=tmp_path, tokenizer=tmp_path, max_model_len=2048))
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}
        for name, schema in SCHEMAS.items()
    ]
    async with run_server(config) as server:
        for at, (name, arguments) in enumerate(CALLS.items()):
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"id": f"functions.{name}:{at}", "type": "function", "function": function}
            messages: Any = [{"role": "assistant", "content": "", "tool_calls": [call]}]
            answer = await server.openai.chat.completions.create(model="echo", messages=messages, tools=tools)
            said = answer.choices[0].message
            assert said.tool_calls
            (one,) = said.tool_calls
            assert one.type == "function"
            assert (one.function.name, json.loads(one.function.arguments)) == (name, arguments)
            assert not said.content
            assert format != "kimi_k2" or one.id == call["id"]
            streamed = ""
            async for chunk in await server.openai.chat.completions.create(
                model="echo", messages=messages, tools=tools, stream=True
            ):
                for delta in chunk.choices[0].delta.tool_calls or ():
                    assert delta.function is not None
                    streamed += delta.function.arguments or ""
            assert json.loads(streamed) == arguments


async def test_a_required_call_that_is_cut_in_its_header_leaves_no_content(
    config: EngineConfig, core_mode: Callable[[str], None], tmp_path: Path
) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template("qwen3_coder"))
    config = replace(config, model=replace(config.model, path=tmp_path, tokenizer=tmp_path))
    parameters: Any = {"type": "object", "properties": {}}
    tools: Any = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    header = "<tool_call>\n<function=no"
    choices: Any = (("required", None), ("auto", header))
    async with run_server(config) as server:
        for choice, content in choices:
            answer = await server.openai.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": header}], tools=tools, tool_choice=choice
            )
            assert (answer.choices[0].message.content or None, answer.choices[0].message.tool_calls) == (content, None)
