"""The registry: names for the flags, and the formats that chat templates show."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from quire.server.config.server_options import ServerOptions
from quire.server.parsers.reasoning import REASONING_FORMATS
from quire.server.parsers.tool_formats import TOOL_FORMATS, detect_tools
from quire.server.text.chat_formats import ChatFormats

# As templates write calls into a conversation, or ask for them.
TEMPLATES = [
    ("hermes", """'<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- '}\\n</tool_call>' }}"""),
    ("hermes", "a json object within <tool_call></tool_call> tags: {'name': <name>, 'arguments': <args>}"),
    ("qwen3_coder", "<tool_call>\\n<function=one>\\n<parameter=two>\\n3\\n</parameter>\\n</function> arguments"),
    ("llama3_json", """{{- '<|start_header_id|>' }}{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}"""),
    ("pythonic", """{{- "<|start_header_id|>" }}{{- 'Respond as [func_name1(name1=value1...)] "parameters": ' }}"""),
    ("mistral", '{{- "[TOOL_CALLS] [" }}{%- set out = tool_call.function|tojson %}'),
    ("mistral_args", "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}"),
    ("deepseek_v3", "'<｜tool▁calls▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>FUNCTION_NAME\\n"),
    ("deepseek_v31", "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['name'] + '<｜tool▁sep｜>' + arguments"),
    ("granite", "When a tool is required, answer with <|tool_call|> and a JSON list. '<|start_of_role|>assistant'"),
    ("seed_oss", "<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>value_1"),
    ("minimax_m2", "{%- set toolcall_begin_token = '<minimax:tool_call>' -%} '<invoke name=\"' + tool_call.name"),
    ("glm45", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>"),
    ("glm47", "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"),
    ("deepseek_v32", "{%- set dsml_token = '｜DSML｜' -%} writing a \"<{{ dsml_token }}function_calls>\" block"),
    ("deepseek_v4", "{%- set dsml_token = '｜DSML｜' -%} writing a \"<{{ dsml_token }}tool_calls>\" block"),
    ("step3", "'<｜tool_calls_begin｜>' + '<｜tool_sep｜><steptml:invoke name=\"' + tool_call.name"),
    ("hy_v3", "<tool_calls>\n<tool_call>{function-name}<tool_sep>\n<arg_key>{arg-key-1}</arg_key>"),
    ("kimi_k2", "<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>"),
    ("kimi_k2", "{{ '<|im_system|>tool_declare<|im_middle|>' -}}{{- tools | tojson -}}"),
    ("hunyuan_a13b", "<tool_calls>[{\"name\": \"tool_name\", \"arguments\": {}}]</tool_calls>"),
    ("nemotron_json", "<TOOLCALL>[{\"name\": \"tool_name1\", \"arguments\": \"tool_args1\"}]</TOOLCALL>"),
    ("internlm", "'<|action_start|><|plugin|>\n' + tool_call"),
    ("lfm2", "<|tool_call_start|>["),
    ("olmo3", "'<function_calls>' + tool_call"),
    ("phi4_mini_json", "'|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>'"),
    ("functiongemma", "{{- '<start_function_call>call:' + function['name'] + '{' -}}"),
    ("gemma4", """{{- '<|"|>' + argument + '<|"|>' -}}{{- '<|tool_call>call:' + function['name'] + '{' -}}"""),
    ("openai", "{{- '<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json<|message|>' }}"),
    (None, "{% for message in messages %}<|im_start|>{{ message.role }}\\n{{ message.content }}{% endfor %}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_the_template_shows_the_format(name: str | None, template: str) -> None:
    assert detect_tools(template) == name


def test_flags_name_every_format() -> None:
    hints = get_type_hints(ServerOptions)
    assert set(get_args(hints["tool_call_parser"])) == {"auto", "none", *TOOL_FORMATS}
    assert set(get_args(hints["reasoning_parser"])) == {"auto", "none", *REASONING_FORMATS}


def test_a_name_goes_before_the_template_and_mistral_means_both() -> None:
    template = "'[TOOL_CALLS]' + name + '[ARGS]' </think>"
    assert ChatFormats().tool_format(template) is TOOL_FORMATS["mistral_args"]
    assert ChatFormats(tool_call_parser="mistral").tool_format(template) is TOOL_FORMATS["mistral_args"]
    assert ChatFormats(tool_call_parser="hermes").tool_format(template) is TOOL_FORMATS["hermes"]
    assert ChatFormats(tool_call_parser="none").tool_format(template) is None
    assert ChatFormats().reasoning_format(template) is REASONING_FORMATS["qwen3"]
    assert ChatFormats(reasoning_parser="none").reasoning_format(template) is None
