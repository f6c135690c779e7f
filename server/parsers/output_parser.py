"""The parser of one answer: reasoning and tool calls combined."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from quire.server.parsers.events import Content, Event, Reasoning
from quire.server.parsers.harmony import HarmonyParser
from quire.server.parsers.python_calls import PythonParser
from quire.server.parsers.quoted_calls import QuotedParser
from quire.server.parsers.reasoning import HARMONY_REASONING, ReasoningFormat, ReasoningParser
from quire.server.parsers.tagged_calls import TaggedParser
from quire.server.parsers.tool_calls import ParserOptions, Schemas, ToolParser
from quire.server.parsers.tool_formats import HARMONY, Python, Quoted, Tagged, ToolFormat


def tool_parser(options: ParserOptions) -> ToolParser:
    """Create a parser for one answer."""
    options = replace(options, format=options.format.read_as or options.format)
    match options.format.call:
        case Python():
            return PythonParser(options)
        case Tagged():
            return TaggedParser(options)
        case Quoted():
            return QuotedParser(options)
    return ToolParser(options)


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """The format of the answers to one request; creates a parser for each."""

    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    """The prompt ends inside the model's reasoning."""
    tools: ToolFormat | None = None
    schemas: Schemas = field(default_factory=dict)
    limit: int | None = None
    """Maximum number of calls to emit."""
    is_required: bool = False
    """The answer consists of calls: one that is cut off before its arguments is not content."""
    is_enforced: bool = False
    """A grammar enforces the format of calls, as it does for required and strict ones: only exact tags end values."""
    shows_reasoning: bool = True

    @property
    def markers(self) -> frozenset[str]:
        """Markers that the parser needs, even if they are special tokens and the user wants special tokens skipped."""
        return frozenset(marker for format in (self.reasoning, self.tools) if format for marker in format.all_markers)

    def parser(self, hidden: Collection[str] = ()) -> OutputParser:
        """Create a parser for one answer. Markers in `hidden` are dropped from the content where they do not mark
        anything."""
        if self.reasoning == HARMONY_REASONING or self.tools == HARMONY:  # they may have been pickled
            return OutputParser(HarmonyParser(self.schemas, self.limit), None, self.shows_reasoning)
        tools = self.tools or (ToolFormat() if hidden else None)
        calls = None
        if tools:
            options = ParserOptions(
                tools,
                self.schemas,
                hidden=hidden,
                limit=self.limit,
                is_required=self.is_required,
                is_enforced=self.is_enforced,
            )
            calls = tool_parser(options)
        thoughts = ReasoningParser(self.reasoning, self.is_thinking) if self.reasoning else None
        return OutputParser(thoughts, calls, self.shows_reasoning)


class OutputParser:
    """Passes the text to the reasoning parser, and the content that it finds to the tool parser."""

    def __init__(
        self, reasoning: ReasoningParser | HarmonyParser | None, tools: ToolParser | None, shows_reasoning: bool
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._shows_reasoning = shows_reasoning

    def feed(self, text: str) -> list[Event]:
        """Return the events that this additional text completes."""
        return self._through_tools(self._reasoning.feed(text) if self._reasoning else [Content(text)])

    def finish(self) -> list[Event]:
        """Return the remaining events at the end of the text. `feed` must not be called afterwards."""
        events = self._through_tools(self._reasoning.finish() if self._reasoning else [])
        return events + self._tools.finish() if self._tools else events

    def _through_tools(self, events: list[Event]) -> list[Event]:
        read: list[Event] = []
        for event in events:
            if isinstance(event, Content) and self._tools is not None:
                read += self._tools.feed(event.text)
            elif not isinstance(event, Reasoning) or self._shows_reasoning:
                read.append(event)
        return read
