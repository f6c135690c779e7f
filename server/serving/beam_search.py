"""Beam search, on top of the engine: each step is an ordinary request for one token after each beam.

The prefix cache has all of a beam but its last token. Names and scores are vLLM's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.engine_core import EngineCoreOutput, FinishReason
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.client.output_stream import RequestAborted, RequestTimedOut
from quire.server.client.request_record import RECORD, HttpRequestRecord
from quire.server.client.tracing import TRACE, RequestTimes
from quire.server.serving.generation import Generation
from quire.server.text.inputs import GenerationInput
from quire.server.text.output_processor import OutputProcessor, TextDelta
from quire.server.text.tokenizer import Tokenizer

_DEFAULTS = SamplingParams()
_UNSUPPORTED = (
    *("stop", "stop_token_ids", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids", "prompt_logprobs"),
    "structured_outputs",
)


@dataclass(frozen=True)
class _Beam:
    """A sequence after a prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    total: float = 0.0
    """Sum of its tokens' log-probabilities."""
    finish_reason: FinishReason | None = None

    def score(self, prompt_length: int, length_penalty: float) -> float:
        """The sum over a power of the length, of prompt and output without an end of sequence."""
        length = prompt_length + len(self.token_ids) - (self.finish_reason == "stop")
        return float(self.total / length**length_penalty)


