"""Stores the newest responses in memory, for `previous_response_id` and retrieval."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from quire.server.client.request_record import current_key

MAX_RESPONSES = 1000
"""Maximum number per API process."""
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
    status: str = "completed"

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.response) + len(self.items)


@dataclass
class _Held:
    """What an API key holds."""

    num_responses: int = 0
    num_bytes: int = 0


class ResponseStore:
    """Limited by `max_responses` and `max_bytes`. A request finds only the responses of its own API key, by name.

    When there is no room for a new response, the keys that hold most lose the oldest of their other responses. A
    response that is more than twice as large as all that any other key holds is not stored at their cost.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._running: dict[tuple[str, str], RunningResponse] = {}
        """By the name of the key, and the id of the response."""
        self._stored: dict[tuple[str, str], StoredResponse] = {}
        """By the name of the key, and the id of the response; the oldest first."""
        self._held: dict[str, _Held] = {}
        """By the name of the key; only keys that hold any."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes

    def begin(self, response_id: str, running: RunningResponse) -> None:
        """Add a response that is being streamed."""
        self._running[current_key(), response_id] = running

    def end(self, response_id: str) -> None:
        """Remove a response that is no longer being streamed, or never was."""
        self._running.pop((current_key(), response_id), None)

    def running(self, response_id: str) -> RunningResponse | None:
        """Return a response that is being streamed, or None."""
        return self._running.get((current_key(), response_id))

    def add(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless it alone is too large; remove others if there is no room."""
        if stored.size > self._max_bytes:
            return
        new = current_key(), response_id
        self._remove(new)
        self._stored[new] = stored
        held = self._held.setdefault(new[0], _Held())
        held.num_responses += 1
        held.num_bytes += stored.size
        for counted, limit in (("num_responses", self._max_responses), ("num_bytes", self._max_bytes)):
            amount: Callable[[_Held], int] = attrgetter(counted)
            while sum(map(amount, self._held.values())) > limit:
                others = [(name, amount(self._held[name[0]])) for name in self._stored if name != new]
                most = max(number for _, number in others)
                if held.num_responses == 1 and amount(held) > 2 * most:
                    self._remove(new)
                    return
                self._remove(next(name for name, number in others if number == most))

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a finished response, or None if it is not stored."""
        return self._stored.get((current_key(), response_id))

    def items_of(self, response_ids: Collection[str]) -> bytes:
        """Return the items of those of these responses that are stored as one JSON object, by id."""
        found = [(response_id, self.get(response_id)) for response_id in response_ids]
        parts = [b"%s:%s" % (msgspec.json.encode(name), stored.items) for name, stored in found if stored is not None]
        return b"{%s}" % b",".join(parts)

    def delete(self, response_id: str) -> bool:
        """Delete a response; returns whether it was stored."""
        return self._remove((current_key(), response_id))

    def _remove(self, name: tuple[str, str]) -> bool:
        if (stored := self._stored.pop(name, None)) is None:
            return False
        held = self._held[name[0]]
        held.num_responses -= 1
        held.num_bytes -= stored.size
        if not held.num_responses:
            del self._held[name[0]]
        return True
