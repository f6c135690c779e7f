"""The turns of `/v1/messages`, converted to chat messages."""

from __future__ import annotations

import json
import re
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


class _CompactionBlock(_Block):
    content: str | None = None
    """A summary of the conversation before it."""


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
    "compaction": _CompactionBlock,
}
_OF_SERVER = re.compile("(server|mcp)_tool_use|.*_tool_result")
"""Types of the assistant's blocks about tools that Anthropic runs."""
_SOURCES: dict[str, type[MessagePart]] = {"text": _TextSource, "content": _ContentSource}


class MessageTurn(MessagePart):
    """A turn of the conversation. Its parts are text, documents of plain text, search results, and tool results; the
    assistant's are text, thinking and tool uses.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class MessageTurns:
    """Converts the system prompt and the turns of a conversation to chat messages.

    `deferred` has the tools that the prompt does not show from the start, by name: a tool_reference in a tool's result
    shows them there. So the beginning of the prompt stays as it is, and can be reused.
    """

    def __init__(self, ignored: set[str], deferred: Mapping[str, Mapping[str, Any]]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.loaded: set[str] = set()
        """The deferred tools that are shown."""
        self._ignored = ignored
        self._deferred = deferred

    def add_system(self, system: str | Sequence[Mapping[str, Any]]) -> None:
        """Add the system prompt; raises `InvalidParameter`."""
        self.messages.append({"role": "system", "content": self._text(system, "system")})

    def add(self, turn: MessageTurn, param: str) -> None:
        """Add a turn. Each tool_result becomes its own message, before or between the text. Raises
        `InvalidParameter`.
        """
        content = turn.content
        if turn.role == "assistant" and not isinstance(content, str):
            self.messages.append(self._assistant_message(content, param))
        elif turn.role != "user" or isinstance(content, str):
            self.messages.append({"role": turn.role, "content": self._text(content, param)})
        else:
            self._add_blocks(content, param)

    def _add_blocks(self, content: Sequence[Mapping[str, Any]], param: str) -> None:
        texts: list[str] = []
        for at, block in enumerate(content):
            where = f"{param}[{at}]"
            match variant(_OF_USER, block, where, self._ignored):
                case _ToolResultBlock() as result:
                    self._add_user(texts)
                    text = "" if result.content is None else self._text(result.content, f"{where}.content", _OF_RESULT)
                    text = f"Error: {text}" if result.is_error else text
                    self.messages.append({"role": "tool", "content": text, "tool_call_id": result.tool_use_id})
                case read:
                    texts.append(self._shown(read, where))
        self._add_user(texts)

    def _add_user(self, texts: list[str]) -> None:
        if texts:
            self.messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    def _assistant_message(self, content: Sequence[Mapping[str, Any]], param: str) -> dict[str, Any]:
        texts, thoughts, calls = [], [], []
        for at, block in enumerate(content):
            kind = block.get("type")
            if isinstance(kind, str) and _OF_SERVER.fullmatch(kind):
                self._ignored.add(f"{param}[{at}].type={kind}")
                continue
            match variant(_OF_ASSISTANT, block, f"{param}[{at}]", self._ignored):
                case _TextBlock(text=text) | _CompactionBlock(content=str(text)):
                    texts.append(text)
                case _ThinkingBlock(thinking=text):
                    thoughts.append(text)
                case _RedactedThinkingBlock():
                    self._ignored.add(f"{param}[{at}].type=redacted_thinking")
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

    def _text(
        self,
        content: str | Sequence[Mapping[str, Any]],
        param: str,
        kinds: Mapping[str, type[MessagePart]] = _TEXT,
    ) -> str:
        if isinstance(content, str):
            return content
        wheres = [f"{param}[{at}]" for at in range(len(content))]
        blocks = [variant(kinds, block, at, self._ignored) for block, at in zip(content, wheres, strict=True)]
        return "\n".join(self._shown(block, at) for block, at in zip(blocks, wheres, strict=True))

    def _shown(self, block: MessagePart, param: str) -> str:
        """Return a block as the prompt shows it. Documents and tools are between tags."""
        match block:
            case _TextBlock(text=text):
                return text
            case _DocumentBlock(source=given, title=title, context=context):
                source = variant(_SOURCES, given, f"{param}.source", self._ignored)
                if isinstance(source, _TextSource):
                    text = source.data
                else:
                    assert isinstance(source, _ContentSource)
                    text = self._text(source.content, f"{param}.source.content")
                return _tagged("document", text, title=title, context=context)
            case _SearchResultBlock(source=origin, title=title, content=content):
                return _tagged("search_result", self._text(content, f"{param}.content"), source=origin, title=title)
            case _ToolReferenceBlock(tool_name=name):
                if (tool := self._deferred.get(name)) is None:
                    return name
                self.loaded.add(name)
                return _tagged("function", json.dumps(tool, ensure_ascii=False))
        raise AssertionError(block)


def _tagged(tag: str, text: str, **attributes: str | None) -> str:
    given = "".join(f" {name}={quoteattr(value)}" for name, value in attributes.items() if value is not None)
    return f"<{tag}{given}>\n{text}\n</{tag}>"
