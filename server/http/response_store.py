"""The responses that are kept for `previous_response_id` and for looking them up: the newest ones, in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

MAX_RESPONSES = 1000
"""Kept at a time by an API process; the oldest goes first."""
MAX_BYTES = 64 * 2**20
"""Of all that is kept, as JSON. Each response counts with the whole conversation before it."""


class RunningResponse(Protocol):
    """A response that is being streamed."""

    def object(self) -> dict[str, Any]:
        """The response as far as it has come."""

    def cancel(self) -> None:
        """End it here."""


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended, as JSON."""

    response: bytes
    conversation: bytes
    """The messages of chat up to its own, without instructions."""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.conversation)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation."""
        messages: list[dict[str, Any]] = msgspec.json.decode(self.conversation)
        return messages


class ResponseStore:
    """Bounded by `max_responses` and `max_bytes`. `running` are those that are being streamed, by id."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.running: dict[str, RunningResponse] = {}
        self._kept: dict[str, StoredResponse] = {}
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0

    def keep(self, response_id: str, kept: StoredResponse) -> None:
        """Keep this one, as long as there is room."""
        self._kept[response_id] = kept
        self._bytes += kept.size
        while len(self._kept) > self._max_responses or self._bytes > self._max_bytes:
            self.delete(next(iter(self._kept)))

    def get(self, response_id: str) -> StoredResponse | None:
        """One that has ended; None where it is not kept, or not any more."""
        return self._kept.get(response_id)

    def delete(self, response_id: str) -> bool:
        """Forget it; returns whether it was there."""
        kept = self._kept.pop(response_id, None)
        if kept is not None:
            self._bytes -= kept.size
        return kept is not None
