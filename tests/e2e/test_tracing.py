"""Traces of a real server, as an OpenTelemetry collector gets them by OTLP over gRPC."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.serving import Server, serve
from tests.fakes.otlp import Collector, ReceivedSpan, collector

PHASES = ["queue", "prefill", "decode"]
LENGTH = 1800
"""Tokens of a stream that a busy machine does not end before the test does something to it."""
LONG = {"prompt": "Quire is", "max_tokens": LENGTH, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module", autouse=True)
def _variables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("OTEL_SERVICE_NAME", "tested")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield


class Traced:
    """A client whose requests have spans of their own."""

    def __init__(self, received: Collector) -> None:
        self.http: httpx.Client
        self._received = received
        self.trace_id, self.span_id = b"", b""

    @contextlib.contextmanager
    def connected(self, server: Server) -> Iterator[None]:
        with httpx.Client(base_url=server.url, timeout=120) as self.http:
            yield

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the next request."""
        self.trace_id, self.span_id = secrets.token_bytes(16), secrets.token_bytes(8)
        return {"traceparent": f"00-{self.trace_id.hex()}-{self.span_id.hex()}-01", "tracestate": "vendor=1"}

    def tree(self, num_sequences: int) -> tuple[ReceivedSpan, list[tuple[ReceivedSpan, list[ReceivedSpan]]]]:
        """The spans of the last request: its own, and each sequence's with its phases. Checks their common
        properties."""

        def is_whole(spans: list[ReceivedSpan]) -> bool:  # a parent ends after its children
            return any((span.trace_id, span.parent_id) == (self.trace_id, self.span_id) for span in spans)

        spans = [span for span in self._received.wait(is_whole) if span.trace_id == self.trace_id]
        (request,) = (span for span in spans if span.parent_id == self.span_id)
        sequences = sorted(
            (span for span in spans if span.parent_id == request.span_id), key=lambda s: s.attributes["quire.sequence"]
        )
        assert len(sequences) == num_sequences
        found = []
        for sequence in sequences:
            phases = sorted((s for s in spans if s.parent_id == sequence.span_id), key=lambda s: (s.start, s.end))
            assert request.start <= sequence.start == phases[0].start
            assert all(before.end == after.start for before, after in pairwise(phases))
            assert phases[-1].end <= sequence.end <= request.end
            found.append((sequence, phases))
        assert len(spans) == 1 + sum(1 + len(phases) for _, phases in found)
        for span in spans:
            assert span.start <= span.end
            assert span.trace_state == "vendor=1"
            assert span.resource["service.name"] == "tested"
        return request, found


def test_requests_have_their_spans() -> None:
    with collector() as received:
        client = Traced(received)
        flags = ("--otlp-traces-endpoint", received.endpoint, "--enable-per-request-metrics")
        with serve(*flags) as server, client.connected(server):
            check_plain(client)
            check_stream(client)
            check_several(client)
            check_abort(client)
            check_refusal(client)
    assert server.process.returncode == 0
    assert not any("otlp" in line for line in server.lines)


def check_plain(client: Traced) -> None:
    body = {"model": "quire-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "n": 1}
    response = client.http.post("/v1/chat/completions", json=body, headers=client.headers)
    answer = response.raise_for_status().json()
    request, [(sequence, phases)] = client.tree(1)
    assert (request.name, sequence.name) == ("POST /v1/chat/completions", "chat quire-demo")
    assert [phase.name for phase in phases] == PHASES
    assert not any(span.is_error for span in (request, sequence, *phases))
    assert request.attributes["http.response.status_code"] == 200
    assert (
        sequence.attributes.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": "quire-demo",
            "gen_ai.request.max_tokens": 8,
            "gen_ai.response.id": answer["id"],
            "gen_ai.response.finish_reasons": [answer["choices"][0]["finish_reason"]],
            "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        }.items()
    )
    check_times(sequence, phases, answer["metrics"])


def check_stream(client: Traced) -> None:
    body = {**LONG, "max_tokens": 20, "stream_options": {"include_usage": True}}
    text = client.http.post("/v1/completions", json=body, headers=client.headers).raise_for_status().text
    last = json.loads(text.strip().split("\n\n")[-2].removeprefix("data: "))
    _, [(sequence, phases)] = client.tree(1)
    assert sequence.name == "text_completion quire-demo"
    assert sequence.attributes["gen_ai.usage.output_tokens"] == 20
    check_times(sequence, phases, last["metrics"])


def check_times(sequence: ReceivedSpan, phases: list[ReceivedSpan], metrics: dict[str, float]) -> None:
    """Response, attributes and spans have the same times."""
    queue, prefill, decode = ((phase.end - phase.start) / 1e9 for phase in phases)
    names = "time_in_queue", "time_in_model_prefill", "time_in_model_decode"
    values = [sequence.attributes[f"gen_ai.latency.{name}"] for name in names]
    assert values == pytest.approx([queue, prefill, decode], abs=1e-6)
    in_response = ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
    assert [metrics[name] / 1000 for name in in_response] == pytest.approx(values, abs=1e-6)
    assert min(prefill, decode) > 0
    count = sequence.attributes["gen_ai.usage.output_tokens"]
    assert metrics["mean_itl_ms"] == pytest.approx(values[2] / (count - 1) * 1000)
    assert metrics["tokens_per_second"] == pytest.approx(count / sum(values[1:]))


def check_several(client: Traced) -> None:
    body = {"prompt": ["One", "Two"], "n": 2, "max_tokens": 5, "ignore_eos": True}
    client.http.post("/v1/completions", json=body, headers=client.headers).raise_for_status()
    _, sequences = client.tree(4)
    for number, (sequence, phases) in enumerate(sequences):
        assert sequence.attributes["quire.sequence"] == number
        assert sequence.attributes["gen_ai.request.choice.count"] == 2
        assert [phase.name for phase in phases] == PHASES


def check_abort(client: Traced) -> None:
    with client.http.stream("POST", "/v1/completions", json=LONG, headers=client.headers) as response:
        next(response.iter_lines())
    request, [(sequence, phases)] = client.tree(1)
    assert [span.attributes.get("error.type") for span in (request, sequence)] == ["aborted"] * 2
    assert all(span.is_error for span in (request, sequence, phases[-1]))
    assert sequence.attributes["gen_ai.usage.output_tokens"] < LENGTH


def check_refusal(client: Traced) -> None:
    refused = client.http.post("/v1/completions", json={"prompt": "x", "top_p": 7}, headers=client.headers)
    assert refused.status_code == 400
    request, _ = client.tree(0)
    assert request.attributes["http.response.status_code"] == 400
    assert request.attributes["error.type"] == "invalid_request_error"
    assert not request.is_error


@pytest.mark.slow
def test_a_request_that_another_replica_takes_over_shows_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # spans are exported when the server ends
    with contextlib.ExitStack() as stack:
        received = stack.enter_context(collector())
        server = stack.enter_context(serve("-dp", "2", "--otlp-traces-endpoint", received.endpoint))
        client = Traced(received)
        stack.enter_context(client.connected(server))
        with client.http.stream("POST", "/v1/completions", json=LONG, headers=client.headers) as response:
            lines = response.iter_lines()
            next(lines)
            (busy,) = (each for each in client.http.get("/replicas").json()["replicas"] if each["num_requests_running"])
            dead = busy["index"]
            server.named(f"quire-core-{dead}").send_signal(signal.SIGKILL)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert not received.spans
    request, [(sequence, phases)] = client.tree(1)
    assert [(phase.name, phase.attributes["quire.replica"]) for phase in phases] == [
        *((name, dead) for name in PHASES),
        *((name, 1 - dead) for name in PHASES),
    ]
    assert [phase.is_error for phase in phases] == [False, False, True, False, False, False]
    ((name, at, attributes),) = sequence.events
    assert (name, at, attributes["quire.replica"]) == ("replica_lost", phases[2].end, dead)
    assert f"replica {dead} has died" in attributes["quire.reason"]
    assert not request.is_error
    assert sequence.attributes["gen_ai.usage.output_tokens"] == LENGTH


def maps_grpc(process: psutil.Process) -> bool:
    return "cygrpc" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.slow
def test_without_a_collector_requests_are_served_and_the_log_says_so_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with serve("--otlp-traces-endpoint", endpoint) as server:
        # A process that it starts is a copy of it at first.
        assert {process.name() for process in server.family() if maps_grpc(process)} == {"quire-api"}
        for _ in range(3):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).raise_for_status()
    assert server.process.returncode == 0
    said = [re.sub(r".*--otlp-traces-endpoint: ", "", line) for line in server.lines if "--otlp-traces-" in line]
    assert any("UNAVAILABLE" in line for line in said)
    assert len(said) == len(set(said)) <= 2, said


@pytest.mark.slow
def test_without_the_flag_there_is_no_exporter() -> None:
    with serve() as server:
        headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        body = {"prompt": "a", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).raise_for_status().json()
        assert "metrics" not in answer
        assert not any(maps_grpc(process) for process in server.family())
