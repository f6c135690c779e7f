"""A model's output as the blocks of newer APIs: reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.engine.protocol.logprobs import TokenLogprobs
from quire.server.parsers.events import ToolCall
from quire.server.serving.generation import Generation
from quire.server.text.output_processor import AnswerEnd, TextDelta

ScoredToken = tuple[int, TokenLogprobs]
"""A token id and its log-probabilities."""


@dataclass
class ContentBlock:
    """A part of an answer. For a call, `text` is its JSON arguments. Its index is its position among the blocks."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[ScoredToken] = field(default_factory=list)
    """The log-probabilities of text, if requested."""


@dataclass(frozen=True)
class BlockOpened:
    """The start of a block."""

    block: ContentBlock


@dataclass(frozen=True)
class BlockDelta:
    """More text of a block."""

    block: ContentBlock
    text: str
    logprobs: Sequence[ScoredToken] = ()


@dataclass(frozen=True)
class BlockClosed:
    """The end of a block, which may be incomplete."""

    block: ContentBlock


BlockEvent = BlockOpened | BlockDelta | BlockClosed


class ContentBlocks:
    """Collects the blocks and token counts of one answer: call `feed` with its deltas, then `close`."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self.finish_reason: AnswerEnd | None = None
        self.stop_string: str | None = None
        """The stop string that ended the answer."""
        self.num_tokens = 0
        self.num_cached_tokens = 0
        """Cached tokens of the prompt."""
        self.num_loaded_tokens = (0, 0, 0)
        """Those of them that came from the host's memory, and from its disk."""
        self._num_before_words = 0
        self._open: ContentBlock | None = None
        self._scored: list[ScoredToken] = []
        """The tokens of text that is not complete yet."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens, including markers: all tokens up to the first other text."""
        return self._num_before_words if any(block.kind == "reasoning" for block in self.blocks) else 0

    def feed(self, deltas: Sequence[TextDelta]) -> Iterator[BlockEvent]:
        """Yield the events of these deltas."""
        for delta in deltas:
            self._count(delta)
            calls = delta.tool_calls
            if calls and calls[0].id is None:  # continues the open call, before anything else
                yield from self._grow("call", calls[0].arguments)
                calls = calls[1:]
            yield from self._grow("reasoning", delta.reasoning)
            yield from self._grow("text", delta.text)
            for call in calls:
                yield from self._begin_call(call)
            if calls:
                self._scored = []

    async def collect(self, generation: Generation) -> None:
        """Read a whole answer."""
        async for deltas in generation:
            for _ in self.feed(deltas):
                pass

    def close(self) -> Iterator[BlockEvent]:
        """Yield the events at the end of the answer."""
        if self._open is not None:
            yield BlockClosed(self._open)
            self._open = None

    def _count(self, delta: TextDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.num_loaded_tokens = max(self.num_loaded_tokens, delta.num_loaded_tokens)
        self._num_before_words += delta.num_tokens_before_words
        if delta.logprobs is not None:
            self._scored += [*zip(delta.token_ids, delta.logprobs, strict=True)][delta.num_tokens_before_words :]
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_string = delta.stop_reason if isinstance(delta.stop_reason, str) else None
            if delta.finish_reason in ("stop", "tool_calls") and self.stop_string is None:
                self._scored = self._scored[:-1]  # the token that ended the answer has no text

    def _grow(self, kind: Literal["reasoning", "text", "call"], text: str) -> Iterator[BlockEvent]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._begin(ContentBlock(kind, len(self.blocks)))
        block = self.blocks[-1]
        block.text += text
        scored: list[ScoredToken] = []
        if kind == "text":
            scored, self._scored = self._scored, []
            block.logprobs += scored
        yield BlockDelta(block, text, scored)

    def _begin_call(self, call: ToolCall) -> Iterator[BlockEvent]:
        yield from self._begin(ContentBlock("call", len(self.blocks), call_id=call.id or "", name=call.name or ""))
        yield from self._grow("call", call.arguments)

    def _begin(self, block: ContentBlock) -> Iterator[BlockEvent]:
        yield from self.close()
        self._open = block
        self.blocks.append(block)
        yield BlockOpened(block)
