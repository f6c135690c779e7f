"""A request of the Python API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.server.parsers.events import ToolCall
from quire.server.serving.frontend import Frontend
from quire.server.serving.llm_outputs import Logprob, RequestOutput, completion, prompt_logprobs
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
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._generation = frontend.generate(self.id, replace(given, output_format=None))  # the text has all output

    async def run(self) -> AsyncIterator[None]:
        """Yield whenever the sequences have grown."""
        with self._generation:
            async for deltas in self._generation:
                for delta in deltas:
                    self._sequences[delta.index].extend(delta)
                yield

    async def finish(self, report: Callable[[int], object]) -> None:
        """Run to the end, then call `report(1)`."""
        async for _ in self.run():
            pass
        report(1)

    def close(self) -> None:
        """Abort the sequences that are still running."""
        self._generation.close()

    def abort(self) -> None:
        """Abort the sequences that are still running, while another task is in `run`."""
        self._generation.abort()

    def result(self) -> RequestOutput:
        """Return all output so far."""
        (ids,) = self._given.prompts
        is_ranked = self._given.params.logprob_token_ids is None
        scores = self._sequences[0].prompt_logprobs
        if scores is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = prompt_logprobs(self._tokenizer, ids, scores)
        return RequestOutput(
            request_id=self.id,
            prompt=self._text,
            prompt_token_ids=ids,
            outputs=[
                completion(self._tokenizer, sequence, self._calls(sequence), is_ranked=is_ranked)
                for sequence in self._sequences
            ],
            finished=all(sequence.finish_reason is not None for sequence in self._sequences),
            num_cached_tokens=self._sequences[0].num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _calls(self, sequence: TextDelta) -> list[ToolCall]:
        """Parse the tool calls of a finished answer; its text is not changed."""
        output_format = self._given.output_format
        if output_format is None or output_format.tools is None or sequence.finish_reason is None:
            return []
        whole = EngineCoreOutput(self.id, list(sequence.token_ids), finish_reason="stop")
        (ids,) = self._given.prompts
        processor = OutputProcessor(self._tokenizer, 0, ids, self._given.params, output_format)
        return processor.feed(whole).tool_calls
