"""The input items of `/v1/responses`, converted to chat messages."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import msgspec

from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.errors import ResponseNotFound
from quire.server.http.file_parts import FilePart
from quire.server.http.media_parts import ImageUrlPart, content_of
from quire.server.http.request_model import LABEL, ExtraField, MessagePart, variant
from quire.server.media.types import MediaSource
from quire.server.openai.custom_tools import custom_arguments
from quire.server.openai.responses_tools import CalledTool, ResponseTools
from quire.server.text.conversation import Message
from quire.server.text.input_processor import InputProcessor
from quire.server.text.inputs import ChatInput

Shortening = tuple[int, int | None]
"""The message from which on all remain, and one before it that remains."""

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})i?[0-9]+")


class _InputPart(MessagePart):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"annotations": LABEL, "logprobs": LABEL}

    text: str


class _RefusalPart(MessagePart):
    refusal: str


class _Item(MessagePart):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = dict.fromkeys(
        ("id", "status", "phase", "encrypted_content", "summary", "caller", "created_by", "async"), LABEL
    )


class _InputMessage(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class _ReasoningItem(_Item):
    content: list[dict[str, Any]] | None = None


class _Reference(_Item):
    id: str


class _FunctionCallItem(_Item):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class _CustomToolCallItem(_Item):
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class _LocalShellCallItem(_Item):
    call_id: str
    action: dict[str, Any]


class _ShellCallItem(_Item):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {**_Item.extra_fields, "environment": LABEL}

    call_id: str
    action: dict[str, Any]


class _PatchCallItem(_Item):
    call_id: str
    operation: dict[str, Any]


class _SearchCallItem(_Item):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {**_Item.extra_fields, "execution": LABEL}

    call_id: str | None = None
    arguments: Any = None


class _McpCallItem(_Item):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {**_Item.extra_fields, "approval_request_id": LABEL}

    id: str
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: Any = None


class _CallOutputItem(_Item):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {**_Item.extra_fields, "name": LABEL, "namespace": LABEL}

    call_id: str
    output: str | list[dict[str, Any]]


class _LocalShellOutputItem(_Item):
    id: str | None = None
    """The id of the call, if `call_id` does not have it."""
    call_id: str | None = None
    output: str


class _ShellOutputItem(_Item):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {**_Item.extra_fields, "max_output_length": LABEL}

    call_id: str
    output: list[dict[str, Any]]


class _PatchOutputItem(_Item):
    call_id: str
    status: str | None = None
    output: str | None = None


class _SearchOutputItem(_Item):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {**_Item.extra_fields, "execution": LABEL}

    call_id: str | None = None
    tools: list[dict[str, Any]]


class _AdditionalTools(_Item):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {**_Item.extra_fields, "role": LABEL}

    tools: list[dict[str, Any]]


class _IgnoredItem(_Item):
    """What another server has done, or wrote for itself."""

    unknown_fields: ClassVar[ExtraField] = LABEL


_ITEMS: dict[str, type[_Item]] = {
    "message": _InputMessage,
    "item_reference": _Reference,
    "reasoning": _ReasoningItem,
    "function_call": _FunctionCallItem,
    "function_call_output": _CallOutputItem,
    "custom_tool_call": _CustomToolCallItem,
    "custom_tool_call_output": _CallOutputItem,
    "local_shell_call": _LocalShellCallItem,
    "local_shell_call_output": _LocalShellOutputItem,
    "shell_call": _ShellCallItem,
    "shell_call_output": _ShellOutputItem,
    "apply_patch_call": _PatchCallItem,
    "apply_patch_call_output": _PatchOutputItem,
    "tool_search_call": _SearchCallItem,
    "tool_search_output": _SearchOutputItem,
    "additional_tools": _AdditionalTools,
    "mcp_call": _McpCallItem,
    **dict.fromkeys(
        (
            "compaction",
            "compaction_summary",
            "web_search_call",
            "file_search_call",
            "code_interpreter_call",
            "image_generation_call",
            "mcp_list_tools",
            "mcp_approval_request",
            "mcp_approval_response",
        ),
        _IgnoredItem,
    ),
}
_TEXT_PARTS: dict[str, type[MessagePart]] = {
    "input_text": _InputPart,
    "output_text": _InputPart,
    "refusal": _RefusalPart,
}
_PARTS: dict[str, type[MessagePart]] = {**_TEXT_PARTS, "input_image": ImageUrlPart, "input_file": FilePart}


class InputTurns:
    """Converts a sequence of items to chat messages. Consecutive reasoning, text and calls become one assistant
    message.
    """

    def __init__(self, tools: ResponseTools, ignored: set[str]) -> None:
        """Adds to `ignored` the fields of items that are ignored, and to `tools` the tools that items load."""
        self.messages: list[dict[str, Any]] = []
        self.media: list[MediaSource] = []
        """The images of the messages."""
        self._tools, self._ignored = tools, ignored

    def add(self, given: dict[str, Any], param: str) -> None:
        """Add an item of the input; raises `InvalidParameter` for an invalid or unsupported item."""
        match item := variant(_ITEMS, given, param, self._ignored, default="message"):
            case _InputMessage(role="assistant"):
                self._add_text(self._content(item.content, f"{param}.content", _TEXT_PARTS))
            case _InputMessage():
                self.messages.append({"role": item.role, "content": self._content(item.content, f"{param}.content")})
            case _ReasoningItem():
                self._add_reasoning(self._thoughts(item.content or (), f"{param}.content"))
            case _IgnoredItem() | _SearchCallItem(call_id=None):  # a search without an id ran on a server
                self._ignored.add(f"{param}.type={given['type']}")
            case _SearchOutputItem() | _AdditionalTools():
                self._tools.load(item.tools, f"{param}.tools")
                if isinstance(item, _SearchOutputItem) and item.call_id is not None:
                    self._answer(item.call_id, json.dumps({"tools": item.tools}, ensure_ascii=False))
            case _CallOutputItem():
                self._answer(item.call_id, self._content(item.output, f"{param}.output"))
            case _LocalShellOutputItem():
                if (call_id := item.call_id or item.id) is None:
                    raise InvalidParameter(f"{param}.call_id is missing", f"{param}.call_id")
                self._answer(call_id, item.output)
            case _ShellOutputItem():
                self._answer(item.call_id, json.dumps(item.output, ensure_ascii=False))
            case _PatchOutputItem():
                self._answer(item.call_id, item.output or item.status or "")
            case _:
                self._add_call(item)

    def _add_call(self, item: _Item) -> None:
        match item:
            case _FunctionCallItem():
                self._call(item.call_id, CalledTool("function", item.name, item.namespace), item.arguments)
            case _CustomToolCallItem():
                tool = CalledTool("custom", item.name, item.namespace)
                self._call(item.call_id, tool, custom_arguments(item.input))
            case _LocalShellCallItem():
                arguments = {name: value for name, value in item.action.items() if name != "type" and value}
                self._call(item.call_id, CalledTool("local_shell", "local_shell"), _json(arguments))
            case _ShellCallItem():
                arguments = {name: value for name, value in item.action.items() if value is not None}
                self._call(item.call_id, CalledTool("shell", "shell"), _json(arguments))
            case _PatchCallItem():
                self._call(item.call_id, CalledTool("apply_patch", "apply_patch"), _json(item.operation))
            case _SearchCallItem(call_id=str(call_id)):
                self._call(call_id, CalledTool("tool_search", "tool_search"), _json(item.arguments or {}))
            case _McpCallItem():
                self._call(item.id, CalledTool("function", item.name, item.server_label), item.arguments)
                self._answer(item.id, item.output or _json({"error": item.error}))

    def _add_reasoning(self, text: str) -> None:
        """Add reasoning, which precedes text and calls."""
        if text:
            self._turn("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def _add_text(self, text: str | list[dict[str, Any]]) -> None:
        """Add text, which precedes calls."""
        self._turn("content", "tool_calls")["content"] = text

    def _call(self, call_id: str, tool: CalledTool, arguments: str) -> None:
        """Add a call, which comes last."""
        function = {"name": self._tools.name(tool), "arguments": arguments}
        self._turn().setdefault("tool_calls", []).append({"type": "function", "id": call_id, "function": function})

    def _answer(self, call_id: str, content: str | list[dict[str, Any]]) -> None:
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})

    def _turn(self, *without: str) -> dict[str, Any]:
        """Return the last assistant message, or a new one if that has any of these fields."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in without):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def _content(
        self, content: str | list[dict[str, Any]], param: str, kinds: Mapping[str, type[MessagePart]] = _PARTS
    ) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return content
        parts: list[str | MediaSource] = []
        for at, given in enumerate(content):
            match variant(kinds, given, f"{param}[{at}]", self._ignored):
                case _RefusalPart(refusal=text) | _InputPart(text=text):
                    parts.append(text)
                case ImageUrlPart() as image:
                    parts.append(image.source(f"{param}[{at}]", {}))
                case FilePart() as file:
                    parts += file.parts(f"{param}[{at}]", {})
        self.media += [part for part in parts if isinstance(part, MediaSource)]
        return content_of(parts)

    def _thoughts(self, content: Sequence[dict[str, Any]], param: str) -> str:
        kinds = {"reasoning_text": _InputPart}
        parts = [variant(kinds, given, f"{param}[{at}]", self._ignored) for at, given in enumerate(content)]
        return "\n".join(part.text for part in parts)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def is_message(item: Mapping[str, Any]) -> bool:
    """Return whether an item, which is not a reference, is a message."""
    return item.get("type") in (None, "message")


def listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return a stored item as the API lists it: with all fields of a message."""
    if not is_message(item):
        return item if item["type"] == "reasoning" else _filled(item, status="completed")
    is_answer = item["role"] == "assistant"
    content = item["content"]
    if isinstance(content, str):
        content = [{"type": "output_text" if is_answer else "input_text", "text": content}]
    if is_answer:
        content = [_filled(part, annotations=[]) for part in content]
    return _filled(item, status="completed") | {"type": "message", "content": content}


class _Identified(msgspec.Struct):
    id: str


async def page_of_items(wanted: Mapping[str, Any], _: InputProcessor, stored: bytes | None) -> bytes | None:
    """Return a page of stored items as the API lists them, as JSON; None if there is no item `after`. Decodes only the
    items of the page. Another process calls it for large items (`ProcessLarge`).

    `wanted` has the number of items that may be listed (`num_input`), and the parameters of the request.
    """
    assert stored is not None
    items = msgspec.json.decode(stored, type=list[msgspec.Raw])[: wanted["num_input"]]
    if wanted["order"] == "desc":
        items.reverse()
    begin = 0
    if (after := wanted["after"]) is not None:
        read_id = msgspec.json.Decoder(_Identified)
        begin = next((at for at, item in enumerate(items, 1) if read_id.decode(item).id == after), 0)
        if not begin:
            return None
    end = begin + wanted["limit"]
    page = [listed(msgspec.json.decode(item)) for item in items[begin:end]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return msgspec.json.encode({"object": "list", "data": page, **ends, "has_more": len(items) > end})


def _filled(given: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return an object with the defaults of fields that are missing or null."""
    return given | {name: value for name, value in defaults.items() if given.get(name) is None}


