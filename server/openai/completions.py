"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.sampling_params import MAX_N, SamplingParams
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.media_parts import MultiModalData, MultiModalUuids
from quire.server.http.request_body import Admit
from quire.server.http.request_model import Int64, TokenIds
from quire.server.http.response import GenerationResponse, Usage
from quire.server.http.state import AppState, MayChooseReplica
from quire.server.openai.logprobs import MIN_LOGPROB, TokenNames, prompt_logprobs_object
from quire.server.openai.protocol import MAX_SEQUENCES, GenerationRequest, ManyTokenIds, Texts
from quire.server.text.inputs import GenerationInput, Prompt
from quire.server.text.output_processor import Detokenizer, TextDelta
from quire.server.text.tokenizer import Tokenizer

router = APIRouter(route_class=BodyRoute)


class CompletionRequest(GenerationRequest):
    """The body of a completion request."""

    has_files: ClassVar[bool] = True

    prompt: str | Texts | TokenIds | ManyTokenIds
    """Text or token ids. Required, unlike in OpenAI's API."""
    logprobs: Int64 | None = None
    """At most `--max-logprobs`; -1: all (vLLM)."""
    best_of: Annotated[Int64 | None, Field(description=f"At most {MAX_N}. Streams require that it equals n.")] = None
    echo: bool | None = False
    add_special_tokens: bool | None = None
    """vLLM extension: add the tokenizer's special tokens to a text prompt. Default: true."""
    multi_modal_data: MultiModalData | None = None
    """The images and videos of the prompt, which must be a single one, and has the model's placeholder for each."""
    multi_modal_uuids: MultiModalUuids | None = None
    """Names of these. Later requests of the same API key may have only the names."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Arguments of the model's processor for the images and videos, such as `max_pixels`."""

    def check_fields(self, param: str = "") -> set[str]:
        """See `GenerationRequest`. Also checks `best_of` and `logprob_token_ids`."""
        ignored = super().check_fields(param)
        if self.best_of is not None and not self.shown <= self.best_of <= MAX_N:
            raise InvalidParameter(f"best_of must be from n to {MAX_N}, got {self.best_of}", "best_of")
        if self.best_of is not None and self.use_beam_search:
            raise InvalidParameter("best_of is not supported with use_beam_search; n is the number of beams", "best_of")
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise InvalidParameter("logprob_token_ids requires logprobs", "logprob_token_ids")
        if self.candidates != self.shown and self.stream:
            raise InvalidParameter("best_of greater than n cannot be streamed; omit stream", "best_of")
        return ignored

    @property
    def shown(self) -> int:
        """Number of choices returned for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def candidates(self) -> int:
        """Number of sequences generated for each prompt; the best are returned."""
        return self.shown if self.best_of is None else self.best_of

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The engine's parameters, including the log-probabilities that `echo` and `best_of` need."""
        longest = self.max_tokens if self.num_predict is None else self.num_predict
        if longest is None:
            longest = SamplingParams().max_tokens  # also in vLLM
        elif self.num_predict is not None and longest < 0:
            longest = None
        params = self.sampling_params(defaults, n=self.candidates, max_tokens=longest)
        if self.candidates != self.shown:
            params.logprobs = self.logprobs or 0
        if self.echo and self.logprobs is not None:
            both = self.logprobs, self.prompt_logprobs or 0
            params.prompt_logprobs = -1 if -1 in both else max(both)
        return params

    def prompts(self) -> list[Prompt]:
        """The list of prompts."""
        prompts = self._prompts()
        if len(prompts) * self.candidates > MAX_SEQUENCES:
            name = "n" if self.best_of is None else "best_of"
            raise InvalidParameter(
                f"{name}: {len(prompts)} prompts × {self.candidates} exceed the {MAX_SEQUENCES} sequences allowed",
                name,
            )
        return prompts

    async def process_here(self, admit: Admit) -> _ProcessedCompletion:
        processor = admit(self.check_fields())
        given, special = self.prompts(), self.add_special_tokens is not False
        data, uuids = self.multi_modal_data or MultiModalData(), self.multi_modal_uuids or MultiModalUuids()
        completion = await processor.process_prompts(
            given,
            self.params(processor.sampling_defaults),
            self.request_options(),
            add_special_tokens=special,
            media=data.sources(uuids, self.mm_processor_kwargs or {}),
        )
        if not self.echo:
            return _ProcessedCompletion(completion, None)
        is_whole = self.truncate_prompt_tokens is None and not completion.media
        texts = [prompt if isinstance(prompt, str) and is_whole else None for prompt in given]
        spelled = completion.prompts, texts, special, completion.params
        return _ProcessedCompletion(completion, await asyncio.to_thread(_spell, processor.tokenizer, *spelled))

    def _prompts(self) -> list[Prompt]:
        match self.prompt:
            case str(text):
                return [text]
            case [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]  # the pattern matches list[int]
            case []:
                raise InvalidParameter("prompt must not be empty", "prompt")
            case _:
                return list(self.prompt)  # type: ignore[arg-type]


