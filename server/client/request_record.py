"""What is known of an HTTP request when it has ended, for the metrics and the access log."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.server.client.tracing import RequestTimes


@dataclass(slots=True)
class HttpRequestRecord:
    """The record of a request, which the code that knows something fills in."""

    status: int = 0
    """Of the response; 0: none has begun."""
    reason: str = ""
    """Why it was refused or failed: one of `http_metrics.REASONS`. Empty: it was not."""
    key: str = ""
    """Name of its API key."""
    owner: str = ""
    """Identity of its API key (`api_keys.Key.owner`)."""
    response_id: str = ""
    """Id of the response, if the engine is asked."""
    is_engine_request: bool = False
    """Whether the engine has worked on it."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    """Generated tokens, of all choices."""
    queue: float | None = None
    """Longest time in the queue of a prompt, in seconds."""
    first_token: float | None = None
    """Longest time to the first output of a prompt, in seconds."""
    prompt_characters: int = 0
    """Maximum length of `prompts`; 0: they are not wanted."""
    prompts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """About parts of the request that have no effect, for the client."""

    def add(self, num_prompt_tokens: int, num_cached_tokens: int, times: RequestTimes) -> None:
        """Add a sequence that has ended. The tokens of a prompt count once, however many choices it has."""
        self.is_engine_request = True
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens
        self.num_tokens += times.num_tokens
        if times.queue is not None and times.prefill is not None:
            self.queue = max(self.queue or 0.0, times.queue)
            self.first_token = max(self.first_token or 0.0, times.queue + times.prefill)


RECORD: ContextVar[HttpRequestRecord | None] = ContextVar("request_record", default=None)
"""The record of the current task's request; None outside of HTTP requests."""


def current_key() -> str:
    """Return the identity of the API key of the current task's request; empty if it has none."""
    record = RECORD.get()
    return "" if record is None else record.owner
