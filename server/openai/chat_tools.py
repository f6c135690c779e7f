"""The tools of `/v1/chat/completions`, as functions: a custom tool becomes a function of one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.request_model import MessagePart, RequestModel, variant
from quire.server.openai.custom_tools import custom_function
from quire.server.parsers.input_grammar import InputGrammar


class _Function(MessagePart):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ChatFunctionTool(MessagePart):
    function: _Function


class _Grammar(RequestModel):
    syntax: Literal["lark", "regex"]
    definition: str


class _Format(RequestModel):
    type: Literal["text", "grammar"]
    grammar: _Grammar | None = None


class _Custom(MessagePart):
    name: str
    description: str | None = None
    format: _Format | None = None


class _ChatCustomTool(MessagePart):
    custom: _Custom


_TOOLS: Mapping[str, type[_ChatFunctionTool | _ChatCustomTool]] = {
    "function": _ChatFunctionTool,
    "custom": _ChatCustomTool,
}


class ChatTools:
    """The tools of a request, as functions."""

    def __init__(self, given: Sequence[dict[str, Any]], ignored: set[str]) -> None:
        """Adds to `ignored` the tools and fields that have no effect; raises `InvalidParameter`."""
        self.functions: list[dict[str, Any]] = []
        self.params: list[str] = []
        """Their names in the request, for error messages."""
        self.grammars: dict[str, InputGrammar] = {}
        """The grammars of custom tools, by name."""
        self.custom: set[str] = set()
        """The names of custom tools."""
        for at, tool in enumerate(given):
            kind = tool.get("type")
            if isinstance(kind, str) and kind not in _TOOLS:  # OpenAI's servers run it; the model can do without it
                ignored.add(f"tools[{at}].type={kind}")
                continue
            read = variant(_TOOLS, tool, f"tools[{at}]", ignored)
            self.params.append(f"tools[{at}].{kind}")
            if isinstance(read, _ChatCustomTool):
                tool = self._function(read.custom, f"tools[{at}].custom")
            self.functions.append(tool)

    def choice(self, choice: Any) -> str | dict[str, Any] | None:
        """Convert the request's `tool_choice` to one that has only functions; raises `InvalidParameter`."""
        match choice:
            case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}:
                allowed = {"mode": mode, "tools": [*map(self._chosen, tools)]}
                return {"type": "allowed_tools", "allowed_tools": allowed}
        chosen: str | dict[str, Any] | None = self._chosen(choice)
        return chosen

    def _function(self, tool: _Custom, param: str) -> dict[str, Any]:
        format = tool.format or _Format(type="text")
        if (format.type == "grammar") != (format.grammar is not None):
            problem = "is missing" if format.grammar is None else "requires type grammar"
            raise InvalidParameter(f"{param}.format.grammar {problem}", f"{param}.format.grammar")
        given = format.grammar
        fields, grammar = custom_function(
            tool.description,
            None if given is None else given.syntax,
            "" if given is None else given.definition,
            f"{param}.format.grammar.definition",
        )
        self.custom.add(tool.name)
        if grammar is not None:
            self.grammars[tool.name] = grammar
        return {"type": "function", "function": {"name": tool.name, **fields}}

    def _chosen(self, one: Any) -> Any:
        match one:
            case {"type": "custom", "custom": {"name": str(name)}}:
                is_known, one = name in self.custom, {"type": "function", "function": {"name": name}}
            case {"type": "function", "function": {"name": str(name)}}:
                is_known = name not in self.custom
            case _:
                return one
        if not is_known:
            raise InvalidParameter(f"tool_choice names {name!r}, which is not one of the tools", "tool_choice")
        return one
