"""The spans of requests, from a fake core to an exporter in memory."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import (
    client_attributes,
    error_attributes,
    http_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
    user_agent_attributes,
)
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode
from starlette.types import Scope

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.client.tracing import RequestTimes, RequestTrace, SequenceTrace
from quire.server.config.server_options import otlp_exporter
from quire.server.http import tracing as traces
from quire.server.http.tracing import REPLICA, REQUEST_ATTRIBUTES, REQUEST_ATTRIBUTES_AT_END, SEQUENCE_ATTRIBUTES
from tests.fakes.api_server import Server, run_server

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = {"traceparent": f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01", "tracestate": "vendor=1"}
HELLO = {"prompt": "hello", "max_tokens": 9}
MONITORING = Path(__file__).parents[4] / "docs" / "guides" / "monitoring.md"


class Spans:
    """The spans of a server, once it has ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.server: Server

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def under(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """Child spans in the order of their begins."""
        found = [
            span
            for span in self.exporter.get_finished_spans()
            if span.parent is not None and span.parent.span_id == context(parent).span_id
        ]
        return sorted(found, key=times)

    @asynccontextmanager
    async def of_server(self, config: EngineConfig, **options: Any) -> AsyncIterator[Server]:
        tracing = traces.Tracing(self.exporter)
        try:
            async with run_server(config, tracing=tracing, **options) as server:
                self.server = server
                yield server
        finally:
            tracing.close()


@pytest.fixture
def spans(core_mode: Callable[[str], None]) -> Spans:
    return Spans()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = (each for each in caplog.records if each.name.startswith("quire.") and each.levelno >= logging.WARNING)
    return [each.getMessage() for each in found]


def context(span: ReadableSpan) -> SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_request_has_a_tree_of_spans_with_the_times_of_the_metrics(config: EngineConfig, spans: Spans) -> None:
    async with spans.of_server(config) as server:
        body = {**HELLO, "model": "alias", "temperature": 0.5, "top_k": 3, "seed": 7}
        response = await server.http.post("/v1/completions", json=body, headers=PARENT)
        metrics = server.frontend.metrics
    request, sequence = spans.one("POST /v1/completions"), spans.one("text_completion alias")
    queue, prefill, *decode = spans.under(sequence)
    assert [queue.name, prefill.name, *(each.name for each in decode)] == ["queue", "prefill", "decode"]
    assert spans.under(request) == [sequence]
    assert len(spans.exporter.get_finished_spans()) == 5
    for span in spans.exporter.get_finished_spans():
        assert context(span).trace_id == TRACE_ID
        assert context(span).trace_state.get("vendor") == "1"
        assert span.status.status_code == StatusCode.UNSET
    assert request.parent is not None
    assert request.parent.span_id == PARENT_ID
    assert (request.kind, sequence.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)

    assert times(request)[0] < times(sequence)[0] == times(queue)[0]
    assert times(queue)[1] == times(prefill)[0]
    assert times(prefill)[1] == times(decode[0])[0]
    assert times(decode[0])[1] <= times(sequence)[1] < times(request)[1]
    for name, (begin, end) in {
        "request_queue_time_seconds": times(queue),
        "request_prefill_time_seconds": times(prefill),
        "request_decode_time_seconds": times(decode[0]),
        "time_to_first_token_seconds": (times(sequence)[0], times(prefill)[1]),
        "e2e_request_latency_seconds": times(sequence),
    }.items():
        assert (end - begin) / 1e9 == pytest.approx(metrics.histogram(0, name)[-1], abs=1e-7), name

    assert (
        attributes(request).items()
        >= {
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
            "url.path": "/v1/completions",
            "url.scheme": "http",
            "client.address": "127.0.0.1",
        }.items()
    )
    found = attributes(sequence)
    assert (
        found.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": "alias",
            "gen_ai.request.max_tokens": 9,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_k": 3,
            "gen_ai.request.seed": 7,
            "gen_ai.response.id": response.json()["id"],
            "gen_ai.usage.input_tokens": response.json()["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": response.json()["usage"]["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": 1,
            "gen_ai.latency.time_in_queue": metrics.histogram(0, "request_queue_time_seconds")[-1],
            "gen_ai.latency.time_in_model_decode": metrics.histogram(0, "request_decode_time_seconds")[-1],
            "quire.sequence": 0,
        }.items()
    )
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert not found.keys() & {"error.type", "gen_ai.request.choice.count"}
    assert {attributes(span)[REPLICA] for span in (queue, prefill, decode[0])} == {0}


async def test_each_sequence_has_a_subtree(config: EngineConfig, spans: Spans) -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with spans.of_server(config) as server:
        await server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 5, "n": 2})
        several = {"prompt": ["a b", "c d", "e f"], "max_tokens": 2, "stream": True}
        await server.http.post("/v1/completions", json=several)
    for name, sequence, count in (
        ("POST /v1/chat/completions", "chat echo", 2),
        ("POST /v1/completions", "text_completion echo", 3),
    ):
        request = spans.one(name)
        assert request.parent is None
        found = spans.under(request)
        assert [span.name for span in found] == [sequence] * count
        assert sorted(attributes(span)["quire.sequence"] for span in found) == list(range(count))
        assert all([span.name for span in spans.under(each)] == ["queue", "prefill", "decode"] for each in found)
        assert times(request)[1] > max(times(span)[1] for span in found)
    assert attributes(spans.named("chat echo")[0])["gen_ai.request.choice.count"] == 2


