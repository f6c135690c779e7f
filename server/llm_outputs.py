"""Results of the Python API; the fields are named as in vLLM's RequestOutput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.server.frontend.output_processor import AnswerEnd, TextDelta
from quire.server.frontend.tokenizer import Tokenizer
from quire.server.parsers.events import ToolCall


class Logprob(NamedTuple):
    """The log-probability of one token at one position; `rank` is 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One of the `n` sequences generated for a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`: the sampled token and the most likely ones, by token id."""
    finish_reason: AnswerEnd | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the sequence; None for the end-of-sequence token."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls of the tools given to `chat`, once the sequence is finished."""


@dataclass
class RequestOutput:
    """A prompt and its output. `prompt` is None if the request contained token ids or messages."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """If requested: None for the first token of the prompt; then that token and the most likely ones, by token id."""


@dataclass
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """A prompt and its vector. `prompt` is None if the request contained token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


def completion(tokenizer: Tokenizer, sequence: TextDelta, tool_calls: list[ToolCall]) -> CompletionOutput:
    """Convert a sequence to the Python API's format; returns a copy."""
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
    """Convert a prompt's log-probabilities to the Python API's format, with `num_top` top tokens (None: all)."""
    rows = scores.rows()
    for at in rows:
        at.top_ids, at.top_logprobs = at.top_ids[:num_top], at.top_logprobs[:num_top]
    return [None, *(_by_token(tokenizer, token, at) for token, at in zip(prompt[1:], rows, strict=True))]


def _by_token(tokenizer: Tokenizer, token_id: int, at: TokenLogprobs) -> dict[int, Logprob]:
    """The most likely tokens of a position, and the actual token."""
    likeliest = zip(at.top_ids, at.top_logprobs, range(1, len(at.top_ids) + 1), strict=True)
    return {
        token: Logprob(logprob, rank, tokenizer.token_text(token))
        for token, logprob, rank in (*likeliest, (token_id, at.logprob, at.rank))
    }
