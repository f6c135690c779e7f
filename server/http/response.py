"""Sends generated output, streamed or in one piece, while the client stays connected.

Chunks are plain dicts that msgspec encodes. They are not validated again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from quire.engine.process.version import version
from quire.engine.protocol.media import MediaItem
from quire.server.client.output_stream import EngineUnavailable, RequestFailed
from quire.server.http.errors import describe, encode_json, json_response
from quire.server.serving.generation import Generation
from quire.server.text.output_processor import TextDelta

T = TypeVar("T")
StreamUsage = Literal["none", "final", "continuous"]
"""The events of a stream that have the usage: none, the last one, or all."""

DIRECT_SEND = "quire.send"
"""Key in an ASGI scope: the server's `send`, without the wrappers of middleware, which have seen the response start."""

_WATCH_SECONDS = 0.1
"""Duration of a request, without its response, from which on its client is watched."""
_FINGERPRINT = f"quire-{version()}"

_encode = msgspec.json.Encoder().encode


class Formatter(Protocol):
    """The response format of an endpoint."""

    whole: str
    """The `object` field of a full response."""
    chunk: str
    """The `object` field of a chunk."""
    returns_token_ids: bool
    """Whether to send tokens without text."""
    null_usage: bytes
    """The end of a chunk before the one with the usage."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice in the first chunk of a sequence, before there is text."""

    def chunk_choice(self, delta: TextDelta) -> dict[str, Any]:
        """A choice of a chunk."""

    def whole_choice(self, delta: TextDelta) -> dict[str, Any]:
        """A choice of a full response; `delta` is the complete sequence."""

    def top_level_fields(self, sequences: Sequence[TextDelta]) -> dict[str, Any]:
        """Fields next to the choices: in a full response, and (without sequences) in the first chunks."""


def media_tokens(media: Sequence[Sequence[MediaItem]]) -> dict[str, int]:
    """Return the tokens of images and of videos, as usage has them: none without any."""
    counts: Counter[str] = Counter()
    for item in itertools.chain(*media):
        counts[f"{item.kind}_tokens"] += item.length
    return dict(counts)


def cached_tokens(count: int, host: int, disk: int, peer: int) -> dict[str, Any]:
    """Return the cached tokens of prompts, as usage has them: with details, if some came from the KV store."""
    loaded = {"host": host, "disk": disk, "peer": peer}
    details = {"device": count - sum(loaded.values())} | loaded
    return {"cached_tokens": count} | ({"cached_tokens_details": details} if any(loaded.values()) else {})


class Usage:
    """Counts the tokens of a request. Each prompt has `n` choices."""

    def __init__(self, prompts: Sequence[Sequence[int]], n: int, media: Sequence[Sequence[MediaItem]] = ()) -> None:
        """`media` has the images and videos of each prompt."""
        self.num_choices = len(prompts) * n
        self._n = n
        self._prompt_tokens = sum(map(len, prompts))
        self._media_tokens = media_tokens(media) if media else {}
        self._completion_tokens = 0
        self._accepted_tokens = self._rejected_tokens = 0
        self._cached: dict[int, tuple[int, int, int, int]] = {}
        """By the first choice of a prompt: its cached tokens, and those of the host's memory, its disk, and others."""

    def add(self, deltas: Iterable[TextDelta]) -> None:
        """Count these deltas."""
        for delta in deltas:
            self._completion_tokens += len(delta.token_ids)
            self._accepted_tokens += delta.num_accepted_tokens
            self._rejected_tokens += delta.num_rejected_tokens
            # A prompt counts once, however many choices it has.
            if delta.num_cached_tokens and delta.index % self._n == 0:
                cached = (delta.num_cached_tokens, *delta.num_loaded_tokens)
                self._cached[delta.index] = max(cached, self._cached.get(delta.index, cached))

    def object(self) -> dict[str, Any]:
        """The `usage` object. Requests without draft tokens have no details of the completion."""
        cached = map(sum, zip(*self._cached.values(), strict=True)) if self._cached else (0, 0, 0, 0)
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": cached_tokens(*cached) | self._media_tokens,
        }
        if self._accepted_tokens or self._rejected_tokens:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._accepted_tokens,
                "rejected_prediction_tokens": self._rejected_tokens,
            }
        return usage


