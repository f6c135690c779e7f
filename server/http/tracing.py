"""Traces of requests, sent to an OpenTelemetry collector (`--otlp-traces-endpoint`). Imported only with this flag.

A request has a span, and its sequences have one each, with spans for the queue, prefill and decode on each of their
replicas. Attributes have the names of OpenTelemetry's semantic conventions (for HTTP servers, and for generative AI),
of vLLM (`gen_ai.latency.…`), or begin with `quire.`. Everything else is configured by OpenTelemetry's environment
variables.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import Any

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.process.version import version
from quire.engine.protocol.errors import ConfigError
from quire.server.client.tracing import TRACE, RequestTrace, Segment, SequenceTrace
from quire.server.config.server_options import otlp_exporter

_FLUSH_SECONDS = 3.0
"""Time for exporting the last spans at the end."""
_PROVIDER = "quire"

logger = logging.getLogger(__name__)

# Attributes of the request's span: name, and value. They are there when it starts, for samplers.
REQUEST_ATTRIBUTES: dict[str, Callable[[Scope], Any]] = {
    "http.request.method": lambda scope: scope["method"],
    "url.path": lambda scope: scope["path"],
    "url.scheme": lambda scope: scope["scheme"],
    "server.address": lambda scope: (scope.get("server") or (None,))[0],
    "server.port": lambda scope: (scope.get("server") or (None, None))[1],
    "client.address": lambda scope: (scope.get("client") or (None,))[0],
    "network.protocol.version": lambda scope: scope["http_version"],
    "user_agent.original": lambda scope: next(iter(_headers(scope).get("user-agent", ())), None),
}
REQUEST_ATTRIBUTES_AT_END = ("http.route", "http.response.status_code", "error.type")

# Attributes of a sequence's span: name, and value; None: it is left out.
SEQUENCE_ATTRIBUTES: dict[str, Callable[[SequenceTrace], Any]] = {
    "gen_ai.operation.name": lambda s: s.operation,
    "gen_ai.provider.name": lambda s: _PROVIDER,
    "gen_ai.request.model": lambda s: s.model,
    "gen_ai.request.choice.count": lambda s: s.params and (s.params.n if s.params.n != 1 else None),
    "gen_ai.request.max_tokens": lambda s: s.params and s.params.max_tokens,
    "gen_ai.request.temperature": lambda s: s.params and s.params.temperature,
    "gen_ai.request.top_p": lambda s: s.params and s.params.top_p,
    "gen_ai.request.top_k": lambda s: s.params and (s.params.top_k if s.params.top_k > 0 else None),
    "gen_ai.request.frequency_penalty": lambda s: s.params and s.params.frequency_penalty,
    "gen_ai.request.presence_penalty": lambda s: s.params and s.params.presence_penalty,
    "gen_ai.request.seed": lambda s: s.params and s.params.seed,
    "gen_ai.response.id": lambda s: s.response_id,
    "gen_ai.response.finish_reasons": lambda s: None if s.is_failed else s.finish_reasons or [s.finish_reason],
    "gen_ai.usage.input_tokens": lambda s: s.num_prompt_tokens,
    "gen_ai.usage.output_tokens": lambda s: s.params and s.times.num_tokens * (s.params.max_tokens != 0),
    "gen_ai.usage.cache_read.input_tokens": lambda s: s.num_cached_tokens,
    "gen_ai.latency.time_in_queue": lambda s: s.times.queue,
    "gen_ai.latency.time_to_first_token": lambda s: _sum(s.times.queue, s.times.prefill) if s.params else None,
    "gen_ai.latency.e2e": lambda s: s.times.e2e,
    "gen_ai.latency.time_in_model_prefill": lambda s: s.times.prefill,
    "gen_ai.latency.time_in_model_decode": lambda s: s.times.decode if s.params else None,
    "gen_ai.latency.time_in_model_inference": lambda s: _sum(s.times.prefill, s.times.decode),
    "error.type": lambda s: s.error_type,
    "quire.sequence": lambda s: s.index,
}
REPLICA = "quire.replica"
"""Attribute of the spans of a sequence's phases, and of events."""
_IS_HANDLED: ContextVar[bool] = ContextVar("is_handled", default=False)
"""Whether the task's request has a span or is not sampled. A call inside the process is part of its request."""


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


def _headers(scope: Scope) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    return found


def phases(segment: Segment) -> Iterator[tuple[str, float, float]]:
    """Yield name, begin and end of the phases of a sequence on a replica."""
    assert segment.ended is not None
    if segment.scheduled is None:  # the engine reports it with the first output
        yield "queue_or_prefill", segment.begun, segment.ended
        return
    yield "queue", segment.begun, segment.scheduled
    if segment.first_output is None:
        yield "prefill", segment.scheduled, segment.ended
        return
    yield "prefill", segment.scheduled, segment.first_output
    if segment.ended > segment.first_output:
        yield "decode", segment.first_output, segment.ended


