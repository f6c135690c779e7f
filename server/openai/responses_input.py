"""The input items of `/v1/responses`, converted to chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from quire.engine.protocol.errors import InvalidParameter
from quire.server.openai.protocol import LenientModel, reject_extra, variant

_HARMLESS_IN_ITEMS: Mapping[str, Any] = {
    "type": ...,
    "id": ...,
    "status": ...,
    "phase": ...,
    "encrypted_content": ...,
    "summary": ...,
    "caller": ({"type": "direct"},),
}
_HARMLESS_IN_PARTS: Mapping[str, Any] = {"type": ..., "annotations": ..., "logprobs": ...}


class _InputPart(LenientModel):
    text: str


class _RefusalPart(LenientModel):
    refusal: str


class _InputMessage(LenientModel):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class _ReasoningItem(LenientModel):
    content: list[dict[str, Any]] | None = None


class _FunctionCallItem(LenientModel):
    call_id: str
    name: str
    arguments: str


class _FunctionCallOutputItem(LenientModel):
    call_id: str
    output: str | list[dict[str, Any]]


_ITEMS: dict[str, type[LenientModel]] = {
    "message": _InputMessage,
    "reasoning": _ReasoningItem,
    "function_call": _FunctionCallItem,
    "function_call_output": _FunctionCallOutputItem,
}
_PARTS: dict[str, type[LenientModel]] = {"input_text": _InputPart, "output_text": _InputPart, "refusal": _RefusalPart}


class InputTurns:
    """Converts a sequence of items to chat messages. Consecutive reasoning, text and calls become one assistant
    message.
    """

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self.places = ["previous_response_id"] * len(messages)
        """For each message, the parameter of the first item that it was made from."""

    def add(self, item: dict[str, Any], param: str) -> None:
        """Add an item of the input; raises `InvalidParameter` for an invalid or unsupported item."""
        read = variant(_ITEMS, item, param, default="message")
        reject_extra(read, _HARMLESS_IN_ITEMS, f"{param}.")
        self._add(read, param)
        self.places += [param] * (len(self.messages) - len(self.places))

    def _add(self, item: LenientModel, param: str) -> None:
        match item:
            case _InputMessage(role="assistant"):
                self.add_text(_text(item.content, f"{param}.content"))
            case _InputMessage():
                self.messages.append({"role": item.role, "content": _text(item.content, f"{param}.content")})
            case _ReasoningItem():
                self.add_reasoning(_thoughts(item.content or (), f"{param}.content"))
            case _FunctionCallItem():
                if not is_json_object(item.arguments):
                    raise InvalidParameter(f"{param}.arguments must be a JSON object", f"{param}.arguments")
                self.call(item.call_id, item.name, item.arguments)
            case _FunctionCallOutputItem():
                text = _text(item.output, f"{param}.output")
                self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})

    def add_reasoning(self, text: str) -> None:
        """Add reasoning, which precedes text and calls."""
        if text:
            self._turn("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def add_text(self, text: str) -> None:
        """Add text, which precedes calls."""
        self._turn("content", "tool_calls")["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call, which comes last."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self, *without: str) -> dict[str, Any]:
        """Return the last assistant message, or a new one if that has any of these fields."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in without):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]


def _text(content: str | list[dict[str, Any]], param: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for at, given in enumerate(content):
        where = f"{param}[{at}]"
        read = variant(_PARTS, given, where)
        reject_extra(read, _HARMLESS_IN_PARTS, f"{where}.")
        texts.append(
            read.refusal if isinstance(read, _RefusalPart) else read.text if isinstance(read, _InputPart) else ""
        )
    return "\n".join(texts)


def _thoughts(content: list[dict[str, Any]] | tuple[()], param: str) -> str:
    parts = [variant({"reasoning_text": _InputPart}, given, f"{param}[{at}]") for at, given in enumerate(content)]
    return "\n".join(read.text for read in parts)


def is_json_object(text: str) -> bool:
    """Return whether the text is complete JSON arguments of a call; empty text is."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False
