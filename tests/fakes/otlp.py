"""An OpenTelemetry collector: a gRPC server with OTLP's trace service, which keeps all spans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class ReceivedSpan:
    """A span. Times are nanoseconds since the epoch."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    trace_state: str
    start: int
    end: int
    is_error: bool
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    resource: dict[str, Any]


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _attributes(found: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(found)
    return {pair.key: _value(pair.value) for pair in pairs}


@dataclass
class Collector(TraceServiceServicer):
    """The spans that it has received."""

    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        with self._arrived:
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                self.spans += [_span(span, resource) for scope in group.scope_spans for span in scope.spans]
            self._arrived.notify_all()
        return ExportTraceServiceResponse()

    def wait(self, condition: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Return the spans when they meet a condition; fails after a minute."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: condition(self.spans), 60), [span.name for span in self.spans]
            return list(self.spans)


def _span(span: Span, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.trace_state,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
        _attributes(span.attributes),
        [(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
        resource,
    )


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port of this host."""
    found = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(found, server)  # type: ignore[no-untyped-call]
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(None).wait()
