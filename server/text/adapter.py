"""An adapter, as a request uses it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from quire.engine.protocol.adapters import AdapterRef

OWN_TEMPLATE: ContextVar[str] = ContextVar("own_template", default="")
"""The chat template of the adapter of the current task's request; empty: it has none of its own."""


@dataclass(frozen=True, eq=False)
class RequestAdapter:
    """An adapter with certain weights, whatever its name means later. What the server keeps of its files stays as long
    as this object."""

    name: str
    """As requests name it; for metrics."""
    ref: AdapterRef
    path: str
    """As it was given."""
    rank: int = 0
    """The highest of its layers."""
    invocation_tokens: tuple[int, ...] = ()
    """See `AdapterSpec`."""
    chat_template: str = ""
    """Its own; empty: the base's."""

    def start(self, prompt: Sequence[int]) -> int | None:
        """Return the first token of a prompt that the adapter changes; None: it changes none, as its invocation is not
        in the prompt."""
        if not self.invocation_tokens:
            return 0
        found = array("q", prompt).tobytes()
        wanted, end = array("q", self.invocation_tokens), len(prompt) * 8
        while (at := found.rfind(wanted.tobytes(), 0, end)) % 8 and at > 0:
            end = at + len(wanted) * 8 - 1  # it was found between two tokens
        return at // 8 if at >= 0 else None
