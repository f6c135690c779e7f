"""The tools of `/v1/responses`: each that a client runs becomes a function, and its calls become the items of its kind.

Tools of a namespace become functions named after both. A custom tool becomes a function of one text. The other tools
of clients (`local_shell`, `shell`, `apply_patch`, `tool_search`) become functions with arguments like their items.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pydantic_core

from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.request_model import ExtraField, MessagePart, RequestModel, hint, rejected, variant
from quire.server.openai.custom_input import custom_input
from quire.server.openai.custom_tools import custom_function
from quire.server.parsers.input_grammar import InputGrammar

_MAX_NAME = 64
"""Characters of a function's name."""
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_.-]")

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch", "tool_search"]


@dataclass(frozen=True)
class CalledTool:
    """A tool as the client knows it."""

    kind: Kind
    name: str
    namespace: str | None = None

    @property
    def prefix(self) -> str:
        """The beginning of the ids of its calls."""
        return _ID_PREFIXES[self.kind]

    def item(self, call_id: str, arguments: str, status: str) -> dict[str, Any]:
        """The item of a call with these JSON arguments, which may be incomplete."""
        item: dict[str, Any] = {"type": _ITEM_TYPES[self.kind], "status": status, "call_id": call_id}
        match self.kind:
            case "function":
                item |= {"name": self.name, "arguments": arguments}
            case "custom":
                item |= {"name": self.name, "input": custom_input(arguments)}
            case "tool_search":
                item |= {"execution": "client", "arguments": _read(arguments)}
            case "local_shell":
                given = _read(arguments)
                item["action"] = {"type": "exec", "command": [], "env": {}, **given}
            case "shell":
                item["action"] = {"commands": [], "timeout_ms": None, "max_output_length": None, **_read(arguments)}
            case "apply_patch":
                operation = {"type": "update_file", "path": "", **_read(arguments)}
                if operation["type"] != "delete_file":
                    operation.setdefault("diff", "")
                item |= {"operation": operation, "status": "completed" if status == "completed" else "in_progress"}
        return item if self.namespace is None else item | {"namespace": self.namespace}


_ID_PREFIXES: Mapping[Kind, str] = {
    "function": "fc",
    "custom": "ctc",
    "local_shell": "lsh",
    "shell": "sh",
    "apply_patch": "apc",
    "tool_search": "tsc",
}
_ITEM_TYPES: Mapping[Kind, str] = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "local_shell": "local_shell_call",
    "shell": "shell_call",
    "apply_patch": "apply_patch_call",
    "tool_search": "tool_search_call",
}
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}


def _arguments(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {**required, **optional}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


_CLIENT_TOOLS: Mapping[str, dict[str, Any]] = {
    "local_shell": {
        "description": "Run a command on the user's computer.",
        "parameters": _arguments(
            {"command": {"type": "array", "items": _TEXT, "description": "The program and its arguments."}},
            working_directory=_TEXT,
            env={"type": "object", "additionalProperties": _TEXT},
            timeout_ms=_COUNT,
        ),
        "strict": True,
    },
    "shell": {
        "description": "Run shell commands on the user's computer.",
        "parameters": _arguments(
            {"commands": {"type": "array", "items": _TEXT, "description": "Each runs in a shell of its own."}},
            timeout_ms=_COUNT,
            max_output_length=_COUNT,
        ),
        "strict": True,
    },
    "apply_patch": {
        "description": "Create, update or delete a file of the user's.",
        "parameters": _arguments(
            {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": {"type": "string", "description": "Relative to the root of the workspace."},
            },
            diff={"type": "string", "description": "The unified diff; not for delete_file."},
        ),
        "strict": True,
    },
}
"""The functions for tools without parameters of their own."""
_SEARCH = {
    "description": "Search for tools that are not listed, and make them available.",
    "parameters": _arguments({"query": _TEXT}),
}


class _ClientTool(MessagePart):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "allowed_callers": rejected(["direct"], ["direct", "programmatic"], ["programmatic", "direct"]),
        "defer_loading": hint(False),  # all tools are shown at once
        "async": hint(False),
    }

    description: str | None = None


