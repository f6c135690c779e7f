"""What the Python API returns; the fields are named as in vLLM's RequestOutput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.protocol.messages import PromptLogprobs, TokenLogprobs
from quire.server.frontend.output_processor import AnswerEnd, TextDelta
from quire.server.frontend.tokenizer import Tokenizer
from quire.server.parsers.events import ToolCall


class Logprob(NamedTuple):
    """The log-probability of one token at one position; `rank` is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One of the `n` continuations of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`: the sampled token and the likeliest ones, by token id."""
    finish_reason: AnswerEnd | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for the end of sequence."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """What it calls of the tools that `chat` was given, once it has ended."""


@dataclass
class RequestOutput:
    """A prompt and what came of it. `prompt` is None when the request brought token ids or messages."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """When asked for: None for the first token of the prompt; then that token and the likeliest ones, by token id."""


@dataclass
class EmbeddingOutput:
    """What a prompt is embedded as."""

    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """A prompt and its vector. `prompt` is None when the request brought token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared."""


def completion(tokenizer: Tokenizer, sequence: TextDelta, tool_calls: list[ToolCall]) -> CompletionOutput:
    """A sequence as the Python API shows it; a copy."""
    logprobs = None
    if sequence.logprobs is not None:
        pairs = zip(sequence.token_ids, sequence.logprobs, strict=True)
        logprobs = [_by_token(tokenizer, sampled, at) for sampled, at in pairs]
    return CompletionOutput(
        index=sequence.index,
        text=sequence.text,
        token_ids=list(sequence.token_ids),
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        tool_calls=tool_calls,
    )


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: PromptLogprobs, num_top: int | None = None
) -> list[dict[int, Logprob] | None]:
    """The scores of a prompt as the Python API shows them, with `num_top` of the likeliest tokens (None: all)."""
    rows = scores.rows()
    for at in rows:
        at.top_ids, at.top_logprobs = at.top_ids[:num_top], at.top_logprobs[:num_top]
    return [None, *(_by_token(tokenizer, token, at) for token, at in zip(prompt[1:], rows, strict=True))]


def _by_token(tokenizer: Tokenizer, token_id: int, at: TokenLogprobs) -> dict[int, Logprob]:
    """The likeliest tokens of a position, and the one that stands there."""
    likeliest = zip(at.top_ids, at.top_logprobs, range(1, len(at.top_ids) + 1), strict=True)
    return {
        token: Logprob(logprob, rank, tokenizer.token_text(token))
        for token, logprob, rank in (*likeliest, (token_id, at.logprob, at.rank))
    }
