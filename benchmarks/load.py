"""A load generator for OpenAI-compatible servers that records when tokens arrive.

It uses one connection per request and no HTTP library, because it shares the cores with the server under test.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any


class RequestFailed(Exception):
    """The server rejected a request or closed the connection."""


@dataclass(frozen=True)
class Address:
    """The address of the completions endpoint."""

    port: int
    path: str = "/v1/completions"
    host: str = "127.0.0.1"


@dataclass(frozen=True)
class Workload:
    """Request bodies, the time in seconds at which each is sent, and the expected output length."""

    bodies: Sequence[dict[str, Any]]
    arrivals: Sequence[float]
    output_tokens: int


@dataclass
class Answer:
    """One answered request; times in seconds on one clock."""

    sent: float
    tokens: int = 0
    """Output tokens reported by the server."""
    times: list[float] = field(default_factory=list)
    """Arrival time of each piece of output: one token, unless the server sends several at once."""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [late - early for early, late in zip(self.times, self.times[1:], strict=False)]

    @property
    def itl(self) -> float:
        """Mean time between tokens after the first, independent of how they are split into pieces."""
        return (self.times[-1] - self.times[0]) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Figures:
    """The figures of a workload, in seconds and tokens per second."""

    throughput: float
    """Output tokens per second, from the first request sent to the last token."""
    ttft: float
    ttft_p99: float
    itl: float
    itl_p99: float


async def run(address: Address, workload: Workload) -> list[Answer]:
    """Send a workload. Raises `RequestFailed` if a request fails or its answer has the wrong length."""
    begun = time.perf_counter()

    async def one(body: dict[str, Any], at: float) -> Answer:
        await asyncio.sleep(max(begun + at - time.perf_counter(), 0))
        return await complete(address, body)

    answers = await asyncio.gather(*map(one, workload.bodies, workload.arrivals))
    check_lengths(answers, workload.output_tokens)
    return answers


def check_lengths(answers: Sequence[Answer], output_tokens: int) -> None:
    """Raise `RequestFailed` if an answer does not have `output_tokens` tokens."""
    wrong = [answer.tokens for answer in answers if answer.tokens != output_tokens]
    if wrong:
        raise RequestFailed(f"{len(wrong)} of {len(answers)} answers have {wrong[:4]} tokens, not {output_tokens}")


def figures(answers: Sequence[Answer]) -> Figures:
    """Throughput of all answers together; medians and 99th percentiles over answers (TTFT) and over gaps (ITL)."""
    seconds = max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers)
    ttfts = [answer.ttft for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps]
    return Figures(
        throughput=sum(answer.tokens for answer in answers) / seconds,
        ttft=statistics.median(ttfts),
        ttft_p99=percentile(ttfts, 99),
        itl=statistics.median(answer.itl for answer in answers),
        itl_p99=percentile(gaps, 99),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` percent of the values do not exceed; 0 if there are no values."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)] if ordered else 0.0


async def complete(address: Address, body: dict[str, Any]) -> Answer:
    """Post a streamed completion and record when its pieces arrive."""
    answer = Answer(time.perf_counter())
    async for event in events(address, body):
        now = time.perf_counter()
        choices = event.get("choices") or []
        if choices and choices[0].get("text"):
            answer.times.append(now)
        if usage := event.get("usage"):
            answer.tokens = usage["completion_tokens"]
    if not answer.times:
        raise RequestFailed("no output came")
    return answer


async def events(address: Address, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed answer as they arrive."""
    async for line in _lines(address, {**body, "stream": True}):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            event = json.loads(line[6:])
            if "error" in event:
                raise RequestFailed(str(event["error"]))
            yield event


async def post(address: Address, body: dict[str, Any]) -> Any:
    """The answer to a request that is not streamed."""
    return json.loads(b"\n".join([line async for line in _lines(address, body)]))


async def _lines(address: Address, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield the lines of the response body, with any framing."""
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=2**24)
    try:
        content = json.dumps(body).encode()
        head = f"POST {address.path} HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in fields)}
        if status.split()[1] != "200":
            rest = await reader.read(2000)
            raise RequestFailed(f"{status}: {rest.decode(errors='replace')}")
        pending = b""
        async for piece in _pieces(reader, headers):
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        if pending:
            yield pending
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        raise RequestFailed(f"the connection broke: {error!r}") from error
    finally:
        writer.close()


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(2**16):
            yield piece
