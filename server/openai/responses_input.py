"""The input items of `/v1/responses`, converted to chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from quire.server.http.request_model import LABEL, ExtraField, MessagePart, variant


class _InputPart(MessagePart):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"annotations": LABEL, "logprobs": LABEL}

    text: str


class _RefusalPart(MessagePart):
    refusal: str


class _Item(MessagePart):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = dict.fromkeys(
        ("id", "status", "phase", "encrypted_content", "summary", "caller"), LABEL
    )


class _InputMessage(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class _ReasoningItem(_Item):
    content: list[dict[str, Any]] | None = None


class _FunctionCallItem(_Item):
    call_id: str
    name: str
    arguments: str


class _FunctionCallOutputItem(_Item):
    call_id: str
    output: str | list[dict[str, Any]]


class _CustomToolCallItem(_Item):
    call_id: str
    name: str
    input: str


_ITEMS: dict[str, type[_Item]] = {
    "message": _InputMessage,
    "reasoning": _ReasoningItem,
    "function_call": _FunctionCallItem,
    "function_call_output": _FunctionCallOutputItem,
    "custom_tool_call": _CustomToolCallItem,
    "custom_tool_call_output": _FunctionCallOutputItem,
}
_PARTS: dict[str, type[_InputPart | _RefusalPart]] = {
    "input_text": _InputPart,
    "output_text": _InputPart,
    "refusal": _RefusalPart,
}


class InputTurns:
    """Converts a sequence of items to chat messages. Consecutive reasoning, text and calls become one assistant
    message.
    """

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self.ignored: set[str] = set()
        """The fields of items that are ignored."""

    def add(self, given: dict[str, Any], param: str) -> None:
        """Add an item of the input; raises `InvalidParameter` for an invalid or unsupported item."""
        match item := variant(_ITEMS, given, param, self.ignored, default="message"):
            case _InputMessage(role="assistant"):
                self.add_text(self._text(item.content, f"{param}.content"))
            case _InputMessage():
                self.messages.append({"role": item.role, "content": self._text(item.content, f"{param}.content")})
            case _ReasoningItem():
                self.add_reasoning(self._thoughts(item.content or (), f"{param}.content"))
            case _FunctionCallItem():
                self.call(item.call_id, item.name, item.arguments)
            case _CustomToolCallItem():
                self.call(item.call_id, item.name, json.dumps({"input": item.input}))
            case _FunctionCallOutputItem():
                text = self._text(item.output, f"{param}.output")
                self.messages.append({"role": "tool", "content": text, "tool_call_id": item.call_id})

    def add_reasoning(self, text: str) -> None:
        """Add reasoning, which precedes text and calls."""
        if text:
            self._turn("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def add_text(self, text: str) -> None:
        """Add text, which precedes calls."""
        self._turn("content", "tool_calls")["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call, which comes last."""
        call = {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self, *without: str) -> dict[str, Any]:
        """Return the last assistant message, or a new one if that has any of these fields."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in without):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def _text(self, content: str | list[dict[str, Any]], param: str) -> str:
        if isinstance(content, str):
            return content
        parts = [variant(_PARTS, given, f"{param}[{at}]", self.ignored) for at, given in enumerate(content)]
        return "\n".join(part.refusal if isinstance(part, _RefusalPart) else part.text for part in parts)

    def _thoughts(self, content: Sequence[dict[str, Any]], param: str) -> str:
        kinds = {"reasoning_text": _InputPart}
        parts = [variant(kinds, given, f"{param}[{at}]", self.ignored) for at, given in enumerate(content)]
        return "\n".join(part.text for part in parts)


def is_json_object(text: str) -> bool:
    """Return whether the text is complete JSON arguments of a call; empty text is."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False
