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
NAMES = frozenset(tool.name for tool in TOOLS)

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
}
"""get_weather in Bonn, and now, in every format."""


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
