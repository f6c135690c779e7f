"""Inputs and results of the input processor: requests in a form that all APIs and the Python API share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.engine.config.pooling import Pooling
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.server.media.types import MediaSource
from quire.server.parsers.output_parser import OutputFormat
from quire.server.text.adapter import RequestAdapter
from quire.server.text.conversation import CHAT_NAMES, ChatTemplateOptions, Message, ParamNames
from quire.server.text.media_input import MediaLease
from quire.server.text.tools import ToolUse

Prompt = str | list[int]
"""Text, or token ids that are used unchanged."""


@dataclass(frozen=True, kw_only=True)
class MarkedPrompt:
    """A prompt that has the model's placeholder for each of these images and videos."""

    prompt: Prompt
    media: Sequence[MediaSource]


@dataclass(frozen=True, kw_only=True)
class ContentParts:
    """An input of a pooling model that has parts, like the content of a message."""

    parts: Sequence[Mapping[str, Any]]
    """Texts, and `{"type": "image"}` or `video` for each of `media`."""
    media: Sequence[MediaSource] = ()

    @property
    def text(self) -> str:
        """The texts, joined by line breaks."""
        return "\n".join(part["text"] for part in self.parts if part["type"] == "text")


TruncationSide = Literal["left", "right"]
"""The side that truncation removes."""
Task = Literal["generate", "embed", "token_embed", "classify", "score", "pool"]
"""The kind of result that a request asks for: text, vectors, vectors of each token, classes, scores of pairs, or any
pooled output."""


class ContextLengthExceeded(InvalidParameter):
    """Prompt and output exceed the model's maximum length."""

    code = "context_length_exceeded"


def tasks_of(pooling: Pooling | None) -> frozenset[Task]:
    """Return the tasks that a model with this pooling supports."""
    if pooling is None:
        return frozenset({"generate"})
    if pooling.classes is None:
        return frozenset({"token_embed" if pooling.is_multi_vector else "embed", "score", "pool"})
    return frozenset({"classify", "score", "pool"} if len(pooling.classes.labels) == 1 else {"classify", "pool"})


def refusal(pooling: Pooling | None, task: Task) -> InvalidParameter:
    """Return the error for a task that the model does not support; it names the supported task."""
    wanted = _WANTED[task]
    if pooling is None:
        remedy = "use a model with a classification head (…ForSequenceClassification)"
        if task != "classify":
            remedy = "use an embedding model, or start the server with --runner pooling"
        return InvalidParameter(f"this model generates text and does not {wanted}; {remedy}", "model")
    if pooling.is_multi_vector:
        can, use = "computes a vector of each token", "/pooling (in Python: LLM.encode), or /score for pairs"
    elif pooling.classes is None:
        can = "computes embeddings"
        use = "/v1/embeddings (in Python: LLM.embed)" + ", or /score for pairs of texts" * (task == "classify")
    else:
        can, use = "is a classifier", "/classify (in Python: LLM.classify)"
        if task == "score":
            can += f" with {len(pooling.classes.labels)} labels, and scores need one,"
        elif "score" in tasks_of(pooling):
            use += ", or /score and /rerank for pairs of texts"
    return InvalidParameter(f"this model {can} and does not {wanted}; use {use}", "model")


_WANTED: Mapping[Task, str] = {
    "generate": "generate text",
    "embed": "support embeddings",
    "token_embed": "support embeddings of tokens",
    "classify": "classify",
    "score": "score pairs of texts",
    "pool": "pool",
}


@dataclass(frozen=True, kw_only=True)
class ChatInput:
    """A conversation to answer. All chat APIs convert their requests to this."""

    messages: Sequence[Message]
    """Parts of their contents whose type is `image` or `video` are the items of `media`, in order."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools as the request has them, for the chat template."""
    tool_use: ToolUse | None = None
    """The tools that the model may or must call; None: it may call none."""
    template: ChatTemplateOptions = field(default_factory=ChatTemplateOptions)
    shows_reasoning: bool = True
    thinking_budget: int | None = None
    """Maximum number of tokens of reasoning."""
    media: Sequence[MediaSource] = ()
    """The images and videos, in the order of the messages' parts."""
    token_ids: Sequence[int] | None = None
    """The prompt, if another server has rendered and tokenized the messages. Media are processed in any case."""


