"""Results of the Python API; the fields are named as in vLLM's RequestOutput."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar, cast, overload

from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.server.parsers.events import ToolCall
from quire.server.text.output_processor import AnswerEnd, TextDelta
from quire.server.text.tokenizer import Tokenizer


class Logprob(NamedTuple):
    """The log-probability of one token at one position."""

    logprob: float
    """The natural logarithm of the probability."""
    rank: int | None
    """1 for the most likely token, and so on; None for tokens of `logprob_token_ids`."""
    decoded_token: str
    """The text of the token."""


P = TypeVar("P", bound=dict[int, Logprob] | None)


class FlatLogprobs(Sequence[P]):
    """The log-probabilities of all positions of a text, in a few flat columns (`flat_logprobs` of
    `SamplingParams`).

    It reads like the list of dicts that it replaces: each position is made when it is read. Position `i` has the rows
    from `start_indices[i]` to `end_indices[i]` of the other columns.
    """

    def __init__(self, positions: Iterable[P] = ()) -> None:
        self.start_indices = array("q")
        self.end_indices = array("q")
        self.token_ids = array("q")
        self.logprobs = array("d")
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str] = []
        for position in positions:
            self.append(position)

    def append(self, position: P) -> None:
        """Append a position; None, as for the first token of a prompt, has no rows."""
        self.start_indices.append(len(self.token_ids))
        rows = cast(dict[int, Logprob] | None, position)
        for token_id, found in (rows or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(found.logprob)
            self.ranks.append(found.rank)
            self.decoded_tokens.append(found.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> P: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs[P]: ...

    def __getitem__(self, index: int | slice) -> P | FlatLogprobs[P]:
        at = range(len(self))[index]
        return self._position(at) if isinstance(at, int) else FlatLogprobs(map(self._position, at))

    def _position(self, at: int) -> P:
        rows = range(self.start_indices[at], self.end_indices[at])
        found = {
            self.token_ids[row]: Logprob(self.logprobs[row], self.ranks[row], self.decoded_tokens[row]) for row in rows
        }
        return cast(P, found or None)


@dataclass
class RequestStateStats:
    """The times of a request. Times named `…_ts` are seconds of `time.monotonic`; 0: not yet known."""

    arrival_time: float
    """The time of its arrival, as of `time.time`."""
    queued_ts: float
    """When it was sent to the engine."""
    scheduled_ts: float = 0.0
    """When it was first scheduled; known at its end."""
    first_token_ts: float = 0.0
    """When its first output arrived."""
    last_token_ts: float = 0.0
    """When its last output arrived."""
    first_token_latency: float = 0.0
    """Seconds from its arrival to its first output."""
    num_generation_tokens: int = 0
    """Output tokens of all sequences so far."""


@dataclass
class CompletionOutput:
    """One of the `n` sequences generated for a prompt."""

    index: int
    """The number of the sequence, from 0 to `n` - 1."""
    text: str = ""
    """The whole output so far; without the stop string that ended it, unless `include_stop_str_in_output`."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens of the output so far."""
    cumulative_logprob: float | None = None
    """The sum of the log-probabilities of the output's tokens. None unless `logprobs` are requested."""
    logprobs: list[dict[int, Logprob]] | FlatLogprobs[dict[int, Logprob]] | None = None
    """For each of `token_ids`: the sampled token and the most likely ones, by token id. None unless requested."""
    finish_reason: AnswerEnd | None = None
    """Why the sequence ended; None while it is running."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the sequence; None for the end-of-sequence token."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls of the tools given to `chat`, once the sequence is finished."""

    def finished(self) -> bool:
        """Return whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its output."""

    request_id: str
    """The id given to the request, or a random one."""
    prompt: str | None
    """The prompt's text; None if the request contained token ids or messages."""
    prompt_token_ids: list[int]
    """The tokens of the prompt, with special tokens and the chat template."""
    outputs: list[CompletionOutput]
    """The `n` sequences."""
    finished: bool
    """Whether all sequences have ended."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, or loaded into it."""
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs[dict[int, Logprob] | None] | None = None
    """If requested: None for the first token of the prompt; then that token and the most likely ones, by token id."""
    metrics: RequestStateStats | None = None
    """The times of the request."""
    num_loaded_tokens: tuple[int, int, int] = (0, 0, 0)
    """Of `num_cached_tokens`: those whose KV came from the host's memory, from its disk, and from other hosts."""


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`."""

    beam_width: int
    """Number of sequences that are kept after each token, and returned."""
    max_tokens: int
    """Maximum output tokens."""
    ignore_eos: bool = False
    """Continue after the model's end of sequence."""
    temperature: float = 0.0
    """vLLM's; has no effect, as sequences are compared by the model's own log-probabilities."""
    length_penalty: float = 1.0
    """The score of a sequence is the sum of its tokens' log-probabilities over its length to this power, where the
    length includes the prompt.
    """
    include_stop_str_in_output: bool = False
    """Include the end of sequence in the text."""


@dataclass
class BeamSearchSequence:
    """A sequence that beam search has found."""

    tokens: list[int]
    """Tokens of prompt and output."""
    logprobs: list[dict[int, Logprob]]
    """For each token of the output: that token and the most likely ones, by token id."""
    cum_logprob: float
    """The sum of the log-probabilities of the output's tokens."""
    text: str
    """The output."""
    finish_reason: AnswerEnd | None
    """Why the sequence ended."""


@dataclass
class BeamSearchOutput:
    """The result of a beam search for a prompt."""

    sequences: list[BeamSearchSequence]
    """The `beam_width` best sequences, best first."""


@dataclass
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]
    """`[dimensions]`: the vector."""

    @property
    def hidden_size(self) -> int:
        """The number of dimensions."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The class of a prompt."""

    probs: list[float]
    """`[classes]`: the probability of each label, or its logit."""

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The score of a pair of texts."""

    score: float
    """The probability or logit of a cross-encoder, or the similarity of two vectors."""


@dataclass
class PoolingOutput:
    """The pooled output of a prompt."""

    data: list[float] | list[list[float]]
    """`[dimensions]`: a vector; `[tokens, dimensions]`: the vectors of its tokens; or `[classes]`: the probability of
    each label.
    """


T = TypeVar("T")


@dataclass
class PoolingRequestOutput(Generic[T]):
    """A prompt and its result, which is of the type `T`."""

    request_id: str
    """The id given to the request, or a random one."""
    prompt: str | None
    """The prompt's text; None if the request contained token ids or a pair of texts."""
    prompt_token_ids: list[int]
    """The tokens of the prompt, with special tokens."""
    outputs: T
    """The result."""
    finished: bool = True
    """Always true: there are no partial results."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A prompt and its embedding."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A prompt and the probability of each label."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A pair of texts and its score. `prompt_token_ids` has both texts."""


def completion(
    tokenizer: Tokenizer,
    sequence: TextDelta,
    tool_calls: list[ToolCall],
    *,
    is_ranked: bool,
    is_flat: bool = False,
    total_logprob: float | None = None,
) -> CompletionOutput:
    """Convert a sequence, or a piece of one, to the Python API's format; returns a copy.

    `is_ranked`: the other tokens are the most likely ones. `is_flat`: return `FlatLogprobs`. `total_logprob` is that of
    the whole sequence so far.
    """
    logprobs: list[dict[int, Logprob]] | FlatLogprobs[dict[int, Logprob]] | None = None
    if sequence.logprobs is not None:
        pairs = zip(sequence.token_ids, sequence.logprobs, strict=True)
        positions = (_by_token(tokenizer, sampled, at, is_ranked=is_ranked) for sampled, at in pairs)
        logprobs = FlatLogprobs(positions) if is_flat else list(positions)
    return CompletionOutput(
        index=sequence.index,
        text=sequence.text,
        token_ids=list(sequence.token_ids),
        cumulative_logprob=total_logprob,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        tool_calls=tool_calls,
    )


def beam_search_sequence(prompt: list[int], output: CompletionOutput) -> BeamSearchSequence:
    """Convert a sequence of beam search."""
    assert isinstance(output.logprobs, list)
    total = output.cumulative_logprob or 0.0
    return BeamSearchSequence(prompt + output.token_ids, output.logprobs, total, output.text, output.finish_reason)


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: PromptLogprobs, num_top: int | None = None
) -> list[dict[int, Logprob] | None]:
    """Convert a prompt's log-probabilities to the Python API's format, with `num_top` top tokens (None: all)."""
    rows = scores.rows()
    for at in rows:
        at.top_ids, at.top_logprobs = at.top_ids[:num_top], at.top_logprobs[:num_top]
    return [None, *(_by_token(tokenizer, token, at) for token, at in zip(prompt[1:], rows, strict=True))]


def _by_token(tokenizer: Tokenizer, token_id: int, at: TokenLogprobs, *, is_ranked: bool = True) -> dict[int, Logprob]:
    """The most likely tokens of a position, and the actual token."""
    ranks = range(1, len(at.top_ids) + 1) if is_ranked else itertools.repeat(None, len(at.top_ids))
    others = zip(at.top_ids, at.top_logprobs, ranks, strict=True)
    return {
        token: Logprob(logprob, rank, tokenizer.token_text(token))
        for token, logprob, rank in (*others, (token_id, at.logprob, at.rank))
    }