class _FunctionTool(_ClientTool):
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolFormat(RequestModel):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class _CustomTool(_ClientTool):
    name: str
    format: _ToolFormat | None = None


class _NamespaceTool(_ClientTool):
    name: str
    tools: list[dict[str, Any]]


class _ShellTool(_ClientTool):
    environment: dict[str, Any] | None = None


class _SearchTool(_ClientTool):
    execution: Literal["server", "client"] | None = None
    parameters: dict[str, Any] | None = None


_IN_NAMESPACE: dict[str, type[_ClientTool]] = {"function": _FunctionTool, "custom": _CustomTool}
_TOOLS: dict[str, type[_ClientTool]] = {
    **_IN_NAMESPACE,
    "namespace": _NamespaceTool,
    "local_shell": _ClientTool,
    "shell": _ShellTool,
    "apply_patch": _ClientTool,
    "tool_search": _SearchTool,
}


class ResponseTools:
    """The tools of a request, as functions of chat."""

    def __init__(self, given: Sequence[dict[str, Any]], ignored: set[str]) -> None:
        """Adds to `ignored` the tools and fields that have no effect; raises `InvalidParameter`."""
        self.functions: list[dict[str, Any]] = []
        """The functions, as chat has them."""
        self.params: list[str] = []
        """Their names in the request, for error messages."""
        self.grammars: dict[str, InputGrammar] = {}
        """The grammars of custom tools, by name of the function."""
        self.called: dict[str, CalledTool] = {}
        """The tools, by name of the function."""
        self.given: list[dict[str, Any]] = []
        """The tools that have an effect, as the request has them."""
        self._names: dict[CalledTool, str] = {}
        self._ignored = ignored
        kinds = [*_IN_NAMESPACE]  # not a set: a type may be unhashable
        self._own_names = {str(tool.get("name")) for tool in given if tool.get("type") in kinds}
        for at, tool in enumerate(given):
            self._add(tool, f"tools[{at}]")

    def load(self, given: Sequence[dict[str, Any]], param: str) -> None:
        """Add tools that are given in the input; ignores those that are known already."""
        for at, tool in enumerate(given):
            self._add(tool, f"{param}[{at}]", is_loaded=True)

    def name(self, tool: CalledTool) -> str:
        """The name of the function for a tool, which need not be known."""
        return self._names.get(tool) or _flat_name(tool)

    def choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Convert the request's `tool_choice` to that of chat; raises `InvalidParameter`."""
        match choice:
            case None | "none" | "auto" | "required":
                return choice
            case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
                names = [name for one in tools for name in self._allowed(one)]
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(_named, names)]}}
            case dict() if choice.get("type") in [*_ITEM_TYPES]:  # it may be unhashable
                return _named(self._chosen(choice))
        raise InvalidParameter(
            'tool_choice must be "none", "auto", "required", {"type": "allowed_tools", "mode": …, "tools": …}, '
            '{"type": "function", "name": …}, {"type": "custom", "name": …} or the type of a tool that the client runs',
            "tool_choice",
        )

    def _allowed(self, one: Any) -> Sequence[str]:
        match one:
            case {"type": "namespace", "name": str(name)}:
                return [self._names[tool] for tool in self.called.values() if tool.namespace == name]
            case {"type": str(kind)} if kind in _ITEM_TYPES:
                return [self._chosen(one)]
            case {"type": str(kind)}:
                self._ignored.add(f"tool_choice.tools.type={kind}")
                return ()
        raise InvalidParameter('tool_choice: each of tools must be an object with a "type"', "tool_choice")

    def _chosen(self, choice: Mapping[str, Any]) -> str:
        """The function of the tool that a choice names: by type alone, or by name in any namespace if that is clear."""
        kind, name, space = choice["type"], choice.get("name"), choice.get("namespace")
        found = [tool for tool in self.called.values() if tool.kind == kind and name in (tool.name, None)]
        exact = [tool for tool in found if tool.namespace == space]
        found = exact or (found if space is None else [])
        if len(found) != 1:
            what = "is not one of the tools" if not found else "is the name of several tools; add its namespace"
            raise InvalidParameter(f"tool_choice names {name or kind!r}, which {what}", "tool_choice")
        return self._names[found[0]]

    def _add(self, given: dict[str, Any], param: str, is_loaded: bool = False) -> None:
        kind = given.get("type")
        is_hosted = isinstance(kind, str) and kind not in _TOOLS
        is_hosted |= kind == "tool_search" and given.get("execution") != "client"
        match given:
            case {"type": "shell", "environment": {"type": where}} if where != "local":
                is_hosted = True
        if is_hosted:  # an offer to the model, which can do without it
            self._ignored.add(f"{param}.type={kind}")
            return
        self.given += [given] * (not is_loaded)
        match read := variant(_TOOLS, given, param, self._ignored):
            case _NamespaceTool(name=namespace, description=about):
                for at, tool in enumerate(read.tools):
                    own = variant(_IN_NAMESPACE, tool, f"{param}.tools[{at}]", self._ignored)
                    if about and not at:  # the tools of a namespace follow each other
                        own.description = f"{about}\n{own.description or ''}".rstrip()
                    self._add_named(own, namespace, f"{param}.tools[{at}]", is_loaded)
            case _FunctionTool() | _CustomTool():
                self._add_named(read, None, param, is_loaded)
            case _SearchTool():
                own_fields = read.model_dump(include={"description", "parameters"}, exclude_none=True)
                self._function(CalledTool("tool_search", "tool_search"), {**_SEARCH, **own_fields}, param, is_loaded)
            case _:
                self._function(CalledTool(kind, kind), _CLIENT_TOOLS[kind], param, is_loaded)  # type: ignore[arg-type,index]

    def _add_named(self, read: _ClientTool, namespace: str | None, param: str, is_loaded: bool) -> None:
        match read:
            case _FunctionTool():
                fields = read.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
                self._function(CalledTool("function", read.name, namespace), fields, param, is_loaded)
            case _CustomTool():
                format = _checked(read.format or _ToolFormat(type="text"), f"{param}.format")
                fields, grammar = custom_function(
                    read.description, format.syntax, format.definition or "", f"{param}.format.definition"
                )
                name = self._function(CalledTool("custom", read.name, namespace), fields, param, is_loaded)
                if name is not None and grammar is not None:
                    self.grammars[name] = grammar

    def _function(self, tool: CalledTool, fields: dict[str, Any], param: str, is_loaded: bool) -> str | None:
        """Add a function; returns its name, or None if it is loaded and not new."""
        if tool in self._names:
            if not is_loaded:
                raise InvalidParameter(f"{param}: duplicate tool {tool.name}", param)
            return None
        name = _flat_name(tool)
        is_own = tool.namespace is None and tool.kind in _IN_NAMESPACE
        if name in self.called or (name in self._own_names and not is_own):
            if is_own and not is_loaded:
                raise InvalidParameter(f"tools: duplicate function name {name}", "tools")
            name = _shortened(name, tool)
        self._names[tool], self.called[name] = name, tool
        self.functions.append({"type": "function", "function": {"name": name, **fields}})
        self.params.append(param)
        return name


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _flat_name(tool: CalledTool) -> str:
    """The name of a tool's function, which is valid if the tool has a namespace."""
    if tool.namespace is None:
        return tool.name
    space = tool.namespace if tool.namespace.endswith("__") else f"{tool.namespace}__"
    name = _NOT_IN_NAMES.sub("_", space + tool.name)
    return name if len(name) <= _MAX_NAME else _shortened(name, tool)


def _shortened(name: str, tool: CalledTool) -> str:
    """A name of the greatest length or less that no other tool has."""
    digest = hashlib.sha256(json.dumps([tool.kind, tool.namespace, tool.name]).encode()).hexdigest()[:8]
    return f"{name[: _MAX_NAME - 9]}_{digest}"


def _checked(format: _ToolFormat, param: str) -> _ToolFormat:
    for name in ("syntax", "definition"):
        is_given = getattr(format, name) is not None
        if is_given != (format.type == "grammar"):
            problem = "requires type grammar" if is_given else "is missing"
            raise InvalidParameter(f"{param}.{name} {problem}", f"{param}.{name}")
    return format


def _read(arguments: str) -> dict[str, Any]:
    """Parse arguments, which may be cut off; the last text may then be, too."""
    try:
        read = pydantic_core.from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