PooledInput = Prompt | MarkedPrompt | ContentParts | ChatInput
"""An input of a pooling model. Content is rendered as a message of the user."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of a generation request besides its prompt and its sampling parameters."""

    truncate_prompt_tokens: int | None = None
    """Number of tokens to keep of the prompt; -1: as many as the model's length and the output allow."""
    truncation_side: TruncationSide = "left"
    priority: int = 0
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests that have the same salt."""
    length_penalty: float | None = None
    """The width of beam search; None: sample."""
    kv_peer: str | None = None
    """See `GenerationInput`."""
    reject_long_output: bool = True
    """Reject a request whose output may exceed the model's length. Otherwise the output ends there."""
    param_names: ParamNames = CHAT_NAMES


@dataclass(frozen=True, kw_only=True)
class GenerationInput:
    """A validated request, as `Frontend.generate` takes it."""

    prompts: Sequence[list[int]]
    """Token ids of each prompt."""
    params: SamplingParams
    is_chat: bool = False
    """Whether the prompt is a conversation."""
    output_format: OutputFormat | None = None
    """The format of the generated text; None: it is plain text."""
    echo: str = ""
    """Text to put before a chat's answer."""
    custom_tools: frozenset[str] = frozenset()
    """The functions that a chat's client knows as custom tools."""
    length_penalty: float | None = None
    """Find the `n` sequences by beam search with this length penalty; None: by sampling."""
    priority: int = 0
    cache_salt: str | None = None
    kv_peer: str | None = None
    """Another server has computed the prompt, or continues: the address of its KV store, empty if that is not known.
    None: no other server has to do with it."""
    media: Sequence[Sequence[MediaItem]] = ()
    """The images and videos of each prompt; empty: there are none."""
    media_lease: MediaLease | None = None
    """Keeps their data until the last sequence has ended."""
    adapter: RequestAdapter | None = None
    """None: the base model answers."""
    adapter_starts: Sequence[int | None] = ()
    """What `RequestAdapter.start` has returned for each prompt; empty: it is not known yet."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """A request's options for rendering embedding inputs."""

    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens; None: to texts, but not to conversations and content."""
    truncate: int | None = None
    """Number of tokens to keep of a longer input; -1: the model's maximum length; None: longer inputs are rejected."""
    truncation_side: TruncationSide = "right"
    prompt_name: str | None = None
    """Name of the model's prompt to put before a text; None: its default."""
    max_document_tokens: int | None = None
    """Number of tokens to keep of the second text of a pair."""

    @property
    def adds_special_tokens(self) -> bool:
        """Whether texts get special tokens."""
        return self.add_special_tokens is not False


@dataclass(frozen=True, kw_only=True)
class PoolingInput:
    """Validated inputs of a pooling model, as `Frontend.embed` takes them."""

    prompts: Sequence[list[int]]
    """Token ids: to score with a classifier, of a pair; otherwise of a single input."""
    second_segments: Sequence[int] = ()
    """See `EngineCoreRequest.second_segment`."""
    compared: Sequence[tuple[int, int]] | None = None
    """To score with an embedding model: the prompts whose vectors are compared, by index."""
    media: Sequence[Sequence[MediaItem]] = ()
    """See `GenerationInput`."""
    media_lease: MediaLease | None = None
    """See `GenerationInput`."""
    adapter: RequestAdapter | None = None
    """See `GenerationInput`."""
    adapter_starts: Sequence[int | None] = ()
    """See `GenerationInput`."""


@dataclass(frozen=True, kw_only=True)
class Processed:
    """A request that another process has processed, except for the parts that the first process caches."""

    value: Any
    """The result of processing the request."""
    unresolved: Sequence[tuple[StructuredOutputs, str]]
    """The structured outputs in `value`, not compiled yet, with the names of their parameters."""
    ignored: Collection[str]
    """The request's fields that have no effect."""
    leases: Sequence[MediaLease] = ()
    """The leases in `value`, which the first process must adopt."""
    own_template: str = ""
    """`OWN_TEMPLATE` where it was processed."""
