"""Stores the newest responses in memory, for `previous_response_id` and retrieval."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

MAX_RESPONSES = 1000
"""Maximum number per API process; the oldest is removed first."""
MAX_BYTES = 64 * 2**20
"""Maximum size of all stored responses, as JSON. Each response includes its whole conversation."""


class RunningResponse(Protocol):
    """A response that is being streamed."""

    def object(self) -> dict[str, Any]:
        """The response so far."""

    def cancel(self) -> None:
        """End the response now."""


@dataclass(frozen=True)
class StoredResponse:
    """A finished response, as JSON."""

    response: bytes
    items: bytes
    """The items of the conversation, up to its own output, without instructions."""
    num_input: int = 0
    """Number of items before its own output."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.response) + len(self.items)

    def input_items(self) -> list[dict[str, Any]]:
        """The items before its own output."""
        items: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return items[: self.num_input]


class ResponseStore:
    """Limited by `max_responses` and `max_bytes`. `running` holds the responses being streamed, by id."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.running: dict[str, RunningResponse] = {}
        self._stored: dict[str, StoredResponse] = {}
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0

    def add(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response; remove old ones if there is no room."""
        self._stored[response_id] = stored
        self._bytes += stored.size
        while len(self._stored) > self._max_responses or self._bytes > self._max_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a finished response, or None if it is not stored."""
        return self._stored.get(response_id)

    def items_of(self, response_ids: Collection[str]) -> bytes:
        """Return the items of those of these responses that are stored as one JSON object, by id."""
        found = [(response_id, self._stored.get(response_id)) for response_id in response_ids]
        parts = [b"%s:%s" % (msgspec.json.encode(name), stored.items) for name, stored in found if stored is not None]
        return b"{%s}" % b",".join(parts)

    def delete(self, response_id: str) -> bool:
        """Delete a response; returns whether it was stored."""
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size
        return stored is not None
