"""Reasoning and calls together: the parser of one answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quire.server.parsers.events import Content, Event
from quire.server.parsers.reasoning import ReasoningFormat, ReasoningParser
from quire.server.parsers.tool_calls import ToolParser, tool_parser
from quire.server.parsers.tool_formats import ToolFormat


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """How the answers to one request are to be read; makes a parser for each."""

    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    """The prompt lets the model begin inside its thoughts."""
    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    """The functions that may be called."""
    limit: int | None = None
    """Calls that are given out at most."""
    shows_reasoning: bool = True

    @property
    def markers(self) -> frozenset[str]:
        """What must reach the parser, also where it is special tokens and the user wants those skipped."""
        return frozenset(marker for format in (self.reasoning, self.tools) if format for marker in format.all_markers)

    def parser(self, hidden: Collection[str] = ()) -> OutputParser:
        """A parser for one answer. `hidden` are the markers that must not be shown where they mark nothing."""
        tools = self.tools or (ToolFormat() if hidden else None)
        return OutputParser(
            ReasoningParser(self.reasoning, self.is_thinking) if self.reasoning else None,
            tool_parser(tools, self.names, hidden=hidden, limit=self.limit) if tools else None,
            self.shows_reasoning,
        )


class OutputParser:
    """Text goes through the reasoning parser; what that says is content goes through the tool parser."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, shows_reasoning: bool) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._shows_reasoning = shows_reasoning

    def feed(self, text: str) -> list[Event]:
        """What this much more text says for certain."""
        return self._through_tools(self._reasoning.feed(text) if self._reasoning else [Content(text)])

    def finish(self) -> list[Event]:
        """What the text says, now that it is complete. Nothing may be fed afterwards."""
        events = self._through_tools(self._reasoning.finish() if self._reasoning else [])
        return events + self._tools.finish() if self._tools else events

    def _through_tools(self, events: list[Event]) -> list[Event]:
        read: list[Event] = []
        for event in events:
            if isinstance(event, Content) and self._tools is not None:
                read += self._tools.feed(event.text)
            elif isinstance(event, Content) or self._shows_reasoning:
                read.append(event)
        return read
