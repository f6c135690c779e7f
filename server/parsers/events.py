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
    """A piece of a tool call, as the API streams it: the first piece has `id` and `name`; all contain JSON text of the
    arguments.

    `index` counts the calls of a message from 0.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Event = Content | Reasoning | ToolCall
