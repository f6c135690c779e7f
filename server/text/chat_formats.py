"""The chat template, tool call format and reasoning format of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from quire.server.config.server_options import ChatOptions
from quire.server.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, detect_reasoning
from quire.server.parsers.tool_formats import TOOL_FORMATS, ToolFormat, detect_tools


@dataclass(frozen=True)
class ChatFormats:
    """A model's chat template, and the formats of its tool calls and reasoning, by name or `auto` or `none`."""

    chat_template: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    """Default variables of the template; requests may set others."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    trust_request_chat_template: bool = False
    """Whether a request may bring its own chat template."""
    strict_parameters: bool = False
    """Whether to reject request fields that would be ignored."""
    keep_billing_header: bool = False
    """Whether the prompt shows the pseudo-headers of Claude Code."""
    structured_outputs_fallback: Literal["refuse", "warn"] = "refuse"
    """Whether to leave out unsupported keywords of JSON schemas, with a warning."""

    @staticmethod
    def of(options: ChatOptions) -> ChatFormats:
        """The formats set on the command line."""
        return ChatFormats(**{field.name: getattr(options, field.name) for field in fields(ChatFormats)})

    def tool_format(self, template: str) -> ToolFormat | None:
        """Return the format of tool calls. Mistral's two formats share a name; the template selects one."""
        name: str | None = self.tool_call_parser
        if name == "auto" or (name == "mistral" and detect_tools(template) == "mistral_args"):
            name = detect_tools(template)
        return None if name in (None, "none") else TOOL_FORMATS[name]

    def reasoning_format(self, template: str) -> ReasoningFormat | None:
        """Return the format of reasoning."""
        name = detect_reasoning(template) if self.reasoning_parser == "auto" else self.reasoning_parser
        return None if name in (None, "none") else REASONING_FORMATS[name]
