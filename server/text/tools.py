"""A request's tool options: the tools that the model may or must call, and the number of calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.engine.protocol.errors import InvalidParameter
from quire.server.parsers.input_grammar import InputGrammar
from quire.server.parsers.tool_grammar import GrammarTool
from quire.server.text.conversation import CHAT_NAMES, ParamNames

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ONE = '{"type": "function", "function": {"name": …}} or {"type": "custom", "custom": {"name": …}}'
_CHOICES = f'"none", "auto", "required", {_ONE.replace(" or", ",")} or {{"type": "allowed_tools", …}}'


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The model may call `tools`; `required`: it must call one."""

    tools: tuple[GrammarTool, ...]
    required: bool = False
    max_calls: int | None = None
    """Further calls are dropped."""
    is_subset: bool = False
    """The prompt shows tools that may not be called."""

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar must constrain the model."""
        return self.required or self.is_subset or any(tool.strict for tool in self.tools)


def read_tool_use(
    tools: Sequence[Any],
    choice: str | Mapping[str, Any] | None,
    max_calls: int | None = None,
    names: ParamNames = CHAT_NAMES,
    params: Sequence[str] = (),
    grammars: Mapping[str, InputGrammar] | None = None,
) -> ToolUse | None:
    """Parse a request's `tools` and `tool_choice`; returns None if no tool may be called. `max_calls`: see `ToolUse`.
    `params` are the names of the tools for error messages, `grammars` the grammars of custom tools by name.

    Raises `InvalidParameter` that describes the error.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter(f"tools: at most {MAX_TOOLS} are allowed, got {len(tools)}", "tools")
    params = params or [f"tools[{at}]" for at in range(len(tools))]
    known = [_tool(tool, param, names) for tool, param in zip(tools, params, strict=True)]
    known = [replace(tool, grammar=grammars.get(tool.name)) for tool in known] if grammars else known
    known_names = [tool.name for tool in known]
    if twice := next((name for at, name in enumerate(known_names) if name in known_names[:at]), None):
        raise InvalidParameter(f"tools: duplicate function name {twice}", "tools")
    if not tools and choice not in (None, "none", "auto"):
        raise InvalidParameter("tool_choice requires tools", "tool_choice")
    match choice:
        case None | "auto" | "required":
            return ToolUse(tools=tuple(known), required=choice == "required", max_calls=max_calls) if tools else None
        case "none":
            return None
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolUse(tools=(_named(known, name),), required=True, max_calls=1)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}}:
            chosen = tuple(_allowed(known, one) for one in allowed)
            if not chosen:
                raise InvalidParameter("tool_choice: allowed_tools names no tool", "tool_choice")
            return ToolUse(tools=chosen, required=mode == "required", max_calls=max_calls, is_subset=True)
    raise InvalidParameter(f"tool_choice must be {_CHOICES}", "tool_choice")


def _allowed(tools: Sequence[GrammarTool], one: Any) -> GrammarTool:
    match one:
        case {"type": "function", "function": {"name": str(name)}}:
            return _named(tools, name)
    raise InvalidParameter(f"tool_choice: each of allowed_tools must be {_ONE}", "tool_choice")


def _named(tools: Sequence[GrammarTool], name: str) -> GrammarTool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidParameter(f"tool_choice names {name!r}, which is not one of the tools", "tool_choice")


def _tool(tool: Any, param: str, names: ParamNames) -> GrammarTool:
    match tool:
        case {"type": "function", "function": {"name": str(name)} as function}:
            pass
        case {"type": "function"}:
            raise InvalidParameter(f"{param}.function must be an object with a name", f"{param}.function")
        case {"type": str(kind)}:
            raise InvalidParameter(
                f"{param}.type: tools of type {kind} are not supported, only function", f"{param}.type"
            )
        case _:
            raise InvalidParameter(f'{param} must be {{"type": "function", "function": {{"name": …}}}}', param)
    of_function = f"{param}{names.function}"
    if not _NAME.fullmatch(name):
        raise InvalidParameter(
            f"{of_function}.name must be 1 to 64 letters, digits, underscores, dashes or dots, got {name!r}",
            f"{of_function}.name",
        )
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidParameter(f"{of_function}.strict must be true or false", f"{of_function}.strict")
    schema = _schema(function.get("parameters"), f"{param}{names.function_parameters}")
    return GrammarTool(name, schema, bool(strict))


def _schema(schema: Any, param: str) -> dict[str, Any]:
    """Return the schema of a function's arguments, which must be an object; default: one without properties."""
    match schema:
        case None:
            return _NO_ARGUMENTS
        case {"type": kind} if kind != "object":
            raise InvalidParameter(f"{param} must be a schema of type object, not {kind!r}", param)
        case {"properties": properties} if not isinstance(properties, dict):
            raise InvalidParameter(f"{param}.properties must be an object", f"{param}.properties")
        case {"required": required} if not (isinstance(required, list) and all(isinstance(k, str) for k in required)):
            raise InvalidParameter(f"{param}.required must be a list of names", f"{param}.required")
        case dict():
            return schema
    raise InvalidParameter(f"{param} must be a JSON schema, an object", param)