class GenerationResponse:
    """The response to one request."""

    def __init__(
        self,
        request_id: str,
        model: str,
        formatter: Formatter,
        usage: Usage,
        choose: Callable[[list[TextDelta]], list[TextDelta]] = lambda sequences: sequences,
        *,
        fields: Callable[[], dict[str, Any]] = dict,
        has_times: bool = False,
    ) -> None:
        """`choose` selects the sequences that a full response shows; `usage` counts all of them. `fields` returns
        further fields next to the choices when all is known, in a stream those of the last chunk. With `has_times`, the
        response has `metrics`.
        """
        self._choose = choose
        self._id = request_id
        self._model = model
        self._formatter = formatter
        self._usage = usage
        self._fields = fields
        self._has_times = has_times

    async def whole(self, generation: Generation, request: Request) -> Response:
        """Return the full response; raises `ClientDisconnect` if the client disconnects."""
        with generation:
            sequences = await while_connected(request.receive, self._collect(generation))
        metrics = self._metrics(generation)
        if any(sequence.prompt_logprobs for sequence in sequences):
            return StreamingResponse(self._parts(sequences, metrics), media_type="application/json")
        sequences = self._choose(sequences)
        return json_response(self._whole(sequences, list(map(self._formatter.whole_choice, sequences)), metrics))

    def stream(self, generation: Generation, usage: StreamUsage) -> Response:
        """Return the response as server-sent events, one write for each engine step."""
        return EventStreamResponse(generation, partial(self._write_events, generation, usage))

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": _FINGERPRINT,
        }

    async def _collect(self, generation: Generation) -> list[TextDelta]:
        """Return the complete sequences."""
        sequences = [TextDelta(index) for index in range(self._usage.num_choices)]
        async for deltas in generation:
            self._usage.add(deltas)
            for delta in deltas:
                sequences[delta.index].extend(delta)
        return sequences

    def _metrics(self, generation: Generation) -> dict[str, Any]:
        """The times of a request that has finished, as vLLM has them."""
        if not self._has_times:
            return {}
        if self._usage.num_choices != 1 or (times := generation.times) is None:
            return {"metrics": None}
        prefill, decode, count = times.prefill, times.decode, times.num_tokens
        seconds = None if prefill is None or decode is None else prefill + decode
        between = {} if count < 2 else {"mean_itl_ms": None if decode is None else decode / (count - 1) * 1000}
        return {
            "metrics": {
                "time_to_first_token_ms": None if prefill is None else prefill * 1000,
                "generation_time_ms": None if decode is None else decode * 1000,
                "queue_time_ms": None if times.queue is None else times.queue * 1000,
                **between,
                "tokens_per_second": count / seconds if seconds else None,
            }
        }

    def _whole(
        self, sequences: list[TextDelta], choices: list[dict[str, Any]], metrics: dict[str, Any]
    ) -> dict[str, Any]:
        extra = self._formatter.top_level_fields(sequences) | self._fields() | metrics
        return self._head(self._formatter.whole) | {"choices": choices, "usage": self._usage.object(), **extra}

    async def _parts(self, sequences: list[TextDelta], metrics: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the full response, encoded choice by choice in a thread: prompt log-probabilities are so much data that
        they would block other streams, and take much memory as a whole.
        """
        sequences = self._choose(sequences)
        whole = await asyncio.to_thread(lambda: encode_json(self._whole(sequences, [], metrics)))
        before, choices, after = whole.partition(b'"choices":[')
        yield before + choices
        for at, sequence in enumerate(sequences):
            choice = await asyncio.to_thread(lambda one: encode_json(self._formatter.whole_choice(one)), sequence)
            yield b"," * bool(at) + choice
        yield after

    async def _write_events(self, generation: Generation, usage: StreamUsage, send: Send) -> None:
        formatter = self._formatter
        head = b"data: " + _encode(self._head(formatter.chunk))[:-1] + b',"choices":['
        tail = self._tail(usage)
        indices = range(self._usage.num_choices)
        first_tail = b"]," + _encode(extra)[1:-1] + tail[1:] if (extra := formatter.top_level_fields(())) else tail
        openings = filter(None, map(formatter.opening, indices))
        if events := b"".join(head + _encode(opening) + first_tail for opening in openings):
            await send(part(events))
        is_constant = usage != "continuous" and not formatter.returns_token_ids
        frames = [_frame(formatter, index, head, tail) for index in indices] if is_constant else []
        async for deltas in generation:
            self._usage.add(deltas)
            if usage == "continuous":
                tail = self._tail(usage)
            events = b""
            for delta in deltas:
                if is_constant and delta.is_text:
                    before, after = frames[delta.index]
                    events += before + _encode(delta.text) + after
                elif delta.has_content or (formatter.returns_token_ids and delta.token_ids):
                    events += head + _encode(formatter.chunk_choice(delta)) + tail
            if events:
                await send(part(events))
        last = self._fields()
        if usage != "none":
            last = {"usage": self._usage.object()} | self._metrics(generation) | last
        if last:
            await send(part(head + b"]," + _encode(last)[1:] + b"\n\n"))

    def _tail(self, usage: StreamUsage) -> bytes:
        """The end of a chunk with choices."""
        if usage == "continuous":
            return b'],"usage":' + _encode(self._usage.object()) + b"}\n\n"
        return b"]" + self._formatter.null_usage * (usage == "final") + b"}\n\n"


def _frame(formatter: Formatter, index: int, head: bytes, tail: bytes) -> tuple[bytes, bytes]:
    """The bytes before and after the text in an event with nothing else. They are constant without token ids and
    usage."""
    mark = "\0"
    before, _, after = (head + _encode(formatter.chunk_choice(TextDelta(index, mark))) + tail).partition(_encode(mark))
    return before, after


class EventStreamResponse(Response):
    """Server-sent events. A disconnection aborts the request; an error is sent as an event."""

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, write_events: Callable[[Send], Awaitable[None]], end: bytes = b"data: [DONE]\n\n"
    ) -> None:
        """`end` is sent last, also after an error."""
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._generation = generation
        self._write_events = write_events
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation, contextlib.suppress(ClientDisconnect):
            await while_connected(receive, self._send(send, scope.get(DIRECT_SEND, send)))

    async def _send(self, send: Send, send_direct: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._write_events(send_direct)
        except (RequestFailed, EngineUnavailable) as error:
            await send_direct(part(b"data: " + _encode(describe(error)[1]) + b"\n\n"))
        await send({"type": "http.response.body", "body": self._end})


def part(body: bytes) -> dict[str, Any]:
    """A part of a response body for ASGI, not the last one."""
    return {"type": "http.response.body", "body": body, "more_body": True}


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """A server-sent event whose name is also the `type` of its data."""
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **fields}) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


@contextlib.contextmanager
def cancelled_without_client(receive: Receive) -> Iterator[None]:
    """Cancel the work inside if it takes more than `_WATCH_SECONDS` and the client disconnects, which then raises
    `ClientDisconnect`. Work that takes less costs only a timer. A cancellation from outside stays one.
    """
    loop, task, watching, is_gone = asyncio.get_running_loop(), asyncio.current_task(), None, False
    assert task is not None
    cancelled_before = task.cancelling()

    async def watch() -> None:
        nonlocal is_gone
        await _disconnect(receive)
        is_gone = True
        task.cancel()

    def begin() -> None:
        nonlocal watching
        watching = loop.create_task(watch())

    timer = loop.call_later(_WATCH_SECONDS, begin)
    try:
        try:
            yield
        finally:
            timer.cancel()
            if watching is not None:
                watching.cancel()
            is_only_reason = is_gone and task.uncancel() <= cancelled_before
    except asyncio.CancelledError:
        if is_only_reason:
            raise ClientDisconnect from None
        raise


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