async def test_a_request_has_spans_for_some_of_very_many_sequences(
    config: EngineConfig, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.client.tracing._MAX_SEQUENCES", 3)
    async with spans.of_server(config) as server:
        await server.http.post("/v1/completions", json={**HELLO, "n": 5})
    assert len(spans.under(spans.one("POST /v1/completions"))) == 3


async def test_a_refused_request_has_one_span(config: EngineConfig, spans: Spans) -> None:
    async with spans.of_server(config, api_key="k", root_path="/llm") as server:
        key = {"Authorization": "Bearer k"}
        await server.http.post("/llm/v1/completions", json={**HELLO, "n": 0}, headers={**key, **PARENT})
        await server.http.post("/v1/completions", json=HELLO)
        await server.http.post("/v1/chat/completions", json={"messages": "x" * 9}, headers=key)
        await server.http.post("/nothing", headers=key)
        for path in ("/health", "/metrics", "/v1/models"):
            assert (await server.http.get(path, headers=key)).status_code == 200
        assert (await server.http.post("/ping", headers=key)).status_code == 200
    found = [
        (span.name, attributes(span)["http.response.status_code"], attributes(span)["error.type"])
        for span in spans.exporter.get_finished_spans()
    ]
    assert found == [
        ("POST /v1/completions", 400, "invalid_request_error"),
        ("POST /v1/completions", 401, "invalid_api_key"),
        ("POST /v1/chat/completions", 400, "invalid_request_error"),
        ("POST", 404, "invalid_request_error"),
    ]
    first = spans.exporter.get_finished_spans()[0]
    assert first.parent is not None
    assert (first.parent.trace_id, first.parent.span_id) == (TRACE_ID, PARENT_ID)
    # A mistake of the client is no error of the server, by the conventions.
    assert {span.status.status_code for span in spans.exporter.get_finished_spans()} == {StatusCode.UNSET}


async def test_failures_are_errors(config: EngineConfig, spans: Spans) -> None:
    async with spans.of_server(config) as server:
        for stream in (False, True):
            await server.http.post("/v1/completions", json={"prompt": "<fail>", "max_tokens": 3, "stream": stream})
    whole, streamed = spans.named("POST /v1/completions")
    assert attributes(whole)["http.response.status_code"] == 500
    assert attributes(streamed)["http.response.status_code"] == 200
    for request in (whole, streamed):
        assert request.status.status_code == StatusCode.ERROR
        assert attributes(request)["error.type"] == "request_failed"
        (sequence,) = spans.under(request)
        (phase,) = spans.under(sequence)
        assert phase.name == "queue_or_prefill"  # there was no output that tells
        for span in (sequence, phase):
            assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "the KV cache is too small")
        assert attributes(sequence)["error.type"] == "request_failed"
        assert "gen_ai.response.finish_reasons" not in attributes(sequence)


async def test_a_client_that_leaves_aborts_its_spans(config: EngineConfig, spans: Spans) -> None:
    endless = {"prompt": "a b c", "max_tokens": 100, "ignore_eos": True, "stream": True}
    async with spans.of_server(config) as server:
        async with server.http.stream("POST", "/v1/completions", json=endless) as response:
            async for _ in response.aiter_lines():
                break
        await server.until_idle()
    request, sequence = spans.one("POST /v1/completions"), spans.one("text_completion echo")
    assert [span.name for span in spans.under(sequence)] == ["queue", "prefill", "decode"]
    for span in (request, sequence, spans.one("decode")):
        assert span.status.status_code == StatusCode.ERROR
    assert attributes(request)["error.type"] == attributes(sequence)["error.type"] == "aborted"
    assert spans.one("prefill").status.status_code == StatusCode.UNSET


