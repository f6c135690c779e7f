"""A request of the Python API."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.sampling_params import RequestOutputKind
from quire.server.parsers.events import ToolCall
from quire.server.serving.frontend import Frontend
from quire.server.serving.llm_outputs import (
    FlatLogprobs,
    Logprob,
    RequestOutput,
    RequestStateStats,
    completion,
    prompt_logprobs,
)
from quire.server.text.inputs import GenerationInput
from quire.server.text.output_processor import OutputProcessor, TextDelta


class OfflineRequest:
    """A request of the Python API and its growing sequences. The constructor submits it."""

    def __init__(
        self, frontend: Frontend, given: GenerationInput, text: str | None, request_id: str | None = None
    ) -> None:
        self._tokenizer = frontend.input_processor.tokenizer
        self.id = request_id or uuid.uuid4().hex
        self._given = given
        self._text = text
        self._sequences = [TextDelta(index) for index in range(given.params.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs[dict[int, Logprob] | None] | None = None
        self._total_logprobs = [0.0] * given.params.n
        """The sum of each sequence's log-probabilities."""
        self._stats = RequestStateStats(time.time(), time.monotonic())
        self._generation = frontend.generate(self.id, replace(given, output_format=None))  # the text has all output

    async def results(self) -> AsyncIterator[RequestOutput]:
        """Yield the results that `SamplingParams.output_kind` asks for."""
        kind = self._given.params.output_kind
        async for deltas in self._run():
            if kind is RequestOutputKind.DELTA:
                yield self.result(deltas)
            elif kind is RequestOutputKind.CUMULATIVE or self._is_finished:
                yield self.result()

    async def finish(self, report: Callable[[int], object]) -> None:
        """Run to the end, then call `report(1)`."""
        async for _ in self._run():
            pass
        report(1)

    async def _run(self) -> AsyncIterator[list[TextDelta]]:
        """Yield the new output whenever the sequences have grown."""
        with self._generation:
            async for deltas in self._generation:
                for delta in deltas:
                    self._sequences[delta.index].extend(delta)
                    self._total_logprobs[delta.index] += sum(at.logprob for at in delta.logprobs or ())
                self._count(sum(len(delta.token_ids) for delta in deltas))
                yield deltas

    def close(self) -> None:
        """Abort the sequences that are still running."""
        self._generation.close()

    def abort(self) -> None:
        """Abort the sequences that are still running, while another task is in `results` or `finish`."""
        self._generation.abort()

    def result(self, deltas: Sequence[TextDelta] | None = None) -> RequestOutput:
        """Return all output so far, or only these new pieces of sequences."""
        (ids,) = self._given.prompts
        params = self._given.params
        scores = self._sequences[0].prompt_logprobs
        if scores is not None and self._prompt_logprobs is None:
            rows = prompt_logprobs(self._tokenizer, ids, scores)
            self._prompt_logprobs = FlatLogprobs(rows) if params.flat_logprobs else rows
        return RequestOutput(
            request_id=self.id,
            prompt=self._text,
            prompt_token_ids=ids,
            outputs=[
                completion(
                    self._tokenizer,
                    shown,
                    self._calls(self._sequences[shown.index]),
                    is_ranked=params.logprob_token_ids is None,
                    is_flat=params.flat_logprobs,
                    total_logprob=None if shown.logprobs is None else self._total_logprobs[shown.index],
                )
                for shown in (self._sequences if deltas is None else deltas)
            ],
            finished=self._is_finished,
            num_cached_tokens=self._sequences[0].num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
            metrics=replace(self._stats),
            num_loaded_tokens=self._sequences[0].num_loaded_tokens,
        )

    @property
    def _is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self._sequences)

    def _count(self, num_tokens: int) -> None:
        """Update the stats with new output."""
        stats, now = self._stats, time.monotonic()
        stats.num_generation_tokens += num_tokens
        stats.first_token_ts, stats.last_token_ts = stats.first_token_ts or now, now
        stats.first_token_latency = stats.first_token_ts - stats.queued_ts
        if (times := self._generation.times) is not None and times.queue is not None:
            stats.scheduled_ts = stats.queued_ts + times.queue

    def _calls(self, sequence: TextDelta) -> list[ToolCall]:
        """Parse the tool calls of a finished answer; its text is not changed."""
        output_format, params = self._given.output_format, self._given.params
        if output_format is None or output_format.tools is None or sequence.finish_reason is None:
            return []
        whole = EngineCoreOutput(self.id, list(sequence.token_ids), finish_reason="stop")
        (ids,) = self._given.prompts
        processor = OutputProcessor(self._tokenizer, 0, ids, params, output_format)
        return processor.feed(whole).tool_calls
