"""The tools of the Messages API: functions, and those that Anthropic defines.

Clients run some of the latter, which become functions with the input that Anthropic's documentation gives:
https://platform.claude.com/docs/en/agents-and-tools/tool-use/bash-tool, …/text-editor-tool and …/memory-tool. Anthropic
runs others. Those are ignored, as their like is in all APIs: they are offers to the model, which can do without. Tools
for a computer or a browser are refused: clients run them, too, but their results are images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.request_model import LABEL, ExtraField, MessagePart, RequestModel, rejected

_HOSTED_TOOLS = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool_(bm25|regex)|advisor)(_[0-9]{8})?|mcp_toolset"
)
"""Types of tools that Anthropic runs."""


class MessageTool(MessagePart):
    """A function that the model may call, or a tool that Anthropic defines. Clients' own (bash, text editor, memory)
    become functions; hosted ones, such as `web_search_20250305`, are ignored.
    """

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "cache_control": LABEL,
        "eager_input_streaming": LABEL,
        "max_characters": LABEL,
        "allowed_callers": rejected(["direct"]),
        "input_examples": rejected([]),
    }

    name: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """Not shown to the model until a `tool_reference` in a tool's result names it. Ignored with a hosted tool that
    searches tools.
    """

    @property
    def searches_tools(self) -> bool:
        """Whether the tool would search deferred tools, if it were not ignored."""
        return self.is_hosted and (self.type or "").startswith("tool_search_tool_")

    @property
    def is_hosted(self) -> bool:
        """Whether the tool is ignored."""
        return self.type is not None and _HOSTED_TOOLS.fullmatch(self.type) is not None

    def check_fields(self, param: str = "") -> set[str]:
        """See `RequestModel`. A hosted tool is ignored as a whole."""
        return {f"{param}type={self.type}"} if self.is_hosted else super().check_fields(param)

    def function(self, param: str) -> dict[str, Any]:
        """Convert to a tool of chat; raises `InvalidParameter`."""
        description, schema = self.description, self.input_schema
        if (own := _CLIENT_TOOLS.get(self.type or "")) is not None:
            description, schema = own
        elif self.type not in (None, "custom"):
            raise InvalidParameter(
                f"{param}.type: tools of type {self.type} are not supported, only those with an input_schema and "
                f"{', '.join(_CLIENT_TOOLS)}",
                f"{param}.type",
            )
        if self.name is None:
            raise InvalidParameter(f"{param}.name is missing", f"{param}.name")
        if schema is None:
            raise InvalidParameter(f"{param}.input_schema is missing", f"{param}.input_schema")
        function: dict[str, Any] = {"name": self.name, "parameters": schema}
        if description is not None:
            function["description"] = description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class MessageToolChoice(RequestModel):
    """The tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> str | dict[str, Any]:
        """Convert to chat's `tool_choice`; raises `InvalidParameter`."""
        if (self.type == "tool") != (self.name is not None):
            raise InvalidParameter(
                "tool_choice: a name is required with type tool, and only allowed with it", "tool_choice"
            )
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Toolset:
    """The tools of a request, converted to those of chat; raises `InvalidParameter`.

    The prompt shows some of them from the start. The turns of the conversation may offer others, define new ones, and
    withdraw them.
    """

    def __init__(self, tools: Sequence[MessageTool], choice: MessageToolChoice | None) -> None:
        self._tools = [tool.function(f"tools[{at}]") for at, tool in enumerate(tools) if not tool.is_hosted]
        self._hosted = {tool.name for tool in tools if tool.is_hosted}
        """The names of the tools that are ignored."""
        names = {tool.name for tool in tools if tool.defer_loading} - {choice and choice.name}
        if any(tool.searches_tools for tool in tools):
            names = set()  # nobody would ever load them
        functions = [tool["function"] for tool in self._tools]
        self.deferred: Mapping[str, Any] = {each["name"]: each for each in functions if each["name"] in names}
        """The functions that the prompt does not show from the start, by name."""
        self._hidden = {*self.deferred}
        self.shown = self.callable
        """The tools that the prompt shows from the start."""

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that the model may call now."""
        return [tool for tool in self._tools if tool["function"]["name"] not in self._hidden]

    def find(self, name: str, param: str) -> dict[str, Any] | None:
        """Return a function; None for a hosted tool."""
        for tool in self._tools:
            function: dict[str, Any] = tool["function"]
            if function["name"] == name:
                return function
        if name in self._hosted:
            return None
        raise InvalidParameter(f"{param}: there is no tool {name}", param)

    def is_offered(self, name: str) -> bool:
        """Return whether the model may call this function now."""
        return name not in self._hidden

    def offer(self, name: str) -> None:
        """Let the model call a function from now on."""
        self._hidden.discard(name)

    def withdraw(self, name: str) -> None:
        """Do not let the model call a function any more."""
        self._hidden.add(name)

    def define(self, tool: MessageTool, param: str) -> dict[str, Any] | None:
        """Offer a new tool, which replaces one of its name; return its function, or None for a hosted tool."""
        if tool.is_hosted:
            self._hosted.add(tool.name)
            return None
        defined = tool.function(param)
        function: dict[str, Any] = defined["function"]
        self._tools = [each for each in self._tools if each["function"]["name"] != function["name"]] + [defined]
        self.offer(function["name"])
        return function


class _RunByClient(NamedTuple):
    """What Anthropic's models know of a tool that clients run."""

    description: str
    input_schema: dict[str, Any]


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_FIELDS: Mapping[str, Any] = {
    "path": _text("The path of the file or directory."),
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "view: the first and the last line to show, counted from 1; -1 is the end of the file.",
    },
    "file_text": _text("create: the content of the file."),
    "old_str": _text("str_replace: the text to replace, which must occur exactly once."),
    "new_str": _text("str_replace: the new text."),
    "insert_line": {
        "type": "integer",
        "minimum": 0,
        "description": "insert: the line after which to insert; 0 is the beginning of the file.",
    },
    "insert_text": _text("insert: the text to insert."),
    "old_path": _text("rename: the present path."),
    "new_path": _text("rename: the new path."),
}