async def test_a_time_limit_is_named(config: EngineConfig, spans: Spans) -> None:
    async with spans.of_server(config, request_timeout=0.3) as server:
        response = await server.http.post("/v1/completions", json={"prompt": "a<hang>"})
        assert response.status_code == 504
    assert attributes(spans.one("POST /v1/completions"))["error.type"] == "request_timeout"
    assert attributes(spans.one("text_completion echo"))["error.type"] == "aborted"


async def test_a_call_inside_the_server_is_part_of_its_request(config: EngineConfig, spans: Spans) -> None:
    async with spans.of_server(config) as server:
        assert (await server.http.post("/invocations", json=HELLO)).status_code == 200
        assert (await server.http.post("/v1/completions", json=HELLO)).status_code == 200  # on the same connection
    first, second = (span for span in spans.exporter.get_finished_spans() if span.kind == SpanKind.SERVER)
    assert (first.name, second.name) == ("POST /invocations", "POST /v1/completions")
    assert len(spans.under(first)) == len(spans.under(second)) == 1


async def test_pipelined_requests_have_their_own_spans(config: EngineConfig, spans: Spans) -> None:
    """uvicorn starts the second one inside the `send` of the first."""
    body = json.dumps(HELLO).encode()
    requests = b""
    for trace_id in (TRACE_ID, TRACE_ID + 1):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\ntraceparent: 00-{trace_id:032x}-{PARENT_ID:016x}-01\r\n"
        requests += f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    async with spans.of_server(config) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http.base_url.port)
        writer.write(requests + b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answers = await reader.read()
        writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    found = spans.named("POST /v1/completions")
    assert [context(request).trace_id for request in found] == [TRACE_ID, TRACE_ID + 1]
    assert [[span.name for span in spans.under(request)] for request in found] == [["text_completion echo"]] * 2


async def test_what_is_not_sampled_costs_nothing(
    config: EngineConfig, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr("quire.server.client.tracing.SequenceTrace.__init__", fail)
    async with spans.of_server(config) as server:
        unsampled = {"traceparent": PARENT["traceparent"][:-1] + "0"}
        assert (await server.http.post("/v1/completions", json=HELLO, headers=unsampled)).status_code == 200
    assert not spans.exporter.get_finished_spans()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    other = Spans()
    async with other.of_server(config) as server:
        assert (await server.http.post("/v1/completions", json=HELLO)).status_code == 200
    assert not other.exporter.get_finished_spans()


async def test_calls_inside_the_server_are_sampled_with_their_request(
    config: EngineConfig, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    start_request = traces.Tracing.start_request

    def start(tracing: traces.Tracing, scope: Scope, route: str | None) -> Span:
        asked.append(scope["path"])
        return start_request(tracing, scope, route)

    monkeypatch.setattr(traces.Tracing, "start_request", start)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    async with spans.of_server(config) as server:
        for _ in range(2):
            assert (await server.http.post("/predict", json={"instances": [HELLO] * 3})).status_code == 200
    assert asked == ["/predict"] * 2
    assert not spans.exporter.get_finished_spans()


async def test_a_fault_of_tracing_fails_no_request(
    config: EngineConfig, spans: Spans, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(SEQUENCE_ATTRIBUTES, "quire.sequence", lambda sequence: 1 // 0)
    async with spans.of_server(config) as server:
        for _ in range(3):
            assert (await server.http.post("/v1/completions", json=HELLO)).status_code == 200
    assert len(spans.exporter.get_finished_spans()) == 3
    assert warnings(caplog) == [
        "--otlp-traces-endpoint: a trace could not be made: "
        "ZeroDivisionError('integer division or modulo by zero') (said once)"
    ]


async def test_embeddings_have_no_decode(config: EngineConfig, spans: Spans) -> None:
    sequence = made("stop", params=None)
    sequence.place(0)
    sequence.receive(EngineCoreOutput("r", [], vector=b"1234", running_seconds=2.0), 105.0)
    found = ended(sequence, None, RequestTimes(5.0, 3.0, 2.0, 0.0))
    assert [(span.name, *seconds(span)) for span in found] == [
        ("queue", 100.0, 103.0),
        ("prefill", 103.0, 105.0),
        ("embeddings m", 100.0, 105.0),
    ]
    assert not attributes(found[-1]).keys() & {"gen_ai.usage.output_tokens", "gen_ai.latency.time_to_first_token"}


# --- the builder ------------------------------------------------------------------------------------------------


def made(reason: Any, params: SamplingParams | None) -> SequenceTrace:
    """A sequence that arrived at 100."""
    request = RequestTrace(lambda sequence: None, model="m")
    request.generate("id", "embeddings" if params is None else "chat", params)
    sequence = request.add(0, 7, 100.0)
    assert sequence is not None
    sequence.finish_reason = reason
    return sequence


def ended(sequence: SequenceTrace, last_output: float | None, of_metrics: RequestTimes) -> tuple[ReadableSpan, ...]:
    """Its spans in the order in which they end."""
    sequence.finish(sequence.finish_reason, last_output, of_metrics)
    exporter = InMemorySpanExporter()
    tracing = traces.Tracing(exporter)
    sequence.request.record = partial(tracing.record, Context(), 0)
    sequence.request.end()
    tracing.close()
    return exporter.get_finished_spans()


def seconds(span: ReadableSpan) -> tuple[float, float]:
    begin, end = times(span)
    return begin / 1e9, end / 1e9


def test_a_sequence_that_moves_has_the_phases_of_both_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = made("length", SamplingParams(n=1))
    sequence.place(1)
    sequence.receive(EngineCoreOutput("r", [5], running_seconds=2.0), 103.0)
    monkeypatch.setattr("quire.server.client.tracing.time.monotonic", lambda: 110.0)
    sequence.leave("replica_lost", "replica 1 has died: killed")
    sequence.place(0)
    sequence.receive(EngineCoreOutput("r", [6], running_seconds=1.0, preempted_after=[0.25, 0.5]), 115.0)
    last = EngineCoreOutput("r", [7], None, "length", running_seconds=6.0, preempted_after=[0.25, 0.5, 5.0])
    sequence.receive(last, 120.0)
    found = ended(sequence, 120.0, RequestTimes(20.5, 1.0, 2.0, 17.0, 40))
    assert [(span.name, attributes(span).get(REPLICA), *seconds(span)) for span in found] == [
        ("queue", 1, 100.0, 101.0),
        ("prefill", 1, 101.0, 103.0),
        ("decode", 1, 103.0, 110.0),
        ("queue", 0, 110.0, 114.0),
        ("prefill", 0, 114.0, 115.0),
        ("decode", 0, 115.0, 120.0),
        ("chat m", None, 100.0, 120.5),
    ]
    lost = found[2].status
    assert (lost.status_code, lost.description) == (StatusCode.ERROR, "replica 1 has died: killed")
    assert {span.status.status_code for span in (*found[:2], *found[3:])} == {StatusCode.UNSET}
    events = [(event.name, event.timestamp / 1e9, dict(event.attributes or {})) for event in found[-1].events]
    assert events == [
        ("replica_lost", 110.0, {REPLICA: 1, "quire.reason": "replica 1 has died: killed"}),
        *(("preempted", at, {REPLICA: 0}) for at in (114.25, 114.5, 119.0)),
    ]


def test_a_sequence_whose_replica_dies_before_the_first_output(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = made("abort", SamplingParams())
    sequence.place(0)
    monkeypatch.setattr("quire.server.client.tracing.time.monotonic", lambda: 104.0)
    sequence.leave("replica_lost", "replica 0 has died")
    sequence.place(1)
    found = ended(sequence, None, RequestTimes(6.0))
    assert [(span.name, attributes(span).get(REPLICA), *seconds(span)) for span in found] == [
        ("queue_or_prefill", 0, 100.0, 104.0),
        ("queue_or_prefill", 1, 104.0, 106.0),
        ("chat m", None, 100.0, 106.0),
    ]
    assert {span.status.status_code for span in found} == {StatusCode.ERROR}


def test_a_sequence_that_is_moved_has_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = made("length", SamplingParams(max_tokens=2))
    sequence.place(1)
    monkeypatch.setattr("quire.server.client.tracing.time.monotonic", lambda: 104.0)
    sequence.leave("moved", "replica 1 is to be removed")
    sequence.place(0)
    sequence.receive(EngineCoreOutput("r", [6], None, "length", running_seconds=1.0), 106.0)
    found = ended(sequence, 106.0, RequestTimes(6.0, 5.0, 1.0, 0.0, 1))
    assert [(span.name, attributes(span).get(REPLICA), *seconds(span)) for span in found] == [
        ("queue_or_prefill", 1, 100.0, 104.0),
        ("queue", 0, 104.0, 105.0),
        ("prefill", 0, 105.0, 106.0),
        ("chat m", None, 100.0, 106.0),
    ]
    assert {span.status.status_code for span in found} == {StatusCode.UNSET}
    (event,) = found[-1].events
    assert (event.name, event.timestamp / 1e9) == ("moved", 104.0)
    assert dict(event.attributes or {}) == {REPLICA: 1, "quire.reason": "replica 1 is to be removed"}


def test_a_sequence_that_is_handed_over_has_a_decode_on_one_replica() -> None:
    sequence = made("length", SamplingParams(max_tokens=2))
    sequence.place(1)
    sequence.receive(EngineCoreOutput("r", [5], running_seconds=2.0, is_handed_over=True), 103.0)
    sequence.leave("handed_over", "replica 1 has computed the prompt")
    sequence.place(0)
    sequence.receive(EngineCoreOutput("r", [6], running_seconds=1.0), 106.0)
    found = ended(sequence, 108.0, RequestTimes(8.0, 1.0, 2.0, 5.0, 3))
    assert [(span.name, attributes(span).get(REPLICA), *seconds(span)) for span in found] == [
        ("queue", 1, 100.0, 101.0),
        ("prefill", 1, 101.0, 103.0),
        ("queue", 0, 103.0, 105.0),
        ("prefill", 0, 105.0, 106.0),
        ("decode", 0, 106.0, 108.0),
        ("chat m", None, 100.0, 108.0),
    ]
    assert {span.status.status_code for span in found} == {StatusCode.UNSET}
    (event,) = found[-1].events
    assert (event.name, event.timestamp / 1e9) == ("handed_over", 103.0)


async def test_a_beam_search_has_one_span(config: EngineConfig, spans: Spans) -> None:
    beams = {**HELLO, "use_beam_search": True, "n": 2, "max_tokens": 3}
    async with spans.of_server(config, request_timeout=2) as server:
        answer = (await server.http.post("/v1/completions", json=beams)).json()
        for prompt in ("<fail>", "a<hang>"):
            await server.http.post("/v1/completions", json={**beams, "prompt": prompt})
    assert len(spans.exporter.get_finished_spans()) == 6
    whole, failed, late = (attributes(span) for span in spans.named("text_completion echo"))
    assert whole["gen_ai.request.max_tokens"] == 3
    assert whole["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert whole["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert whole["gen_ai.response.finish_reasons"] == tuple(each["finish_reason"] for each in answer["choices"])
    assert (failed["error.type"], late["error.type"]) == ("request_failed", "aborted")


async def test_the_api_gives_the_finish_reason(config: EngineConfig, spans: Spans) -> None:
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    body = {
        "messages": [{"role": "user", "content": call}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template": "{% if tools %}{{ messages[0].content }}{% endif %}",
    }
    async with spans.of_server(config, tool_call_parser="hermes", trust_request_chat_template=True) as server:
        for stream in (False, True):
            answer = await server.http.post("/v1/chat/completions", json={**body, "stream": stream})
            assert '"finish_reason":"tool_calls"' in answer.text
    for span in spans.named("chat echo"):
        assert attributes(span)["gen_ai.response.finish_reasons"] == ("tool_calls",)


async def test_a_prompt_that_is_only_scored_has_no_output_tokens(config: EngineConfig, spans: Spans) -> None:
    async with spans.of_server(config) as server:
        body = {"prompt": "hello", "max_tokens": 0, "echo": True}
        answer = (await server.http.post("/v1/completions", json=body)).json()
    found = attributes(spans.one("text_completion echo"))
    assert found["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 0
    assert found["gen_ai.response.finish_reasons"] == (answer["choices"][0]["finish_reason"],)


def test_a_sequence_may_outlive_its_request() -> None:
    found: list[SequenceTrace] = []
    request = RequestTrace(found.append)
    early, late = request.add(0, 7, 100.0), request.add(1, 7, 100.0)
    assert early is not None
    assert late is not None
    early.finish("stop", None, RequestTimes())
    assert not found, "the API may have another finish reason"
    request.end()
    assert found == [early]
    late.finish("stop", None, RequestTimes())
    assert found == [early, late]


def test_names_are_those_of_the_conventions() -> None:
    """`gen_ai.latency.…` are vLLM's."""
    known: set[str] = {
        value
        for module in (
            *(client_attributes, error_attributes, http_attributes, network_attributes, server_attributes),
            *(url_attributes, user_agent_attributes, gen_ai_attributes),
        )
        for value in vars(module).values()
        if isinstance(value, str)
    }
    assert {*REQUEST_ATTRIBUTES, *REQUEST_ATTRIBUTES_AT_END} <= known
    others = {name for name in SEQUENCE_ATTRIBUTES if not name.startswith(("gen_ai.latency.", "quire."))}
    assert others <= known
    assert SEQUENCE_ATTRIBUTES["gen_ai.operation.name"] is not None
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert operations >= {"chat", "text_completion", "embeddings"}


def test_the_guide_lists_all_attributes() -> None:
    section = MONITORING.read_text().partition("\n## Traces\n")[2].partition("\n## ")[0]
    rooms = "http|url|server|client|network|user_agent|gen_ai|error|quire"
    listed = set(re.findall(rf"`((?:{rooms})\.[a-z_.0-9]+)`", section))
    made = {*REQUEST_ATTRIBUTES, *REQUEST_ATTRIBUTES_AT_END, *SEQUENCE_ATTRIBUTES, REPLICA, "quire.reason"}
    assert listed == made


# --- the exporter -----------------------------------------------------------------------------------------------


async def test_a_collector_that_never_answers_delays_nothing(
    config: EngineConfig,
    spans: Spans,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(traces, "_FLUSH_SECONDS", 0.05)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "600")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts connections
        tracing = traces.Tracing.to_collector(f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with run_server(config, tracing=tracing) as server:
            for _ in range(6):
                assert (await server.http.post("/v1/completions", json=HELLO)).status_code == 200
        await asyncio.to_thread(tracing.close)
    assert not capsys.readouterr().err, "each line of the log has a time and a level"
    assert warnings(caplog) == [
        "--otlp-traces-endpoint: Queue full, dropping Span. (said once)",
        "the last traces could not be exported within 0.05 seconds",
    ]


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "quire"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,zone=b"}, "theirs"),
    ],
)
def test_the_service_has_the_name_that_opentelemetry_is_told(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for variable in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    tracing = traces.Tracing(InMemorySpanExporter())
    tracing.close()
    resource = tracing._provider.resource.attributes
    assert resource["service.name"] == name
    assert resource["service.version"] == metadata.version("quire-llm")
    assert resource.get("zone") == ("b" if name == "theirs" else None)


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:4317", "grpc://10.0.0.1:4317", "http://a:4317", "https://a.example:443", "http://[::1]:4317"],
)
def test_endpoints(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    assert otlp_exporter(endpoint) == "opentelemetry.exporter.otlp.proto.grpc"
    traces.Tracing.to_collector(endpoint).close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setattr("quire.server.config.server_options.metadata.version", lambda package: "1")
    if endpoint.startswith("http"):
        assert otlp_exporter(endpoint) == "opentelemetry.exporter.otlp.proto.http"
    else:
        with pytest.raises(ConfigError, match="expected a URL such as http://localhost:4318/v1/traces for http/proto"):
            otlp_exporter(endpoint)


@pytest.mark.parametrize("endpoint", ["", "http://", "ftp://a:1", "a:99999", "http://a:b", "unix:///tmp/x"])
def test_bad_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--otlp-traces-endpoint {endpoint}: expected a URL such as")):
        otlp_exporter(endpoint)


def test_other_protocols_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json: must be grpc or http/proto"):
        otlp_exporter("http://a:1")


@pytest.mark.parametrize(
    ("protocol", "install"),
    [("grpc", "'quire-llm[otlp]'"), ("http/protobuf", "opentelemetry-exporter-otlp-proto-http")],
)
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, protocol: str, install: str) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr("quire.server.config.server_options.metadata.version", version)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with pytest.raises(ConfigError) as refused:
        otlp_exporter("http://a:1")
    assert str(refused.value) == f"--otlp-traces-endpoint requires OpenTelemetry for {protocol}: pip install {install}"


def test_bad_variables_of_opentelemetry_are_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint http://a:1: ValueError: could not convert"):
        traces.Tracing.to_collector("http://a:1")