def referred_id(item: dict[str, Any]) -> str | None:
    """Return the id that a reference to an item has; None for other items."""
    is_reference = item.get("type") in (None, "item_reference") and item.get("role") is None
    return item["id"] if is_reference and isinstance(item.get("id"), str) else None


def response_of(item_id: str) -> str | None:
    """Return the id of the response that has an item, as its input or output; None for an id that is no item's of this
    server.
    """
    found = _ITEM_ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else None


def resolved(
    given: Sequence[dict[str, Any]], stored: Mapping[str, Sequence[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Yield the items of an input, with the items of `stored` responses that they refer to. Raises `ResponseNotFound`
    for an unknown one, and `InvalidParameter` for a second reference to the same one: so the result is no larger than
    the input and what is stored.
    """
    by_id: dict[str, dict[str, Any]] | None = None
    referred = set[str]()
    for at, item in enumerate(given):
        if (item_id := referred_id(item)) is None:
            yield item
            continue
        if by_id is None:
            by_id = {each["id"]: each for items in stored.values() for each in items}
        if item_id not in by_id:
            raise ResponseNotFound(
                f"input[{at}]: item {item_id} not found: only items of the newest responses with store: true are kept",
                f"input[{at}].id",
            )
        if item_id in referred:
            param = f"input[{at}].id"
            raise InvalidParameter(f"{param}: item {item_id} is already part of the input", param)
        referred.add(item_id)
        yield by_id[item_id]


def shortenings(messages: Sequence[Message]) -> list[Shortening]:
    """Return the ways to leave out the oldest messages, the one that leaves out least first.

    A call is never separated from its result. The user's last message remains, and the last step of the model after it.
    """
    steps = [at for at, message in enumerate(messages) if message["role"] in ("user", "assistant")]
    users = [at for at in steps if messages[at]["role"] == "user"]
    if not users:
        return [(at, None) for at in steps[1:]]
    return [(at, None) for at in users[1:]] + [(at, users[-1]) for at in steps if at > users[-1] + 1]


def shortened(chat: ChatInput, way: Shortening) -> ChatInput:
    """Return a conversation with the messages that remain, among them all of the system."""
    begin, kept = way
    messages: list[Message] = []
    media: list[MediaSource] = []
    items = iter(chat.media)
    for at, message in enumerate(chat.messages):
        parts = content if isinstance(content := message.get("content"), list) else ()
        own = [*itertools.islice(items, sum(part["type"] != "text" for part in parts))]
        if at >= begin or at == kept or message["role"] in ("system", "developer"):
            messages.append(message)
            media += own
    return replace(chat, messages=messages, media=media)
