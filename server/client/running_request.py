"""The state of a request in the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

import msgspec

from quire.engine.protocol.engine_core import EngineCoreRequest, FinishReason, RequestInfo
from quire.server.client.fair_share import Share
from quire.server.client.metrics import Metrics
from quire.server.client.output_stream import OutputStream
from quire.server.client.tracing import RequestTimes, SequenceTrace

CLEARING_TOKENS = 16
"""New tokens of a request without a death, after which earlier deaths do not count."""


@dataclass(slots=True)
class PromptRequests:
    """The unfinished requests of one prompt, for metrics."""

    n: int
    """Number of requests of the prompt."""
    num_open: int
    max_tokens: int = 0
    """Tokens of the longest finished request."""


@dataclass(slots=True)
class RunningRequest:
    """A request in the engine, and its times (`time.monotonic`)."""

    stream: OutputStream
    arrived: float
    submit: EngineCoreRequest
    """The original request; the other fields hold the state to resume from."""
    prompt: PromptRequests
    lease: object = None
    """Keeps the data of its images and of its adapter as long as this object refers to it."""
    adapter: str = ""
    """The name of its adapter; empty: it has none."""
    replica: int | None = None
    """None: it waits for a replica."""
    last_replica: int | None = None
    """The replica that it is or was on."""
    successor: int | None = None
    """The replica that expects it, where it continues after its first token; None: it stays on its replica."""
    handed_over_at: float | None = None
    """Time at which it was handed over, until its next output."""
    placed: EngineCoreRequest | None = None
    """The message to its replica, which may still wait for the data of its images."""
    first_output: float | None = None
    """Time of its first tokens, or of its embedding."""
    queue_seconds: float = 0.0
    """Time until it was first scheduled."""
    prefill_seconds: float = 0.0
    """Time from when it was first scheduled to its first output."""
    last_output: float | None = None
    delivered: list[int] = field(default_factory=list)
    num_scored_tokens: int = 0
    """Prompt tokens whose log-probabilities have been delivered."""
    num_repeated: int = 0
    """Number of these that the replica that resumed the request will send again."""
    num_cached_tokens: int | None = None
    """The value of the first output, repeated with the output of the replica that resumed the request."""
    num_loaded_tokens: tuple[int, int, int] = (0, 0, 0)
    """The same."""
    leaving: set[int] = field(default_factory=set)
    """Replicas that it was moved away from and that have not confirmed its end there. It cannot return to them: their
    late outputs would be taken for new ones.
    """
    num_moves: int = 0
    """Number of times that it has left a silent replica."""
    num_deaths: int = 0
    """Deaths of its replicas in a row, with fewer than `CLEARING_TOKENS` new tokens in between."""
    died_at: float = 0.0
    """Time of the last death."""
    num_resumed: int = 0
    """Tokens delivered when it was last resumed."""
    trace: SequenceTrace | None = None

    @property
    def share(self) -> Share:
        """The share that it counts for."""
        return Share(self.submit.share, self.submit.weight)

    @property
    def resume_request(self) -> EngineCoreRequest:
        """Return the request to send to another replica."""
        return msgspec.structs.replace(self.submit, output_token_ids=self.delivered)

    @property
    def info(self) -> RequestInfo:
        """Return what this process knows of it."""
        submit = self.submit
        return RequestInfo(
            submit.request_id,
            submit.label,
            submit.arrived,
            "decode" if self.delivered else "waiting",
            len(submit.prompt_token_ids),
            self.num_cached_tokens or 0,
            len(self.delivered),
            submit.params.max_tokens,
            b"" if submit.adapter is None else submit.adapter.digest,
        )

    def finish(self, reason: FinishReason, metrics: Metrics, replica: int, *, is_pooling: bool) -> None:
        """Add the finished request to the metrics of a replica."""
        observe, params, prompt = partial(metrics.observe, replica), self.submit.params, self.prompt
        num_prompt_tokens, num_tokens = len(self.submit.prompt_token_ids), len(self.delivered)
        times = RequestTimes(time.monotonic() - self.arrived, num_tokens=num_tokens)
        metrics.finished(replica, reason, times.e2e)
        if self.adapter:
            metrics.adapters.finish(
                self.adapter,
                num_prompt_tokens * (prompt.num_open == prompt.n),
                num_tokens,
                has_started=self.first_output is not None,
            )
        observe("request_prompt_tokens", num_prompt_tokens)
        decode_seconds = 0.0
        if self.first_output is not None:
            decode_seconds = (self.last_output or self.first_output) - self.first_output
            times = RequestTimes(times.e2e, self.queue_seconds, self.prefill_seconds, decode_seconds, num_tokens)
            observe("request_inference_time_seconds", self.prefill_seconds + decode_seconds)
            observe("request_prefill_kv_computed_tokens", num_prompt_tokens - (self.num_cached_tokens or 0))
        self.stream.times = times
        if self.stream.record is not None:
            counts = prompt.num_open == prompt.n  # the first of the prompt that ends
            self.stream.record.add(num_prompt_tokens * counts, (self.num_cached_tokens or 0) * counts, times)
        if self.trace is not None:
            self.trace.finish(reason, self.last_output, times)
        if is_pooling:
            return
        observe("request_generation_tokens", num_tokens)
        if params.max_tokens is not None:
            observe("request_params_max_tokens", params.max_tokens)
        if self.first_output is not None:
            observe("request_decode_time_seconds", decode_seconds)
        if num_tokens > 1:
            observe("request_time_per_output_token_seconds", decode_seconds / (num_tokens - 1))
        prompt.num_open -= 1
        prompt.max_tokens = max(prompt.max_tokens, num_tokens)
        if not prompt.num_open:
            observe("request_params_n", prompt.n)
            observe("request_max_num_generation_tokens", prompt.max_tokens)