@router.post("/v1/completions", dependencies=[MayChooseReplica])
async def completions(body: CompletionRequest, request: Request, state: AppState) -> Response:
    """Complete one or more prompts."""
    model, adapter = await state.find_model(body.model)
    processed: _ProcessedCompletion = await body.process(state.frontend)
    completion, echoes = processed
    tokenizer, prompts = state.frontend.input_processor.tokenizer, completion.prompts
    request_id = body.response_id("cmpl")
    generation = state.frontend.generate(request_id, replace(completion, adapter=adapter))
    as_ids, fields = body.names_tokens_by_id(state), partial(body.transfer_fields, generation)
    formatter = _CompletionFormatter(tokenizer, body, prompts, echoes, as_ids)
    usage = Usage(prompts, completion.params.n, completion.media)
    response = GenerationResponse(
        request_id, model, formatter, usage, formatter.best, fields=fields, has_times=state.has_request_times
    )
    if body.stream:
        return response.stream(generation, body.stream_usage(state))
    return await response.whole(generation, request)


class _Echo(NamedTuple):
    """An echoed prompt."""

    text: str
    offsets: list[int]
    """Character position of each token in the text."""


class _ProcessedCompletion(NamedTuple):
    """The engine's input, and the prompts to repeat."""

    completion: GenerationInput
    echoes: Sequence[_Echo] | None


def _spell(
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    texts: Sequence[str | None],
    add_special_tokens: bool,
    params: SamplingParams,
) -> list[_Echo]:
    """Return each prompt's text, as given, or decoded with its special tokens. Characters that the output may complete
    are left to it."""
    echoes = []
    for ids, text in zip(prompts, texts, strict=True):
        if text is not None:
            echoes.append(_Echo(text, tokenizer.offsets(text, add_special_tokens=add_special_tokens)))
            continue
        detokenizer, pieces, offsets = Detokenizer(tokenizer, (), skip_special_tokens=False), "", []
        for token_id in ids:
            offsets.append(len(pieces))
            pieces += detokenizer.feed(token_id)
        echoes.append(_Echo(pieces + ("" if params.max_tokens else detokenizer.flush()), offsets))
    return echoes


