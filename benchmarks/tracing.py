"""The cost of traces: requests to a server with `--otlp-traces-endpoint` and to one without, in turns.

.venv/bin/python benchmarks/tracing.py [--quick] [--json]

Both servers run all the time. In each round each of them answers the same short chats, 16 at a time, the first one
alternately; all of them are sampled. A process of its own takes the spans. The ratios are medians over the rounds:
processor time of the API process for a request, which includes the export, and requests per second. --quick only shows
that it works.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import grpc
import httpx
import machine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from serving import Server, serving

_STREAMS = 16
_TOKENS = 16
_SPANS = 5
"""Spans of a request."""


class Collector(TraceServiceServicer):
    """Counts spans."""

    num_spans = 0

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        self.num_spans += sum(len(scope.spans) for group in request.resource_spans for scope in group.scope_spans)
        return ExportTraceServiceResponse()


def collect(connection: Connection[Any, Any]) -> None:
    """Send the port, and at the end the number of spans."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    connection.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    connection.recv()
    connection.send(collector.num_spans)
    server.stop(None).wait()


@contextlib.contextmanager
def collecting() -> Iterator[Connection[Any, Any]]:
    """A collector in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()  # ends it, if it still waits
        process.join()


async def measure(server: Server, client: httpx.AsyncClient, count: int) -> tuple[float, float]:
    """Processor seconds of the API process per request, and requests per second."""
    left = iter(range(count))
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": _TOKENS, "ignore_eos": True}

    async def ask() -> None:
        for _ in left:
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()

    process = server.api_process
    before, begun = sum(process.cpu_times()[:2]), time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(_STREAMS)))
    seconds = time.perf_counter() - begun
    return (sum(process.cpu_times()[:2]) - before) / count, count / seconds


async def compare(traced: Server, plain: Server, rounds: int, count: int) -> tuple[list[float], list[float]]:
    """For each round, the ratios of the processor time and of the rate, with traces to without."""
    limits = httpx.Limits(max_connections=None)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=300, limits=limits)
            )
            for server in (traced, plain)
        ]
        pairs = list(zip((traced, plain), clients, strict=True))
        costs, rates = [], []
        for turn in range(rounds + 1):
            order = pairs if turn % 2 else pairs[::-1]
            found = {server: await measure(server, client, count) for server, client in order}
            if turn:  # the first one warms up
                costs.append(found[traced][0] / found[plain][0])
                rates.append(found[traced][1] / found[plain][1])
        return costs, rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=400, help="of each server in a round (default: 400)")
    parser.add_argument("--quick", action="store_true", help="few requests, two rounds: a smoke test")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests = 2, 32
    with collecting() as collector:
        endpoint = f"http://127.0.0.1:{collector.recv()}"
        with serving() as plain:
            with serving("--otlp-traces-endpoint", endpoint) as traced:
                costs, rates = asyncio.run(compare(traced, plain, options.rounds, options.requests))
            collector.send(None)  # the server has exported all spans
            num_spans = collector.recv()
    results = {
        "API process, seconds": statistics.median(costs),
        "requests per second": statistics.median(rates),
        "spans exported": num_spans / (_SPANS * options.requests * (options.rounds + 1)),
    }
    if options.json:
        json.dump(results, sys.stdout, indent=1)
        print()
        return
    print(machine.cpu_name())
    for name, value in results.items():
        print(f"{name:24} {value:8.3f}")


if __name__ == "__main__":
    main()