class BeamSearch(Generation):
    """The `params.n` best sequences of each prompt, best first, that a search with as many beams finds.

    Iterating yields each sequence whole, when all are found. `generate` is the frontend's, for the steps. Raises
    `InvalidParameter` for sampling parameters that have no meaning here.
    """

    def __init__(
        self,
        request_id: str,
        given: GenerationInput,
        generate: Callable[[str, GenerationInput], Generation],
        tokenizer: Tokenizer,
        model: ModelConfig,
    ) -> None:
        for name in _UNSUPPORTED:
            if getattr(given.params, name) != getattr(_DEFAULTS, name):
                raise InvalidParameter(f"{name} is not supported with use_beam_search", name)
        self._request_id, self._generate = request_id, generate
        if (adapter := given.adapter) is not None:  # its invocation is one in the prompt, not in the output
            given = replace(given, adapter_starts=[*map(adapter.start, given.prompts)])
        self._given = given
        self._tokenizer, self._model = tokenizer, model
        self._step: Generation | None = None
        self._is_over = False
        trace, num_prompt_tokens = TRACE.get(), sum(map(len, given.prompts))
        self._trace = None if trace is None else trace.add(0, num_prompt_tokens, time.monotonic())
        """The trace of the whole search; its steps have none."""
        self._record, self._num_prompt_tokens, self._num_cached_tokens = RECORD.get(), num_prompt_tokens, 0
        self._num_loaded_tokens = (0, 0, 0)
        self._begun = time.monotonic()

    @property
    def is_open(self) -> bool:
        return not self._is_over

    @property
    def times(self) -> None:
        """A search has no times, only its steps do."""

    @property
    def kv_peer(self) -> str:
        """The steps may be computed on several hosts."""
        return ""

    def close(self) -> None:
        self._end("abort")
        if self._step is not None:
            self._step.close()

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        prompts, params = self._given.prompts, self._given.params
        beams: list[list[_Beam]] = [[_Beam()] for _ in prompts]
        ended: list[list[_Beam]] = [[] for _ in prompts]
        cached = 0
        for number in itertools.count() if params.max_tokens is None else range(params.max_tokens):
            places = [(at, beam) for at, mine in enumerate(beams) for beam in mine]
            if not places:
                break
            media = [self._given.media[at] for at, _ in places] if self._given.media else ()
            starts = [self._given.adapter_starts[at] for at, _ in places] if self._given.adapter_starts else ()
            deltas = await self._next([prompts[at] + beam.token_ids for at, beam in places], media, starts)
            if number == 0:
                self._num_cached_tokens = cached = deltas[0].num_cached_tokens
                self._num_loaded_tokens = deltas[0].num_loaded_tokens
            grown: list[list[tuple[float, _Beam, TokenLogprobs, int]]] = [[] for _ in prompts]
            for (at, beam), delta in zip(places, deltas, strict=True):
                assert delta.logprobs is not None
                (found,) = delta.logprobs
                grown[at] += [
                    (beam.total + logprob, beam, found, top) for top, logprob in enumerate(found.top_logprobs)
                ]
            for at, candidates in enumerate(grown):
                beams[at], room = [], params.n
                for total, beam, found, top in sorted(candidates, key=lambda grown: grown[0], reverse=True):
                    token_id = found.top_ids[top]
                    is_end = token_id in self._model.eos_token_ids and not params.ignore_eos
                    if not is_end and not room:
                        continue
                    room -= not is_end
                    chosen = TokenLogprobs(found.top_logprobs[top], top + 1, found.top_ids, found.top_logprobs)
                    more = _Beam([*beam.token_ids, token_id], [*beam.logprobs, chosen], total)
                    length = len(more.token_ids)
                    is_full = length == params.max_tokens or len(prompts[at]) + length >= self._model.max_model_len
                    if is_end or is_full:
                        ended[at].append(replace(more, finish_reason="stop" if is_end else "length"))
                    else:
                        beams[at].append(more)
        deltas = [delta for at in range(len(prompts)) for delta in self._best(at, ended[at], cached)]
        if self._trace is not None:
            self._trace.num_cached_tokens = cached
            self._trace.finish_reasons = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
        self._end("stop", sum(len(delta.token_ids) for delta in deltas))
        yield deltas

    async def _next(
        self, sequences: list[list[int]], media: Sequence[Sequence[MediaItem]], adapter_starts: Sequence[int | None]
    ) -> list[TextDelta]:
        """Return the next token of each sequence, with log-probabilities. `media` and `adapter_starts` are of each
        one."""
        top = min(2 * self._given.params.n, self._model.architecture.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=top)
        step = replace(
            self._given,
            prompts=sequences,
            media=media,
            adapter_starts=adapter_starts,
            params=params,
            output_format=None,
            length_penalty=None,
        )
        deltas = [TextDelta(index) for index in range(len(sequences))]
        try:
            record = None if self._record is None else HttpRequestRecord(key=self._record.key, owner=self._record.owner)
            token, record_token = TRACE.set(None), RECORD.set(record)
            try:
                self._step = self._generate(self._request_id, step)
            finally:
                TRACE.reset(token)
                RECORD.reset(record_token)
            with self._step:
                async for new in self._step:
                    for delta in new:
                        deltas[delta.index].extend(delta)
        except Exception as error:
            if self._trace is not None:
                self._trace.error = str(error)
            self._end("abort" if isinstance(error, RequestTimedOut | RequestAborted) else "error")
            raise
        return deltas

    def _end(self, reason: FinishReason, num_tokens: int = 0) -> None:
        """Finish trace and record, unless the search is over already."""
        if not self._is_over:
            times = RequestTimes(time.monotonic() - self._begun, num_tokens=num_tokens)
            if self._trace is not None:
                self._trace.finish(reason, None, times)
            if self._record is not None:
                self._record.add(self._num_prompt_tokens, self._num_cached_tokens, times)
        self._is_over = True

    def _best(self, at: int, ended: list[_Beam], cached: int) -> list[TextDelta]:
        """Return the best sequences of a prompt."""
        prompt, params = self._given.prompts[at], self._given.params
        penalty = 1.0 if self._given.length_penalty is None else self._given.length_penalty
        ended.sort(key=lambda beam: beam.score(len(prompt), penalty), reverse=True)
        deltas = []
        for index, beam in enumerate(ended[: params.n], at * params.n):
            processor = OutputProcessor(self._tokenizer, index, prompt, params, self._given.output_format)
            output = EngineCoreOutput(self._request_id, beam.token_ids, finish_reason=beam.finish_reason)
            output.stop_token_id = beam.token_ids[-1] if beam.finish_reason == "stop" else None
            output.logprobs = beam.logprobs if params.logprobs is not None else None
            output.num_cached_tokens = cached
            output.num_loaded_tokens = self._num_loaded_tokens
            deltas.append(processor.feed(output))
        return deltas
