"""The engine's outputs of a request, in order, for its reader; and the errors that may end it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Literal, NamedTuple

from quire.engine.protocol.engine_core import EngineCoreOutput, FinishReason
from quire.server.client.request_record import RECORD
from quire.server.client.tracing import RequestTimes, SequenceTrace


class EngineUnavailable(RuntimeError):
    """The engine is still loading, has died, is restarting or shut down, or cannot read the data of a request now; the
    message says which, and why."""

    def __init__(self, message: str, reason: Literal["loading", "draining", "unavailable"] = "unavailable") -> None:
        """`reason` as in the metrics."""
        super().__init__(message)
        self.reason = reason


class RequestFailed(RuntimeError):
    """The engine aborted one request; others are not affected."""


class RequestInvalid(RequestFailed):
    """A part of the request proved to be invalid while it ran, such as its grammar."""


class RequestAborted(RequestFailed):
    """Somebody other than its reader has aborted the request."""

    def __init__(self) -> None:
        super().__init__("the request was aborted")


class RequestTimedOut(RequestFailed):
    """The request has reached its time limit."""


class Deadline(NamedTuple):
    """The time at which a request must end, on the event loop's clock, and its time limit in seconds."""

    at: float
    seconds: float


DEADLINE: ContextVar[Deadline | None] = ContextVar("deadline", default=None)
"""The deadline of the current task's request, after which its engine requests are aborted."""


class OutputStream:
    """The outputs of related engine requests. Unread outputs of a request are merged into one."""

    def __init__(self, abort: Callable[[set[str], FinishReason], None], request_ids: Sequence[str]) -> None:
        """`abort` is the client's method."""
        self._abort_at_engine = abort
        self._open = set(request_ids)
        self._unread: dict[str, EngineCoreOutput] = {}
        self._failure: EngineUnavailable | RequestFailed | None = None
        self._reader: asyncio.Future[None] | None = None
        """The reader that waits in `get`."""
        self._timer: asyncio.TimerHandle | None = None
        self.record = RECORD.get()
        """The record of the HTTP request, if there is one."""
        self.times: RequestTimes | None = None
        """The times of the request that has finished last."""
        self.kv_peer = ""
        """Where the KV store is read (`ReplicaUp.kv_peer`) that has the prompt of the request that was placed last."""
        self.traces: dict[str, SequenceTrace] = {}
        """The traces of the requests that are traced."""

    @property
    def is_open(self) -> bool:
        """Whether a request may still be running."""
        return bool(self._open)

    async def get(self) -> list[EngineCoreOutput]:
        """Return the outputs since the last call, at most one per request; wait for the first.

        Raises `EngineUnavailable` and `RequestFailed` when there will be no more outputs: earlier outputs are read
        first.
        """
        while not self._unread:
            if self._failure is not None:
                raise self._failure
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        unread, self._unread = self._unread, {}
        return list(unread.values())

    def stop(self, request_id: str) -> None:
        """Finish a request whose stop string was found."""
        self._abort({request_id}, "stop")

    def close(self) -> None:
        """Abort all running requests."""
        self._abort(self._open.copy(), "abort")
        if self._timer is not None:
            self._timer.cancel()

    def abort(self) -> None:
        """Abort the requests that still run; the reader gets `RequestAborted`."""
        if self._open:
            self._abort(self._open.copy(), "abort")
            self.fail(RequestAborted())

    def end_at(self, deadline: Deadline) -> None:
        """Abort the requests that still run at the deadline; the reader gets `RequestTimedOut`."""
        self._timer = asyncio.get_running_loop().call_at(deadline.at, self._time_out, deadline.seconds)

    def _time_out(self, seconds: float) -> None:
        if self._open:
            self._abort(self._open.copy(), "abort")
            self.fail(RequestTimedOut(f"the request exceeded the time limit of {seconds:g} seconds"))

    def _abort(self, request_ids: set[str], reason: FinishReason) -> None:
        self._abort_at_engine(request_ids & self._open, reason)
        self._open -= request_ids
        for request_id in request_ids:
            self._unread.pop(request_id, None)

    def put(self, output: EngineCoreOutput) -> None:
        """Add an output; the client calls this in order of arrival. An error ends the stream."""
        if output.finish_reason in ("error", "abort"):
            self._open.discard(output.request_id)
            if output.finish_reason == "abort":
                self._end(RequestAborted())
            else:
                error = output.error or "the engine failed"
                kind = RequestInvalid if output.is_invalid else RequestFailed
                self._end(EngineUnavailable(error) if output.is_unavailable else kind(error))
            return
        earlier = self._unread.get(output.request_id)
        if earlier is None:
            self._unread[output.request_id] = output
        else:
            earlier.token_ids += output.token_ids
            if output.logprobs is not None:
                earlier.logprobs = (earlier.logprobs or []) + output.logprobs
            if earlier.prompt_logprobs is None:
                earlier.prompt_logprobs = output.prompt_logprobs
            elif output.prompt_logprobs is not None:
                earlier.prompt_logprobs.extend(output.prompt_logprobs)
            earlier.finish_reason = output.finish_reason
            earlier.stop_token_id = output.stop_token_id
            earlier.num_cached_tokens = max(earlier.num_cached_tokens, output.num_cached_tokens)
            earlier.num_loaded_tokens = max(earlier.num_loaded_tokens, output.num_loaded_tokens)
            earlier.num_accepted_tokens += output.num_accepted_tokens
            earlier.num_rejected_tokens += output.num_rejected_tokens
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._wake()

    def put_token(self, request_id: str, token_id: int) -> None:
        """Like `put`, for an output that is just one token."""
        earlier = self._unread.get(request_id)
        if earlier is None:
            self._unread[request_id] = EngineCoreOutput(request_id, [token_id])
        else:
            earlier.token_ids.append(token_id)
        self._wake()

    def fail(self, failure: EngineUnavailable | RequestFailed) -> None:
        """End the stream with an error; called by the client when the engine is gone."""
        self._open.clear()
        self._end(failure)

    def _end(self, failure: EngineUnavailable | RequestFailed) -> None:
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
