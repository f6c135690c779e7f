"""Stores the newest responses in memory, for `previous_response_id` and retrieval."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from quire.server.client.request_record import current_key

_OwnId = tuple[str, str]
"""The name of an API key, and the id of a response."""

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
    """Limited by `max_responses` and `max_bytes`. A request finds only the responses of its own API key, by name."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._running: dict[_OwnId, RunningResponse] = {}
        self._stored: dict[_OwnId, StoredResponse] = {}
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0

    def begin(self, response_id: str, running: RunningResponse) -> None:
        """Add a response that is being streamed."""
        self._running[_own(response_id)] = running

    def end(self, response_id: str) -> None:
        """Remove a response that is no longer being streamed, or never was."""
        self._running.pop(_own(response_id), None)

    def running(self, response_id: str) -> RunningResponse | None:
        """Return a response that is being streamed, or None."""
        return self._running.get(_own(response_id))

    def add(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless it alone is too large; remove old ones if there is no room."""
        if stored.size > self._max_bytes:
            return
        self._stored[_own(response_id)] = stored
        self._bytes += stored.size
        while len(self._stored) > self._max_responses or self._bytes > self._max_bytes:
            self._remove(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a finished response, or None if it is not stored."""
        return self._stored.get(_own(response_id))

    def items_of(self, response_ids: Collection[str]) -> bytes:
        """Return the items of those of these responses that are stored as one JSON object, by id."""
        found = [(response_id, self.get(response_id)) for response_id in response_ids]
        parts = [b"%s:%s" % (msgspec.json.encode(name), stored.items) for name, stored in found if stored is not None]
        return b"{%s}" % b",".join(parts)

    def delete(self, response_id: str) -> bool:
        """Delete a response; returns whether it was stored."""
        return self._remove(_own(response_id))

    def _remove(self, own_id: _OwnId) -> bool:
        stored = self._stored.pop(own_id, None)
        if stored is not None:
            self._bytes -= stored.size
        return stored is not None


def _own(response_id: str) -> _OwnId:
    return current_key(), response_id
