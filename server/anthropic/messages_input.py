"""The turns of `/v1/messages`, converted to chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal
from xml.sax.saxutils import quoteattr

from quire.server.http.request_model import LABEL, ExtraField, MessagePart, hint, rejected, variant


class _Block(MessagePart):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"cache_control": LABEL, "caller": LABEL, "citations": hint([])}


class _TextBlock(_Block):
    text: str


class _CitedBlock(MessagePart):
    """A block that the answer could cite."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "cache_control": LABEL,
        "citations": rejected({}, {"enabled": False}),
    }


class _DocumentBlock(_CitedBlock):
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None


class _TextSource(MessagePart):
    data: str
    media_type: Literal["text/plain"]


class _ContentSource(MessagePart):
    content: str | list[dict[str, Any]]


class _SearchResultBlock(_CitedBlock):
    source: str
    title: str
    content: list[dict[str, Any]]


class _ToolReferenceBlock(_Block):
    tool_name: str


class _ThinkingBlock(_Block):
    thinking: str
    signature: str | None = None
    """Ignored: reasoning is not encrypted here."""


class _RedactedThinkingBlock(_Block):
    data: str
    """Ignored: only the server that has encrypted it can read it."""


class _ToolUseBlock(_Block):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResultBlock(_Block):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


_TEXT: dict[str, type[MessagePart]] = {"text": _TextBlock}
_DOCUMENTS: dict[str, type[MessagePart]] = {
    **_TEXT,
    "document": _DocumentBlock,
    "search_result": _SearchResultBlock,
}
_OF_USER: dict[str, type[MessagePart]] = {**_DOCUMENTS, "tool_result": _ToolResultBlock}
_OF_RESULT: dict[str, type[MessagePart]] = {**_DOCUMENTS, "tool_reference": _ToolReferenceBlock}
_OF_ASSISTANT: dict[str, type[MessagePart]] = {
    **_TEXT,
    "thinking": _ThinkingBlock,
    "redacted_thinking": _RedactedThinkingBlock,
    "tool_use": _ToolUseBlock,
}
_SOURCES: dict[str, type[MessagePart]] = {"text": _TextSource, "content": _ContentSource}


class MessageTurn(MessagePart):
    """A turn of the conversation. Its parts are text, documents of plain text, search results, and tool results; the
    assistant's are text, thinking and tool uses.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


def chat_messages(turn: MessageTurn, param: str, ignored: set[str]) -> list[dict[str, Any]]:
    """Convert a turn to chat messages. Each tool_result becomes its own message, before or between the text. Adds the
    fields that are ignored; raises `InvalidParameter`.
    """
    if turn.role == "assistant":
        return [_assistant_message(turn.content, param, ignored)]
    if turn.role == "system" or isinstance(turn.content, str):
        return [{"role": turn.role, "content": text_of(turn.content, param, ignored)}]
    messages: list[dict[str, Any]] = []
    for at, block in enumerate(turn.content):
        where = f"{param}[{at}]"
        match variant(_OF_USER, block, where, ignored):
            case _ToolResultBlock() as read:
                text = "" if read.content is None else text_of(read.content, f"{where}.content", ignored, _OF_RESULT)
                text = f"Error: {text}" if read.is_error else text
                messages.append({"role": "tool", "content": text, "tool_call_id": read.tool_use_id})
            case read:
                text = _shown(read, where, ignored)
                if not messages or messages[-1]["role"] != "user":
                    messages.append({"role": "user", "content": text})
                else:
                    messages[-1]["content"] += "\n" + text
    return messages


def text_of(
    content: str | Sequence[Mapping[str, Any]],
    param: str,
    ignored: set[str],
    kinds: Mapping[str, type[MessagePart]] = _TEXT,
) -> str:
    """Return the text of content, whose blocks are of these `kinds`. Adds the fields that are ignored; raises
    `InvalidParameter`.
    """
    if isinstance(content, str):
        return content
    wheres = [f"{param}[{at}]" for at in range(len(content))]
    return "\n".join(
        _shown(variant(kinds, block, where, ignored), where, ignored)
        for block, where in zip(content, wheres, strict=True)
    )


def _shown(block: MessagePart, param: str, ignored: set[str]) -> str:
    """Return a block as the prompt shows it. Documents are between tags."""
    match block:
        case _TextBlock(text=text):
            return text
        case _DocumentBlock(source=source, title=title, context=context):
            match variant(_SOURCES, source, f"{param}.source", ignored):
                case _TextSource(data=text):
                    pass
                case _ContentSource(content=content):
                    text = text_of(content, f"{param}.source.content", ignored)
            return _tagged("document", text, title=title, context=context)
        case _SearchResultBlock(source=source, title=title, content=content):
            text = text_of(content, f"{param}.content", ignored)
            return _tagged("search_result", text, source=source, title=title)
        case _ToolReferenceBlock(tool_name=name):
            return name
    raise AssertionError(block)


def _tagged(tag: str, text: str, **attributes: str | None) -> str:
    given = "".join(f" {name}={quoteattr(value)}" for name, value in attributes.items() if value is not None)
    return f"<{tag}{given}>\n{text}\n</{tag}>"


def _assistant_message(content: str | list[dict[str, Any]], param: str, ignored: set[str]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(content):
        match variant(_OF_ASSISTANT, block, f"{param}[{at}]", ignored):
            case _TextBlock(text=text):
                texts.append(text)
            case _ThinkingBlock(thinking=text):
                thoughts.append(text)
            case _RedactedThinkingBlock():
                ignored.add(f"{param}[{at}].type=redacted_thinking")
            case _ToolUseBlock() as read:
                function = {"name": read.name, "arguments": read.input}
                calls.append({"type": "function", "id": read.id, "function": function})
    message: dict[str, Any] = {"role": "assistant"}
    if texts or not calls:
        message["content"] = "\n".join(texts)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message
