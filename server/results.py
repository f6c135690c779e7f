"""What the Python API returns; the fields are named as in vLLM's RequestOutput."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.messages import FinishReason
from quire.server.output import Delta
from quire.server.tokenizer import Tokenizer


class Logprob(NamedTuple):
    """The log-probability of one token at one position; `rank` is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class Completion:
    """One of the `n` continuations of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`: the sampled token and the likeliest ones, by token id."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for the end of sequence."""


@dataclass
class RequestResult:
    """A prompt and what came of it. `prompt` is None when the request brought token ids or messages."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared."""


def completion(tokenizer: Tokenizer, sequence: Delta) -> Completion:
    """A sequence as the Python API shows it; a copy."""
    logprobs = None
    if sequence.logprobs is not None:
        logprobs = [
            {
                token: Logprob(logprob, rank, tokenizer.token_text(token))
                for token, logprob, rank in (
                    *zip(at.top_ids, at.top_logprobs, range(1, len(at.top_ids) + 1), strict=True),
                    (sampled, at.logprob, at.rank),
                )
            }
            for sampled, at in zip(sequence.token_ids, sequence.logprobs, strict=True)
        ]
    return Completion(
        index=sequence.index,
        text=sequence.text,
        token_ids=list(sequence.token_ids),
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )
