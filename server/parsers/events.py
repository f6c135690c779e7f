"""Events that parsers find in a model's text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """Reasoning text of the model."""

    text: str


@dataclass(slots=True)
class ToolCall:
    """A tool call, or a piece of one that is streamed, of which only the first has `id` and `name`."""

    index: int
    """The number of the call in its message, from 0."""
    arguments: str = ""
    """The arguments as JSON text, or the next piece of it."""
    id: str | None = None
    """The id that the tool's answer refers to."""
    name: str | None = None
    """The name of the function."""


Event = Content | Reasoning | ToolCall
