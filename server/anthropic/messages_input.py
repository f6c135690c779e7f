"""The turns of `/v1/messages`, converted to chat messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from quire.engine.protocol.errors import InvalidParameter
from quire.server.anthropic.tools import MessageTool, Toolset
from quire.server.http.file_parts import PDF, document, tagged
from quire.server.http.media_parts import content_of
from quire.server.http.request_model import LABEL, ExtraField, MessagePart, hint, parsed, rejected, variant
from quire.server.media.types import MediaSource
from quire.server.text.media_input import media_source, uploaded_source


class _Block(MessagePart):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"cache_control": LABEL, "caller": LABEL, "citations": hint([])}


class _TextBlock(_Block):
    text: str


class _ImageBlock(_Block):
    source: dict[str, Any]


class _Base64Source(MessagePart):
    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class _UrlSource(MessagePart):
    url: str


class _FileSource(MessagePart):
    file_id: str


class _PdfSource(MessagePart):
    data: str
    media_type: Literal["application/pdf"]


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
    tool_changes: list[dict[str, Any]] | None = None
    """The `_ToolAdditionBlock` and `_ToolRemovalBlock` that it summarizes."""


class _ToolAdditionBlock(_Block):
    """Offers a tool from here on."""

    tool: dict[str, Any]


class _ToolRemovalBlock(_Block):
    """Withdraws a tool from here on."""

    tool: dict[str, Any]


class _NamedTool(MessagePart):
    name: str


class _DefinedTool(MessagePart):
    definition: dict[str, Any]


class _McpTools(MessagePart):
    """Tools that Anthropic runs: they are ignored."""

    unknown_fields: ClassVar[ExtraField] = LABEL


_TEXT: dict[str, type[MessagePart]] = {"text": _TextBlock}
_DOCUMENTS: dict[str, type[MessagePart]] = {
    **_TEXT,
    "document": _DocumentBlock,
    "search_result": _SearchResultBlock,
}
_OF_USER: dict[str, type[MessagePart]] = {**_DOCUMENTS, "image": _ImageBlock, "tool_result": _ToolResultBlock}
_OF_RESULT: dict[str, type[MessagePart]] = {
    **_DOCUMENTS,
    "image": _ImageBlock,
    "tool_reference": _ToolReferenceBlock,
}
_OF_ASSISTANT: dict[str, type[MessagePart]] = {
    **_TEXT,
    "thinking": _ThinkingBlock,
    "redacted_thinking": _RedactedThinkingBlock,
    "tool_use": _ToolUseBlock,
    "compaction": _CompactionBlock,
}
_CHANGES: dict[str, type[MessagePart]] = {"tool_addition": _ToolAdditionBlock, "tool_removal": _ToolRemovalBlock}
_OF_SYSTEM: dict[str, type[MessagePart]] = {**_TEXT, **_CHANGES}
_OF_SERVER = re.compile("(server|mcp)_tool_use|.*_tool_result|mcp_tool_listing|fallback")
"""Types of the assistant's blocks about what Anthropic runs."""
_REFERENCES: dict[str, type[MessagePart]] = {
    "tool_reference": _NamedTool,
    "mcp_tool_reference": _McpTools,
    "mcp_toolset_reference": _McpTools,
}
_SOURCES: dict[str, type[MessagePart]] = {
    "text": _TextSource,
    "content": _ContentSource,
    "base64": _PdfSource,
    "url": _UrlSource,
    "file": _FileSource,
}
_IMAGE_SOURCES: dict[str, type[MessagePart]] = {
    "base64": _Base64Source,
    "url": _UrlSource,
    "file": _FileSource,
}


class MessageTurn(MessagePart):
    """A turn of the conversation. Its parts are text, images, documents, search results, and tool results; the
    assistant's are text, thinking and tool uses.
    """

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"output_config": rejected({})}

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]
    clear_at: Literal["next_user_message", "never"] | None = None
    """When the text of a system's turn is left out: once a turn of the user follows, or never. The tools that it adds
    and removes stay so.
    """


