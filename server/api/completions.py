"""`/v1/completions`."""

from __future__ import annotations

import uuid
from collections import defaultdict
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.engine.errors import InvalidParameter
from quire.engine.messages import MAX_LOGPROBS, TokenLogprobs
from quire.server.api.answer import LEAST_LOGPROB, Answer, Usage
from quire.server.api.protocol import GenerationRequest, Int64
from quire.server.api.state import AppState
from quire.server.output import Delta
from quire.server.render import Prompt
from quire.server.tokenizer import Tokenizer

router = APIRouter()


class CompletionRequest(GenerationRequest):
    """The body of a completion."""

    prompt: str | list[str] | list[Int64] | list[list[Int64]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Int64 | None = None

    def refuse_unserved(self) -> None:
        """See `GenerationRequest`; also `best_of`, where it asks for more than `n`."""
        super().refuse_unserved()
        if self.best_of not in (None, self.n or 1):
            raise InvalidParameter("best_of is not served yet, except when equal to n", "best_of")

    def prompts(self) -> list[Prompt]:
        """The prompts, one or many."""
        match self.prompt:
            case str(text):
                return [text]
            case [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]  # the pattern says list[int]
            case []:
                raise InvalidParameter("prompt must not be empty", "prompt")
            case _:
                return list(self.prompt)  # type: ignore[arg-type]


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, state: AppState) -> Response:
    """Continue one or more prompts."""
    model = state.check_model(body.model)
    body.refuse_unserved()
    state.service.check()
    renderer = state.service.renderer
    params = body.sampling_params(renderer.defaults)
    prompts = [await renderer.prompt(prompt) for prompt in body.prompts()]
    for prompt in prompts:
        renderer.check_length(prompt, params.max_tokens, "prompt")

    request_id = f"cmpl-{uuid.uuid4().hex}"
    generation = state.service.generate(request_id, prompts, params, body.priority or 0)
    answer = Answer(request_id, model, _Completion(renderer.tokenizer), Usage(prompts, params.n))
    if body.stream:
        return answer.stream(generation, body.include_usage)
    return await answer.whole(generation, request)


class _Completion:
    """The shape of completions."""

    whole = chunk = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """Characters of a sequence's tokens so far."""

    def opening(self, index: int) -> None:
        return None

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    whole_choice = chunk_choice

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        tokens = [self._tokenizer.token_text(token_id) for token_id in delta.token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[delta.index])
            self._offsets[delta.index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(at.logprob, LEAST_LOGPROB) for at in delta.logprobs],
            "top_logprobs": [self._top(token, at) for token, at in zip(tokens, delta.logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token: str, at: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the sampled one if it is not among them."""
        likeliest = zip(map(self._tokenizer.token_text, at.top_ids), at.top_logprobs, strict=True)
        return {text: max(logprob, LEAST_LOGPROB) for text, logprob in (*likeliest, (token, at.logprob))}
