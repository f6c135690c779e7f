"""Calls as each format writes them."""

from __future__ import annotations

from typing import Any

from quire.server.parsers.events import Content, Event, Reasoning, ToolCall
from quire.server.parsers.tool_grammar import GrammarTool

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city"],
    "additionalProperties": False,
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (GrammarTool("get_weather", CITY, strict=True), GrammarTool("now", EMPTY, strict=True))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
"""The functions of TOOLS."""

TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Bonn"}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bonn"}}, {"name": "now", "arguments": {}}]',
    "mistral_args": '[TOOL_CALLS]get_weather[ARGS]{"city": "Bonn"}[TOOL_CALLS]now[ARGS]{}',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Bonn"}}, '
    '{"name": "now", "arguments": {}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Bonn"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Bonn"}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "pythonic": '[get_weather(city="Bonn"), now()]',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>\n"
    "<tool_call>now\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bonn</arg_value></tool_call>"
    "<tool_call>now</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Bonn"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Bonn</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Bonn</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Bonn</parameter>\n'
    '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Bonn</parameter>\n</function>\n"
    "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "step3": "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="get_weather">\n<steptml:parameter name="city">Bonn</steptml:parameter>\n</steptml:invoke>'
    '<｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">\n</steptml:invoke>'
    "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
    "hy_v3": "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
    "</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
    "hunyuan_a13b": '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Bonn"}}, '
    '{"name": "now", "arguments": {}}]</tool_calls>',
    "nemotron_json": '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Bonn"}}, '
    '{"name": "now", "arguments": {}}]</TOOLCALL>',
    "phi4_mini_json": 'functools[{"name": "get_weather", "arguments": {"city": "Bonn"}}, '
    '{"name": "now", "arguments": {}}]',
    "internlm": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Bonn"}}\n<|action_end|>\n'
    '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}\n<|action_end|>',
    "lfm2": '<|tool_call_start|>[get_weather(city="Bonn"), now()]<|tool_call_end|>',
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Bonn<escape>}<end_function_call>"
    "<start_function_call>call:now{}<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Bonn<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "olmo3": '<function_calls>\nget_weather(city="Bonn")\nnow()\n</function_calls>',
}
"""get_weather in Bonn, and now, in every format."""


def cut(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({at % (len(text) + 1) for at in cuts})
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def joined(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and the name and arguments of each call; the pieces of calls must be in order."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCall):
            if event.id is not None:
                assert event.name is not None
                calls.append((event.name, ""))
            assert event.index == len(calls) - 1
            assert event.id or not event.name
            calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    return content, reasoning, calls