class Tracing:
    """Makes spans, and exports them in the background. If the collector is too slow, spans are dropped."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._log = _SdkLog()
        resource = Resource.create({SERVICE_VERSION: version()})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # neither variable names it
            resource = resource.merge(Resource({SERVICE_NAME: "quire"}))
        self._exporter = exporter
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("quire", version())

    @staticmethod
    def to_collector(endpoint: str) -> Tracing:
        """Export to `--otlp-traces-endpoint`. Raises `ConfigError`."""
        module = otlp_exporter(endpoint)
        try:
            return Tracing(import_module(f"{module}.trace_exporter").OTLPSpanExporter(endpoint=endpoint))
        except Exception as error:  # the values of OpenTelemetry's environment variables
            raise ConfigError(f"--otlp-traces-endpoint {endpoint}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Export the last spans, for a few seconds at most."""
        late = threading.Timer(_FLUSH_SECONDS, self._give_up)
        late.start()
        self._provider.shutdown()
        late.cancel()
        self._log.close()

    def _give_up(self) -> None:
        logger.warning("the last traces could not be exported within %g seconds", _FLUSH_SECONDS)
        self._log.is_muted = True  # so that the attempts end
        self._exporter.shutdown()

    def start_request(self, scope: Scope, route: str | None) -> Span:
        """Start the span of an HTTP request, a child of the client's if it has sent one (`traceparent`)."""
        attributes = {name: value(scope) for name, value in REQUEST_ATTRIBUTES.items()} | {"http.route": route}
        return self._tracer.start_span(
            f"{scope['method']} {route}" if route else scope["method"],
            propagate.extract(_headers(scope)),
            SpanKind.SERVER,
            {name: value for name, value in attributes.items() if value is not None},
        )

    def record(self, parent: Context, offset: int, sequence: SequenceTrace) -> None:
        """Make the spans of a sequence that has ended. `offset`: nanoseconds from `time.monotonic` to the epoch."""
        try:
            self._record(parent, lambda seconds: round(seconds * 1e9) + offset, sequence)
        except Exception as error:  # a bug here must not fail requests
            self._log.once("a trace could not be made: %r", error)

    def _record(self, parent: Context, at: Callable[[float], int], sequence: SequenceTrace) -> None:
        found = {name: value(sequence) for name, value in SEQUENCE_ATTRIBUTES.items()}
        span = self._tracer.start_span(
            f"{sequence.operation} {sequence.model}",
            parent,
            attributes={name: value for name, value in found.items() if value is not None},
            start_time=at(sequence.arrived),
        )
        context = set_span_in_context(span, parent)
        for segment in sequence.segments:
            replica = {REPLICA: segment.replica}
            spans = list(phases(segment))
            for name, begin, end in spans:
                phase = self._tracer.start_span(name, context, attributes=replica, start_time=at(begin))
                is_failed = sequence.is_failed and segment is sequence.segments[-1]
                if name == spans[-1][0] and (is_failed or segment.left == "replica_lost"):
                    phase.set_status(StatusCode.ERROR, segment.reason or sequence.error)
                phase.end(at(end))
            for moment in segment.preempted:
                span.add_event("preempted", replica, at(moment))
            if segment.left and segment.ended is not None:
                span.add_event(segment.left, replica | {"quire.reason": segment.reason}, at(segment.ended))
        if sequence.is_failed:
            span.set_status(StatusCode.ERROR, sequence.error)
        span.end(at(sequence.finished))


class TracingMiddleware:
    """Traces POST requests: requests to generate, and no scrapes or health checks."""

    def __init__(self, app: ASGIApp, tracing: Tracing, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._tracing = tracing
        self._routes = [route for route in routes if isinstance(route, Route)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _IS_HANDLED.get():
            return await self._app(scope, receive, send)
        route = next((route.path for route in self._routes if route.matches(scope)[0] == Match.FULL), None)
        if route == "/ping":  # SageMaker's health check
            return await self._app(scope, receive, send)
        _IS_HANDLED.set(True)
        offset = time.time_ns() - time.monotonic_ns()
        span = self._tracing.start_request(scope, route)
        if not span.is_recording():  # not sampled
            return await self._app(scope, receive, send)
        trace = RequestTrace(partial(self._tracing.record, set_span_in_context(span, Context()), offset))
        status = 0

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        TRACE.set(trace)
        try:
            await self._app(scope, receive, send_and_note_status)
        except Exception as error:
            trace.error_type, status = type(error).__name__, 500
            raise
        finally:
            trace.end()
            is_gone = status in (0, 499)
            error_type = trace.error_type or ("aborted" if is_gone else str(status) if status >= 400 else None)
            if status:
                span.set_attribute("http.response.status_code", status)
            if error_type is not None:
                span.set_attribute("error.type", error_type)
            if status >= 500 or is_gone or trace.has_failed:
                span.set_status(StatusCode.ERROR, error_type)
            span.end(time.monotonic_ns() + offset)


class _SdkLog(logging.Handler):
    """Passes each kind of message of the SDK to Quire's log once: an unreachable collector would fill it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen: set[str] = set()
        self.is_muted = False
        self._sdk = logging.getLogger("opentelemetry")
        self._sdk.addHandler(self)
        self._sdk.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self.is_muted:
            self.once(str(record.msg), *(record.args if isinstance(record.args, tuple) else ()))

    def once(self, message: str, *arguments: object) -> None:
        """Log a message unless there was one of its kind."""
        if message not in self._seen:
            self._seen.add(message)
            logger.warning("--otlp-traces-endpoint: " + message + " (said once)", *arguments)

    def close(self) -> None:
        self._sdk.removeHandler(self)
        self._sdk.propagate = True
        super().close()