class _CompletionFormatter:
    """Formats completions."""

    whole = chunk = "text_completion"
    null_usage = b""

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionRequest,
        prompts: Sequence[list[int]],
        echoes: Sequence[_Echo] | None,
        as_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._prompts = prompts
        self._echoes = echoes
        self._n = body.shown
        self._name = TokenNames(tokenizer, as_ids=as_ids, prefix="bytes:")
        self._spelled: dict[int, tuple[int, Detokenizer]] = {}
        """For each choice, the number of characters so far, and the detokenizer that continues them."""
        self.returns_token_ids = bool(body.return_token_ids)

    def opening(self, index: int) -> dict[str, Any] | None:
        """The prompt's token ids, and its text unless that comes with log-probabilities."""
        echo = self._echo(index) if self._body.logprobs is None else None
        if echo is None and not self.returns_token_ids:
            return None
        return self._choice(TextDelta(index, "" if echo is None else echo.text), None) | self._prompt_ids(index)

    def chunk_choice(self, delta: TextDelta) -> dict[str, Any]:
        echo = None if delta.prompt_logprobs is None else self._echo(delta.index)
        return self._choice(delta, echo)

    def whole_choice(self, delta: TextDelta) -> dict[str, Any]:
        nothing = {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None}
        choice = nothing | self._choice(delta, self._echo(delta.index)) | self._prompt_ids(delta.index)
        top = self._body.prompt_logprobs
        if top is not None and delta.prompt_logprobs is not None:
            prompt = self._prompts[delta.index // self._n]
            choice["prompt_logprobs"] = prompt_logprobs_object(
                self._tokenizer, prompt, delta.prompt_logprobs, None if top == -1 else top
            )
        return choice

    def top_level_fields(self, sequences: Sequence[TextDelta]) -> dict[str, Any]:
        return {}

    def best(self, sequences: list[TextDelta]) -> list[TextDelta]:
        """The `n` candidates of each prompt with the highest mean log-probability per token, renumbered."""
        candidates = self._body.candidates
        if candidates == self._n:
            return sequences
        chosen: list[TextDelta] = []
        for first in range(0, len(sequences), candidates):
            chosen += sorted(sequences[first : first + candidates], key=_mean_logprob, reverse=True)[: self._n]
        for index, delta in enumerate(chosen):
            delta.index = index
        return chosen

    def _echo(self, index: int) -> _Echo | None:
        return None if self._echoes is None else self._echoes[index // self._n]

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[index // self._n]} if self.returns_token_ids else {}

    def _choice(self, delta: TextDelta, echo: _Echo | None) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            "text": delta.text if echo is None else echo.text + delta.text,
            "logprobs": self._logprobs(delta, echo),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return choice | {"token_ids": delta.token_ids} if self.returns_token_ids else choice

    def _logprobs(self, delta: TextDelta, echo: _Echo | None) -> dict[str, Any] | None:
        if delta.logprobs is None or self._body.logprobs is None:
            return None
        token_ids, places, offsets = delta.token_ids, [*delta.logprobs], self._offsets(delta)
        if echo is not None and delta.prompt_logprobs is not None:
            prompt = self._prompts[delta.index // self._n]
            token_ids, offsets = prompt + token_ids, echo.offsets + offsets
            places = delta.prompt_logprobs.rows() + places
        tokens = [self._name(token_id) for token_id in token_ids]
        scores = [max(at.logprob, MIN_LOGPROB) for at in places]
        tops = (
            [self._top(token, at) for token, at in zip(tokens[-len(places) :], places, strict=True)] if places else []
        )
        unscored = [None] * (len(tokens) - len(places))  # a prompt's first token has no log-probability
        return {
            "tokens": tokens,
            "token_logprobs": unscored + scores,
            "top_logprobs": unscored + tops,
            "text_offset": offsets,
        }

    def _offsets(self, delta: TextDelta) -> list[int]:
        """Character position of each token in the text of its choice, including the echoed prompt."""
        end, detokenizer = self._spelled.get(delta.index) or self._begin(delta.index)
        offsets = []
        for token_id in delta.token_ids:
            offsets.append(end)
            end += len(detokenizer.feed(token_id))
        self._spelled[delta.index] = end, detokenizer
        return offsets

    def _begin(self, index: int) -> tuple[int, Detokenizer]:
        skip = self._body.skip_special_tokens is not False
        echo = self._echo(index)
        return len(echo.text) if echo else 0, Detokenizer(self._tokenizer, self._prompts[index // self._n], skip)

    def _top(self, token: str, at: TokenLogprobs) -> dict[str, float]:
        """The sampled token, which comes first in vLLM, and the most likely ones, or `logprob_token_ids`. Of tokens
        with the same text, the more likely one counts.
        """
        is_whole = self._body.logprobs == -1 or self._body.logprob_token_ids is not None
        count = None if is_whole else self._body.logprobs
        top = {token: max(at.logprob, MIN_LOGPROB)}
        for token_id, logprob in zip(at.top_ids[:count], at.top_logprobs, strict=False):
            name = self._name(token_id)
            top[name] = max(logprob, top.get(name, MIN_LOGPROB))
        return top


def _mean_logprob(sequence: TextDelta) -> float:
    logprobs = [at.logprob for at in sequence.logprobs or ()]
    return sum(logprobs) / max(1, len(logprobs))
