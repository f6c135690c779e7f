"""The data from which the spans of a request are made: its sequences, and where and when they ran. No OpenTelemetry
here.

Times are the metrics' (`time.monotonic`). Without `--otlp-traces-endpoint` nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.engine.protocol.engine_core import EngineCoreOutput, FinishReason
from quire.engine.protocol.sampling_params import SamplingParams

_MAX_SEQUENCES = 128
"""Sequences of a request that have spans."""


LeftReplica = Literal["replica_lost", "moved", "handed_over", ""]
"""How a sequence left a replica: that has died; is silent or to be removed; has computed the prompt for another one."""


class RequestTimes(NamedTuple):
    """The times of a finished request in seconds, as the metrics have them. None: there was no output."""

    e2e: float = 0.0
    queue: float | None = None
    prefill: float | None = None
    """Time from when it was first scheduled to its first output."""
    decode: float | None = None
    """Time from its first to its last output."""
    num_tokens: int = 0
    """Number of generated tokens."""


@dataclass(slots=True)
class Segment:
    """The part of a sequence that one replica computed."""

    replica: int
    begun: float
    """Time at which the sequence arrived, or left the previous replica."""
    scheduled: float | None = None
    """Time at which it was first scheduled there; unknown before the first output."""
    first_output: float | None = None
    preempted: Sequence[float] = ()
    ended: float | None = None
    """Time at which it finished, or left the replica."""
    left: LeftReplica = ""
    """Empty: the sequence finished there."""
    reason: str = ""
    """The reason for leaving, in words."""


@dataclass(slots=True)
class SequenceTrace:
    """A sequence of a request, from its arrival to its end."""

    request: RequestTrace
    index: int
    """Prompts × n, numbered prompt by prompt."""
    num_prompt_tokens: int
    arrived: float
    model: str
    response_id: str
    operation: str
    params: SamplingParams | None
    """The request's; None for embeddings."""
    segments: list[Segment] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: str | None = None
    finish_reason: FinishReason = "stop"
    """The engine's."""
    finish_reasons: Sequence[str] = ()
    """The API's; several for a beam search."""
    finished: float = 0.0
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def is_failed(self) -> bool:
        return self.finish_reason in ("abort", "error")

    @property
    def error_type(self) -> str | None:
        """As in the API's error objects, but for clients that have left."""
        return {"abort": "aborted", "error": "request_failed"}.get(self.finish_reason)

    def place(self, replica: int) -> None:
        """It was sent to a replica."""
        left = self.segments[-1].ended if self.segments else None
        self.segments.append(Segment(replica, self.arrived if left is None else left))

    def leave(self, how: LeftReplica, reason: str) -> None:
        """It has left its replica before its end."""
        segment = self.segments[-1]
        segment.left, segment.reason = how, reason
        segment.ended = (
            time.monotonic() if segment.first_output is None or how != "handed_over" else segment.first_output
        )

    def receive(self, output: EngineCoreOutput, now: float) -> None:
        """Take the times of an output that is more than a token."""
        segment = self.segments[-1]
        self.error = output.error
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        has_output = bool(output.token_ids) or output.vector is not None
        if segment.scheduled is None and (has_output or output.running_seconds):
            segment.scheduled = max(segment.begun, now - output.running_seconds)
        if segment.first_output is None and has_output:
            segment.first_output = now
        if segment.scheduled is not None:
            segment.preempted = [segment.scheduled + seconds for seconds in output.preempted_after]

    def finish(self, reason: FinishReason, last_output: float | None, times: RequestTimes) -> None:
        """It has ended in the engine."""
        self.finish_reason, self.times = reason, times
        self.finished = self.arrived + times.e2e
        if self.segments and (segment := self.segments[-1]).ended is None:
            is_whole = reason in ("stop", "length") and segment.first_output is not None
            segment.ended = max(segment.first_output or 0.0, last_output or 0.0) if is_whole else self.finished
        if self.is_failed:
            self.request.has_failed = True
            self.request.error_type = self.request.error_type or self.error_type
        self.request.finish(self)


@dataclass(slots=True)
class RequestTrace:
    """A traced HTTP request. `record` makes the spans of a sequence."""

    record: Callable[[SequenceTrace], None]
    error_type: str | None = None
    has_failed: bool = False
    """Whether a sequence has."""
    model: str = ""
    """As the request names it."""
    _response_id: str = ""
    _operation: str = ""
    _params: SamplingParams | None = None
    _num_sequences: int = 0
    _finished: list[SequenceTrace] | None = field(default_factory=list)
    """Sequences without spans as yet: the API may change their finish reasons. None: the request has ended."""

    def generate(self, response_id: str, operation: str, params: SamplingParams | None) -> None:
        """The sequences that are added next belong to this response. `operation` as in OpenTelemetry's conventions."""
        self._response_id, self._operation, self._params = response_id, operation, params

    def add(self, index: int, num_prompt_tokens: int, arrived: float) -> SequenceTrace | None:
        """Add a sequence that was submitted; None: the request has too many."""
        self._num_sequences += 1
        if self._num_sequences > _MAX_SEQUENCES:
            return None
        what = self.model, self._response_id, self._operation, self._params
        return SequenceTrace(self, index, num_prompt_tokens, arrived, *what)

    def finish(self, sequence: SequenceTrace) -> None:
        """A sequence has finished, perhaps after the request: in the background."""
        if self._finished is None:
            self.record(sequence)
        else:
            self._finished.append(sequence)

    def end(self) -> None:
        """The request has ended: make the spans of its sequences."""
        finished, self._finished = self._finished or [], None
        for sequence in finished:
            self.record(sequence)


TRACE: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)
"""The trace of the current task's request, if it is traced."""