class MessageTurns:
    """Converts the system prompt and the turns of a conversation to chat messages.

    The prompt does not show deferred tools from the start: a tool_reference in a tool's result, or a tool_addition,
    shows them there. So the beginning of the prompt stays as it is, and can be reused.
    """

    def __init__(self, ignored: set[str], tools: Toolset) -> None:
        """Adds to `ignored` what has no effect, and changes which `tools` are offered."""
        self.messages: list[dict[str, Any]] = []
        self.media: list[MediaSource] = []
        """The images of the messages."""
        self._ignored = ignored
        self._tools = tools

    def add_system(self, system: str | Sequence[Mapping[str, Any]]) -> None:
        """Add the system prompt; raises `InvalidParameter`."""
        self.messages.append({"role": "system", "content": self._text(system, "system")})

    def add(self, turn: MessageTurn, param: str, *, is_current: bool = True) -> None:
        """Add a turn; `is_current`: no turn of the user follows. Each tool_result becomes its own message, before or
        between the text. Raises `InvalidParameter`.
        """
        if turn.clear_at is not None and turn.role != "system":
            raise InvalidParameter(f"{param}.clear_at is only allowed with the role system", f"{param}.clear_at")
        content, param = turn.content, f"{param}.content"
        if turn.role == "system":
            self._add_system_turn(turn, param, is_shown=is_current or turn.clear_at != "next_user_message")
        elif isinstance(content, str):
            self.messages.append({"role": turn.role, "content": content})
        elif turn.role == "assistant":
            self.messages.append(self._assistant_message(content, param))
        else:
            self._add_blocks(content, param)

    def _add_system_turn(self, turn: MessageTurn, param: str, *, is_shown: bool) -> None:
        """Add a turn of the system, whose text may be left out, but not the changes of tools."""
        content = [{"type": "text", "text": turn.content}] if isinstance(turn.content, str) else turn.content
        texts = []
        for at, given in enumerate(content):
            block = variant(_OF_SYSTEM, given, f"{param}[{at}]", self._ignored)
            text = self._shown(block, f"{param}[{at}]")
            if text and (is_shown or not isinstance(block, _TextBlock)):
                texts.append(text)
        if texts or not content:
            self.messages.append({"role": "system", "content": "\n".join(texts)})

    def _changed(self, change: _ToolAdditionBlock | _ToolRemovalBlock, param: str) -> str:
        """Offer a tool, or withdraw it; return what the prompt shows of that."""
        tools, is_addition = self._tools, isinstance(change, _ToolAdditionBlock)
        kinds = _REFERENCES | ({"tool_definition": _DefinedTool} if is_addition else {})
        match variant(kinds, change.tool, f"{param}.tool", self._ignored):
            case _NamedTool(name=name):
                function = tools.find(name, f"{param}.tool.name")
                if function is None:
                    self._ignored.add(f"{param}.tool.name={name}")
                if function is None or tools.is_offered(name) is is_addition:
                    return ""
                if is_addition:
                    tools.offer(name)
                    return _function(function)
                tools.withdraw(name)
                return f"The function {name} is no longer available."
            case _DefinedTool(definition=given):
                where = f"{param}.tool.definition"
                function = tools.define(parsed(MessageTool, given, where, self._ignored), where)
                return "" if function is None else _function(function)
            case _:
                self._ignored.add(f"{param}.tool.type={change.tool['type']}")
                return ""

    def _add_blocks(self, content: Sequence[Mapping[str, Any]], param: str) -> None:
        parts: list[str | MediaSource] = []
        for at, block in enumerate(content):
            where = f"{param}[{at}]"
            match variant(_OF_USER, block, where, self._ignored):
                case _ToolResultBlock() as result:
                    self._add_user(parts)
                    shown = self._result(result, f"{where}.content")
                    self.messages.append({"role": "tool", "content": shown, "tool_call_id": result.tool_use_id})
                case read:
                    parts += self._parts(read, where)
        self._add_user(parts)

    def _add_user(self, parts: list[str | MediaSource]) -> None:
        if parts:
            self.messages.append({"role": "user", "content": content_of(parts)})
            parts.clear()

    def _result(self, result: _ToolResultBlock, param: str) -> str | list[dict[str, Any]]:
        """Return the content of a tool's result."""
        given, parts = result.content or (), list[str | MediaSource]()
        if isinstance(given, str):
            parts.append(given)
        else:
            for at, each in enumerate(given):
                block = variant(_OF_RESULT, each, f"{param}[{at}]", self._ignored)
                parts += self._parts(block, f"{param}[{at}]")
        if result.is_error:
            text = parts.pop(0) if parts and isinstance(parts[0], str) else ""
            parts.insert(0, f"Error: {text}")
        return content_of(parts)

    def _parts(self, block: MessagePart, param: str) -> list[str | MediaSource]:
        """Return a block of the user, or of a tool's result."""
        found: list[str | MediaSource]
        where = f"{param}.source"
        match block:
            case _ImageBlock(source=given):
                match variant(_IMAGE_SOURCES, given, where, self._ignored):
                    case _Base64Source(data=data, media_type=kind):
                        found = [media_source("image", f"data:{kind};base64,{data}", f"{where}.data")]
                    case _UrlSource(url=url):
                        found = [media_source("image", url, f"{where}.url")]
                    case _FileSource(file_id=file_id):
                        found = [uploaded_source(file_id, f"{where}.file_id")]
                    case other:
                        raise AssertionError(other)
            case _DocumentBlock(source={"type": "base64" | "url" | "file"}, title=title, context=context):
                match variant(_SOURCES, block.source, where, self._ignored):
                    case _PdfSource(data=data):
                        file = media_source("image", f"data:{PDF};base64,{data}", f"{where}.data")
                    case _UrlSource(url=url):
                        file = media_source("image", url, f"{where}.url")
                    case _FileSource(file_id=file_id):
                        file = uploaded_source(file_id, f"{where}.file_id")
                    case other:
                        raise AssertionError(other)
                found = document(file, title=title, context=context)
            case _:
                found = [self._shown(block, param)]
        self.media += [part for part in found if isinstance(part, MediaSource)]
        return found

    def _assistant_message(self, content: Sequence[Mapping[str, Any]], param: str) -> dict[str, Any]:
        texts, thoughts, calls = [], [], []
        for at, block in enumerate(content):
            kind = block.get("type")
            if isinstance(kind, str) and _OF_SERVER.fullmatch(kind):
                self._ignored.add(f"{param}[{at}].type={kind}")
                continue
            match variant(_OF_ASSISTANT, block, f"{param}[{at}]", self._ignored):
                case _TextBlock(text=text):
                    texts.append(text)
                case _CompactionBlock(content=summary, tool_changes=changes):
                    where = f"{param}[{at}].tool_changes"
                    texts += filter(None, [summary, self._text(changes or (), where, _CHANGES)])
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
                return tagged("document", text, title=title, context=context)
            case _SearchResultBlock(source=origin, title=title, content=content):
                return tagged("search_result", self._text(content, f"{param}.content"), source=origin, title=title)
            case _ToolReferenceBlock(tool_name=name):
                if (function := self._tools.deferred.get(name)) is None:
                    return name
                self._tools.offer(name)
                return _function(function)
            case _ToolAdditionBlock() | _ToolRemovalBlock():
                return self._changed(block, param)
        raise AssertionError(block)


def _function(function: Mapping[str, Any]) -> str:
    return tagged("function", json.dumps(function, ensure_ascii=False))
