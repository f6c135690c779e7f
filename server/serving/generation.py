"""Requests in the engine, as their readers see them: generated text, and vectors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.server.client.output_stream import OutputStream
from quire.server.client.tracing import RequestTimes
from quire.server.text.output_processor import OutputProcessor, TextDelta


class _EngineRequest:
    """A request of one or more sequences. As a context manager, it aborts the sequences that still run on exit."""

    def __init__(self, stream: OutputStream) -> None:
        self._stream = stream

    def close(self) -> None:
        """Abort the sequences that still run in the engine."""
        self._stream.close()

    def abort(self) -> None:
        """Abort the sequences that still run in the engine, while another task reads, which gets `RequestFailed`."""
        self._stream.abort()

    @property
    def is_open(self) -> bool:
        """Whether part of it may still be running."""
        return self._stream.is_open

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Generation(_EngineRequest):
    """Prompts × n sequences, numbered prompt by prompt.

    Iterating yields lists of `TextDelta`s until each sequence has its finish reason; raises `RequestFailed` and
    `EngineUnavailable`.
    """

    def __init__(self, stream: OutputStream, processors: Mapping[str, OutputProcessor]) -> None:
        """`processors` has each sequence's, by engine id."""
        super().__init__(stream)
        self._processors = dict(processors)

    @property
    def times(self) -> RequestTimes | None:
        """The times of a single sequence that has finished."""
        return self._stream.times

    @property
    def kv_peer(self) -> str:
        """Where other stores read from the KV store that has the prompt; empty: nowhere."""
        return self._stream.kv_peer

    def close(self) -> None:
        self._processors.clear()
        super().close()

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        while self._processors:
            deltas = []
            for output in await self._stream.get():
                delta = self._processors[output.request_id].feed(output)
                if delta.finish_reason is not None:
                    del self._processors[output.request_id]
                    if output.finish_reason is None:
                        self._stream.stop(output.request_id)
                    if (trace := self._stream.traces.get(output.request_id)) is not None:
                        trace.finish_reasons = [delta.finish_reason]
                if delta.token_ids or delta.finish_reason is not None:  # otherwise only part of the prompt was scored
                    deltas.append(delta)
            if deltas:
                yield deltas


class Embedding(_EngineRequest):
    """The vectors of one or more prompts."""

    def __init__(self, stream: OutputStream, request_ids: Sequence[str]) -> None:
        super().__init__(stream)
        self._request_ids = request_ids

    async def vectors(self) -> list[EngineCoreOutput]:
        """Return the engine's outputs, which contain the vectors, in the order of the prompts.

        Raises `RequestFailed` and `EngineUnavailable`.
        """
        outputs: dict[str, EngineCoreOutput] = {}
        while len(outputs) < len(self._request_ids):
            for output in await self._stream.get():
                assert output.vector is not None
                outputs[output.request_id] = output
        return [outputs[request_id] for request_id in self._request_ids]