def _commands(commands: Sequence[str], fields: Sequence[str], required: Sequence[str], **changed: Any) -> Any:
    """The schema of a tool whose `command` says which of the other fields it reads."""
    properties = {"command": {"type": "string", "enum": [*commands]}} | {name: _FIELDS[name] for name in fields}
    return {
        "type": "object",
        "properties": properties | changed,
        "required": [*required],
        "additionalProperties": False,
    }


_BASH = _RunByClient(
    "Run commands in a bash session, which goes on between calls.",
    {
        "type": "object",
        "properties": {
            "command": _text("The command to run. Required unless restart is true."),
            "restart": {"type": "boolean", "description": "Start a new session."},
        },
        "additionalProperties": False,
    },
)
_EDITING = ("path", "view_range", "file_text", "old_str", "new_str", "insert_line")
_EDITOR_WITH_UNDO = _RunByClient(
    "View, create and edit text files. undo_edit takes back the last edit of a file.",
    _commands(
        ("view", "create", "str_replace", "insert", "undo_edit"),
        _EDITING,
        ("command", "path"),
        new_str=_text("str_replace: the new text. insert: the text to insert."),
    ),
)
_EDITOR = _RunByClient(
    "View, create and edit text files.",
    _commands(("view", "create", "str_replace", "insert"), (*_EDITING, "insert_text"), ("command", "path")),
)
_MEMORY = _RunByClient(
    "Keep notes in files below /memories, which are there in later conversations, too. View the directory before a "
    "task, and note what will be of use later.",
    _commands(
        ("view", "create", "str_replace", "insert", "delete", "rename"),
        (*_EDITING, "insert_text", "old_path", "new_path"),
        ("command",),
    ),
)
_CLIENT_TOOLS: Mapping[str, _RunByClient] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _EDITOR_WITH_UNDO,
    "text_editor_20250124": _EDITOR_WITH_UNDO,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}
"""The tools that clients run, by type."""
